# Two commands for a new user: `make demo` and `make test`. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check test-gpu clean

demo: $(STAMP)
	$(BIN)/warmcast demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With the interpreter it is given, which has torch and a GPU's libraries; needs no network.
test-gpu:
	PYTHONPATH=$(CURDIR)/manifests:$(CURDIR)/flows:$(CURDIR)/loader:$(CURDIR)/infra:$$PYTHONPATH \
	$(PYTHON) -m pytest tests/gpu -rs

$(STAMP): pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13) and f"warmcast: expected Python 3.11 to 3.13, found {v[0]}.{v[1]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint infra/constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
