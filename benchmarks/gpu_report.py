"""The report on the rows of `gpu_first.py`: the table that it prints last, with predictions, and the figures.

    python benchmarks/gpu_report.py RUN/rows.jsonl [RUN/rows.jsonl ...] --json results/gpu_first.json

The file keeps every row of all runs with its run's number; the table and the figures use the newest rows.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import Figure, write_json
from gpu_rows import Rows

PREDICTED_BILLIONS = 8  # parameters of the model that predictions are for
# Predicted milliseconds of a step for an H100 and such a model, by batch and draft tokens, +-20 %: with transformers'
# layers, then with fused layers and finer buckets.
PREDICTED_MS = {
    (1, 0): 8.4, (32, 0): 9.7, (64, 0): 11.1, (256, 0): 20.2, (1, 16): 8.7, (32, 16): 27.4, (64, 16): 40.5,
    (64, 8): 29.1, (256, 4): 57.0,
}  # fmt: skip
PREDICTED_FUSED_MS = {(1, 0): 6.2, (64, 0): 8.3, (256, 0): 16.1, (64, 8): 19.4, (32, 16): 21.5}
PREDICTED_GAINS = {  # gain of drafts over plain decoding for whole texts, by batch and system
    1: {"greedy K4": 3.9, "greedy K8": 5.8, "relaxed K4": 4.4, "relaxed K8": 7.6},
    32: {"greedy K4": 3.8, "greedy K8": 4.5, "relaxed K4": 4.2, "relaxed K8": 5.8},
    64: {"greedy K4": 3.1, "greedy K8": 2.9, "relaxed K4": 3.5, "relaxed K8": 3.7},
    256: {"greedy K4": 1.4, "greedy K8": 1.3, "relaxed K4": 1.6, "relaxed K8": 1.7},
}
WANTED_ROOFLINE = {1: 0.75, 64: 0.75, 256: 0.70}
MAX_HOST_SHARE = 0.15
WANTED_GAINS = {
    "reki": {1: 5.0, 32: 3.5, 64: 2.5, 256: 1.4},
    "goodreads-items": {1: 3.0, 32: 2.2, 64: 1.7, 256: 1.0},
}
WANTED_GREEDY_SHARE = 0.6  # share of the relaxed gain
WANTED_CHOSEN = 0.98  # share of plain decoding's speed
NUM_KERNELS = 12
FEW_CAPTURES = 4  # graph captures in a pass

Gains = dict[tuple[str, int], dict[str, list[float]]]  # by task and batch, then system: ratio to plain of each round


def gains_of(rows: Sequence[dict], quantity: str = "tokens_per_s") -> Gains:
    """Ratios to plain decoding within each round of each item.

    A pass that captures many graphs is slower than a night's steps: if a system has rounds with few captures, only
    these count.
    """
    rounds: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for row in rows:
        if row.get("phase") == "f" and "system" in row:
            rounds[row["item"], row["task"], row["batch"], row["round"]][row["system"]] = row
    gains: dict[tuple, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for (_, task, batch, _), passes in rounds.items():
        plain = passes.get("plain")
        for system, row in passes.items():
            if system != "plain" and plain and plain[quantity]:
                captures = row.get("captures", 0) + plain.get("captures", 0)
                gains[task, batch][system].append((row[quantity] / plain[quantity], captures))
    return {
        place: {
            system: [ratio for ratio, captures in ratios if captures <= max(FEW_CAPTURES, min(c for _, c in ratios))]
            for system, ratios in systems.items()
        }
        for place, systems in gains.items()
    }


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """The figures that the rows have."""
    for row in rows:
        if row.get("phase") != "c" or row.get("nodes") != 0 or "roofline_share" not in row or "unfused" in row["item"]:
            continue
        where = f"plain, batch {row['batch']}"
        if row["batch"] in WANTED_ROOFLINE:
            wanted = WANTED_ROOFLINE[row["batch"]]
            yield Figure.at_least(f"{where}: share of the roofline", row["roofline_share"], wanted)
        yield Figure.at_most(f"{where}: host's share of a step", row["host_share"], MAX_HOST_SHARE)
    for (task, batch), systems in sorted(gains_of(rows).items()):
        best = {
            verifier: max((statistics.median(v) for name, v in systems.items() if name.startswith(verifier)), default=0)
            for verifier in ("relaxed", "greedy")
        }
        where = f"{task}, batch {batch}"
        if best["relaxed"] and batch in WANTED_GAINS.get(task, {}):
            yield Figure.at_least(f"{where}: relaxed over plain", best["relaxed"], WANTED_GAINS[task][batch])
        if best["relaxed"] > 1 and best["greedy"]:
            share = (best["greedy"] - 1) / (best["relaxed"] - 1)
            yield Figure.at_least(f"{where}: greedy gain over relaxed gain", share, WANTED_GREEDY_SHARE)
        for name, values in systems.items():
            if name.startswith("chosen"):
                yield Figure.at_least(f"{where}: {name} over plain", statistics.median(values), WANTED_CHOSEN)


def report(rows: Sequence[dict]) -> str:
    """All tables and figures; failures come last."""
    parts = [_load(rows), _steps(rows), _profiles(rows), _attention(rows), _gains(rows), _peers(rows), _tests(rows)]
    figures = sorted(figures_of(rows), key=lambda figure: figure.met)
    parts.append("\n".join(map(str, figures)))
    parts.append("\n".join(f"FAILED {row['item']}: {row['failed']}" for row in rows if "failed" in row))
    return "\n\n".join(part for part in parts if part)


def _load(rows: Sequence[dict]) -> str:
    lines = []
    for row in rows:
        if row.get("phase") == "probe":
            lines.append("probe: " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("phase", "item")))
        if row.get("phase") == "load" and "load_s" in row:
            lines.append(f"model loaded in {row['load_s']:.1f} s, fused layer: {row['fused']}")
        if row.get("phase") == "load" and "bytes_per_s" in row:
            lines.append(f"{row['bytes_per_s'] / 1e12:.2f} TB/s, {row['flops_per_s'] / 1e12:.0f} TFLOP/s")
        if row.get("phase") == "drafts" and "seconds" in row:
            lines.append(f"pools and drafts compiled in {row['seconds']:.0f} s")
    gemms = [row for row in rows if "gemms_a_layer" in row]
    lines += [
        f"GEMMs alone, {row['gemms_a_layer']} per layer, {row['rows']:5} rows: layers {row['layers_ms']:.2f} ms, "
        f"head {row['head_ms']:.2f} ms"
        for row in gemms
    ]
    return "\n".join(lines)


def _steps(rows: Sequence[dict]) -> str:
    lines, is_predicted = [], size_of(rows) in (PREDICTED_BILLIONS, None)
    for row in rows:
        if row.get("phase") != "c" or "step_ms" not in row:
            continue
        key, step_ms = (row["batch"], row["nodes"]), row["step_ms"]
        line = f"{row['item']:24}{step_ms['median']:8.2f} ms ({step_ms['min']:.2f} to {step_ms['max']:.2f})"
        if "host_share" in row:
            predicted = f"{PREDICTED_MS.get(key, 0):.1f} / fused {PREDICTED_FUSED_MS.get(key, 0):.1f}"
            line += (
                f"  least {row['least_ms']:.2f}  roofline {row['roofline_share']:.2f}  host {row['host_share']:.0%}"
                f"{f'  predicted {predicted}' if is_predicted else ''}  {row['fused']} {row['attention']}"
                f"  captures {row['captures']} replays {row['replays']}{'' if row['replays'] else ' NO GRAPHS'}"
            )
        lines.append(line)
    return "\n".join(lines)


def _profiles(rows: Sequence[dict]) -> str:
    lines = []
    for row in rows:
        if row.get("phase") == "d" and "kernels" in row:
            lines.append(
                f"{row['item']}: {row['launches']} launches, {row['total_us'] / 1000:.2f} ms of kernels, "
                f"{row['wall_us'] / 1000:.2f} ms with the profiler"
            )
            lines += [f"  {us:9.0f} us {count:5} x {name[:90]}" for name, count, us in row["kernels"][:NUM_KERNELS]]
    return "\n".join(lines)


def _attention(rows: Sequence[dict]) -> str:
    """The default's time and the three fastest settings of each problem."""
    problems: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        if row.get("phase") == "e" and "us" in row and row.get("right"):
            problems[row["context"], row["batch"], row["tree"]].append(row)
    lines = []
    for (context, batch, tree), measured in problems.items():
        default = next((row for row in measured if row["blocks"] is None), None)
        result = default and f"{default['us']['median']:.1f} us, {default['kv_gb_per_s']:.0f} GB/s"
        lines.append(f"attention, context {context}, batch {batch}, tree {tree}: default {result}")
        for row in sorted(measured, key=lambda row: row["us"]["median"])[:3]:
            blocks = row["blocks"] and " ".join(f"{name} {value}" for name, value in row["blocks"].items())
            lines.append(f"  {row['us']['median']:8.1f} us  {row['kv_gb_per_s']:6.0f} GB/s  {blocks or 'default'}")
    wrong = [row for row in rows if row.get("phase") == "e" and ("failed" in row or row.get("right") is False)]
    lines += [f"attention, WRONG or not run: {row}"[:300] for row in wrong[:8]]
    return "\n".join(lines)


