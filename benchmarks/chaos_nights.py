"""Nights for `chaos.py`: a night killed at one of its file operations, a night under Ray, and a simulated cluster."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "jobs"))
from in_process import write_here

CLI = (sys.executable, "-c", "from laserbatch.jobs.cli import main; main()")  # the command `laserbatch`
FIRST_DATE, SECOND_DATE = "2025-02-28", "2025-03-01"
TIMEOUT_S = 240.0  # a night that takes longer counts as hung, whether it was killed or not
MARK = "LASERBATCH_CHAOS"  # environment variable of every process of a night
OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}  # Python's audit events
WRITTEN = re.compile(r"/(knowledge|shards)/\w+/\.?0")  # files of written shards, not of the plan


def forked_night(
    place: Path,
    date: str,
    death: tuple[int, int] | None = None,
    log: Path | None = None,
    options: Sequence[str] = (),
    most_s: float = TIMEOUT_S,
) -> int | None:
    """Run a night in a forked process that writes its texts itself; return its exit code, or None if it hung.

    `death` : the number of the operation on files under `place` at which a signal comes, and the signal. `log` : the
    file to which the stage of each operation is written.
    """
    # Imported before the fork, so that nights need not load them. They must not start threads: a fork loses threads.
    from laserbatch.jobs import cli
    from laserbatch.pipeline.decoding.model import load  # noqa: F401
    from laserbatch.pipeline.distributed import worker  # noqa: F401
    from laserbatch.pipeline.encoding import encoder, features  # noqa: F401

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(place)
            with open(os.devnull, "w") as nothing, open(place / "said.txt", "a") as output:
                os.dup2(nothing.fileno(), 1)
                os.dup2(output.fileno(), 2)
            write_here()
            watch = Watch(place / "workspace", death)
            sys.argv = ["laserbatch", "nightly", "--config", "laserbatch.yaml", "--date", date, *options]
            try:
                cli.main()
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            if log is not None:
                log.write_text("\n".join(watch.stages), encoding="utf-8")
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + most_s
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


class Watch(logging.Handler):
    """Records the night's stage at each file operation under a folder; may kill this process at one of them."""

    def __init__(self, folder: Path, death: tuple[int, int] | None) -> None:
        super().__init__(logging.INFO)
        self.stages: list[str] = []
        self._stage, self._folder, self._death = "start", str(folder.resolve()), death
        logging.getLogger("laserbatch.events").addHandler(self)
        sys.addaudithook(self._audited)

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, "facts", {})
        if record.getMessage() == "stage_begin":
            self._stage = "plan" if facts["stage"] == "generate" else facts["stage"]
        elif record.getMessage() == "stage_end" and facts["stage"] == "gates":
            self._stage = "close"
        elif record.getMessage() == "finished":
            self._stage = "publish"

    def _audited(self, event: str, arguments: tuple) -> None:
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (is_write or event in OPERATIONS) or not isinstance(arguments[0], str | Path):
            return
        path = os.path.abspath(arguments[0])
        if not path.startswith(self._folder):
            return
        if self._stage == "plan" and WRITTEN.search(path):
            self._stage = "generate"
        self.stages.append(self._stage)
        if self._death is not None and len(self.stages) == self._death[0]:
            os.kill(os.getpid(), self._death[1])


def night_command(date: str) -> list[str]:
    """The command of a night; run it in the folder of its configuration."""
    return [*CLI, "nightly", "--config", "laserbatch.yaml", "--date", date]


# Encoding and building pools run in Ray tasks, although there are few texts.
IN_TASKS = "from laserbatch.jobs.stages import build_pools; from laserbatch.pipeline.distributed import encoding; "
IN_TASKS += "build_pools.MIN_TEXTS_OF_TASK = encoding.MIN_TEXTS = 1; "


def ray_night(
    place: Path,
    mark: str,
    address: str | None = None,
    meanwhile: Callable[[subprocess.Popen], None] = lambda night: None,
) -> int | None:
    """Run a night whose texts Ray workers write; return its exit code, or None if it hung."""
    python, option, code, *arguments = night_command(SECOND_DATE)
    command = [python, option, IN_TASKS + code, *arguments, *(["--ray-address", address] if address else [])]
    with open(place / "said.txt", "a") as log:
        environment = os.environ | {MARK: mark}
        night = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True)
    meanwhile(night)
    try:
        return night.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(night.pid, signal.SIGKILL)
        night.wait()
        return None


@dataclass(frozen=True)
class Cluster:
    """A simulated cluster; without an address there is none."""

    address: str | None = None
    raylets: list[int] = field(default_factory=list)


@contextmanager
def simulated_cluster(mark: str):
    """Start a process that simulates two nodes with one CPU each."""
    command = [sys.executable, __file__]
    environment = os.environ | {MARK: f"{mark}-cluster"}
    holder = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        cluster = json.loads(holder.stdout.readline())
        yield Cluster(cluster["address"], cluster["raylets"])
    finally:
        holder.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            holder.wait(timeout=60)
        for pid in marked(f"{mark}-cluster"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.wait()


def hold_cluster() -> None:
    from ray.cluster_utils import Cluster as Simulated

    cluster = Simulated(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    mark = os.environ[MARK]
    first = named(mark, "raylet")
    cluster.add_node(num_cpus=1)
    raylets = first + [pid for pid in named(mark, "raylet") if pid not in first]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


def wait_for(happened: Callable[[], object], night: subprocess.Popen) -> None:
    """Wait until `happened` returns true, the night has ended, or the timeout is over."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not happened() and night.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)


def marked(mark: str) -> dict[int, str]:
    """The command line of each process of a night, by process id."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (path / "environ").read_bytes() + b"\0":
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line:  # an empty command line: a zombie
                    commands[int(path.name)] = line
    return commands


def is_mapped(path: str) -> bool:
    """Whether any living process has mapped the file."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if path in maps.read_text(errors="replace"):
                return True
    return False


def named(mark: str, name: str) -> list[int]:
    """The ids of a night's processes whose program name starts with `name`, ascending."""
    return sorted(pid for pid, line in marked(mark).items() if Path(line.split()[0]).name.startswith(name))


if __name__ == "__main__":
    hold_cluster()
