PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-long test-portable test-versions mutants bench lint format clean

demo: .venv/ready
	$(BIN)/pmaf reproduce --quick

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long"

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

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist out

# The constraints pin every version; the package itself declares ranges.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench,test]'
	touch $@
