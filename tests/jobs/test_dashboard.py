"""The example dashboard and alerts: they show the metrics that a night writes, in expressions that Prometheus reads."""

import datetime
import json
import re
from itertools import combinations
from math import prod
from pathlib import Path

import promql_parser
import pytest
import yaml
from manifests import manifest_of

from laserbatch.jobs.console import ExitCode
from laserbatch.jobs.events import emit
from laserbatch.jobs.settings import GateSettings
from laserbatch.jobs.stages.attempt import recorded, stage
from laserbatch.jobs.stages.metrics import NightMetrics, exposition, running_exposition
from laserbatch.pipeline.storage.manifest import make_run_id
from laserbatch.pipeline.storage.workspace import Workspace

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())
ALERTS = yaml.safe_load((DOCS / "schedules" / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """The metrics in an expression; raises ValueError if the expression is not PromQL."""
    names = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            names.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, set[str]]:
    """The labels of each metric that a night writes while it runs and at its end."""
    root, date = tmp_path_factory.mktemp("workspace"), datetime.date(2025, 3, 1)
    workspace, textfile = Workspace.open(root), root / "laserbatch.prom"
    run = workspace.run(make_run_id(date, {}))
    manifest = manifest_of(run.manifest_path, date)
    with recorded(manifest), stage(manifest, "generate"):
        done = {"shards": 1, "rows": 8, "quarantined": 2, "tokens": 90, "accepted": 30, "steps": 60, "seconds": 3.0}
        done |= {"reasons": {"too-long": 2}}
        emit("endpoint", prices={"input": 1.0, "output": 4.0})
        emit("planned", of="generate", side="user", entities=40, carried_over=20, reasons={})
        sides = {"user": {"shards": 2, "rows": 20, "done": done}}
        emit("shards_begin", of="generate", sides=sides, expected_tokens={})
    run.finish()
    workspace.publication.publish(run.run_id)
    ended = exposition(NightMetrics(manifest), root, 0.0, 1.0)
    textfile.write_text(ended)
    running = running_exposition(NightMetrics(manifest), root, textfile)
    names = [set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) for text in (ended, running)]
    assert names[0] == names[1]
    samples = re.findall(r"^(\w+)(?:{(.*)})? \S+$", ended, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in samples}


def test_the_dashboard_shows_the_metrics_that_a_night_writes_all_of_them_and_no_other(written):
    shown = set()
    for panel in PANELS:
        for target in panel["targets"]:
            for selector in selectors(target["expr"]):
                matchers = [str(matcher) for matcher in selector.matchers.matchers]
                assert matchers == ['instance=~"$instance"', 'workspace=~"$workspace"']
                named = re.findall(r"{{(\w+)}}", target["legendFormat"])
                assert set(named) - {"instance"} <= written[selector.name], panel["title"]
                shown.add(selector.name)
    assert shown == set(written)


def test_the_dashboard_is_what_grafana_reads():
    assert DASHBOARD["schemaVersion"] >= 36  # the first version whose panels name their data source by type and uid
    assert DASHBOARD["title"] and DASHBOARD["uid"] and "id" not in DASHBOARD
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["datasource"] == SOURCE and panel["targets"]
        assert panel["type"] in ("stat", "timeseries", "bargauge")
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE and target["refId"] and target["instant"] != target["range"]


def test_panels_lie_within_the_grid_and_cover_no_other():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= 24 for place in places)
    for place, other in combinations(places, 2):
        aside = place["x"] + place["w"] <= other["x"] or other["x"] + other["w"] <= place["x"]
        assert aside or place["y"] + place["h"] <= other["y"] or other["y"] + other["h"] <= place["y"], (place, other)


def test_variables_name_the_data_source_and_labels_of_a_metric_that_every_night_writes(written):
    source, *labels = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    for variable, name in zip(labels, ("instance", "workspace"), strict=True):
        assert (variable["name"], variable["type"], variable["datasource"]) == (name, "query", SOURCE)
        (metric,) = re.findall(rf"^label_values\((\w+)(?:{{.*}})?, {name}\)$", variable["query"]["query"])
        assert metric in written


def test_grafanas_own_types_lose_nothing_of_it():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read_back = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD)))

    def lost(original, back) -> bool:
        if isinstance(original, dict):
            return any(lost(value, back.get(key)) for key, value in original.items())
        if isinstance(original, list):
            return len(original) != len(back) or any(map(lost, original, back))
        return original != back

    assert not lost(DASHBOARD, read_back)


def test_alerts_are_of_metrics_that_a_night_writes(written):
    for rule in ALERTS:
        assert "{{ $labels.workspace }}" in rule["annotations"]["summary"]
        assert {selector.name for selector in selectors(rule["expr"])} <= set(written), rule["alert"]


def test_limits_on_the_dashboard_are_those_of_the_alerts_and_of_the_gate():
    alerts = {rule["alert"]: rule["expr"] for rule in ALERTS}
    num_named = 0
    for panel in PANELS:
        reds = [step["value"] for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])]
        for name in re.findall(r"Laserbatch\w+", panel["description"]):
            assert reds[-1] == prod(map(int, alerts[name].rpartition("> ")[2].split(" * "))), panel["title"]
            num_named += 1
        if "gates.max_failed_share" in panel["description"]:
            assert reds[-1] == GateSettings().max_failed_share
            num_named += 1
    assert num_named == 3


def test_every_exit_code_that_a_night_writes_has_words():
    (panel,) = (panel for panel in PANELS if panel["targets"][0]["expr"].startswith("laserbatch_last_exit_code"))
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    of_no_night = {ExitCode.USAGE, ExitCode.NOT_READ}  # codes of commands that ended before or after the night
    assert {int(code) for code in mapping["options"]} == set(ExitCode) - of_no_night
