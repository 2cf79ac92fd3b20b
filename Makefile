# make demo | make test | make test-mooncake | make bench. An active virtual environment is used as it is; otherwise .venv is made here.
TORCH ?= torch==2.13.0
MAX_JOBS ?= 2
export MAX_JOBS

ACTIVE := $(shell python3 -c 'import sys; print(sys.executable if sys.prefix != sys.base_prefix else "")' 2>/dev/null)
PY := $(if $(ACTIVE),$(ACTIVE),$(CURDIR)/.venv/bin/python)
STAMP := build/.installed$(subst /,_,$(PY))
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: install demo test lint pytest sanitize test-mooncake bench clean

install: $(STAMP)

.venv/bin/python:
	python3 -m venv .venv

# torch is installed only where there is none: pip never upgrades the one that an environment brought along.
$(STAMP): $(SOURCES) $(if $(ACTIVE),,.venv/bin/python)
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet 'setuptools>=77' 'pybind11>=3.0' ninja numpy
	$(PY) -m pip install --quiet --no-build-isolation -e '.[test]'
	@mkdir -p build && touch $@

demo: install
	$(PY) examples/cp_prefill.py $(ARGS)

test: lint pytest

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest sparse_cp_ops._config
	$(dir $(PY))clang-format --dry-run -Werror $(CXX_FILES)

pytest: install
	$(PY) -m pytest $(ARGS)

# On a machine with a GPU. The cache is off so that the tool sees each tensor as an allocation of its own.
SANITIZER = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
sanitize: install
	SPARSE_CP_OPS_ARCH=auto $(SANITIZER) --tool memcheck $(PY) tests/sanitize.py
	SPARSE_CP_OPS_ARCH=auto $(SANITIZER) --tool initcheck $(PY) tests/sanitize.py
	SPARSE_CP_OPS_ARCH=portable $(SANITIZER) --tool memcheck $(PY) tests/sanitize.py
	SPARSE_CP_OPS_ARCH=portable $(SANITIZER) --tool initcheck $(PY) tests/sanitize.py
	SPARSE_CP_OPS_ARCH=portable $(SANITIZER) --tool racecheck $(PY) tests/sanitize.py

# Installs Mooncake into the environment and its libraries into the system; the tests start and stop its servers.
MOONCAKE ?= mooncake-transfer-engine-non-cuda==0.3.13.post1
MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1 liburing2

test-mooncake: install
	dpkg -s $(MOONCAKE_LIBRARIES) >/dev/null 2>&1 || \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y $(MOONCAKE_LIBRARIES) >/dev/null; }
	$(PY) -m pip install --quiet '$(MOONCAKE)'
	SPARSE_CP_OPS_MOONCAKE=1 $(PY) -m pytest -m mooncake $(ARGS)

bench: install
	$(PY) -m sparse_cp_ops bench $(ARGS)

clean:
	rm -rf build .venv sparse_cp_ops/*.so *.egg-info
