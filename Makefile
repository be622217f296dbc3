# make serve and make test are all there is to know; each installs what it needs into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CLIENTS := .venv-clients
ARGS ?=

# torch compiles with g++ unless CXX says otherwise.
ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach name,g++ clang++,$(if $(shell command -v $(name) 2>/dev/null),$(name))) g++)
endif
export CXX

# Containers often have it set: then every process compiles all that it imports again, torch too, which takes 2 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-long size check lint types install clients prerequisites clean

help:
	@echo "make serve     install, build the bundled model, serve it on 127.0.0.1:8000 (more options: make serve ARGS='--port 9000')"
	@echo "make test      install, then everything that judges a change: ruff, mypy, pytest without long tests"
	@echo "make test-long the same with long tests and with all examples of property tests; its last line says what ran"
	@echo "make size      lines of each room, and what the branch changed"
	@echo "make check     ruff and mypy alone"
	@echo "make install   make $(VENV) and install into it; done again only when pyproject.toml changes"
	@echo "make clients   make $(CLIENTS) with clients that nobody here wrote, which tests/clients runs; make test-long does it too"
	@echo "make clean     remove $(VENV) and everything built"

serve: install
	$(BIN)/npucompile serve $(ARGS)

# Every check runs, so that one failure does not hide the next. One thread a worker: the workers, and the C++ compilers
# that they start, already fill the cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: install
	@status=0; $(MAKE) --no-print-directory --keep-going check || status=1; \
	$(PYTEST) -m "not long" $(ARGS) || status=1; exit $$status

test-long: install
	@$(MAKE) --no-print-directory clients || echo "clients cannot be installed here: tests/clients is skipped" >&2
	@status=0; $(MAKE) --no-print-directory --keep-going check || status=1; \
	$(PYTEST) --hypothesis-profile=long --say-what-ran $(ARGS) || status=1; exit $$status

size:
	@$(PYTHON) tests/support/size.py

check: lint types

lint: install
	$(BIN)/ruff check .

# The repo root is the package; mypy reads it under its name through this link (see [tool.mypy] in pyproject.toml).
types: install
	@mkdir -p build/view && ln -sfn ../.. build/view/npucompile
	$(BIN)/mypy

install: $(INSTALLED)

# The stamp is as old as the install; the prerequisites are looked at every time but never cause one.
$(INSTALLED): pyproject.toml | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -e '.[test]'
	@touch $@

clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/routers.txt tests/clients/install.py $(INSTALLED)
	rm -rf $(CLIENTS)
	$(BIN)/python tests/clients/install.py "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(CLIENTS)
	@touch $@

prerequisites:
	@command -v $(PYTHON) >/dev/null || { echo "npucompile needs Python 3.11 or newer, and there is no $(PYTHON); \
	install it, or name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "npucompile needs Python 3.11 or newer, and \
	$(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "npucompile needs Python's venv module, which $(PYTHON) lacks; \
	on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo "npucompile needs a C++ compiler to build graphs for this machine, and there \
	is no $(CXX); on Debian and Ubuntu: apt-get install g++, or name one: make CXX=/path/to/clang++" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(CLIENTS) build dist artifacts *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
