#!/usr/bin/env bash
# Makes .venv from the hash-locked requirements; again only when they changed.
# --test-tools adds what the tests drive from outside Python: a browser.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
  say "$1"
  say "fix: $2"
  exit 1
}

# Installs Debian packages where that is possible without asking anybody.
apt_install() {
  command -v apt-get >/dev/null || return 1
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || return 1
    sudo=(sudo -n)
  fi
  say "installing $* with apt-get"
  "${sudo[@]}" apt-get update -qq &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer ($(python3 --version 2>&1 || echo 'no python3 at all'))" \
    "apt-get install python3 python3-venv (Debian 12, Ubuntu 24.04 or newer)"
}

make_venv() {
  local python=$1
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv ||
    fail "$python has no venv module" "sudo apt-get install python3-venv"
  "$python" -m venv .venv
}

# Unbuffered: its lines are the progress that a person sees.
pip_install() {
  .venv/bin/python -u -m pip install --disable-pip-version-check --no-input "$@"
}

pip_failed() {
  fail "pip couldn't install the packages; its reason is above" \
    "check the network and pip's index (.venv/bin/python -m pip config list), then run make again"
}

test_tools() {
  command -v g++ >/dev/null || apt_install g++ ||
    say "no g++: the tests that compile a kernel will fail (apt-get install g++)"
  .venv/bin/python -c 'import pathlib, sysconfig as s; exit(not pathlib.Path(s.get_path("include"), "Python.h").is_file())' ||
    apt_install python3-dev ||
    say "no Python.h: the test of an engine that compiles will fail (apt-get install python3-dev)"
  command -v chromium >/dev/null || apt_install chromium ||
    say "no chromium: the tests of the status page in a browser will be skipped (apt-get install chromium)"
}

if [ "${1:-}" = --test-tools ]; then
  test_tools
  exit
fi

stamp=$(cat requirements/dev.lock pyproject.toml | sha256sum | cut -d' ' -f1)
[ "$(cat .venv/hearth-stamp 2>/dev/null)" = "$stamp" ] && exit

python=$(find_python)
.venv/bin/python -c 'import pip' 2>/dev/null || make_venv "$python"
say "installing $(grep -c '^[a-zA-Z0-9].*==' requirements/dev.lock) packages into .venv (under a minute)"
# sed, unlike grep, doesn't fail where every package is there already and pip has nothing to say.
pip_install --require-hashes -r requirements/dev.lock |
  sed -unE '/^(Collecting|Installing|Successfully)/{s/^(.{110}).*/\1.../;p}' >&2 || pip_failed
pip_install --quiet --no-deps --no-build-isolation -e . || pip_failed
printf '%s' "$stamp" >.venv/hearth-stamp
say "done: .venv/bin/hearth --help"