def _gains(rows: Sequence[dict]) -> str:
    whole, decode = gains_of(rows), gains_of(rows, "decode_tokens_per_s")
    lines = []
    for row in rows:
        if row.get("phase") != "f" or "system" not in row:
            continue
        where = row["task"], row["batch"]
        over = whole.get(where, {}).get(row["system"], [1.0])
        while_decoding = decode.get(where, {}).get(row["system"], [1.0])
        predicted = PREDICTED_GAINS.get(row["batch"], {}).get(row["system"]) if row["task"] == "reki" else None
        lines.append(
            f"{row['task']:16}{row['batch']:4}  {row['system']:16} round {row['round']}"
            f"{row['tokens_per_s']:9.0f} tokens/s"
            f"  x{statistics.median(over):.2f} ({min(over):.2f} to {max(over):.2f})"
            f"  decoding alone x{statistics.median(while_decoding):.2f}  {row['tokens_per_step']:.2f} tokens per step"
            f"  drafting {row['draft_ms_a_step']:.2f} ms  as plain {row['equal_to_plain']:.0%}"
            f"  captures {row['captures']}{f'  predicted x{predicted}' if predicted else ''}"
            f"{'  budget ' + str(row['budgets'].get(row['system'])) if row['system'].startswith('chosen') else ''}"
        )
    return "\n".join(lines)


