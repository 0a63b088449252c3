PYTHON ?= python3
BIN := .venv/bin
# What runs a second time without compiled kernels, as it would on a machine without a compiler.
PLAIN := tests/test_ied_small.py tests/test_ied_solution.py tests/test_ied_repeated.py tests/test_less_solution.py tests/test_less_traps.py tests/test_range.py
# Tests of values and gradients that run once more with the layers on a pretend device, without the
# compiled kernels: all of them as they are, and fewer with each of its options.
DEVICE := tests/test_definite.py tests/test_force.py tests/test_general.py tests/test_ied_repeated.py tests/test_ied_small.py tests/test_ied_traps.py tests/test_less_errors.py tests/test_less_hard_cases.py tests/test_less_solution.py tests/test_less_traps.py tests/test_nonfinite.py tests/test_projector.py tests/test_range.py tests/test_references.py tests/test_singular.py tests/test_spectral.py tests/test_symmetry.py
DEVICE_OPTIONS := tests/test_definite.py tests/test_ied_small.py tests/test_less_hard_cases.py tests/test_nonfinite.py tests/test_references.py tests/test_symmetry.py

.PHONY: demo test test-device test-plain test-sanitized test-clients test-long test-portable test-versions mutants bench docs gallery lint format clean

demo: .venv/ready
	$(BIN)/pmaf reproduce --quick

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long and not gallery"
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 $(PLAIN)

test-plain: .venv/ready
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long and not gallery"

test-device: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0
	$(BIN)/python -m pytest tests/test_launched.py
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 --device pretend $(DEVICE)
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 --device pretend --tf32 $(DEVICE_OPTIONS)
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 --device pretend --no-doubles $(DEVICE_OPTIONS)
	PMAF_NATIVE=0 $(BIN)/python -m pytest -n 2 --device pretend --default-device $(DEVICE_OPTIONS)

test-sanitized: .venv/ready
	$(BIN)/python -m tests.sanitized

test-clients: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt kornia
	$(BIN)/python -m pytest tests/test_clients.py

test-long: .venv/ready
	$(BIN)/python -m pytest -m long -s

test-portable: .venv/ready
	$(BIN)/python -m tests.portable

test-versions: .venv/ready
	$(BIN)/python -m tests.versions

mutants: .venv/ready
	$(BIN)/python -m tests.mutants

bench: .venv/ready
	$(BIN)/pmaf bench

# Warnings are errors. -E reads every page again, so that none of its warnings is missed.
docs: .venv/docs
	$(BIN)/python -m sphinx -E -W --keep-going -n docs build/docs
	@echo "The site is build/docs/index.html"

gallery: .venv/docs
	$(BIN)/python -m pytest -s tests/test_gallery.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist out docs/gallery docs/sg_execution_times.rst

# The constraints pin every version; the package itself declares ranges.
.venv/ready: pyproject.toml constraints.txt hatch_build.py $(wildcard src/pmaf/native/kernels/*)
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,test]'
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs,test]'
	touch $@
