# Everything happens in .venv, which is made again when pyproject.toml or constraints.txt change.
# PYTHON: the interpreter to make it with (3.11 or later). ARGS: what to hand on, as in `make run ARGS="plan.tp=1"`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: venv run test lint format bench zoo clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[test,dev]'
	touch $@

run: $(READY)
	$(BIN)/python run.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

zoo: $(READY)
	$(BIN)/python -m benchmarks.zoo --readme $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
