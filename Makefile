# make demo    convert a real BERT for longer texts, find in them what it could not read
# make test    style and types, and the fast tests: whether a change of the library is right
# make test-more    the other tiers (TIERS in tests/selection.py): documents, ecosystem, hub, scripts, slow
# make test-all    every tier with every case; the two above choose cases that meet every kind of term
# make fuzz    property tests with FUZZ_EXAMPLES random examples of each, and the table of docs/reliability.md
# make lint    style, types and declared dependencies only
# make coverage    share of lines that the fast tests run, by file
# make schemes    what the schemes say of themselves: docs/schemes.md and its pictures
# make families   which checkpoints are read: docs/families.md
# make test-floor   the tests that meet Transformers, on the oldest one that is supported
# make test-newest   the tests that meet other libraries, on the newest releases of all of them but PyTorch, unpinned
# make docs    the site of docs/, into site/; warnings, such as a link to nothing, are errors
# make release-check    source distribution and wheel, checked; the wheel in an empty environment runs the demo, the code of
#                       README.md and docs/get_started.md, and the ways in of three new users (tests/ways_in); and test-newest.
#                       TAG=v0.1.0: that version.py and CHANGELOG.md have this version
# Each makes its own virtual environment first. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV := .venv
FLOOR := .venvs/floor
NEWEST := .venvs/newest
# whose new releases are worth a run
WATCHED := accelerate|datasets|huggingface_hub|numpy|onnx.*|openvino|peft|ray|safetensors|sentence-transformers|tokenizers|torchao|transformers
RELEASE := .venvs/release
WHEEL := $(CURDIR)/.venvs/wheel
PYTEST_ARGS ?= -n auto --dist loadgroup
TIERS ?= documents or ecosystem or hub or scripts or slow
FUZZ_EXAMPLES ?= 1000
# what calls Transformers rather than PyTorch alone
FLOOR_TESTS := $(addprefix tests/test_, $(addsuffix .py, buffers card chunked convert deberta_checkpoints distil \
	families family_parity gated_feed_forward host hub legacy live loaded machine memory models modules \
	optimize padding patch public_names rotary_checkpoints saved_code sources tools_outputs tools_packing tools_peft \
	tools_pipelines tools_quantization tools_sentence_transformers trainer)) \
	tests/schemes/test_every_scheme.py tests/schemes/test_harmonic.py

TOOLS_TESTS := $(wildcard tests/test_tools_*.py) $(addprefix tests/test_, $(addsuffix .py, graph_export host live_tools \
	machine trainer_features))

.PHONY: check-tag coverage demo docs families fuzz release-check schemes test test-all test-more test-floor test-newest newest lint clean

demo: $(VENV)/.installed
	$(VENV)/bin/hf-relpos demo --out demo-out --overwrite

test: $(VENV)/.installed lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

coverage: $(VENV)/.installed
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) --cov=hf_relpos --cov-report=term:skip-covered

test-more: $(VENV)/.installed
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "$(TIERS)"

test-all: $(VENV)/.installed lint
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) --full

test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m pytest $(PYTEST_ARGS) $(FLOOR_TESTS)

# nothing to run where the pins are the newest releases: the other tiers have run it
test-newest: newest
	@diff $(NEWEST)/pins.txt $(NEWEST)/versions.txt | grep -E '^[<>] ($(WATCHED))==' > $(NEWEST)/newer.txt; \
	if [ ! -s $(NEWEST)/newer.txt ]; then \
		echo "make test-newest: the pinned versions are the newest releases"; \
	else \
		echo "make test-newest: pinned (<) and newest (>) versions"; cat $(NEWEST)/newer.txt; \
		tests="$(TOOLS_TESTS)"; \
		! grep -qE '(huggingface_hub|tokenizers|transformers)==' $(NEWEST)/newer.txt || tests="$$tests $(FLOOR_TESTS)"; \
		$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS) $$(printf '%s\n' $$tests | sort -u); \
	fi

fuzz: $(VENV)/.installed
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(VENV)/bin/python -m pytest $(PYTEST_ARGS) --hypothesis-profile=fuzz \
		--fuzz-counts docs/results/fuzz.json tests/test_fuzz_*.py
	$(VENV)/bin/python scripts/maintenance/write_cards.py

schemes: $(VENV)/.installed
	$(VENV)/bin/python scripts/maintenance/scheme_report.py

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

families: $(VENV)/.installed
	$(VENV)/bin/python scripts/maintenance/family_report.py

check-tag:
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hf_relpos/version.py); \
	if [ -n "$(TAG)" ] && ! { [ "$(TAG)" = "v$$version" ] && grep -q "^## \[$$version\] - " CHANGELOG.md; }; then \
		echo "TAG=$(TAG): hf_relpos/version.py has $$version, and CHANGELOG.md needs a heading '## [$$version] - DATE'"; \
		exit 1; \
	fi

# the wheel is made of the source distribution; what it is tried with is not the checkout, and none of its files are near
release-check: check-tag $(VENV)/.installed test-newest
	rm -rf build dist $(RELEASE) $(WHEEL)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(RELEASE)/bin/python -m build --quiet
	$(RELEASE)/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	folder=$$(mktemp -d) && cd $$folder && env -u PYTHONPATH HF_HUB_OFFLINE=1 sh -euxc '\
		$(WHEEL)/bin/hf-relpos --version; \
		$(WHEEL)/bin/hf-relpos schemes shaw; \
		$(WHEEL)/bin/hf-relpos demo --overwrite; \
		$(WHEEL)/bin/python -c "import hf_relpos, pathlib; \
			assert (pathlib.Path(hf_relpos.__file__).parent / \"py.typed\").exists()"' && rm -r $$folder
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt sentence-transformers
	$(VENV)/bin/python -m pytest -q -n 0 --full --interpreter $(WHEEL)/bin/python tests/test_doc_blocks.py \
		-k "README or get_started or ways_in"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/deptry hf_relpos

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# the floor pins what the constraints pin, but for Transformers and what it bounds from above: Hub client, tokenizers
$(FLOOR)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOOR)
	grep -vE '^(transformers|huggingface_hub|tokenizers|txtai)==' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c $(FLOOR)/constraints.txt torch
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c $(FLOOR)/constraints.txt \
		"transformers==5.5.0" -e ".[dev]"
	touch $@

# packages of the first environment, under those that have newer releases. PyTorch's newest is gigabytes of CUDA.
newest: $(VENV)/.installed
	$(PYTHON) -m venv --clear $(NEWEST)
	$(VENV)/bin/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(NEWEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/pins.pth
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(VENV)/bin/python -m pip freeze --exclude-editable > $(NEWEST)/pins.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		-c $(NEWEST)/constraints.txt -e ".[dev]"
	$(NEWEST)/bin/python -m pip freeze --exclude-editable > $(NEWEST)/versions.txt

clean:
	rm -rf $(VENV) .venvs build dist site *.egg-info demo-out
