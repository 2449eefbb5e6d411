import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laserbatch.pipeline.decoding.memory.kv_store import KVStore


def mark(token: int, position: int) -> float:
    return token * 1000.0 + position


def write(store: KVStore, row: int, slots, tokens, positions) -> None:
    """Two layers of keys and values that say which token they belong to."""
    index = torch.from_numpy(store.flat_index(np.full(len(slots), row), np.asarray(slots), 2))
    marks = torch.tensor([mark(t, p) for t, p in zip(tokens, positions, strict=True)])
    marks = torch.stack((marks, marks + 0.5))[:, :, None]  # two heads
    for layer in range(2):
        store.write(layer, index, marks + 0.25 * layer, -marks - 0.25 * layer)


def check_row(store: KVStore, row: int, text: list[int]) -> None:
    slots = np.flatnonzero(store.committed[row])
    assert len(slots) == len(text) == store.lengths[row]
    assert sorted(store.positions[row, slots].tolist()) == list(range(len(text)))
    assert store.extents[row] == (slots.max() + 1 if len(slots) else 0)
    for layer, cache in store.layers.items():
        for slot in slots:
            position = int(store.positions[row, slot])
            expected = mark(text[position], position) + 0.25 * layer
            assert cache.keys[row, :, slot, 0].tolist() == [expected, expected + 0.5]
            assert cache.values[row, :, slot, 0].tolist() == [-expected, -expected - 0.5]


@settings(max_examples=60)
@given(st.data())
def test_rows_hold_their_texts_and_nothing_leaks(data):
    store = KVStore(4, max_tokens=data.draw(st.sampled_from([None, 1100, 2100])))
    template = list(range(50, 70))
    live: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["admit", "step", "step", "step", "leave"]))
        if action == "admit":
            shared = data.draw(st.integers(0, len(template)))
            prompt = template[:shared] + data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
            capacity = data.draw(st.sampled_from([100, 300, 600]))
            lease = store.acquire(np.array(prompt, np.int32), capacity)
            if lease is None:
                assert live, "an empty store has room"
                continue
            assert lease.row not in live and lease.num_shared < len(prompt)
            rest = prompt[lease.num_shared :]
            slots = store.reserve([lease.row], [len(rest)])
            write(store, lease.row, slots, rest, range(lease.num_shared, len(prompt)))
            store.commit([lease.row], [len(slots)], slots)
            store.remember_prefix(lease.row, np.array(prompt, np.int32))
            live[lease.row] = list(prompt)
        elif action == "step" and live:
            row = data.draw(st.sampled_from(sorted(live)))
            num_nodes = data.draw(st.integers(1, 6))
            slots = store.reserve([row], [num_nodes])
            assert not store.committed[row, slots].any() and len(set(slots.tolist())) == num_nodes
            assert (np.diff(slots) > 0).all()
            tokens = data.draw(st.lists(st.integers(1, 9), min_size=num_nodes, max_size=num_nodes))
            kept = sorted(data.draw(st.sets(st.integers(0, num_nodes - 1), min_size=1)))
            positions = [0] * num_nodes
            for depth, node in enumerate(kept):
                positions[node] = len(live[row]) + depth
            write(store, row, slots, tokens, positions)
            store.commit([row], [len(kept)], slots[kept])
            live[row] += [tokens[node] for node in kept]
        elif action == "leave" and live:
            row = data.draw(st.sampled_from(sorted(live)))
            store.release(row)
            del live[row]
        for row, text in live.items():
            check_row(store, row, text)
        assert store.num_live_rows == len(live)
        assert store.num_committed_slots == sum(len(text) for text in live.values())
    for row in list(live):
        store.release(row)
    assert store.num_live_rows == store.num_committed_slots == 0


def admit(store: KVStore, prompt) -> int:
    prompt = np.array(prompt, np.int32)
    lease = store.acquire(prompt, 100)
    slots = store.reserve([lease.row], [len(prompt) - lease.num_shared])
    write(store, lease.row, slots, prompt[lease.num_shared :], range(lease.num_shared, len(prompt)))
    store.commit([lease.row], [len(slots)], slots)
    store.remember_prefix(lease.row, prompt)
    return lease.num_shared


def test_what_has_ended_is_forgotten_on_request_and_what_lives_is_not():
    store = KVStore(3)
    prompts = [np.arange(100 * number, 100 * number + 20, dtype=np.int32) for number in range(2)]
    for prompt in prompts:
        admit(store, prompt)
    store.release(0)
    assert [store.longest_prefix(prompt) for prompt in prompts] == [20, 20]
    store.forget_ended()
    assert [store.longest_prefix(prompt) for prompt in prompts] == [0, 20]


def test_prefix_is_shared_with_live_and_with_left_sequences():
    store = KVStore(2)
    template = list(range(20))
    assert admit(store, [*template, 100]) == 0
    assert admit(store, [*template, 101, 102]) == 20
    store.release(0)
    store.release(1)
    assert admit(store, [*template, 101, 103]) == 21  # from the row that nobody holds any more
    check_row(store, 0, [*template, 101, 103])


def test_whole_prompt_is_never_shared():
    store = KVStore(2)
    admit(store, range(20))
    assert admit(store, range(20)) == 19


def test_capacity_bounds_rows_times_width():
    store = KVStore(8, max_tokens=1024)
    assert store.fits(1024) and not store.fits(1025)
    first = store.acquire(np.arange(3, dtype=np.int32), 300)
    second = store.acquire(np.arange(3, dtype=np.int32), 300)
    assert first is not None and second is not None
    assert store.acquire(np.arange(3, dtype=np.int32), 300) is None  # two rows of 512
    store.release(first.row)
    store.release(second.row)
    assert store.acquire(np.arange(3, dtype=np.int32), 1000).row == 0
    assert store.acquire(np.arange(3, dtype=np.int32), 10) is None


def test_rows_are_as_narrow_as_before_when_a_long_sequence_has_ended():
    store = KVStore(4, max_tokens=1024)
    texts = [list(range(100 * number, 100 * number + 20)) for number in range(4)]
    for text in texts[:2]:
        admit(store, text)
    store.release(0)
    store.release(1)
    long = store.acquire(np.arange(900, 950, dtype=np.int32), 1000)
    store.release(long.row)
    assert [admit(store, text) for text in texts] == [0] * 4, "narrow rows again, as many as before"
    assert (store.num_rows, store.width) == (4, 256)
    for row, text in enumerate(texts):
        check_row(store, row, text)
