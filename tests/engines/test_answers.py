"""The part of a model's output that is stored is its own turn, for every engine and all drafts."""

import importlib.util
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from parrots import parrot

from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.engines.answers import Answers
from laserbatch.pipeline.engines.own import OwnEngine
from laserbatch.pipeline.engines.vllm import VllmEngine, _Text
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.chat_format import encode_chat
from laserbatch.pipeline.storage.quarantine import reason_of
from laserbatch.pipeline.storage.stats import DecodingStats

ANSWER = ["A tense", " crime film", "."]
HUMAN = (
    "{% for m in messages %}{{ '### Human: ' if m['role'] == 'user' else '### Assistant: ' }}{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:{% endif %}"
)


def answers(folder, max_new_tokens: int = 24, grammar: str | None = None, **options) -> list:
    """The engine's answers without drafts, and with drafts that contain everything the model writes."""
    results = []
    for drafts in ({"drafters": (), "max_draft_tokens": 0}, {"max_draft_tokens": 8, "min_acceptance": 0.0}):
        decoding = DecodingSettings(model=str(folder), verifier="greedy", batch_size=2, **drafts, **options)
        engine = OwnEngine(folder, decoding, "cpu", 1, 1, 1, {}, folder)
        prompt = encode_chat(engine.tokenizer, "Describe Heat.", None, {})
        raw = engine.engine.generate([GenerationRequest("0", prompt, max_new_tokens=max_new_tokens)])
        written = next(iter(raw)).token_ids
        drafted_from = np.append(written, written)
        request = GenerationRequest("0", prompt, drafted_from, None, max_new_tokens, grammar=grammar)
        results += engine.generate("item", [request], decoding)
    plain, drafted = results
    assert drafted.num_accepted > 0, "nothing was drafted, so nothing was compared"
    for name in ("text", "finish_reason", "end_id", "role_mark"):
        assert getattr(plain, name) == getattr(drafted, name)
    assert plain.token_ids.tolist() == drafted.token_ids.tolist() and len(drafted.sources) == len(drafted.token_ids)
    return [plain, engine.tokenizer]


def test_a_template_s_own_role_mark_ends_a_text_where_the_configuration_names_another_end_token(tmp_path):
    script = [*ANSWER, "<|end|>", "<|user|>", "And", " another", " question?"]
    plain, _ = answers(parrot(tmp_path / "m", script, end="<|pad|>"))
    assert (plain.text, plain.finish_reason, plain.role_mark) == ("A tense crime film.", "role_mark", "<|end|>")
    assert len(plain.token_ids) == 3 and plain.num_invented == 0
    stats = DecodingStats.of([plain, plain], 1.0)
    assert stats.role_marks == {"<|end|>": 2} and stats.finish_reasons == {"role_mark": 2}


def test_a_role_mark_of_several_tokens_is_cut_with_all_that_follows(tmp_path):
    script = [*ANSWER, "\n", "#", "##", " Human", ":", " And this?", "\n ", "### ", "Assistant: Yes"]
    folder = parrot(tmp_path / "m", script, template=HUMAN, after="### Assistant:")
    plain, tokenizer = answers(folder)
    assert (plain.text, plain.finish_reason) == ("A tense crime film.", "role_mark")
    assert (plain.role_mark, plain.num_invented) == ("### Human:", len(script) - 3)
    assert tokenizer.decode(plain.token_ids) == plain.text


