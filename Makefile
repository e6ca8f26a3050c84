# The same targets on a desk and in CI. `make serve` and `make test` install first what is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Without a GPU: the CPU build of torch, a tenth of the size. Its index is asked, for torch alone, unless pip has --find-links
# configured: such a folder is how a machine that cannot reach the index gets the build. Of equal versions pip takes "+cpu".
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

SERVE_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

.PHONY: help install serve test check docs dist format sanitize bench gpu report snapshot clean

help:
	@echo "make serve     install, then serve the bundled model on http://127.0.0.1:30000 (SERVE_ARGS adds options)"
	@echo "make test      install, then run the tests (PYTEST_ARGS adds options)"
	@echo "make check     ruff, mypy, import-linter, clang-format, the house tests; compiles the kernels for each kind of chip"
	@echo "make docs      the documentation as a site, build/site/index.html"
	@echo "make dist      wheel and sdist in dist/, checked, and the wheel tried in an empty environment"
	@echo "make bench     the benchmarks (BENCH_ARGS adds options)"
	@echo "make gpu       what this GPU does with a step, kernel by kernel, into benchmarks/results/ (GPU_ARGS adds options)"
	@echo "make report    all results of the benchmarks on one page, build/report/index.html"
	@echo "make format    let ruff and clang-format format and fix"
	@echo "make sanitize  the tests of the CPU's kernels with the address and undefined-behaviour sanitizers"
	@echo "make snapshot  write the command line's and the package's surface into tests/house/cli_options.txt and docs/"
	@echo "make clean     remove .venv and the tools' caches"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch for a GPU brings the triton that it was built with; the pin is for the CPU build, which comes without.
	@if command -v nvidia-smi >/dev/null; then grep -v '^triton==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	@index=; command -v nvidia-smi >/dev/null || $(BIN)/pip config list | grep -q find-links || index="--extra-index-url $(TORCH_INDEX)"; \
	set -x; $(BIN)/pip install --quiet --disable-pip-version-check $$index --no-deps --constraint $(VENV)/constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@# Otherwise the first start compiles them. Without a compiler everything runs on plain torch.
	@$(BIN)/python -m mtpserve_kernels.cpu.build || true
	@touch $@

serve: install
	$(BIN)/mtpserve launch --model demo --speculative-algorithm NEXTN $(SERVE_ARGS)

# A process for each core: most tests keep one busy and no more.
test: install
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --quiet --numprocesses 2 tests/house
	$(BIN)/python -m tests.kernels.matrix
	$(BIN)/python -m tests.kernels.cpu.check

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Without build isolation, which would ask the package index for setuptools: the extra `dev` has it.
dist: install
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.packaging.check dist

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/mtpserve_kernels/cpu/src/* $$(find tests/kernels/cpu -name '*.h' -o -name '*.cpp')

# The tests of the CPU's kernels with gcc's address and undefined-behaviour sanitizers.
sanitize: install
	$(BIN)/python -m tests.kernels.cpu.objects sanitized

bench: install
	@set -e; for script in $(filter-out benchmarks/report.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script $(BENCH_ARGS); done

# gpu_h100_1a2b3c4.json: device and commit. Without a GPU it says so and writes nothing.
gpu: install
	@name=$$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n '1s/NVIDIA //; 1s/[ -].*//; 1p' | tr A-Z a-z); set -x; \
	$(BIN)/python benchmarks/gpu_profile.py --json benchmarks/results/gpu_$${name:-none}_$$(git rev-parse --short HEAD).json $(GPU_ARGS)

report: install
	$(BIN)/python benchmarks/report.py

snapshot: install
	$(BIN)/python -m tests.house.surface

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
