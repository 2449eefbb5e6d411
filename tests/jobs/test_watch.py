"""Figures of a running night, computed from its events about shards, and `status --watch`, which shows them."""

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import manifest_of
from night_world import FIRST_DATE, make_world, run_here, start, write_config, write_here
from rich.console import Console

from laserbatch.jobs.commands import status
from laserbatch.jobs.commands.status import follow, workspace_state
from laserbatch.jobs.events import emit, last_attempt
from laserbatch.jobs.stages import metrics, shards
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.jobs.writing import sides_so_far, writing_state
from laserbatch.pipeline.errors import RunHeld
from laserbatch.pipeline.storage.manifest import make_run_id
from laserbatch.pipeline.storage.workspace import Workspace

DATE = datetime.date(2025, 3, 1)
START = datetime.datetime(2025, 3, 2, 2, 0, tzinfo=datetime.UTC)
NONE_DONE = {"shards": 0, "rows": 0, "quarantined": 0, "tokens": 0, "accepted": 0, "steps": 0, "seconds": 0}
NONE_DONE |= {"reasons": {}}


def begun(done=NONE_DONE, shards=4, rows=40, **expected_tokens: float) -> dict:
    """The event at the begin of `shards` shards of users, with `rows` rows."""
    sides = {"user": {"shards": shards, "rows": rows, "done": done}}
    return {"event": "shards_begin", "of": "generate", "sides": sides, "expected_tokens": expected_tokens}


def shard_done(**facts) -> dict:
    """The event of a shard that one of two workers wrote in 10 s."""
    counts = {"rows": 10, "tokens": 1000, "accepted": 600, "steps": 400, "seconds": 10.0, "workers": 2}
    failed = {"quarantined": 1, "reasons": {"too-long": 1}}
    return {"event": "shard_done", "side": "user"} | failed | counts | facts


def state_of(*events: dict, after_s: float = 0.0) -> dict:
    timed = [event | {"time": START.isoformat()} for event in events]
    state = writing_state(timed, START + datetime.timedelta(seconds=after_s))
    assert state is not None
    return state


def test_nothing_is_known_before_the_first_shards_are_handed_out():
    assert writing_state([{"event": "stage_begin", "stage": "generate"}], START) is None
    assert sides_so_far([]) == {}
    state = state_of(begun())
    assert (state["left_s"], state["left_by"], state["tokens_per_s"], state["acceptance_length"]) == (None,) * 4
    assert (state["num_shards_done"], state["num_shards"]) == (0, 4)


def test_counts_are_of_all_attempts_and_seconds_of_all_workers_at_once():
    earlier = {"shards": 1, "rows": 10, "quarantined": 2, "tokens": 500, "accepted": 0, "steps": 100, "seconds": 5.0}
    earlier |= {"reasons": {"unparsable": 2}}
    plan = {"event": "planned", "of": "generate", "side": "user", "reasons": {"no-title": 3, "too-long": 1}}
    state = state_of(plan, begun(earlier), shard_done())
    assert state["num_shards_done"] == 2 and state["num_rows_done"] == 20 and state["num_quarantined"] == 7
    assert list(state["quarantine_reasons"].items()) == [("no-title", 3), ("too-long", 2), ("unparsable", 2)]
    assert state["tokens_per_s"] == 1500 / 10 and state["acceptance_length"] == 600 / 500


def test_the_time_left_is_guessed_from_expected_tokens_else_from_rows():
    by_tokens = state_of(begun(user=300.0), shard_done())
    assert by_tokens["left_by"] == "tokens" and by_tokens["left_s"] == 30 * 300 / (1000 / 5)
    by_rows = state_of(begun(), shard_done())
    assert by_rows["left_by"] == "rows" and by_rows["left_s"] == 30 / (10 / 5)
    assert state_of(begun(), shard_done(), after_s=4)["left_s"] == by_rows["left_s"] - 4
    assert state_of(begun(), shard_done(), after_s=4000)["left_s"] == 0


