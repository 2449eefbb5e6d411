"""Feature tables: unchanged ids in order, with vectors, clusters and provenance; and equal bytes for equal input."""

import datetime
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import manifest_of
from tiny_encoders import load

from laserbatch.jobs.stages.encode import encode_run
from laserbatch.pipeline.encoding import features
from laserbatch.pipeline.encoding.codebook import fit_centroids, fit_codebook, followed, nearest_centroids
from laserbatch.pipeline.encoding.codebook_file import read_codebook
from laserbatch.pipeline.encoding.features import FeatureWriter
from laserbatch.pipeline.encoding.schema import check_feature_schema, feature_schema, run_date
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import LocalEncoder, TextPart
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage import parquet
from laserbatch.pipeline.storage.figures import FeatureFigures
from laserbatch.pipeline.storage.forgetting import leave_clusters
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder


def knowledge_of(ids, texts):
    return pa.table(
        {
            "entity_id": ids,
            "text": texts,
            "run_id": ["2025-03-01-0123abcd"] * len(texts),
            "fingerprint": [f"f{index}" for index in range(len(texts))],
            "token_ids": [[1, 2]] * len(texts),
        }
    )


def test_of_an_answer_without_the_chosen_fields_the_whole_text_is_encoded(tmp_path, caplog):
    fields = ['{"mood": "a", "era": ""}', '{"mood": "c", "era": " "}']
    answers = pa.table({"text": ["a b", "c d"], "fields_json": fields})
    write_parquet(answers, tmp_path / "knowledge.parquet")
    write_parquet(pa.table({"row": [0, 1]}), tmp_path / "rows.parquet")
    files = ((tmp_path / "knowledge.parquet", 0, 2),)
    for fields, texts in ((("era", "mood"), ["a", "c"]), (("era", "taste"), ["a b", "c d"])):
        part = TextPart(tmp_path / "rows.parquet", 0, 2, files, fields, tmp_path / "vectors")
        assert part.read()[0] == texts
    (warning,) = caplog.messages
    assert "none of 2 texts has a field that `encode` in its template names (era, taste)" in warning


def written(knowledge, side, encoder, folder, settings=None):
    """Write and read the feature table of a knowledge table."""
    run = RunFolder(folder)
    write_parquet(knowledge, run.knowledge_folder(side) / "00000.parquet")
    local = LocalEncoder(lambda: encoder)
    FeatureWriter(run, side, lambda num_texts: local, "", settings or EncodingSettings()).write()
    return read_parquet(run.features_path(side))


@pytest.mark.parametrize("ids", [pa.array(["b", "a", "c"]), pa.array([30, 4, 200], pa.int64())])
def test_rows_come_in_the_order_of_ids_of_their_own_type(tiny_encoder, ids, tmp_path):
    encoder = load(tiny_encoder)
    texts = ["quiet sea", "loud radio", "a b c"]
    features = written(knowledge_of(ids, texts), "item", encoder, tmp_path, EncodingSettings(num_clusters=2))
    check_feature_schema(features.schema, "item")
    assert features.schema.field("item_id").type == ids.type
    assert features["item_id"].to_pylist() == sorted(ids.to_pylist())
    vectors = dict(zip(features["item_id"].to_pylist(), features["vector"].to_pylist(), strict=True))
    for entity_id, text in zip(ids.to_pylist(), texts, strict=True):
        assert np.array_equal(np.float32(vectors[entity_id]), encoder.encode([text]).vectors[0])
    assert set(features["cluster_id"].to_pylist()) == {0, 1}
    fingerprints = dict(zip(features["item_id"].to_pylist(), features["fingerprint"].to_pylist(), strict=True))
    assert fingerprints == dict(zip(ids.to_pylist(), ["f0", "f1", "f2"], strict=True))


def test_only_the_text_is_encoded(tiny_encoder, tmp_path):
    encoder = load(tiny_encoder)
    tables = [knowledge_of(["u1"], ["quiet sea"]).append_column("prompt", pa.array([p])) for p in ("a", "b " * 500)]
    first, second = (written(table, "user", encoder, tmp_path) for table in tables)
    assert first.equals(second)


