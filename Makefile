# Each target makes .venv on first use: with uv when present, else with the newest Python >= 3.12.
# `make demo` trains a hybrid and its recurrent twin; `make test` runs the CPU tests.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format clean

demo: $(STAMP)
	$(BIN)/python scripts/demo.py --workdir runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV)
	touch $@
