import json
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import HeldLogits
from test_token_tree import trees
from tiny_models import (
    NonsenseDrafter,
    OracleDrafter,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)
from transformers import RepetitionPenaltyLogitsProcessor

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.model import output_head
from laserbatch.pipeline.decoding.model.folder import REFUSED, SAMPLE_MODEL, model_identity, repetition_penalty_of
from laserbatch.pipeline.decoding.model.output_head import ContextIds, PenalisedLogits
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationRequest
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import ModelError

VOCAB = 9


@pytest.mark.parametrize("batch_size, max_cache_tokens", [(4, None), (9, 110)])
def test_texts_under_a_repetition_penalty_are_those_of_generate(batch_size, max_cache_tokens):
    model, prompts = tiny_model("qwen2"), tiny_prompts()
    without = plain_texts(model, prompts, 24)
    model.generation_config.repetition_penalty = 1.3
    expected = plain_texts(model, prompts, 24)
    assert sum(text != other for text, other in zip(expected, without, strict=True)) > 4
    engine = tiny_engine(model, batch_size=batch_size, max_prefill_tokens=9, max_cache_tokens=max_cache_tokens)
    engine.concurrency.expected_output = lambda sequence: 1  # so more sequences are admitted than the cache holds
    for drafter in (NoDrafter(), NonsenseDrafter(), OracleDrafter(expected)):
        results = list(engine.generate(requests_for(prompts, 24), drafter, Greedy()))
        assert {int(r.request_id): r.token_ids.tolist() for r in results} == dict(enumerate(expected))
    assert sum(r.num_accepted for r in results) > sum(r.num_steps for r in results) / 2, "the drafts were right"


def padded(contexts: list[np.ndarray]) -> np.ndarray:
    """Contexts padded to equal length, each by repetitions of its first token."""
    longest = max(map(len, contexts))
    return np.stack([[*context, *[context[0]] * (longest - len(context))] for context in contexts]).astype(np.int64)


@settings(max_examples=50)
@given(st.data())
def test_contexts_on_the_device_are_those_of_the_sequences_and_only_what_is_new_is_sent(data):
    """Sequences come, grow, change rows and end, in any order."""
    num_rows, rng = 3, np.random.default_rng(data.draw(st.integers(0, 99)))
    context_ids, live, waiting, sent = ContextIds(num_rows, torch.device("cpu")), [], [], []
    known: dict[tuple[int, int], int] = {}  # (row, sequence) -> number of tokens that were sent

    def watched(array, device):
        sent.append(len(array))
        return to_device(array, device)

    with mock.patch.object(output_head, "to_device", watched):
        for action in data.draw(st.lists(st.sampled_from(["come", "come", "return", "wait", "grow"]), max_size=20)):
            rows = sorted(set(range(num_rows)) - {sequence.row for sequence in live})
            if action == "come" and rows:
                prompt = rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32)
                live.append(DecodingSequence(GenerationRequest("", prompt), 100))
                live[-1].row = data.draw(st.sampled_from(rows))
            elif action == "return" and rows and waiting:
                live.append(waiting.pop())
                live[-1].row = data.draw(st.sampled_from(rows))
            elif action == "wait" and live:
                waiting.append(live.pop(data.draw(st.integers(0, len(live) - 1))))
            elif action == "grow" and live:
                sequence = data.draw(st.sampled_from(live))
                committed = rng.integers(0, VOCAB, 3).astype(np.int32)
                sequence.append(committed, np.zeros(3, np.uint8), int(rng.integers(VOCAB)))
            step = [sequence for sequence in live if rng.random() < 0.8]
            if not step:
                continue
            sent.clear()
            assert context_ids.of(step).tolist() == padded([sequence.context for sequence in step]).tolist()
            num_new = 0
            for sequence in step:
                num_new += len(sequence.context) - known.get((sequence.row, id(sequence)), 0)
                known = {key: count for key, count in known.items() if key[0] != sequence.row}
                known[sequence.row, id(sequence)] = len(sequence.context)
            assert sum(sent) <= 2 * num_new + 3 * len(step)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(trees(vocab_size=VOCAB - 1), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 99),
)
def test_each_node_is_penalised_for_its_own_path(forest, seed):
    drafts = [TokenTree(np.abs(t.token_ids), t.parents, t.log_acceptance, t.source) for t, _ in forest]
    contexts = [np.array(context, np.int32) for _, context in forest]
    num_rows = sum(len(draft) + 1 for draft in drafts)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32))
    rows = PenalisedLogits(1.7, HeldLogits(logits), torch.from_numpy(padded(contexts)), TreeBatch.of(drafts))
    unchanged = logits.clone()
    rows.of(np.arange(num_rows))
    assert torch.equal(logits, unchanged)
    actual = rows.of(np.arange(num_rows)[::-1].copy())
    paths = []
    for draft, context in zip(drafts, contexts, strict=True):
        paths.append(context.tolist())
        of_nodes = []
        for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
            of_nodes.append([*(of_nodes[parent] if parent >= 0 else paths[-1 - len(of_nodes)]), token])
            paths.append(of_nodes[-1])
    for row, path in enumerate(paths):
        ids = torch.tensor([path])
        expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[row : row + 1].clone())
        torch.testing.assert_close(actual[num_rows - 1 - row], expected[0], rtol=0, atol=0)


def test_what_would_change_greedy_decoding_is_refused_by_name():
    neutral = {"repetition_penalty": 1, "top_p": 0.8}
    for config in (REFUSED, dict.fromkeys(REFUSED), neutral):
        assert repetition_penalty_of(config, "file") == 1.0
    for key in REFUSED:
        with pytest.raises(ModelError, match=rf"file sets {key} to 3, .* remove the key from the file"):
            repetition_penalty_of({key: 3}, "file")
    for penalty in (0, "1.1"):
        with pytest.raises(ModelError, match=r"repetition_penalty to .*; expected a number above 0"):
            repetition_penalty_of({"repetition_penalty": penalty}, "file")


def test_what_is_done_is_part_of_the_identity(tmp_path):
    folder = shutil.copytree(SAMPLE_MODEL, tmp_path / "sample")
    file = folder / "generation_config.json"
    plain, own = model_identity(folder), json.loads(file.read_text())
    neutral = own | {"repetition_penalty": 1.0, "do_sample": True, "temperature": 0.7, "top_p": 0.8}
    identities = {}
    for name, config in {
        "neutral": neutral,
        "penalty": own | {"repetition_penalty": 1.1},
        "ends": own | {"eos_token_id": [own["eos_token_id"], 7]},
    }.items():
        file.write_text(json.dumps(config))
        identities[name] = model_identity(folder)
    assert identities.pop("neutral") == plain
    assert len({plain, *identities.values()}) == 3
    file.unlink()
    assert model_identity(folder) == plain
    file.write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not a JSON object"):
        model_identity(folder)
