"""Nights of the sample world for `laser.py`: texts of several decodings, their effect on CTR models, and the times.

Each night rewrites all texts after the same earlier night, and drafts from its pools, grouped in the night's own way.
"""

import dataclasses
import datetime
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from common import SAMPLE_MODEL, SEED, Interval
from ctr_nights import mean_and_std, sample_nights
from entities import iter_entities, render_prompt
from sklearn.metrics import log_loss, roc_auc_score
from systems import TransformersGenerate
from transformers import AutoTokenizer

from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.equivalence import ALL_MODELS, compare_paired, pair
from laserbatch.ctr.feature_set import read_feature_set
from laserbatch.ctr.knowledge import Knowledge, align_sides, build_knowledge
from laserbatch.ctr.settings import CtrSettings
from laserbatch.ctr.training import train_model
from laserbatch.jobs.stages import build_pools, night, publishing
from laserbatch.jobs.stages.encode import encode_run
from laserbatch.jobs.stages.night import Night
from laserbatch.jobs.stages.run_night import run_night
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.sample.world import LAST_DATE
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.stats import DecodingStats
from laserbatch.pipeline.tables.streamed import open_tables

FIRST_DATE = LAST_DATE - datetime.timedelta(days=30)
WORLD_SEED = 11  # nothing was trained or chosen on this world
SAMPLED_AT_ONCE = 64
TEMPERATURES = (0.5, 1.0)
SHARED = {
    "decoding.max_draft_tokens": 16, "decoding.min_acceptance": 0.07, "night.train_ctr": False, "night.num_audited": 0,
    "night.compare_with_plain": False, "gates.max_failed_share": 1.0,
}  # fmt: skip
AS_PUBLISHED = {"decoding.drafters": ["prompt", "output", "pool"]}  # without the entity's previous text
NIGHTS = {
    "vanilla": {"decoding.verifier": "greedy", "decoding.max_draft_tokens": 0},
    "resd": {"decoding.verifier": "greedy", "routing.scheme": "global", **AS_PUBLISHED},
    "laser": {"decoding.verifier": "relaxed", "routing.scheme": "router", "pools.scope": "group", **AS_PUBLISHED},
    "ours": {"decoding.verifier": "relaxed"},
}


def write_nights(folder: Path, num_users: int) -> tuple[dict[str, Night], list[dict]]:
    """Run the last night under each of NIGHTS; return the nights, and rows with their seconds.

    Grouping is fitting and querying the routers; pools are index and replays. Generation is the worker's time after it
    has loaded its model, and includes drafting.
    """
    publishing.judge = lambda measured, limits: []  # no gate stops a night from being compared
    settings_of = sample_nights(folder, num_users, WORLD_SEED)
    seconds, nights, rows = defaultdict(float), {}, []
    watch(seconds, "routing", night, "side_routes")
    watch(seconds, "grouping", build_pools, "fit_routers")
    watch(seconds, "grouping", build_pools, "side_routes")
    watch(seconds, "drafting", RetrievalDrafter, "draft_all")
    for name, of_night in NIGHTS.items():
        greedily = SHARED | of_night | {"decoding.verifier": "greedy"}
        first = run_night(settings_of(greedily), FIRST_DATE, policy="never")
        seconds.clear()
        settings = settings_of(SHARED | of_night)
        nights[name] = run_night(settings, LAST_DATE, force=True, policy="never", base_run=first.run)
        manifest = nights[name].manifest
        stats = DecodingStats.total(figures.stats for figures in manifest.generation.sides.values())
        took = {"grouping": seconds["grouping"] + seconds["routing"], "drafting": seconds["drafting"]}
        took["pools"] = manifest.stages["pools"] - seconds["grouping"]
        row = {"night": name, "num_texts": stats.num_texts, "tokens_per_step": stats.tokens_per_step}
        row |= {"generation_s": stats.wall_s} | {f"{part}_s": part_s for part, part_s in took.items()}
        total_s = stats.wall_s + took["grouping"] + took["pools"]
        rows.append(row | {f"{part}_share": part_s / total_s for part, part_s in took.items()})
    return nights, rows


def watch(seconds: dict[str, float], purpose: str, module: object, name: str) -> None:
    """Add the seconds of all calls of a module's function to `seconds`, until the process ends."""
    function = getattr(module, name)

    def timed(*arguments, **options):
        start_s = time.perf_counter()
        result = function(*arguments, **options)
        seconds[purpose] += time.perf_counter() - start_s
        return result

    setattr(module, name, timed)


def texts_of(nights: Mapping[str, Night], folder: Path) -> dict[str, RunFolder]:
    """Runs with texts and features of greedy decoding, relaxed verification and sampling, by name; one codebook."""
    ours, plain = nights["ours"], nights["vanilla"].run
    greedy: dict[Side, pa.Table] = {side: read_parquet(plain.knowledge_folder(side)) for side in SIDES}
    texts = {"greedy": greedy} | {f"sampled at {t:g}": _sampled(ours, greedy, t) for t in TEMPERATURES}
    runs = {name: RunFolder(folder / name) for name in texts}
    for name, run in runs.items():
        for side, rows in texts[name].items():
            run.shards(side).write("00000", rows)
        encode_run(run.root, ours.settings.encoding, codes_of=ours.run)
    return runs | {"relaxed": ours.run}


