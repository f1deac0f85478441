# Every target sets up what it needs: a virtual environment in .venv, once, and again when its inputs change.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# On two cores: tests also wait, for disks, children and lanes.
JOBS ?= 3
SHARD ?= 1/1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-alone lint format test-long clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Torch goes first and alone: it is by far the largest download, and a failure there should say so.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hightide needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv .venv \
		|| { echo "no virtual environment: install your system's python3-venv package"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev,hf]'
	@touch $@

setup: $(STAMP)  ## create .venv with pinned versions

demo: $(STAMP)  ## train a model whose states do not fit the accelerator; it is saved, and goes on (under 3 minutes, no GPU)
	$(BIN)/hightide train examples/demo.yaml --save-every 20 --steps 40 --no-resume
	$(BIN)/hightide train examples/demo.yaml --save-every 20

test: lint  ## everything a change must pass: format, lint, types, imports, tests
	@echo $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal || { [ $$? -eq 1 ] && $(MAKE) --no-print-directory test-alone; }

# A failure beside other tests is looked at once more, alone: one that depends on what else runs is printed above, and is
# to be mended, but does not say that the change is wrong. The first that fails here too is the end.
test-alone: $(STAMP)
	@echo "the tests that failed, once more and alone:"
	$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none --maxfail 1

lint: $(STAMP)  ## format, lint, types and import direction only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-long: $(STAMP)  ## the tests that take minutes; hours altogether, SHARD=3/40 is a part of them
	$(BIN)/python -m pytest -q -n $(JOBS) -m long --timeout 900 --shard $(SHARD)

clean:  ## remove the environment and all caches (run folders stay)
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests bench -depth \( -name __pycache__ -o -name '*.egg-info' \) -exec rm -rf {} + 2>/dev/null || true
