# Every target does its own set-up on a fresh machine with Python >= 3.11; nothing is done twice.
PYTHON ?= python3
VENV ?= .venv
SEARCHR1_ASSETS ?= assets
BIN := $(VENV)/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help venv demo test slow soak assets plan

help:
	@echo "make demo    train a small policy to search, from nothing, in minutes"
	@echo "make test    the quick tests"
	@echo "make slow    every test, with real models and texts"
	@echo "make soak    kills and resumes runs at every named moment"
	@echo "make plan    compiles every config for the machine that it names; minutes"
	@echo "make assets  build those models and texts in $(SEARCHR1_ASSETS)"
	@echo "make venv    only the environment, in $(VENV)"

venv: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python requirements.txt pyproject.toml
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

$(VENV)/.installed-plan: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[plan]"
	@touch $@

plan: $(VENV)/.installed-plan
	$(BIN)/python -m benchmarks.plans

demo: $(VENV)/.installed
	$(BIN)/python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=$(DEMO)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

assets: $(SEARCHR1_ASSETS)/.built

$(SEARCHR1_ASSETS)/.built: tests/build_assets.py | $(VENV)/.installed-dev
	$(BIN)/python tests/build_assets.py $(SEARCHR1_ASSETS)
	@touch $@

slow: $(VENV)/.installed-dev $(SEARCHR1_ASSETS)/.built
	SEARCHR1_ASSETS=$(abspath $(SEARCHR1_ASSETS)) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not soak"

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 -m soak
