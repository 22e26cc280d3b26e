# Two commands for a new user: `make demo` and `make test`. Each sets itself up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INPUTS := pyproject.toml infra/constraints.txt infra/native.py loader/warmcast/loader/pump.c
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test check test-gpu clean

help:
	@echo 'make demo       deploy a real model, boot workers from the origin and from peers'
	@echo 'make test       all tests that need no GPU'
	@echo 'make check      lint, format, types, import contracts, Kubernetes manifests'
	@echo 'make test-gpu   tests on the GPUs of this machine, with PYTHON=… that has torch'
	@echo 'make clean      remove .venv'

demo: $(STAMP)
	@$(BIN)/warmcast demo

# Two at a time: much of a test is waiting, for a server to start or a fault to be noticed. The
# tests of one file run one after another.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)
	@! command -v $(CC) >/dev/null || $(CC) -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only loader/warmcast/loader/pump.c
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python infra/kubernetes/check.py

# Not in .venv: with the interpreter it is given, which has torch and pytest. Needs no network.
# Eight at a time where pytest-xdist is there: most of them wait for a fault to be noticed.
test-gpu:
	-$(PYTHON) infra/native.py
	PYTHONPATH=$(CURDIR)/manifests:$(CURDIR)/flows:$(CURDIR)/loader:$(CURDIR)/infra:$$PYTHONPATH \
	$(PYTHON) -m pytest tests/gpu -rs $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf %s '-n 8 -p no:benchmark')

# The lock makes a second make wait for the first; it then finds the work done. The stamp comes
# last, so a set-up that failed is taken up again.
$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and f"warmcast: expected Python 3.11 to 3.13, found {v[0]}.{v[1]}; run make with PYTHON=...")'
	@flock pyproject.toml $(MAKE) --no-print-directory .set-up

.PHONY: .set-up
.set-up:
	@if [ -e $(STAMP) ] && [ -z "$$(find $(INPUTS) -newer $(STAMP))" ]; then exit; fi; set -e; \
	echo 'Installing into $(VENV); the first time this takes some minutes (torch is large).'; \
	rm -f $(STAMP); \
	$(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[dev]'; \
	touch $(STAMP)

clean:
	rm -rf $(VENV)
