# `make test` lints, checks types and runs the tests; `make demo` shows the whole path on a small checkpoint.
# Both build .venv from constraints.txt when it is missing. PYTHON chooses the interpreter it is made with.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.marlin-moe-installed
# What an installation depends on; editing a module needs no new one.
BUILD_INPUTS := pyproject.toml setup.py constraints.txt README.md \
	$(wildcard */__init__.py) $(wildcard repack/native/*.c repack/native/*.h)

export PYTHONSAFEPATH := 1

.PHONY: help install demo test lint format clean

help:
	@echo "make demo | test | lint | format | install | clean"

install: $(STAMP)

$(STAMP): $(BUILD_INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	rm -rf build
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev,cuda]'
	touch $@

demo: $(STAMP)
	$(BIN)/marlin-moe demo

test: lint
	MARLIN_MOE_NATIVE=1 $(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/typecheck.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis repack/native/*.so
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
	rm -f $(STAMP)
