"""Encoding on a Ray cluster: a task encodes a part of the texts where there is room and leaves its vectors in a file.

The files lie in the run's folder, so that a night that was killed goes on with the parts that are missing; vectors do
not pass through Ray. A task whose process dies is done again by another one.
"""

import hashlib
import json
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np
import ray

from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.distributed.device_loss import ends_process_if_device_is_lost
from laserbatch.pipeline.distributed.shared_folder import VISIBILITY_TIMEOUT_S
from laserbatch.pipeline.distributed.tasks import result_of
from laserbatch.pipeline.encoding.identity import encoder_identity, find_encoder
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import Encoding, TextPart
from laserbatch.pipeline.errors import ConfigError, RunFailed
from laserbatch.pipeline.gpus import num_gpus
from laserbatch.pipeline.storage.atomic import atomic_path

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder

MIN_TEXTS = 1_000  # fewer are encoded here sooner than tasks have loaded torch and the encoder
MIN_TEXTS_OF_GPUS = 50_000  # likewise beside a GPU, which encodes 1,500 a second; a task takes 15 seconds to begin
MIN_PART, MAX_PART = 256, 4_096  # texts of a task
PARTS_A_WORKER = 4  # so that none waits long for the last one
OPEN_TASKS = 2  # a worker, so that none waits for the driver
MAX_SILENT_S = 1_800.0  # without a part that is finished


class ClusterEncoder:
    """Encodes parts by tasks of a Ray cluster.

    Parameters
    ----------
    settings : with a `dtype` that is not `auto`, since the machines of a cluster may differ.
    folder : of files with vectors, which every machine sees; `close` removes it.
    start : called when there is something to encode; returns the cluster that the process has joined.
    """

    def __init__(self, settings: EncodingSettings, folder: Path, start: Callable[[], WorkerLayout]) -> None:
        self._settings, self._folder, self._start = settings, folder, cache(start)

    @property
    def dim(self) -> int:
        config = json.loads((find_encoder(self._settings)[0] / "config.json").read_text(encoding="utf-8"))
        return int(config["hidden_size"])

    def is_worth(self, num_texts: int) -> bool:
        """Whether tasks encode so many texts sooner than this process does."""
        if num_texts < MIN_TEXTS:
            return False
        layout = self._start()
        if layout.device != "cuda" or self._settings.device == "cpu" or not num_gpus():
            return True
        return layout.num_gpus_in_all > 1 and num_texts >= MIN_TEXTS_OF_GPUS

    def part_size(self, num_texts: int) -> int:
        num_parts = PARTS_A_WORKER * self._start().num_workers
        return min(max(-(-num_texts // num_parts), MIN_PART), MAX_PART)

    def encode_parts(
        self, parts: Sequence[TextPart], on_batch: Callable[[int], None]
    ) -> Iterator[tuple[TextPart, Encoding]]:
        """As `PartsEncoder` says.

        Raises RunFailed: no task ends, or the processes of one die each time; ConfigError: a machine does not see the
        workspace; and what a task meets.
        """
        layout, queue = self._start(), deque(parts)
        identity = encoder_identity(self._settings)
        on_gpu = layout.device == "cuda" and self._settings.device != "cpu"
        # `max_calls` keeps the process of a task on a GPU, and with it the encoder that it has loaded.
        task = ray.remote(num_cpus=layout.num_threads, num_gpus=int(on_gpu), max_calls=0)(_encode_part)
        open_tasks: dict[ray.ObjectRef, tuple[TextPart, Path]] = {}
        self._folder.mkdir(parents=True, exist_ok=True)
        while queue or open_tasks:
            while queue and len(open_tasks) < OPEN_TASKS * layout.num_workers:
                part = queue.popleft()
                path = self._folder / f"{_digest(part, identity)}.npz"
                if (saved := _saved_vectors(path)) is None:
                    reference = task.remote(part, self._settings, layout.num_threads, path)
                    open_tasks[reference] = part, path
                else:
                    on_batch(part.num_texts)
                    yield part, saved
            if open_tasks:
                reference = _finished(list(open_tasks))
                part, path = open_tasks.pop(reference)
                _require_visible([path])
                if (encoding := _saved_vectors(path)) is None:
                    raise RunFailed(f"{path} is damaged, which a task has just written; is the storage sound?")
                on_batch(part.num_texts)
                yield part, encoding

    def close(self) -> None:
        """Remove the files with vectors."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _finished(references: list[ray.ObjectRef]) -> ray.ObjectRef:
    """The first of some tasks that ends. An error that it reports is raised as itself."""
    done, _ = ray.wait(references, num_returns=1, timeout=MAX_SILENT_S)
    if not done:
        raise RunFailed(
            f"encoding: none of {len(references)} tasks has ended within {MAX_SILENT_S:g} seconds; the same command "
            "goes on with the parts that are missing"
        )
    try:
        result_of(done[0])
    except RunFailed as error:
        raise RunFailed(f"encoding: {error}; the same command goes on with the parts that are missing") from None
    return done[0]


def _encode_part(part: TextPart, settings: EncodingSettings, num_threads: int, path: Path) -> None:
    """The task: write the vectors of a part, and how many of its texts were cut."""
    import torch

    torch.set_num_threads(num_threads)
    _require_visible([file for file, _ in part.files])
    with ends_process_if_device_is_lost():
        encoding = _loaded_encoder(settings.model_dump_json()).encode(part.read())
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, vectors=encoding.vectors, num_truncated=encoding.num_truncated)


@cache
def _loaded_encoder(settings: str) -> "TextEncoder":
    """The encoder of this process; settings as JSON."""
    from laserbatch.pipeline.encoding.encoder import TextEncoder

    return TextEncoder.load(EncodingSettings.model_validate_json(settings))


def _require_visible(paths: list[Path]) -> None:
    """Wait for files on storage that shows new ones late. Raises ConfigError: this machine does not see one."""
    deadline_s = time.monotonic() + VISIBILITY_TIMEOUT_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{socket.gethostname()} does not see {path}: every machine of the cluster needs the "
                    "workspace at the same path, on storage that all of them share"
                )
            time.sleep(0.2)


def _digest(part: TextPart, identity: str) -> str:
    """Names the vectors of a part: by the encoder, and by its rows in files as they are."""
    digest = hashlib.sha256(json.dumps([identity, part.fields]).encode())
    for path, rows in part.files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode() + rows.tobytes())
    return digest.hexdigest()[:32]


def _saved_vectors(path: Path) -> Encoding | None:
    """The vectors that a task saved; None if there are none, or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Encoding(arrays["vectors"], int(arrays["num_truncated"]))
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
