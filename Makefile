# What people type. `make` alone lists it; each target says in its own line what it is for.
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help

# The image carries its own Python with everything installed; anywhere else the environment is .venv.
ifeq ($(TRAINSTATION_IMAGE),1)
PY := python3
else
PY := .venv/bin/python
endif

# make would look for ways to make its own files anew, from a Makefile.sh for one, and run what it finds in there.
.SUFFIXES:
GNUmakefile Makefile docker/station.mk: ;

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make the environment .venv (once; other targets do it by themselves)
	@scripts/setup.sh

.PHONY: doctor
doctor: ## check this machine, before anything is installed: needs Python 3.8 alone (ARGS=--json)
	@python3 -m train doctor $(ARGS)

.PHONY: demo
demo: setup ## train on real handwritten digits, two processes on any machine, in a minute
	@scripts/demo.sh $(ARGS)

# What hypothesis remembers lies where the station can write too.
export HYPOTHESIS_STORAGE_DIRECTORY := tests/.hypothesis

# With the mirrors and proxies that .env names.
PYTEST := . scripts/env.sh && mirrors_from_env && $(PY) -m pytest

.PHONY: test
test: setup ## run the tests; some: make test IN=tests/train/run ARGS="-k resume"; one after the other: ARGS="-n 0"
	@$(PYTEST) $(or $(IN),tests/train tests/examples tests/docs $(wildcard tests/notebooks)) -n auto --dist loadfile $(ARGS)

# Machines with GPUs often have a Python with torch and no network: what is there comes before what make setup fetches.
HAS_ALL = import sys; from importlib.util import find_spec; \
	sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, sys.argv[1:])))
SIX := torch numpy pydantic tomli_w psutil safetensors

.PHONY: test-gpu
test-gpu: ## prove what only a GPU can show, in 8 minutes; with a Python of yours: make test-gpu PYTHON=python3
	@python=$(PYTHON); \
	for one in $(PY) python3; do \
		[ -n "$$python" ] || ! $$one -c '$(HAS_ALL)' $(SIX) 2>/dev/null || python=$$one; \
	done; \
	[ -n "$$python" ] || { python=$(PY); scripts/setup.sh; } && \
	$$python -m tests.gpu --json test-gpu.json $(ARGS)

.PHONY: test-minutes
test-minutes: setup ## run what takes longest: several machines, a real Slurm, more cases; some: IN=tests/train/slurm
	@$(PYTEST) $(or $(IN),tests/train tests/examples) -m minutes -n auto --dist loadfile $(ARGS)

.PHONY: test-bench
test-bench: setup ## run the tests of what measures, and the proof for GPUs on a CPU
	@$(PYTEST) tests/train tests/benchmarks -m bench $(ARGS)

.PHONY: test-cluster
test-cluster: setup ## run all tests of several machines: nodes side by side, a real Slurm, what Kubernetes is given
	@$(PYTEST) tests/train/cluster tests/train/slurm -m "" $(ARGS)

.PHONY: torture
torture: setup ## kill runs at every moment, compare with undisturbed ones; all of it takes more than an hour
	@$(PY) tests/torture/torture.py $(ARGS)

.PHONY: lint
lint: setup ## check style and types, change nothing
	@PY=$(PY) scripts/lint.sh

.PHONY: format
format: setup ## put the Python files in order
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

.PHONY: lock
lock: setup ## write requirements.lock; newer versions: make lock ARGS=--upgrade
	@scripts/lock.sh $(ARGS)

.PHONY: clean
clean: ## remove .venv and caches; runs and data stay
	@rm -rf .venv .venv.lock tests/.pytest_cache .mypy_cache .ruff_cache tests/.hypothesis build ./*.egg-info
	@find . -path ./runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

-include docker/station.mk
