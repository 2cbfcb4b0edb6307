# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs install lint format types unit clean

demo: install
	$(BIN)/equitape demo

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the site, in build/site
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

install: .venv/.installed

# torch first and by itself, so that nothing that depends on it chooses another build
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage build src/*.egg-info
