# On a machine with Python 3.11+ and git: make demo, make test (half an hour on two slow cores), make test-all (50 minutes).

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# make test TORCH=2.14.1 PYTHON=python3.13: another torch, another Python or both, in an environment of its own.
VENV := .venv$(if $(TORCH),-$(TORCH))$(if $(filter command,$(origin PYTHON)),-$(notdir $(PYTHON)))
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
BIN := $(VENV)/bin
WHEEL := build/wheel
PYTEST := $(BIN)/python -m pytest
IN_PARALLEL := -n 2 --dist loadgroup

.PHONY: demo test check test-all sweep soak bytecode conformance bench cuda ray
.PHONY: lint format types wheel-test dist docs readme examples clean

demo: $(VENV)/installed  # torch says that it has no numpy; shardc needs none
	PYTHONWARNINGS='ignore:Failed to initialize NumPy' $(BIN)/python examples/demo.py

test: $(VENV)/installed-test bytecode
	$(PYTEST) $(IN_PARALLEL)

# What every change must hold: the conformance suites, and the tests of make test but for those of a few of the suites' cases.
check: bytecode conformance
	$(PYTEST) $(IN_PARALLEL) -m "not sweep and not soak and not share"

# Everything: the conformance suites, and the tests of make test and make sweep in one run, but for those of a few of the
# suites' own cases.
test-all: bytecode conformance
	$(PYTEST) $(IN_PARALLEL) -m "not soak and not share"

# More cases of what make test holds on a few; the README's jobs of several processes.
sweep: $(VENV)/installed-test bytecode
	$(PYTEST) $(IN_PARALLEL) -m "sweep and not soak"

# Every mismatch between ranks, every way for a rank to die, every reading, flipped bits, killed saves, costs at 50 sizes:
# about 15 minutes.
soak: $(VENV)/installed-test
	$(PYTEST) -m soak

# Made once, and not in each process that a test starts.
bytecode: $(VENV)/installed-test
	$(BIN)/python -m compileall -q shardc passes runtime examples tests/support

conformance: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.conformance all

# Step time, bytes and memory beside DDP, FSDP2, DTensor and others; BENCH="--plans tensor --ranks 2" chooses rows.
bench: $(VENV)/installed
	$(BIN)/python benchmarks/bench.py $(BENCH)

# On a machine with GPUs: what only they show. One GPU is enough; with several the ranks are NCCL's.
cuda: $(VENV)/installed-test
	$(BIN)/torchrun --standalone --nproc-per-node gpu benchmarks/on_gpus.py
	$(BIN)/python benchmarks/attention_on_gpus.py
	$(BIN)/python benchmarks/saved_on_gpus.py

# The example for Ray Train, in an environment with Ray, which is a download of about 150 MB.
ray: $(VENV)/installed-ray
	$(PYTEST) -m "sweep or not sweep" tests/project/test_ray_train.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev
	$(BIN)/mypy

readme: $(VENV)/installed-test
	$(PYTEST) -m "sweep or not sweep" tests/project/test_readme.py

examples: $(VENV)/installed-test
	$(PYTEST) tests/project/test_examples.py tests/project/test_ray_train.py

# Tests of every room against the built wheel: its own environment sees $(VENV)'s packages last, the checkout not at all.
# Not test_packaging.py, which builds a wheel of its own.
WHEEL_TESTS := $(addprefix tests/,api/test_api.py capture/test_capture.py cli/test_cli.py runtime/comm/test_distributed.py \
	report/dump/test_dump.py project/test_imports.py runtime/module/test_module.py runtime/execute/test_simulator.py)
wheel-test: $(VENV)/installed-test
	rm -rf $(WHEEL) build/lib && mkdir -p $(WHEEL)  # build/lib may hold files of an older tree
	$(BIN)/python -m build --wheel --outdir $(WHEEL)
	$(BIN)/python -m venv --without-pip $(WHEEL)/venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(WHEEL)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	$(BIN)/python -m pip --python $(WHEEL)/venv/bin/python install --quiet --no-deps $(WHEEL)/*.whl
	$(WHEEL)/venv/bin/python -P -c 'import shardc; assert "$(WHEEL)" in shardc.__file__, shardc.__file__'
	PYTHONSAFEPATH=1 $(WHEEL)/venv/bin/python -m pytest $(IN_PARALLEL) -m "not slow and not sweep" $(WHEEL_TESTS)

# The guides and the reference as pages under build/site; a broken link or a docstring that cannot be read fails.
docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict  # --quiet would hide the warnings from --strict

# What would be uploaded: an sdist, and the wheel that is built from it.
dist: $(VENV)/installed-docs
	rm -rf dist build/lib
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

# The environment: made once, and again when what it is made from changes.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "shardc needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt $(VENV)/bin/python
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$@

INSTALL := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)
$(VENV)/installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e '.[test,hf]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(INSTALL) -e '.[test,hf,dev]'
	touch $@

$(VENV)/installed-ray: $(VENV)/installed-test
	$(INSTALL) -e '.[test,hf,ray]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info
