"""Guided decoding: texts keep to their grammar for any drafts, and equal those of a plain loop of masked argmax."""

import json

import llguidance
import llguidance.hf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.grammar import MARGIN, Grammars, Guide, ThoughtMarks, require_grammar
from laserbatch.pipeline.decoding.guided import GuidedLogits
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.sequence import GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy, Relaxed
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.chat_format import encode_chat
from laserbatch.retrieval_pools.sources import SOURCE_FORM

TEXT = {"type": "string", "pattern": r'^[\p{L}\p{N}][^"\\\x00-\x1f]{0,60}$'}
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "type": "object",
    "properties": {
        "kinds": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4},
        "summary": TEXT,
    },
    "required": ["kinds", "summary"],
    "additionalProperties": False,
}
JSON = "start: %json " + json.dumps(SCHEMA)
LINES = 'start: "1. Kinds:" LINE "\\n2. Style:" LINE\nLINE: / ?[\\p{L}\\p{N}][^\\n]{0,80}/\n'
QUESTIONS = ("Describe Heat.", "Explain the preferences of a reader.", "List the genres of The Silent Harbour.")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(SAMPLE_MODEL, DecodingSettings(batch_size=4, dtype="float32"), "cpu")


def requests(engine: Engine, grammars, max_new_tokens: int = 48) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{number} {grammar}",
            encode_chat(engine.tokenizer, question, None, {}),
            np.array(engine.tokenizer.encode('{"kinds": ["Sea stories", "Crime"], "summary": "Reads'), np.int32),
            max_new_tokens=max_new_tokens,
            seed=number,
            grammar=grammar,
        )
        for number, question in enumerate(QUESTIONS)
        for grammar in grammars
    ]


def written(engine: Engine, to_write, drafter=None, verifier=None) -> dict[str, GenerationResult]:
    results = {result.request_id: result for result in engine.generate(to_write, drafter, verifier or Greedy())}
    assert all(isinstance(result, GenerationResult) for result in results.values()), results
    return results


def drafter(max_nodes: int = 8) -> RetrievalDrafter:
    return RetrievalDrafter(max_nodes=max_nodes, min_acceptance=0.0)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32)


@torch.inference_mode()
def reference(engine: Engine, model, request: GenerationRequest, num_tokens: int) -> list[int]:
    """The greedy text among allowed tokens, by transformers and a matcher that is never rolled back."""
    tokenizer = llguidance.hf.from_tokenizer(engine.tokenizer, engine.vocab_size, list(engine.loaded.end_ids))
    matcher = llguidance.LLMatcher(tokenizer, request.grammar)
    context, cache = request.prompt_ids.tolist(), DynamicCache()
    while len(context) < len(request.prompt_ids) + num_tokens:
        logits = model(torch.tensor([context[cache.get_seq_length() :]]), past_key_values=cache).logits[0, -1]
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        logits[torch.from_numpy(bits[: len(logits)] == 0)] = -torch.inf
        token = int(logits.argmax())
        if token in engine.loaded.end_ids:
            break
        assert matcher.consume_token(token)
        context.append(token)
        if matcher.is_stopped():
            break
    return context[len(request.prompt_ids) :]


def test_texts_are_those_of_masked_argmax_and_no_draft_changes_them(engine, model):
    to_write = requests(engine, (JSON, LINES, None), max_new_tokens=128)[:6]
    plain = written(engine, to_write)
    drafted = written(engine, to_write, drafter())
    assert sum(result.num_accepted - np.sum(result.sources == SOURCE_FORM) for result in drafted.values()) > 20
    for request in to_write:
        assert drafted[request.request_id].token_ids.tolist() == plain[request.request_id].token_ids.tolist()
        if request.grammar is not None:  # before any answer is closed early
            expected = reference(engine, model, request, 80)
            assert plain[request.request_id].token_ids.tolist()[:80] == expected
        if request.grammar == JSON:
            assert set(json.loads(plain[request.request_id].text)) == {"kinds", "summary"}


def test_a_text_is_the_same_alone_and_among_others_with_and_without_grammars(engine):
    to_write = requests(engine, (JSON, None, LINES))
    together = written(engine, to_write, drafter())
    for request in to_write[:4]:
        (alone,) = written(engine, [request], drafter()).values()
        assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()


