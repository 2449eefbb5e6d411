"""What a night reports during and after its run: events, `status`, and figures for Prometheus."""

import datetime
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from manifests import manifest_of
from night_world import run_here

from laserbatch.jobs.commands import status
from laserbatch.jobs.commands.status import workspace_state
from laserbatch.jobs.events import emit, event_log, read_events
from laserbatch.jobs.report.page import write_report
from laserbatch.jobs.settings import MetricsSettings, Settings
from laserbatch.jobs.stages import metrics
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.jobs.stages.metrics import NightMetrics, exposition, night_metrics
from laserbatch.jobs.stages.night import open_night
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.manifest import make_run_id
from laserbatch.pipeline.storage.workspace import Workspace

NOW = datetime.datetime(2025, 3, 2, 2, 0, tzinfo=datetime.UTC)
SAMPLE = re.compile(r'laserbatch_[a-z_]+(\{[a-z]+="([^"\\\n]|\\.)*"(,[a-z]+="([^"\\\n]|\\.)*")*\})? [0-9.e+-]+')


class Night:
    """The parts of a night that its events need."""

    def __init__(self, root: Path) -> None:
        self.workspace, self.date = Workspace.open(root), datetime.date(2025, 3, 1)
        self.run = self.workspace.run(make_run_id(self.date, {}))
        self.manifest = manifest_of(self.run.manifest_path, self.date)

    def stage(self, name: str):
        return stage(self.manifest, name)


@pytest.fixture
def night(tmp_path) -> Night:
    return Night(tmp_path / "workspace")


def test_events_of_all_attempts_stand_in_one_file_whatever_a_kill_has_torn(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    with event_log(path):
        emit("stage_begin", stage="generate")
    with path.open("a") as file:
        file.write('{"event": "to')
    with event_log(path):
        emit("shard_done", rows=3)
        logging.getLogger("laserbatch.storage").warning("a fault in %s", "a file")
        extra = {"event": "worker_lost", "facts": {"shard": "00000"}}
        logging.getLogger("laserbatch.pipeline").warning("lost", extra=extra)
    emit("said", line="after the run")
    events = read_events(path)
    assert [event["event"] for event in events] == ["stage_begin", "shard_done", "warning", "worker_lost"]
    assert events[2]["line"] == "a fault in a file" and events[3]["shard"] == "00000"
    assert all(datetime.datetime.fromisoformat(event["time"]).tzinfo == datetime.UTC for event in events)


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "run").write_text("a file")
    with event_log(tmp_path / "run" / "events.jsonl"):
        emit("stage_begin", stage="generate")


def test_what_a_library_says_of_the_data_is_not_in_the_events(night):
    with pytest.raises(ValueError) as raised, recorded(night.manifest):
        raise ValueError("could not convert 'a secret of somebody'")
    assert "secret" not in night.run.events_path.read_text()
    assert read_events(night.run.events_path)[-1]["kind"] == "ValueError"
    assert vars(raised.value)["recorded_in"] == {"run_id": night.run.run_id, "events": str(night.run.events_path)}


def test_status_tells_of_a_run_under_way_of_one_that_died_and_of_one_that_failed(night):
    assert workspace_state(night.workspace, NOW) | {"workspace": ""} == {
        "workspace": "", "state": "idle", "lock": None, "run": None, "published": None, "within": {}
    }  # fmt: skip
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=10)
    with night.workspace.lock(), recorded(night.manifest):
        emit("stage_begin", stage="generate")
        emit("progress", of="generate", done=0, total=40)
        emit("progress", of="generate", done=10, total=40)
        state = workspace_state(night.workspace, now)
        assert state["lock"]["holder"] == f"pid {os.getpid()} on {socket.gethostname()}"
    assert (state["state"], state["run"]["stage"]) == ("running", "generate")
    going = state["run"]["progress"]
    assert (going["done"], going["total"]) == (10, 40) and going["updated_at"] == state["run"]["last_event"]
    assert going["rate"] == pytest.approx(1.0, rel=0.1) and going["left_s"] == pytest.approx(30, rel=0.1)
    died = workspace_state(night.workspace, now)
    assert (died["state"], died["lock"]) == ("died", None)
    died_at = died["run"]["progress"]
    assert [died_at[name] for name in ("done", "total", "rate", "left_s")] == [10, 40, None, None]
    assert status.summary_rows(died)["done"] == "generate: 10 of 40" and "left" not in status.summary_rows(died)
    with pytest.raises(RunFailed), recorded(night.manifest):
        raise RunFailed("2 of 3 users failed")
    failed = workspace_state(night.workspace, now)
    assert (failed["state"], failed["run"]["failure"]) == ("idle", "2 of 3 users failed")
    run = night.workspace.run(failed["run"]["run_id"])
    run.held_path.touch()
    held = status.summary_rows(workspace_state(night.workspace, now))
    assert held["run"] == f"{run.run_id} (held by its gates)"


