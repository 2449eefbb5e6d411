# Three commands: install, demo, test. Everything lives in .venv; nothing outside the folder is touched.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_PROCESSES ?= 2

.PHONY: install demo test clean

install: $(STAMP)

# torch first and exactly: a looser request would take another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[encoder,dev]'
	touch $(STAMP)

demo: install
	$(BIN)/laserbatch demo

# A file's tests share worlds and nights, so they stay in one process. Files in their order: those of nights, which take
# longest, are not the last ones.
test: install
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

clean:
	rm -rf demo build *.egg-info
