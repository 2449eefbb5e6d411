"""Feature tables in several files: their ranges, files that are shared with the earlier run, and earlier layouts."""

import datetime
import os
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from manifests import manifest_of
from test_features import knowledge_of

from laserbatch.jobs.stages.encode import encode_run
from laserbatch.pipeline.encoding import feature_parts
from laserbatch.pipeline.encoding.feature_parts import PART_ROWS, part_bounds
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.vector_files import Encoding, NewVectors, is_saved, save_vectors
from laserbatch.pipeline.errors import WorkspaceError
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

WORDS = ["quiet", "loud", "radio", "sea", "a", "b", "c", "storm"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(feature_parts, "PART_ROWS", 4)


class World:
    """Users whose texts change from night to night."""

    def __init__(self, folder, settings):
        self.folder, self.settings, self.nights = folder, settings, []
        self.texts = {f"u{number:02}": (WORDS[number % 8] + f" {WORDS[number % 3]}", "1") for number in range(20)}

    def planned(self, day):
        """A run with the current texts, in two files."""
        run = RunFolder(self.folder / f"2025-03-0{day}-0123abcd")
        ids = sorted(self.texts, reverse=True)
        table = knowledge_of(ids, [self.texts[key][0] for key in ids])
        fingerprints = pa.array([self.texts[key][1] for key in ids])
        table = table.set_column(table.schema.get_field_index("fingerprint"), "fingerprint", fingerprints)
        write_parquet(table[:7], run.knowledge_folder("user") / "00000.parquet")
        write_parquet(table[7:], run.knowledge_folder("user") / "carried.parquet")
        return run

    def night(self, day):
        run = self.planned(day)
        figures = encode_run(run.root, self.settings, self.nights[-1] if self.nights else None)
        finish(run, figures)
        self.nights.append(run)
        return run, figures["user"]


@pytest.fixture
def world(tmp_path, tiny_encoder):
    return World(tmp_path, EncodingSettings(encoder=tiny_encoder, num_clusters=3))


def finish(run, figures):
    manifest = manifest_of(run.manifest_path, datetime.date(2025, 3, 1))
    manifest.features = figures
    manifest.save()
    run.finish()


def files_of(run):
    return {path.name: path.read_bytes() for path in run.features_path("user").glob("*")}


def linked(new, old):
    """The names of files that both runs share."""
    paths = [[run.features_folder("user") / name for run in (new, old)] for name in sorted(files_of(new))]
    return [new_path.name for new_path, old_path in paths if old_path.exists() and new_path.samefile(old_path)]


def test_files_in_which_nothing_changed_are_taken_over_and_others_keep_their_range(world):
    first, figures = world.night(1)
    assert [part.num_rows for part in figures.parts] == [4] * 5 and figures.num_rows == 20
    world.texts |= {"u05": ("sea", "2"), "u09b": ("loud", "2")}
    del world.texts["u10"]  # so another file with as many rows
    second, figures = world.night(2)
    assert [part.num_rows for part in figures.parts] == [4] * 5 and figures.num_encoded == 2
    assert linked(second, first) == ["00000.parquet", "00003.parquet", "00004.parquet"]
    table = read_parquet(second.features_path("user"))
    assert table["user_id"].to_pylist() == sorted(world.texts)
    again = encode_run(world.planned(3).root, world.settings)["user"]
    whole = read_parquet(RunFolder(world.folder / "2025-03-03-0123abcd").features_path("user"))
    assert whole.drop_columns(["cluster_id", "residual_id"]).equals(table.drop_columns(["cluster_id", "residual_id"]))
    assert again.num_encoded == 20 and figures.num_clusters == len(set(table["cluster_id"].to_pylist()))


def test_codes_of_unchanged_vectors_stay_in_every_file(world):
    first, _ = world.night(1)
    codes = {row["user_id"]: row for row in read_parquet(first.features_path("user")).to_pylist()}
    world.texts = {key: (text, "2" if number % 3 == 0 else "1") for number, (key, (text, _)) in
                   enumerate(world.texts.items())} | {"u30": (world.texts["u00"][0], "2")}  # fmt: skip
    second, figures = world.night(2)
    assert figures.num_encoded == 8 and figures.codebook == first.load_manifest().features["user"].codebook
    rows = {row["user_id"]: row for row in read_parquet(second.features_path("user")).to_pylist()}
    levels = ("vector", "cluster_id", "residual_id")
    assert all(rows[key][name] == codes[key][name] for key in codes for name in levels)
    assert all(rows["u30"][name] == codes["u00"][name] for name in levels)


@pytest.mark.parametrize("name", ["00002.parquet", "00009.parquet"])
def test_a_file_that_is_missing_or_none_of_the_run_is_named(world, name, capsys):
    first, figures = world.night(1)
    files = sorted(first.features_folder("user").iterdir())
    if name == "00002.parquet":
        files[2].unlink()
    else:
        files[-1].with_name(name).write_bytes(files[-1].read_bytes())
    with pytest.raises(WorkspaceError, match=rf"features/user/{name} is .*expected the 5 files of user features"):
        first.require_features({"user": figures})
    assert world.night(2)[1].num_encoded == 20
    said = "all user texts are encoded again, and their cluster ids are not comparable with earlier ones: "
    assert f"{said}{first.features_folder('user') / name}" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["user", "user-centroids.parquet"])
