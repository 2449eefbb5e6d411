"""Steps of `gpu_steps.py` on a pretended device."""

from gpu_steps import take_step, without_graphs
from pretend_cuda import pretend_cuda
from test_pretend_cuda import KERNEL, LONG_TEXTS, endless_engine
from tiny_models import requests_for

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.verifiers import Greedy


def test_steps_without_graphs_replay_none():
    with pretend_cuda() as cuda, KERNEL:
        engine = endless_engine()
        stream = engine.open_stream(iter(requests_for(LONG_TEXTS, 40)), NoDrafter(), Greedy(), Budget(0, 0.0))

        def num_replays() -> int:
            before = cuda.num_replays
            for _ in range(4):
                take_step(engine, stream)
            return cuda.num_replays - before

        num_replays()
        with_graphs = num_replays()
        with without_graphs(engine.runner.buffered):
            assert (with_graphs, num_replays()) == (4, 0)
        assert num_replays() == 4
        stream.scheduler.close()