def test_the_last_shard_takes_as_long_as_one_worker_needs():
    state = state_of(begun(), *[shard_done()] * 3)
    assert state["left_s"] == 10.0


def test_a_shard_that_is_given_up_is_in_quarantine_and_halves_count_as_shards():
    abandoned = {"event": "shard_abandoned", "side": "user", "rows": 5, "quarantined": 5}
    abandoned |= {"reasons": {"worker-died": 5}}
    state = state_of(begun(), *[shard_done()] * 3, abandoned, shard_done(rows=5))
    assert (state["num_rows_done"], state["num_quarantined"]) == (40, 5 + 4)
    assert (state["num_shards_done"], state["num_shards"], state["left_s"]) == (5, 5, 0)
    assert state["quarantine_reasons"] == {"worker-died": 5, "too-long": 4}


def test_nothing_to_write_takes_no_time():
    state = state_of(begun(shards=0, rows=0))
    assert (state["num_rows"], state["num_shards"], state["left_s"]) == (0, 0, 0)


class Night:
    """The parts of a night that `status` reads."""

    def __init__(self, root: Path) -> None:
        self.workspace = Workspace.open(root)
        self.run = self.workspace.run(make_run_id(DATE, {}))
        self.manifest = manifest_of(self.run.manifest_path, DATE)

    def state(self) -> dict:
        return workspace_state(self.workspace, datetime.datetime.now(datetime.UTC))

    def write_a_shard(self) -> None:
        emit("planned", of="generate", side="user", entities=50, carried_over=10, reasons={})
        for event in (begun(user=300.0), shard_done()):
            facts = {name: value for name, value in event.items() if name != "event"}
            emit(event["event"], **facts)


@pytest.fixture
def night(tmp_path, monkeypatch) -> Night:
    monkeypatch.setattr(status, "REFRESH_S", 0.01)
    return Night(tmp_path / "workspace")


def look_at(*states: dict):
    """A function that returns the given states one after another."""
    left: Iterator[dict] = iter(states)
    return lambda: next(left)


def test_status_has_the_figures_of_the_stage_that_writes(night):
    with night.workspace.lock(), recorded(night.manifest):
        with stage(night.manifest, "generate"):
            night.write_a_shard()
            writing = night.state()["run"]["writing"]
        with stage(night.manifest, "encode"):
            assert night.state()["run"]["writing"] is None
    assert (writing["num_rows_done"], writing["num_rows"], writing["left_by"]) == (10, 40, "tokens")
    figures = sides_so_far(last_attempt(night.run.events_path))["user"]
    assert (figures.num_entities, figures.num_generated, figures.num_quarantined) == (50, 9, 1)
    assert figures.stats.tokens_per_s == 200 and figures.stats.tokens_per_step == 2.5


def test_watch_prints_a_line_a_minute_and_one_at_the_end_and_ends_with_the_nights_exit_code(night, capfd):
    with pytest.raises(RunHeld), night.workspace.lock(), recorded(night.manifest), stage(night.manifest, "generate"):
        night.write_a_shard()
        running = night.state()
        raise RunHeld("too many failed")
    code = follow(look_at(running, running, night.state()), as_json=False)
    first, last = capfd.readouterr().out.splitlines()
    assert code == 4 and "exit code: 4; failure: too many failed; last event: " in last
    for figure in (
        "10 of 40 rows, 1 of 4 shards",
        "200 tokens/s",
        "1.50 accepted tokens per step",
        "quarantined: too-long (1)",
    ):
        assert figure in first
    assert "left: under a minute, estimated from expected tokens" in first


def test_watch_of_a_night_that_died_or_of_none_ends(night, capfd):
    arguments = ("status", "--workspace", str(night.workspace.root), "--watch")
    done = run_here(capfd, *arguments)
    assert (done.returncode, done.stdout.split(" ", 1)[1]) == (0, "state: idle; run: none yet\n")
    with recorded(night.manifest):
        emit("stage_begin", stage="generate")
    done = run_here(capfd, *arguments)
    assert done.returncode == 1 and "state: the last attempt died; " in done.stdout
    night.manifest.save()
    night.run.finish()
    done = run_here(capfd, *arguments, "--json")
    assert (done.returncode, json.loads(done.stdout)["run"]["exit_code"]) == (0, 0)


