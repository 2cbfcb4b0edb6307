# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
# for `make test-oldest`: the oldest torch to test with, as pip names it; 2.11 is supported
TORCH ?= torch==2.13.0
OLDEST := .venv-oldest/bin
OLDEST_TESTS ?= --quick $(QUICK)
# for `make test-vllm`: the folder of the report
VLLM := .venv-vllm/bin
VLLM_REPORT ?= docs/results/vllm
# for the inner loop: every hook of four encodings, the core against its oracles, a few training runs, the commands
QUICK := tests/contract tests/encodings tests/model/test_llama.py tests/model/test_attention.py tests/kernels/test_rotary.py \
	tests/runs tests/tasks/test_every_task.py tests/data/test_packing.py tests/training/test_run.py \
	tests/pretrained/test_weights.py tests/test_settings.py tests/test_cli.py tests/test_saved_files.py tests/test_package.py

# some environments forbid Python to keep compiled files: reading all tests again takes five seconds
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-quick test-oldest test-vllm coverage docs install lint format types unit clean

demo: install
	$(BIN)/equitape demo

# types next to the tests: the type checker keeps only one core busy
test: lint
	$(MAKE) --jobs 2 --no-print-directory types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

# all tests with branch coverage, which must reach 90 %; tracing takes half as long again
coverage: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term

# about a minute: run it after every change, and `make test` before you push
test-quick: install
	$(BIN)/python -m pytest -n 2 --dist worksteal --quick $(QUICK)

# the quick tests with the oldest supported versions; `make test-oldest OLDEST_TESTS=tests` runs all
test-oldest: .venv-oldest/.installed
	$(OLDEST)/python -m pytest -n 2 --dist worksteal $(OLDEST_TESTS)

# vLLM on this machine's CPU against `generate`, about ten minutes; writes a report
test-vllm: .venv-vllm/.installed
	$(VLLM)/python benchmarks/vllm_report.py --start $(VLLM_REPORT)
	EQUITAPE_REPORT=$(VLLM_REPORT) $(VLLM)/python -m pytest tests/serving
	$(VLLM)/python benchmarks/vllm_throughput.py $(VLLM_REPORT)
	$(VLLM)/python benchmarks/vllm_report.py $(VLLM_REPORT)

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

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/python -m pip install --quiet --constraint constraints-oldest.txt $(TORCH)
	$(OLDEST)/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[dev,docs]'
	touch $@

# every package by its exact version and without its requirements: vLLM names builds that no index has
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	$(VLLM)/python -m pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-vllm .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage build src/*.egg-info
