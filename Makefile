# Hearth. `make` alone lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help setup demo test test-unit test-engine test-image image lint format lock bench-supervisor clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything that Hearth and its tools need
	@tools/setup.sh

demo: setup ## A real SGLang server on CPU: its piecewise plan breaks, Hearth brings it back, it answers
	@$(PY) demo/demo.py

test: setup ## All tests, with a real SGLang server on CPU (about 20 minutes on 2 cores)
	@tools/setup.sh --test-tools
	@$(PY) -m pytest -m "not image and not gpu"

test-unit: setup ## The tests that need no engine (about two minutes)
	@tools/setup.sh --test-tools
	@$(PY) -m pytest tests/unit

test-engine: setup ## The tests that drive a real SGLang server
	@$(PY) -m pytest tests/engine

test-image: setup ## Build the cpu image with a real Docker Engine and try every check on it
	@$(PY) -m pytest -m image tests/image

image: setup ## Build and check an image: make image IMAGE=glm5-nvfp4-sm120
	@$(VENV)/bin/hearth image build $(IMAGE)

lint: setup ## Style, types, layers, YAML, shell
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/yamllint --strict .
	@git ls-files -z '*.sh' .ci/run | xargs -0 $(VENV)/bin/shellcheck

format: setup ## Let ruff put the Python files in order
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

lock: setup ## Pin every requirement again, with hashes
	@tools/lock.sh

bench-supervisor: setup ## Recovery time, log throughput, idle cost, beside plain restart loops
	@$(PY) tests/bench/supervisor.py
	@$(PY) tests/bench/logstream.py

clean: ## Remove what setup and tests made in this folder
	rm -rf $(VENV) .run build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
