"""Compiled layers: the texts of plain decoding, and the way back where they cannot be had."""

import copy
import logging

import pytest
import torch
from tiny_models import NonsenseDrafter, plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts
from transformers import AttentionInterface

from laserbatch.pipeline.decoding.attention.tree_attention import ATTENTION_NAME, tree_attention
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.compiled_layers import CompiledLayers, compile_layers, wants_compiling
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import ModelError

MAX_NEW = 24
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def is_compiled(model) -> bool:
    return any("forward" in vars(module) for module in model.modules())


@pytest.fixture
def compiler():
    try:
        wants_compiling("on", CPU)
    except ModelError as error:
        pytest.skip(str(error))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("architecture", ["gemma3_text"])
def test_compiled_layers_write_plain_texts(compiler, architecture):
    AttentionInterface.register(ATTENTION_NAME, tree_attention)  # as one who watched it puts it back
    model, prompts = tiny_model(architecture), tiny_prompts()
    expected = dict(enumerate(plain_texts(model, prompts, MAX_NEW)))
    loaded = prepare_model(copy.deepcopy(model), compiles=True)
    for batch_size, kv_cache in ((1, "rows"), (4, "rows"), (9, "tokens")):
        engine = Engine(loaded, DecodingSettings(batch_size=batch_size, kv_cache=kv_cache))
        results = engine.generate(requests_for(prompts, MAX_NEW), NonsenseDrafter(), Greedy())
        assert {int(r.request_id): r.token_ids.tolist() for r in results} == expected
    assert is_compiled(loaded.model)


def test_layers_that_cannot_be_compiled_run_as_they_are(monkeypatch, caplog):
    def refuse(function, **_):
        def broken(*inputs, **options):
            raise RuntimeError("no code for this\nlong story")

        return broken

    monkeypatch.setattr(torch, "compile", refuse)
    model, prompts = tiny_model(), tiny_prompts(2)
    expected = dict(enumerate(plain_texts(model, prompts, MAX_NEW)))
    with caplog.at_level(logging.WARNING):
        loaded = prepare_model(copy.deepcopy(model), compiles=True)
    assert "cannot be compiled (no code for this)" in caplog.text and not is_compiled(loaded.model)
    results = Engine(loaded).generate(requests_for(prompts, MAX_NEW))
    assert {int(r.request_id): r.token_ids.tolist() for r in results} == expected


def test_layers_that_compute_something_else_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: lambda *inputs, **options: 2 * function(*inputs, **options)
    )
    with caplog.at_level(logging.WARNING):
        loaded = prepare_model(tiny_model(), compiles=True)
    assert "other logits packed than alone" in caplog.text and not is_compiled(loaded.model)


def test_memory_that_runs_out_is_no_reason_to_go_back(monkeypatch):
    def exhausted(*inputs, **options):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch, "compile", lambda function, **_: exhausted)
    layer = torch.nn.Linear(2, 2)
    CompiledLayers([layer])
    with pytest.raises(torch.OutOfMemoryError):
        layer(torch.zeros(1, 2))
    assert "forward" in vars(layer)


def test_a_model_without_a_list_of_layers_stays_as_it_is():
    model = tiny_model()
    model.config.num_hidden_layers = 7
    assert compile_layers(model) is None


def test_who_compiles(monkeypatch, caplog):
    monkeypatch.setattr("shutil.which", lambda name: "/bin/" + name)
    assert [wants_compiling(choice, CPU) for choice in ("auto", "off", "on")] == [False, False, True]
    assert [wants_compiling(choice, CUDA) for choice in ("auto", "off", "on")] == [True, False, True]
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert not wants_compiling("auto", CUDA) and "no C compiler" in caplog.text
    with pytest.raises(ModelError, match=r"compile is on.*g\+\+"):
        wants_compiling("on", CPU)


def test_the_default_compiles_nothing():
    assert not is_compiled(tiny_engine(tiny_model()).runner.model)