@pytest.mark.parametrize("verifier", [Relaxed(2, 0.1), Relaxed(2, 0.0), Relaxed(None, 0.01)])
def test_rules_accept_nothing_that_the_grammar_forbids(engine, verifier):
    for result in written(engine, requests(engine, (JSON,)), drafter(16), verifier).values():
        assert result.finish_reason == "end_of_text" and set(json.loads(result.text)) == {"kinds", "summary"}


def test_forced_tokens_take_no_step_and_count_as_accepted_drafts(engine):
    grammar = 'start: "Kinds: " /[a-c]/ " and that is all."'
    for draft in (None, drafter()):
        for result in written(engine, requests(engine, (grammar,)), draft).values():
            assert result.finish_reason == "end_of_text" and result.text.endswith(" and that is all.")
            num_forced = int(np.sum(result.sources == SOURCE_FORM))
            assert result.num_steps <= 3 < num_forced and result.accepted_by_source[SOURCE_FORM] == num_forced
            assert result.num_steps + result.num_accepted == len(result.token_ids)


@pytest.mark.parametrize("max_new_tokens", [28, 33, 40, 64])
def test_an_answer_is_closed_before_its_limit(engine, max_new_tokens):
    for draft in (None, drafter()):
        for result in written(engine, requests(engine, (JSON, LINES), max_new_tokens), draft).values():
            assert result.finish_reason == "end_of_text" and len(result.token_ids) <= max_new_tokens, result.text


def test_a_sentence_is_closed_by_its_end_and_not_by_quotes_and_brackets_which_are_text_in_it(engine):
    sentence = r"start: /[A-Z][^\n]{20,200}\./"
    assert engine.grammars.guide(sentence, 48)._shortest < 26
    for result in written(engine, requests(engine, (sentence,), 48), drafter()).values():
        assert result.finish_reason == "end_of_text" and result.text.endswith("."), result.text
        assert '"]' not in result.text


def test_a_limit_below_the_shortest_answer_cuts_it(engine):
    results = written(engine, requests(engine, (JSON,), max_new_tokens=6))
    assert {result.finish_reason for result in results.values()} == {"length"}


def test_samples_keep_to_the_grammar_and_no_draft_changes_them():
    settings = DecodingSettings(batch_size=4, dtype="float32", temperature=0.8, verifier="greedy")
    engine = Engine.from_pretrained(SAMPLE_MODEL, settings, "cpu")
    to_write = requests(engine, (JSON,))
    plain, drafted = written(engine, to_write), written(engine, to_write, drafter())
    for name, result in plain.items():
        assert json.loads(result.text) and result.token_ids.tolist() == drafted[name].token_ids.tolist()


def test_texts_that_give_their_memory_back_go_on_as_they_were(engine):
    to_write = requests(engine, (JSON, LINES))
    expected = written(engine, to_write)
    longest = max(len(request.prompt_ids) for request in to_write) + 48 + 8
    settings = DecodingSettings(batch_size=4, dtype="float32", max_cache_tokens=2 * longest)
    small = Engine.from_pretrained(SAMPLE_MODEL, settings, "cpu")
    for name, result in written(small, to_write, drafter()).items():
        assert result.token_ids.tolist() == expected[name].token_ids.tolist()


def test_masks_are_those_of_a_matcher_that_followed_the_path(engine):
    """Rows in any order, siblings, and paths that the grammar forbids, after which no token is allowed."""
    from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch

    class Rows:
        device, num_rows = torch.device("cpu"), 6

        def of(self, rows):
            return torch.zeros(len(rows), engine.vocab_size)

    guide = engine.grammars.guide(LINES, 64)
    start = guide.forced(64)
    words = [engine.tokenizer.encode(text, add_special_tokens=False) for text in (" Crime", " Sea", "\n")]
    tokens = np.array([words[0][0], words[1][0], words[0][0], words[2][0], words[0][0]], np.int32)
    parents = np.array([-1, 0, 0, -1, 3], np.int32)
    tree = TokenTree(tokens, parents, np.zeros(5, np.float32), np.zeros(5, np.uint8))
    logits = GuidedLogits(Rows(), [guide], TreeBatch.of([tree])).of(np.array([2, 0, 5, 1, 3, 4]))  # pyright: ignore
    tokenizer = llguidance.hf.from_tokenizer(engine.tokenizer, engine.vocab_size, list(engine.loaded.end_ids))
    for row, path in zip(logits, ([0, 1], [], None, [0], [0, 2], None), strict=True):
        if path is None:
            assert torch.isinf(row).all()
            continue
        matcher = llguidance.LLMatcher(tokenizer, LINES)
        assert matcher.consume_tokens([*start, *(int(tokens[node]) for node in path)])
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert (torch.isfinite(row).numpy() == bits[: engine.vocab_size].astype(bool)).all()


