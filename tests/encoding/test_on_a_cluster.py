"""Encoding by tasks of a Ray cluster: the bytes that encoding here gives, whatever dies, and each part once."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_features import knowledge_of

from laserbatch.jobs.stages.encode import encode_run
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed import encoding
from laserbatch.pipeline.distributed.cluster import ray_cluster
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.spec import TextSpec
from laserbatch.pipeline.encoding.identity import encoder_identity, with_dtype
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import text_parts
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.parquet import read_parquet, write_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder

WORDS = ["quiet", "loud", "radio", "sea", "a", "b", "c", "storm"]


def write_texts(folder: Path, num_files: int = 3, num_rows: int = 7) -> RunFolder:
    """Texts of users in several files, whose ids come in no order; one text is cut."""
    rng = np.random.default_rng(0)
    for number in range(num_files):
        ids = [f"u{key:02}" for key in rng.permutation(num_rows) * num_files + number]
        texts = [" ".join(rng.choice(WORDS, 5)) for _ in ids[1:]] + ["a " * 90 if number == 0 else "sea"]
        fields = pa.array([f'{{"taste": "{text}!"}}' for text in texts])
        table = knowledge_of(ids, texts).append_column("fields_json", fields)
        write_parquet(table, folder / f"knowledge/user/{number:05}.parquet")
    return RunFolder(folder)


@pytest.fixture(scope="module")
def cluster():
    """A local Ray of one worker, whatever cluster the environment names."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with ray_cluster(ClusterSettings(num_workers=1)) as layout:
            yield layout


@pytest.fixture
def start_cluster(cluster, monkeypatch):
    """For `encode_run`; as few texts as tests have go to the cluster."""
    monkeypatch.setattr(encoding, "MIN_TEXTS", 2)
    for name in ("MIN_PART", "PARTS_A_WORKER"):
        monkeypatch.setattr(encoding, name, 5)
    return lambda: cluster


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
        """The task; the first process dies in it."""
        is_first = not list(calls.iterdir())
        (calls / f"{part.first}-{os.getpid()}").touch()
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_part(part, *arguments)

    finished, ended = encoding._finished, []

    def interrupted(references):
        if len(ended) == 2:
            ended.append(None)
            raise KeyboardInterrupt
        ended.append(finished(references))
        return ended[-1]

    monkeypatch.setattr(encoding, "_encode_part", noted)
    monkeypatch.setattr(encoding, "_finished", interrupted)
    options = {"fields": fields, "start_cluster": start_cluster}
    with pytest.raises(KeyboardInterrupt):
        encode_run(there.root, settings, **options)
    monkeypatch.setattr(encoding, "_finished", finished)
    while (num_kept := len(list((there.root / "features/.vectors").glob("*.npz")))) < 4:
        time.sleep(0.1)  # until what was under way has ended
    num_calls = len(list(calls.iterdir()))
    assert encode_run(there.root, settings, **options) == expected
    assert len(list(calls.iterdir())) == num_calls + 5 - num_kept
    for name in ("user.parquet", "user-centroids.parquet"):
        assert (there.root / "features" / name).read_bytes() == (here.root / "features" / name).read_bytes()
    assert sorted(path.name for path in (there.root / "features").iterdir()) == [
        "user-centroids.parquet",
        "user.parquet",
    ]


@pytest.mark.ray
def test_an_error_that_a_task_meets_ends_the_night_as_itself(tiny_encoder, tmp_path, monkeypatch, start_cluster):
    settings = with_dtype(EncodingSettings(encoder=tiny_encoder), None)
    run = write_texts(tmp_path)
    encode_part = encoding._encode_part

    def elsewhere(part, *arguments):
        encoding.VISIBILITY_TIMEOUT_S = 0.3
        part.files[0][0].rename(tmp_path / "moved")
        return encode_part(part, *arguments)

    monkeypatch.setattr(encoding, "_encode_part", elsewhere)
    with pytest.raises(ConfigError, match=r"does not see .*\d{5}\.parquet: every machine of the cluster needs"):
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
    rows = np.array([0, 3, 6, 7, 13, 14, 20])
    parts = text_parts(folder, rows, (), 3)
    texts = read_parquet(folder)["text"].to_pylist()
    assert [part.first for part in parts] == [0, 3, 6]
    assert [text for part in parts for text in part.read()] == [texts[row] for row in rows.tolist()]
