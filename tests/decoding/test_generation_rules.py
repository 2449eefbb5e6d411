import json
import shutil

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

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.model.folder import REFUSED, SAMPLE_MODEL, model_identity, repetition_penalty_of
from laserbatch.pipeline.decoding.model.output_head import PenalisedLogits
from laserbatch.pipeline.decoding.token_tree import TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import ModelError

VOCAB = 9


@pytest.mark.parametrize("batch_size", [4, 9])
def test_texts_under_a_repetition_penalty_are_those_of_generate(batch_size):
    model, prompts = tiny_model("qwen2"), tiny_prompts()
    without = plain_texts(model, prompts, 24)
    model.generation_config.repetition_penalty = 1.3
    expected = plain_texts(model, prompts, 24)
    assert sum(one != other for one, other in zip(expected, without, strict=True)) > 4
    engine = tiny_engine(model, batch_size=batch_size, max_prefill_tokens=9)
    for drafter in (NoDrafter(), NonsenseDrafter(), OracleDrafter(expected)):
        results = list(engine.generate(requests_for(prompts, 24), drafter, Greedy()))
        assert {int(r.request_id): r.token_ids.tolist() for r in results} == dict(enumerate(expected))
    assert sum(r.num_accepted for r in results) > sum(r.num_steps for r in results) / 2, "the drafts were right"


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
    rows = PenalisedLogits(1.7, HeldLogits(logits), contexts, TreeBatch.of(drafts))
    found = rows.of(np.arange(num_rows)[::-1].copy())
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
        torch.testing.assert_close(found[num_rows - 1 - row], expected[0], rtol=0, atol=0)


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
    with pytest.raises(ModelError, match=r"generation_config\.json holds no JSON object"):
        model_identity(folder)
