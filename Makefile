# Hearth. `make` alone lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
ON = $(or $(HOST),$(error say which host: make $@ HOST=gpu1))

.PHONY: help setup demo test test-unit test-engine test-image test-host test-monitoring test-gpu image lint format lock \
	bench-supervisor bench-scrapes clean deploy plan rollback releases status logs doctor restart remove

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z -]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with everything that Hearth and its tools need
	@tools/setup.sh

demo: setup ## A real SGLang server on CPU: its piecewise plan breaks, Hearth brings it back, it answers
	@$(PY) demo/demo.py

test: setup ## Every test that needs no GPU: a real engine, Docker Engine, systemd host, Prometheus (as root)
	@tools/setup.sh --test-tools
	@$(PY) -m pytest -m "not gpu" --numprocesses logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder

test-unit: setup ## The tests that need no engine (about two minutes)
	@tools/setup.sh --test-tools
	@$(PY) -m pytest tests/unit

test-engine: setup ## The tests that drive a real SGLang server
	@$(PY) -m pytest tests/engine

test-image: setup ## Build the cpu image with a real Docker Engine and try every check on it
	@$(PY) -m pytest -m image tests/image

test-host: setup ## Deploy to a real systemd host made here, over SSH (as root)
	@$(PY) -m pytest -m host tests/host tests/launch tests/monitoring

test-monitoring: setup ## A real Prometheus and Alertmanager against a real engine
	@$(PY) -m pytest -m monitoring tests/monitoring

test-gpu: setup ## Real kernels, graphs and a real engine, on a machine with a CUDA GPU
	@$(PY) -m pytest -m gpu tests/gpu

image: setup ## Build and check an image: make image IMAGE=glm5-nvfp4-sm120 [IMAGE_ARGS="--base debian:12-slim"]
	@$(VENV)/bin/hearth image build $(or $(IMAGE),$(error say which: make image IMAGE=glm5-nvfp4-sm120)) $(IMAGE_ARGS)

deploy: setup ## A bare host becomes an endpoint: make deploy HOST=gpu1 [ARGS="--config hearth.yaml"]
	@$(VENV)/bin/hearth deploy $(ON) $(ARGS)

plan: setup ## What a deploy would change, without changing it: make plan HOST=gpu1
	@$(VENV)/bin/hearth deploy $(ON) --check $(ARGS)

rollback: setup ## Back to the release before: make rollback HOST=gpu1
	@$(VENV)/bin/hearth rollback $(ON) $(ARGS)

releases: setup ## The releases that a host keeps: make releases HOST=gpu1
	@$(VENV)/bin/hearth releases $(ON) $(ARGS)

status logs doctor restart remove: setup ## Day two, each with HOST=gpu1 (remove: PURGE=1 takes weights and state too)
	@$(VENV)/bin/hearth host $@ $(ON) $(if $(filter 1,$(PURGE)),--purge) $(ARGS)

lint: setup ## Style, types, layers, YAML, shell
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/yamllint --strict .
	@git ls-files -z '*.sh' .ci/run | xargs -0 $(VENV)/bin/shellcheck
	@$(VENV)/bin/hadolint --config .hadolint.yaml docker/Dockerfile
	@if [ -d ansible ]; then cd ansible && ../$(VENV)/bin/ansible-lint --offline --profile production; fi

format: setup ## Let ruff put the Python files in order
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

lock: setup ## Pin every requirement again, with hashes; an image's alone: make lock IMAGE=glm5-nvfp4-sm120
	@$(if $(IMAGE),$(VENV)/bin/hearth image lock $(IMAGE),tools/lock.sh)

bench-scrapes: setup ## What being scraped costs, on a real engine
	@$(PY) tests/bench/scrapes.py

bench-supervisor: setup ## Recovery time, log throughput, idle cost, beside plain restart loops
	@$(PY) tests/bench/supervisor.py
	@$(PY) tests/bench/logstream.py

clean: ## Remove what setup and tests made in this folder
	rm -rf $(VENV) .run build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
