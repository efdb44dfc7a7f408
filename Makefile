# k3train: set-up, main job and checks. `make help` lists the targets.
# Each variable below can be given on the command line, e.g. make install PYTHON=python3.12 VENV=/tmp/k3 EXTRAS=gpu

PYTHON ?= $(shell tools/find_python.sh 3.13 3.12 3.11)
VENV ?= .venv
# Extras of pyproject.toml that `install` adds: gpu, tpu.
EXTRAS ?=
# Handed on: to `k3train train` by quickstart, to pytest by the tests.
ARGS ?=
# Test processes side by side; a file stays in one, so that what it sets up is made once. In order: xdist would keep files of few tests,
# which take long, for the end.
WORKERS ?= 2

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# What `test-tpu` compiles; AOT=aot stands for everything.
AOT ?= aot and not slow
FAST := not slow and not gpu and not tpu and not aot
RUN := runs/quickstart

# Marks of a finished installation, one per set of extras. They count only in an environment that runs and has not been moved.
BASE := $(VENV)/.has-k3train$(addprefix -,$(EXTRAS))
DEV := $(VENV)/.has-k3train-dev
ifneq ($(shell $(BIN)/python -c 'print(open("$(VENV)/.made-for").read().strip())' 2>/dev/null),$(CURDIR))
STALE := stale
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install quickstart test test-numerics test-slow test-gpu test-tpu compile-for-tpu lint format clean stale

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

install: $(BASE)  ## Make .venv: k3train and pinned dependencies, newest working Python of 3.13, 3.12, 3.11

quickstart: $(BASE)  ## Train the small K3 of experiments/quickstart.py, or go on where it was interrupted
	@if [ -e $(RUN)/result.json ]; then \
	    echo "$(RUN) is finished. To train it again: rm -r $(RUN) && make quickstart"; \
	elif ls $(RUN)/checkpoints 2>/dev/null | grep -qxE '[0-9]+'; then \
	    exec $(BIN)/k3train resume $(RUN); \
	else \
	    if [ -e $(RUN) ]; then mv -v $(RUN) $(RUN).unsaved-$$(date +%Y%m%d-%H%M%S); fi; \
	    exec $(BIN)/k3train train experiments/quickstart.py $(ARGS); \
	fi

test: $(DEV)  ## Run the tests, except slow ones and those for accelerators
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(FAST)" $(ARGS)

test-numerics: $(DEV)  ## Run the tests of values and gradients: golden arrays, kernels, resume
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "numerics and $(FAST)" $(ARGS)

test-slow: $(DEV)  ## Run the slow tests
	$(PYTEST) -m "slow and not gpu and not tpu and not aot" $(ARGS)

test-gpu: $(DEV)-gpu  ## Run the tests that need an NVIDIA GPU
	JAX_PLATFORMS=cuda,cpu $(PYTEST) -m gpu $(ARGS)

# libtpu slows every start of JAX, so it has an environment of its own beside the usual one.
test-tpu:  ## Interpret kernels for TPUs, compile them and a train step, lower those for GPUs: with neither here, in its own environment
	@$(MAKE) --no-print-directory compile-for-tpu VENV=$(VENV)-tpu

compile-for-tpu: $(DEV)-tpu
	$(PYTEST) -n $(WORKERS) -m "$(AOT)" tests/tpu tests/pallas_kernels $(ARGS)

lint: $(DEV)  ## Check style and types: ruff, pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)  ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove environments and caches; runs stay
	rm -rf .venv .venv-py311 .venv-tpu .venv-py311-tpu .cache .hypothesis .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stem lists the extras: .has-k3train-dev-gpu is k3train[dev,gpu], which holds k3train alone too.
$(VENV)/.has-k3train%: pyproject.toml $(wildcard constraints/*.txt) $(STALE)
	@tools/install.sh $(VENV) "$(PYTHON)" $(subst -, ,$*)
	@touch $(VENV)/.has-k3train $@

$(VENV)/.has-k3train: pyproject.toml $(wildcard constraints/*.txt) $(STALE)
	@tools/install.sh $(VENV) "$(PYTHON)"
	@touch $@
