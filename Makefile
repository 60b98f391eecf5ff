# Every task of this project. Each sets up what it needs in .venv; nothing else is required but
# Python 3.11 or newer and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# More for pip, e.g. an --extra-index-url where the CPU build of torch is to be had.
PIP_ARGS ?=
# A machine without a GPU gets the pinned torch of constraints/cpu.txt.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),constraints/base.txt,constraints/cpu.txt)
# `make test SLOW=1` also runs the tests marked slow, as CI does.
SELECTED := $(if $(SLOW),,-m "not slow")

.DEFAULT_GOAL := help
.PHONY: help demo test lint types format bench clean

help: ## list the tasks
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

$(INSTALLED): pyproject.toml constraints/base.txt constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("this needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## make a picture with the bundled model: outputs/demo.png
	$(BIN)/sglang generate --seed 1 --output-path outputs --output-file-name demo.png --overwrite \
		--prompt "a small red circle above a large blue square on a white background"

test: $(INSTALLED) ## run the tests (SLOW=1: all of them)
	$(BIN)/python -m pytest $(SELECTED) $(ARGS)

lint: $(INSTALLED) ## check style, formatting and the import ladder
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## time a denoising step beside Diffusers (needs a GPU; ARGS=--toy does not)
	$(BIN)/python benchmarks/denoise_step.py $(ARGS)

clean: ## remove the environment and what was made
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
