"""The number of workers that share a GPU, and where texts are encoded."""

from pathlib import Path

import pytest

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed import encoding
from laserbatch.pipeline.distributed.cluster import WorkerLayout, workers_a_gpu
from laserbatch.pipeline.distributed.spec import worker_bytes
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.gpus import min_free_bytes
from laserbatch.pipeline.storage.figures import WorkerFigures


def test_a_worker_needs_its_weights_and_the_cache_of_a_whole_batch():
    settings = DecodingSettings(batch_size=2, max_new_tokens=50)
    weights = worker_bytes(SAMPLE_MODEL, settings.model_copy(update={"batch_size": 0}), 100)
    assert weights == sum(file.stat().st_size for file in SAMPLE_MODEL.glob("*.safetensors"))
    needed = worker_bytes(SAMPLE_MODEL, settings, 100)
    assert (needed - weights) % (2 * 150) == 0 and needed > weights
    with_drafter = settings.model_copy(update={"drafters": ("trained",)})
    for other in (DecodingSettings(engine="vllm"), with_drafter):
        assert worker_bytes(SAMPLE_MODEL, other, 100) is None
    assert worker_bytes(Path("no-model"), settings, 100) is None


@pytest.mark.parametrize(
    ("needed", "free", "expected"),
    [(35 << 30, 80 << 30, 2), (37 << 30, 80 << 30, 1), (None, 80 << 30, 1), (1 << 30, None, 1)],
)
def test_two_workers_share_a_gpu_that_holds_both(needed, free, expected):
    assert workers_a_gpu(needed, free) == expected


@pytest.mark.parametrize(
    ("printed", "status", "expected"),
    [
        ("143771, Disabled\n81559, [N/A]\n", 0, 81559 << 20),
        ("81559, Enabled\n", 0, None),  # split into parts of unknown size
        ("[N/A], [N/A]\n", 0, None),
        ("", 0, None),
        ("81559, Disabled\n", 9, None),
    ],
)
def test_the_driver_says_what_is_free_on_the_gpu_that_has_least(printed, status, expected, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{printed}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert min_free_bytes() == expected
    program.unlink()
    assert min_free_bytes() is None


@pytest.mark.parametrize(
    ("layout", "gpus_here", "num_texts", "expected"),
    [
        (WorkerLayout(2, 1, 0, "cpu"), 0, 999, False),
        (WorkerLayout(2, 1, 0, "cpu"), 0, 1_000, True),
        (WorkerLayout(2, 8, 1, "cuda", 2), 1, 10**6, False),  # the only GPU is on this machine
        (WorkerLayout(8, 8, 1, "cuda"), 1, 49_999, False),
        (WorkerLayout(8, 8, 1, "cuda"), 1, 50_000, True),
        (WorkerLayout(8, 8, 1, "cuda"), 0, 1_000, True),  # GPUs are on other machines only
    ],
)
def test_tasks_encode_what_they_encode_sooner(layout, gpus_here, num_texts, expected, monkeypatch):
    monkeypatch.setattr(encoding, "num_gpus", lambda: gpus_here)
    encoder = encoding.ClusterEncoder(EncodingSettings(), lambda: layout)
    assert encoder.is_worth(num_texts) == expected


def test_gpus_that_workers_share_are_billed_once():
    assert WorkerFigures(4, 8, "cuda", num_gpus=2).num_billed == 2
    assert WorkerFigures(4, 8, "cpu").num_billed == 4
