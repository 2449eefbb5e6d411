"""Draft models on a pretended CUDA device."""

import copy

import numpy as np
import pytest
from pretend_cuda import move, pretend_cuda
from test_draft_methods import like
from test_heads import written_head
from test_pretend_cuda import KERNEL, engine_on_device, one_layer
from tiny_models import plain_texts, requests_for, tiny_prompts
from trained_drafters import drafter_of, trained

from laserbatch.pipeline.decoding.drafters import drafter_from, load_plugin_drafters
from laserbatch.pipeline.decoding.model.load import prepare_model


@pytest.mark.parametrize("kind", ["small", "eagle"])
def test_what_small_models_draft_is_computed_by_graphs_that_wait_once_a_level(kind, tmp_path):
    """Each level of a tree is one forward of the draft model, whose likeliest tokens are copied to the host."""
    model, prompts, num_new, length = one_layer(), tiny_prompts(2), 4, 2
    expected = plain_texts(model, prompts, num_new)
    small = like(model, 0.15)
    of_kind = {"models": ["unused"]} if kind == "small" else {"head": written_head(tmp_path, kind)}
    settings = {"verifier": "greedy", **trained(width=2, length=length, **of_kind)}
    launches, by_round = {}, []
    with pretend_cuda() as cuda, KERNEL:
        for attention, num_rounds in (("torch", 1), ("auto", 3)):
            engine = engine_on_device(copy.deepcopy(model), attention=attention, **settings)
            if kind == "small":
                drafter = drafter_of((prepare_model(move(copy.deepcopy(small))),), engine.settings)
            else:
                drafter = drafter_from(engine.settings, plugins=load_plugin_drafters(engine.settings, engine.loaded))
            drafts = watch_drafts(drafter, cuda)
            for _ in range(num_rounds):
                start = len(drafts)
                results = engine.generate(requests_for(prompts, num_new), drafter)
                texts = {result.request_id: result.token_ids.tolist() for result in results}
                assert [texts[str(i)] for i in range(len(prompts))] == expected
                by_round.append([token_ids for token_ids, _, _ in drafts[start:]])
            steps = [draft for draft in drafts if draft[0]][1:]  # the first step also compares the kernel
            num_waits = [waits for _, waits, _ in steps]
            assert np.median(num_waits) == min(num_waits) == length
            launches[attention] = min(num_launches for _, _, num_launches in steps)  # after all sizes were captured
    assert all(drafts == by_round[0] for drafts in by_round) and any(by_round[0])
    assert launches["auto"] < 0.25 * launches["torch"], launches


def watch_drafts(drafter, cuda) -> list[tuple[list[int], int, int]]:
    """The list to which each later step appends its drafted tokens and the numbers of waits and launches for them."""
    drafts, draft_all = [], drafter.draft_all

    def watched(*arguments):
        before = cuda.num_waits, cuda.num_launches
        trees = draft_all(*arguments)
        drafts.append((trees.token_ids.tolist(), cuda.num_waits - before[0], cuda.num_launches - before[1]))
        return trees

    drafter.draft_all = watched
    return drafts
