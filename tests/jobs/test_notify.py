"""`--notify-url`: the request that a server gets when a night ends, and that its URL is shown nowhere."""

import base64
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from night_world import run_here, start, write_config

from laserbatch.jobs import notify
from laserbatch.jobs.notify import notified
from laserbatch.pipeline.errors import ConfigError, RunHeld

WAITS = """
import sys, time
from laserbatch.jobs.failures import end_at_sigterm
from laserbatch.jobs.notify import notified
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.distributed.settings import ClusterSettings
end_at_sigterm()
with notified(sys.argv[1]), NightWorkers(ClusterSettings()) as workers:
    if "ray ran" in sys.argv:
        workers.cluster()
        workers.end_own_cluster()
    if "ray starts" in sys.argv:
        workers.start(None)
        while not workers._started.done():
            time.sleep(0.1)
    print("begun", flush=True)
    time.sleep(60)
"""


class Server(ThreadingHTTPServer):
    """Stores the requests, and answers with `status` after `waits_s`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[tuple[str, dict, dict]] = []
        self.status, self.location, self.waits_s = 200, "", 0.0

    def url(self, account: str = "", path: str = "/hook") -> str:
        return f"http://{account}127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, dict(self.headers), payload))
        time.sleep(self.server.waits_s)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def test_the_summary_of_a_night_that_ends_well_is_sent(server):
    with notified(server.url(path="/hook?id=1"), command="nightly") as result:
        result["users"] = {"num_entities": 3}
    ((path, headers, payload),) = server.posts
    assert payload == {"command": "nightly", "exit_code": 0, "users": {"num_entities": 3}}
    assert path == "/hook?id=1" and headers["Content-Type"] == "application/json" and "Authorization" not in headers


def test_of_a_night_that_fails_the_failure_is_sent_without_values_of_the_data(server):
    with pytest.raises(RunHeld), notified(server.url()):
        error = RunHeld("too many failed")
        vars(error)["recorded_in"] = {"run_id": "2025-03-01-1a2b3c4d"}
        raise error
    with pytest.raises(ValueError), notified(server.url()):
        raise ValueError("could not convert 'a secret of somebody'")
    held, failed = (payload for _, _, payload in server.posts)
    assert held == {
        "error": "too many failed", "kind": "RunHeld", "exit_code": 4, "run_id": "2025-03-01-1a2b3c4d"
    }  # fmt: skip
    assert (failed["kind"], failed["exit_code"]) == ("ValueError", 1) and "secret" not in str(failed)


@pytest.mark.ray
@pytest.mark.parametrize("before", ["ray ran", "ray starts"])
def test_a_night_that_sigterm_ends_sends_that(server, before):
    night = start(server.url(), before, laserbatch=(sys.executable, "-c", WAITS))
    assert night.stdout is not None and night.stdout.readline() == "begun\n"
    os.kill(night.pid, signal.SIGTERM)
    night.communicate(timeout=30)
    ((_, _, payload),) = server.posts
    assert payload["exit_code"] == 143 and payload["error"].startswith("ended by SIGTERM")


def test_commands_send_what_ends_them(server, tmp_path, capfd, monkeypatch):
    """Errors before a run begins are sent, too. A dry run sends nothing."""
    config = str(write_config(tmp_path))
    for command in (("nightly", "--date"), ("backfill", "--to", "2025-03-01", "--from")):
        done = run_here(capfd, *command, "2025-03-01", "--config", config, "--notify-url", server.url())
        payload = server.posts.pop()[2]
        assert done.returncode == payload["exit_code"] == 3 and payload["command"] == command[0]
        assert payload["error"] in done.stderr
    dry = ("nightly", "--dry-run", "--date", "2025-03-01", "--config", config, "--notify-url", server.url())
    assert run_here(capfd, *dry).returncode == 3 and not server.posts
    monkeypatch.setenv("LASERBATCH_NOTIFY_URL", server.url())
    assert run_here(capfd, "nightly", "--date", "tomorrow", "--config", config).returncode == 3
    assert server.posts[0][2]["date"] == "tomorrow"


def test_user_and_password_of_the_url_become_a_header(server):
    with notified(server.url("bob:p%40ss@")):
        pass
    ((path, headers, _),) = server.posts
    assert path == "/hook" and headers["Host"] == f"127.0.0.1:{server.server_port}"
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"bob:p@ss"


def test_a_notification_that_fails_is_a_warning_without_the_url(server, monkeypatch, caplog, capfd):
    monkeypatch.setattr(notify, "TIMEOUT_S", 1.0)
    url = server.url("bob:hunter2@", "/s3cret?key=hunter2")
    server.status = 500
    with notified(url):
        pass
    server.status, server.location = 302, server.url(path="/elsewhere")
    with notified(url):
        pass
    server.waits_s = 1.5
    with notified(url):
        pass
    with notified("http://bob:hunter2@127.0.0.1:1/s3cret"):  # no server listens there
        pass
    with notified("http://bob:hunter2@127.0.0.1:1/s3cret path\n"):
        pass
    words = [
        record.getMessage().removeprefix("the notification was not sent to 127.0.0.1: ") for record in caplog.records
    ]
    assert words[:4] == ["HTTP status 500", "HTTP status 302", "no answer in time", "Connection refused"]
    assert len(words) == 5 and [path for path, _, _ in server.posts] == ["/s3cret?key=hunter2"] * 3
    printed = capfd.readouterr()
    assert not [secret for secret in ("hunter2", "s3cret") if secret in caplog.text + printed.out + printed.err]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("url", ["ftp://hunter2@host/", "hunter2", "http://", "http://bob:hunter2", "http://[hunter2"])
def test_what_is_no_url_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError, match="expected http") as raised, notified(url):
        raise AssertionError("the night began")
    assert "hunter2" not in str(raised.value)