def test_lost_features_or_a_lost_codebook_are_named(world, lost, capsys):
    first, _ = world.night(1)
    (first.root / "features" / lost).rename(first.root / "elsewhere")
    assert world.night(2)[1].num_encoded == 20
    assert f"are not comparable with earlier ones: {first.root / 'features' / lost}" in capsys.readouterr().err


@pytest.mark.parametrize("is_whole", [True, False])
def test_vectors_of_a_file_that_was_written_again_are_not_taken_over(world, is_whole, capsys):
    first, _ = world.night(1)
    path = sorted(first.features_folder("user").iterdir())[2]
    rows = read_parquet(path)
    write_parquet(rows.set_column(1, rows.schema.field(1), rows[1].take(pa.array([1, 0, 2, 3]))), path)
    if not is_whole:
        world.texts[rows["user_id"][0].as_py()] = ("sea", "2")
    assert world.night(2)[1].num_encoded == 20
    said = "are not comparable with earlier ones: "
    assert f"{said}{path} is damaged or was changed: its SHA-256 is not" in capsys.readouterr().err


def test_codes_and_centroids_that_were_written_again_are_not_taken_over(world, capsys):
    first, figures = world.night(1)
    path = sorted(first.features_folder("user").iterdir())[2]
    rows, as_written = read_parquet(path), path.read_bytes()
    place = rows.schema.get_field_index("cluster_id")
    write_parquet(rows.set_column(place, rows.schema.field(place), pa.array([9] * len(rows), pa.int32())), path)
    for number, user in enumerate(rows["user_id"].to_pylist()):
        world.texts[user] = (world.texts[user][0], f"anew {number}")  # no row of the file is reused, but its codes are
    run, _ = world.night(2)
    assert 9 not in read_parquet(run.features_path("user"))["cluster_id"].to_pylist()
    assert f"{path} is damaged or was changed" in capsys.readouterr().err

    path.write_bytes(as_written)
    centroids = first.centroids_path("user")
    table = read_parquet(centroids)
    write_parquet(table.set_column(2, table.schema.field(2), pa.array([1] * len(table), pa.int64())), centroids)
    world.nights = [first]
    assert world.night(3)[1].num_encoded == 20
    assert f"{centroids} is damaged or was changed" in capsys.readouterr().err
    with pytest.raises(WorkspaceError, match=f"{centroids} is damaged"):
        first.require_centroids("user", figures)