def test_vectors_are_named_by_what_files_hold_and_not_by_their_times(tmp_path):
    run = RunFolder(tmp_path)
    file = run.knowledge_folder("user") / "stale.parquet"
    writer = FeatureWriter(run, "user", lambda num_texts: None, "e", EncodingSettings())
    names = []
    for ids, when in ((["a"], 1), (["a"], 2), (["b"], 2)):
        write_parquet(knowledge_of(ids, ["quiet sea"]), file)
        os.utime(file, (when, when))
        names.append(writer._digest([file], np.arange(1), 1))
    assert names[0] == names[1] != names[2]


def test_clusters_are_seeded_and_never_more_than_vectors():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 8)) * 10
    vectors = (centres[np.arange(200) % 4] + rng.normal(size=(200, 8))).astype(np.float32)
    centroids = fit_centroids(vectors, 4, seed=3)
    ids = nearest_centroids(vectors, centroids)
    assert ids.dtype == np.int32 and all(len(set(ids[start::4])) == 1 for start in range(4)) and len(set(ids)) == 4
    assert np.array_equal(centroids, fit_centroids(vectors, 4, seed=3))
    assert len(fit_centroids(np.ones((5, 3), np.float32))) == 1
    assert fit_centroids(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert nearest_centroids(np.zeros((0, 3), np.float32), centroids).shape == (0,)
    assert len(fit_centroids(np.repeat(vectors, 101, axis=0), 4)) == 4  # with mini-batches


def test_a_file_that_is_no_codebook_is_refused(tmp_path):
    write_parquet(pa.table({"level": ["cluster_id"], "num_vectors": [1], "vector": [[0.5]]}), tmp_path / "c.parquet")
    with pytest.raises(WorkspaceError, match=r"not a codebook: its metadata lacks laserbatch\.codebook"):
        read_codebook(tmp_path / "c.parquet")


def test_a_codebook_follows_its_vectors_a_little_and_grows_where_they_are_far():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(5, 8)).astype(np.float32) * 10
    first = np.concatenate([centres[:4] + rng.normal(size=(4, 8)).astype(np.float32) for _ in range(50)])
    codebook = fit_codebook(first, 4, seed=3)
    codes = codebook.codes(first)
    assert codes.shape == (200, 2) and codebook.is_for(4, 3) and not codebook.is_for(4, 2)
    whole = sum(level.centroids[codes[:, place]] for place, level in enumerate(codebook.levels))
    of_one = codebook.levels[0].centroids[codes[:, 0]]
    assert np.linalg.norm(first - whole, axis=1).mean() < 0.95 * np.linalg.norm(first - of_one, axis=1).mean()
    near = followed(codebook, first[:8] + np.float32(0.5), 4, seed=3)
    moved = np.linalg.norm(near.levels[0].centroids - codebook.levels[0].centroids, axis=1)
    assert near.key == codebook.key and (moved > 0).any() and moved.max() < 0.5
    far = followed(codebook, centres[4] + rng.normal(size=(60, 8)).astype(np.float32), 4, seed=3)
    assert len(far.levels[0].centroids) == 5
    assert np.array_equal(far.codes(first)[:, 0], codes[:, 0]) and (far.codes(centres[4:])[:, 0] == 4).all()
    few = followed(fit_codebook(first[:2], 4, seed=3), first, 4, seed=3)
    assert len(few.levels[0].centroids) == 4  # few vectors were fitted, so a centroid could be added
    assert len(followed(fit_codebook(first[:0], 4, 3), first, 4, seed=3).levels[0].centroids) == 4


