"""The measurements of `gpu_first.py` that need the large model: a list of items, each of which writes rows.

    python benchmarks/gpu_phases.py --out DIR steps/64/0 steps/64/8 gains/reki/64

Rows are appended to `rows.jsonl` as they come, and so are the beginning and the end of each item: the parent process
sees at which item this one ended and can go on with the next. The model is made on its device, once per process. An
item that fails writes a row with the reason. A CUDA error ends the process, since no result after it can be trusted.

Items: `rates`, `gemms`, `steps/BATCH/NODES[/unfused]`, `attention/CONTEXT`, `gains/TASK/BATCH`, `chosen/TASK/BATCH`,
`peers/BATCH`, `drafts` (pools are built and asked for drafts once, which compiles them; no model is loaded).
"""

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import gpu_gains
from block_override import override_blocks
from common import DEFAULT_MODEL, begin, jsonable
from gpu_bench import Bench, is_fatal, release_memory
from gpu_rows import FATAL_STATUS, Rows
from gpu_steps import measure_attention, measure_gemms, measure_steps
from widen import GEOMETRIES

from laserbatch.pipeline.decoding.device_memory import is_out_of_memory

SMALL_CACHE_TOKENS = 150_000  # tried after memory ran out


def run_item(bench: Bench, item: str) -> None:
    """Run one item; the measuring function writes its rows."""
    kind, *words = item.split("/")
    if kind == "rates":
        rates = bench.rates
        bench.rows.add("load", item, **jsonable({**vars(rates)}))
    elif kind == "gemms":
        measure_gemms(bench, item)
    elif kind == "steps":
        measure_steps(bench, item, int(words[0]), int(words[1]), fused="unfused" not in words)
    elif kind == "attention":
        measure_attention(bench, item, int(words[0]))
    elif kind in ("gains", "chosen", "peers", "drafts"):
        getattr(gpu_gains, f"measure_{kind}")(bench, item, *words)
    else:
        raise SystemExit(f"no item {item}")


def attempt(bench: Bench, item: str) -> None:
    """Run an item, again with a smaller cache if memory runs out; a failure becomes a row."""
    for max_cache_tokens in (bench.max_cache_tokens, SMALL_CACHE_TOKENS):
        bench.max_cache_tokens = max_cache_tokens
        try:
            run_item(bench, item)
            return
        except (Exception, SystemExit) as error:
            trace = "".join(traceback.format_exception(error))
            print(trace, file=sys.stderr, flush=True)
            if is_fatal(error):
                bench.rows.add(phase_of(item), item, failed=str(error)[:400], traceback=trace[-1500:])
                sys.stderr.flush()
                os._exit(FATAL_STATUS)  # without CUDA's clean-up, which can hang
            ran_out = is_out_of_memory(error) or "out of memory" in str(error)
            if not ran_out or max_cache_tokens == SMALL_CACHE_TOKENS:
                reason = "does not fit" if ran_out else str(error)[:400]
                bench.rows.add(phase_of(item), item, failed=reason, traceback=trace[-1500:])
                return
        release_memory(bench.device)


def phase_of(item: str) -> str:
    """The phase that an item's rows belong to."""
    kind = item.split("/")[0]
    phases = {"steps": "c", "attention": "e", "gains": "f", "chosen": "f", "peers": "p", "drafts": "drafts"}
    return phases.get(kind, "load")


def main(words: list[str] | None = None) -> None:
    """Run the items in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the small model")
    parser.add_argument("--texts", type=Path, help="folder that pool_texts.py wrote")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="8b-gqa")
    parser.add_argument("--attention", help="decoding.attention; default: triton on CUDA")
    parser.add_argument("--no-fused", action="store_true", help="transformers' layers instead of fused ones")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--max-cache-tokens", type=int)
    parser.add_argument("--profile", action="store_true", help="profile a step of some items")
    parser.add_argument("--compile-only", help="I/N: compile this share of the attention kernels, do not time them")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds until the process must end")
    parser.add_argument("--smoke", action="store_true", help="few and short steps")
    parser.add_argument("--crash-at", help="for tests: end at this item as a crash would")
    options = parser.parse_args(words)
    options.end_s = time.monotonic() + options.until
    begin(1 if options.smoke else min(4, os.cpu_count() or 1))
    override_blocks()
    rows = Rows(options.out / "rows.jsonl")
    bench = Bench(options, rows, options.max_cache_tokens)
    for item in options.items:
        if not options.compile_only:
            rows.mark("begin", item)
        if item == options.crash_at:
            os._exit(139)
        attempt(bench, item)
        if not options.compile_only:
            rows.mark("end", item)
    print(json.dumps({"done": options.items}), flush=True)


if __name__ == "__main__":
    main()
