"""The workers of a night. If texts will be written, they start while plans are made; all stages that write use them."""

from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from laserbatch.jobs.console import say
from laserbatch.pipeline.distributed.actors import WorkerPool
from laserbatch.pipeline.distributed.cluster import WorkerLayout, cluster_nodes, ray_cluster, worker_layout
from laserbatch.pipeline.distributed.settings import ClusterSettings
from laserbatch.pipeline.distributed.spec import TextSpec, WorkerSpec
from laserbatch.pipeline.errors import ClusterFailed
from laserbatch.pipeline.storage.figures import WorkerFigures
from laserbatch.retrieval_pools.draft import draft

Result = TypeVar("Result")
JOIN_TIMEOUT_S = 10.0  # how long a night that ends waits for a cluster that it is just joining
MAX_SHARD_ATTEMPTS = 2  # a shard is halved once this many of its workers were lost; a single row is given up


class NightWorkers:
    """A Ray cluster with its worker pool; both start on first use and end with the block."""

    def __init__(self, settings: ClusterSettings, workspace: Path | None = None) -> None:
        self._settings, self._workspace = settings, workspace
        self._cluster = ExitStack()
        self._layout: Future[WorkerLayout] = Future()
        self._started: Future[WorkerPool | None] = Future()  # None: the cluster was started alone
        self._starter: Thread | None = None
        self._left = Event()

    def __enter__(self) -> "NightWorkers":
        return self

    def __exit__(self, *_) -> None:
        # A local cluster whose start is not awaited would leave processes behind; a joined one has its own life.
        timeout_s = JOIN_TIMEOUT_S if self._settings.ray_address else self._settings.start_timeout_s
        if self._starter is not None and wait([self._started], timeout=timeout_s).done:
            self._cluster.close()
        self._left.set()

    def start(self, spec: WorkerSpec | None) -> None:
        """Start the cluster and its workers, which load their model, in the background, unless started before.

        `spec` None: start only the cluster.
        """
        if self._starter is None:
            self._starter = Thread(target=self._enter_cluster, args=(spec,), daemon=True)
            self._starter.start()

    def worker_pool(self, spec: WorkerSpec) -> WorkerPool:
        """The worker pool, configured by `spec`, which must have the same model and pools as the spec before.

        Raises ClusterFailed if Ray does not start in time, and any error of starting the workers.
        """
        self.start(spec)
        if not self._started.done():
            say("starting workers")
        worker_pool = self._in_time(self._started)
        assert worker_pool is not None, "workers are asked for before the cluster alone is"
        worker_pool.reconfigure(spec)
        return worker_pool

    def dismiss(self) -> None:
        """End the workers, if they were started; the cluster stays for other tasks."""
        if self._starter is None or not wait([self._started], timeout=self._settings.start_timeout_s).done:
            return
        # An error at the start of workers that were never used is ignored.
        if self._started.exception() is None and (worker_pool := self._started.result()) is not None:
            worker_pool.shutdown()

    def cluster(self) -> WorkerLayout:
        """The cluster, started if it was not; its tasks find room once the workers are dismissed."""
        self.start(None)
        return self._in_time(self._layout)

    def end_own_cluster(self) -> None:
        """End the cluster if the night has started it: its idle processes still hold memory."""
        if self._settings.ray_address is None and self._started.done():
            self._cluster.close()

    def joined(self) -> WorkerLayout | None:
        """The cluster that the night joined at an address; None if the night started its own on this machine."""
        if self._settings.ray_address is None or not self._layout.done() or self._layout.exception() is not None:
            return None
        return self._layout.result()

    def _in_time(self, future: Future[Result]) -> Result:
        timeout_s = self._settings.start_timeout_s
        if not wait([future], timeout=timeout_s).done:
            raise ClusterFailed(
                f"Ray did not start within {timeout_s:g} seconds (cluster.start_timeout_s); try `laserbatch doctor`"
            )
        return future.result()

    def figures(self, worker_pool: WorkerPool, num_shards: int) -> WorkerFigures:
        """The number of workers that `num_shards` shards need, with their layout and price, for the manifest."""
        layout = replace(worker_pool.layout, num_workers=min(worker_pool.layout.num_workers, num_shards))
        size, price = (layout.num_workers, layout.num_threads, layout.device), self._settings.price_per_hour
        return WorkerFigures(*size, price, layout.num_gpus_in_all)

    def _enter_cluster(self, spec: WorkerSpec | None) -> None:
        try:
            gpus_a_worker = 1 if spec is None else spec.gpus_a_worker
            worker_bytes = (lambda: None) if spec is None else spec.worker_bytes
            layout = self._cluster.enter_context(
                ray_cluster(self._settings, self._workspace, gpus_a_worker, worker_bytes)
            )
            # The worker that sends requests to a server needs little, so other tasks may use all resources.
            self._layout.set_result(layout if gpus_a_worker else worker_layout(self._settings, cluster_nodes()))
            worker_pool = None
            if spec is not None:
                worker_pool = WorkerPool(spec, layout, MAX_SHARD_ATTEMPTS, self._settings.start_timeout_s)
                self._cluster.callback(worker_pool.shutdown)
                if isinstance(spec, TextSpec) and spec.decoding.drafters:
                    draft(None, np.empty(0, np.int32), 0)  # compiled here for numba's cache, from which workers load it
            self._started.set_result(worker_pool)
        except BaseException as error:  # raised in the thread that waits
            for future in (self._layout, self._started):
                if not future.done():
                    future.set_exception(error)
        self._left.wait()  # Linux ends processes that Ray has started when the thread that started them ends
