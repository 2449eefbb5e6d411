"""Time and memory of a night without its forwards, by stage: reading, planning, carrying over, encoding, pools.

    python benchmarks/orchestration.py --quick --json orchestration.json

There are five nights of a made-up world with a given number of entities. The first writes all texts; on the second
nothing has changed; on the third one entity in a hundred has; on the fourth and fifth one in twenty has. The fourth
replays texts to calibrate its pools, as every second such night does; the fifth keeps that calibration. Each night is a
separate process. The model and the
encoder are stand-ins: texts are put together from a fixed vocabulary, vectors from a fixed table. The stand-in for the
model has its own row ("write", with the tokenizer that loads in parallel); the one for the encoder takes almost no
time. Everything else runs as in a real night. `seconds` is wall time, `cpu_seconds` processor time. `peak MB` includes
mapped files, which the kernel may take back; `own MB` does not. "carry, beside write" runs while texts are written, and
writing takes longer: it is not in the driver's share of the night. The stand-in waits for it, so that both are timed
separately. "pools, in a task" is a second process; the night's own process encodes meanwhile and then waits for it.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache, partial, wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from common import SEED, Figure, benchmark_parser, finish, scale_of, table

LOADING = threading.Lock()
KEPT = threading.Semaphore(0)  # counts the sides whose unchanged texts are carried over
FIRST_DATE = datetime.date(2025, 3, 1)
SHARE_CHANGED = {"all": 1.0, "none": 0.0, "few": 0.01, "some": 0.05, "again": 0.05}
NIGHTS = {night: FIRST_DATE + datetime.timedelta(days) for days, night in enumerate(SHARE_CHANGED)}
USER_SHARE, EVENTS_PER_USER = 0.8, 20
EVENTS_AT_ONCE = 8 * 1024 * 1024
NUM_PHRASES, PHRASE_TOKENS = 2000, 10
DIM, NUM_VECTORS = 384, 4096  # of the stand-in for an encoder; vectors are as wide as MiniLM's
TOKENS_PER_S = 5_000  # assumed speed of a night's generation
REPLAYING_SHARE = 1 / 2  # share of nights that replay when this many entities change: 6 % of the users' texts a night
STAGES_BEHIND = {  # by the name of their function in `run_night`
    "encode_and_build_pools": "encode beside pools", "measure": "gates", "finish_night": "report",
    "publish_night": "publish",
}  # fmt: skip
BESIDE, IN_TASK = "carry, beside write", "pools, in a task"
TASK_FILE = "pools.json"  # file with the row of that task
SAMPLE_S = 0.02  # interval of samples of this process's memory
SAMPLING_S = [0.0]  # processor seconds of these samples
MAX_CPU_SECONDS = 30.0  # for up to a million unchanged entities; in proportion for more
MAX_OWN_MB, MAX_SHARE, MAX_GROWTH = 2048.0, 0.05, 1.1
COLUMNS = {
    "entities": "{entities:,}", "changed": "{changed_share:.0%}", "stage": "{stage}", "s": "{seconds:.2f}",
    "cpu s": "{cpu_seconds:.2f}", "peak MB": "{peak_mb:.0f}", "own MB": "{own_mb:.0f}",
}  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--entities", type=int, nargs="*", help="numbers of entities to measure")
    parser.add_argument("--nights", nargs="+", choices=SHARE_CHANGED, default=list(SHARE_CHANGED), help="in this order")
    parser.add_argument("--text-tokens", type=int, default=150, help=f"tokens of a text, a multiple of {PHRASE_TOKENS}")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, night = arguments.child
        print(json.dumps(watched_night(folder, night, arguments.text_tokens)))
        return
    sizes = arguments.entities or scale_of(arguments, (200_000, 1_000_000), (20_000,), (2_000,))
    rows = [row for size in sizes for row in measured(size, arguments.nights, arguments.text_tokens)]
    finish(arguments.json, figures_of(rows), [table(rows, COLUMNS)], {"rows": rows})


def measured(num_entities: int, nights: Sequence[str], text_tokens: int) -> list[dict]:
    """The rows of nights of a world with `num_entities` entities; each night is a process."""
    with tempfile.TemporaryDirectory(prefix="laserbatch-orchestration-") as folder:
        write_world(Path(folder), num_entities)
        rows = []
        for night in nights:
            of_night = {"entities": num_entities, "changed_share": SHARE_CHANGED[night], "night": night}
            of_night["text_tokens"] = text_tokens
            rows += [of_night | row for row in night_apart(folder, night, text_tokens)]
        return rows


def night_apart(folder: str, night: str, text_tokens: int) -> list[dict]:
    """The rows of one night, run in a new process."""
    command = [sys.executable, __file__, "--child", folder, night, "--text-tokens", str(text_tokens)]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def figures_of(rows: list[dict]) -> list[Figure]:
    """The figures, at the largest size."""
    largest, smallest = max(row["entities"] for row in rows), min(row["entities"] for row in rows)

    def driver(size: int, night: str) -> list[dict]:
        of_night = [row for row in rows if (row["entities"], row["night"]) == (size, night)]
        return [row for row in of_night if row["stage"] not in ("write", BESIDE, IN_TASK)]

    def cpu_seconds(size: int, night: str = "none") -> float:
        return sum(row["cpu_seconds"] for row in driver(size, night))

    figures = []
    if (largest, "none") in (nights := {(row["entities"], row["night"]) for row in rows}):
        name, most = f"processor seconds of a night of {largest:,} unchanged", max(largest / 1e6, 1.0) * MAX_CPU_SECONDS
        figures.append(Figure.under(name, cpu_seconds(largest), most))
    own_mb = max(row["own_mb"] for row in rows if row["entities"] == largest)
    figures.append(Figure.under(f"own memory of a process, MB, in any night of {largest:,}", own_mb, MAX_OWN_MB))
    if {(largest, "all"), (largest, "none"), (largest, "few")} <= nights:
        added_s = (cpu_seconds(largest, "few") - cpu_seconds(largest, "none")) / SHARE_CHANGED["few"]
        name = "processor seconds that an entity adds where 1 % changed, beside those of one in the first night"
        figures.append(Figure.at_most(name, added_s / cpu_seconds(largest, "all"), MAX_GROWTH))
    if {(largest, "some"), (largest, "again")} <= nights:
        some_s, again_s = (sum(row["seconds"] for row in driver(largest, night)) for night in ("some", "again"))
        num_tokens = SHARE_CHANGED["some"] * largest * rows[0]["text_tokens"]
        driver_s, generating_s = again_s + REPLAYING_SHARE * (some_s - again_s), num_tokens / TOKENS_PER_S
        share = driver_s / (driver_s + generating_s)
        figures.append(Figure.under("share of the driver where 5 % changed", share, MAX_SHARE))
    if smallest < largest and {(smallest, "none"), (largest, "none")} <= nights:
        grown = cpu_seconds(largest) / cpu_seconds(smallest)
        name = f"processor seconds an entity, {largest:,} beside {smallest:,}"
        figures.append(Figure.at_most(name, grown * smallest / largest, MAX_GROWTH))
    return figures


def write_world(folder: Path, num_entities: int) -> None:
    """Write tables and a configuration; on each late night, users with an event are its share of all entities."""
    rng = np.random.default_rng(SEED)
    num_users = int(USER_SHARE * num_entities)
    num_items, num_events = num_entities - num_users, num_users * EVENTS_PER_USER
    created = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    noons = {
        night: int(datetime.datetime.combine(date, datetime.time(12), datetime.UTC).timestamp())
        for night, date in NIGHTS.items()
    }
    cities, genres = [np.array([f"{name} {n}" for n in range(40)]) for name in ("City", "Genre")]
    (folder / "tables").mkdir()
    users = {
        "user_id": names_of("u", np.arange(num_users)),
        "city": cities[rng.integers(40, size=num_users)],
        "age": rng.integers(16, 90, num_users),
    }
    paths = genres[rng.integers(40, size=(num_items, 2))]
    items = {
        "item_id": names_of("i", np.arange(num_items)),
        "title": names_of("The book of number ", np.arange(num_items)),
        "category": pa.array(paths.tolist()),
        "year": rng.integers(1950, 2025, num_items),
    }
    num_late = {night: int(share * num_entities) for night, share in SHARE_CHANGED.items() if 0 < share < 1}
    late = np.concatenate([rng.choice(num_users, number, replace=False) for number in num_late.values()])
    of_users = np.concatenate([rng.integers(num_users, size=num_events - len(late)), late])
    seconds = np.sort(rng.integers(int(created.timestamp()), noons["all"], num_events - len(late)))
    late_seconds = [np.full(number, noons[night]) for night, number in num_late.items()]
    numbers = {
        "user_id": of_users,
        "item_id": (num_items * rng.random(num_events) ** 2).astype(np.int32),
        "timestamp": np.concatenate([seconds, *late_seconds]),
        "rating": rng.integers(1, 6, num_events).astype(np.float64),
    }
    for name, columns in {"users": users, "items": items}.items():
        pq.write_table(pa.table(columns), folder / "tables" / f"{name}.parquet")
    kinds = (pa.string(), pa.string(), pa.int64(), pa.float64())
    schema = pa.schema(dict(zip(numbers, kinds, strict=True)))
    with pq.ParquetWriter(folder / "tables" / "interactions.parquet", schema) as writer:
        for start in range(0, num_events, EVENTS_AT_ONCE):
            part = {name: values[start : start + EVENTS_AT_ONCE] for name, values in numbers.items()}
            names = {f"{side}_id": names_of(side[0], part[f"{side}_id"]) for side in ("user", "item")}
            writer.write_table(pa.table(part | names, schema))
    settings = {
        "workspace": str(folder / "workspace"),
        "tables": {"path": str(folder / "tables")},
        "night": {"train_ctr": False, "compare_with_plain": False, "num_audited": 0},
        "decoding": {"max_draft_tokens": 16, "min_acceptance": 0.07, "batch_size": 64},
    }
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")


def names_of(prefix: str, numbers: np.ndarray) -> pa.Array:
    """Strings such as u0000123."""
    return pc.binary_join_element_wise(prefix, pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 7, "0"), "")


def watched_night(folder: str, night: str, text_tokens: int) -> list[dict]:
    """Run one night in this process; return the time and the peak memory of each stage."""
    rows: list[dict] = []
    with stage("start", rows):
        from laserbatch.jobs.settings import load_settings
        from laserbatch.jobs.stages import build_pools, encode, generate, night_plans, run_night, shards
        from laserbatch.jobs.stages import night as opened_night
        from laserbatch.jobs.stages.workers import NightWorkers
        from laserbatch.pipeline.distributed import encoding
        from laserbatch.pipeline.planning import planner
        from laserbatch.retrieval_pools.routing import router

        settings = load_settings(Path(folder, "laserbatch.yaml"))
    whole: list[dict] = []
    with ExitStack() as changed, redirect_stdout(sys.stderr):
        for owner, name, other in (
            (shards, "run_shards", partial(write_shards, text_tokens // PHRASE_TOKENS)),
            (opened_night, "load_tokenizer", loaded_once),
            (NightWorkers, "start", lambda workers, spec, start=NightWorkers.start: start(workers, None)),  # Ray alone
            (NightWorkers, "worker_pool", no_workers),
            (run_night, "load_encoder", lambda settings: StandInEncoder()),
            (encode, "load_encoder", lambda settings: StandInEncoder()),
            (encode, "encoder_identity", lambda settings: "stand-in"),
            (encoding, "MIN_TEXTS", sys.maxsize),  # the stand-in runs here, not on a cluster
            (router, "train_embeddings", train_one_step),
            (build_pools, "_build_in_task", build_with_stand_in(build_pools._build_in_task, Path(folder, TASK_FILE))),
            (run_night, "open_night", watched(run_night.open_night, "read, check, hash", rows)),
            (night_plans.NightPlanner, "_make_plan", watched(night_plans.NightPlanner._make_plan, "plan", rows)),
            (planner.CarryOver, "write", watched(planner.CarryOver.write, "carry", rows, KEPT.release)),
            (generate.GenerationStage, "_write", watched(generate.GenerationStage._write, "write", rows)),
            (generate.GenerationStage, "_gather", watched(generate.GenerationStage._gather, "gather", rows)),
            *((run_night, name, watched(getattr(run_night, name), of, rows)) for name, of in STAGES_BEHIND.items()),
        ):
            changed.enter_context(patch.object(owner, name, other))
        with stage("other", whole):
            run_night.run_night(settings, NIGHTS[night])
    for written in [row for row in rows if row["stage"] == "write"]:
        for row in [row for row in rows if row["stage"] == "carry"]:
            row["stage"] = BESIDE
            for name in ("seconds", "cpu_seconds"):
                written[name] -= row[name]
    for name in ("seconds", "cpu_seconds"):
        whole[0][name] -= sum(row[name] for row in rows if row["stage"] != "start")
    rows += whole
    if (of_task := Path(folder, TASK_FILE)).exists():
        rows += json.loads(of_task.read_text())
        of_task.unlink()
    totals: dict[str, dict] = {}
    for row in rows:  # both sides of a stage are one row
        total = totals.setdefault(
            row["stage"], row | dict.fromkeys(("seconds", "cpu_seconds", "peak_mb", "own_mb"), 0.0)
        )
        for name in ("peak_mb", "own_mb"):
            total[name] = max(total[name], row[name])
        for name in ("seconds", "cpu_seconds"):
            total[name] += max(row[name], 0.0)  # time of parallel stages is subtracted slightly twice
    return list(totals.values())


def watched(function: Callable, label: str, rows: list[dict], done: Callable = lambda: None) -> Callable:
    """The function, changed so that each call adds a row and then calls `done`."""

    @wraps(function)
    def timed(*arguments, **options):
        with stage(label, rows):
            result = function(*arguments, **options)
        done()
        return result

    return timed


@contextmanager
def stage(label: str, rows: list[dict]):
    """Time a block, and measure this process' peak memory in it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    ended, own_mb = threading.Event(), [memory_mb("RssAnon")]

    def sample() -> None:
        seen_s = 0.0
        while not ended.wait(SAMPLE_S):
            own_mb[0] = max(own_mb[0], memory_mb("RssAnon"))
            SAMPLING_S[0] += time.thread_time() - seen_s
            seen_s = time.thread_time()

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    start_s, start_cpu_s = time.perf_counter(), time.process_time() - SAMPLING_S[0]
    yield
    seconds, cpu_seconds = time.perf_counter() - start_s, time.process_time() - SAMPLING_S[0] - start_cpu_s
    ended.set()
    sampler.join()
    row = {"stage": label, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": memory_mb("VmHWM")}
    rows.append(row | {"own_mb": own_mb[0]})


def memory_mb(name: str) -> float:
    """An entry of this process' status in MiB: VmHWM, the peak memory; RssAnon, memory without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024


def train_one_step(interactions: pa.Table, seed: int, scratch: Path | None) -> dict:
    """Embeddings after one training step; torch is loaded when a night would load it."""
    from laserbatch.retrieval_pools.routing import lightgcn

    lightgcn.MAX_STEPS = 1
    return lightgcn.train_lightgcn(interactions, seed, scratch)


def build_with_stand_in(function: Callable, rows_path: Path) -> Callable:
    """A task that builds pools like `function`, with embeddings after one step, and writes its row to a file."""

    def build(*arguments):
        from laserbatch.retrieval_pools.routing import router

        rows: list[dict] = []
        with patch.object(router, "train_embeddings", train_one_step), stage(IN_TASK, rows):
            result = function(*arguments)
        rows_path.write_text(json.dumps(rows))
        return result

    return build


def no_workers(workers, spec) -> SimpleNamespace:
    """Stand in for Ray."""
    from laserbatch.pipeline.distributed.cluster import WorkerLayout

    return SimpleNamespace(spec=spec, layout=WorkerLayout(1, 1, 0, "cpu"))


def write_shards(num_phrases: int, pending, worker_pool, *arguments):
    """Stand in for workers: write texts of phrases that are chosen by a seed from the shard and the run."""
    spec = worker_pool.spec
    for _ in "user", "item":
        KEPT.acquire()
    loaded_once(spec.model_dir)
    from laserbatch.pipeline.knowledge.records import knowledge_schema
    from laserbatch.pipeline.storage.figures import ModelFigures, ShardInfo
    from laserbatch.pipeline.storage.parquet import read_parquet
    from laserbatch.pipeline.storage.run_folder import RunFolder
    from laserbatch.pipeline.storage.stats import DecodingStats

    phrase_ids, phrases = vocabulary()
    num_tokens = PHRASE_TOKENS * num_phrases
    for shard in pending:
        planned = read_parquet(spec.run_dir / shard.path, ["entity_id", "fingerprint", "group"])
        n, seed = planned.num_rows, zlib.crc32(f"{shard.name} {shard.side} {spec.run_id}".encode())
        chosen = np.random.default_rng(seed).integers(NUM_PHRASES, size=n * num_phrases)
        starts = np.arange(0, n * num_phrases + 1, num_phrases, dtype=np.int32)
        texts = pc.binary_join(pa.ListArray.from_arrays(starts, phrases.take(pa.array(chosen))), " ")
        offsets = pa.array(np.arange(0, n * num_tokens + 1, num_tokens, dtype=np.int32))
        known = {
            "entity_id": planned["entity_id"],
            "fingerprint": planned["fingerprint"],
            "pool_group": planned["group"],
            "text": texts,
            "token_ids": pa.ListArray.from_arrays(offsets, pa.array(phrase_ids[chosen].reshape(-1))),
            "token_sources": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(n * num_tokens, np.uint8))),
            "fields_json": pc.binary_join_element_wise('{"text": "', texts, '"}', ""),
            "num_tokens": pa.repeat(pa.scalar(num_tokens, pa.int32()), n),
        }
        constant = {"side": shard.side, "run_id": spec.run_id, "model_id": "stand-in", "finish_reason": "end_of_text"}
        schema = knowledge_schema(planned["entity_id"].type)
        columns = [
            known[field.name] if field.name in known else pa.repeat(plain(field.type, constant.get(field.name)), n)
            for field in schema
        ]
        stats, model = DecodingStats(wall_s=1.0), ModelFigures("stand-in", "float32", "cpu", 1)
        info = ShardInfo(planned_sha256=shard.sha256, group=shard.group, stats=stats, model=model, num_workers=1)
        table = pa.table(columns, schema)
        yield shard, RunFolder(spec.run_dir).shards(shard.side).write(shard.name, table, (), info)


def loaded_once(model_dir: Path, adapter: str | None = None) -> object:
    """Load a tokenizer, after any other load: a night's texts would take longer than that."""
    from laserbatch.pipeline.decoding.model.folder import load_tokenizer

    with LOADING:
        return load_tokenizer(model_dir, adapter)


def plain(kind: pa.DataType, value: object) -> pa.Scalar:
    """A value as a scalar of a type; None becomes the type's empty value."""
    nothing = {pa.string(): "", pa.bool_(): False}.get(kind, 0)
    return pa.scalar(nothing if value is None else value, kind)


@cache
def vocabulary() -> tuple[np.ndarray, pa.Array]:
    """The phrases as token ids, int32 (NUM_PHRASES, PHRASE_TOKENS), and as texts."""
    rng = np.random.default_rng(SEED)
    ids = rng.integers(10, 2000, (NUM_PHRASES, PHRASE_TOKENS)).astype(np.int32)
    return ids, pa.array([" ".join(f"w{token:04}" for token in row) for row in ids.tolist()])


class StandInEncoder:
    """Encodes a text as the sum of two vectors of a fixed table, which the text's checksum selects."""

    dim = DIM

    def encode(self, texts, on_batch=lambda num_texts: None):
        table = 1 + np.random.default_rng(SEED).standard_normal((NUM_VECTORS, DIM)).astype(np.float32)  # all similar
        rows = np.fromiter((zlib.crc32(text.encode()) for text in texts), np.int64, len(texts))
        vectors = table[rows % NUM_VECTORS] + table[rows // NUM_VECTORS % NUM_VECTORS]  # nearly all vectors differ
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        on_batch(len(texts))
        return SimpleNamespace(vectors=vectors, num_truncated=0)  # a real encoder would also load torch


if __name__ == "__main__":
    main()
