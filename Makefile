# Every target first makes .venv, from the versions pinned in constraints.txt.
# `make test ARGS='-k phases'` hands ARGS on to pytest; `test-all`, `demo` and `bench` take it too.

VENV_PYTHON := .venv/bin/python
DEEPSPEED := .venv/.deepspeed
INSTALLED := .venv/.installed
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3)
PIP_INSTALL := $(VENV_PYTHON) -m pip --disable-pip-version-check install -qq --no-compile \
  --no-build-isolation -c constraints.txt
# pip would compile all modules of all packages for a minute and a half. The first process that
# imports a module compiles it: each would where bytecode is not kept, as in many containers.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := $(wildcard *.py) $(patsubst %/__init__.py,%,$(wildcard */__init__.py))

IMAGE := $(or $(TRAINER_IMAGE),zerowatch/trainer:cpu)

# The servers and other programs that tests start, as program:package.
SERVERS := promtool:prometheus amtool:prometheus-alertmanager kubectl:kubernetes-client \
  tmux:tmux

.PHONY: demo test test-all check bench bench-oom verify-gpu docs image fmt clean servers optimizers

demo: $(INSTALLED)
	.venv/bin/zerowatch demo $(ARGS)

# Two workers run the jobs of ranks (tests/conftest.py). A worker that a hanging test
# has ended ends the run: started anew it would run that test again. ARGS=-n0: all in one process.
WORKERS := -n 3 --max-worker-restart 0

# The slowest tests, at the end and all in a file.
REPORTS := --durations=20 --durations-min=2 --junitxml=.build/tests.xml

test: $(INSTALLED) servers
	$(VENV_PYTHON) -m pytest $(WORKERS) -m "not slow" $(REPORTS) $(ARGS)

# The slow tests too: before an issue is closed, and before a release.
test-all: .venv/.integrations servers
	$(VENV_PYTHON) -m pytest $(WORKERS) $(REPORTS) $(ARGS)

check: $(INSTALLED) .build/zerowatch
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/vulture $(SOURCES)

bench: $(INSTALLED)
	$(VENV_PYTHON) tests/bench/run.py $(ARGS)

# Runs every known way to run out of memory; takes a quarter of an hour.
bench-oom: $(INSTALLED)
	$(VENV_PYTHON) tests/bench/memory/oom_matrix.py $(ARGS)

# Three parts of nine minutes at most; exit status 2 without a GPU. ARGS=1 runs the first part.
verify-gpu: $(INSTALLED)
	@$(VENV_PYTHON) tests/gpu/verify.py $(ARGS)

# The site, in .build/site; a broken link or reference is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

# zerowatch with its demo, as the compose files start it. ARGS='--build-arg TORCH_INDEX=' takes a
# torch with CUDA.
image:
	docker build --file docker/trainer.Dockerfile --tag $(IMAGE) $(ARGS) .

fmt: $(INSTALLED)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .build build *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# mypy finds the package by this link: the folder's own name may be no Python identifier.
.build/zerowatch:
	@mkdir -p .build && ln -sfn .. $@

# Makes .venv, also where its Python is gone.
define ENVIRONMENT
	@if ! $(VENV_PYTHON) -c '' 2>/dev/null; then \
	  found=; \
	  for python in $(PYTHONS); do \
	    $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	      && found=$$python && break; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'make: no Python >= 3.11 with venv among: $(PYTHONS).' \
	      'Install one (Debian: python3-venv) or give PYTHON=/path/to/python.' >&2; \
	    exit 1; \
	  fi; \
	  $$found -m venv --clear .venv; \
	fi
	@echo 'Installing into .venv: one to three minutes, once.'
	@$(PIP_INSTALL) pip setuptools
endef

# Without build isolation: pinned setuptools builds DeepSpeed, and no second torch is fetched. pip
# builds DeepSpeed before it installs torch: with torch, DeepSpeed's setup wants nvcc on a GPU.
$(DEEPSPEED): constraints.txt
	$(ENVIRONMENT)
	@DS_BUILD_OPS=0 $(PIP_INSTALL) deepspeed
	@touch $@

$(INSTALLED): pyproject.toml runtime/common/_hot_path.c $(DEEPSPEED)
	$(ENVIRONMENT)
	@DS_BUILD_OPS=0 $(PIP_INSTALL) -e '.[dev]'
	@touch $@

# Compiles DeepSpeed's optimizers for the tests, which otherwise do it.
optimizers: $(DEEPSPEED)
	@DS_ACCELERATOR=cpu $(VENV_PYTHON) tests/support/scripts/optimizers.py

# The libraries of the integrations, which only slow tests use.
.venv/.integrations: $(INSTALLED)
	@echo 'Installing the libraries of the integrations into .venv.'
	@$(PIP_INSTALL) -e '.[dev,integrations]'
	@touch $@

# A test whose server is missing skips itself and says so. While packages are installed,
# policy-rc.d keeps Debian from starting their services.
servers:
	@missing=; \
	for server in $(SERVERS); do \
	  command -v "$${server%:*}" >/dev/null || missing="$$missing $${server#*:}"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "Tests that need$$missing are skipped: only root on Debian or Ubuntu installs it."; \
	  exit 0; \
	fi; \
	echo "Installing$$missing for the tests."; \
	policy=/usr/sbin/policy-rc.d; \
	if [ ! -e $$policy ]; then \
	  trap "rm -f $$policy" EXIT; \
	  trap 'exit 130' INT TERM; \
	  printf '#!/bin/sh\nexit 101\n' >$$policy && chmod 755 $$policy; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	if ! { apt-get -qq update && apt-get -qq install --no-install-recommends $$missing; } >/dev/null; \
	then \
	  echo "Could not install$$missing: the tests that need it are skipped."; \
	fi
