"""Gates: the measurements of a run, and which of them hold it back (held nights: tests/soak)."""

import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from manifest_fixture import manifest_of, night_manifest

from laserbatch.jobs.gates import GATES, _of_side, gate_sentence, has_option, judge, repeated_shares, warning
from laserbatch.jobs.report.page import render_page
from laserbatch.jobs.settings import GateSettings
from laserbatch.pipeline.storage.figures import GateFigures
from laserbatch.pipeline.storage.workspace import Workspace


def verdict(gate: str, value: float | None, settings: GateSettings | None = None, **more) -> str:
    (figures,) = judge([GateFigures(gate, value=value, **more)], settings or GateSettings())
    return figures.verdict


@pytest.mark.parametrize(
    ("gate", "good", "bad"),
    [
        ("coverage", 0.95, 0.85),
        ("quarantine", 0.05, 0.06),
        ("unusable", 0.2, 0.4),
        ("cut", 0.3, 0.6),
        ("repetition", 0.02, 0.2),
        ("length", 1.2, 2.0),
        ("vector norm", 0.0, 0.01),
        ("vector drift", 0.6, 0.1),
        ("length beside plain", 1.1, 1.5),
        ("cosine with plain", 0.9, 0.4),
        ("added repetition", 0.0, 0.1),
        ("lost fields", 0.0, 0.1),
        ("added names", 0.1, 1.0),
    ],
)
def test_a_gate_holds_beyond_its_limit(gate, good, bad):
    assert verdict(gate, good) == "passes" and verdict(gate, bad) == "blocks"
    assert verdict(gate, bad, can_block=False) == "warns"
    assert verdict(gate, None) == "passes"


def test_speed_only_warns_and_auc_holds_where_the_whole_interval_is_worse():
    assert verdict("speed", 0.1) == "warns"
    assert verdict("AUC", -0.01, limit=-0.002) == "blocks" and verdict("AUC", 0.001, limit=-0.002) == "passes"
    assert verdict("AUC", -0.01, GateSettings(auc="warn"), limit=-0.002) == "warns"
    assert verdict("AUC", -0.01, GateSettings(auc="ignore"), limit=-0.002) == "passes"


@pytest.mark.parametrize(
    "gate", ["length beside plain", "cosine with plain", "added repetition", "lost fields", "added names"]
)
def test_one_option_says_what_follows_where_audited_texts_differ_too_much(gate):
    value = 0.4 if gate == "cosine with plain" else 1.5
    for option, expected in (("stop", "blocks"), ("warn", "warns"), ("ignore", "passes")):
        (figures,) = judge([GateFigures(gate, "user", value)], GateSettings(audit=option, auc="stop"))
        assert figures.verdict == expected and "gates.audit decides what follows" in gate_sentence(figures)
        assert warning([figures]) == ([figures] if option == "warn" else [])


def test_the_advice_to_change_a_limit_is_given_where_there_is_an_option():
    gates = ("quarantine", "added names", "cut")
    assert [has_option(GateFigures(gate, "user")) for gate in gates] == [True, True, False]


def test_a_raised_limit_is_judged_by_the_same_value():
    figures = judge([GateFigures("quarantine", "user", 0.06)], GateSettings())
    assert "gates.max_failed_share is 5.0 %" in gate_sentence(figures[0])
    assert judge(figures, GateSettings(max_failed_share=0.07))[0].verdict == "passes"
    options = {gate.limit for gate in GATES.values() if isinstance(gate.limit, str)}
    assert options | {"audit", "auc"} == set(GateSettings.model_fields)


def test_a_text_that_repeats_itself_is_told_from_one_that_does_not():
    draw = np.random.default_rng(0)
    texts = [[5] * 40, draw.integers(0, 999, 40), [1, 2, 3, 4, 5] * 8, [], [7, 8], list(draw.integers(0, 999, 20)) * 2]
    shares = repeated_shares(pa.chunked_array([pa.array(list(map(list, texts)), pa.list_(pa.int32()))]))
    slow = [1 - len({tuple(t[i : i + 4]) for i in range(len(t) - 3)}) / max(len(t) - 3, 1) if len(t) > 3 else 0
            for t in map(list, texts)]  # fmt: skip
    assert shares.tolist() == pytest.approx(slow) and (shares > 0.5).tolist() == [True, False, True] + [False] * 3
    assert repeated_shares(pa.chunked_array([[]], pa.list_(pa.int32()))).tolist() == []


def test_who_lost_a_text_by_a_raised_limit_of_evidence_is_not_missed():
    before, after = manifest_of(night_manifest()), manifest_of(night_manifest())
    for manifest, num_texts in ((before, 100), (after, 60)):
        features = manifest.features["user"]
        manifest.features["user"] = replace(features, parts=(replace(features.parts[0], num_rows=num_texts),))
    after.generation.sides["user"] = replace(after.generation.sides["user"], postponed={"evidence": 40, "budget": 9})
    assert next(_of_side("user", after, None, before, None)).value == 0.6
    after.origin.settings["refresh"] = {"min_interactions": 3}
    assert next(_of_side("user", after, None, before, None)).value == 1.0


def test_the_page_shows_gates_as_a_table():
    manifest = manifest_of(night_manifest())
    manifest.judgement.gates = judge(
        [GateFigures("cut", "item", 0.7), GateFigures("AUC", reason="not compared")], GateSettings()
    )
    manifest.status = "held"
    page = render_page(manifest)
    assert "held back and not published" in page and "Values judged before publication" in page
    assert "Not published: items: 70.0 % of the written texts are empty or cut at the token limit" in page


def test_readers_see_one_whole_run_or_another_while_it_is_published(tmp_path):
    workspace, runs = Workspace.open(tmp_path / "workspace"), []
    for day in range(1, 4):
        run = workspace.run(f"2025-03-0{day}-00000000")
        for side in ("user", "item"):
            path = run.features_folder(side) / "00000.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(pa.table({"day": [day]}), path)
        run.manifest_path.write_text("{}")
        run.finish()
        runs.append(run.run_id)
    workspace.publication.publish(runs[0])
    seen, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            run = Workspace.open(tmp_path / "workspace", create=False).publication.run()
            seen.append({pq.read_table(run.features_path(side))["day"][0].as_py() for side in ("user", "item")})

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(60):
        workspace.publication.publish(runs[number % 3])
    stop.set()
    for reader in readers:
        reader.join()
    assert len(seen) > 10 and all(len(days) == 1 for days in seen) and len(set(map(min, seen))) > 1
