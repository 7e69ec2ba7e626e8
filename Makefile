# make demo    convert a real BERT, fine-tune it, reload it
# make test    style and types, and every test
# make lint    style and types only
# make schemes    what the schemes say of themselves: tables of README.md, docs/schemes.md and its pictures
# make test-floor   every test, on the oldest Transformers that is supported
# Each makes its own virtual environment first. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV := .venv
FLOOR := .venvs/floor
PYTEST_ARGS ?= -n auto --dist loadfile

.PHONY: demo schemes test test-floor lint clean

demo: $(VENV)/.installed
	$(VENV)/bin/hf-relpos demo --out demo-out --overwrite

test: $(VENV)/.installed lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m pytest $(PYTEST_ARGS)

schemes: $(VENV)/.installed
	$(VENV)/bin/python scripts/scheme_report.py

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# the floor pins what the constraints pin, but for Transformers and what it bounds from above: Hub client, tokenizers
$(FLOOR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	grep -vE '^(transformers|huggingface_hub|tokenizers)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c $(FLOOR)/constraints.txt torch
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c $(FLOOR)/constraints.txt \
		"transformers==5.14.0" -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info demo-out
