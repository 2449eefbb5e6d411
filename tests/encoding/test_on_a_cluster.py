"""Encoding by tasks of a Ray cluster gives the same bytes as local encoding, whatever dies, each part once."""

import datetime
import os
import signal
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import ray
from manifests import manifest_of
from night_world import local_ray
from ray import cloudpickle
from test_features import knowledge_of
from tiny_encoders import write_tiny_encoder

from laserbatch.jobs.stages.encode import encode_run
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed import encoding, tasks
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.encoding import feature_parts
from laserbatch.pipeline.encoding.identity import encoder_identity, with_dtype
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import text_parts
from laserbatch.pipeline.encoding.vector_files import NewVectors
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

WORDS = ["quiet", "loud", "radio", "sea", "a", "b", "c", "storm"]


def files_of(run: RunFolder) -> dict[str, bytes]:
    folder = run.root / "features"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_texts(folder: Path, num_files: int = 3, num_rows: int = 7) -> RunFolder:
    """Texts of users in several files, with unordered ids; one text is cut."""
    rng = np.random.default_rng(0)
    for number in range(num_files):
        ids = [f"u{key:02}" for key in rng.permutation(num_rows) * num_files + number]
        texts = [" ".join(rng.choice(WORDS, 5)) for _ in ids[1:]] + ["a " * 90 if number == 0 else "sea"]
        fields = pa.array([f'{{"taste": "{text}!"}}' for text in texts])
        table = knowledge_of(ids, texts).append_column("fields_json", fields)
        write_parquet(table, folder / f"knowledge/user/{number:05}.parquet")
    return RunFolder(folder)


def replace_texts(run: RunFolder, num_rows: int) -> None:
    """Give the first `num_rows` rows of the first file new fingerprints."""
    path = run.knowledge_folder("user") / "00000.parquet"
    table = read_parquet(path)
    fingerprints = [f"other{value}" for value in table["fingerprint"].to_pylist()[:num_rows]]
    fingerprints += table["fingerprint"].to_pylist()[num_rows:]
    column = table.schema.get_field_index("fingerprint")
    write_parquet(table.set_column(column, "fingerprint", pa.array(fingerprints)), path)


@pytest.fixture(scope="module")
def cluster():
    with local_ray(num_workers=1) as layout:
        yield layout


@pytest.fixture
def start_cluster(cluster, monkeypatch):
    """The cluster for `encode_run`, for as few texts as tests have; one thread, since two would wait for each other."""
    monkeypatch.setattr(encoding, "MIN_TEXTS", 2)
    for name in ("MIN_PART", "PARTS_A_WORKER"):
        monkeypatch.setattr(encoding, name, 5)
    return lambda: replace(cluster, num_threads=1)


@pytest.mark.ray
def test_features_are_those_of_encoding_here_though_a_task_dies_and_a_night_is_killed(
    tiny_encoder, tmp_path, monkeypatch, start_cluster
):
    settings = with_dtype(EncodingSettings(encoder=tiny_encoder, num_clusters=3), None)
    here, there = write_texts(tmp_path / "here"), write_texts(tmp_path / "there")
    fields = {"user": ("taste",)}
    expected = encode_run(here.root, settings, fields=fields)
    assert expected["user"].num_truncated == 1
    encode_part, calls = encoding._encode_part, tmp_path / "calls"
    calls.mkdir()

    def noted(part, *arguments):
        """The task, whose first process dies."""
        is_first = not list(calls.iterdir())
        if not part.is_encoded:
            (calls / f"{part.start}-{os.getpid()}").touch()
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_part(part, *arguments)

    first_ended, ended = encoding._ended, []

    def interrupted(references):
        if len(ended) == 2:
            ended.append(None)
            raise KeyboardInterrupt
        ended.append(first_ended(references))
        return ended[-1]

    monkeypatch.setattr(encoding, "_encode_part", noted)
    monkeypatch.setattr(encoding, "_ended", interrupted)
    options = {"fields": fields, "start_cluster": start_cluster}
    with pytest.raises(KeyboardInterrupt):
        encode_run(there.root, settings, **options)
    monkeypatch.setattr(encoding, "_ended", first_ended)
    while (num_kept := len(list((there.root / "features/.vectors").glob("*/*.arrow")))) < 4:
        time.sleep(0.1)  # until the running tasks have ended
    num_calls = len(list(calls.iterdir()))
    assert encode_run(there.root, settings, **options) == expected
    assert len(list(calls.iterdir())) == num_calls + 5 - num_kept
    names = ["user-centroids.parquet", "user/00000.parquet"]
    assert files_of(there) == files_of(here) and sorted(files_of(here)) == names


@pytest.fixture
def traffic(monkeypatch):
    """The sizes in bytes of all task arguments and results that pass through this process."""
    sizes, remote, result_of = [], ray.remote, encoding.result_of

    class Counted:
        def __init__(self, task):
            self._task = task

        def options(self, *, name):
            assert name in ("_encode_part", "_run_task"), "Ray shows what a task does"
            return Counted(self._task.options(name=name))

        def remote(self, *arguments):
            sizes.append(len(cloudpickle.dumps(arguments)))
            return self._task.remote(*arguments)

    def counted_result(reference):
        result = result_of(reference)
        sizes.append(len(cloudpickle.dumps(result)))
        return result

    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: Counted(remote(**options)(function)))
    monkeypatch.setattr(encoding, "result_of", counted_result)
    return sizes