def _peers(rows: Sequence[dict]) -> str:
    return "\n".join(
        f"transformers.generate, batch {row['batch']}: {row['tokens_per_s']:.0f} tokens/s, "
        f"{row['step_ms']:.1f} ms per step"
        for row in rows
        if row.get("phase") == "p" and "tokens_per_s" in row
    )


def _tests(rows: Sequence[dict]) -> str:
    lines = []
    for row in rows:
        if row.get("phase") in ("a", "beside") and "outcome" in row:
            counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed_tests", "skipped") if name in row)
            lines.append(f"{row['item']}: {row['outcome'].upper()}  {counts}  {row['seconds']:.0f} s")
            lines += [f"  {line}" for line in row.get("red", [])[:12]]
    return "\n".join(lines)


def size_of(rows: Sequence[dict]) -> int | None:
    """The measured model's parameters in billions; None if no model was loaded."""
    return next((round(row["billion_parameters"]) for row in rows if "billion_parameters" in row), None)


def newest(runs: Sequence[Sequence[dict]]) -> list[dict]:
    """The rows of each phase and item from the last run that measured it."""
    by_item: dict[tuple, list[dict]] = {}
    for rows in runs:
        own: dict[tuple, list[dict]] = defaultdict(list)
        for row in rows:
            if "phase" in row and row.get("failed") not in ("no time left", "the deadline"):
                own[row["phase"], row["item"]].append(row)
        by_item |= own
    return [row for rows in by_item.values() for row in rows]


def main() -> None:
    """Print the report on the newest rows, and write the rows of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="rows.jsonl of each run, the oldest first")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [Rows(path).read() for path in arguments.rows]
    if len({size_of(rows) for rows in runs} - {None}) > 1:
        parser.error("the runs are of models of different sizes; give only runs of one size")
    last = newest(runs)
    print(report(last))
    figures = list(figures_of(last))
    content = {
        "command": f"python benchmarks/gpu_first.py, {len(runs)} runs (docs/gpu.md)",
        "machine": next(row for row in last if row["phase"] == "probe"),
        "met": all(figure.met for figure in figures),
        "figures": figures,
        "rows": [{"run": number, **row} for number, rows in enumerate(runs, 1) for row in rows if "phase" in row],
    }
    write_json(arguments.json, content)


if __name__ == "__main__":
    main()
