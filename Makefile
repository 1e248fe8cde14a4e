# Everything runs in one environment, made by the first target that needs it and again when the pins change: .venv,
# which trains with Composer, or with STACK=newest .venv-newest, with the newest libraries and without Composer.
STACK ?= composer
comma := ,
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Commands that exist but do not run, as pyenv's, are passed over.
NEWEST_PYTHONS := python3.13 python3.12 $(foreach minor,3.13 3.12,$(wildcard $(HOME)/.pyenv/versions/$(minor).*/bin/python))
PYTHON_NEWEST ?= $(firstword $(foreach python,$(NEWEST_PYTHONS),$(shell $(python) -c '' 2>/dev/null && echo $(python))))
VENV := $(if $(filter composer,$(STACK)),.venv,$(if $(filter newest,$(STACK)),.venv-newest,\
	$(error STACK is $(STACK); allowed: composer, newest)))
BIN := $(VENV)/bin
# The Python that has torch for the GPU at hand, which needs none of these environments.
PYTHON_GPU ?= python3
# Without g++, C++ programs of code tasks are compiled by a Python package.
CPP_EXTRA ?= $(if $(shell command -v g++),,$(comma)cpp)
READY := $(VENV)/.ready
REFERENCE := .venv-reference
REFERENCE_READY := $(REFERENCE)/.ready
PARTS = $(foreach part,$(PART),$(or $(wildcard tests/$(part) tests/test_$(part)*.py),\
	$(error no tests/$(part) and no tests/test_$(part)*.py)))
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 20

.PHONY: help demo test test-all test-long lint docs mutants bench gpu real reference composer-newest clean

help:
	@echo 'make demo       train a tiny model on two ranks, evaluated by the gauntlet at every checkpoint'
	@echo 'make test       run the fast tests, below two minutes; PART="engine data" those of folders;'
	@echo '                STACK=newest with the newest libraries, without Composer; also of test-all and test-long'
	@echo 'make test-all   run the others: models, servers, programs, ranks; CI runs both. PART as for test'
	@echo 'make test-long  run those that take minutes each'
	@echo 'make lint       style, types and the direction of imports'
	@echo 'make docs       the documentation as a site, in site/; REPOSITORY_URL for its link'
	@echo 'make mutants    put faults into a copy of the code, one by one, and show which test notices each'
	@echo 'make bench      time our evaluation, llm-foundry and lm-eval side by side; QUICK=1 in about ten minutes,'
	@echo '                PART=generation generation tasks, PART=programs code tasks,'
	@echo '                PART=families nine model families, PART=mpt that of llm-foundry,'
	@echo '                PART=hybrids hybrids and other models of today, with the newest libraries,'
	@echo '                PART=lm-eval its own tasks with its backend and with ours (STACK=newest too),'
	@echo '                PART=score the variants of SCORE in one evaluation and alone, and against lm-eval'
	@echo 'make gpu        check one GPU, at most ten minutes for each part, QUICK=1 in five minutes for all; PART="..."'
	@echo '                with the Python that has torch, PYTHON_GPU=python3, and WHEELS=folder of what it lacks'
	@echo 'make real       evaluate two real models of 135M and 268M parameters, and compare with lm-eval, llm-foundry'
	@echo '                and published scores: docs/validation.md. PART=agreement, published or gauntlet;'
	@echo '                AGAIN=1 what has run already; the comparison is made after make reference'
	@echo 'make reference  the environment with llm-foundry and lm-eval that bench, real and the recorder use'
	@echo 'make composer-newest  Composer with the newest libraries, in .venv-composer-newest, for a test of test-long'
	@echo 'make clean      remove the environments, runs, site and what was built'

# uv installs in a fifth of pip's time, but does not read pip's settings, such as a mirror; where it fails pip installs.
define install
	test -x $(1)/bin/python || $(or $(4),$(PYTHON)) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(3) $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) \
		|| $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
endef

.venv/.ready: pyproject.toml requirements/composer.txt
	$(call install,.venv,-c requirements/composer.txt -e '.[dev$(CPP_EXTRA)]',UV_COMPILE_BYTECODE=1)
	touch $@

.venv-newest/.ready: pyproject.toml requirements/newest.txt
	@test -n "$(PYTHON_NEWEST)" || { echo 'STACK=newest needs Python 3.12 or 3.13: PYTHON_NEWEST=/path/to/python'; exit 2; }
	$(call install,.venv-newest,-c requirements/newest.txt -e '.[test$(CPP_EXTRA)]',UV_COMPILE_BYTECODE=1,$(PYTHON_NEWEST))
	touch $@

demo: .venv/.ready
	.venv/bin/python scripts/make_demo_data.py
	rm -rf runs/demo/checkpoints runs/demo/gauntlet
	.venv/bin/composer -n 2 scripts/train.py yamls/train/demo.yaml

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
	$(call install,$(REFERENCE),--no-deps -r requirements/reference.txt -e .,UV_COMPILE_BYTECODE=1)
	touch $@

reference: $(REFERENCE_READY)

composer-newest: pyproject.toml requirements/overrides.txt
	$(call install,.venv-composer-newest,--overrides requirements/overrides.txt -e '.[composer]',,$(PYTHON_NEWEST))

# Code tasks need no other evaluation, and lm-eval's tasks none but lm-eval; hybrids need the newest libraries.
ENVIRONMENT_OF_BENCH_programs := $(READY)
ENVIRONMENT_OF_BENCH_lm-eval := $(READY)
ENVIRONMENT_OF_BENCH_hybrids := .venv-newest/.ready
bench: $(or $(ENVIRONMENT_OF_BENCH_$(PART)),$(READY) $(REFERENCE_READY))
	$(dir $<)bin/python scripts/bench/$(if $(filter programs,$(PART)),program_speed.py,run.py $(PART)) $(if $(QUICK),--quick)

gpu:
	$(PYTHON_GPU) scripts/gpu.py $(if $(QUICK),--quick) $(if $(PART),--part $(PART)) \
		$(if $(WHEELS),--wheels $(WHEELS)) $(if $(DATA_ROOT),--data-root $(DATA_ROOT))

real: $(READY)
	$(BIN)/python scripts/real_weights/real.py $(if $(PART),--part $(PART)) $(if $(AGAIN),--again)

clean:
	rm -rf .venv .venv-newest .venv-composer-newest $(REFERENCE) .cache/real_weights runs build site *.egg-info