def test_equal_vectors_keep_their_codes_wherever_centroids_go_and_plain_texts_share_them(tiny_encoder, tmp_path):
    settings = EncodingSettings(encoder=tiny_encoder, num_clusters=3)
    rng, words = np.random.default_rng(0), ["quiet", "sea", "loud", "radio", "a", "b", "c", "storm"]
    texts = {f"u{number:02}": " ".join(rng.choice(words, 6)) for number in range(40)}
    nights = []
    for night in range(4):
        run = RunFolder(tmp_path / f"2025-03-0{night + 1}-0123abcd")
        for key in list(texts)[night::4] if night else []:
            texts[key] = " ".join(rng.choice(words, 9))
        table = knowledge_of(list(texts), list(texts.values()))
        fingerprints = pa.array([f"{night}{key}" for key in texts])  # all entities have new fingerprints
        table = table.set_column(table.schema.get_field_index("fingerprint"), "fingerprint", fingerprints)
        write_parquet(table, run.root / "knowledge/user/00000.parquet")
        write_parquet(table, run.plain.root / "knowledge/user/00000.parquet")
        manifest = manifest_of(run.manifest_path, datetime.date(2025, 3, 1))
        manifest.features = encode_run(run.root, settings, previous=nights[-1] if nights else None)
        manifest.save()
        encode_run(run.plain.root, settings, codes_of=run)
        nights.append(run)
    known = {}
    for run in nights:
        rows = table_of(run)
        assert {key: codes_in(row) for key, row in table_of(run.plain).items()} == {
            k: codes_in(r) for k, r in rows.items()
        }
        seen = {np.float32(row["vector"]).tobytes(): codes_in(row) for row in rows.values()}
        assert all(known.get(vector, codes) == codes for vector, codes in seen.items())
        known = seen
    assert len({run.load_manifest().features["user"].codebook for run in nights}) == 1
    again = encode_run(nights[-1].root, settings.model_copy(update={"num_clusters": 4}), previous=nights[-2])
    assert again["user"].codebook != nights[-1].load_manifest().features["user"].codebook  # refitted on request


def codes_in(row):
    return row["cluster_id"], row["residual_id"]


def test_a_run_is_encoded_side_by_side_and_again_to_the_same_bytes(tiny_encoder, tmp_path, capsys):
    settings = EncodingSettings(encoder=tiny_encoder, num_clusters=2)
    # Ids have the type of the tables; shards are in any order.
    write_parquet(knowledge_of(["u2", "u1"], ["quiet", "a " * 90]), tmp_path / "knowledge/user/00000.parquet")
    write_parquet(knowledge_of(["u0"], ["loud"]), tmp_path / "knowledge/user/carried.parquet")
    section = encode_run(tmp_path, settings)
    assert set(section) == {"user"}
    assert "1 user texts are longer than the encoder's limit and were cut\n" in capsys.readouterr().err
    assert section["user"].codebook.startswith("2-0-")
    (part,) = section["user"].parts
    assert (part.file, part.num_rows) == ("features/user/00000.parquet", 3)
    assert replace(
        section["user"], parts=(), encoder="", codebook="", fields=None, centroids_sha256=None
    ) == FeatureFigures(
        parts=(),
        dim=32,
        centroids="features/user-centroids.parquet",
        num_clusters=2,
        num_encoded=3,
        num_truncated=1,
        encoder="",
        codebook="",
    )
    table = read_parquet(tmp_path / "features/user")
    check_feature_schema(table.schema, "user")
    assert table["user_id"].to_pylist() == ["u0", "u1", "u2"]
    assert encode_run(tmp_path, settings) == section