THOUGHTS = ["Okay,", " so", " the user", " wants it."]
OPENED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ([*THOUGHTS, "</think>", "\n\n", *ANSWER], {"template": OPENED, "after": "\n"}),
        (["<think>", *THOUGHTS, "</think>", "\n", *ANSWER], {}),
        (["[THINK]", *THOUGHTS, "[/THINK]", *ANSWER], {"special": ["[THINK]", "[/THINK]"]}),
        (
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                *THOUGHTS,
                "<|end|>",
                "<|start|>",
                "assistant",
                "<|channel|>final<|message|>",
                *ANSWER,
            ],
            {"special": ["<|channel|>", "<|message|>", "<|start|>", "<|return|>"], "end": "<|return|>"},
        ),
        (["<", "reason", "ing>", *THOUGHTS, "</", "reasoning>", "\n", "<answer>", *ANSWER, "</answer>"], {}),
    ],
)
def test_thoughts_are_cut_and_counted_whoever_opens_them(tmp_path, script, parts):
    plain, tokenizer = answers(parrot(tmp_path / "m", script, **parts), 40)
    assert (plain.text, plain.finish_reason) == ("A tense crime film.", "end_of_text")
    assert tokenizer.convert_ids_to_tokens(plain.token_ids.tolist())[0] == "A tense" and len(plain.token_ids) == 3
    assert plain.num_thought_tokens == len(script) - 3 and plain.num_invented == 0
    assert [len(part) for part in plain.written] == [len(script)] * 2, "later texts are drafted from thoughts, too"


def test_a_mark_of_thoughts_that_a_text_quotes_is_text(tmp_path):
    """Titles of tables are encoded as plain tokens, and so are quotations of them."""
    script = ["A tense", " film", "</", "think", ">", " of"]
    plain, _ = answers(parrot(tmp_path / "m", script, tokens=["<think>", "</think>"]))
    assert (plain.text, plain.num_thought_tokens) == ("A tense film</think> of", 0)


@pytest.mark.parametrize("parts", [{"template": OPENED, "after": "\n", "tokens": ["<think>"]}, {}])
def test_thoughts_that_do_not_end_are_no_text(tmp_path, parts):
    script = [*([] if parts else ["<think>"]), *THOUGHTS, *(f" a{n}" for n in range(40))]
    plain, _ = answers(parrot(tmp_path / "m", script, **parts))
    assert (plain.finish_reason, plain.num_thought_tokens) == ("unclosed_thoughts", 24)
    assert "Okay, so the user" in plain.text


GENRE = 'start: "Genre: " /[a-z]{3}/'
BEFORE_ANSWERS = pytest.mark.parametrize(
    ("script", "parts", "thinking"),
    [
        ([*THOUGHTS, "</think>", *ANSWER], {"template": OPENED, "after": "\n", "tokens": ["<think>"]}, "off"),
        (["<think>", *THOUGHTS, "</think>", *ANSWER], {}, "cut"),
        (ANSWER, {"tokens": ["<think>", "</think>"]}, "cut"),
    ],
)


