import numpy as np
import pytest
from packs import chain_tree
from tiny_models import OracleDrafter, plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts

from laserbatch.pipeline.budget.choice import PLAIN
from laserbatch.pipeline.decoding.drafters import NoDrafter, RetrievalDrafter, drafter_from
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import RunFailed
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.sources import NUM_SOURCES, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_TARGET


def sequence_of(prompt, output=(), previous=None) -> DecodingSequence:
    sequence = DecodingSequence(GenerationRequest("a", np.array(prompt, np.int32), previous), 100)
    for token in output:
        sequence.append([], [], token)
    return sequence


def test_sequence_shows_what_was_committed():
    sequence = sequence_of([1, 2, 3], [4, 5])
    sequence.append(np.array([6, 7], np.int32), np.full(2, SOURCE_POOL), 9, chain_tree([6, 7, 8], SOURCE_POOL).source)
    assert sequence.context.tolist() == [1, 2, 3, 4, 5, 6, 7, 9]
    assert sequence.prompt_ids.tolist() == [1, 2, 3] and sequence.output_ids.tolist() == [4, 5, 6, 7, 9]
    assert sequence.sources.tolist() == [SOURCE_TARGET] * 2 + [SOURCE_POOL] * 2 + [SOURCE_TARGET]
    assert (sequence.num_steps, sequence.num_drafted, sequence.num_accepted, sequence.num_left) == (3, 3, 2, 95)
    result = sequence.result("length", "")
    for counts, number in ((result.drafted_by_source, 3), (result.accepted_by_source, 2)):
        assert counts.tolist() == [number * (code == SOURCE_POOL) for code in range(NUM_SOURCES)]


def test_a_drafter_that_would_change_a_text_ends_the_run_with_the_names_of_the_drafters():
    class Sorting(NoDrafter):
        def draft(self, sequence):
            sequence.output_ids.sort()

    with pytest.raises(RunFailed, match=r"drafting failed \(previous, .*\): ValueError: sort array is read-only"):
        list(tiny_engine(tiny_model()).generate(requests_for(tiny_prompts(1)), Sorting()))


def test_nothing_is_drafted_where_nothing_is_asked_for():
    assert len(NoDrafter().draft(sequence_of([1, 2, 1]))) == 0
    assert isinstance(drafter_from(DecodingSettings(drafters=())), NoDrafter)
    assert isinstance(drafter_from(DecodingSettings(max_draft_tokens=0)), NoDrafter)
    assert isinstance(drafter_from(DecodingSettings()), RetrievalDrafter)


def test_retrieval_drafts_from_the_allowed_sources_only():
    sequence = sequence_of([11, 12, 13, 14, 15, 50], [60, 11, 12], np.array([70, 11, 12, 33, 34], np.int32))
    drafted = RetrievalDrafter(None).draft(sequence)
    assert {33, 13} <= set(drafted.token_ids.tolist())
    only_prompt = RetrievalDrafter(None, sources=("prompt",)).draft(sequence)
    assert 13 in only_prompt.token_ids and 33 not in only_prompt.token_ids
    assert set(only_prompt.source.tolist()) == {SOURCE_PROMPT}
    only_previous = RetrievalDrafter(None, sources=("previous",), max_nodes=1).draft(sequence)
    assert only_previous.token_ids.tolist() == [33] and only_previous.source.tolist() == [SOURCE_PREVIOUS]


def test_a_step_drafts_at_once_what_each_sequence_is_drafted_and_no_deeper_than_it_has_room():
    sequences = [
        sequence_of([11, 12, 13, 14, 15, 50], [60, 11, 12], np.array([70, 11, 12, 33, 34], np.int32)),
        sequence_of([11, 12, 13, 14, 15, 50], [11]),
        sequence_of([1, 2]),
    ]
    drafter = RetrievalDrafter(None)
    for tree, other in zip(drafter.draft_all(sequences, [64] * 3), map(drafter.draft, sequences), strict=True):
        assert tree.token_ids.tolist() == other.token_ids.tolist() and tree.parents.tolist() == other.parents.tolist()
        assert tree.source.dtype == np.uint8
    depths = [TreeBatch.of([tree]).depths for tree in drafter.draft_all(sequences, [1, 2, 0])]
    assert [max(own, default=0) for own in depths] == [1, 2, 0]
    assert list(NoDrafter().draft_all(sequences, [64] * 3).sizes) == [0, 0, 0]


def test_pool_and_previous_texts_save_steps_and_change_nothing(tmp_path):
    model = tiny_model()
    prompts = tiny_prompts()
    texts = plain_texts(model, prompts, 20)
    pool = build_pool(
        [PoolText(np.array(text, np.int32), f"group {i % 2}") for i, text in enumerate(texts) if text],
        tmp_path / "pool",
        side="user",
        tokenizer_hash="x",
        model_id="y",
    )
    engine = tiny_engine(model, batch_size=4)
    previous = [np.array(text, np.int32) for text in texts]
    plain = {r.request_id: r for r in engine.generate(requests_for(prompts, 20), None, Greedy())}
    systems = {
        "pool": (RetrievalDrafter(pool), None),
        "previous": (RetrievalDrafter(None), previous),
        "oracle": (OracleDrafter(texts), None),
    }
    for drafter, earlier in systems.values():
        results = {r.request_id: r for r in engine.generate(requests_for(prompts, 20, earlier), drafter, Greedy())}
        assert {i: r.token_ids.tolist() for i, r in results.items()} == {
            i: r.token_ids.tolist() for i, r in plain.items()
        }
        assert sum(r.num_steps for r in results.values()) < 0.8 * sum(r.num_steps for r in plain.values())


def test_a_budget_of_nothing_asks_no_drafter_and_runs_the_steps_of_plain_decoding():
    class Refusing(NoDrafter):
        def draft(self, sequence):
            raise AssertionError("nothing was to be drafted")

    model, prompts = tiny_model(), tiny_prompts(3)
    steps = []
    for drafter in (None, Refusing()):
        engine = tiny_engine(model)
        forward, fed = engine.runner.forward, []
        engine.runner.forward = lambda feeds, trees, forward=forward, fed=fed: (
            fed.append([len(feed.chain_ids) for feed in feeds] + trees.sizes.tolist()) or forward(feeds, trees)
        )
        texts = {
            r.request_id: r.token_ids.tolist() for r in engine.generate(requests_for(prompts), drafter, budget=PLAIN)
        }
        steps.append((fed, texts))
    assert steps[0] == steps[1]
    assert isinstance(drafter_from(DecodingSettings(), None, PLAIN), NoDrafter)
