from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.memory.kv_cache import MIN_SHARED_TOKENS
from laserbatch.pipeline.decoding.memory.token_store import GROWTH_STEP, TokenStore

TEMPLATE = list(range(50, 70))


def marks_of(tokens, positions) -> torch.Tensor:
    """Keys of two heads that say which token they belong to: (2, num_tokens, 1)."""
    marks = torch.tensor([t * 1000.0 + p for t, p in zip(tokens, positions, strict=True)])
    return torch.stack((marks, marks + 0.5))[:, :, None]


def write(store: TokenStore, slots, tokens, positions) -> None:
    index = torch.from_numpy(store.flat_index(np.zeros(len(slots), np.int64), np.asarray(slots), 2))
    keys = marks_of(tokens, positions)
    for layer in range(2):
        store.write(layer, index, keys + 0.25 * layer, -keys - 0.25 * layer)


def write_all(store: TokenStore, row: int, tokens: list[int]) -> None:
    """Compute and keep the rest of a prompt."""
    length = int(store.lengths[row])
    slots = store.reserve([row], [len(tokens) - length])
    write(store, slots, tokens[length:], range(length, len(tokens)))
    store.commit([row], [len(slots)], slots)
    store.remember_prefix(row, np.array(tokens, np.int32))


def admit(store: TokenStore, prompt: list[int], num_tokens: int = 100) -> tuple[int, int]:
    lease = store.acquire(np.array(prompt, np.int32), num_tokens)
    write_all(store, lease.row, prompt)
    return lease.row, lease.num_shared


def check(store: TokenStore, live: dict[int, list[int]]) -> None:
    """The store against the texts it should hold: contents, owners, counts and what is free."""
    holders: Counter = Counter()
    text_of_slot: dict[int, tuple] = {}
    for row, text in live.items():
        slots = store.slots_of(row).tolist()
        assert len(slots) == len(set(slots)) == len(text) == store.lengths[row]
        for position, slot in enumerate(slots):
            holders[slot] += 1
            # Two rows may name one slot for one and the same beginning alone.
            assert text_of_slot.setdefault(slot, tuple(text[: position + 1])) == tuple(text[: position + 1])
        for layer, cache in store.layers.items():
            expected = marks_of(text, range(len(text))) + 0.25 * layer
            assert torch.equal(cache.keys[slots].transpose(0, 1), expected)
            assert torch.equal(cache.values[slots].transpose(0, 1), -expected)
    remembered = Counter(slot for p in (*store._prefixes.values(), *store._ended.values()) for slot in p.slots.tolist())
    assert Counter(dict(enumerate(store._row_counts.tolist()))) == holders
    assert Counter(dict(enumerate(store._prefix_counts.tolist()))) == remembered
    free = store._free[: store.num_free].tolist() + store._reserved.tolist()
    assert sorted([*free, *(holders.keys() | remembered.keys())]) == list(range(store.capacity))
    assert store.num_live_rows == len(live) and store.num_committed_slots == len(holders)
    assert store.max_tokens is None or store.capacity <= store.max_tokens


@settings(max_examples=150)
@given(st.data())
def test_slots_hold_their_texts_and_nothing_leaks(data):
    """Random admissions, steps of several rows, preemptions and ends, against a dictionary of lists."""
    max_tokens = data.draw(st.sampled_from([None, 60, 120, 1500]))
    store = TokenStore(4, max_tokens)
    live: dict[int, list[int]] = {}
    waiting: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        actions = ["admit", "return", "step", "step", "step", "preempt", "leave", "retry", "forget"]
        action = data.draw(st.sampled_from(actions))
        if action in ("admit", "return"):
            if action == "return" and waiting:
                text = waiting.pop()
            else:
                shared = data.draw(st.integers(0, len(TEMPLATE)))
                text = TEMPLATE[:shared] + data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
            cached = store.longest_prefix(np.array(text[:-1], np.int32))
            lease = store.acquire(np.array(text, np.int32), 60, data.draw(st.integers(1, 60)))
            if lease is None:
                assert live, "an empty store has room"
                continue
            assert lease.row not in live and lease.num_shared == cached < len(text)
            live[lease.row] = text[: lease.num_shared]
            check(store, live)
            if store.make_room(len(text) - lease.num_shared):
                write_all(store, lease.row, text)
                live[lease.row] = text
            else:
                store.release(lease.row)
                del live[lease.row]
        elif action == "step" and live:
            rows = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True, min_size=1))
            counts = [data.draw(st.integers(1, 6)) for _ in rows]
            if not store.make_room(sum(counts)):
                with pytest.raises(MemoryError):
                    store.reserve(rows, counts)
                continue
            reserved = store.reserve(rows, counts)
            assert len(set(reserved.tolist())) == len(reserved) == sum(counts)
            slots = np.split(reserved, np.cumsum(counts)[:-1])
            kept_slots = []
            for row, own, count in zip(rows, slots, counts, strict=True):
                assert len(own) == count
                tokens = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
                kept = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
                positions = [0] * count
                for depth, node in enumerate(kept):
                    positions[node] = len(live[row]) + depth
                write(store, own, tokens, positions)
                kept_slots.append(own[kept])
                live[row] = live[row] + [tokens[node] for node in kept]
            store.commit(rows, [len(kept) for kept in kept_slots], np.concatenate(kept_slots))
        elif action in ("preempt", "leave") and live:
            row = data.draw(st.sampled_from(sorted(live)))
            store.release(row)
            text = live.pop(row)
            if action == "preempt":
                waiting.append(text)
        elif action == "retry" and live and store.make_room(3):
            store.reserve(sorted(live)[:1], [3])  # a forward that failed: nothing was kept
        elif action == "forget":
            store.forget_ended()
            assert not store._ended
        check(store, live)
    for row in list(live):
        store.release(row)
    check(store, {})
    assert len(store._ended) <= store.max_rows


