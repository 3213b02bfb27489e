# Two commands do all the set-up: `make quickstart` and `make test`.
# Needed before: Python >= 3.11, git, make.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
SEED ?= 0
WORKERS ?= 2
BIN := $(VENV)/bin
HARNESS_IMAGES := base,pi,claude-code,openclaw,codex,qwen-code,opencode,mini-swe-agent

.PHONY: quickstart test test-slow test-harnesses lint types format clean

quickstart: $(VENV)/.base
	$(BIN)/python launch/train.py --experiment=experiments/quickstart.py \
	  --workdir=$(RUN) --seed=$(SEED) $(ARGS)

test: lint types
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist=loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slow $(ARGS)

# Every real harness program, also those that CI leaves out. Needs a Docker engine and npm.
test-harnesses: $(VENV)/.test
	$(BIN)/python launch/images.py --images=$(HARNESS_IMAGES)
	REQUIRE_ALL=1 JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m real_harness tests/harness $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache runs

# The environments: stamp files say what was installed last.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python >= 3.11 is needed, %s found; use make PYTHON=python3.12 ..." % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $(VENV)/.base $@