def test_watch_follows_the_night_of_an_extension(night, capfd):
    lists = Night(night.workspace.root / "recommendations")
    with lists.workspace.lock(), recorded(lists.manifest), stage(lists.manifest, "recommend"):
        running = night.state()
    lists.manifest.save()
    lists.run.finish()
    assert follow(look_at(running, night.state()), as_json=False) == 0
    first, last = capfd.readouterr().out.splitlines()
    run_id = lists.run.run_id
    assert f"state: running; run: {run_id} (not finished); stage: recommend; " in first
    assert f"state: idle; run: {run_id} (finished); " in last


def test_watch_says_when_it_is_not_known_whether_the_night_lives(night, capfd):
    with recorded(night.manifest), stage(night.manifest, "generate"):
        (night.workspace.root / "LOCK").write_text("pid 1 on another-machine")
        unknown = night.state()
    (night.workspace.root / "LOCK").write_text("")
    assert follow(look_at(unknown, night.state()), as_json=False) == 1
    first = capfd.readouterr().out.splitlines()[0]
    assert "state: unknown: a process on another host" in first
    assert first.endswith(f"; stage: generate; last event: {unknown['run']['last_event']}")


def test_watch_redraws_a_terminal(night, monkeypatch, capfd):
    with night.workspace.lock(), recorded(night.manifest):
        running = night.state()
    monkeypatch.setattr(status, "stdout", Console(force_terminal=True, width=80))
    follow(look_at(running, night.state()), as_json=False)
    out = capfd.readouterr().out
    assert "running" in out and "died" in out


def test_ctrl_c_ends_the_watch_alone(capfd):
    def interrupted() -> dict:
        raise KeyboardInterrupt

    assert follow(interrupted, as_json=False) == 130
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_real_night_is_watched_by_another_process(tmp_path, monkeypatch, capfd, caplog):
    """The night waits after its first shard until `status` has shown it and the metrics file has it."""
    write_here(monkeypatch)
    monkeypatch.setattr(metrics, "REFRESH_S", 0.1)
    textfile = tmp_path / "laserbatch.prom"
    make_world(tmp_path, num_users=6, num_items=12)
    config = str(write_config(tmp_path, metrics={"textfile": str(textfile)}, encoding={"num_clusters": 2}))
    run_shards, watching = shards.run_shards, []

    def watched(*arguments, **options):
        for outcome in run_shards(*arguments, **options):
            yield outcome
            if not watching:
                watching.append(start("status", "--config", config, "--watch"))
                watching.append(watching[0].stdout.readline())
                watching.append(textfile.read_text())

    monkeypatch.setattr(shards, "run_shards", watched)
    nobody = "http://bob:hunter2@127.0.0.1:1/s3cret"
    night = run_here(capfd, "nightly", "--config", config, "--date", FIRST_DATE, "--notify-url", nobody)
    assert night.returncode == 0, night.stderr
    assert "the notification was not sent to 127.0.0.1: Connection refused" in caplog.text
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    left += [text.encode() for text in (night.stdout, night.stderr, caplog.text)]
    assert not [content for content in left if b"hunter2" in content or b"s3cret" in content]
    process, first, figures = watching
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "(finished); last event: " in rest.splitlines()[-1]
    assert re.search(
        r"; stage: generate; done: \d+ of \d+ rows, 1 of \d shards; rate: [0-9.,]+ tokens/s, [0-9.]+ accepted", first
    ), first
    assert re.search(r"^laserbatch_night_running{.*} 1$", figures, re.MULTILINE)
    generated = re.findall(r'^laserbatch_entities{.*outcome="generated"} (\d+)$', figures, re.MULTILINE)
    assert len(generated) == 2 and sum(map(int, generated)) > 0
    assert re.search(r"^laserbatch_night_running{.*} 0$", textfile.read_text(), re.MULTILINE)
