from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laserbatch.pipeline.decoding import free_slots, kv_cache
from laserbatch.pipeline.decoding.kv_cache import GROWTH_STEP, MIN_SHARED_TOKENS, UNBOUNDED, KVCache

TEMPLATE = list(range(50, 70))


def marks_of(tokens, positions) -> torch.Tensor:
    """Keys of two heads that encode tokens and positions: (2, num_tokens, 1)."""
    marks = torch.tensor([t * 1000.0 + p for t, p in zip(tokens, positions, strict=True)])
    return torch.stack((marks, marks + 0.5))[:, :, None]


def write(cache: KVCache, slots, tokens, positions) -> None:
    index = torch.from_numpy(np.asarray(slots, np.int64))
    keys = marks_of(tokens, positions)
    for layer in range(2):
        cache.write(layer, index, keys + 0.25 * layer, -keys - 0.25 * layer)


def write_all(cache: KVCache, row: int, tokens: list[int]) -> None:
    """Compute and commit the rest of a prompt."""
    length = int(cache.lengths[row])
    slots = cache.reserve([row], [len(tokens) - length])
    write(cache, slots, tokens[length:], range(length, len(tokens)))
    cache.commit([row], [len(slots)], slots)
    cache.remember_prefix(row, np.array(tokens, np.int32))


def admit(cache: KVCache, prompt: list[int], num_tokens: int = 100) -> tuple[int, int]:
    lease = cache.acquire(np.array(prompt, np.int32), num_tokens)
    write_all(cache, lease.row, prompt)
    return lease.row, lease.num_shared


def check(cache: KVCache, live: dict[int, list[int]]) -> None:
    """Check the cache against the texts that it should hold: contents, owners, counts and free slots."""
    holders: Counter = Counter()
    text_of_slot: dict[int, tuple] = {}
    for row, text in live.items():
        slots = cache.slots_of(row).tolist()
        assert len(slots) == len(set(slots)) == len(text) == cache.lengths[row]
        for position, slot in enumerate(slots):
            holders[slot] += 1
            # Two rows may share a slot only if their texts are equal up to it.
            assert text_of_slot.setdefault(slot, tuple(text[: position + 1])) == tuple(text[: position + 1])
        for layer, memory in cache.layers.items():
            expected = marks_of(text, range(len(text))) + 0.25 * layer
            assert torch.equal(memory.keys[:, slots], expected)
            assert torch.equal(memory.values[:, slots], -expected)
    remembered = Counter(slot for p in (*cache._prefixes.values(), *cache._ended.values()) for slot in p.slots.tolist())
    assert Counter(dict(enumerate(cache._row_counts.tolist()))) == holders
    assert Counter(dict(enumerate(cache._prefix_counts.tolist()))) == remembered
    free = np.flatnonzero(cache.free._is_free).tolist() + cache._reserved.tolist()
    assert sorted([*free, *(holders.keys() | remembered.keys())]) == list(range(cache.capacity))
    assert cache.free.num_free == int(cache.free._is_free.sum()) and len(cache.free._is_free) == cache.capacity + 1
    by_block = (
        np.add.reduceat(cache.free._is_free, range(0, cache.capacity, free_slots.BLOCK_SLOTS)) if cache.capacity else []
    )
    assert cache.free._num_free_of.tolist() == list(by_block)
    assert cache.num_live_rows == len(live) and cache.num_committed_slots == len(holders)
    assert cache.capacity <= cache.max_tokens


