"""The process of our engine in `gpu_vllm.py`: it makes the model, writes its folder, and answers prompts.

    python benchmarks/gpu_vllm_ours.py '{"folder": ..., "out": ..., "texts": ..., ...}'

It prints lines like `peers_worker.py`: the first when the folder is written, the second with all prompts when the pools
are built, then one for each line on stdin. It keeps one engine, and replaces it when the batch size changes.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import begin
from engine_systems import WITH_POOL, drafting
from gpu_bench import Bench, memory_now
from gpu_gains import prompts_of, run_pass, texts_of
from gpu_rows import Rows
from peers_worker import MARK
from systems import MIN_ACCEPTANCE, EngineSystem
from widen import GEOMETRIES, widened_on, write_folder

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import load_tokenizer
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.settings import Budget

TASK = "reki"


@dataclass
class Ours:
    """The engine of one batch size, and its systems by name: "plain", or a verifier and "K" with its draft tokens."""

    bench: Bench
    pools: dict
    engine: Engine | None = None
    systems: dict[str, EngineSystem] = field(default_factory=dict)

    def answer(self, name: str, batch: int, prompts: list[list[int]], max_tokens: int) -> dict:
        """Run a pass; return its texts without end tokens, its seconds and its counts."""
        if self.engine is None or self.engine.settings.batch_size != batch:
            self.engine = None
            self.systems.clear()
            self.engine = self.bench.engine(batch)
        if name not in self.systems:
            self.systems[name] = self._system(self.engine, name)
        arrays = [np.array(prompt, np.int32) for prompt in prompts]
        done, values = run_pass(self.bench, self.engine, self.systems[name], arrays, max_tokens)
        facts = {key: values[key] for key in ("captures", "draft_ms_a_step", "peak_gb") if key in values}
        counts = {"num_tokens": done.num_tokens, "num_steps": done.num_steps}
        return {"seconds": done.wall_s, "texts": done.texts, **counts, "facts": facts}

    def _system(self, engine: Engine, name: str) -> EngineSystem:
        if name == "plain":
            return EngineSystem.plain(engine)
        verifier, size = name.split(" K")
        grouped = self.pools[verifier]
        return drafting(engine, grouped.pool, WITH_POOL, grouped.groups, Budget(int(size), MIN_ACCEPTANCE), verifier)


def make_model(bench: Bench, folder: Path) -> dict[str, float]:
    """Make the model on the device and write its folder; returns the seconds of both."""
    options, start_s = bench.options, time.perf_counter()
    geometry = GEOMETRIES[options.geometry]
    model = widened_on(options.model, geometry, bench.dtype, bench.device)
    made_s = time.perf_counter()
    write_folder(dict(model.state_dict()), options.model, folder, geometry, bench.dtype)
    written_s = time.perf_counter()
    # Sets the cached property `bench.loaded`, so that the model is made only once.
    bench.__dict__["loaded"] = prepare_model(model, load_tokenizer(options.model), f"{options.geometry}-{bench.dtype}")
    return {"make_s": made_s - start_s, "write_s": written_s - made_s, **memory_now(bench.device)}


def main() -> None:
    """Answer lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    paths = {name: Path(settings[name]) for name in ("model", "texts", "folder")}
    options = argparse.Namespace(
        geometry=settings["geometry"], attention=None, no_fused=False, no_graphs=False, **paths
    )
    begin(settings["threads"])
    bench = Bench(options, Rows(Path(settings["out"]) / "rows.jsonl"), settings["max_cache_tokens"])

    def say(answer: dict) -> None:
        print(MARK + json.dumps(answer), file=answers, flush=True)

    say(make_model(bench, options.folder))
    saved, pools = texts_of(bench, TASK)
    prompts = prompts_of(bench, saved, pools, settings["num_prompts"])
    say({"prompts": [prompt.tolist() for prompt in prompts]})
    ours = Ours(bench, pools)
    for line in sys.stdin:
        request = json.loads(line)
        say(ours.answer(request["system"], request["batch"], request["prompts"], request["max_tokens"]))


if __name__ == "__main__":
    main()
