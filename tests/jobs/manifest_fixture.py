"""The manifest of a second night of a small shop, from a seed, with consistent figures."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from pydantic import TypeAdapter

from laserbatch.ctr.equivalence import PairedAuc, compare_paired
from laserbatch.pipeline.storage.figures import SideFigures
from laserbatch.pipeline.storage.manifest import RunManifest
from laserbatch.retrieval_pools.sources import SOURCE_NAMES

SHARES = {  # of accepted draft tokens, by source
    "user": {"previous": 0.52, "prompt": 0.06, "output": 0.08, "pool": 0.34},
    "item": {"previous": 0.18, "prompt": 0.17, "output": 0.05, "pool": 0.60},
}

USER_TEXT = """1. Genres: [pool]This reader returns most often to [/]slow-burning mysteries set in [pool]small harbour \
towns, and [/]gives them [pool]the highest ratings of all.[/]
2. Mood: [previous]Quiet, melancholic books with a patient pace are preferred over loud ones; [/]lately [pool]a \
warmer tone has found its way in.[/]
3. Creators: [prompt]Ilse Varnholt[/] and [prompt]Tomé Acquareggi[/] [output]are read [/]as soon as they appear.
4. Era: [pool]Stories from between the wars [/]outnumber [output]stories from [/]any other time.
5. Recent turn: [prompt]The Salt Ledger[/] opened a door to [pool]maritime history, which may be worth \
following.[/]"""

ITEM_TEXT = """[prompt]The Salt Ledger[/] [pool]is a novel in the category [/][prompt]Fiction > Mystery > Harbour[/]\
[pool], written by [/][prompt]Ilse Varnholt[/][pool]. It follows [/]a customs clerk who finds a second set of books. \
[pool]Readers who like a patient pace, a strong sense of place and [/]moral doubt [pool]will feel at home; \
those who want quick turns may not.[/] [previous]The mood is melancholic with a dry humour, and the setting is the \
nineteen-twenties.[/]"""

USER_PROMPT = """<|user|>
Given the reading history below, describe this reader's preferences in numbered aspects.
Attributes: member since 2024, region: coast.
History, oldest first:
- The Lantern Keeper's Debt (Fiction > Mystery > Harbour), rated 5
- Eleven Grey Mornings (Fiction > Literary > Interwar), rated 4
- The Salt Ledger (Fiction > Mystery > Harbour) by Ilse Varnholt, rated 5
<|assistant|>
"""


def stats(
    side: str,
    num_texts: int,
    mean_length: float,
    acceptance_length: float,
    tokens_per_s: float,
    drafted_per_step: float,
    seed: int = 0,
) -> dict:
    """Statistics of a decoding pass whose figures agree with each other."""
    draw = random.Random(seed)
    lengths = [max(40, round(draw.gauss(mean_length, mean_length * 0.18))) for _ in range(num_texts)]
    num_tokens = sum(lengths)
    num_steps = round(num_tokens / (acceptance_length + 1))
    num_accepted = num_tokens - num_steps if acceptance_length else 0
    num_drafted = round(num_steps * drafted_per_step)
    accepted = {name: round(num_accepted * SHARES[side].get(name, 0)) for name in SOURCE_NAMES}
    drafted = {name: round(num_drafted * (SHARES[side].get(name, 0) * 0.7 + 0.075)) for name in SOURCE_NAMES}
    cut = max(0, num_texts // 120)
    return {
        "num_texts": num_texts,
        "num_tokens": num_tokens,
        "num_steps": num_steps,
        "num_drafted": num_drafted,
        "num_accepted": num_accepted,
        "wall_s": num_tokens / tokens_per_s,
        "num_rewritten": 0,
        "drafted_by_source": drafted | {"target": 0} if num_drafted else dict.fromkeys(SOURCE_NAMES, 0),
        "accepted_by_source": accepted | {"target": num_steps},
        "finish_reasons": {"end_of_text": num_texts - cut, "length": cut},
    }


def spans(marked: str) -> list[dict]:
    """The spans of a sample, from text with marks: `[pool]drafted[/] own`."""
    parts, source = [], "target"
    for piece in marked.replace("[", "\x00[").split("\x00"):
        if piece.startswith("["):
            name, piece = piece[1:].split("]", 1)
            source = "target" if name == "/" else name
        if piece:
            parts.append({"text": piece, "source": source})
    return parts


def sample(entity_id: str, group: str | None, marked: str, prompt: str, tokens_per_step: float) -> dict:
    """One sample text of a manifest."""
    parts = spans(marked)
    text = "".join(part["text"] for part in parts)
    return {
        "entity_id": entity_id,
        "group": group,
        "prompt": prompt,
        "text": text,
        "spans": parts,
        "tokens_per_step": tokens_per_step,
    }


def pool(side: str, num_texts: int, tokens_per_text: int, names: list[str], seed: int) -> dict:
    """A pool of a manifest, its texts spread over its groups."""
    draw = random.Random(seed)
    weights = [0.6 + draw.paretovariate(3) for _ in names]
    sizes = [max(1, round(num_texts * weight / sum(weights))) for weight in weights]
    groups = {name: {"num_texts": n, "num_tokens": n * tokens_per_text} for name, n in zip(names, sizes, strict=True)}
    return {
        "version": f"2025-02-28-9c0de4f1/{side}",
        "num_texts": sum(sizes),
        "num_tokens": sum(sizes) * tokens_per_text,
        "groups": groups,
    }


def side_of(
    side: str, num_entities: int, num_generated: int, reasons: dict, routes: dict, counted: dict, samples: list
) -> dict:
    """One side of a manifest, in two shards."""
    quarantined = sum(reasons.values())
    model = {"id": "sample-1a2b3c4d", "dtype": "float32", "device": "cpu", "num_parameters": 5_240_000}
    info = {"planned_sha256": "5c" * 32, "group": "collaborative/0", "model": model, "num_workers": 2}
    half = {
        "name": "00000",
        "num_rows": num_generated // 2,
        "file": f"knowledge/{side}/00000.parquet",
        "sha256": "5b" * 32,
        "info": info | {"stats": counted | {"wall_s": counted["wall_s"] * 0.52}},
    }
    other = half | {
        "name": "00001",
        "num_rows": num_generated - num_generated // 2,
        "info": info | {"stats": counted | {"wall_s": counted["wall_s"] * 0.48}},
    }
    return {
        "num_entities": num_entities,
        "num_generated": num_generated,
        "num_carried_over": num_entities - num_generated - quarantined,
        "num_quarantined": quarantined,
        "num_stale": 0,
        "quarantine_reasons": reasons,
        "routes": routes,
        "shards": [half, other],
        "stats": counted,
        "budget": budget(counted),
        "samples": samples,
    }


def night_of(data: dict) -> SimpleNamespace:
    """A night whose manifest has the given figures of users."""
    generation, origin = SimpleNamespace(sides={"user": figures_of(data)}), SimpleNamespace(settings={})
    return SimpleNamespace(manifest=SimpleNamespace(generation=generation, origin=origin))


def figures_of(data: dict) -> SideFigures:
    """The figures of a side, parsed as in a manifest."""
    return TypeAdapter(SideFigures).validate_python(data)


def manifest_of(data: dict) -> RunManifest:
    """A manifest from plain values, parsed like its file."""
    return RunManifest.from_json(data, Path("manifest.json"))


def plain_side(side: str, num_texts: int, *counted: float, seed: int) -> dict:
    """A side's texts decoded plainly."""
    return side_of(side, num_texts, num_texts, {}, {}, stats(side, num_texts, *counted, seed=seed), []) | {
        "budget": None
    }


