PYTHON ?= python3
# Without bytecode every process compiles torch and transformers anew, which takes longer than most tests.
export PYTHONDONTWRITEBYTECODE =
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
VENV_OLDEST ?= .venv-oldest
SOURCES = hydra_transformers tests benchmarks examples experiments scripts notebooks setup.py
# One thread per worker: two workers with two threads each are slower on two cores than two with one. Stealing work leaves
# the tests of a file with one worker, which makes what they share once, and still lets no worker wait at the end.
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(1)/bin/python -m pytest -n auto --dist worksteal

.PHONY: help install test test-all test-oldest test-ray gpu coverage hf-tests demo docs notebooks style quality bytecode clean

help:
	@echo "make test         the short run of the tests, on the versions of constraints.txt (CONSTRAINTS=another file)"
	@echo "make test-all     all tests"
	@echo "make test-oldest  all tests, on the oldest supported torch and transformers"
	@echo "make test-ray     the tests of Ray, with Ray installed beside the rest"
	@echo "make gpu          everything once on this machine's GPU, with the packages that are installed"
	@echo "make demo         install what the demo needs, fine-tune on 20 intents, calibrate, say \"I don't know\""
	@echo "make docs         build the site into site/: the pages, and the reference from the docstrings"
	@echo "make notebooks    run the notebooks and check that they succeed"
	@echo "make quality      check formatting, lint, layers of imports and types; make style repairs the first two"
	@echo "make coverage     tests with a coverage report"
	@echo "make hf-tests     the common model tests of a Transformers checkout: CHECKOUT=path"

# torch comes first: asked for by name with its version pinned, pip takes the CPU build where there is one. Bytecode is made of
# what is imported, not of all that is installed, which takes longer.
define install
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-compile --upgrade pip
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) torch
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) --editable ".[test,quality,demo]"
	touch $(1)/.installed $(1)/.installed-demo
endef

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call install,$(VENV),$(CONSTRAINTS))

# The demo alone, with pip's progress: the tools of tests and quality would take as long again.
$(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS)
	@echo "Installing torch, Transformers and the demo into $(VENV). With torch's CPU build 480 MB are downloaded and 1.6 GB"
	@echo "needed on disk (several GB more with CUDA): about two minutes and the time of the download. Then the demo starts."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --upgrade pip
	$(VENV)/bin/python -m pip install --no-compile --constraint $(CONSTRAINTS) torch
	$(VENV)/bin/python -m pip install --no-compile --constraint $(CONSTRAINTS) --editable ".[demo]"
	touch $@

# The oldest transformers does not load image processors without torchvision.
$(VENV_OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install,$(VENV_OLDEST),constraints-oldest.txt)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --no-compile --constraint constraints-oldest.txt torchvision

install: $(VENV)/.installed

test: $(VENV)/.installed
	$(call PYTEST,$(VENV)) -m "not slow" $(TESTS)

test-all: $(VENV)/.installed
	$(call PYTEST,$(VENV)) $(TESTS)

test-oldest: $(VENV_OLDEST)/.installed
	$(call PYTEST,$(VENV_OLDEST)) $(TESTS)

$(VENV)/.installed-ray: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable ".[ray]"
	touch $(VENV)/.installed-ray

# One process: all tests use one cluster, which has processes of its own.
test-ray: $(VENV)/.installed-ray
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest tests/serving/test_ray.py

# Nothing is installed: a machine with a GPU often has its own torch, and no way to the registry.
gpu:
	PYTHONPATH=. $(PYTHON) scripts/gpu_check.py

coverage: $(VENV)/.installed
	$(call PYTEST,$(VENV)) --cov --cov-report=term $(TESTS)

hf-tests: $(VENV)/.installed
	HF_HUB_OFFLINE=1 $(VENV)/bin/python scripts/hf_common_tests.py $(CHECKOUT)

demo: $(VENV)/.installed-demo
	$(VENV)/bin/hydra-transformers demo
	@echo; echo "The command is in $(VENV)/bin: first run  source $(VENV)/bin/activate"

$(VENV)/.installed-docs: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $(VENV)/.installed-docs

# Strict: a page that is missing, or a link or anchor that leads nowhere, fails.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet

notebooks: $(VENV)/.installed
	$(VENV)/bin/python scripts/build_notebooks.py --check

style: $(VENV)/.installed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

quality: $(VENV)/.installed
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	PYTHONPATH=. $(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# What tests import, compiled once: the two workers of a first run would both compile all of it.
bytecode: $(VENV)/.installed
	-@$(VENV)/bin/python -m pytest --collect-only --quiet > /dev/null

clean:
	rm -rf $(VENV) $(VENV_OLDEST) build dist site *.egg-info .pytest_cache .ruff_cache demo-output
