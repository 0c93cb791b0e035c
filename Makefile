# Two commands: `make train` and `make test`. Each makes .venv first where there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test test-all test-without-ray test-with-ray test-wheel test-ray chaos lint format clean

train: $(VENV)/installed ## the default recipe, on this machine's CPU
	$(BIN)/raygpt train tiny

# Every contract, verb and bad input at least once, in about ten minutes on two cores: two halves of about the
# same length at the same time. One mostly compiles, on one core; the other, on the session's Ray cluster, mostly starts processes.
CASES := not slow and not extended
test: $(VENV)/installed-dev
	$(MAKE) --jobs=2 --keep-going CASES='$(CASES)' test-without-ray test-with-ray

# And what repeats these on other engines, meshes and variants.
test-all: CASES := not slow
test-all: test

WITHOUT_RAY := $(addprefix tests/,engines evaluation inference models planning show sweep $(addsuffix .py,test_bench \
	test_extending chaos/test_boundaries chaos/test_trust corpus/test_fetching corpus/test_hugging_face \
	corpus/test_lanes corpus/test_order corpus/test_tokenizers interop/test_tokenizer_json serving/test_batching \
	training/test_loop training/test_loop_saving training/test_loop_stopping training/test_tracking))
test-without-ray:
	$(BIN)/python -m pytest -m '$(CASES)' $(WITHOUT_RAY)

test-with-ray:
	$(BIN)/python -m pytest -m '$(CASES)' $(addprefix --ignore=,$(WITHOUT_RAY))

# What takes minutes: twenty kills for each engine, nodes that come and go. About three quarters of an hour in all.
chaos: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check raygpt tests benchmarks examples
	$(BIN)/ruff check raygpt tests benchmarks examples
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format raygpt tests benchmarks examples
	$(BIN)/ruff check --fix raygpt tests benchmarks examples

# The suite against a wheel in an environment and a folder of its own: what users install, not what lies here. Only the
# packages that it needs are .venv's: a second copy of them would be minutes of installing the same.
WHEEL_TESTS ?= tests
PACKAGES := "import sysconfig; print(sysconfig.get_path('purelib'))"
test-wheel: $(VENV)/installed-dev
	$(eval OUTSIDE := $(shell mktemp -d))
	$(BIN)/python -m build --wheel --outdir $(OUTSIDE)/dist .
	$(PYTHON) -m venv $(OUTSIDE)/venv
	$(OUTSIDE)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(OUTSIDE)/dist/*.whl
	$(BIN)/python -c $(PACKAGES) > "$$($(OUTSIDE)/venv/bin/python -c $(PACKAGES))/venv.pth"
	cp -r tests $(OUTSIDE)/
	cd $(OUTSIDE) && RAYGPT_CHECKOUT=$(CURDIR) venv/bin/python -m pytest -m 'not slow' $(WHEEL_TESTS)
	rm -rf $(OUTSIDE)

# The tests that touch Ray Train on the second newest minor of Ray that the registry has: what breaks is listed at the
# end, Ray's private parts by name. Only Ray is installed, beside .venv's packages.
OTHER_RAY := .venv-ray
RAY_TESTS ?= $(addprefix tests/training/test_,$(addsuffix .py,ray_private faults_judged mailbox function datasets scaling train))
SECOND_MINOR := awk -F'[ ,]+' '/^Available/ { for (i = 3; i <= NF; i++) { split($$i, v, "."); \
	if (v[2] != last) { last = v[2]; if (++minors == 2) { print $$i; exit } } } }'
test-ray: $(VENV)/installed-dev
	$(PYTHON) -m venv --clear $(OTHER_RAY)
	$(BIN)/python -c $(PACKAGES) > "$$($(OTHER_RAY)/bin/python -c $(PACKAGES))/venv.pth"
	$(OTHER_RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		"ray==$$($(BIN)/python -m pip index versions ray 2>/dev/null | $(SECOND_MINOR))"
	$(OTHER_RAY)/bin/python -c "import ray; print('Ray', ray.__version__)"
	PYTHONPATH=$(CURDIR) $(OTHER_RAY)/bin/python -m pytest -m 'not slow' -rfE --tb=line $(RAY_TESTS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OTHER_RAY) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
