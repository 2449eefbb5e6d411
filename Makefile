# Three commands: install, demo, test. Everything lives in .venv; nothing outside the folder is touched.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

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

test: install
	$(BIN)/python -m pytest -q

clean:
	rm -rf demo build *.egg-info
