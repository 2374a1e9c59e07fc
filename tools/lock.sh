#!/usr/bin/env bash
# Pins every requirement again, with hashes. No registry is named in what it writes.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  .venv/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --quiet --upgrade \
    --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' "$@"
}

compile pyproject.toml --extra fetch -o requirements/hearth.lock
compile pyproject.toml --all-extras --group dev --group monitoring -o requirements/dev.lock
