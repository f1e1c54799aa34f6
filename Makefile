# make demo and make test do everything on a fresh machine that has python3 (3.10 or newer) and pip; no GPU is needed.
# TORCH and TRITON are pinned for such machines: a newer torch that pip finds by itself may bring gigabytes of CUDA
# libraries. TORCH_ARGS goes to pip as well, e.g. the index of PyTorch's CPU builds.
# Where torch and triton are installed already (a GPU machine):
#   make demo PYTHON=/path/to/python VENV_ARGS=--system-site-packages

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
VENV_ARGS ?=
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
TORCH_ARGS ?=
# make test compiles the Gluon templates with this one, too; it is put into a folder of its own, beside nothing else
NEWER_TRITON ?= triton==3.9.0
JOBS ?= 2
RUN = $(VENV)/bin/python

.PHONY: demo test lint emit-check clean

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python -m kgen.demo

test: $(VENV)/.installed $(VENV)/.newer
	KGEN_NEWER_TRITON=$(VENV)/newer TRITON_INTERPRET=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

emit-check: $(VENV)/.installed
	$(RUN) -m kgen emit --check

$(VENV)/.installed: EXTRAS = tune,dev
$(DEMO_VENV)/.installed: EXTRAS = tune,interpret

# The stamp makes a second run immediate; the environment is completed when the project's requirements change.
# torch comes first and alone, so that nothing later resolves it.
%/.installed: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 10) else 'kgen needs Python 3.10 or newer, and this is ' + sys.version.split()[0] + ': make PYTHON=python3.11 ...')"
	@test -x $*/bin/python || { echo "== environment $*"; $(PYTHON) -m venv $(VENV_ARGS) $*; }
	@$(call have,$*,torch) || $(call install,$*,$(TORCH_ARGS) "$(TORCH)") || { echo "No $(TORCH) for this Python: choose another with make TORCH=torch==X (2.6 or newer)," "or use a python that has torch with PYTHON=... VENV_ARGS=--system-site-packages."; exit 1; }
	@$(call have,$*,triton) || $(call install,$*,"$(TRITON)") || { echo "No $(TRITON) for this Python: choose another with make TRITON=triton==X (3.4 or newer)."; exit 1; }
	@$*/bin/python -c "import sys; from importlib.metadata import version as v; old = [p for p, need in (('torch', (2, 6)), ('triton', (3, 4))) if tuple(map(int, v(p).split('.')[:2])) < need]; sys.exit('too old for kgen (torch 2.6, triton 3.4): ' + ', '.join(p + ' ' + v(p) for p in old) if old else 0)"
	@$(call install,$*,-e ".[$(EXTRAS)]")
	@touch $@

$(VENV)/.newer: $(VENV)/.installed
	@$(call install,$(VENV),--no-deps --target $(VENV)/newer --upgrade "$(NEWER_TRITON)")
	@touch $@

have = $(1)/bin/python -c "import importlib.metadata as m; m.version('$(2)')" 2>/dev/null
install = { echo "== $(1): pip install $(subst ",,$(2))"; $(1)/bin/python -m pip install -qq --disable-pip-version-check --no-warn-script-location $(2); }

clean:
	rm -rf $(VENV) $(DEMO_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .kgen
