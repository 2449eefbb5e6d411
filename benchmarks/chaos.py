"""Kill nights, run the same command again, and compare the output with that of an undisturbed night.

    python benchmarks/chaos.py --kills 40 --json chaos.json

Each night runs on a small sample world with the bundled model, in float32 on the CPU. The first night is written once;
every kill hits the second night, in a copy of that workspace. The kinds of kills:

- `driver` and `sigterm`: SIGKILL or SIGTERM at one of the night's file operations. The reference run lists these
  operations, and the kills are spread over all of its stages. The night's own process writes the texts: this is cheap.
- `driver-ray`, `actor`, `raylet`, `gcs`: SIGKILL for a process of a night whose texts Ray workers write. It comes while
  the workers start, after they began, after the first shard, or while tasks encode or build pools (here tasks do this
  for any number of texts). The same command then starts a Ray of its own.
- `task`: SIGKILL for one of these tasks. The night itself must end well.
- `node`: SIGKILL for the raylet of one of the two nodes of a simulated cluster that the night has joined. The night
  itself must end well, and must have lost at most one worker: that of the node.

`survived`: neither command hung, and the last one ended well. If a night is over before its kill comes, it is tried
once more; a second time counts as not survived. `identical`: the run's Parquet files and the files of its pools, other
than their timings, are those of the reference. `lost` and `doubled` are numbers of ids.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import yaml
from chaos_nights import (
    FIRST_DATE,
    SECOND_DATE,
    Cluster,
    forked_night,
    is_mapped,
    marked,
    named,
    ray_night,
    simulated_cluster,
    wait_for,
)
from common import SEED, Figure, benchmark_parser, finish, scale_of, table

from laserbatch.jobs.events import read_events
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.atomic import leftovers
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.retrieval_pools.index.store import PoolStore

SETTINGS = {
    "workspace": "workspace",
    "tables": {"path": "tables"},
    "decoding": {"batch_size": 4, "max_draft_tokens": 16, "min_acceptance": 0.07},
    "night": {"shard_size": 2, "compare_with_plain": False, "train_ctr": False},
    "gates": {"max_failed_share": 0.5},
    "encoding": {"num_clusters": 4},
    "refresh": {"min_interactions": 2, "max_tokens": 6000},
    "cluster": {"num_workers": 2},
}
NUM_USERS, NUM_ITEMS = 10, 14
MAX_LINGER_S = 60.0  # how long processes of a killed night may live after the next command ended
FILE_KINDS = ("driver", "sigterm")
RAY_KINDS = ("driver-ray", "actor", "raylet", "gcs", "node", "task")
TASKS = {"encoding": "ray::_encode_part", "pools": "ray::_build_in_task"}
# The kill comes at most this many seconds after the moment.
RAY_MOMENTS = {"start": 1.5, "first step": 0.5, "first shard": 0.3, "encoding": 0.5, "pools": 0.5}
NOT_AT = {"actor": ("start", *TASKS), "node": ("start",), "task": ("start", "first step", "first shard")}
NONE_OF = ("lost", "doubled", "hung", "left")  # ids, ids, nights, and processes or files that a dead night left


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kills", type=int, help="number of nights to kill")
    parser.add_argument("--minutes", type=float, help="kill no further night after this time")
    arguments = parser.parse_args()
    num_kills = arguments.kills or scale_of(arguments, 40, 6, 2)
    with tempfile.TemporaryDirectory(prefix="laserbatch-chaos-") as folder:
        chaos = Chaos(Path(folder))
        chaos.prepare()
        kills = drawn(chaos.operations, num_kills, random.Random(SEED))
        outcomes, end_s = [], time.monotonic() + 60 * (arguments.minutes or float("inf"))
        for number, kill in enumerate(kills, 1):
            if time.monotonic() > end_s:
                break
            outcomes.append(chaos.outcome_of(kill))
            print(f"{number}/{len(kills)} {kill} {outcomes[-1]}", file=sys.stderr, flush=True)
    write_results(arguments.json, outcomes, len(kills))


def write_results(json_path: Path | None, outcomes: list["Outcome"], num_wanted: int) -> None:
    """Print and write the results of the kills."""
    rows = rows_of(outcomes)
    totals = {name: sum(row[name] for row in rows) for name in ("survived", "identical", *NONE_OF)}
    figures = [
        Figure.at_least(f"nights of {len(outcomes)} killed ones that {meaning}", totals[name], len(outcomes))
        for name, meaning in (("survived", "ended well"), ("identical", "are as an undisturbed one"))
    ]
    figures += [Figure.at_most(name, totals[name], 0) for name in NONE_OF]
    content = {"kills": len(outcomes), **totals, "rows": rows, "left_out": num_wanted - len(outcomes)}
    troubles = [outcome.trouble for outcome in outcomes if outcome.trouble]
    shown = ("kind", "stage", "kills", "survived", "identical", "lost", "doubled")
    columns = {name: f"{{{name}}}" for name in shown}
    finish(json_path, figures, [table(rows, columns)], content | {"troubles": troubles})


@dataclass(frozen=True)
class Kill:
    """One kill: its kind, its stage or moment under Ray, and the driver's operation or the delay after the moment."""

    kind: str
    stage: str
    operation: int = 0
    delay_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} in {self.stage}" + (f" at operation {self.operation}" if self.operation else "")


