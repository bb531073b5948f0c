# make quickstart, make test: everything from a bare machine with Python >= 3.10 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What users install: the package, figures and the fused CPU kernel. The rest is for tests, recipes and documentation.
LEAN   := $(VENV)/.lean
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --constraint constraints.txt --disable-pip-version-check --progress-bar off

.PHONY: install test quick lint quickstart bench docs clean

install: $(STAMP)

$(LEAN): pyproject.toml constraints.txt
	@echo "Making $(VENV) and installing hf_entmax with figures and the CPU kernel: one to three minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[figures,cpu]'
	touch $(LEAN)

$(STAMP): $(LEAN)
	@echo "Installing what the tests need as well: one to three minutes."
	$(PIP) --editable '.[dev]'
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

quickstart: $(LEAN)
	$(BIN)/hf-entmax quickstart --out quickstart-output

bench: $(LEAN)
	$(BIN)/hf-entmax bench --preset targets

# The site, without network; strict about dead links.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) quickstart-output outputs runs site
