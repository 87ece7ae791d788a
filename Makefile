# One command per intention; `make` alone lists them. Every target makes the environment it needs.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.9.0
BIN    := $(VENV)/bin
PY     := $(BIN)/python

# Hypothesis profile and workers of the CPU tests. One thread per worker: the engine's own tensors are small.
PROFILE ?= $(if $(CI),ci,dev)
WORKERS ?= 2
GPU_WORKERS ?= 4
ARGS    ?=
PYTEST  := OMP_NUM_THREADS=1 $(PY) -m pytest

# Tests start processes by the hundred: what one has compiled, the others need not.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test clients client-environments load-clients check interp gpu machine \
        bench docs soak changes clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The interpreter is checked first: an old one fails much later, with a message about something else.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "millpond needs Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Making the environment in $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)

# torch is pinned and installed on its own, so that resolving the rest cannot move it.
$(VENV)/.torch: | $(BIN)/python
	$(PY) -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PY) -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(PY) -m pip install --quiet "$(TORCH)" --editable '.[dev]'
	@touch $(VENV)/.installed $@

# Mooncake's programs want libraries that a plain Debian lacks; the tests start a real store and do not skip.
MOONCAKE := libibverbs1 libnuma1 libcurl4
$(VENV)/.libraries: $(VENV)/.installed-dev
	@$(PY) -c 'import mooncake.store' 2>/dev/null \
	  || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(MOONCAKE) >/dev/null; } \
	  || echo "The tests of the Mooncake Store will fail without: apt-get install $(MOONCAKE)"
	@touch $@

setup: $(VENV)/.installed-dev $(VENV)/.libraries ## development environment in .venv, and the commit hooks
	@git rev-parse --git-dir >/dev/null 2>&1 && $(BIN)/pre-commit install || echo "not a git checkout: no commit hooks installed"

demo: $(VENV)/.installed ## a trained model answers, then a prefix cache demonstration (CPU, no download)
	$(BIN)/millpond chat "What is 2 + 2? Answer briefly."
	$(PY) examples/prefix_cache.py

test: $(VENV)/.installed-dev $(VENV)/.libraries ## CPU tests; PROFILE=dev, ci or nightly, WORKERS=n, ARGS='...' for pytest
	$(PYTEST) -n $(WORKERS) --dist worksteal --hypothesis-profile $(PROFILE) $(ARGS)

# Programs of others live apart from ours, and one of them apart from the rest; each with its own pins.
NEEDS   := tests/front/clients/requirements
INSTALL  = $(VENV)/clients/$*/bin/python -m pip install --quiet --no-compile --no-deps

$(VENV)/clients/%/.installed: $(NEEDS)/%.txt
	$(PYTHON) -m venv $(VENV)/clients/$*
	$(INSTALL) -r $<
	@test ! -f $(NEEDS)/$*-needs.txt || $(INSTALL) -r $(NEEDS)/$*-needs.txt
	@touch $@

CLIENTS := $(foreach kit,kit litellm lm-eval,$(VENV)/clients/$(kit)/.installed)
.SECONDARY: $(CLIENTS)

# Apart from what uses them, so that they can be fetched beside something else.
client-environments: $(CLIENTS)

clients: $(VENV)/.installed-dev $(CLIENTS) ## programs of others against our server: langchain, litellm, llm, lm-eval, schemathesis
	$(PYTEST) -n $(WORKERS) --dist worksteal --timeout 400 -m clients tests/front/clients $(ARGS)

load-clients: $(VENV)/.installed-dev ## two load clients of other engines (large downloads); make clients then runs them, too
	$(PY) tools/load_clients.py $(VENV)/clients/load

check: $(VENV)/.installed-dev ## formatting, linting, types, import contracts, docs links, faults index (under a minute)
	$(PY) tools/check.py

# On Linux torch may bring a Triton of its own choice; where it did not, this one is fetched.
$(VENV)/.installed-triton: $(VENV)/.installed-dev
	$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install --quiet "$(TRITON)"
	@touch $@

# Where its tests are, the longest first: to collect all the others, too, would take longer than most.
INTERPRETED := tests/runtime tests/training tests/ops/triton

interp: $(VENV)/.installed-triton ## kernel tests under the Triton interpreter
	@$(PY) tools/lane.py interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) --dist worksteal -m "interpreter and not slow" \
	  -o testpaths="$(INTERPRETED)" $(ARGS)

# Workers share the GPU, and what one has compiled; a test may wait for the compiler for minutes, once.
gpu: $(VENV)/.installed-triton ## tests that need one or more GPUs; GPU_WORKERS=n, ARGS='...' for pytest
	@$(PY) tools/lane.py gpu multigpu
	$(PYTEST) -n $(GPU_WORKERS) --dist loadgroup --timeout 600 -m "gpu or multigpu" $(ARGS)

machine: $(VENV)/.installed-dev ## the ownership machine and other property tests, long profile
	$(PYTEST) -n $(WORKERS) --timeout 3600 --hypothesis-profile nightly tests/state tests/plan tests/engine $(ARGS)

bench: $(VENV)/.installed ## benchmarks on this machine; OP=<name of a script in bench/>
	@$(PY) tools/bench.py $(OP) $(ARGS)

docs: $(VENV)/.installed-dev ## check the links of the documentation and run its Python blocks
	$(PY) tools/check_links.py
	$(PY) tools/run_docs.py

soak: $(VENV)/.installed-triton ## tests marked slow: long traffic, many cancels, whole-model sweeps
	$(PYTEST) --timeout 3600 -m "slow and not interpreter" $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) --timeout 3600 -m "slow and interpreter" $(ARGS)

changes: $(VENV)/.installed ## preview the changelog of the next release
	$(PY) tools/changelog.py

clean: ## remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist site
