"""Forwards over ragged index arrays, padded or captured or not, against forwards over groups and masks."""

import gc
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packs import keep, random_tree
from reference import reference_attention
from tiny_models import (
    ARCHITECTURES,
    VOCAB,
    OracleDrafter,
    plain_texts,
    requests_for,
    tiny_engine,
    tiny_model,
    tiny_prompts,
)
from torch.utils._python_dispatch import TorchDispatchMode

from laserbatch.pipeline.decoding.attention.interface import planned
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata, LaunchShape
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model import cuda_graphs
from laserbatch.pipeline.decoding.model.cuda_graphs import (
    MAX_PROMPT_BUCKET,
    TOKEN_BUCKETS,
    Bucket,
    BufferedForward,
    kernel_for,
)
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.model.runner import ModelRunner
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.errors import ModelError

CPU = torch.device("cpu")
GPT_OSS = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}


def masked_attention(
    query, keys, values, metadata: AttentionMetadata, scale, window=None, softcap=None, sinks=None, shape=None
):
    """Attention as one masked product over all slots; it reads nothing on the host, so it can be captured."""
    num_heads, folded = query.shape[1], query.shape[1] // len(keys)
    tokens, places = (torch.arange(count, device=query.device) for count in (len(query), len(metadata.slots)))
    last = len(metadata.num_committed) - 1
    own = torch.searchsorted(metadata.cu_seqlens_q, tokens, right=True).sub(1).clamp(max=last)
    held = torch.searchsorted(metadata.cu_seqlens_k, places, right=True).sub(1).clamp(max=last)
    place = places - metadata.cu_seqlens_k[held]  # within its sequence
    new = place - metadata.num_committed[held]  # below 0: a committed token
    node = new - metadata.num_chain[held]
    new_token = (metadata.cu_seqlens_q[held] + new).clamp(0, len(query) - 1)
    position = torch.where(new < 0, place, metadata.positions[new_token])
    ancestor = (metadata.ancestors[:, None] >> node.clamp(0, 63)) & 1 > 0
    sees = torch.where(node >= 0, ancestor, place <= metadata.positions[:, None])
    sees &= (
        (own[:, None] == held) & (places < metadata.cu_seqlens_k[-1]) & (tokens < metadata.cu_seqlens_q[-1])[:, None]
    )
    if window is not None:
        sees &= metadata.positions[:, None] - position < window
    own_keys = keys[:, metadata.slots.long()].repeat_interleave(folded, 0)
    scores = torch.einsum("qhd,hkd->hqk", query, own_keys) * scale
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = torch.where(sees, scores, -torch.inf)
    sink = query.new_full((num_heads,), -torch.inf) if sinks is None else sinks
    scores = torch.cat((scores, sink[:, None, None].expand(-1, len(query), 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :-1]
    return torch.einsum("hqk,hkd->qhd", weights, values[:, metadata.slots.long()].repeat_interleave(folded, 0))


def is_interpreted() -> bool:
    """Whether Triton kernels run in the interpreter on this CPU; skips the test if triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed")
    from laserbatch.pipeline.decoding.attention.triton_attention import INTERPRETED

    return INTERPRETED


def buffered_runner(model, attention, kind=BufferedForward, captures=False) -> ModelRunner:
    runner = ModelRunner(model, KVCache(6), CPU)
    runner.buffered = kind(runner.head, runner.cache, CPU, lambda: attention)
    runner.buffered._captures = captures
    return runner


def assert_equal_logits(
    runners: list[ModelRunner],
    num_steps: int = 5,
    seed: int = 0,
    tolerance: float = 1e-5,
    lengths: tuple[int, ...] = (3, 14, 8),
) -> None:
    """Give all runners the same feeds: prompts in parts, trees, sequences that begin and end."""
    rng = np.random.default_rng(seed)
    pending: dict[int, list[int]] = {}
    for step in range(num_steps):
        for length in lengths[: None if step == 0 else int(step % 3 == 1)]:
            prompt = rng.integers(0, VOCAB, length).astype(np.int32)
            (row,) = {runner.cache.acquire(prompt, 60).row for runner in runners}
            pending[row] = prompt[-(length - int(runners[0].cache.lengths[row])) :].tolist()
        feeds, trees = [], []
        for row in pending:
            in_parts = len(pending[row]) > 10
            chain = np.array(pending[row][:5] if in_parts else pending[row], np.int32)
            trees.append(random_tree(rng, 0 if in_parts else int(rng.integers(0, 9)), VOCAB))
            feeds.append(Feed(row, chain))
        outputs = [runner.forward(feeds, TreeBatch.of(trees)) for runner in runners]
        num_kept = sum(1 + len(tree) for tree in trees)
        for output in outputs[1:]:
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(output.logits[:num_kept], outputs[0].logits[:num_kept], **close)
        kept_nodes = []
        for feed, tree in zip(feeds, trees, strict=True):
            node, path = int(rng.integers(-1, len(tree))), []
            while node >= 0:
                path, node = [node, *path], int(tree.parents[node])
            kept_nodes.append(np.array(path, np.int64))
            rest = pending[feed.row][len(feed.chain_ids) :]
            pending[feed.row] = rest or [int(rng.integers(0, VOCAB))]
        for runner, output in zip(runners, outputs, strict=True):
            keep(runner.cache, output.batch, kept_nodes)
        if step % 3 == 2:
            ended = next(iter(pending))
            del pending[ended]
            for runner in runners:
                runner.cache.release(ended)


def prepared(architecture: str = "llama", **changes):
    model = tiny_model(architecture, **(GPT_OSS if architecture == "gpt_oss" else {}), **changes)
    prepare_model(model)
    return model


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_neox", "gpt_oss"])
def test_buffered_forwards_equal_eager_ones(architecture):
    model = prepared(architecture)
    buffered = buffered_runner(model, reference_attention)
    assert_equal_logits([ModelRunner(model, KVCache(6), CPU), buffered], num_steps=6)
    assert len(buffered.buffered.buckets) > 1


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt_oss"])
def test_masked_attention_of_these_tests_equals_the_slow_one(architecture):
    model = prepared(architecture)
    assert_equal_logits([buffered_runner(model, reference_attention), buffered_runner(model, masked_attention)])


class CountingForward(BufferedForward):
    """Stores a function that repeats a bucket's forward in place of a captured graph."""

    def _capture(self, bucket: Bucket, shape: LaunchShape) -> None:
        bucket.graph = lambda: self._forward(bucket.buffers, shape)

    def _replay(self, bucket: Bucket) -> torch.Tensor:
        return bucket.graph()


class OutOfMemoryForward(CountingForward):
    """Captures run out of memory as long as `num_missing` is above 0."""

    num_missing = 0

    def _capture(self, bucket: Bucket, shape: LaunchShape) -> None:
        if self.num_missing:
            self.num_missing -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        super()._capture(bucket, shape)


def stepping(model, kind):
    """A runner whose forward is of class `kind`, and a function that runs a step of one token."""
    runner = buffered_runner(model, masked_attention, kind, captures=True)
    feed = Feed(runner.cache.acquire(np.array([1, 2], np.int32), 60).row, np.array([1], np.int32))
    return runner, lambda: runner.forward([feed]).logits.clone()


def counts(forward: BufferedForward) -> tuple[int, int, int, int]:
    return forward.num_captures, forward.num_failed_captures, forward.num_replays, forward.num_eager_steps


def test_captured_steps_are_dropped_when_the_store_has_grown():
    """Other strides may need other kernels: an eager step compiles them before the next capture."""
    runner, step = stepping(prepared(), CountingForward)
    first = [step() for _ in range(3)][-1]
    assert counts(runner.buffered) == (1, 0, 2, 1)
    assert runner.cache.make_room(runner.cache.capacity + 1)
    for expected in ((1, 0, 2, 2), (2, 0, 3, 2), (2, 0, 4, 2)):
        torch.testing.assert_close(step(), first)
        assert counts(runner.buffered) == expected


def test_a_cache_of_another_capacity_at_the_same_addresses_voids_a_graph():
    runner, step = stepping(prepared(), CountingForward)
    [step() for _ in range(3)]
    assert counts(runner.buffered) == (1, 0, 2, 1)
    runner.cache.free.capacity -= 1  # the tensors stay the same
    step()
    assert counts(runner.buffered) == (1, 0, 2, 2)


def test_tables_that_the_layers_allocated_anew_void_a_graph():
    runner, step = stepping(prepared(), CountingForward)

    def hidden_of(token_ids, positions, plan):
        with planned(plan):
            return runner.head.hidden_of(token_ids[None], positions[None])

    tables = [torch.zeros(1)]
    runner.buffered._layers = SimpleNamespace(static_tensors=tables, cover=lambda _: None, hidden_of=hidden_of)
    [step() for _ in range(3)]
    tables[:] = [torch.zeros(1)]
    step()
    assert counts(runner.buffered) == (1, 0, 2, 2)


def test_a_first_step_that_fails_is_not_taken_for_one_that_has_compiled():
    runner, step = stepping(prepared(), CountingForward)
    forward, errors = runner.buffered._forward, [torch.OutOfMemoryError("CUDA out of memory")]

    def failing_once(buffers, shape):
        if errors:
            raise errors.pop()
        return forward(buffers, shape)

    runner.buffered._forward = failing_once
    with pytest.raises(torch.OutOfMemoryError):
        step()
    step()
    assert runner.buffered.num_captures == 0
    step()
    assert runner.buffered.num_captures == 1


def test_a_capture_without_memory_drops_all_graphs_and_is_tried_again_later(monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "RETRY_STEPS", 3)
    runner, step = stepping(prepared(), OutOfMemoryForward)
    forward = runner.buffered
    first = [step() for _ in range(2)][-1]
    (captured,) = forward.buckets.values()
    other = runner.cache.acquire(np.array([3, 4], np.int32), 60).row
    pair = [Feed(row, np.array([1], np.int32)) for row in (0, other)]
    forward.num_missing = 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            runner.forward(pair)
    assert counts(forward) == (1, 1, 1, 3) and captured.graph is None
    assert [message.partition("; ")[2] for message in caplog.messages] == ["it is tried again after 3 steps"]
    for expected in ((1, 1, 1, 4), (1, 1, 1, 5), (2, 1, 2, 5)):
        torch.testing.assert_close(step(), first)
        assert counts(forward) == expected


def test_captures_that_run_out_of_memory_again_and_again_are_given_up(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "RETRY_STEPS", 1)
    runner, step = stepping(prepared(), OutOfMemoryForward)
    runner.buffered.num_missing = 9
    [step() for _ in range(20)]
    assert counts(runner.buffered) == (0, cuda_graphs.MAX_OUT_OF_MEMORY, 0, 20)


def test_no_garbage_is_collected_in_a_capture():
    class Looking(CountingForward):
        def _capture(self, bucket, shape):
            assert not gc.isenabled()
            super()._capture(bucket, shape)

    runner, step = stepping(prepared(), Looking)
    [step() for _ in range(2)]
    assert gc.isenabled() and counts(runner.buffered) == (1, 0, 1, 1)


def test_buckets_that_were_not_used_for_the_longest_time_are_dropped(monkeypatch):
    runner = buffered_runner(prepared(), masked_attention, CountingForward, captures=True)
    forward, shapes = runner.buffered, [LaunchShape(parts, 1) for parts in (1, 2, 4)]
    monkeypatch.setattr(cuda_graphs, "MAX_BUCKETS", 2)
    for number in (0, 1, 0, 2):
        forward._bucket(8, shapes[number])
    assert list(forward.buckets) == [(8, shapes[0]), (8, shapes[2])]
    monkeypatch.setattr(cuda_graphs, "MAX_BUFFER_BYTES", 1)
    forward._bucket(16, shapes[0])
    assert list(forward.buckets) == [(16, shapes[0])]


@pytest.mark.parametrize("corpus", ["reki", "goodreads"])
def test_padding_of_published_texts_steps_is_small(corpus):
    """Steps at batch size 64 with 8 drafts a text, by number of tokens and of logits, from `host_time.stream_turn`."""
    steps = json.loads((Path(__file__).parent / "step_sizes.json").read_text())[corpus]
    padded_tokens = BufferedForward._padded_tokens
    bucketed = [(n, padded_tokens(None, n, num_logits), count) for n, num_logits, count in steps]
    padded = [step for step in bucketed if step[1] is not None]
    num_tokens, num_padded = (sum(step[place] * step[2] for step in padded) for place in (0, 1))
    assert num_padded / num_tokens - 1 <= 0.08
    assert sum(count for _, padded, count in bucketed if padded is None) < 0.01 * sum(bucket[2] for bucket in bucketed)


def test_a_step_whose_memory_was_given_back_is_not_captured():
    """The forward that allocates the cache again must not be recorded: each replay would empty the cache."""
    model = prepared()
    runner = buffered_runner(model, masked_attention, CountingForward, captures=True)
    counting = runner.buffered
    row = runner.cache.acquire(np.array([1, 2], np.int32), 60).row
    feed = Feed(row, np.array([1], np.int32))
    first = [runner.forward([feed]).logits.clone() for _ in range(2)][-1]
    given_back = runner.cache.layers  # kept alive, so that the next allocation has another address
    runner.cache.shrink()
    assert given_back and not runner.cache.layers and counting.num_captures == 1
    for num_captures in (1, 2):
        torch.testing.assert_close(runner.forward([feed]).logits, first)
        assert counting.num_captures == num_captures


class RefusesDeviceReads(TorchDispatchMode):
    """Refuses what no CUDA graph records: values read from or sent to the device, and sizes that depend on values."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "is_nonzero", "lift_fresh")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._opname in self.REFUSED:
            raise RuntimeError(f"{function} cannot be captured")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixtral", "gpt_oss"])
def test_a_models_step_reads_nothing_from_the_device(architecture):
    """Otherwise its capture would fail, and each of its steps would run without a graph."""
    model = prepared(architecture)
    runner = buffered_runner(model, masked_attention)
    feed = Feed(runner.cache.acquire(np.array([1, 2], np.int32), 60).row, np.array([1], np.int32))
    expected = runner.forward([feed]).logits.clone()
    forward = runner.buffered._forward

    def watched(buffers, shape):
        with RefusesDeviceReads():
            return forward(buffers, shape)

    runner.buffered._forward = watched
    torch.testing.assert_close(runner.forward([feed]).logits, expected)


def test_reads_from_the_device_would_be_refused():
    with RefusesDeviceReads():
        for read in (torch.Tensor.item, torch.Tensor.nonzero, lambda tensor: bool(tensor > 0)):
            with pytest.raises(RuntimeError, match="cannot be captured"):
                read(torch.ones(()))


def test_without_a_device_capture_fails_once_and_steps_go_on(caplog):
    model = prepared()
    capturing = buffered_runner(model, masked_attention, captures=True)
    with caplog.at_level(logging.WARNING):
        assert_equal_logits([buffered_runner(model, reference_attention), capturing], num_steps=6)
    assert sum("a CUDA graph cannot be captured" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_kernel_that_fails_is_given_up_with_a_warning(caplog, fault):
    def broken(*arguments, **options):
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return torch.roll(reference_attention(*arguments, **options), 1, 0)

    model = prepared()
    runner = buffered_runner(model, broken)
    with caplog.at_level(logging.WARNING):
        assert_equal_logits([ModelRunner(model, KVCache(6), CPU), runner])
    assert runner.buffered is None
    assert sum("the attention kernel failed" in message for message in caplog.messages) == 1


def test_large_steps_are_not_padded_and_those_of_prompts_are_large_sooner():
    model = prepared()
    runner = buffered_runner(model, reference_attention)
    row = runner.cache.acquire(np.arange(90, dtype=np.int32), 100).row
    runner.forward([Feed(row, np.arange(80, dtype=np.int32))])
    assert [size for size, _ in runner.buffered.buckets] == [96]
    padded_tokens, largest = runner.buffered._padded_tokens, TOKEN_BUCKETS[-1]
    assert [padded_tokens(size, size) for size in (largest, largest + 1)] == [largest, None]
    assert [padded_tokens(size, 1) for size in (MAX_PROMPT_BUCKET, MAX_PROMPT_BUCKET + 1)] == [MAX_PROMPT_BUCKET, None]


def test_a_kernel_is_only_used_where_it_can_be():
    assert kernel_for("torch", CPU) is None
    assert kernel_for("auto", CPU) is None
    model = tiny_model()
    if not is_interpreted():
        with pytest.raises(ModelError, match="needs CUDA"):
            ModelRunner(model, KVCache(2), CPU, "triton")


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_models_run_through_the_kernel(architecture):
    if not is_interpreted():
        pytest.skip("triton was imported before TRITON_INTERPRET=1 was set")
    model = prepared(architecture)
    runner = ModelRunner(model, KVCache(6), CPU, "triton")
    assert_equal_logits([ModelRunner(model, KVCache(6), CPU), runner], num_steps=2, tolerance=1e-4, lengths=(2, 11))
    assert runner.buffered.buckets


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_cuda_graphs_of_the_kernel_equal_groups(architecture):
    device = torch.device("cuda")
    model = tiny_model(architecture, **(GPT_OSS if architecture == "gpt_oss" else {})).to(device)
    prepare_model(model)
    groups, graphs = (ModelRunner(model, KVCache(6), device, name) for name in ("torch", "triton"))
    assert_equal_logits([groups, graphs], num_steps=30, tolerance=1e-4)
    assert any(bucket.graph is not None for bucket in graphs.buffered.buckets.values()) or architecture == "gpt_oss"


def test_the_engine_writes_plain_texts_through_the_kernel():
    if not is_interpreted():
        pytest.skip("triton was imported before TRITON_INTERPRET=1 was set")
    model, prompts = tiny_model(num_hidden_layers=1), [prompt[:9] for prompt in tiny_prompts(4)]
    texts = plain_texts(model, prompts, 5)
    engine = tiny_engine(model, attention="triton", batch_size=3)
    results = {r.request_id: r for r in engine.generate(requests_for(prompts, 5), OracleDrafter(texts), Greedy())}
    assert [results[str(i)].token_ids.tolist() for i in range(4)] == texts
    assert sum(result.num_accepted for result in results.values()) > 0