def features(side: str, num_rows: int) -> dict:
    """A side's features in a manifest."""
    return {
        "parts": [{"file": f"features/{side}/00000.parquet", "num_rows": num_rows, "sha256": "e0" * 32}],
        "dim": 384,
        "centroids": f"features/{side}-centroids.parquet",
        "num_clusters": 32,
        "num_encoded": num_rows // 2,
        "num_truncated": 0,
        "encoder": "hashed-384",
        "codebook": "c0" * 32,
    }


def budget(counted: dict) -> dict:
    """A side's forecast of drafted and accepted tokens, a little below the results."""
    return {
        "max_draft_tokens": 32,
        "min_acceptance": 0.15,
        "forecast": {
            "reason": "the fastest in replays",
            "step_cost": "measured 0123456789ab: sample-1a2b3c4d on EPYC, 2 cores",
            "batch_size": 16,
            "tokens_per_step": 1 + 0.97 * counted["num_accepted"] / counted["num_steps"],
            "mean_drafted": 0.9 * counted["num_drafted"] / counted["num_steps"],
            "speed_up": 1.84,
        },
    }


def audited(side: str, text: str) -> dict:
    """The audit of a side: its texts compared with plain ones, and the worst pair."""
    text = re.sub(r"\[/?\w*\]", "", text)
    return {
        "num_pairs": 32,
        "num_identical": 11,
        "length_ratio": 1.012,
        "cosine": 0.964,
        "repetition": {"own": 0.021, "plain": 0.018, "surely_worse": 0.0},
        "fields": {"own": 0.998, "plain": 1.0, "surely_worse": 0.0},
        "names": {"own": 0.19, "plain": 0.09, "surely_worse": 0.02},
        "cases": [
            {
                "entity_id": f"{side[0]}0{number}",
                "text": text,
                "plain_text": text.replace("a", "o", number),
                "length_ratio": 0.98,
                "cosine": 0.8,
                "added_repetition": 0.03,
                "lost_fields": 0.0,
                "names": ["otto quill"],
            }
            for number in (1, 2, 3)
        ],
    }