def test_a_damaged_file_of_plain_features_is_named_with_its_run(world):
    first, figures = world.night(1)
    first.plain.root.mkdir()
    (first.root / "features").rename(first.plain.root / "features")
    path, other = sorted(first.plain.features_folder("user").iterdir())[:2]
    path.write_bytes(other.read_bytes())
    with pytest.raises(WorkspaceError, match=rf"{path} is damaged .*move {first.root} away and run 2025-03-01 again"):
        first.plain.require_features({"user": figures}, compare_bytes=True)


@pytest.mark.parametrize(("num_rows", "match"), [(3, "has 3 rows, not 4"), (None, "damaged")])
def test_a_file_that_lost_rows_or_is_damaged_is_named(world, num_rows, match, capsys):
    first, figures = world.night(1)
    path = sorted(first.features_folder("user").iterdir())[2]
    if num_rows:
        write_parquet(read_parquet(path).slice(0, num_rows), path)
    else:
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WorkspaceError, match=rf"features/user/00002.parquet {match}|00002.parquet is {match}"):
        first.require_features({"user": figures})
    assert world.night(2)[1].num_encoded == 20
    assert f"are not comparable with earlier ones: {path}" in capsys.readouterr().err


def test_a_night_that_is_killed_at_any_file_ends_in_the_same_files(world, monkeypatch):
    world.night(1)
    world.texts |= {"u05": ("sea", "2"), "u30": ("loud", "2")}
    _, expected = world.night(2)
    whole, run = files_of(world.nights.pop()), world.planned(3)
    move, stop_at, figures = os.replace, 0, None
    while figures is None:
        calls = iter(range(stop_at))

        def stopping(source, target, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            move(source, target)

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(os, "replace", stopping)
            figures = encode_run(run.root, world.settings, world.nights[-1])
        stop_at += 1
    assert stop_at > 8 and files_of(run) == whole and figures["user"] == expected
    assert {path.name for path in (run.root / "features").iterdir()} == {"user", "user-centroids.parquet"}


def test_a_new_vector_that_was_damaged_is_named_by_file_and_row_and_its_part_encoded_again(tmp_path):
    vectors = NewVectors(tmp_path, part_size=3, num_rows=5, dim=2)
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    for path, start in zip(vectors.files, (0, 3), strict=True):
        save_vectors(Encoding(values[start : start + 3], start), path)
    assert np.array_equal(vectors.read(np.array([4, 0, 2])), values[[4, 0, 2]]) and vectors.num_truncated() == 3
    path = vectors.files[1]
    path.write_bytes(path.read_bytes().replace(np.float32(9).tobytes(), np.float32(7).tobytes()))
    assert vectors.read(np.array([3])).tolist() == [[6, 7]] and not is_saved(path, 2)
    with pytest.raises(WorkspaceError, match=r"00001\.arrow, row 1: the vector does not fit its checksum"):
        vectors.read(np.array([3, 4]))
    path.write_bytes(b"cut")
    assert not is_saved(path, 2) and is_saved(vectors.files[0], 3) and not is_saved(vectors.files[0], 2)


@example(set(range(10)), [0, 1])
@given(st.sets(st.integers(0, 60)), st.lists(st.integers(0, 60), unique=True))
def test_files_have_few_rows_cover_all_and_begin_where_they_began(ids, first_ids):
    ids, first_ids = sorted(ids), sorted(first_ids)
    bounds = part_bounds(len(ids), ids.__getitem__, first_ids)
    sizes = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == len(ids) and len(bounds) > 1 and sizes.max() <= 2 * feature_parts.PART_ROWS
    assert (sizes > 0).all() or not ids
    starts = [ids[bound] for bound in bounds[:-1]] if ids else []
    assert part_bounds(len(ids), ids.__getitem__, starts) == bounds


def test_a_night_of_few_rows_has_one_file(monkeypatch):
    monkeypatch.setattr(feature_parts, "PART_ROWS", PART_ROWS)
    num_rows = 2 * PART_ROWS
    assert part_bounds(num_rows, lambda place: place, []) == [0, num_rows]
    assert len(part_bounds(num_rows + 1, lambda place: place, [])) == 4
