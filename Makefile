# `make help` lists the targets. Each one creates .venv if needed and installs again only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
JOBS ?= 2
FUZZ_SECONDS ?= 150
RELIABILITY_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs
USUAL := dev,vision,flower
EXTRAS ?= $(USUAL)
DOCS_VERSION ?= latest

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # without compiled modules every test process compiles all of source and tests again

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-browser test-faults coverage reliability fuzz smoke lint hooks format examples docs docs-serve dist release-check image
.PHONY: bench results hashes sbom audit clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What hashes.txt lists comes first, each archive checked against it. torch and torchvision follow by version alone: their archives differ
# by machine (CPU, CUDA). Nothing unpinned is fetched into a hidden build environment: the build backend is listed too.
$(STAMP): pyproject.toml constraints.txt hashes.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "emdcfl needs Python 3.11 or newer, got " + sys.version.split()[0] + "; say make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq "$(EXTRAS)" "$(USUAL)"
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement hashes.txt
endif
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

install: $(STAMP)  ## create .venv with the pinned versions

demo: $(STAMP)  ## find four groups of sites among eight, without being told there are four
	@rm -rf runs/demo
	$(BIN)/emdcfl run --scenario rotated-digits --set method.distances=all --out runs/demo

test: lint  ## lint, then all tests and doctests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

test-fast: $(STAMP)  ## the quick tests, without lint (under 90 seconds on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow' $(PYTEST_ARGS)

coverage: $(STAMP)  ## the quick tests, and how much of the source they run: at least fail_under per cent (pyproject.toml)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow' --cov --cov-report=term $(PYTEST_ARGS)

test-faults: $(STAMP)  ## kill, stop and forge nodes of a real federation on this machine (about half an hour)
	OMP_NUM_THREADS=1 EMDCFL_FAULTS=1 $(BIN)/python -m pytest tests/faults -v $(PYTEST_ARGS)

test-browser: $(STAMP)  ## the report in a headless Chromium; skipped where none is on the PATH
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e/test_browser.py -rs $(PYTEST_ARGS)

reliability: $(STAMP)  ## kill, starve and damage runs, and give them bad inputs: the table of docs/results/tables/reliability.md, a small sample
	$(BIN)/python benchmarks/reliability.py --out runs/reliability --jobs $(JOBS) $(RELIABILITY_ARGS)

fuzz: $(STAMP)  ## coverage-guided fuzzing of everything that reads bytes, FUZZ_SECONDS per target (nightly)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt atheris
	PYTHONPATH=src:. $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --corpus runs/fuzz --out runs/fuzz.jsonl

smoke: $(STAMP)  ## every table and figure of the paper at smoke scale, to see that they run (needs EMDCFL_DATA)
	OMP_NUM_THREADS=1 $(BIN)/emdcfl reproduce all --scale smoke --jobs $(JOBS) --out runs/smoke

lint: $(STAMP)  ## ruff (rules and format), mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

hooks: $(STAMP)  ## what runs before every commit, on all files (`.venv/bin/pre-commit install` turns it on)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pre-commit run --all-files

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS),docs]'
	@touch $@

EXECUTED := runs/examples/.done
$(EXECUTED): $(wildcard examples/*) $(shell find src -name '*.py')
	@$(MAKE) --no-print-directory examples

examples: $(DOCS)  ## run the notebooks and scripts of examples/ and check what they leave (about five minutes)
	$(BIN)/python .ci/examples.py
	@touch $(EXECUTED)

docs: $(DOCS) $(EXECUTED)  ## build the site in site/DOCS_VERSION, without the network; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site/$(DOCS_VERSION)

docs-serve: docs  ## show the site at http://127.0.0.1:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

dist: $(STAMP)  ## build sdist and wheel, check them, install each into an empty environment and run the README there
	$(BIN)/python .ci/dist.py

release-check: $(STAMP)  ## whether TAG is the version, and the changelog has its date
	$(BIN)/python .ci/dist.py --tag "$(TAG)"

image:  ## build the container image for the command line, a SuperLink and nodes
	docker build --file deploy/Dockerfile --tag emdcfl --build-arg PIP_EXTRA_INDEX_URL .

# the others want an --out, a GPU or hours: benchmarks/README.md
BENCHMARKS = engines memory precision server transport

bench: $(STAMP)  ## run the benchmarks that need no argument
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; PYTHONPATH=. $(BIN)/python benchmarks/$$name.py; done

results: $(STAMP)  ## write the generated tables of docs/results/tables from docs/results/data
	PYTHONPATH=. $(BIN)/python -m benchmarks.results

hashes: $(STAMP)  ## write hashes.txt from constraints.txt, after a version changed (needs the package index)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --constraint constraints.txt \
	  $(foreach extra,dev vision flower,--extra $(extra)) --no-emit-package torch --no-emit-package torchvision \
	  --output-file $(VENV)/hashes.txt pyproject.toml
	awk '/^[a-z]/ { keep = !/^(nvidia|cuda|triton)/ } keep' $(VENV)/hashes.txt > hashes.txt

sbom: $(STAMP)  ## write what is installed to runs/sbom.json (CycloneDX)
	$(BIN)/python .ci/dependencies.py sbom runs/sbom.json

audit: $(STAMP)  ## look the pinned versions up in the database of known vulnerabilities, where one can be reached
	$(BIN)/python .ci/dependencies.py audit

clean:  ## remove the environment, caches, builds and runs
	rm -rf $(VENV) build dist site runs .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
