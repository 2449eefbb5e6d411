"""Sends spans of an attempt to OpenTelemetry: the attempt, its stages, and the shards of each stage.

They are made from the attempt's events after it has ended, so tracing costs a running night nothing. OpenTelemetry is
imported only if the environment names a collector.
"""

import datetime
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from laserbatch.jobs.events import last_attempt
from laserbatch.jobs.failures import line_of

logger = logging.getLogger("laserbatch")

COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"  # OpenTelemetry's environment variable for the collector
SPANS_PER_REQUEST = 500
OF_SHARD = ("rows", "quarantined", "tokens", "accepted", "steps")


@contextmanager
def traced(events_path: Path) -> Iterator[None]:
    """Send the spans of the attempt whose events the block writes, also if the block fails.

    Without a collector, or without `laserbatch[opentelemetry]`, nothing is sent. A failure to send ends no night.
    """
    try:
        yield
    finally:
        if os.environ.get(COLLECTOR):
            try:
                _send(last_attempt(events_path))
            except ImportError:
                pass
            except Exception as error:  # an invalid OpenTelemetry variable, or our own fault
                logger.warning("the spans of the night were not sent: %s", line_of(error, names_values=False))


def _send(events: list[dict[str, Any]]) -> None:
    """Send the spans over HTTP; if the collector does not answer, OpenTelemetry gives up after ten seconds."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # OpenTelemetry warns at each try; we warn once
    name = os.environ.get("OTEL_SERVICE_NAME", "laserbatch")
    resource = Resource.create({"service.name": name, "service.version": version("laserbatch")})
    provider, ended = TracerProvider(resource=resource, shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(ended))
    _make_spans(events, provider.get_tracer("laserbatch"))
    exporter, spans = OTLPSpanExporter(), ended.get_finished_spans()
    requests = (spans[first : first + SPANS_PER_REQUEST] for first in range(0, len(spans), SPANS_PER_REQUEST))
    if not all(exporter.export(request) is SpanExportResult.SUCCESS for request in requests):
        logger.warning("the spans of the night were not sent: the collector of %s did not take them", COLLECTOR)


def _make_spans(events: list[dict[str, Any]], tracer: Any) -> None:
    from opentelemetry.trace import StatusCode, set_span_in_context

    open_spans, counts = [], Counter()  # the attempt, and the current stage

    def begin(name: str, start_ns: int, facts: dict[str, Any]) -> Any:
        parent = set_span_in_context(open_spans[-1]) if open_spans else None
        attributes = _attributes({"run_id": events[0]["run_id"]} | facts)
        return tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)

    time_ns = 0
    for event in events:
        time_ns = int(datetime.datetime.fromisoformat(event["time"]).timestamp() * 1e9)
        if event["event"] == "run_begin":
            open_spans.append(begin("attempt", time_ns, {"date": event["date"]}))
        elif event["event"] == "stage_begin":
            open_spans.append(begin(event["stage"], time_ns, {"stage": event["stage"]}))
        elif event["event"] == "planned":
            counts.update({f"{event['side']}.{name}": event[name] for name in ("entities", "carried_over")})
        elif event["event"] == "shard_done":
            done = {name: event[name] for name in OF_SHARD}
            counts.update(done)
            start_ns = time_ns - int(event["seconds"] * 1e9)
            begin("shard", start_ns, {"side": event["side"], "shard": event["shard"]} | done).end(time_ns)
        elif event["event"] == "stage_end":
            open_spans[-1].set_attributes(_attributes(counts))
            open_spans.pop().end(time_ns)
            counts.clear()
        elif event["event"] == "failure":
            open_spans[-1].set_attributes(_attributes(counts))
            for span in open_spans:
                span.set_attributes(_attributes({"exit_code": event["exit_code"]}))
                span.set_status(StatusCode.ERROR, event["error"])
    for span in reversed(open_spans):
        span.end(time_ns)


def _attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"laserbatch.{name}": value for name, value in facts.items()}
