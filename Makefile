# Each target installs what it needs into .venv first, with the pins of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help run test check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

run: $(VENV)/.user ## install, then train on the embedded demo (about a minute and a half on 2 cores, offline)
	$(BIN)/mezo train task=sst2 objective=mlm experiment=demo

test: check ## install, check, then run every test
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.dev ## install, then ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev ## install, then time the step against the reference's and against bare forwards
	$(BIN)/python scripts/bench_step.py

clean: ## remove the virtual environment
	rm -rf $(VENV)

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@ $(VENV)/.user
