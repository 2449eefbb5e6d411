"""Compiled loops and torch's padded attention against the slow, obvious version, on any ragged batch."""

from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import Pack, random_pack
from reference import reference_attention

from laserbatch.pipeline.decoding.attention import numba_attention
from laserbatch.pipeline.decoding.attention.interface import CALL_COST, EagerAttention
from laserbatch.pipeline.decoding.attention.metadata import AttentionMetadata

CPU = torch.device("cpu")
# A prompt's part, a tree on a text, plain decoding, the largest tree, a prompt of several blocks, a first token, and a
# tree that begins in one step of AMX and ends in the next.
LENGTHS = [(0, 21, 0), (37, 1, 9), (61, 1, 0), (5, 1, 64), (7, 300, 0), (0, 1, 2), (28, 2, 30)]


def on_host(metadata: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(**{field.name: getattr(metadata, field.name).numpy() for field in fields(metadata)})


def assert_equal_to_the_slow_one(pack: Pack, call_cost: int = 1000, sinks=None, **options) -> None:
    attention = EagerAttention(on_host(pack.metadata), CPU)
    keys, values = pack.keys.contiguous(), pack.values.contiguous()
    masks = {"window": None, "softcap": None} | options
    with mock.patch.dict(CALL_COST, cpu=call_cost):
        actual = attention(pack.query, keys, values, 0.3, masks["window"], masks["softcap"], sinks)
    expected = reference_attention(pack.query, keys, values, pack.metadata, 0.3, sinks=sinks, **options)
    tolerance = 2e-2 if pack.query.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (4, 2), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_attention_in_every_head_grouping_and_window(num_heads, num_kv_heads, dtype, window):
    assert_equal_to_the_slow_one(random_pack(LENGTHS, num_heads, num_kv_heads, dtype=dtype), window=window)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("call_cost", [0, 1000, 10**9])
def test_attention_with_softcap_and_sinks_in_any_grouping(window, softcap, has_sinks, call_cost):
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2)) if has_sinks else None
    pack = random_pack(LENGTHS, seed=1)
    assert_equal_to_the_slow_one(pack, call_cost, sinks, window=window, softcap=softcap)


@settings(max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=5),
    dims=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    window=st.one_of(st.none(), st.integers(1, 30)),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_on_any_number_of_threads(lengths, dims, window, threads, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(numba_attention, "MIN_SCORES_PER_THREAD", 1)
        assert_equal_to_the_slow_one(random_pack(lengths, 4, 2, *dims, seed=seed), window=window)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def part_of(metadata: AttentionMetadata, b: int, new: np.ndarray) -> AttentionMetadata:
    """The metadata of sequence `b` alone, with only the new tokens `new`."""
    slots = metadata.slots[slice(*metadata.cu_seqlens_k[b : b + 2].tolist())]
    committed, chain = int(metadata.num_committed[b]), int(metadata.num_chain[b])
    tokens, nodes = metadata.cu_seqlens_q[b] + new, new[new >= chain] - chain
    bits = np.zeros(len(new), np.int64)
    for place, node in enumerate(nodes):
        bits |= (metadata.ancestors[tokens] >> node & 1) << place
    return AttentionMetadata(
        slots=np.concatenate((slots[:committed], slots[committed + new])),
        cu_seqlens_k=np.array([0, committed + len(new)], np.int32),
        num_committed=metadata.num_committed[b : b + 1],
        cu_seqlens_q=np.array([0, len(new)], np.int32),
        num_chain=np.array([min(chain, int((new < chain).sum()))], np.int32),
        ancestors=bits,
        positions=metadata.positions[tokens],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dims", [(40, 24), (96, 64)])
def test_a_token_has_the_same_bits_whatever_shares_batch_and_tree(dtype, window, dims):
    """Each sequence alone, each node with only its ancestors, and prompts cut to parts of one token and more."""
    pack = random_pack(LENGTHS, 6, 2, *dims, dtype=dtype)
    metadata, query = on_host(pack.metadata), pack.query
    keys, values = pack.keys.contiguous(), pack.values.contiguous()
    together = EagerAttention(metadata, CPU)(query, keys, values, 0.3, window, None, None)
    for b in range(len(LENGTHS)):
        start, end = metadata.cu_seqlens_q[b : b + 2].tolist()
        chain = int(metadata.num_chain[b])
        parts = [np.arange(end - start), np.arange(chain), np.arange((chain + 1) // 2), np.arange(1)]
        for node in range(0, end - start - chain, 3):
            seen = metadata.ancestors[start + chain + node] >> np.arange(end - start - chain) & 1
            parts.append(np.concatenate((np.arange(chain), chain + np.flatnonzero(seen))))
        for new in parts:
            alone = EagerAttention(part_of(metadata, b, new), CPU)
            actual = alone(query[start + new], keys, values, 0.3, window, None, None)
            assert torch.equal(actual, together[start + new])


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_sequence_alone(spoiled):
    pack = random_pack([(37, 1, 9), (61, 1, 0)])
    metadata, keys = on_host(pack.metadata), pack.keys.contiguous()
    own = set(metadata.slots[: metadata.cu_seqlens_k[1]].tolist())
    slot = next(slot for slot in metadata.slots[:37].tolist() if slot not in metadata.slots[47:].tolist())
    assert slot in own
    keys[:, slot] = spoiled
    result = EagerAttention(metadata, CPU)(pack.query, keys, pack.values.contiguous(), 0.3, None, None, None)
    assert not result[:10].isfinite().any() and result[10:].isfinite().all()


def test_weights_are_those_of_numpy():
    scores = np.concatenate((np.linspace(-300, 0, 12_001), [-np.inf, -3e38])).astype(np.float32)
    expected = np.exp(scores.astype(np.float64))
    weights = scores.copy()
    total = numba_attention._set_weights(weights, np.float32(1))
    is_large = scores > -10
    np.testing.assert_allclose(weights[is_large], expected[is_large], rtol=2e-6)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=2e-38)
    np.testing.assert_allclose(total, expected.sum(), rtol=2e-6)
    assert weights[-2] == 0
