# Two commands: `make demo` and `make test`. Each installs what it needs first.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
SGLANG := .venv-sglang

.DEFAULT_GOAL := help
.PHONY: help install install-sglang demo test test-slow check format schemas bench clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[megatron,metrics,quantize,delta,dev]'
	touch $@

install: $(VENV)/.installed  ## weightbus, torch, megatron-core, transformers and the test tools, in .venv

install-sglang: install  ## real SGLang engines for the CPU: 0.5.23 and two older ones
	PYTHON=$(PYTHON) demo/sglang_cpu/install.sh $(SGLANG) 0.5.23
	PYTHON=$(PYTHON) demo/sglang_cpu/install.sh $(SGLANG) 0.5.15.post1
	PYTHON=$(PYTHON) demo/sglang_cpu/install.sh $(SGLANG) 0.5.10.post1

demo: install  ## Megatron ranks train, two writers convert, a real SGLang engine serves each version
	PYTHON=$(PYTHON) demo/sglang_cpu/install.sh $(SGLANG) 0.5.23
	$(PY) -m weightbus demo --sglang-python $(SGLANG)/bin/python

test: install  ## every test but the slow ones
	$(PY) -m pytest -m "not slow"

test-slow: install-sglang  ## end-to-end tests on real ranks and real engines
	$(PY) -m pytest -m slow

check: install  ## lint, format, strict types, import directions, generated documents
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports

format: install  ## apply the formatter
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

schemas: install  ## write docs/schemas from the models
	$(PY) -m weightbus.bus.documents docs/schemas

bench: install  ## every benchmark, as ratios, with the machine and the commit
	$(PY) -m benchmarks

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(SGLANG) .sglang .pytest_cache .ruff_cache .hypothesis .demo
