# `make demo` and `make test` do all their own set-up in $(VENV). Commands that name PYTHON, as in
# `make gpu-test PYTHON=python3`, use that Python, which has torch and pytest, and install nothing.
VENV        ?= .venv
TORCH       ?= torch==2.14.1
BASE_PYTHON ?= python3
PYTHON      ?=
ARGS        ?=

SOURCES := setup.py flashbpt/version.py $(shell find csrc -type f)
ifeq ($(PYTHON),)
PY    := $(VENV)/bin/python
BUILT := $(VENV)/.built
extra  = $(VENV)/.extra-$(1)
else
PY    := $(PYTHON)
BUILT := build-in-place
extra  =
endif
ifeq ($(wildcard flashbpt/_C*.so),)
$(BUILT): FORCE
endif
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: venv demo test gpu-test bench lint sanitize cpp-example clean build-in-place FORCE

test: $(BUILT) $(call extra,test)
	$(PY) -m pytest tests $(ARGS)

# ARGS are the training's; what it leaves in its usual folder then writes, from paged caches.
demo: $(BUILT) $(call extra,demo)
	$(PY) examples/train_gpt.py $(ARGS)
	$(PY) examples/generate.py

gpu-test: $(BUILT) $(call extra,test)
	$(PY) -m pytest tests --gpu-report tests/gpu_report.json $(ARGS)

bench: $(BUILT) $(call extra,bench)
	$(PY) benchmarks/run.py $(ARGS)

# Each tool of compute-sanitizer over the short tests; any report fails. Without torch's caching
# allocator every tensor has its own bounds.
sanitize: $(BUILT) $(call extra,test)
	@$(PY) -c 'import torch; assert torch.cuda.is_available(), "make sanitize needs a GPU"'
	for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PY) -m pytest tests/test_sanitize.py -p no:cacheprovider -q $(ARGS) || exit 1; \
	done

lint: $(call extra,dev)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find csrc tests examples/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \
	  | xargs $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-format \
	    --dry-run -Werror

cpp-example: $(BUILT)
	cmake -S examples/cpp -B build/cpp-example -DPython_EXECUTABLE=$$($(PY) -c 'import sys; print(sys.executable)')
	cmake --build build/cpp-example
	build/cpp-example/attention $$($(PY) -c 'import flashbpt._C as c; print(c.__file__)')

venv: $(BUILT) $(call extra,test) $(call extra,demo) $(call extra,dev)

# The environment: a stamp a step, so that a second call has nothing to do.
$(VENV)/.made:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	  "flashbpt needs Python 3.10 or newer; name one with BASE_PYTHON=..."; exit 1; }
	@$(BASE_PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(BASE_PYTHON) cannot make" \
	  "a virtual environment: it lacks ensurepip (on Debian and Ubuntu: apt install python3-venv)"; \
	  exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(PY) -m pip --disable-pip-version-check install $(TORCH)
	touch $@

# $(VENV)/.extra-NAME: what pyproject.toml lists as NAME.
READ_EXTRA = import sys, re; text = open("pyproject.toml").read(); \
  print(*re.findall(r"\"(.+?)\"", re.search(rf"^{sys.argv[1]} = \[(.*?)\]$$", text, re.M | re.S)[1]))
$(VENV)/.extra-%: $(VENV)/.made pyproject.toml
	@echo "installing the extra '$*' of pyproject.toml"
	@$(PY) -m pip --quiet --disable-pip-version-check install $$($(PY) -c '$(READ_EXTRA)' $*)
	touch $@

# In place, so that a rebuild compiles only what has changed; the .pth file puts this folder on the
# path of the environment.
$(VENV)/.built: $(SOURCES) $(VENV)/.torch $(VENV)/.extra-build
	$(PY) setup.py build_ext --inplace
	$(PY) -c 'import site, os; open(site.getsitepackages()[0] + "/flashbpt-dev.pth", "w").write(os.getcwd())'
	touch $@

build-in-place:
	$(PY) setup.py build_ext --inplace

clean:
	rm -rf build dist *.egg-info flashbpt/_C*.so flashbpt/_build.py
	rm -f $(VENV)/.built
