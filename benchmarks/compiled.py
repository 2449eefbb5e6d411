"""What compiling a model's layers (decoding.compile) gains: whole steps with and without it, in turns.

    python benchmarks/compiled.py --quick --json compiled.json

Batches in mid-text, plain and with chains of 16 draft tokens that are seldom accepted; no step holds a prompt. Nothing
is judged. Compiled layers have their linear layers in torch's layout, the others in the fastest (`cpu_linear`).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import DEFAULT_MODEL, Spread, begin, benchmark_parser, existing, scale_of, write_json
from step_profile import TREE_NODES, engine_of, prompts_of, timed_steps

from laserbatch.pipeline.decoding.drafters import NoDrafter
from laserbatch.pipeline.decoding.model.load import load_model
from laserbatch.pipeline.decoding.token_tree import TokenTree, chain_tree
from laserbatch.pipeline.decoding.verifiers import Greedy

WAYS = {"as they are": "off", "compiled": "on"}


@dataclass(frozen=True)
class Scale:
    """How much is measured: batch sizes, turns, steps timed in each."""

    batches: tuple[int, ...]
    num_turns: int
    num_steps: int


FULL = Scale((1, 16, 64, 256), num_turns=9, num_steps=30)
QUICK = Scale((1, 32), num_turns=5, num_steps=20)
SMOKE = Scale((2,), num_turns=1, num_steps=2)


class SameChain:
    """Drafts tokens that have nothing to do with the text."""

    def draft(self, sequence) -> TokenTree:
        return chain_tree(list(range(TREE_NODES)))


def measure_model(model_dir: Path, device: str, dtype: str, scale: Scale) -> list[dict]:
    """Rows of one model: each batch size, plain and with drafts."""
    loaded, load_s = {}, {}
    for way, choice in WAYS.items():
        start_s = time.perf_counter()
        loaded[way] = load_model(model_dir, dtype, device, compiles=choice)
        load_s[way] = time.perf_counter() - start_s
    prompts = prompts_of(loaded["compiled"].tokenizer, max(scale.batches))
    rows = []
    for batch in scale.batches:
        for kind, drafter in (("plain", NoDrafter()), (f"chains of {TREE_NODES}", SameChain())):
            engines = {way: engine_of(one, batch, TREE_NODES) for way, one in loaded.items()}
            steps: dict[str, list[float]] = {way: [] for way in engines}
            for _ in range(scale.num_turns + 1):
                for way, engine in engines.items():
                    steps[way].append(
                        float(np.median(timed_steps(engine, drafter, prompts, scale.num_steps, Greedy())))
                    )
            steps = {way: times[1:] for way, times in steps.items()}  # the first turn compiles
            speed = [one / other for one, other in zip(*(steps[way] for way in WAYS), strict=True)]
            row = {
                "model": model_dir.name,
                "dtype": str(loaded["compiled"].model.dtype)[6:],
                "batch": batch,
                "kind": kind,
                "step_ms": {way: Spread.of(times) for way, times in steps.items()},
                "speed_of_compiled": Spread.of(speed),
                "load_s": load_s,
            }
            rows.append(row)
            print(f"{model_dir.name:13} batch {batch:3} {kind:12} compiled over as they are {row['speed_of_compiled']}")
    return rows


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__, "device", "dtype", "threads")
    parser.add_argument("--model", type=Path, nargs="+", default=[DEFAULT_MODEL], help="model folders")
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = parse_arguments()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    rows = [
        row
        for model_dir in existing(arguments.model)
        for row in measure_model(model_dir, arguments.device, arguments.dtype, scale)
    ]
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