def test_vectors_and_clusters_of_carried_over_texts_are_taken_over_and_equal_encoding_again(tiny_encoder, tmp_path):
    settings = EncodingSettings(encoder=tiny_encoder, num_clusters=2)
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    carried = knowledge_of(["u2", "u1"], ["quiet", "loud"])
    write_parquet(carried, old.root / "knowledge/user/00000.parquet")
    manifest = manifest_of(old.manifest_path, datetime.date(2025, 3, 1))
    manifest.features = encode_run(old.root, settings)
    manifest.save()
    write_parquet(carried, new.root / "knowledge/user/carried.parquet")
    write_parquet(knowledge_of(["u3"], ["a storm"]), new.root / "knowledge/user/00000.parquet")
    before, taken_over = table_of(old), encode_run(new.root, settings, previous=old)
    tonight = table_of(new)
    assert {key: tonight[key] for key in before} == before  # including cluster ids
    again = encode_run(new.root, settings)
    assert (taken_over["user"].num_encoded, again["user"].num_encoded) == (1, 3)
    assert {key: row["vector"] for key, row in table_of(new).items()} == {k: r["vector"] for k, r in tonight.items()}
    manifest.origin.settings["encoding"] = {"max_text_tokens": 3}  # texts were cut there, so vectors differ
    manifest.save()
    assert encode_run(new.root, settings, previous=old)["user"].num_encoded == 3
    manifest.origin.settings["encoding"] = {"max_text_tokens": settings.max_text_tokens}
    manifest.features["user"] = replace(manifest.features["user"], fields=("taste",))  # a part of answers
    manifest.save()
    assert encode_run(new.root, settings, previous=old)["user"].num_encoded == 3
    manifest.features["user"] = replace(manifest.features["user"], fields=())
    manifest.save()
    write_parquet(carried.slice(0, 0), new.root / "knowledge/user/carried.parquet")
    (new.root / "knowledge/user/00000.parquet").unlink()
    empty = encode_run(new.root, settings, previous=old)  # a side without a text
    assert (empty["user"].num_rows, empty["user"].num_encoded, empty["user"].num_clusters) == (0, 0, 0)
    check_feature_schema(read_parquet(new.features_path("user")).schema, "user")
    old.centroids_path("user").write_bytes(b"cut")
    assert encode_run(new.root, settings, previous=old)["user"].num_encoded == 0


def test_what_only_one_entity_had_leaves_all_codebooks_even_where_others_joined_it(tiny_encoder, tmp_path):
    settings = EncodingSettings(encoder=tiny_encoder, num_clusters=3)
    old, joined, without = runs = [RunFolder(tmp_path / name) for name in ("old", "joined", "without")]
    knowledge = knowledge_of(["u1", "u2", "u3", "u4"], ["a storm", "quiet", "loud radio", "a storm"])
    for run, rows in ((old, knowledge[:3]), (joined, knowledge), (without, knowledge[1:3])):
        write_parquet(rows, run.root / "knowledge/user/00000.parquet")
        manifest = manifest_of(run.manifest_path, datetime.date(2025, 3, 1))
        manifest.features = encode_run(run.root, settings, previous=None if run is old else old)
        manifest.save()
    assert len({run.centroids_path("user").read_bytes() for run in runs}) == 1
    leave_clusters([without, joined, old], [joined, old], {"user": frozenset({"u1"}), "item": frozenset()})
    table = table_of(old)
    for run in runs:
        kept = np.stack(read_parquet(run.centroids_path("user"))["vector"].to_pylist())
        distance = {name: np.abs(kept - np.array(row["vector"])).max(axis=1).min() for name, row in table.items()}
        assert distance["u1"] > 1e-3 > max(distance["u2"], distance["u3"]), run
        run.require_centroids("user", run.load_manifest().features["user"])


def table_of(run):
    return {row["user_id"]: row for row in read_parquet(run.features_path("user")).to_pylist()}


def test_a_run_without_texts_is_refused(tmp_path):
    with pytest.raises(WorkspaceError, match="no texts to encode"):
        encode_run(tmp_path)


def test_run_date_is_the_head_of_the_id():
    assert run_date("2025-03-01-0123abcd").isoformat() == "2025-03-01"
    with pytest.raises(ValueError, match="'r17' does not begin with a date"):
        run_date("r17")


def test_a_table_of_another_kind_is_named():
    with pytest.raises(ValueError, match="found record None"):
        check_feature_schema(pa.schema([("user_id", pa.string())]), "user")
    with pytest.raises(ValueError, match="side user"):
        check_feature_schema(feature_schema("user", pa.string(), 4), "item")


