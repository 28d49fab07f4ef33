# Everything is set up in VENV from packages alone; python3 (3.11 or newer) and make are all it needs.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= dev
BIN := $(VENV)/bin
# Two workers on any machine: JAX starts threads of its own in each.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile -p no:cacheprovider

export JAX_PLATFORMS ?= cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all setup lint types docs bench clean

demo: $(VENV)/.done        ## the digits, trained on eight replicas
	$(BIN)/python examples/digits.py

test: $(VENV)/.done        ## the fast suite
	$(PYTEST) -m "not slow and not processes"

test-all: $(VENV)/.done    ## what `test` leaves out
	$(PYTEST) -m "slow or processes"

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Phalanx needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[$(EXTRAS)]'
	@touch $@

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.done
	$(BIN)/mypy

docs: $(VENV)/.done
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.done .bench/tensorflow/.done .bench/torch/.done   ## next to JAX by hand and to other libraries
	$(BIN)/python -m benchmarks

.bench/%/.done: benchmarks/requirements-%.txt $(CONSTRAINTS)
	$(PYTHON) -m venv .bench/$*
	.bench/$*/bin/pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) build dist site out *.egg-info
