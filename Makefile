# Everything runs in one environment, .venv, made by the first target that needs it and again when the pins change.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REFERENCE := .venv-reference
REFERENCE_READY := $(REFERENCE)/.ready
PARTS = $(if $(PART),$(or $(wildcard tests/$(PART) tests/test_$(PART)*.py),\
	$(error no tests/$(PART) and no tests/test_$(PART)*.py)))
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 20

.PHONY: help demo test test-all test-long lint docs mutants bench gpu reference clean

help:
	@echo 'make demo       train a tiny model on two ranks, evaluated by the gauntlet at every checkpoint'
	@echo 'make test       run the fast tests, below two minutes; PART=engine those of tests/engine/'
	@echo 'make test-all   run the others: models, servers, programs, ranks; CI runs both. PART as for test'
	@echo 'make test-long  run those that take minutes each'
	@echo 'make lint       style, types and the direction of imports'
	@echo 'make docs       the documentation as a site, in site/; REPOSITORY_URL for its link'
	@echo 'make mutants    put faults into a copy of the code, one by one, and show which test notices each'
	@echo 'make bench      time our evaluation, llm-foundry and lm-eval side by side; QUICK=1 in about ten minutes,'
	@echo '                PART=generation generation tasks, PART=programs code tasks,'
	@echo '                PART=families nine model families, PART=mpt that of llm-foundry,'
	@echo '                PART=score the variants of SCORE in one evaluation and alone, and against lm-eval'
	@echo 'make gpu        check one GPU in about 15 minutes, QUICK=1 in 5: numbers, FSDP, speed, memory; lm-eval'
	@echo '                is timed too after make reference'
	@echo 'make reference  the environment with llm-foundry and lm-eval that bench and the recorder use'
	@echo 'make clean      remove the environments, runs, site and what was built'

# uv installs in a fifth of pip's time, but does not read pip's settings, such as a mirror; where it fails pip installs.
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(3) $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) \
		|| $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
endef

$(READY): pyproject.toml requirements/constraints.txt
	$(call install,$(VENV),-c requirements/constraints.txt -e '.[dev]',UV_COMPILE_BYTECODE=1)
	touch $@

demo: $(READY)
	$(BIN)/python scripts/make_demo_data.py
	rm -rf runs/demo/checkpoints runs/demo/gauntlet
	$(BIN)/composer -n 2 scripts/train.py yamls/train/demo.yaml

test: $(READY)
	$(PYTEST) -m 'not slow' $(PARTS)

test-all: $(READY)
	$(PYTEST) -m 'slow and not long' $(PARTS)

test-long: $(READY)
	$(PYTEST) -m long $(PARTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(READY)
	SITE_VERSION="Version $$($(BIN)/gauntlet --version)" $(BIN)/zensical build --strict

mutants: $(READY)
	$(BIN)/python scripts/mutants.py

$(REFERENCE_READY): pyproject.toml requirements/reference.txt
	$(call install,$(REFERENCE),-r requirements/reference.txt,UV_COMPILE_BYTECODE=1)
	$(call install,$(REFERENCE),--no-deps -e .)
	touch $@

reference: $(REFERENCE_READY)

bench: $(READY) $(if $(filter programs,$(PART)),,$(REFERENCE_READY))
	$(BIN)/python scripts/bench/$(if $(filter programs,$(PART)),programs.py,run.py $(PART)) $(if $(QUICK),--quick)

gpu: $(READY)
	$(BIN)/python scripts/gpu.py $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) $(REFERENCE) runs build site *.egg-info
