"""Codes of items: given or learned codes, refused ones, and the trie that they form."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from laserbatch.pipeline.errors import TableError
from laserbatch.research.recommending import codes as codes_module
from laserbatch.research.recommending import rqvae
from laserbatch.research.recommending.codes import (
    CODEBOOK_SIZE,
    SPARE_CODES,
    ItemCodes,
    made_codes,
    read_codes,
    with_new_items,
)
from laserbatch.research.recommending.item_trie import ItemTrie


def written(folder, rows: list[tuple]) -> object:
    path = folder / "codes.parquet"
    pq.write_table(pa.table({"item_id": [row[0] for row in rows], "codes": [row[1] for row in rows]}), path)
    return path


def test_codes_are_numbered_by_level_whatever_they_are_called(tmp_path):
    codes = read_codes(
        written(tmp_path, [("x", ["<a_7>", "<b_1>"]), ("y", ["<a_12>", "<b_1>"]), ("z", ["<a_7>", "<b_3>"])])
    )
    assert codes.codes.tolist() == [[1, 0], [0, 0], [1, 1]] and codes.sizes == (2, 2)
    codes = read_codes(written(tmp_path, [(3, [70, 5]), (4, [9, 5])]))
    assert codes.codes.tolist() == [[1, 0], [0, 0]] and codes.item_ids.to_pylist() == [3, 4]


def test_items_that_are_alike_get_a_further_code(tmp_path):
    codes = read_codes(written(tmp_path, [("x", [1, 2]), ("y", [1, 2]), ("z", [1, 3]), ("w", [1, 2])]))
    assert codes.codes.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 2]] and codes.sizes == (1, 2, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("x", [1, 2]), ("y", [1])], r"1 items do not have 2 codes, .* \(the first: y\)"),
        ([("x", [1, 2]), ("y", [1, 3]), ("z", None)], r"1 items do not have 2 codes, .* \(the first: z\)"),
        ([("x", [1, 2]), ("y", [1, None])], "item y has a null among its codes"),
        ([("x", [1, 2]), ("x", [1, 3])], "item x occurs more than once"),
        ([("x", [])], "of every item is empty"),
        ([("x", [1]), (None, [2])], r"row 1 \(from 0\) has no item_id"),
        ([("x", 1)], "codes of type int64; expected ids"),
        ([("x", [1.0]), ("y", [float("nan")])], "codes of type list<element: double>; expected ids"),
        ([("x", [[1]])], "expected ids that are texts or integers, and lists"),
        ([(1.5, [1])], "item_id of type double"),
    ],
)
def test_what_is_wrong_with_codes_is_named(rows, message, tmp_path):
    with pytest.raises(TableError, match=message):
        read_codes(written(tmp_path, rows))


def test_a_table_without_codes_is_refused_and_other_ids_are_said(tmp_path):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item_id": ["x"]}), path)
    with pytest.raises(TableError, match="no column codes"):
        read_codes(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TableError, match=r"^codes \(.*items.parquet\): the file cannot be read .*; write it again$"):
        read_codes(path)
    codes = ItemCodes(pa.array(["x", "y", "z"]), np.array([[0], [1], [2]], np.int32), (3,))
    there = codes.of_catalogue(pa.array(["z", "new", "x"]))
    assert there.codes.tolist() == [[2], [0]] and there.item_ids.to_pylist() == ["z", "x"]
    assert codes.rows_of(pa.array(["z", "new"])).tolist() == [2, -1]
    with pytest.raises(TableError, match="ids of type int64, but the codes have ids of type string"):
        codes.rows_of(pa.array([1, 2]))
    pq.write_table(pa.table({"item_id": pa.array([1, 2**63], pa.uint64()), "codes": [[1], [2]]}), path)
    with pytest.raises(TableError, match=r"items.parquet, row 1\): the id is too large: 9223372036854775808; .*text"):
        read_codes(path)
    pq.write_table(pa.table({"item_id": pa.array(["x"], pa.large_string()), "codes": [[1]]}), path)
    assert read_codes(path).item_ids.type == pa.string()


@pytest.mark.parametrize("maker", ["kmeans", "rqvae"])
def test_made_codes_are_coarse_to_fine_all_different_and_the_same_again(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(rqvae, "NUM_STEPS", 100)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 8)) * 10
    vectors = np.concatenate([centres[number] + rng.normal(size=(40, 8)) for number in range(3)])
    vectors = np.concatenate((vectors, vectors[:5])).astype(np.float32)  # some vectors are equal
    ids = pa.array([str(number) for number in range(len(vectors))])
    codes = made_codes(ids, vectors, 0, maker)
    assert codes.codes.shape == (125, 4) and len(np.unique(codes.codes, axis=0)) == 125
    assert (codes.codes.max(0) < CODEBOOK_SIZE).all() and (codes.codes[120:, 3] > codes.codes[:5, 3]).all()
    assert (codes.codes[:5, :3] == codes.codes[120:, :3]).all()
    groups = [set(codes.codes[start : start + 40, 0].tolist()) for start in (0, 40, 80)]
    assert not groups[0] & groups[1] and not groups[1] & groups[2] and not groups[0] & groups[2]
    assert np.array_equal(codes.codes, made_codes(ids, vectors, 0, maker).codes)
    written = pa.table({"item_id": ids, "codes": codes.codes.tolist()})
    pq.write_table(written, tmp_path / "codes.parquet")
    assert np.array_equal(read_codes(tmp_path / "codes.parquet").codes, codes.codes)


def test_new_items_have_codes_like_the_most_alike_item_until_these_are_used_up(monkeypatch):
    monkeypatch.setattr(codes_module, "MAX_PRODUCTS", 20)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(30, 6)).astype(np.float32)
    vectors[20:] = vectors[rng.integers(0, 3, 10)] * 2 + 0.01  # of three directions, with other lengths
    ids = pa.array([f"i{number}" for number in range(30)])
    known = made_codes(ids[:20], vectors[:20])
    order = rng.permutation(30)
    extended = with_new_items(known, ids.take(pa.array(order)), vectors[order])
    codes = dict(zip(extended.item_ids.to_pylist(), map(tuple, extended.codes.tolist()), strict=True))
    assert list(codes.values())[:20] == list(map(tuple, known.codes.tolist()))
    assert len(set(codes.values())) == len(codes)
    unit, left = vectors / np.linalg.norm(vectors, axis=1, keepdims=True), {}
    for row in [row for row in order.tolist() if row >= 20]:
        above = tuple(known.codes[int((unit[:20] @ unit[row]).argmax()), :-1].tolist())
        free = left.setdefault(above, [last for last in range(known.sizes[-1]) if (*above, last) not in
                                       set(map(tuple, known.codes.tolist()))])  # fmt: skip
        assert codes.get(f"i{row}") == ((*above, free.pop(0)) if free else None)
    assert 20 < len(codes) < 30 and known.sizes[-1] == known.codes[:, -1].max() + 1 + SPARE_CODES


def test_a_trie_holds_the_items_and_nothing_else():
    rng = np.random.default_rng(1)
    codes = np.unique(rng.integers(0, 4, (40, 3)), axis=0)
    codes = codes[rng.permutation(len(codes))].astype(np.int32)
    trie = ItemTrie.of(ItemCodes(pa.array(range(len(codes))), codes, (4, 4, 4)))
    rows = {tuple(row): number for number, row in enumerate(codes.tolist())}
    for path in np.ndindex(4, 4, 4):
        assert trie.node_of(path) == rows.get(path)
        is_there = any(row[:2] == path[:2] for row in rows)
        assert (trie.node_of(path[:2]) is not None) == is_there
    assert trie.num_children[0].tolist() == [len({row[0] for row in rows})]