@dataclass(frozen=True)
class Outcome:
    """The result of a kill."""

    kill: Kill
    exit_codes: list[int | None]  # of the killed night and of the repeated command; None: it hung
    is_identical: bool = False
    num_lost: int = 0
    num_doubled: int = 0
    num_left: int = 0  # processes, shared memory and temporary files
    trouble: str = ""

    def __str__(self) -> str:
        same = "identical" if self.is_identical else "NOT identical"
        return f"-> {self.exit_codes}, {same}, {self.num_left} left {self.trouble}"


def drawn(operations: list[str], num_kills: int, order: random.Random) -> list[Kill]:
    """Draw kills, spread over kinds and stages; `operations` names the stage of each file operation of the night."""
    by_stage = defaultdict(list)
    for number, stage in enumerate(operations, 1):
        by_stage[stage].append(number)
    num_ray = min(num_kills, max(num_kills // 2, len(RAY_KINDS)))
    kills = []
    for number in range(num_ray):
        kind = RAY_KINDS[number % len(RAY_KINDS)]
        moments = [moment for moment in RAY_MOMENTS if moment not in NOT_AT.get(kind, ())]
        moment = moments[(number // len(RAY_KINDS)) % len(moments)]
        kills.append(Kill(kind, moment, delay_s=order.uniform(0, RAY_MOMENTS[moment])))
    stages = [stage for stage in by_stage for _ in range(2 if stage == "generate" else 1)]
    for number in range(num_kills - num_ray):
        stage = stages[number % len(stages)]
        kills.append(Kill(FILE_KINDS[number % len(FILE_KINDS)], stage, order.choice(by_stage[stage])))
    return kills


class Missed(Exception):
    """A night was over before its kill came."""


class Chaos:
    """Kills nights in copies of a prepared workspace and compares them with an undisturbed second night."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operations: list[str] = []
        self._reference: dict[str, str] = {}
        self._expected: dict[str, Counter] = {}

    def prepare(self) -> None:
        """Write the world, the first night, and the reference of the second one."""
        from laserbatch.pipeline.sample.world import write_sample_world

        world = self.folder / "night"  # the same for all nights, because a run's id depends on the path of its tables
        write_sample_world(world / "tables", num_users=NUM_USERS, num_items=NUM_ITEMS)
        (world / "laserbatch.yaml").write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        require(forked_night(world, FIRST_DATE), world)
        shutil.copytree(world, self.folder / "world")
        require(forked_night(world, SECOND_DATE, log=self.folder / "operations"), world)
        self.operations = (self.folder / "operations").read_text(encoding="utf-8").splitlines()
        self._reference, self._expected = contents(world), ids_of(world)
        shutil.rmtree(world)
        print(f"{len(self.operations)} operations: {dict(Counter(self.operations))}", file=sys.stderr)

    def outcome_of(self, kill: Kill) -> Outcome:
        """Kill a night, run its command again, and compare."""
        try:
            return self._outcome_of(kill)
        except Missed:
            return self._outcome_of(replace(kill, delay_s=0.0))

    def _outcome_of(self, kill: Kill) -> Outcome:
        place, mark = Path(shutil.copytree(self.folder / "world", self.folder / "night")), uuid.uuid4().hex
        shared = set(os.listdir("/dev/shm"))
        try:
            exit_codes, num_left = self._killed(kill, place, mark)
            left = {name for name in set(os.listdir("/dev/shm")) - shared if not is_mapped(f"/dev/shm/{name}")}
            outcome = Outcome(kill, exit_codes, num_left=num_left + len(left))
            return self._judged(outcome, place)
        except Missed:
            if kill.delay_s == 0:
                return Outcome(kill, [None], trouble=f"{kill}: the night was over before")
            raise
        finally:
            for pid in marked(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(place)

    def _killed(self, kill: Kill, place: Path, mark: str) -> tuple[list[int | None], int]:
        if kill.operation:
            number = signal.SIGTERM if kill.kind == "sigterm" else signal.SIGKILL
            return [forked_night(place, SECOND_DATE, (kill.operation, number)), forked_night(place, SECOND_DATE)], 0
        with simulated_cluster(mark) if kill.kind == "node" else nullcontext(Cluster()) as cluster:
            first = ray_night(place, mark, cluster.address, lambda night: self._kill(kill, night, place, mark, cluster))
            if kill.kind == "node":  # the night's remaining processes end with the cluster
                return [first], 0
            if kill.kind == "task" and first != 0:
                return [first], len(marked(mark))
        again = ray_night(place, mark)  # at once: processes that still live must not hinder it
        deadline_s = time.monotonic() + MAX_LINGER_S
        while marked(mark) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        num_left = len(marked(mark))
        if num_left:
            print(f"left: {marked(mark)}", file=sys.stderr)
        return [first, again], num_left

    def _kill(self, kill: Kill, night: subprocess.Popen, place: Path, mark: str, cluster: "Cluster") -> None:
        """Wait for the moment, then kill. Raises Missed if the night was over before."""
        names = {"actor": "ray::_Worker", "raylet": "raylet", "gcs": "gcs_server"}
        run_folder = place / "workspace" / "runs"
        workers_mark = f"{mark}-cluster" if kill.kind == "node" else mark
        moments: dict[str, Callable[[], object]] = {
            "start": lambda: any("gcs_server" in line for line in marked(mark).values()),
            "first step": lambda: any("ray::_Worker.run" in line for line in marked(workers_mark).values()),
            "first shard": lambda: any(run_folder.glob(f"{SECOND_DATE}*/shards/*/0*.json")),
            **{task: lambda name=name: named(workers_mark, name) for task, name in TASKS.items()},
        }
        wait_for(moments[kill.stage], night)
        time.sleep(kill.delay_s)
        if kill.kind == "node":
            victims = cluster.raylets[1:]
        elif kill.kind == "driver-ray":
            victims = [night.pid]
        else:
            name = TASKS[kill.stage] if kill.kind == "task" else names[kill.kind]
            wait_for(lambda: named(mark, name), night)
            victims = named(mark, name)[:1]
        if night.poll() is not None or not victims:
            raise Missed
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _judged(self, outcome: Outcome, place: Path) -> Outcome:
        if outcome.exit_codes[-1] != 0:
            return replace(outcome, trouble=f"{outcome.kill}: {outcome.exit_codes}")
        remaining = contents(place)
        differing = sorted(
            name for name in self._reference.keys() | remaining if self._reference.get(name) != remaining.get(name)
        )
        num_lost = num_doubled = 0
        there = ids_of(place)
        for side in SIDES:
            num_lost += len(self._expected[side] - there[side])
            num_doubled += sum(count - 1 for count in there[side].values() if count > 1)
        stray = [path.name for path in (*leftovers(place), *place.glob("workspace/runs/*/.workers"))]
        differences = [f"differ: {', '.join(differing[:4])}"] if differing else []
        if outcome.kill.kind == "node" and event_names(place).count("worker_lost") > 1:
            differences.append("a node of one worker cost more than that")
        is_identical = not differences
        differences += [f"left: {', '.join(stray[:4])}"] if stray else []
        trouble = f"{outcome.kill}: {'; '.join(differences)}" if differences else ""
        return replace(
            outcome,
            is_identical=is_identical,
            num_lost=num_lost,
            num_doubled=num_doubled,
            num_left=outcome.num_left + len(stray),
            trouble=trouble,
        )


def event_names(place: Path) -> list[str]:
    """The names of all events in the runs of the second date."""
    paths = place.glob(f"workspace/runs/{SECOND_DATE}*/events.jsonl")
    return [event["event"] for path in paths for event in read_events(path)]


def rows_of(outcomes: list[Outcome]) -> list[dict]:
    """One row for each kind and stage."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kill.kind, outcome.kill.stage].append(outcome)
    return [
        {
            "kind": kind,
            "stage": stage,
            "kills": len(group),
            "survived": sum(outcome.exit_codes[-1] == 0 and None not in outcome.exit_codes for outcome in group),
            "identical": sum(outcome.is_identical for outcome in group),
            "lost": sum(outcome.num_lost for outcome in group),
            "doubled": sum(outcome.num_doubled for outcome in group),
            "hung": sum(None in outcome.exit_codes for outcome in group),
            "left": sum(outcome.num_left for outcome in group),
        }
        for (kind, stage), group in groups.items()
    ]


def contents(place: Path) -> dict[str, str]:
    """Hashes, by name, of the content of the published run's Parquet files and of the files of its pools."""
    workspace = Workspace.open(place / "workspace", create=False)
    run = workspace.publication.run()
    digests = {"published": run.run_id}
    for path in sorted(run.root.rglob("*.parquet")):
        if path.relative_to(run.root).parts[0] not in ("plan", "shards"):
            table = pq.read_table(path)
            content = repr((table.schema, table.to_pylist())).encode()
            digests[str(path.relative_to(run.root))] = hashlib.sha256(content).hexdigest()
    pools = PoolStore(workspace.pools_folder)
    current = pools.folder(pools.current_version() or sys.exit(f"{place} has no pools"))
    for path in sorted(current.rglob("*")):
        if path.is_file() and path.suffix != ".json":
            digests[f"pools/{path.relative_to(current)}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def ids_of(place: Path) -> dict[str, Counter]:
    """The number of times each entity is in the published texts, by side."""
    run = Workspace.open(place / "workspace", create=False).publication.run()
    counts = {}
    for side in SIDES:
        fresh = [i for batch in run.iter_knowledge(side, ["entity_id"]) for i in batch["entity_id"].to_pylist()]
        counts[side] = Counter(fresh)
    return counts


def require(exit_code: int | None, place: Path) -> None:
    """Exit if an undisturbed night did not end well."""
    if exit_code != 0:
        sys.exit(f"an undisturbed night ended with {exit_code}: {(place / 'said.txt').read_text(encoding='utf-8')}")


if __name__ == "__main__":
    main()
