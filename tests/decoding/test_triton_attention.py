"""The Triton kernel against the slow reference: on a GPU if there is one, otherwise in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import Pack, random_pack
from reference import reference_attention as slow_attention

from laserbatch.pipeline.decoding.attention.metadata import LaunchShape

pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA and with the dev extra")
from laserbatch.pipeline.decoding.attention import metadata
from laserbatch.pipeline.decoding.attention import triton_attention as launcher
from laserbatch.pipeline.decoding.attention.triton_attention import block_rows, triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# A part of a prompt, a tree on a text, plain decoding, the largest tree, and a first token.
LENGTHS = [(0, 21, 0), (37, 1, 9), (61, 1, 0), (5, 3, 64), (0, 1, 2)]
# The same, but shorter: each sequence gets as many query blocks as the longest one, and all are interpreted.
SHORTER = [(0, 12, 0), (37, 1, 5), (41, 1, 0), (5, 3, 9), (0, 1, 2)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not launcher.INTERPRETED,
    reason="no CUDA, and triton was imported before TRITON_INTERPRET=1 was set",
)


def assert_equal_to_the_slow_one(pack: Pack, shape: LaunchShape | None = None, **options) -> None:
    actual = triton_attention(pack.query, pack.keys, pack.values, pack.metadata, 0.3, shape=shape, **options)
    expected = slow_attention(pack.query, pack.keys, pack.values, pack.metadata, 0.3, **options)
    assert actual.dtype == pack.query.dtype and actual.shape == expected.shape
    tolerance = TOLERANCE[pack.query.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


WHOLE, CUT = 0, 32  # values of MIN_PROGRAMS: keys are never cut, or are cut into parts, each of which is interpreted


@pytest.fixture(params=[WHOLE, CUT], ids=["one-part", "many-parts"])
def part_keys(request, monkeypatch) -> int:
    """Run the test with keys of a sequence in one part or in many."""
    monkeypatch.setattr(metadata, "MIN_PROGRAMS", request.param)
    return request.param


@pytest.mark.parametrize(
    "part_keys, dtype, num_heads, num_kv_heads",
    [
        (WHOLE, torch.float32, 2, 2),
        (WHOLE, torch.bfloat16, 7, 1),
        (CUT, torch.float32, 7, 1),
        (CUT, torch.float16, 4, 2),
        (CUT, torch.bfloat16, 2, 2),
    ],
    indirect=["part_keys"],
    ids=str,
)
def test_kernel_in_every_type_and_head_grouping(part_keys, dtype, num_heads, num_kv_heads):
    assert_equal_to_the_slow_one(random_pack(LENGTHS, num_heads, num_kv_heads, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize(
    "part_keys, window, softcap, has_sinks",
    [  # every pair of values at least once
        (WHOLE, None, 2.0, False),
        (WHOLE, 1, None, True),
        (WHOLE, 7, 2.0, True),
        (CUT, None, None, True),
        (CUT, None, 2.0, True),
        (CUT, 1, 2.0, False),
        (CUT, 7, None, False),
    ],
    indirect=["part_keys"],
)
def test_kernel_with_window_softcap_and_sinks(part_keys, window, softcap, has_sinks):
    pack = random_pack(SHORTER, seed=1, device=DEVICE)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2)).to(DEVICE) if has_sinks else None
    assert_equal_to_the_slow_one(pack, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize(
    "part_keys, head_dim, value_dim", [(CUT, 8, 8), (CUT, 24, 12), (WHOLE, 40, 64)], indirect=["part_keys"]
)
def test_head_dimensions_that_are_no_power_of_two(part_keys, head_dim, value_dim):
    assert_equal_to_the_slow_one(random_pack(SHORTER, 2, 1, head_dim, value_dim, device=DEVICE))


@settings(max_examples=6, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=3),
    tile_tokens=st.sampled_from([1, 4, 16, 64]),
    num_parts=st.sampled_from([1, 4]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    seed=st.integers(0, 1000),
)
def test_any_ragged_pack_in_any_launch_shape(lengths, tile_tokens, num_parts, window, seed):
    pack = random_pack(lengths, 2, 1, head_dim=8, seed=seed, device=DEVICE)
    assert_equal_to_the_slow_one(pack, LaunchShape(num_parts, tile_tokens), window=window)


def test_padding_tokens_and_sequences_get_zeros_and_change_nothing(part_keys):
    pack = random_pack(SHORTER, device=DEVICE)
    num_tokens = len(pack.query)
    index = vars(pack.metadata)
    ends = {"cu_seqlens_k": 3, "cu_seqlens_q": 3}
    padded = {name: torch.cat((t, t[-1:].repeat(ends[name]))) if name in ends else t for name, t in index.items()}
    for name, count in {"num_committed": 3, "num_chain": 3, "ancestors": 11, "positions": 11, "slots": 90}.items():
        padded[name] = torch.cat((index[name], index[name].new_zeros(count)))
    query = torch.cat((pack.query, torch.full_like(pack.query[:11], torch.nan)))
    index = type(pack.metadata)(**padded)
    for attention in (slow_attention, triton_attention):
        plain = attention(pack.query, pack.keys, pack.values, pack.metadata, 0.3)
        actual = attention(query, pack.keys, pack.values, index, 0.3)
        torch.testing.assert_close(actual[:num_tokens], plain, rtol=1e-6, atol=1e-6)
        assert (actual[num_tokens:] == 0).all()


def test_a_result_does_not_depend_on_what_shares_the_pack():
    pack = random_pack(SHORTER, device=DEVICE)
    starts, slot_starts = pack.metadata.cu_seqlens_q.tolist(), pack.metadata.cu_seqlens_k.tolist()
    together = triton_attention(pack.query, pack.keys, pack.values, pack.metadata, 0.3, shape=LaunchShape(4, 8))
    for b in range(len(SHORTER)):
        tokens, slots = slice(starts[b], starts[b + 1]), slice(slot_starts[b], slot_starts[b + 1])
        alone = type(pack.metadata)(
            slots=pack.metadata.slots[slots],
            cu_seqlens_k=pack.metadata.cu_seqlens_k[b : b + 2] - slot_starts[b],
            num_committed=pack.metadata.num_committed[b : b + 1],
            cu_seqlens_q=pack.metadata.cu_seqlens_q[b : b + 2] - starts[b],
            num_chain=pack.metadata.num_chain[b : b + 1],
            ancestors=pack.metadata.ancestors[tokens],
            positions=pack.metadata.positions[tokens],
        )
        shape = LaunchShape(4, 8)
        actual = triton_attention(pack.query[tokens], pack.keys, pack.values, alone, 0.3, shape=shape)
        assert torch.equal(actual, together[tokens])


def test_launch_shapes_are_few():
    counts = np.random.default_rng(0).integers(1, 2000, (500, 3)).tolist()
    shapes = {LaunchShape.of(*count) for count in counts}
    assert len(shapes) <= 20
    assert LaunchShape.of(1, 1, 1) == LaunchShape(8, 1, 32)
    assert LaunchShape.of(600, 1, 1) == LaunchShape(32, 1, 32)
    assert LaunchShape.of(700, 192, 33) == LaunchShape(2, 16, 512)
    assert LaunchShape.of(700, 192, 33, num_kv_heads=32) == LaunchShape(1, 16, 1024)
    assert LaunchShape.of(700, 256, 256) == LaunchShape(1, 1, 1024)
    assert LaunchShape.of(100_000, 4, 4) == LaunchShape(32, 1, 4096)
    assert [block_rows(LaunchShape(1, tokens), 4) for tokens in (1, 4, 16, 64)] == [16, 16, 64, 64]
    assert block_rows(LaunchShape(1, 1), 71) == 128


def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """Compiled to machine code by Triton's assembler, and not run."""
    here = Path(__file__).resolve()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(here.parents[2]), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(here.with_name("kernel_compile.py"))], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 7


@pytest.mark.skipif(DEVICE == "cuda", reason="memory that is never touched is free on a CPU alone")
def test_heads_that_lie_more_than_2_31_numbers_apart():
    """For example the heads of a cache that fills a large GPU with few layers."""
    pack = random_pack([(9, 1, 2)], 3, 3, dtype=torch.float16)
    stride = 1 << 30  # between heads: the third head begins at 2^31
    far = []
    for tensor in (pack.keys, pack.values):
        memory = torch.empty(2 * stride + tensor.numel(), dtype=tensor.dtype)
        far.append(memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor))
    actual = triton_attention(pack.query, *far, pack.metadata, 0.3)
    expected = triton_attention(pack.query, pack.keys, pack.values, pack.metadata, 0.3)
    assert torch.equal(actual, expected)