def test_template_is_held_once():
    store = TokenStore(4)
    rows = [admit(store, [*TEMPLATE, 100 + i])[0] for i in range(4)]
    assert store.num_committed_slots == len(TEMPLATE) + 4
    first = store.slots_of(rows[0])[: len(TEMPLATE)].tolist()
    assert all(store.slots_of(row)[: len(TEMPLATE)].tolist() == first for row in rows)


def test_whole_prompt_is_never_shared():
    store = TokenStore(2)
    admit(store, TEMPLATE)
    assert admit(store, TEMPLATE)[1] == len(TEMPLATE) - 1


def test_short_common_prefixes_are_not_shared():
    store = TokenStore(2)
    short = TEMPLATE[: MIN_SHARED_TOKENS - 1]
    admit(store, [*short, 1, 2, 3])
    assert admit(store, [*short, 4, 5])[1] == 0


def test_least_recently_used_prompt_goes_first():
    store = TokenStore(3, max_tokens=60)
    prompts = [[start + i for i in range(20)] for start in (100, 200, 300)]
    for prompt in prompts[:2]:
        store.release(admit(store, prompt, 20)[0])
    store.release(admit(store, [*prompts[0], 1], 21)[0])  # the first is used again
    admit(store, prompts[2], 20)
    assert store.longest_prefix(np.array(prompts[0], np.int32)) == 20
    assert store.longest_prefix(np.array(prompts[1], np.int32)) == 0


def test_ended_prompts_make_room_before_memory_grows():
    store = TokenStore(4)
    for i in range(200):
        store.release(admit(store, [1000 * i + j for j in range(200)], 220)[0])
    assert store.capacity == GROWTH_STEP


def test_memory_follows_live_tokens_not_the_longest():
    store = TokenStore(16)
    rows = [admit(store, [1000 * i + j for j in range(50)])[0] for i in range(15)]
    admit(store, list(range(10**6, 10**6 + 3000)), 4000)
    assert store.num_committed_slots == 15 * 50 + 3000
    assert store.capacity <= 2 * store.num_committed_slots
    for row in rows:
        store.release(row)
    assert store.num_committed_slots == 3000


def test_admission_counts_what_is_expected_of_live_rows():
    store = TokenStore(8, max_tokens=300)
    prompts = [np.arange(1000 * i, 1000 * i + 50, dtype=np.int32) for i in range(8)]
    assert store.acquire(prompts[0], 250, 100) is not None
    assert store.acquire(prompts[1], 250, 100) is not None
    assert store.acquire(prompts[2], 250, 120) is None  # 100 + 100 + 120 > 300
    assert store.acquire(prompts[2], 250, 100) is not None
    assert store.fits(300) and not store.fits(301)


def test_growth_that_the_device_refuses_lowers_the_bound(monkeypatch, caplog):
    store = TokenStore(4)
    row, _ = admit(store, TEMPLATE)
    resize = TokenStore._resize

    def refuse(self, capacity):
        if capacity > 1500:
            raise torch.OutOfMemoryError("no more")
        resize(self, capacity)

    monkeypatch.setattr(TokenStore, "_resize", refuse)
    assert store.make_room(1200)  # less than doubled, but enough
    held = store.capacity
    assert not store.make_room(1600) and store.max_tokens == store.capacity == held
    assert "cannot be had" in caplog.text
    assert not store.fits(held + 1)
    check(store, {row: TEMPLATE})
