"""Encoding on a Ray cluster: each task encodes a part of the texts on some machine and writes its vectors to a file.

Further tasks make the codebook and the files of features. All files are in the run's folder, so a night that was killed
goes on with the missing parts; vectors pass neither through Ray nor through this process. A task whose process dies is
done again by another process.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any

import ray

from laserbatch.pipeline.decoding.model.folder import read_config
from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.distributed.tasks import (
    ends_process_if_device_is_lost,
    require_visible,
    result_of,
    run_task,
    software,
)
from laserbatch.pipeline.encoding.identity import find_encoder
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.text_parts import Task, TextPart
from laserbatch.pipeline.errors import ClusterFailed
from laserbatch.pipeline.gpus import num_gpus

if TYPE_CHECKING:
    from laserbatch.pipeline.encoding.encoder import TextEncoder

MIN_TEXTS = 1_000  # this process encodes fewer texts before tasks have loaded torch and the encoder
MIN_TEXTS_OF_GPUS = 50_000  # the same if it has a GPU, which encodes 1,500 per second; a task takes 15 s to start
MIN_PART, MAX_PART = 256, 4_096  # texts of a task
PARTS_A_WORKER = 4  # so that no worker waits long for the last part
OPEN_TASKS = 2  # per worker, so that none waits for the driver
GOES_ON = "the same command continues with the missing parts"
MAX_SILENT_S = 1_800.0  # longest time without a finished part


class ClusterEncoder:
    """Encodes parts, and makes features of their vectors, by tasks of a Ray cluster.

    `settings` : their `dtype` must not be `auto`, since the machines of a cluster may differ.
    `start` : called when there is something to encode; joins the cluster and returns its layout.
    """

    def __init__(self, settings: EncodingSettings, start: Callable[[], WorkerLayout]) -> None:
        self._settings, self._start = settings, cache(start)

    @property
    def dim(self) -> int:
        return int(read_config(find_encoder(self._settings)[0])["hidden_size"])

    def is_worth(self, num_texts: int) -> bool:
        """Whether tasks encode `num_texts` texts faster than this process does."""
        if num_texts < MIN_TEXTS:
            return False
        layout = self._start()
        if layout.device != "cuda" or self._settings.device == "cpu" or not num_gpus():
            return True
        return layout.num_gpus_in_all > 1 and num_texts >= MIN_TEXTS_OF_GPUS

    def part_size(self, num_texts: int) -> int:
        num_parts = PARTS_A_WORKER * self._start().num_workers
        return min(max(-(-num_texts // num_parts), MIN_PART), MAX_PART)

    def encode_parts(self, parts: Sequence[TextPart], on_batch: Callable[[int], None]) -> None:
        """See `PartsEncoder`.

        Raises ClusterFailed if no task ends, or one's process dies on every attempt; ConfigError if a machine does not
        see the workspace; and the errors of tasks.
        """
        layout = self._start()
        on_gpu = layout.device == "cuda" and self._settings.device != "cpu"
        arguments = ((part, self._settings, layout.num_threads) for part in parts)
        for number, _ in self._results(_encode_part, arguments, int(on_gpu)):
            require_visible([parts[number].vectors])
            on_batch(parts[number].num_texts)

    def run_tasks(self, tasks: Iterable[Task]) -> list[Any]:
        """See `PartsEncoder`. Raises as `encode_parts` does."""
        tasks = list(tasks)
        results = dict(self._results(_run_task, [(task,) for task in tasks]))
        require_visible(path for task in tasks for path in task.outputs)
        return [results[number] for number in range(len(tasks))]

    def _results(
        self, function: FunctionType, arguments: Iterable[tuple[Any, ...]], num_gpus: int = 0
    ) -> Iterator[tuple[int, Any]]:
        layout, waiting = self._start(), enumerate(arguments)
        # `max_calls` keeps a task's process alive on a GPU too, and with it the loaded encoder.
        task = ray.remote(num_cpus=layout.num_threads, num_gpus=num_gpus, max_calls=0)(run_task)
        named = task.options(name=function.__name__)  # as Ray shows it
        open_tasks: dict[ray.ObjectRef, int] = {}
        while True:
            for number, of_task in islice(waiting, OPEN_TASKS * layout.num_workers - len(open_tasks)):
                open_tasks[named.remote(software(), function, *of_task)] = number
            if not open_tasks:
                return
            reference = _ended(list(open_tasks))
            try:
                result = result_of(reference)
            except ClusterFailed as error:
                raise ClusterFailed(f"encoding: {error}; {GOES_ON}") from None
            yield open_tasks.pop(reference), result


def _ended(references: list[ray.ObjectRef]) -> ray.ObjectRef:
    done, _ = ray.wait(references, num_returns=1, timeout=MAX_SILENT_S)
    if not done:
        problem = f"none of {len(references)} tasks has ended within {MAX_SILENT_S:g} seconds"
        raise ClusterFailed(f"encoding: {problem}; {GOES_ON}")
    return done[0]


def _encode_part(part: TextPart, settings: EncodingSettings, num_threads: int) -> None:
    """The task that writes the vectors of a part, unless they exist."""
    import torch

    torch.set_num_threads(num_threads)
    require_visible(part.inputs)
    if not part.is_encoded:
        with ends_process_if_device_is_lost():
            part.encode(_loaded_encoder(settings.model_dump_json()))


def _run_task(task: Task) -> Any:
    require_visible(task.inputs)
    return task.run()


@cache
def _loaded_encoder(settings: str) -> "TextEncoder":
    """The encoder of this process, loaded once; settings are JSON."""
    from laserbatch.pipeline.encoding.encoder import TextEncoder

    return TextEncoder.load(EncodingSettings.model_validate_json(settings))
