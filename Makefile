# make demo and make test do everything on a fresh machine that has python3 (3.10 to 3.12) and pip.
# TORCH and TRITON are pinned for machines without a GPU: a plain `torch` would bring gigabytes of CUDA libraries.
# Where torch and triton are installed already (a GPU machine): make demo PYTHON=/path/to/python VENV_ARGS=--system-site-packages

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check -q
RUN = $(VENV)/bin/python
JOBS ?= 2

.PHONY: demo test lint emit-check clean

demo: $(VENV)/.installed
	$(RUN) -m kgen.demo

test: $(VENV)/.installed
	TRITON_INTERPRET=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

emit-check: $(VENV)/.installed
	$(RUN) -m kgen emit --check

# The stamp holds what the environment was made from: it is remade when the project's requirements change.
$(VENV)/.installed: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(RUN) -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	$(RUN) -c "import triton" 2>/dev/null || $(PIP) install "$(TRITON)"
	$(PIP) install -e ".[tune,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .kgen
