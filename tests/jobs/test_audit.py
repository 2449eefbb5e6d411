"""The audit: which prompts are also decoded plainly, what is compared, and its effect on publication and cost.

No model writes the texts. The night's texts of some users contain a name that is in no prompt, and lack a field that
plain decoding fills.
"""

import json
import math
import re
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import yaml
from night_world import write_here
from small_world import World, first_world

from laserbatch.jobs.gates import _audited, blocking, gate_sentence, judge
from laserbatch.jobs.report.page import render_page
from laserbatch.jobs.settings import GateSettings, Settings, load_settings
from laserbatch.jobs.stages import audit, generate, shards
from laserbatch.jobs.stages.night import Night, parse_date
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.jobs.stages.workers import NightWorkers
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.knowledge.parsers import parse_answer
from laserbatch.pipeline.knowledge.records import knowledge_schema
from laserbatch.pipeline.planning.plan import read_shard
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.storage.figures import ModelFigures, ShardInfo
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats

NUM_USERS, DATE = 200, parse_date("2025-03-01")
HEAD = {"version": 1, "framework": "kar", "instruction": "Describe."}
ASPECTS = HEAD | {"name": "tastes", "side": "user", "parser": "aspects", "factors": ["Taste", "Mood"]}
FREE = HEAD | {"name": "things", "side": "item", "parser": "free"}


def written(pending, worker_pool, *_):
    """A stand-in for the model."""
    spec, folder = worker_pool.spec, RunFolder(worker_pool.spec.run_dir)
    is_plain = not spec.decoding.drafters
    for shard in pending:
        template, records, schema = spec.templates[shard.side], [], None
        for row in read_shard(spec.run_dir / shard.path):
            text = "1. Taste: they like Harbour Lights and Rust & <b>Salt</b>.\n2. Mood: calm, they say."
            if not is_plain and zlib.crc32(row.entity_id.encode()) % 2:
                text = "1. Taste: they like Harbour Lights, and Otto Quill most of all."
            ids, schema = [*text.encode()], knowledge_schema(pa.string())
            filled = {"entity_id": row.entity_id, "side": shard.side, "framework": "kar", "template": "t", "text": text,
                      "token_ids": ids, "token_sources": [0] * len(ids), "num_tokens": len(ids), "run_id": spec.run_id,
                      "model_id": "m",
                      "fields_json": json.dumps(parse_answer(template, text).fields), "fingerprint": row.fingerprint,
                      "decoding_json": "{}", "finish_reason": "stop", "is_stale": False}  # fmt: skip
            values = {name: None if name.startswith("pool_") else 1 for name in schema.names}
            records.append(values | filled)
        stats = DecodingStats(len(records), 9, 5, num_drafted=0 if is_plain else 9, wall_s=1.0,
                              drafted_by_source={"pool": 9}, accepted_by_source={"pool": 4})  # fmt: skip
        info = ShardInfo(shard.sha256, shard.group, stats, ModelFigures("m", "float32", "cpu", 1), 1)
        yield shard, folder.shards(shard.side).write(shard.name, pa.Table.from_pylist(records, schema), (), info)


class Encoder:
    """Unit vectors: one for all texts with a mood, and another one for all other texts."""

    dim, encoder_id = 2, "two"

    def encode(self, texts, on_batch):
        vectors = [[1.0, 0.0] if "Mood" in text else [0.8, 0.6] for text in texts]
        return SimpleNamespace(vectors=np.array(vectors, np.float32), num_truncated=0)


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patched:
        write_here(patched)
        patched.setattr(shards, "run_shards", written)
        patched.setattr(TextEncoder, "load", lambda settings: Encoder())
        yield patched


@pytest.fixture(scope="module")
def settings(patched, tmp_path_factory) -> Settings:
    folder = tmp_path_factory.mktemp("audited")
    (folder / "prompts").mkdir()
    for template in (ASPECTS, FREE):
        (folder / "prompts" / f"{template['name']}.yaml").write_text(yaml.safe_dump(template))
    world = World(items=first_world().items)
    world.users = {f"u{number}": {"mood": "calm", "created_at": "2025-02-10"} for number in range(NUM_USERS)}
    world.events = [(user, "i0", "2025-02-27", 5.0) for user in world.users]
    world.write(folder / "tables")
    values = {
        "workspace": "workspace", "tables": {"path": "tables"}, "encoding": {"num_clusters": 2},
        "knowledge": {"template_dir": "prompts", "user_template": "tastes", "item_template": "things"},
        "night": {"train_ctr": False}, "gates": {"audit": "ignore"},
    }  # fmt: skip
    (folder / "laserbatch.yaml").write_text(yaml.safe_dump(values))
    return load_settings(folder / "laserbatch.yaml")


