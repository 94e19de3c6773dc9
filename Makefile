# The same commands for people and for CI. Everything installs into .venv.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TRL_VENV := benchmarks/trl/.venv
TRACKERS_VENV := .venv-trackers
DOCS_VENV := .venv-docs
VIEW_VENV := .venv-view

.PHONY: help quickstart test test-all upstream test-gpu test-deploy test-trackers test-view bench-trl check locks reference docs format clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml setup.py deploy/install deploy/locks/cpu.txt $(wildcard deploy/stand-ins/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off $(BIN)/python deploy/install cpu --develop
	touch $@

quickstart: $(VENV)/.installed  ## Train on this machine's CPU for six to eight minutes, with a report at the end
	$(BIN)/async-grpo run configs/quickstart.yaml

# Two processes on two cores. More than one torch thread per process would only compete for the cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
JOBS ?= 2

test: $(VENV)/.installed  ## Run the tests in two processes (JOBS=4: in four)
	$(PYTEST) -m 'not slow and not faults'

test-all: $(VENV)/.installed  ## Run all tests, with the slow ones and the fault injection
	$(PYTEST) -m 'not faults'
	$(BIN)/pytest -m faults

# Releases may be numbers or `latest`, for one or several packages: make upstream VLLM_ASCEND=0.24.0 VLLM=0.24.0
UPSTREAM := VLLM VLLM_ASCEND TORCH_NPU MEGATRON TE REDIS
UPSTREAM_PACKAGE_MEGATRON := MEGATRON_CORE
UPSTREAM_PACKAGE_TE := TRANSFORMER_ENGINE

upstream: $(VENV)/.installed  ## Check the interfaces of the real device packages; VLLM_ASCEND=0.24.0 checks another release
	$(foreach name,$(UPSTREAM),$(if $($(name)),UPSTREAM_$(or $(UPSTREAM_PACKAGE_$(name)),$(name))=$($(name)))) \
	$(BIN)/pytest -q --tb=no -rs tests/upstream

# Run this in an environment with the GPU packages (docs/platforms.md). The one above is CPU-only.
test-gpu:  ## Run the tests that need one CUDA GPU; without one they are skipped
	$(or $(wildcard $(BIN)/pytest),pytest) -rs tests/gpu

# tests/faults/test_deploy.py explains how to use a mirror, or local images instead of a registry.
test-deploy: $(VENV)/.installed  ## Build the CPU images, start the containers, kill some: needs Docker and half an hour
	ASYNC_GRPO_TEST_DEPLOY=1 $(BIN)/pytest -s -rs tests/faults/test_deploy.py

# Trackers have many dependencies that nothing else needs, so they get a separate environment.
$(TRACKERS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -e '.[http,trackers,modelscope,dev]'
	touch $@

test-trackers: $(TRACKERS_VENV)/.installed  ## Test every tracker and ModelScope's client with the real packages, offline: four minutes
	TRACKIO_DIR=$(TRACKERS_VENV)/trackio $(TRACKERS_VENV)/bin/pytest -rs tests/contract/test_trackers.py tests/contract/test_modelscope.py

# Playwright uses the system's Chromium (apt-get install chromium) and downloads none.
$(VIEW_VENV)/.installed: pyproject.toml tests/view/requirements.txt
	$(PYTHON) -m venv $(VIEW_VENV)
	$(VIEW_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -e '.[server,http,dev]' \
		-r tests/view/requirements.txt
	touch $@

test-view: $(VIEW_VENV)/.installed  ## Test the page of `async-grpo view` in Chromium: two minutes; UPDATE_SCREENSHOTS=runs/NAME
	$(VIEW_VENV)/bin/pytest -s -rs tests/view

# TRL needs other versions than this project, so it gets a separate environment.
$(TRL_VENV)/.installed: benchmarks/trl/requirements.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -r benchmarks/trl/requirements.txt
	touch $@

bench-trl: $(VENV)/.installed $(TRL_VENV)/.installed  ## Compare samples/s and reward over time with TRL's GRPOTrainer, on a CPU
	$(BIN)/python -m benchmarks.trl.compare

locks: $(VENV)/.installed  ## Write deploy/locks from the project's requirements and today's index
	$(BIN)/python deploy/lock.py

reference: $(VENV)/.installed  ## Write docs/reference.md and the tables of docs/coming-from-NAME.md
	$(BIN)/python -m async_grpo.app.cli.reference docs/reference.md

check: $(VENV)/.installed docs  ## Check lint, types, import rules and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Nothing else needs the dependencies of MkDocs, so it gets a separate environment.
$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5,<10' \
		'jieba>=0.42,<1'
	touch $@

docs: $(DOCS_VENV)/.installed  ## Build the documentation in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

format: $(VENV)/.installed  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environments and the runs
	rm -rf $(VENV) $(TRL_VENV) $(TRACKERS_VENV) $(DOCS_VENV) build/site $(VIEW_VENV) benchmarks/trl/.cache runs
