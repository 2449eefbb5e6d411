"""Functions that run on a machine of the Ray cluster with what a worker has."""

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from laserbatch.pipeline.distributed.cluster import WorkerLayout
from laserbatch.pipeline.errors import ClusterFailed


def start_task(layout: WorkerLayout, num_gpus: int, function: Callable[..., Any], *arguments: Any) -> ray.ObjectRef:
    """Start a task with a worker's cores; `result_of` waits for it."""
    return ray.remote(num_cpus=layout.num_threads, num_gpus=num_gpus)(function).remote(*arguments)


def wait_for(task: ray.ObjectRef) -> None:
    """Wait until a task has ended, well or not."""
    ray.wait([task])


def result_of(reference: ray.ObjectRef) -> Any:
    """The result of a task. Raises an error of its function as itself; ClusterFailed: its processes died each time."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        message = " ".join(str(error).partition("Some common causes")[0].split())
        raise ClusterFailed(f"the processes of a task died one after another: {message}") from None