@pytest.mark.parametrize("grammar", [JSON, LINES])
@pytest.mark.parametrize("max_tokens", [48, 300])
@pytest.mark.parametrize("marks", [None, ThoughtMarks(None, 300), ThoughtMarks(301, 300)])
def test_tokens_are_allowed_where_their_masks_hold_them(engine, grammar, max_tokens, marks):
    """Paths of allowed tokens and one token that may be forbidden, far from the limit and close to it."""
    rng, guide, compared = np.random.default_rng(max_tokens), engine.grammars.guide(grammar, max_tokens, marks), 0
    output = guide.forced(max_tokens - 2)
    for _round in range(60):
        if guide.is_complete or len(output) >= max_tokens - 4:
            break
        path, num_allowed, is_left = [], 0, False
        for _ in range(4):
            mask = np.zeros(-(-engine.vocab_size // 32), np.uint32)
            guide.write_mask(path, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed) if len(allowed) and rng.random() < 0.8 else rng.integers(engine.vocab_size))
            if marks and rng.random() < 0.2:
                token = int(rng.choice([mark for mark in marks if mark is not None]))
            is_left |= token not in allowed
            num_allowed += not is_left
            path.append(token)
            is_left |= token in engine.loaded.end_ids
        assert guide.num_allowed(path) == num_allowed
        assert guide.num_allowed(path[::-1][:1]) in (0, 1)  # the matcher returns to the committed output
        assert guide.num_allowed(path) == num_allowed
        compared += 1
        accepted = [token for token in path[: max(1, num_allowed)] if token not in engine.loaded.end_ids]
        if num_allowed == 0 or not accepted:
            continue
        output += accepted
        guide.advance(np.array(output, np.int32))
        output += guide.forced(max(0, max_tokens - 2 - len(output)))
    assert compared


def test_forced_tokens_of_a_written_text_are_those_that_were_appended(engine):
    to_write = requests(engine, [JSON, LINES], 96)
    for drafting in (None, drafter()):  # a draft may be ahead of some forced tokens
        results = written(engine, to_write, drafting)
        for request in to_write:
            result = results[request.request_id]
            is_forced = engine.grammars.forced_in(request.grammar, result.token_ids)
            assert is_forced[result.sources == SOURCE_FORM].all()
            assert drafting is not None or not is_forced[result.sources != SOURCE_FORM][:-1].any()
    assert not engine.grammars.forced_in(JSON, np.full(5, engine.tokenizer.encode("x")[-1], np.int32)).any()


def test_few_rows_are_masked(engine, monkeypatch):
    masked, write = [], Guide.write_mask
    monkeypatch.setattr(Guide, "write_mask", lambda *words: masked.append(1) or write(*words))
    results = written(engine, requests(engine, [JSON, LINES], 96), drafter()).values()
    assert 0 < len(masked) < 0.3 * sum(result.num_steps + result.num_drafted for result in results)


def test_a_grammar_that_does_not_compile_is_refused_with_its_place(engine):
    with pytest.raises(ConfigError, match=r'does not compile: .*unknown name: "LINE"'):
        require_grammar('start: "a" LINE')
    with pytest.raises(ConfigError, match="Unimplemented keys"):
        engine.grammars.guide('start: %json {"type": "string", "uniqueItems": true}', 8)


def test_free_text_is_not_closed_early(engine):
    """If closing tokens may be part of any text, they do not end it: the limit cuts the text."""
    grammars = Grammars(engine.tokenizer, engine.vocab_size, engine.loaded.end_ids)
    endless = 'start: "x" /[^a]+/ "a"'
    assert grammars.guide(endless, 32)._shortest == -MARGIN