def ctr_row(model: str, variant: str, auc: float, cold: float, logloss: float, std: float) -> dict:
    """One row of a manifest's CTR table."""
    return {
        "model": model,
        "variant": variant,
        "num_seeds": 3,
        "auc": auc,
        "auc_std": std,
        "logloss": logloss,
        "logloss_std": std * 0.7,
        "auc_cold": cold,
        "auc_cold_std": std * 2.2,
    }


def equivalence(differences: dict[str, list[float]]) -> dict:
    """The `equivalence` of the CTR section, decided by the CTR package from paired differences over seeds."""
    pairs = {model: PairedAuc(np.array(values), np.zeros((len(values), 2))) for model, values in differences.items()}
    return {name: vars(verdict) for name, verdict in compare_paired(pairs, num_rows=1555).items()}


def night_manifest() -> dict:
    """The manifest of a second night, complete."""
    user_groups = [f"collaborative/{index}" for index in range(8)] + [
        f"attribute/region={name}" for name in ("coast", "hills", "city")
    ]
    item_groups = [
        f"Fiction/{a}/{b}"
        for a in ("Mystery", "Literary", "Fantasy", "History")
        for b in ("Harbour", "Interwar", "Winter", "Road")
    ]
    tonight = {
        "user": stats("user", 236, 168, 4.35, 1496, 15.4, seed=1),
        "item": stats("item", 176, 104, 3.42, 1218, 14.9, seed=2),
    }
    return {
        "format_version": 2,
        "run_id": "2025-03-01-1a2b3c4d",
        "date": "2025-03-01",
        "status": "success",
        "settings": {
            "workspace": "workspace",
            "seed": 0,
            "tables": {"path": "tables"},
            "model": {"path": "sample", "device": "auto"},
            "decoding": {
                "verifier": "relaxed",
                "top_k": 2,
                "min_probability": 0.1,
                "batch_size": 16,
                "max_draft_tokens": None,
                "max_new_tokens": 320,
                "drafters": ["previous", "prompt", "output", "pool"],
            },
            "pools": {"scope": "prefer", "min_support": 1},
            "ctr": {"models": ["din", "dcnv2", "gbdt"], "num_seeds": 3, "equivalence_margin": 0.002},
            "night": {"shard_size": 64, "compare_with_plain": True, "train_ctr": True},
        },
        "settings_hash": "1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f809",
        "laserbatch_version": "0.1.0",
        "machine": {"platform": "Linux-6.1-x86_64", "num_cpus": 2, "gpu": None, "python": "3.11.7", "torch": "2.13.0"},
        "inputs": {
            "users": {"path": "tables/users.parquet", "num_rows": 400, "sha256": "4f" * 32},
            "items": {"path": "tables/items.parquet", "num_rows": 300, "sha256": "a1" * 32},
            "interactions": {"path": "tables/interactions.parquet", "num_rows": 18432, "sha256": "7c" * 32},
        },
        "model": {"id": "sample-1a2b3c4d", "dtype": "float32", "device": "cpu", "num_parameters": 5_240_000},
        "workers": {"num_workers": 2, "num_threads": 1, "device": "cpu"},
        "pools": {
            "version": "2025-02-28-9c0de4f1",
            "user": pool("user", 380, 166, user_groups, 3),
            "item": pool("item", 260, 103, item_groups, 4),
        },
        "sides": {
            "user": side_of(
                "user",
                400,
                236,
                {"unparsable: the answer has no numbered aspect with a text": 3, "too-long": 1},
                {"collaborative": 318, "attribute": 82, "none": 0},
                tonight["user"],
                [
                    sample("u0012", "collaborative/3", USER_TEXT, USER_PROMPT, 5.62),
                    sample(
                        "u0391", "attribute/region=coast", USER_TEXT.replace("pool", "output", 2), USER_PROMPT, 4.18
                    ),
                ],
            ),
            "item": side_of(
                "item",
                300,
                176,
                {"unparsable: empty text": 2},
                {"collaborative": 214, "attribute": 79, "global": 7},
                tonight["item"],
                [
                    sample("i0178", "Fiction/Mystery/Harbour", ITEM_TEXT, "Describe: The Salt Ledger", 4.71),
                    sample("i0033", "Fiction/Literary/Interwar", ITEM_TEXT, "Describe: The Salt Ledger", 3.9),
                ],
            ),
        },
        "stages": {"generate": 42.6, "generate plain": 131.8, "encode": 8.0, "ctr": 61.7, "pools": 0.94},
        "plain": {
            "user": plain_side("user", 236, 167, 0, 412, 0, seed=5),
            "item": plain_side("item", 176, 103, 0, 433, 0, seed=6),
        },
        "features": {
            "user": features("user", 396),
            "item": features("item", 298),
        },
        "audit": {"sides": {"user": audited("user", USER_TEXT), "item": audited("item", ITEM_TEXT)}},
        "ctr": {
            "skipped": None,
            "split": {"train": 16210, "validation": 667, "test": 1555, "test_cold": 214, "test_unseen": 93},
            "rows": [
                ctr_row("Item rate", "none", 0.6507, 0.5811, 0.6342, 0.0) | {"num_seeds": 1},
                ctr_row("DIN", "none", 0.7112, 0.6021, 0.6034, 0.0011),
                ctr_row("DIN", "plain", 0.7251, 0.6489, 0.5952, 0.0009),
                ctr_row("DIN", "relaxed", 0.7249, 0.6502, 0.5950, 0.0010),
                ctr_row("DCNv2", "none", 0.7068, 0.5934, 0.6071, 0.0008),
                ctr_row("DCNv2", "plain", 0.7197, 0.6377, 0.5988, 0.0012),
                ctr_row("DCNv2", "relaxed", 0.7204, 0.6391, 0.5984, 0.0007),
                ctr_row("LightGBM", "none", 0.6981, 0.5820, 0.6120, 0.0006),
                ctr_row("LightGBM", "plain", 0.7069, 0.6127, 0.6061, 0.0005),
                ctr_row("LightGBM", "relaxed", 0.7066, 0.6118, 0.6062, 0.0006),
            ],
            "equivalence": equivalence(
                {
                    "DIN": [-0.0004, 0.0001, -0.0003],
                    "DCNv2": [0.0012, 0.0001, 0.0008],
                    "LightGBM": [-0.0004, -0.0002, -0.0003],
                }
            ),
        },
        "previous_night": {
            "run_id": "2025-02-28-9c0de4f1",
            "sides": {
                "user": stats("user", 380, 166, 1.22, 742, 8.2, seed=7),
                "item": stats("item", 262, 103, 1.05, 716, 7.9, seed=8),
            },
        },
        "pools_built": {
            "user": pool("user", 396, 167, user_groups, 9)
            | {"incremental": True, "num_texts_changed": 236}
            | {"version": "2025-03-01-1a2b3c4d/user", "build_s": 0.31},
            "item": pool("item", 298, 103, item_groups, 10)
            | {"incremental": False, "num_texts_changed": 310}
            | {"version": "2025-03-01-1a2b3c4d/item", "build_s": 0.18},
        },
    }
