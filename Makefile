# make demo   a real two-process run diverges, is rolled back and recovers (5 minutes after the install)
# make test   what the tests need, and the tests, on all cores
# make test-fast   pure parts, command line, one real rollback: a minute
# make docs   these pages as a site in build/site, with an environment of their own
# make scoreboard   what chronicle does today as figures, 20 minutes; AGAINST=FILE what changed since, ONLY="verbs size" a part
# make check  lint, types, import contracts and the tests: what .ci/run runs
#
# No variable is needed. TORCH=torch==2.12.0 another torch     TORCH_INDEX=URL    another index for it
# DEVICE=cpu|cuda       another build than the fitting one     INSTALLER=uv|pip   another installer than the one found
# PYTHON=python3.12     another interpreter                    LAUNCHER=deepspeed the demo under DeepSpeed ZeRO-2 (needs a C++ compiler)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
DEVICE ?=
INSTALLER ?=
LAUNCHER ?= torchrun
BIN := $(VENV)/bin
INSTALL = $(PYTHON) scripts/install.py --venv "$(VENV)" --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --device "$(DEVICE)" \
	--installer "$(INSTALLER)"
# hundreds of processes import torch: with bytecode that takes half as long, so a variable that forbids it does not count here
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
EVERY_CORE = -n auto
DEMO_EXTRAS = train,report$(if $(filter deepspeed,$(LAUNCHER)),$(comma)deepspeed)
comma := ,
# pure parts, the command line, one real rollback
FAST = tests/detect tests/docs tests/evidence tests/exports tests/journal tests/metrics tests/preflight \
	tests/commands/test_bad_input.py tests/commands/test_note.py tests/commands/test_story_commands.py \
	tests/e2e/test_base_install.py tests/e2e/test_names.py \
	tests/rollback/test_crc.py tests/rollback/test_formats_files.py tests/rollback/test_lr_edit.py tests/rollback/test_plan.py \
	tests/rollback/test_rollback_command.py tests/rollback/test_torch_file.py tests/rollback/test_transaction.py \
	tests/watch/test_commands.py

.PHONY: help demo test test-fast test-all check lint types imports install install-dev bench-detector scoreboard planted-bugs crash-sweep mutants chaos gpu-evidence docs picture clean

help:
	@sed -n 's/^# //p' Makefile

install:
	@$(INSTALL) --extras dev

install-dev: install

demo:
	@$(INSTALL) --extras $(DEMO_EXTRAS)
	@$(BIN)/python examples/demo.py --launcher $(LAUNCHER)

test: install
	$(PYTEST) $(EVERY_CORE) -m "not slow or sample"

test-fast: install
	$(PYTEST) $(EVERY_CORE) -m "not slow" $(FAST)

test-all: install
	$(PYTEST) $(EVERY_CORE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/python scripts/map.py --check
	$(BIN)/python scripts/channel_names.py
	$(BIN)/python scripts/house.py

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports --no-cache

check: lint types imports test

bench-detector: install
	$(BIN)/python -m benchmarks.detector

scoreboard: install
	@mkdir -p build
	$(BIN)/python -m benchmarks.scoreboard --out build/scoreboard $(if $(AGAINST),--against "$(AGAINST)") $(if $(ONLY),--only $(ONLY))

planted-bugs: install
	$(BIN)/python -m benchmarks.planted_bugs

mutants: install
	$(BIN)/python -m benchmarks.mutants

crash-sweep: install
	$(BIN)/python -m benchmarks.crash_sweep

chaos: install
	$(BIN)/python -m benchmarks.chaos

# an environment of its own, so that `make install` does not grow
build/docs-venv/installed: pyproject.toml
	@$(PYTHON) -m venv build/docs-venv
	@build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

docs: build/docs-venv/installed
	build/docs-venv/bin/python -m sphinx -W --keep-going -q -E -b html docs build/site
	@echo build/site/index.html
# at most nine minutes a call: call it again with the same OUT for what is left
OUT ?= gpu-evidence
gpu-evidence: install
	$(BIN)/python -m benchmarks.gpu_evidence --out "$(OUT)"

picture:
	cp demo/logs/demo/plots/lineage.png docs/lineage.png

clean:
	rm -rf demo build .pytest_cache .mypy_cache .ruff_cache .hypothesis