def _sampled(of_prompts: Night, greedy: Mapping[Side, pa.Table], temperature: float) -> dict[Side, pa.Table]:
    """Sampled texts for the entities of `greedy`, from a night's prompts, as copies of its tables."""
    model, tokenizer = TransformersGenerate.load(SAMPLE_MODEL, temperature), AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    knowledge, most = of_prompts.settings.effective_knowledge, of_prompts.settings.decoding.max_new_tokens
    tables = {}
    for side, rows in greedy.items():
        template, ids = knowledge.template(side), rows["entity_id"].to_pylist()
        prompts = {
            entity.entity_id: render_prompt(template, entity, tokenizer, knowledge.max_prompt_tokens).token_ids
            for entity in iter_entities(of_prompts.tables, side, ids)
        }
        ordered = sorted(ids, key=lambda entity_id: (len(prompts[entity_id]), entity_id))  # by length: little padding
        torch.manual_seed(SEED)
        written = model.run([prompts[entity_id] for entity_id in ordered], SAMPLED_AT_ONCE, most)
        texts = dict(zip(ordered, written.texts, strict=True))
        columns = {
            "text": [tokenizer.decode(list(texts[entity_id]), skip_special_tokens=True) for entity_id in ids],
            "num_tokens": [len(texts[entity_id]) for entity_id in ids],
        }
        for name, values in columns.items():
            field = rows.schema.field(name)
            rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array(values, field.type))
        tables[side] = rows
    return tables


def auc_rows(of_night: Night, texts: Mapping[str, RunFolder], num_seeds: int, margin: float) -> list[dict]:
    """Rows without texts, with each decoding's texts, and with greedy and relaxed texts as only vectors or codes.

    All use the same data rows, seeds and basis. `over_none` and `over_greedy` are differences of AUC over all models,
    the latter to greedy texts in the same form; their 95 % intervals are over users and seeds.
    """
    settings = CtrSettings(num_seeds=num_seeds)
    tables = open_tables(str(of_night.settings.tables.path))
    data = build_dataset(tables, of_night.date, settings)
    labels, users = data.labels[data.test], data.users[data.test]
    features = {name: read_feature_set(run.features_path("user").parent) for name, run in texts.items()}
    vectors = {name: align_sides(tables, feature_set) for name, feature_set in features.items()}
    knowledge = build_knowledge(tables, data, features, of_night.date, settings)
    variants = {("none", "both"): None} | {(name, "both"): features for name, features in knowledge.items()}
    for name in ("greedy", "relaxed"):
        variants |= {(name, "vectors"): _without(knowledge[name], "codes")}
        variants |= {(name, "codes"): _without(knowledge[name], "vectors")}
    scores: dict[tuple, dict[str, np.ndarray]] = {}  # by variant and model: float (num_seeds, num_test)
    for key, variant in variants.items():
        for model in settings.models:
            seed_scores = [train_model(model, data, variant, settings, seed).scores for seed in range(num_seeds)]
            scores.setdefault(key, {})[model] = np.stack(seed_scores).astype(float)

    def over(key: tuple, other: tuple) -> Interval:
        pairs = {model: pair(labels, users, own, scores[other][model]) for model, own in scores[key].items()}
        comparison = compare_paired(pairs, len(labels), margin)[ALL_MODELS]
        low, high = (np.nan if bound is None else bound for bound in (comparison.low, comparison.high))
        return Interval(comparison.mean_difference, low, high)

    rows = []
    for name, form in variants:
        row = {"texts": name, "form": form, "seeds": num_seeds, "test_rows": len(labels)}
        for model, of_model in scores[name, form].items():
            aucs = [roc_auc_score(labels, of_seed) for of_seed in of_model]
            losses = [log_loss(labels, np.clip(of_seed, 1e-7, 1 - 1e-7)) for of_seed in of_model]
            row[model] = mean_and_std(aucs) | {"logloss_mean": statistics.fmean(losses)}
        row["over_none"] = over((name, form), ("none", "both"))
        row["over_greedy"] = over((name, form), ("greedy", form))
        if name != "none":
            cosines = [(vectors[name][side].vectors * vectors["greedy"][side].vectors).sum(axis=1) for side in SIDES]
            row["cosine"] = float(np.mean([of_side[of_side != 0].mean() for of_side in cosines]))
            row |= likeness(texts[name], texts["greedy"])
        rows.append(row)
    return rows


def _without(knowledge: Knowledge, column: str) -> Knowledge:
    """The knowledge with one column, "vectors" or "codes", set to zero."""

    def emptied(of_side):
        return dataclasses.replace(of_side, **{column: getattr(of_side, column) * 0})

    return dataclasses.replace(knowledge, **{side: emptied(getattr(knowledge, side)) for side in SIDES})


def likeness(own: RunFolder, greedy: RunFolder) -> dict[str, float]:
    """The mean length of texts, and the share that equals the greedy texts word for word."""
    lengths, same = [], []
    for side in SIDES:
        ours, others = (read_parquet(run.knowledge_folder(side)).to_pylist() for run in (own, greedy))
        greedily = {row["entity_id"]: row["text"] for row in others}
        lengths += [row["num_tokens"] for row in ours]
        same += [greedily.get(row["entity_id"]) == row["text"] for row in ours]
    return {"mean_tokens": statistics.fmean(lengths), "share_as_greedy": statistics.fmean(same)}
