"""Spans of a night, as an OpenTelemetry collector receives them."""

import datetime
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from manifests import manifest_of
from night_world import FIRST_DATE, make_world, run_here, write_config, write_here

from laserbatch.jobs.events import emit
from laserbatch.jobs.stages import tracing
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.pipeline.errors import RunFailed
from laserbatch.pipeline.storage.manifest import RunManifest, make_run_id
from laserbatch.pipeline.storage.workspace import Workspace

collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
DATE = datetime.date(2025, 3, 1)


class Collector(ThreadingHTTPServer):
    """Stores the bodies of requests, and answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[tuple[str, bytes]] = []
        self.status = 200

    def spans(self) -> list:
        """The spans of all requests, by their start."""
        requests = [collector.ExportTraceServiceRequest.FromString(body) for _, body in self.posts]
        scopes = [
            scope for request in requests for resource in request.resource_spans for scope in resource.scope_spans
        ]
        return sorted((span for scope in scopes for span in scope.spans), key=lambda span: span.start_time_unix_nano)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.posts.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv(tracing.COLLECTOR, f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


@pytest.fixture
def manifest(tmp_path) -> RunManifest:
    return manifest_of(Workspace.open(tmp_path / "workspace").run(make_run_id(DATE, {})).manifest_path, DATE)


def facts_of(span) -> dict:
    values = {attribute.key.removeprefix("laserbatch."): attribute.value for attribute in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


def write_a_shard(shard: str, side: str = "user") -> None:
    counts = {"rows": 8, "quarantined": 1, "tokens": 90, "accepted": 30, "steps": 60, "seconds": 0.0, "workers": 1}
    emit("shard_done", side=side, shard=shard, done=8, total=16, **counts)


@pytest.mark.slow
def test_a_night_sends_spans_of_its_stages_and_shards(tmp_path, monkeypatch, capfd, server):
    write_here(monkeypatch)
    make_world(tmp_path, num_users=4, num_items=12)
    config = str(write_config(tmp_path, encoding={"num_clusters": 2}))
    night = run_here(capfd, "nightly", "--config", config, "--date", FIRST_DATE)
    assert night.returncode == 0, night.stderr
    manifest = Workspace.open(tmp_path / "workspace").runs()[0].load_manifest()
    assert {path for path, _ in server.posts} == {"/v1/traces"}
    spans = server.spans()
    assert {facts_of(span)["run_id"] for span in spans} == {manifest.run_id}
    (attempt,) = (span for span in spans if not span.parent_span_id)
    stages = [span for span in spans if span.parent_span_id == attempt.span_id]
    assert attempt.name == "attempt" and {span.name for span in stages} == set(manifest.stages)
    seconds = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in stages) / 1e9
    assert seconds == pytest.approx(sum(manifest.stages.values()), abs=0.1)
    assert all(stage.end_time_unix_nano <= other.start_time_unix_nano for stage, other in pairwise(stages))
    generate = next(span for span in stages if span.name == "generate")
    shards = [span for span in spans if span.parent_span_id == generate.span_id]
    assert len(spans) == 1 + len(stages) + len(shards) and {span.name for span in shards} == {"shard"}
    assert len(shards) == sum(len(side.shards) for side in manifest.generation.sides.values())
    counts = facts_of(generate)
    for name in tracing.OF_SHARD:
        assert counts[name] == sum(facts_of(span)[name] for span in shards), name
    assert counts["tokens"] == sum(side.stats.num_tokens for side in manifest.generation.sides.values())
    for side, figures in manifest.generation.sides.items():
        assert counts[f"{side}.entities"] == figures.num_entities


def test_a_failed_attempt_says_why_and_what_was_done(manifest, server, monkeypatch):
    monkeypatch.setattr(tracing, "SPANS_PER_REQUEST", 2)
    with pytest.raises(RunFailed), recorded(manifest):
        with stage(manifest, "generate"):
            write_a_shard("00000")
            write_a_shard("00001")
        with stage(manifest, "audit"):
            raise RunFailed("most texts failed")
    assert len(server.posts) == 3
    spans = {span.name: span for span in server.spans()}
    assert set(spans) == {"attempt", "generate", "shard", "audit"}
    assert facts_of(spans["generate"])["rows"] == 16
    for name in ("attempt", "audit"):
        assert spans[name].status.code == trace.Status.STATUS_CODE_ERROR
        assert spans[name].status.message == "most texts failed" and facts_of(spans[name])["exit_code"] == 4
    assert spans["generate"].status.code == trace.Status.STATUS_CODE_UNSET


def test_each_attempt_sends_its_own_spans(manifest, server):
    for name in ("generate", "encode"):
        with recorded(manifest), stage(manifest, name):
            pass
    names_by_trace = {}
    for span in server.spans():
        names_by_trace.setdefault(span.trace_id, set()).add(span.name)
    assert len(server.posts) == 2
    assert list(names_by_trace.values()) == [{"attempt", "generate"}, {"attempt", "encode"}]


def test_a_collector_that_refuses_ends_no_night(manifest, server, caplog):
    server.status = 400
    with recorded(manifest), stage(manifest, "generate"):
        pass
    assert caplog.text.count("the spans of the night were not sent: the collector of OTEL_EXPORTER_OTLP_ENDPOINT") == 1


def test_a_variable_that_opentelemetry_cannot_read_ends_no_night(manifest, monkeypatch, caplog):
    monkeypatch.setenv(tracing.COLLECTOR, "no address")
    with recorded(manifest), stage(manifest, "generate"):
        pass
    assert caplog.text.count("the spans of the night were not sent: ") == 1


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9"])
def test_without_a_collector_or_without_opentelemetry_nothing_is_imported(manifest, monkeypatch, caplog, endpoint):
    monkeypatch.setenv(tracing.COLLECTOR, endpoint)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with recorded(manifest), stage(manifest, "generate"):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
