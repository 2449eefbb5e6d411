"""Tests that need a GPU: the kernel at real sizes, and whole texts with and without CUDA graphs.

`pytest -m gpu` runs them. Without a GPU they are skipped, and other tests run the kernel in Triton's interpreter.
"""

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from packs import random_pack
from reference import reference_attention
from tiny_models import (
    ARCHITECTURES,
    NonsenseDrafter,
    OracleDrafter,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")
MAX_NEW = 24
# (committed, chain, tree): a long text with the largest tree, plain decoding, a small tree, a prompt, a prompt's part.
LENGTHS = [(8127, 1, 64), (4000, 1, 0), (300, 1, 7), (0, 200, 0), (1000, 300, 0), (17, 3, 40)]
MASKS = [{}, {"window": 500}, {"softcap": 30.0}, {"window": 900, "sinks": True}]
HEADS = [(8, 8), (8, 2), (8, 1)]  # each key-value head is shared by 1, 4 and 8 query heads
CASES = list(itertools.product((64, 80, 96, 128, 256), HEADS, (torch.bfloat16, torch.float16)))
WORST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(pack, **options) -> float:
    """The kernel's relative error against the slow reference in float64; NaN if the kernel wrote a NaN."""
    from laserbatch.pipeline.decoding.attention.triton_attention import triton_attention

    scale = pack.query.shape[-1] ** -0.5
    actual = triton_attention(pack.query, pack.keys, pack.values, pack.metadata, scale, **options).double()
    exact = (tensor.double() for tensor in (pack.query, pack.keys, pack.values))
    expected = reference_attention(*exact, pack.metadata, scale, **options)
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_kernel_equals_the_slow_attention(number):
    head_dim, (num_heads, num_kv_heads), dtype = CASES[number]
    pack = random_pack(LENGTHS, num_heads, num_kv_heads, head_dim, dtype=dtype, seed=number, device="cuda")
    options = dict(MASKS[number % len(MASKS)])
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(num_heads, device=DEVICE, dtype=dtype)
    assert relative_error(pack, **options) < WORST_ERROR[dtype]


def test_a_small_pack():
    """A pack with few launches, for memory checkers, which are slow."""
    pack = random_pack([(37, 1, 9), (5, 3, 64), (300, 1, 0)], 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    assert relative_error(pack) < WORST_ERROR[torch.bfloat16]


@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_texts_equal_those_of_generate(architecture, attention):
    model = tiny_model(architecture).to(DEVICE)
    prompts = tiny_prompts()
    expected = plain_texts(model, prompts, MAX_NEW)
    for batch_size, drafter in itertools.product((1, 4, 9), (OracleDrafter(expected), NonsenseDrafter())):
        engine = tiny_engine(model, batch_size=batch_size, attention=attention)
        results = engine.generate(requests_for(prompts, MAX_NEW), drafter, Greedy())
        assert {int(r.request_id): r.token_ids.tolist() for r in results} == dict(enumerate(expected))


def trained_prompts(model_dir, data) -> list[np.ndarray]:
    """Prompts that the measuring model was trained to answer with long texts."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = pq.read_table(data / "reki" / "knowledge.parquet", columns=["prompt"])["prompt"].to_pylist()[:16]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    return [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]


def test_a_trained_model_writes_in_float32_what_generate_writes(shared_models, shared_data):
    model_dir = shared_models / "bench-target"
    prompts = trained_prompts(model_dir, shared_data)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(DEVICE).eval()
    expected = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None].to(DEVICE)
        expected.append(model.generate(ids, do_sample=False, max_new_tokens=200)[0, len(prompt) :].tolist())
    settings = DecodingSettings(dtype="float32", batch_size=16, max_draft_tokens=16, min_acceptance=0.0)
    engine = Engine.from_pretrained(model_dir, settings, device="cuda")
    drafter = RetrievalDrafter(None, ("prompt", "output"), 16, 0.0)
    results = engine.generate(requests_for(prompts, 200), drafter, Greedy())
    texts = {int(r.request_id): r.token_ids.tolist() for r in results}
    ends = set(engine.end_ids)
    cut = [list(itertools.takewhile(lambda token: token not in ends, text)) for text in expected]
    assert [number for number in range(len(prompts)) if texts[number] != cut[number]] == []


def test_texts_are_the_same_with_graphs_and_without(shared_models, shared_data):
    model_dir = shared_models / "bench-target"
    prompts = trained_prompts(model_dir, shared_data)
    texts = []
    for captures in (True, False):
        settings = DecodingSettings(dtype="bfloat16", batch_size=16, max_draft_tokens=8, min_acceptance=0.0)
        engine = Engine.from_pretrained(model_dir, settings, device="cuda")
        assert engine.runner.buffered is not None, "the engine has no kernel here"
        engine.runner.buffered._captures = captures
        drafter = RetrievalDrafter(None, ("prompt", "output"), 8, 0.0)
        results = list(engine.generate(requests_for(prompts, 200), drafter, Relaxed()))
        texts.append({r.request_id: r.token_ids.tolist() for r in results})
        graphs = [bucket.graph for bucket in engine.runner.buffered.buckets.values()]
        assert any(graph is not None for graph in graphs) == captures
    assert texts[0] == texts[1]