def test_a_lock_that_a_dead_process_left_is_nobodys(night):
    (night.workspace.root / "LOCK").write_text(f"pid {2**22 + 1} on {socket.gethostname()}")
    assert workspace_state(night.workspace, NOW)["state"] == "idle"


def test_a_night_that_died_on_another_host_is_not_running(night, monkeypatch):
    """For example in a pod: its host name never comes back."""
    lock = night.workspace.root / "LOCK"
    with recorded(night.manifest):
        emit("stage_begin", stage="generate")
    lock.write_text("pid 1 on another-machine")
    unknown = workspace_state(night.workspace, NOW)
    assert unknown["state"] == "unknown" and unknown["lock"]["is_certain"] is False
    assert unknown["lock"]["holder"] == "pid 1 on another-machine" and unknown["run"]["last_event"]
    assert unknown["run"]["stage"] == "generate"
    assert status.summary_rows(unknown)["state"].startswith("unknown: a process on another host")
    monkeypatch.setattr(status, "probe_lock", lambda path: "unknown")  # a file system without flock
    assert workspace_state(night.workspace, NOW)["state"] == "unknown"


def test_a_lock_that_is_held_is_running_whoever_the_file_names(night):
    """The file may name another host, another container with this host's name, or no process yet."""
    lock = night.workspace.root / "LOCK"
    with night.workspace.lock():
        for content in ("pid 1 on another-machine", f"pid {2**22 + 1} on {socket.gethostname()}", ""):
            lock.write_text(content)
            state = workspace_state(night.workspace, NOW)
            assert state["state"] == "running" and state["lock"]["is_certain"]
    assert workspace_state(night.workspace, NOW)["state"] == "idle"


