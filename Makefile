# Each target sets up what it needs: a Python 3.10-3.14 with venv and pip, and this file, are enough.
#   make demo    the whole pipeline on a small trained model, then where the files are
#   make test    the tests, about seven minutes on two cores

PYTHON ?= $(shell for p in python3.12 python3.11 python3.10 python3.13 python3.14 python3 python; do \
    $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# what `make test` installs; .ci/run installs all extras
TEST_EXTRAS ?= mxnet,dask,remote,test
BIN := $(VENV)/bin
# Python compiles what it imports; all modules of all packages would take longer than the demo
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-slow test-nightly test-faults test-fuzz test-cross test-cuda test-gpu test-pytorch test-tflite check docs docs-reference first-hour recording runtime-wheel bench bench-slow clean-venv

demo: $(VENV)/.ready
	@$(BIN)/tvmflow run recipes/digits.yaml

test: $(VENV)/.ready-to-test
	$(PYTEST) -n 2 --dist worksteal --durations 20

# also those of test-gpu, which are skipped without a driver of OpenCL
test-slow: $(VENV)/.ready-to-test
	$(PYTEST) -m '(slow or gpu) and not nightly' -n 2 --dist worksteal -rs

# what overlaps with the tests of test-slow and test-faults: all cases of one test, every network of a zoo, every
# sanitizer, more stories of kills, the pages of the first hour
test-nightly: $(VENV)/.ready-to-test
	$(PYTEST) -m nightly -n 2 --dist worksteal

test-faults: $(VENV)/.ready-to-test
	$(PYTEST) -m 'faults and not nightly' -n 2 --dist worksteal

# thousands of mutated recipes, models, bundles, locks, trial packs and deliveries, and more random models
test-fuzz: $(VENV)/.ready-to-test
	$(PYTEST) -m fuzz -n 2 --dist worksteal

# libraries for other CPUs, under qemu: on PATH, or in the folder TVMFLOW_QEMU (see docs/emulation.md)
test-cross: $(VENV)/.ready-to-test
	$(PYTEST) -m cross -n 2 --dist worksteal -rs --durations 10

# libraries for NVIDIA GPUs: installs CUDA's compiler, 110 MB; needs no GPU
test-cuda: $(VENV)/.ready-to-test
	@$(INSTALL) -e '.[$(TEST_EXTRAS),cuda]'
	$(PYTEST) -m cuda

# libraries for OpenCL, by the driver of this machine: PoCL (Debian: pocl-opencl-icd) runs them on the CPU
test-gpu: $(VENV)/.ready-to-test
	$(PYTEST) -m gpu -rs

# archives of PyTorch, compared with PyTorch: installs it, several GB unless its build for CPUs is there already
test-pytorch: $(VENV)/.ready-to-test
	@$(INSTALL) -e '.[$(TEST_EXTRAS),pytorch]' tokenizers
	$(PYTEST) -m pytorch -rs

# TFLite files of every operator, compared with LiteRT: installs it, 59 MB
test-tflite: $(VENV)/.ready-to-test
	@$(INSTALL) -e '.[$(TEST_EXTRAS),tflite]'
	$(PYTEST) -m tflite -rs

# tvmflow-runtime: loads and runs bundles, and needs numpy alone
runtime-wheel: $(VENV)/.ready
	@$(BIN)/python -m tvmflow.exporters.wheel build

check: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin tvmflow
	$(BIN)/lint-imports --no-logo

# the documentation as a site in site/, which loads nothing from elsewhere: installs MkDocs, 30 MB
docs: $(VENV)/.ready
	@$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python tools/check_site.py site
	@echo "to read it: $(BIN)/python -m http.server --directory site"

# what a new user does in the first hour, with the wheel of this checkout; keeps all of it in docs/first-hour.md
first-hour: $(VENV)/.ready-to-test
	$(BIN)/python tools/first_hour.py

# docs/images/demo.svg, which the README shows
recording: $(VENV)/.ready
	@$(INSTALL) -e '.[docs]'
	$(BIN)/python tools/record_demo.py

# docs/recipe.md and the JSON Schemas in docs/, from the descriptions of the fields; benchmarks/RESULTS.md, from its data
docs-reference: $(VENV)/.ready
	$(BIN)/python tools/generate_reference.py
	$(BIN)/python tools/benchmark_results.py

bench: $(VENV)/.ready-to-test
	$(BIN)/python benchmarks/pipeline/noop.py
	$(BIN)/python benchmarks/latency/c_runtime.py
	$(BIN)/python benchmarks/pipeline/ledger.py
	$(BIN)/python benchmarks/pipeline/fanout.py
	$(BIN)/python benchmarks/pipeline/scale.py --stages 100 1000

bench-slow: $(VENV)/.ready-to-test
	$(BIN)/python benchmarks/coverage/onnx_coverage.py
	$(BIN)/python benchmarks/coverage/onnx_coverage.py --peer
	$(BIN)/python recipes/models/make_squeezenet.py
	$(BIN)/python benchmarks/tuning.py
	$(BIN)/python benchmarks/tuning.py --per-task 64
	$(BIN)/python benchmarks/cpu.py

clean-venv:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "tvmflow needs Python 3.10 to 3.14: name one with make PYTHON=/path/to/python"; exit 1; }
	@echo "set-up 1/2: a virtual environment in $(VENV), with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; echo "$(PYTHON) cannot make virtual environments: install its venv package"; exit 1; }

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "set-up 2/2: tvmflow with TVM, ONNX Runtime and a linker (once; 30 packages, 1.1 GB, half a minute)"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.ready-to-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "set-up 2/2: tvmflow with TVM, ONNX Runtime, MXNet, a linker and what the tests need (once; 120 packages, 1.9 GB, a minute)"
	@$(INSTALL) -e '.[$(TEST_EXTRAS)]'
	@touch $(VENV)/.ready $@
