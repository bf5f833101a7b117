# Each target makes .venv on first use: with uv when present, else with the newest Python >= 3.12.
# `make demo` trains a hybrid and its recurrent twin; `make recall` asks every small recall question
# (a quarter of an hour on two cores); `make test` runs the CPU tests; `make test-aot` compiles the
# kernels for machines that are not here, in a .venv-aot of its own: with compilers for GPUs
# installed, jax looks for a GPU at each start. `make test-interop` compares with transformers, in a
# .venv-interop of its own, since torch is large; where torch is installed elsewhere already,
# TORCH_PYTHON names the python that has both. `make test-slurm` runs sweeps as jobs of a Slurm that
# it starts on this machine (Debian's slurm-wlm), in a .venv-slurm of its own.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AOT := $(VENV)-aot
AOT_STAMP := $(AOT)/.installed
INTEROP := $(VENV)-interop
INTEROP_STAMP := $(INTEROP)/.installed
SLURM := $(VENV)-slurm
SLURM_STAMP := $(SLURM)/.installed

.PHONY: demo recall test test-aot test-interop test-slurm lint format clean

demo: $(STAMP)
	$(BIN)/python scripts/demo.py --workdir runs/demo

recall: $(STAMP)
	$(BIN)/python scripts/reproduce.py cpu --workdir runs/recall --jobs 2

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-aot: $(AOT_STAMP)
	$(AOT)/bin/python -m pytest tests/aot

ifdef TORCH_PYTHON
test-interop: $(STAMP)
	TORCH_PYTHON=$(TORCH_PYTHON) $(BIN)/python -m pytest tests/peers
else
test-interop: $(INTEROP_STAMP)
	$(INTEROP)/bin/python -m pytest tests/peers
endif

test-slurm: $(SLURM_STAMP)
	$(SLURM)/bin/python -m pytest -rs tests/slurm

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(AOT) $(INTEROP) $(SLURM) runs build dist .pytest_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV) dev
	touch $@

$(AOT_STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(AOT) dev,aot
	touch $@

$(INTEROP_STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(INTEROP) dev,interop
	touch $@

$(SLURM_STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(SLURM) dev,slurm
	touch $@
