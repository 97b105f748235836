# The commands of this project. `make` alone lists them with their help lines (after ##).
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory --no-builtin-rules
.DEFAULT_GOAL := help

# The image has its own Python with everything installed. Elsewhere the environment is .venv.
ifeq ($(TRAINSTATION_IMAGE),1)
PY := python3
else
PY := .venv/bin/python
endif

# Without these two lines make would try to rebuild its own files, for example from a Makefile.sh, and run that.
.SUFFIXES:
GNUmakefile Makefile docker/station.mk: ;

.PHONY: help
help: ## list all targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## create the environment .venv (other targets do it when needed)
	@scripts/setup.sh

.PHONY: doctor
doctor: ## check this machine before anything is installed; needs only Python 3.8 (ARGS=--json)
	@python3 -m train doctor $(ARGS)

.PHONY: demo
demo: setup ## train on scans of handwritten digits with two processes, on any machine, in a minute
	@scripts/demo.sh $(ARGS)

.PHONY: course
course: setup ## run the notebooks of the course and store what they print; some only: make course IN="02 06"; rules only: IN=--check
	@$(PY) scripts/course.py $(IN)

# The database of hypothesis lies in a folder that the station can write to.
export HYPOTHESIS_STORAGE_DIRECTORY := tests/.hypothesis

.PHONY: pictures
pictures: setup ## make the pictures of docs/ from real runs, with Chromium; some only: IN="ways top"
	@$(PY) scripts/pictures.py $(IN)

.PHONY: fields
fields: setup ## write docs/fields.md from train/config/schema.py
	@$(PY) scripts/fields.py

# Uses the mirrors and proxies of .env.
PYTEST := . scripts/env.sh && mirrors_from_env && $(PY) -m pytest
# Whole files, in the order of tests/conftest.py: the longest first.
FILES := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: test
test: setup ## run the tests; some: make test IN=tests/train/run ARGS="-k resume"; what a change needs: make test CHANGED=REV
ifeq ($(origin CHANGED),undefined)
	@$(PYTEST) $(or $(IN),tests/train tests/examples tests/docs tests/notebooks) $(FILES) $(ARGS)
else
	@paths=$$($(PY) -m tests.changed $(CHANGED)) || exit 2; \
	[ -z "$$paths" ] || { $(PYTEST) $$paths $(FILES) $(ARGS); }
endif

.PHONY: test-pages
test-pages: setup ## run the commands of docs/ and README.md; one page: make test-pages ARGS="-k sessions"
	@$(PYTEST) $(or $(IN),tests/docs) -m pages -n auto --dist load $(ARGS)

# Machines with GPUs often have a Python with torch but no network. So an existing Python is tried before make setup.
HAS_ALL = import sys; from importlib.util import find_spec; \
	sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, sys.argv[1:])))
SIX := torch numpy pydantic tomli_w psutil safetensors

.PHONY: test-gpu
test-gpu: ## test what needs a GPU, in 10 minutes; with your own Python: make test-gpu PYTHON=python3
	@python=$(PYTHON); \
	for one in $(PY) python3; do \
		[ -n "$$python" ] || ! $$one -c '$(HAS_ALL)' $(SIX) 2>/dev/null || python=$$one; \
	done; \
	[ -n "$$python" ] || { python=$(PY); scripts/setup.sh; } && \
	$$python -m tests.gpu $(ARGS)

.PHONY: test-minutes
test-minutes: setup ## run the longest tests: several machines, a real Slurm, more cases; some only: IN=tests/train/slurm
	@$(PYTEST) $(or $(IN),tests/train tests/examples tests/cuda) -m minutes $(FILES) $(ARGS)

.PHONY: test-bench
test-bench: setup ## test the benchmarks, and run the GPU tests on the CPU
	@$(PYTEST) tests/train tests/benchmarks -m bench $(ARGS)

.PHONY: test-cluster
test-cluster: setup ## run all tests of several machines: nodes on this machine, a real Slurm, Kubernetes manifests
	@$(PYTEST) tests/train/cluster tests/train/slurm -m "" $(ARGS)

.PHONY: torture
torture: setup ## kill runs at every moment and compare with uninterrupted runs; takes more than an hour
	@$(PY) tests/torture/torture.py $(ARGS)

.PHONY: lint
lint: setup ## check style and types without changing files
	@PY=$(PY) scripts/lint.sh

.PHONY: format
format: setup ## format the Python files
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

.PHONY: lock
lock: setup ## write requirements.lock; for newer versions: make lock ARGS=--upgrade
	@scripts/lock.sh $(ARGS)

.PHONY: clean
clean: ## remove .venv and caches; keep runs and data
	@rm -rf .venv .venv.lock tests/.pytest_cache .mypy_cache .ruff_cache tests/.hypothesis build ./*.egg-info
	@find . -path ./runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

-include docker/station.mk