@pytest.fixture(scope="module")
def lived(settings, patched) -> tuple[Night, list]:
    """A night that was interrupted in its audit and then finished, and the number of texts written in each folder."""
    prompts = []

    def seen(pending, worker_pool, *more):
        prompts.append((worker_pool.spec.run_dir.name, sum(shard.num_rows for shard in pending)))
        yield from written(pending, worker_pool, *more)

    with patched.context() as watched:
        watched.setattr(shards, "run_shards", seen)
        with watched.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr(audit, "_audit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            run_night(settings, DATE)
        return run_night(settings, DATE), prompts


def changed(night: Night, section: str, **options) -> Night:
    """The night under other settings, before its audit."""
    part = getattr(night.settings, section).model_copy(update=options)
    settings = night.settings.model_copy(update={section: part})
    return replace(
        night,
        settings=settings,
        manifest=replace(night.manifest, judgement=replace(night.manifest.judgement, audit=None)),
    )


def test_a_tenth_of_a_nights_texts_is_written_plainly_too_compared_and_thrown_away(lived):
    night, prompts = lived
    assert prompts == [(night.run.run_id, NUM_USERS + 3), ("audit", NUM_USERS // 10)]  # three items are too few
    assert not (night.run.root / "audit").exists() and "generate audited" in night.manifest.stages
    assert list(night.manifest.judgement.audit.sides) == ["user"]
    audit = night.manifest.judgement.audit.sides["user"]
    num_worse = audit.num_pairs - audit.num_identical
    share = num_worse / audit.num_pairs
    assert audit.num_pairs == 20 and 0 < num_worse < 20
    assert audit.cosine == pytest.approx(1 - 0.2 * share, abs=1e-6)
    assert audit.names.plain == 1 and audit.names.own == pytest.approx(1)  # "Harbour Lights" is the title of an item
    assert (audit.fields.own, audit.fields.plain) == (pytest.approx(1 - share / 2), 1.0)
    error = np.std([0.5] * num_worse + [0.0] * audit.num_identical, ddof=1) / math.sqrt(20)
    assert audit.fields.surely_worse == pytest.approx(share / 2 - 2 * error)
    assert len(audit.cases) == 3 and all(case.names == ["otto quill"] for case in audit.cases)
    assert audit.cases[0].lost_fields == 0.5 and audit.cases[0].length_ratio < 1


def test_the_page_shows_the_worst_pairs_side_by_side_escaped(lived):
    page = render_page(lived[0].manifest)
    assert "otto quill" in page and "50 % of its fields lost" in page
    assert "&lt;b&gt;Salt" in re.sub("</?mark>", "", page) and "<b>Salt" not in page


def test_what_is_beyond_a_limit_keeps_a_night_from_its_readers(lived):
    gates = judge(lived[0].manifest.judgement.gates, GateSettings())
    (held,) = [gate for gate in blocking(gates) if gate.gate == "lost fields"]
    assert re.search(
        r"users: texts lack at least .* of the requested fields .*gates\.audit decides", gate_sentence(held)
    )


@pytest.mark.parametrize(
    ("section", "option", "reason"),
    [
        ("decoding", {"verifier": "greedy"}, "the verifier accepts only plain"),
        ("decoding", {"verifier": "leviathan"}, "its texts differ from plain samples of the model by chance"),
        ("night", {"num_audited": 0}, "night.num_audited is 0"),
        ("night", {"num_audited": 15}, "Too few texts"),
    ],
)
def test_a_night_that_has_nothing_to_compare_says_why_and_passes(lived, section, option, reason):
    night = changed(lived[0], section, **option)
    assert not audit.needs_audited_texts(night)
    night.manifest.judgement.audit = audit.audit_texts(night, Encoder)
    (gate,) = judge(_audited(night.manifest.judgement.audit), GateSettings())
    assert reason in gate_sentence(gate) and gate.verdict == "passes" and reason in render_page(night.manifest)


def test_failed_plain_texts_are_not_called_too_few(lived):
    night = changed(lived[0], "night")
    night.manifest.judgement.audit = audit.audit_texts(night, Encoder)  # as if no plain text had been written
    (gate,) = judge(_audited(night.manifest.judgement.audit), GateSettings())
    assert "each of its texts failed or was rejected" in gate_sentence(gate)


def test_a_side_whose_plain_texts_all_failed_is_named_beside_the_other_side(lived, monkeypatch):
    figures = {"user": lived[0].manifest.judgement.audit.sides["user"], "item": None}
    monkeypatch.setattr(audit, "_audit", lambda night, side, *_: figures[side])
    night = changed(lived[0], "night", compare_with_plain=True)
    night.manifest.judgement.audit = audit.audit_texts(night, Encoder)
    (gate,) = [gate for gate in _audited(night.manifest.judgement.audit) if gate.side == "item"]
    assert gate_sentence(gate) == f"items: {audit.PLAIN_FAILED}"
    assert f"Items: {audit.PLAIN_FAILED}" in render_page(night.manifest)


def test_plain_texts_that_are_there_already_are_compared_however_few(lived, settings):
    night = changed(lived[0], "night", compare_with_plain=True)
    night.manifest.generation.plain = generate.generate_plain(night, NightWorkers(settings.cluster))
    assert not audit.needs_audited_texts(night)
    night.manifest.judgement.audit = audit.audit_texts(night, Encoder)
    assert {side: night.manifest.judgement.audit.sides[side].num_pairs for side in SIDES} == {"user": 32, "item": 3}
    (gate,) = [gate for gate in _audited(night.manifest.judgement.audit) if gate.side == "item"]
    assert "too few texts were compared with plain texts" in gate_sentence(gate) and night.run.plain.root.is_dir()