@mock.patch.object(free_slots, "BLOCK_SLOTS", 4)
@given(st.data())
def test_slots_hold_their_texts_and_nothing_leaks(data):
    """Random admissions, steps of several rows, preemptions and ends, compared with a dictionary of lists."""
    max_tokens = data.draw(st.sampled_from([UNBOUNDED, 60, 120, 1500]))
    cache = KVCache(4, max_tokens)
    live: dict[int, list[int]] = {}
    waiting: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        actions = ["admit", "return", "step", "step", "step", "preempt", "leave", "retry", "forget", "shrink"]
        action = data.draw(st.sampled_from(actions))
        if action in ("admit", "return"):
            if action == "return" and waiting:
                text = waiting.pop()
            else:
                shared = data.draw(st.integers(0, len(TEMPLATE)))
                text = TEMPLATE[:shared] + data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
            cached = cache.longest_prefix(np.array(text[:-1], np.int32))[0]
            lease = cache.acquire(np.array(text, np.int32), data.draw(st.integers(1, 60)))
            if lease is None:
                assert live, "an empty cache has room"
                continue
            assert lease.row not in live and lease.num_shared == cached < len(text)
            live[lease.row] = text[: lease.num_shared]
            check(cache, live)
            if cache.make_room(len(text) - lease.num_shared):
                write_all(cache, lease.row, text)
                live[lease.row] = text
            else:
                cache.release(lease.row)
                del live[lease.row]
        elif action == "step" and live:
            rows = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True, min_size=1))
            counts = [data.draw(st.integers(1, 6)) for _ in rows]
            if not cache.make_room(sum(counts)):
                with pytest.raises(MemoryError):
                    cache.reserve(rows, counts)
                continue
            expected = slow_reserve(cache, rows, counts)
            reserved = cache.reserve(rows, counts)
            assert reserved.tolist() == expected
            assert len(set(reserved.tolist())) == len(reserved) == sum(counts)
            slots = np.split(reserved, np.cumsum(counts)[:-1])
            kept_slots = []
            for row, own, count in zip(rows, slots, counts, strict=True):
                assert len(own) == count
                tokens = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
                places = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
                positions = [0] * count
                for depth, node in enumerate(places):
                    positions[node] = len(live[row]) + depth
                write(cache, own, tokens, positions)
                kept_slots.append(own[places])
                live[row] = live[row] + [tokens[node] for node in places]
            cache.commit(rows, [len(places) for places in kept_slots], np.concatenate(kept_slots))
        elif action in ("preempt", "leave") and live:
            row = data.draw(st.sampled_from(sorted(live)))
            cache.release(row)
            text = live.pop(row)
            if action == "preempt":
                waiting.append(text)
        elif action == "retry" and live and cache.make_room(3):
            cache.reserve(sorted(live)[:1], [3])  # a forward that failed: nothing is committed
        elif action == "forget":
            cache.drop_prefixes()
            assert not cache._ended
        elif action == "shrink":
            with mock.patch.object(kv_cache, "GROWTH_STEP", 8):
                cache.shrink(cache.max_tokens)
            assert cache.capacity <= -(-cache.num_committed_slots // 8) * 8
        check(cache, live)
    for row in list(live):
        cache.release(row)
    check(cache, {})
    assert len(cache._ended) <= cache.max_rows


def test_whole_prompt_is_never_shared():
    cache = KVCache(2)
    admit(cache, TEMPLATE)
    assert admit(cache, TEMPLATE)[1] == len(TEMPLATE) - 1


def test_short_common_prefixes_are_not_shared():
    cache = KVCache(2)
    short = TEMPLATE[: MIN_SHARED_TOKENS - 1]
    admit(cache, [*short, 1, 2, 3])
    assert admit(cache, [*short, 4, 5])[1] == 0


def test_least_recently_used_prompt_goes_first():
    cache = KVCache(3, max_tokens=60)
    prompts = [[start + i for i in range(20)] for start in (100, 200, 300)]
    for prompt in prompts[:2]:
        cache.release(admit(cache, prompt, 20)[0])
    cache.release(admit(cache, [*prompts[0], 1], 21)[0])  # makes the first prefix the more recently used one
    admit(cache, prompts[2], 20)
    assert cache.longest_prefix(np.array(prompts[0], np.int32))[0] == 20
    assert cache.longest_prefix(np.array(prompts[1], np.int32))[0] == 0


def test_ended_prompts_make_room_before_memory_grows():
    cache = KVCache(4)
    for i in range(200):
        cache.release(admit(cache, [1000 * i + j for j in range(200)], 220)[0])
    assert cache.capacity == GROWTH_STEP


def test_memory_follows_live_tokens_not_the_longest():
    cache = KVCache(16)
    rows = [admit(cache, [1000 * i + j for j in range(50)])[0] for i in range(15)]
    admit(cache, list(range(10**6, 10**6 + 3000)), 4000)
    assert cache.num_committed_slots == 15 * 50 + 3000
    assert cache.capacity <= 2 * cache.num_committed_slots
    for row in rows:
        cache.release(row)
    assert cache.num_committed_slots == 3000


def test_admission_counts_what_is_expected_of_live_rows():
    cache = KVCache(8, max_tokens=300)
    prompts = [np.arange(1000 * i, 1000 * i + 50, dtype=np.int32) for i in range(8)]
    assert cache.acquire(prompts[0], 100) is not None
    assert cache.acquire(prompts[1], 100) is not None
    assert cache.acquire(prompts[2], 120) is None  # 100 + 100 + 120 > 300
    assert cache.acquire(prompts[2], 100) is not None


def test_memory_that_is_had_early_is_bounded_and_its_refusal_lowers_no_bound(monkeypatch):
    cache = KVCache(4, 3000)
    row, _ = admit(cache, TEMPLATE)
    cache.grow_to(2000)
    held = cache.capacity
    assert 2000 <= held <= 3000
    cache.grow_to(1000)
    assert cache.capacity == held

    def refuse(self, capacity):
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "_resize", refuse)
        cache.grow_to(1 << 30)
    assert (cache.capacity, cache.max_tokens) == (held, 3000)
    cache.grow_to(1 << 30)
    assert cache.capacity == 3000
    check(cache, {row: TEMPLATE})


def test_growth_that_the_device_refuses_lowers_the_bound(monkeypatch, caplog):
    cache = KVCache(4)
    row, _ = admit(cache, TEMPLATE)
    resize = KVCache._resize

    def refuse(self, capacity):
        if capacity > 1500:
            raise torch.OutOfMemoryError("no more")
        resize(self, capacity)

    monkeypatch.setattr(KVCache, "_resize", refuse)
    assert cache.make_room(1200)  # less than doubled, but enough
    held = cache.capacity
    assert not cache.make_room(1600) and cache.max_tokens == cache.capacity == held
    assert "there is no memory for a KV cache" in caplog.text
    check(cache, {row: TEMPLATE})