@BEFORE_ANSWERS
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make test-vllm` does it")
def test_vllm_writes_an_answer_after_thoughts_in_its_form(tmp_path, script, parts, thinking):
    folder = parrot(tmp_path / "m", script, **parts)
    of_vllm = {"engine": "vllm", "drafters": (), "vllm": {"enforce_eager": True, "max_model_len": 256}}
    decoding = DecodingSettings(model=str(folder), verifier="greedy", thinking=thinking, **of_vllm)
    engine = VllmEngine(folder, decoding, "cpu", 1, 8, {}, tmp_path)
    prompt = encode_chat(engine.tokenizer, "Describe Heat.", None, {})
    request = GenerationRequest("0", prompt, max_new_tokens=40, grammar=GENRE)
    (result,) = engine.generate("item", [request], decoding)
    assert re.fullmatch("Genre: [a-z]{3}", result.text) and result.num_thought_tokens == len(script) - 3


@BEFORE_ANSWERS
def test_an_answer_after_thoughts_has_its_form(tmp_path, script, parts, thinking):
    folder = parrot(tmp_path / "m", script, **parts)
    plain, _ = answers(folder, 40, GENRE, thinking=thinking)
    assert re.fullmatch("Genre: [a-z]{3}", plain.text) and plain.finish_reason == "end_of_text"
    assert plain.num_thought_tokens == len(script) - 3, "thoughts are written as the model likes"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(plain.written[0]).removesuffix(plain.text) == "".join(script[:-3])


def test_thoughts_that_leave_no_room_for_an_answer_fail_with_the_advice(tmp_path):
    folder = parrot(tmp_path / "m", ["<think>", *THOUGHTS, "</think>", *ANSWER])
    decoding = DecodingSettings(model=str(folder), verifier="greedy", thinking="cut")
    engine = OwnEngine(folder, decoding, "cpu", 1, 1, 1, {}, folder)
    prompt = encode_chat(engine.tokenizer, "Describe Heat.", None, {})
    request = GenerationRequest("0", prompt, max_new_tokens=14, grammar=GENRE)
    (failure,) = engine.generate("item", [request], decoding)
    assert failure.reason == (
        "left-form: its thoughts of 6 tokens leave 8, too few for an answer; raise decoding.max_new_tokens"
    )


def test_what_vllm_wrote_is_cut_alike(tmp_path):
    folder = parrot(tmp_path / "m", ["<think>", *THOUGHTS, "</think>", *ANSWER, "<|end|>"], end="<|pad|>")
    tokenizer, engine = load_tokenizer(folder), VllmEngine.__new__(VllmEngine)
    ids = tokenizer.convert_tokens_to_ids(["<think>", *THOUGHTS, "</think>", *ANSWER, "<|end|>"])
    engine.tokenizer, engine._answers = tokenizer, Answers(tokenizer, (tokenizer.eos_token_id,))
    engine._end_ids = sorted({tokenizer.eos_token_id, *engine._answers.role_ids})
    assert ids[-1] in engine._end_ids
    text = _Text(GenerationRequest("0", np.array(ids[-1:], np.int32)), finish_reason="stop")
    text.extend(ids)
    (result,) = engine._results([text], 0)
    (own, _) = answers(folder)
    for name in ("text", "finish_reason", "role_mark", "num_thought_tokens", "num_invented", "end_id"):
        assert getattr(result, name) == getattr(own, name), name
    assert result.text == "A tense crime film." and len(result.sources) == len(result.token_ids) == 3


def test_a_prompt_that_vllm_refuses_is_counted_by_one_word(tmp_path, monkeypatch):
    engine = VllmEngine.__new__(VllmEngine)
    engine._engine = SimpleNamespace(has_unfinished_requests=lambda: False)
    for name, value in {"_routes": tmp_path / "none" / "routes", "_num_drafted": 0, "_results": []}.items():
        monkeypatch.setattr(engine, name, lambda *_, value=value: value)
    errors = iter([ValueError("the prompt (length 900) is too long"), RowError("too-long: the prompt has 900 tokens")])
    monkeypatch.setattr(engine, "_begin", lambda _: (_ for _ in ()).throw(next(errors)))
    failures = engine.generate("user", [GenerationRequest(name, np.array([1], np.int32)) for name in "ab"], None)
    assert [reason_of(failure.reason) for failure in failures] == ["refused", "too-long"]


def test_an_end_token_that_is_configured_is_no_role_mark(tmp_path):
    plain, _ = answers(parrot(tmp_path / "m", ANSWER))
    assert (plain.text, plain.finish_reason, plain.role_mark) == ("A tense crime film.", "end_of_text", "")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_tokens_of_either_configuration_end_a_text(tmp_path, name):
    folder = parrot(tmp_path / "m", [*ANSWER, "<|stop|>", " more"], special=["<|stop|>"], template=HUMAN,
                    after="### Assistant:")  # fmt: skip
    file = folder / name
    config = json.loads(file.read_text())
    stop = load_tokenizer(folder).convert_tokens_to_ids("<|stop|>")
    file.write_text(json.dumps(config | {"eos_token_id": stop}))
    plain, _ = answers(folder)
    assert (plain.text, plain.finish_reason) == ("A tense crime film.", "end_of_text")
