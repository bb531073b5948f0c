# make test, make quickstart: everything from a bare machine with Python >= 3.10 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install test quick lint quickstart bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Two processes on two cores; the slow tests too.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q

# Only the tests that are quick.
quick: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m "not slow"

quickstart: $(STAMP)
	$(BIN)/hf-entmax quickstart --out quickstart-output

bench: $(STAMP)
	$(BIN)/hf-entmax bench --preset targets

clean:
	rm -rf $(VENV) quickstart-output outputs runs