@pytest.mark.parametrize("rows_at_once", [3, 100])
def test_vectors_stream_past_row_groups_and_equal_encoding_all_again(tiny_encoder, tmp_path, monkeypatch, rows_at_once):
    """Files in any order, with unchanged, new and removed texts, and more rows than are read at once."""
    monkeypatch.setattr("laserbatch.pipeline.encoding.codebook_file.MAX_FITTED_ROWS", 10)
    monkeypatch.setattr("laserbatch.pipeline.encoding.features.ROW_GROUP_ROWS", rows_at_once)
    monkeypatch.setattr("laserbatch.pipeline.encoding.codebook.MAX_FULL_KMEANS_ROWS", 4)
    monkeypatch.setattr("laserbatch.pipeline.storage.parquet.ROW_GROUP_ROWS", rows_at_once)
    settings = EncodingSettings(encoder=tiny_encoder, num_clusters=2)
    ids, texts = [f"u{number:02}" for number in range(20)], [f"a b {'c ' * number}" for number in range(20)]
    old, new = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "new")
    write_parquet(knowledge_of(ids, texts)[::-1], old.root / "knowledge/user/00000.parquet")
    manifest = manifest_of(old.manifest_path, datetime.date(2025, 3, 1))
    manifest.features = encode_run(old.root, settings)
    manifest.save()
    write_parquet(knowledge_of(ids, texts), new.root / "knowledge/user/carried.parquet")
    assert encode_run(new.root, settings, previous=old) == replaced(manifest.features, num_encoded=0)
    for name in ("user/00000.parquet", "user-centroids.parquet"):  # nothing changed, so nothing is written
        assert (new.root / "features" / name).samefile(old.root / "features" / name)
    changed = knowledge_of(ids, texts).take([19, *range(0, 17, 2), 5])
    changed = changed.set_column(3, "fingerprint", pa.array(["other", *changed["fingerprint"].to_pylist()[1:]]))
    write_parquet(changed, new.root / "knowledge/user/carried.parquet")
    write_parquet(knowledge_of(["u01b", "a"], ["loud", "sea"]), new.root / "knowledge/user/00000.parquet")
    assert encode_run(new.root, settings, previous=old)["user"].num_encoded == 3
    tonight = table_of(new)
    again = encode_run(new.root, settings)
    assert again["user"].num_encoded == 13 and list(tonight) == sorted(tonight) == list(table_of(new))
    assert {key: row["vector"] for key, row in table_of(new).items()} == {k: r["vector"] for k, r in tonight.items()}


def replaced(features, **values):
    return {side: replace(figures, **values) for side, figures in features.items()}


@settings(max_examples=30, deadline=None)
@given(
    earlier=st.dictionaries(st.integers(0, 99), st.integers(0, 1), max_size=40),
    now=st.dictionaries(st.integers(0, 99), st.integers(0, 1), min_size=1, max_size=40),
    as_text=st.booleans(),
)
def test_known_rows_are_those_of_a_dictionary(tmp_path_factory, earlier, now, as_text):
    def table(id_name, rows):
        ids = pa.array([f"u{number}" for number in rows] if as_text else list(rows), pa.string() if as_text else None)
        ids = ids if len(ids) else pa.array([], pa.string() if as_text else pa.int64())
        texts = [str(text) for text in rows.values()]
        return pa.table({id_name: ids, "run_id": pa.array(texts, pa.string()), "fingerprint": ["f"] * len(texts)})

    folder = tmp_path_factory.mktemp("known")
    knowledge, known = folder / "knowledge.parquet", folder / "features.parquet"
    write_parquet(table("entity_id", now), knowledge)
    write_parquet(table("user_id", earlier).sort_by("user_id"), known, table("user_id", {1: 0}).schema)
    with pytest.MonkeyPatch.context() as patch:
        for module in (features, parquet):
            patch.setattr(module, "ROW_GROUP_ROWS", 3)
        texts = features._Texts.read(knowledge, known, "user_id", folder)
    before = {tuple(row.values()): place for place, row in enumerate(read_parquet(known).to_pylist())}
    rows = sorted(read_parquet(knowledge).to_pylist(), key=lambda row: row["entity_id"])
    assert texts.earlier_rows.tolist() == [before.get(tuple(row.values()), -1) for row in rows]
    assert [texts.id_at(place) for place in range(len(rows))] == [row["entity_id"] for row in rows]
