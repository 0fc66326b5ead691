# Two commands matter: `make train` and `make test`. Both set up .venv first (once; the second time at once).
# ARGS='texts/ --minutes 10' is passed on to monograph train (or pytest); PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
ARGS ?=
RUN = .venv/bin/python -m
# One process more than there are cores, as some wait, up to four; each takes whole files, in tests/conftest.py's order.
COUNT = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
# At night processes can take single tests, too (--dist=load), as few files have many. If one dies, the tests end: xdist
# may wait for ever for what it was given.
WORKERS = -n $(COUNT) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

# Bytecode that is kept spares every worker, and every command that a test starts, seconds of compiling.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train quick test suite test-costs nightly test-all gpu-less mutants marks site lint format python setup setup-dev

help:
	@echo 'make train       install what training needs, then train a small model (ARGS: see monograph train --help)'
	@echo 'make test        install what the tests need, then style, types, layers, laws and unit tests'
	@echo 'make quick       style, types, layers, and the cheapest tests of what changed: about a minute'
	@echo 'make nightly     the slow tests of tonight; all come round in four weeks'
	@echo 'make test-all    all slow tests too (hours)'
	@echo 'make gpu-less    what a GPU would run, on a pretended one (downloads 5 GB once; ARGS=--quick for less)'
	@echo 'make mutants     how many of the faults put into the code the tests notice (hours; ARGS: --room step --count 20)'
	@echo 'make marks       how dense the code is, beside what it was and beside other projects'
	@echo 'make site        the pages of docs/ as a site, in site/ (installs mkdocs-material)'
	@echo 'make lint        style, types and layers only'
	@echo 'make format      apply the style'

train: setup
	@$(RUN) monograph train $(ARGS)

# Style and types beside the tests: they keep one core busy for a minute. A fault of either ends it with an error.
test: setup-dev
	@$(MAKE) --no-print-directory -j2 lint suite

suite: setup-dev
	$(RUN) pytest -q -m 'not slow' --forks $(COUNT) --costs $(ARGS)

quick: lint
	.venv/bin/python tests/quick.py $(ARGS)

# What `make quick` knows of each file's cost.
test-costs: lint
	$(RUN) pytest -q -m 'not slow' --forks $(COUNT) --costs=benchmarks/results/tests.json $(ARGS)

# The slow tests that tests/nights.py has for tonight; all come round in four weeks. ARGS='--minutes 15 --dist=load': fewer,
# which take no longer; --costs=benchmarks/results/nights.json keeps what they cost.
nightly: setup-dev
	$(RUN) pytest -q -m slow $(WORKERS) --costs --night $(shell date -u +%F) $(ARGS)

test-all: lint
	$(RUN) pytest -q --forks $(COUNT) $(ARGS)

# In an environment of its own, .pretended-gpu, with torch's CUDA build.
gpu-less: python
	@$(PYTHON) tests/pretended_gpu/environment.py make
	@$(PYTHON) tests/pretended_gpu/all.py $(ARGS)

# cosmic-ray is needed for nothing else.
mutants: setup-dev
	$(RUN) pip install -q cosmic-ray==8.7.0
	.venv/bin/python tests/mutants.py $(ARGS)

# ARGS=--record keeps today's figures.
marks: setup-dev
	.venv/bin/python tests/marks.py $(ARGS)

# mkdocs is needed for nothing else. A link or an anchor that leads nowhere stops it.
site: setup
	$(RUN) pip install -q --no-build-isolation --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict $(ARGS)

lint: setup-dev
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	.venv/bin/lint-imports --no-logo

format: setup-dev
	$(RUN) ruff check --fix
	$(RUN) ruff format

setup: python
	@$(PYTHON) setup_venv.py

setup-dev: python
	@$(PYTHON) setup_venv.py dev

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'setup     Python 3.11 or newer is needed as $(PYTHON); to name another: make PYTHON=python3.12' >&2; exit 2; }
