# Every target sets up what it needs by itself: a Python 3.11 to 3.13 is all a fresh machine must have.
.DEFAULT_GOAL := help
.SUFFIXES:
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := $(CURDIR)/.venv
STAMP := $(VENV)/.setup-stamp
SPARK_CLASSES := $(VENV)/share/spark-broker/spark-classes.jsa
SPARK_ZIPS := $(VENV)/.spark-zips-stamp
PYTHON := $(VENV)/bin/python
UV := $(VENV)/bin/uv

# Without these, spark-submit starts its executors' Python from outside the environment, and executors bind an outside interface.
export PATH := $(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(VENV)
export PYSPARK_PYTHON := $(PYTHON)
export PYSPARK_DRIVER_PYTHON := $(PYTHON)
export SPARK_LOCAL_IP := 127.0.0.1
unexport PYTHONPATH PYTHONHOME SPARK_HOME
# Where it is set, every process compiles every module anew: three times the processor time of a start.
unexport PYTHONDONTWRITEBYTECODE

# Found when a recipe needs it and not when make starts: `make help` neither looks for Java nor installs one.
WITH_JAVA = JAVA_HOME="$$(scripts/java.sh)" && export JAVA_HOME &&

# Three lanes on two cores (tests/support/lanes.py); TEST_ARGS=-n0: one test at a time.
IN_LANES := -m pytest -n 4 --no-loadscope-reorder
PYTEST := $(PYTHON) $(IN_LANES)

COVERAGE := $(VENV)/coverage/data

# Passed on: make demo DEMO_ARGS="--rate 5000", make test TEST_ARGS="-k storage -x", make bench BENCH_ARGS="--help"
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
# Of what Hypothesis and random schedules draw in make test-all. It is printed; make test-all SEED=20261231 draws the same again.
SEED ?= $(shell date +%Y%m%d)
CHAOS_ARGS ?=
SOAK_ARGS ?=

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(STAMP): requirements.lock pyproject.toml scripts/setup.sh scripts/uv.lock.txt scripts/delta_jars.sh scripts/delta.sha256
	@scripts/setup.sh
	@touch $@

.PHONY: setup
setup: $(STAMP) ## Make .venv with the locked dependencies, find or install Java (again only when the lock changes)
	@echo "Ready: .venv (make help lists the targets)"

# Spark's Python processes start in a third of the time with it (tests/support/spark_zips.py).
$(SPARK_ZIPS): $(STAMP) tests/support/spark_zips.py
	@$(PYTHON) -m tests.support.spark_zips
	@touch $@

# Spark's JVMs start in half the time with it (tests/support/spark_jvms.py). What writes it reads the compiled archives.
$(SPARK_CLASSES): $(STAMP) tests/support/spark_jvms.py | $(SPARK_ZIPS)
	@echo "An archive of Spark's classes, for the JVMs of tests (a minute, once)"
	@$(WITH_JAVA) $(PYTHON) -m tests.support.spark_jvms >$(VENV)/spark-classes.log 2>&1 || cat $(VENV)/spark-classes.log

# pytest writes its assertions anew in every test file, once: here by one process, and not by each of four workers.
.PHONY: compile-tests
compile-tests: $(STAMP)
	@$(PYTHON) -m pytest --collect-only -q -n 0 >$(VENV)/collected.log 2>&1 || { cat $(VENV)/collected.log; exit 1; }

.PHONY: prepare
prepare: $(SPARK_CLASSES) compile-tests ## Make what the first tests of a fresh clone would make (make -j2 prepare: at once)

.PHONY: demo
demo: $(STAMP) ## Run the main job: a cluster on Spark executors, real data, a killed executor, nothing lost (DEMO_ARGS=...)
	@$(WITH_JAVA) $(PYTHON) jobs/demo.py $(DEMO_ARGS)

.PHONY: test
test: $(SPARK_CLASSES) ## Run one case of each kind of test (goal: 6 minutes on two cores) (TEST_ARGS=...)
	@$(WITH_JAVA) $(PYTEST) -m "not full" $(TEST_ARGS)

.PHONY: test-fast
test-fast: $(STAMP) ## Run the tests that need neither Spark nor Java, under 90 seconds on two cores (TEST_ARGS=...)
	@$(PYTEST) -n 6 -m fast $(TEST_ARGS)  # Most of these wait.

.PHONY: check
check: lint types ## Check style, types, and the rules about files, imports and citations: what a commit must pass
	@$(PYTHON) -m pytest -q -n 0 tests/test_tidy.py tests/unit/test_imports.py tests/docs/test_citations.py

# What make test-all runs beside each other; the tests marked `alone` follow.
ALL_BESIDE = -m "not alone and not quick" --hypothesis-seed=$(SEED) $(TEST_ARGS)
WITH_SEED = export HYPOTHESIS_PROFILE=full SEED=$(SEED)

.PHONY: test-all
test-all: $(SPARK_CLASSES) ## Run every test with the full matrices, under 25 minutes (TEST_ARGS=... SEED=...)
	@$(WITH_JAVA) $(WITH_SEED); \
	$(PYTEST) $(ALL_BESIDE) && beside=0 || beside=$$?; \
	[ $$beside -eq 0 ] || [ $$beside -eq 5 ] || exit $$beside; \
	$(PYTEST) -m alone $(TEST_ARGS) -n 0 && alone=0 || alone=$$?; \
	[ $$alone -ne 5 ] || exit $$beside; \
	exit $$alone  # 5: no test was selected; one of the two steps may have none

.PHONY: coverage
coverage: $(SPARK_CLASSES) ## Run the first step of make test-all, and say which lines and branches no process of it reached
	@mkdir -p $(dir $(COVERAGE)) && rm -f $(COVERAGE)*
	@$(WITH_JAVA) $(WITH_SEED) COVERAGE_FILE=$(COVERAGE) PYTHONPATH=$(CURDIR); \
	$(PYTHON) -m coverage run $(IN_LANES) $(ALL_BESIDE) && passed=0 || passed=$$?; \
	$(PYTHON) -m coverage combine -q && $(PYTHON) -m coverage report --skip-covered; exit $$passed

.PHONY: lint
lint: $(STAMP) ## Check style and formatting (ruff)
	@ruff check
	@ruff format --check

.PHONY: types
types: $(STAMP) ## Check types (mypy, strict)
	@mypy

.PHONY: format
format: $(STAMP) ## Format the code and apply the safe fixes
	@ruff check --fix-only
	@ruff format

.PHONY: lock
lock: $(STAMP) ## Resolve the dependencies again into requirements.lock and scripts/uv.lock.txt (LOCK_ARGS=--upgrade)
	@$(UV) pip compile pyproject.toml --all-extras --group dev --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --quiet -o requirements.lock --custom-compile-command "make lock" $(LOCK_ARGS)
	@$(UV) pip compile scripts/uv.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --quiet -o scripts/uv.lock.txt --custom-compile-command "make lock" $(LOCK_ARGS)

.PHONY: bench
bench: $(STAMP) ## Run the benchmarks and print their figures (BENCH_ARGS=...)
	@$(WITH_JAVA) $(PYTHON) -m benchmarks.run $(BENCH_ARGS)

.PHONY: chaos
chaos: $(STAMP) ## Make random faults on real clusters under load, and judge what clients saw (CHAOS_ARGS="--faults 100")
	@$(WITH_JAVA) $(PYTHON) -m tests.chaos.run $(CHAOS_ARGS)

.PHONY: soak
soak: $(STAMP) ## Let clients, topics, transactions and failovers come and go for an hour, and see what grows (SOAK_ARGS="--minutes 10")
	@$(PYTHON) -m tests.soak.run $(SOAK_ARGS)

.PHONY: near
near: $(STAMP) ## Find again near which seeds the simulator meets each known bug, after a change of the order of events
	@$(PYTHON) -m tests.sim.near

.PHONY: notebook
notebook: $(STAMP) ## Execute notebooks/quickstart.ipynb and keep its output beside it
	@$(WITH_JAVA) jupyter execute --inplace notebooks/quickstart.ipynb

.PHONY: docs
docs: $(STAMP) ## Write conf/cluster.toml and docs/configuration.md again from spark_broker/config.py
	@$(PYTHON) -m spark_broker.config

.PHONY: clean
clean: ## Remove .venv, caches and what runs left in the checkout
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo build dist spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
