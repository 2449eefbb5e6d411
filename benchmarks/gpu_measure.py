"""The phases of `gpu_first.py` with the large model: processes of `gpu_phases.py`, restarted after a crash."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpu_rows import FATAL_STATUS, items_begun, items_ended
from gpu_run import MIN_PHASE_S, Run, kill_group, tail_of, wait_for

START_S = 75.0  # until a measuring process begins its first item: a fresh machine imports slowly
NUM_COMPILERS = 8
COMPILE_S = 35.0
ITEM_S = {
    "rates": 60, "gemms": 40, "steps": 60, "attention": 60, "gains": 100, "chosen": 60, "peers": 50, "drafts": 150,
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """A way to measure items: options and environment variables of `gpu_phases.py`."""

    name: str
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def careful(self) -> "Mode":
        """The same mode without graphs and with blocking launches, so that an error is raised where it happens."""
        blocking = self.variables | {"CUDA_LAUNCH_BLOCKING": "1"}
        return Mode(f"{self.name}, no graphs, blocking", (*self.words, "--no-graphs"), blocking)

    @property
    def without_graphs(self) -> "Mode":
        return replace(self, name=f"{self.name}, no graphs", words=(*self.words, "--no-graphs"))


LADDER = (
    Mode("as configured"),
    Mode("no fused layer", ("--no-fused",)),
    Mode("torch attention", ("--no-fused", "--attention", "torch")),
)


def phases_words(run: Run, items: Sequence[str], mode: Mode) -> list[str]:
    """The command that measures items."""
    options = run.options
    words = [sys.executable, "benchmarks/gpu_phases.py", *items, "--out", str(options.out)]
    words += ["--model", str(options.model), "--geometry", options.geometry]
    words += ["--attention", run.attention] if run.attention else []
    words += [*mode.words, "--until", f"{max(0.0, run.deadline.left()):.0f}"]
    words += ["--texts", str(options.texts)] if options.texts else []
    words += ["--profile"] if "d" in options.phases else []
    words += ["--smoke"] if options.smoke else []
    return [*words, *(["--crash-at", options.crash_at] if options.crash_at else [])]


def measure(run: Run, items: Sequence[str], start_s: float = START_S) -> None:
    """Measure all items in one process, and start another one after each crash.

    An item that ends with a CUDA error is tried without graphs (once in a run), then in each mode of the ladder. Later
    items use the mode in which it was measured, or the configured mode if no mode worked.
    """
    left, rung, without_graphs, was_careful, num_empty = list(items), 0, False, False, 0
    while left:
        if not run.deadline.limit(MIN_PHASE_S):
            for item in left:
                run.fail("late", item, "no time left")
            return
        mode = LADDER[rung].without_graphs if without_graphs else LADDER[rung]
        crashed, is_fatal, reason = measure_once(run, left, mode, start_s)
        left = [item for item in left if item not in run.begun]
        if crashed is None and left:  # it ended before its first item
            num_empty += 1
            rung = min(rung + 1, len(LADDER) - 1)
            if num_empty > 2:
                for item in left:
                    run.fail("load", item, f"not started: {reason}")
                return
        if crashed is None:
            continue
        run.fail("crash", crashed, reason, mode=mode.name)
        if not is_fatal:
            continue
        if not was_careful:
            was_careful = True
            again, _, _ = measure_once(run, [crashed], mode.careful, start_s)
            if again is None:
                run.say(f"{crashed} is correct without graphs: later steps run without them")
                without_graphs = True
                continue
        if rung < len(LADDER) - 1:
            rung += 1
            left.insert(0, crashed)
        else:
            rung = 0


def measure_once(run: Run, items: Sequence[str], mode: Mode, start_s: float) -> tuple[str | None, bool, str]:
    """Run one measuring process; return the item at which it ended early, whether by a CUDA error, and the reason.

    The item is None if the process finished or ended before its first item; `run.begun` has the items that it began.
    """
    log, rows = run.log_path, run.rows
    start, num_before = run.log_size(), len(rows.read())
    run.say(f"measuring {', '.join(items)} ({mode.name})"[:300])
    process = run.start(phases_words(run, items, mode), log, mode.variables)
    run.begun, current, current_since, num_seen = [], None, time.monotonic(), num_before
    reason = ""
    while process.poll() is None:
        time.sleep(0.1)
        for row in (lines := rows.read())[num_seen:]:
            if "event" not in row:
                output = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
                run.say(f"{json.dumps(output, ensure_ascii=False)}"[:260])
        num_seen = len(lines)
        begun = [item for item in items_begun(lines[num_before:]) if item in items]
        newest = begun[-1] if begun else None
        if newest != current:
            current, current_since = newest, time.monotonic()
        limit_s = start_s if current is None else ITEM_S[current.split("/")[0]] + (START_S if len(begun) == 1 else 0)
        if time.monotonic() - current_since > limit_s:
            reason = f"over its limit of {limit_s:.0f} s"
            break
        if run.deadline.left() <= 0:
            reason = "the deadline"
            break
    kill_group(process)
    new = rows.read()[num_before:]
    run.begun = [item for item in items_begun(new) if item in items]
    unfinished = [item for item in run.begun if item not in items_ended(new)]
    output = tail_of(log, start, 1500)
    is_fatal = process.returncode == FATAL_STATUS or "CUDA error" in output
    reason = reason or f"ended with status {process.returncode}: {' | '.join(output.splitlines()[-3:])}"[-500:]
    return (unfinished[0] if unfinished else None), is_fatal, reason


def compile_attention(run: Run, items: Sequence[str]) -> None:
    """Compile phase e's attention kernels in several processes; the process that times them reads Triton's cache."""
    limit_s = run.deadline.limit(COMPILE_S)
    if not limit_s or run.options.smoke:
        return
    start_s = time.monotonic()
    shares = (Mode("compile", ("--compile-only", f"{number}/{NUM_COMPILERS}")) for number in range(NUM_COMPILERS))
    started = [run.start(phases_words(run, items, mode), run.log_path) for mode in shares]
    for process in started:
        wait_for(process, limit_s - (time.monotonic() - start_s))
    run.say(f"attention kernels compiled in {time.monotonic() - start_s:.0f} s")
