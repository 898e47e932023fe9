# make demo     the four reference tasks: full size and timed with a GPU, reduced and emulated without one
# make test     every check: ruff, clang-format, mypy, import-linter, the documentation site, the test suite with its ten
#               slowest tests, its kernels compiled for every GPU, and a few tests with the oldest supported PyTorch
# make fuzz     random layers, tensors and calls against float64: SEED=, MINUTES=, CASES=, WORKERS=, SANITIZE=1, JSON=
# make test-thorough  the test suite with every combination of parameters; make test runs a part of long tests
# make test-oldest  more tests with the oldest PyTorch that is supported, without a GPU
# make docs     build the documentation site into artifacts/site
# make results  measure everything again on a GPU, fill the documents' tables, draw their charts; compiling PyTorch's
#               rivals of fused tails with torch.compile takes most of its time
# make format   rewrite Python, CUDA and C++ sources in the house format
# make clean    remove what the commands above made
#
# The first command makes a virtual environment in .venv. To use a Python that is already set up (a GPU
# machine without network, a container), name it: `make test VENV=none PYTHON=python3`. Nothing is then
# installed, and a checker that is missing there is skipped with a message.

PYTHON  ?= python3
VENV    ?= .venv
# CUDA major version of the NVRTC to install: cu13 or cu12.
CUDA    ?= cu13
# Test processes. On a GPU they share it.
WORKERS ?= 2
TORCH   ?= torch==2.13.0

CUDA_SOURCES := $(wildcard tconv3d/device/*.cuh tconv3d/families/*/*.cuh tconv3d/emulator/*.cpp tconv3d/emulator/*.h tconv3d/emulator/include/*.h)

ifeq ($(VENV),none)
  PY    := $(PYTHON)
  BIN   :=
  READY :=
else
  PY    := $(VENV)/bin/python
  BIN   := $(VENV)/bin/
  READY := $(VENV)/.ready
endif

# $(call if_present,command that succeeds when the tool is there,name,command): skipping is allowed only
# where we do not install, so a broken .venv cannot turn a check off.
ifeq ($(VENV),none)
  if_present = @if $(1) >/dev/null 2>&1; then echo '$(3)'; $(3); else echo 'skipped: $(2) is not installed'; fi
else
  if_present = $(3)
endif

.PHONY: demo test test-thorough test-oldest check docs fuzz results format clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(PY) -m tconv3d demo

test: check docs
	@mkdir -p artifacts && rm -rf artifacts/launches
	TCONV3D_TEST_RECORD=artifacts/launches $(PY) -m pytest --durations=10 --junitxml=artifacts/tests.xml $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=$(WORKERS) --dist=worksteal)
	$(call if_present,$(PY) -c 'from tconv3d.runtime import compiler; compiler.version()',NVRTC,PYTHONPATH=. $(PY) tests/helpers/compile_everything.py artifacts/launches artifacts/registers.csv)
	$(PY) tests/oldest_torch.py --short

test-oldest: $(READY)
	$(PY) tests/oldest_torch.py

test-thorough: $(READY)
	$(PY) -m pytest --thorough $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=$(WORKERS) --dist=worksteal)

check: $(READY)
	$(call if_present,$(PY) -m ruff --version,ruff,$(PY) -m ruff check .)
	$(call if_present,$(PY) -m ruff --version,ruff,$(PY) -m ruff format --check .)
	$(call if_present,$(BIN)clang-format --version,clang-format,$(BIN)clang-format --dry-run --Werror $(CUDA_SOURCES))
	$(call if_present,$(PY) -m mypy --version,mypy,$(PY) -m mypy tconv3d)
	$(call if_present,$(BIN)lint-imports --version,import-linter,$(BIN)lint-imports --no-cache --no-logo)

fuzz: $(READY)
	PYTHONPATH=.:tests:tests/helpers $(PY) -m fuzz --workers $(WORKERS) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CASES),--cases $(CASES)) $(if $(SANITIZE),--sanitize) $(if $(JSON),--json $(JSON))

# With --quiet, mkdocs would not count the warnings that --strict is to fail on.
docs: $(READY)
	$(call if_present,$(PY) -m mkdocs --version,mkdocs,NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict)

RESULTS := benchmarks/results/h200
BENCH    = $(PY) -m tconv3d bench
NETWORKS := $(addprefix --model benchmarks.monai_networks:,unet vnet dynunet swin_unetr mednext)

results: $(READY)
	$(BENCH) --dtype tf32 bfloat16 float16 --layout contiguous channels_last_3d --backward --host --budget 0.03 --json $(RESULTS).json
	$(BENCH) --dtype float32 --budget 0.03 --json $(RESULTS)-fp32.json
	$(BENCH) --random 60 --backward --budget 0.03 --json $(RESULTS)-random.json
	$(BENCH) --random 60 --seed 5 --backward --budget 0.03 --json $(RESULTS)-random-5.json
	$(BENCH) $(NETWORKS) --no-torch --backward --json $(RESULTS)-monai.json
	$(BENCH) --tails --random 16 --dtype tf32 bfloat16 --backward --budget 0.03 --json $(RESULTS)-tails.json
	$(PY) benchmarks/fused_check.py --json $(RESULTS)-fused.json
	$(PY) benchmarks/export_check.py --dtype tf32 bfloat16 float16 --json $(RESULTS)-export.json
	$(PY) benchmarks/train_unet.py --json $(RESULTS)-train.json
	$(PY) benchmarks/distil.py $(RESULTS).json
	$(PY) benchmarks/readme_table.py
	$(PY) docs/figures.py

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(BIN)clang-format -i $(CUDA_SOURCES)

clean:
	rm -rf .venv artifacts build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Without a GPU one fixed PyTorch is installed. With one, the PyTorch already there (it fits the driver) is
# seen from inside the environment and left alone.
ifneq ($(READY),)
$(READY): pyproject.toml
	if command -v nvidia-smi >/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(PY) -m pip install --quiet '$(TORCH)'; \
	fi
	$(PY) -m pip install --quiet --editable '.[dev,$(CUDA)]'
	touch $@
endif
