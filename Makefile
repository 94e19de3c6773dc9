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

quickstart: $(VENV)/.installed  ## The whole loop on this machine's CPU: six to eight minutes, with a report at the end
	$(BIN)/async-grpo run configs/quickstart.yaml

# Two processes on two cores: each test has one thread of torch, because more would wait for each other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
JOBS ?= 2

test: $(VENV)/.installed  ## The test suite, in two processes (JOBS=4: in four)
	$(PYTEST) -m 'not slow and not faults'

test-all: $(VENV)/.installed  ## The test suite with its slow tests and its fault injection
	$(PYTEST) -m 'not faults'
	$(BIN)/pytest -m faults

# Another release of one or several, or `latest`: make upstream VLLM_ASCEND=0.24.0 VLLM=0.24.0
UPSTREAM := VLLM VLLM_ASCEND TORCH_NPU MEGATRON TE REDIS
UPSTREAM_PACKAGE_MEGATRON := MEGATRON_CORE
UPSTREAM_PACKAGE_TE := TRANSFORMER_ENGINE

upstream: $(VENV)/.installed  ## Contracts against the real packages of devices; VLLM_ASCEND=0.24.0 tries another release
	$(foreach name,$(UPSTREAM),$(if $($(name)),UPSTREAM_$(or $(UPSTREAM_PACKAGE_$(name)),$(name))=$($(name)))) \
	$(BIN)/pytest -q --tb=no -rs tests/upstream

# In whatever environment has the GPU's packages (docs/platforms.md): the one above is for CPUs.
test-gpu:  ## The tests that need one CUDA GPU; skipped, with the reason, where there is none
	$(or $(wildcard $(BIN)/pytest),pytest) -rs tests/gpu

# Where images come from, behind a mirror or without a registry: tests/faults/test_deploy.py.
test-deploy: $(VENV)/.installed  ## Build the CPU images, bring the containers up, kill some: needs Docker, half an hour
	ASYNC_GRPO_TEST_DEPLOY=1 $(BIN)/pytest -s -rs tests/faults/test_deploy.py

# The trackers' dependencies are many, and none of them is the engine's or the trainer's.
$(TRACKERS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -e '.[http,trackers,modelscope,dev]'
	touch $@

test-trackers: $(TRACKERS_VENV)/.installed  ## What every tracker and ModelScope's client promise, with the real packages, offline: four minutes
	TRACKIO_DIR=$(TRACKERS_VENV)/trackio $(TRACKERS_VENV)/bin/pytest -rs tests/contract/test_trackers.py tests/contract/test_modelscope.py

# Playwright drives the Chromium of the system (apt-get install chromium); it downloads none.
$(VIEW_VENV)/.installed: pyproject.toml tests/view/requirements.txt
	$(PYTHON) -m venv $(VIEW_VENV)
	$(VIEW_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -e '.[server,http,dev]' \
		-r tests/view/requirements.txt
	touch $@

test-view: $(VIEW_VENV)/.installed  ## The page of `async-grpo view` in Chromium: two minutes; UPDATE_SCREENSHOTS=runs/NAME
	$(VIEW_VENV)/bin/pytest -s -rs tests/view

# TRL's dependencies are not the project's, so it has an environment of its own.
$(TRL_VENV)/.installed: benchmarks/trl/requirements.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off -r benchmarks/trl/requirements.txt
	touch $@

bench-trl: $(VENV)/.installed $(TRL_VENV)/.installed  ## Samples/s and reward over time beside TRL's GRPOTrainer, on CPU
	$(BIN)/python -m benchmarks.trl.compare

locks: $(VENV)/.installed  ## Write deploy/locks from what the code needs and the index has today
	$(BIN)/python deploy/lock.py

reference: $(VENV)/.installed  ## Write docs/reference.md and docs/coming-from.md from the code
	$(BIN)/python -m async_grpo.app.cli.reference docs/reference.md

check: $(VENV)/.installed docs  ## Lint, types, import rules, the documentation's site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# MkDocs' dependencies are none of the project's own.
$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --progress-bar off 'mkdocs>=1.6,<2' 'mkdocs-material>=9.5,<10' \
		'jieba>=0.42,<1'
	touch $@

docs: $(DOCS_VENV)/.installed  ## The documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

format: $(VENV)/.installed  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and the runs
	rm -rf $(VENV) $(TRL_VENV) $(TRACKERS_VENV) $(DOCS_VENV) build/site $(VIEW_VENV) benchmarks/trl/.cache runs