def slow_reserve(cache: KVCache, rows: list[int], counts: list[int]) -> list[int]:
    """A row continues after its last slot if the next slots are free and not taken; other rows begin new runs."""
    is_free, starts, slots = cache.free._is_free.copy(), [], []
    for row, count in zip(rows, counts, strict=True):
        start = cache.slots_of(row)[-1] + 1 if cache.lengths[row] else cache.capacity
        own = list(range(start, start + count))
        goes_on = start not in starts and own[-1] < cache.capacity and bool(cache.free._is_free[own].all())
        starts.append(start)
        slots.append(own if goes_on else None)
        if goes_on:
            is_free[own] = False
    for i, own in enumerate(slots):
        if own is None:
            slots[i] = slow_new_run(is_free[: cache.capacity], counts[i])
            is_free[slots[i]] = False
    return [slot for own in slots for slot in own]


def slow_new_run(is_free: np.ndarray, num_tokens: int) -> list[int]:
    """The first adjacent free blocks that suffice, otherwise the first free slots."""
    free = np.flatnonzero(is_free).tolist()
    blocks = [
        at
        for at in range(0, len(is_free) - free_slots.BLOCK_SLOTS + 1, free_slots.BLOCK_SLOTS)
        if is_free[at : at + free_slots.BLOCK_SLOTS].all()
    ]
    for start in blocks:
        if all(start + at in blocks for at in range(0, num_tokens, free_slots.BLOCK_SLOTS)):
            return list(range(start, start + num_tokens))
    return free[:num_tokens]


@given(st.data())
def test_new_runs_are_those_of_a_search_through_all_slots(data):
    cache = KVCache(1, max_tokens=data.draw(st.sampled_from([1, 63, 64, 65, 300, 700])))
    assert cache.make_room(cache.max_tokens)
    for start, length in data.draw(st.lists(st.tuples(st.integers(0, 699), st.integers(1, 150)), max_size=8)):
        run = np.arange(start, min(start + length, cache.capacity))
        cache.free.take(run[cache.free._is_free[run]])
    while cache.free.num_free:
        num_tokens = data.draw(st.integers(1, cache.free.num_free))
        slots = cache.free.new_run(num_tokens)
        assert slots.tolist() == slow_new_run(cache.free._is_free[: cache.capacity], num_tokens)
        cache.free.take(slots)


def bytes_of(cache: KVCache) -> int:
    return sum(t.untyped_storage().nbytes() for memory in cache.layers.values() for t in (memory.keys, memory.values))


def test_a_shrunk_cache_holds_the_memory_of_its_live_rows_alone():
    cache = KVCache(4, max_tokens=20 * GROWTH_STEP)
    texts = [[1000 * i + j for j in range(2000)] for i in range(4)]
    rows = [admit(cache, text, 2100)[0] for text in texts]
    for row in rows[:3]:  # the last row is at the end of the cache
        cache.release(row)
    held, per_token = bytes_of(cache), cache.bytes_per_token()
    assert held >= 8000 * per_token
    cache.shrink()
    assert cache.capacity == 2 * GROWTH_STEP and bytes_of(cache) == (2 * GROWTH_STEP + 1) * per_token
    assert cache.max_tokens == 15 * GROWTH_STEP
    check(cache, {rows[3]: texts[3]})
    cache.release(rows[3])
    cache.shrink()
    assert cache.capacity == bytes_of(cache) == 0


def test_the_bound_sinks_no_lower_than_a_text_needs():
    cache = KVCache(4, max_tokens=1000)
    cache.shrink(min_tokens=900)
    assert cache.max_tokens == 900
    cache.shrink(min_tokens=2000)
    assert cache.max_tokens == 900
    cache.shrink()
    assert cache.max_tokens == 675


@pytest.mark.parametrize("num_copied", [0, 1, 2, 3, 5])
def test_a_cache_is_whole_where_there_is_no_memory_to_shrink_it(monkeypatch, num_copied):
    """Two layers of two tensors: moved slots are copied in part, and a shortened tensor as a whole."""
    cache = KVCache(2)
    first, _ = admit(cache, [*range(900)], 1000)
    other = [*range(5000, 5600)]
    second, _ = admit(cache, other, 700)
    cache.release(first)
    copies = iter(range(100))

    def scarce(original):
        def copy(*arguments, **options):
            if next(copies) >= num_copied:
                raise torch.OutOfMemoryError("no more")
            return original(*arguments, **options)

        return copy

    with monkeypatch.context() as patch:
        for name in ("index_select", "clone"):
            patch.setattr(torch.Tensor, name, scarce(getattr(torch.Tensor, name)))
        cache.shrink()
    check(cache, {second: other})
    assert cache.make_room(2000)  # and can grow again
    write_all(cache, second, [*other, *range(9000, 9900)])
    check(cache, {second: [*other, *range(9000, 9900)]})