@pytest.mark.ray
def test_what_passes_through_the_driver_follows_the_number_of_parts_and_not_of_rows(
    tiny_encoder, tmp_path, monkeypatch, cluster, start_cluster, traffic
):
    """The files are the same for any number of workers."""
    settings = with_dtype(EncodingSettings(encoder=tiny_encoder, num_clusters=3), None)
    files, sent = {}, {}
    for num_workers, num_rows in ((1, 40), (1, 160), (2, 160)):
        monkeypatch.setattr(feature_parts, "PART_ROWS", num_rows)
        run = write_texts(tmp_path / f"{num_workers}-{num_rows}", num_rows=num_rows)
        layout = replace(cluster, num_workers=num_workers, num_threads=1)
        traffic.clear()
        figures = encode_run(run.root, settings, start_cluster=lambda layout=layout: layout)
        assert [part.num_rows for part in figures["user"].parts] == [num_rows] * 3
        files[num_workers, num_rows], sent[num_workers, num_rows] = files_of(run), traffic.copy()
    for (num_workers, _), sizes in sent.items():
        assert len(sizes) == 2 * (5 * num_workers + 1 + 3)  # texts, codebook, feature files
        assert max(sizes) < 4_096
    few, many = sent[1, 40], sent[1, 160]
    assert abs(sum(many) - sum(few)) < 16 * len(few)
    assert files[1, 160] == files[2, 160]


@pytest.mark.ray
def test_the_driver_holds_no_vectors(tiny_encoder, tmp_path, monkeypatch, cluster, start_cluster):
    """Vectors that are sixteen times as long do not grow its memory, whether they are new or carried over."""
    wide_encoder = tmp_path / "wide"
    wide_encoder.mkdir()
    write_tiny_encoder(wide_encoder, dim=512)
    peaks = []
    for encoder in (tiny_encoder, tiny_encoder, wide_encoder):  # the first run imports packages
        settings, nights = with_dtype(EncodingSettings(encoder=encoder, num_clusters=2), None), []
        peaks.append(0)
        for day in (1, 2):
            run = write_texts(tmp_path / f"{len(peaks)}/2025-03-0{day}-0123abcd", num_rows=400)
            if day == 2:
                replace_texts(run, num_rows=100)
            pool = pa.proxy_memory_pool(default_pool := pa.default_memory_pool())
            pa.set_memory_pool(pool)
            tracemalloc.start()
            figures = encode_run(run.root, settings, *nights, start_cluster=start_cluster)
            peaks[-1] = max(peaks[-1], tracemalloc.get_traced_memory()[1] + pool.max_memory())
            tracemalloc.stop()
            pa.set_memory_pool(default_pool)
            manifest = manifest_of(run.manifest_path, datetime.date(2025, 3, day))
            manifest.features = figures
            manifest.save()
            nights = [run]
        assert figures["user"].num_rows == 1200 and figures["user"].num_encoded == 100
    num_bytes = 1200 * (512 - 32) * 4
    assert peaks[2] - peaks[1] < num_bytes / 8, (peaks, num_bytes)


@pytest.mark.ray
def test_an_error_that_a_task_meets_ends_the_night_as_itself(tiny_encoder, tmp_path, monkeypatch, start_cluster):
    settings = with_dtype(EncodingSettings(encoder=tiny_encoder), None)
    run = write_texts(tmp_path)
    encode_part = encoding._encode_part

    def elsewhere(part, *arguments):
        tasks.VISIBILITY_TIMEOUT_S = 0.3
        with suppress(FileNotFoundError):  # another task may have moved it
            part.files[0][0].rename(tmp_path / "moved")
        return encode_part(part, *arguments)

    monkeypatch.setattr(encoding, "_encode_part", elsewhere)
    with pytest.raises(ConfigError, match=r"does not see .*\d{5}\.parquet as the night wrote it: every machine"):
        encode_run(run.root, settings, start_cluster=start_cluster)


@pytest.mark.ray
def test_tasks_have_the_whole_cluster_where_a_small_worker_asks_a_server(cluster, tmp_path):
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "none"}
    decoding = DecodingSettings.model_validate({"engine": "endpoint", "endpoint": endpoint})
    places = {name: tmp_path for name in ("run_dir", "step_cost_dir")}
    spec = TextSpec(run_id="r", model_dir=SAMPLE_MODEL, decoding=decoding, templates={}, **places)
    with NightWorkers(ClusterSettings(num_workers=1)) as workers:
        workers.start(spec)
        workers.dismiss()
        assert workers.cluster() == cluster and spec.gpus_a_worker == 0


def test_the_dtype_of_earlier_vectors_is_kept_and_another_encoder_has_its_own(tiny_encoder):
    settings = EncodingSettings(encoder=tiny_encoder)
    own = with_dtype(settings, None)
    for dtype in ("float32", "bfloat16"):
        earlier = encoder_identity(settings.model_copy(update={"dtype": dtype}))
        assert with_dtype(settings, earlier).dtype == dtype
        assert with_dtype(settings, "other-" + earlier) == own
        fixed = settings.model_copy(update={"dtype": dtype})
        assert with_dtype(fixed, encoder_identity(own)) == fixed


def test_parts_hold_each_row_once_in_the_order_of_files(tmp_path):
    folder = write_texts(tmp_path).knowledge_folder("user")
    rows = np.array([6, 0, 3, 13, 7, 14, 20])
    vectors = NewVectors(tmp_path / "vectors", part_size=3, num_rows=len(rows), dim=4)
    parts = text_parts(sorted(folder.glob("*.parquet")), rows, (), vectors)
    texts = read_parquet(folder)["text"].to_pylist()
    assert [part.vectors for part in parts] == vectors.files and [part.num_texts for part in parts] == [3, 3, 1]
    read = [part.read() for part in parts]
    assert [text for of_part, _ in read for text in of_part] == [texts[row] for row in np.sort(rows).tolist()]
    assert [places.tolist() for _, places in read] == [[1, 2, 0], [1, 0, 2], [0]]