def test_looking_at_the_lock_refuses_no_night(night):
    """`status` holds the lock for a moment; a night that begins in that moment tries again."""
    descriptor = os.open(night.workspace.root / "LOCK", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    threading.Timer(0.03, os.close, [descriptor]).start()
    with night.workspace.lock():
        pass


def without_workspace(figures: str, workspace: Path) -> str:
    """Metrics without the label that each of them has."""
    samples = [line for line in figures.splitlines() if not line.startswith("#")]
    assert all(line.count(f'{{workspace="{workspace}"') == 1 for line in samples), samples
    return re.sub(r'workspace="[^"]*",?', "", figures).replace("{}", "")


def test_figures_are_written_whatever_came_of_the_night(tmp_path, night):
    night.manifest.save()
    night.run.finish()
    os.utime(night.run.success_path, (0, 0))  # as in a workspace that was copied
    night.workspace.publication.publish(night.run.run_id)
    night.manifest.stages = {'a "stage"\n\\': 2.5}
    settings = Settings(workspace=night.workspace.root, metrics=MetricsSettings(textfile=tmp_path / "laserbatch.prom"))
    with pytest.raises(RunFailed), night_metrics(settings) as figures:
        figures.manifest = night.manifest
        raise RunFailed("too many")
    metrics = (tmp_path / "laserbatch.prom").read_text()
    for line in metrics.splitlines():
        assert line.startswith(("# HELP laserbatch_", "# TYPE laserbatch_")) or SAMPLE.fullmatch(line), line
    metrics = without_workspace(metrics, night.workspace.root)
    assert "laserbatch_last_exit_code 4\n" in metrics and metrics.endswith("\n")
    assert f"laserbatch_last_success_timestamp_seconds {night.run.finished_ns / 1e9:.17g}\n" in metrics
    assert 'laserbatch_stage_seconds{stage="a \\"stage\\"\\n\\\\"} 2.5\n' in metrics


def test_figures_that_cannot_be_told_fail_no_night(tmp_path, night, monkeypatch, caplog):
    def fails(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(metrics, "exposition", fails)
    settings = Settings(workspace=night.workspace.root, metrics=MetricsSettings(textfile=tmp_path / "laserbatch.prom"))
    with night_metrics(settings):
        pass
    with pytest.raises(RunFailed), night_metrics(settings):
        raise RunFailed("too many")
    assert caplog.text.count("the metrics were not written: unexpected ZeroDivisionError") == 2


def read_when(path: Path, text: str) -> str:
    """The content of a file, as soon as it contains a text."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if path.exists() and text in (content := path.read_text()):
            return content
        time.sleep(0.01)
    raise AssertionError(f"{text!r} was not written")


def test_figures_are_refreshed_while_the_night_runs(tmp_path, night, monkeypatch):
    monkeypatch.setattr(metrics, "REFRESH_S", 0.01)
    path = tmp_path / "laserbatch.prom"
    settings = Settings(workspace=night.workspace.root, metrics=MetricsSettings(textfile=path))
    with pytest.raises(RunFailed), night_metrics(settings):
        raise RunFailed("too many")
    with night_metrics(settings) as figures, recorded(night.manifest):
        figures.manifest = night.manifest
        done = {"shards": 1, "rows": 8, "quarantined": 2, "tokens": 90, "accepted": 30, "steps": 60, "seconds": 3.0}
        done |= {"reasons": {"too-long": 2}}
        emit("endpoint", prices={"input": 1.0, "output": 4.0})
        Spending(num_prompt_tokens=1000, num_completion_tokens=500).save(night.run.root)
        emit("planned", of="generate", side="user", entities=40, carried_over=20, reasons={"no-title": 1})
        sides = {"user": {"shards": 2, "rows": 20, "done": done}}
        emit("shards_begin", of="generate", sides=sides, expected_tokens={})
        with stage(night.manifest, "encode"):
            pass
        running = read_when(path, 'stage="encode"}')
        progress_s = datetime.datetime.fromisoformat(read_events(night.run.events_path)[-1]["time"]).timestamp()
    for line in running.splitlines():
        assert line.startswith(("# HELP laserbatch_", "# TYPE laserbatch_")) or SAMPLE.fullmatch(line), line
    running = without_workspace(running, night.workspace.root)
    assert "laserbatch_night_running 1\n" in running
    shown = next(
        line.split()[1] for line in running.splitlines() if line.startswith("laserbatch_last_progress_timestamp")
    )
    assert float(shown) == pytest.approx(progress_s, abs=1)  # or the beginning of the night, in the same millisecond
    assert "# TYPE laserbatch_last_exit_code gauge\nlaserbatch_last_exit_code 4\n" in running  # of the last attempt
    assert 'laserbatch_entities{side="user",outcome="generated"} 6\n' in running
    assert (
        'laserbatch_quarantine_share{side="user"} 0.0' in running and 'tokens_per_second{side="user"} 30\n' in running
    )
    assert 'laserbatch_running_stage{stage="encode"} 1\n' in running
    for figure, value in {"shards_done": 1, "shards_planned": 2, "rows_done": 8, "rows_planned": 20}.items():
        assert f'laserbatch_{figure}{{stage="generate"}} {value}\n' in running
    left = re.search(r'^laserbatch_left_seconds{stage="generate"} (\S+)$', running, re.MULTILINE)
    assert left is not None and float(left[1]) == pytest.approx(12 / (8 / 3), abs=1)  # rows left, at the speed so far
    assert 'laserbatch_quarantined{side="user",reason="too-long"} 2\n' in running
    assert 'laserbatch_quarantined{side="user",reason="no-title"} 1\n' in running
    assert "laserbatch_cost 0.003" in running
    state = workspace_state(night.workspace, NOW)["run"]
    assert (state["stage"], state["cost"]) == ("encode", pytest.approx(0.003))
    ended = without_workspace(path.read_text(), night.workspace.root)
    assert 'laserbatch_running_stage{stage="encode"} 0\n' in ended
    assert 'laserbatch_rows_done{stage="generate"} 8\n' in ended and "laserbatch_cost 0.003" in ended
    assert "laserbatch_night_running 0\n" in ended and "laserbatch_last_exit_code 0\n" in ended


def test_a_night_that_is_refused_says_nothing_of_the_one_that_runs(night):
    root = night.workspace.root
    text = without_workspace(exposition(NightMetrics(exit_code=5), root, 0.0, 1.0), root)
    assert "laserbatch_last_exit_code 5\n" in text and "night_running" not in text


def test_figures_that_cannot_be_refreshed_are_a_warning_once(tmp_path, night, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "REFRESH_S", 0.001)
    (tmp_path / "file").write_text("")
    textfile = tmp_path / "file" / "laserbatch.prom"
    with night_metrics(Settings(workspace=night.workspace.root, metrics=MetricsSettings(textfile=textfile))):
        time.sleep(0.1)
    assert caplog.text.count("the metrics were not refreshed: ") == 1
    assert caplog.text.count("the metrics were not written: ") == 1


def test_figures_are_what_prometheus_reads(night):
    parser = pytest.importorskip("prometheus_client.parser")
    night.manifest.stages = {"encode": 1.0}
    text = exposition(NightMetrics(night.manifest), night.workspace.root, 0.0, 1.0)
    assert "laserbatch_stage_seconds" in {family.name for family in parser.text_string_to_metric_families(text)}


def test_no_secret_of_the_environment_stands_in_what_a_night_leaves(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    write_sample_world(tmp_path / "tables", num_users=2, num_items=8)
    figures = {"textfile": tmp_path / "workspace" / "night.prom"}
    settings = Settings.model_validate(
        {"workspace": tmp_path / "workspace", "tables": {"path": tmp_path / "tables"}, "metrics": figures}
    )
    with pytest.raises(RunFailed), night_metrics(settings) as known:
        night = open_night(settings, datetime.date(2025, 3, 1))
        known.manifest = night.manifest
        with recorded(night.manifest), stage(night.manifest, "generate"):
            raise RunFailed("most texts failed")
    write_report(night.manifest, night.run.report_path)
    written = [path for path in settings.workspace.rglob("*") if path.is_file()]
    assert {"manifest.json", "events.jsonl", "report.html", "night.prom"} <= {path.name for path in written}
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err and not [path for path in written if b"hunter2" in path.read_bytes()]


def test_status_of_a_run_of_which_nothing_is_written_yet(night):
    empty = night.workspace.run(make_run_id(night.date + datetime.timedelta(days=1), {}))
    empty.root.mkdir(parents=True)
    state = workspace_state(night.workspace, NOW)
    assert state["state"] == "idle" and state["run"]["is_finished"] is False


def test_status_of_the_command_line_is_one_object(night, capfd):
    done = run_here(capfd, "status", "--workspace", str(night.workspace.root), "--json")
    assert json.loads(done.stdout)["state"] == "idle"
    done = run_here(capfd, "status", "--workspace", str(night.workspace.root / "none"), "--json")
    assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (3, 3)


def test_status_shows_the_run_that_was_finished_last_though_an_earlier_one_was_rewritten_since(night):
    for finished_ns, run_id in ((9, f"{night.run.run_id}-2"), (8, night.run.run_id)):
        run = night.workspace.run(run_id)
        run.root.mkdir(parents=True)
        run.success_path.write_text(f"{finished_ns}\n")
        manifest_of(run.manifest_path, night.date).save()
        time.sleep(0.01)
    assert workspace_state(night.workspace, NOW)["run"]["run_id"] == f"{night.run.run_id}-2"
