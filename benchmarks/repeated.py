"""Drift of relaxed texts over nights, each drafted from the texts of the night before, against plain decoding.

    python benchmarks/repeated.py --quick --json OUT

Users of a sample world go on rating. Every night rewrites every text (`--force`), so that an error that relaxed
verification accepts may be drafted again on later nights. The world knows the truth about its items and users, so that
errors of fact can be counted by the words in a text:

- an item's text must name its creator, category, era, mood and theme;
- a user's text must name only titles and creators of the user's history, and its most frequent category first.

The chain of plain nights is verified greedily, which gives the texts of plain decoding in less time. Budgets are fixed,
so that the same texts are written on any machine.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
from chaos_nights import CLI, forked_night
from common import Figure, benchmark_parser, finish, scale_of, table
from entities import Entity, iter_entities
from sample_lore import title_themes

from laserbatch.jobs.gates import MAX_SHARE_REPEATED, repeated_shares
from laserbatch.jobs.stages import publishing
from laserbatch.pipeline.sample.lore import CATEGORY_PATHS, ERAS, MOODS, THEMES, TOP_CATEGORIES
from laserbatch.pipeline.sample.world import LAST_DATE, write_sample_world
from laserbatch.pipeline.sides import SIDES, Side
from laserbatch.pipeline.storage.parquet import read_parquet
from laserbatch.pipeline.storage.run_folder import RunFolder
from laserbatch.pipeline.storage.workspace import Workspace
from laserbatch.pipeline.tables.read import Tables, read_tables

CHAINS = {"plain": {"verifier": "greedy"}, "relaxed": {}}
DECODING = {"batch_size": 16, "max_new_tokens": 320, "max_draft_tokens": 16, "min_acceptance": 0.07}
SETTINGS = {
    "workspace": "workspace",
    "tables": {"path": "tables"},
    "night": {"train_ctr": False, "num_audited": 0},
    "gates": {"max_failed_share": 1.0},
}
TIMEOUT_S = 1800.0  # limit of a night
COLUMNS = {
    "chain": "{chain}", "night": "{night}", "side": "{side}", "tokens": "{mean_tokens:.1f}",
    "repet.": "{repetitive:.1%}", "plain": "{as_plain:.1%}", "per step": "{tokens_per_step:.2f}", "errors": "{shares}",
}  # fmt: skip
MAX_ADDED = 0.02  # allowed share of texts with an error in the last nights, above the share in plain texts


@dataclass(frozen=True)
class Scale:
    """The numbers of nights, users, items and seeds."""

    num_nights: int
    num_users: int
    num_items: int
    num_seeds: int  # seeds of CTR trainings; 0: no training


@dataclass(frozen=True)
class Row:
    """One side of one night; shares are of its texts."""

    chain: str
    night: int
    side: Side
    num_texts: int
    errors: dict[str, float]
    mean_tokens: float
    repetitive: float
    as_plain: float  # share of texts that equal those of the plain chain on that night
    tokens_per_step: float | None


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    publishing.judge = lambda measured, limits: []  # no gate stops a night from being measured
    scale = scale_of(arguments, Scale(12, 64, 48, 4), Scale(4, 24, 24, 0), Scale(2, 8, 20, 0))
    with tempfile.TemporaryDirectory(prefix="laserbatch-repeated-") as folder:
        with ThreadPoolExecutor(len(CHAINS)) as side_by_side:
            places = [Path(folder) / name for name in CHAINS]
            lived = dict(zip(CHAINS, side_by_side.map(partial(live, scale), places, CHAINS.values()), strict=True))
        rows = list(judged(lived))
        aucs = {name: aucs_of(workspace, scale) for name, workspace in lived.items()} if scale.num_seeds else {}
    in_order = sorted(rows, key=lambda row: (row.side, row.night, row.chain))
    finish(
        arguments.json, figures_of(rows, scale), [table(map(described, in_order), COLUMNS)], {"rows": rows, "auc": aucs}
    )


def live(scale: Scale, place: Path, decoding: dict) -> Workspace:
    """Run all nights of one chain; return its workspace."""
    write_sample_world(place / "tables", scale.num_users, scale.num_items, seed=1)
    settings = SETTINGS | {"decoding": DECODING | decoding}
    (place / "laserbatch.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for night in range(scale.num_nights):
        day = LAST_DATE - timedelta(days=scale.num_nights - 1 - night)
        code = forked_night(place, str(day), options=["--force"], most_s=TIMEOUT_S)
        if code != 0:
            raise SystemExit(f"the night of {day} ended with {code}:\n{(place / 'said.txt').read_text()[-2000:]}")
        print(f"{place.name} {day}", file=sys.stderr, flush=True)
    return Workspace.open(place / "workspace", create=False)


def judged(lived: dict[str, Workspace]) -> Iterator[Row]:
    """Yield a row for every night and side of every chain."""
    plain = lived["plain"].runs()
    for chain, workspace in lived.items():
        for night, (run, beside) in enumerate(zip(workspace.runs(), plain, strict=True), 1):
            tables = read_tables(workspace.root.parent / "tables", date.fromisoformat(run.date))
            for side in SIDES:
                yield judge(chain, night, side, run, beside, tables)


def judge(chain: str, night: int, side: Side, run: RunFolder, plain: RunFolder, tables: Tables) -> Row:
    texts, beside = (by_id(folder, side) for folder in (run, plain))
    truth = item_errors if side == "item" else UserErrors(tables)
    entities = {entity.entity_id: entity for entity in iter_entities(tables, side)}
    judged = [truth(entities[entity_id], text) for entity_id, text in texts.items()]
    records = read_parquet(run.knowledge_folder(side), ["token_ids", "num_tokens"])
    return Row(
        chain=chain,
        night=night,
        side=side,
        num_texts=len(texts),
        errors={name: float(np.mean([errors[name] for errors in judged])) for name in judged[0]},
        mean_tokens=float(np.mean(records["num_tokens"])),
        repetitive=float(np.mean(repeated_shares(records["token_ids"]) > MAX_SHARE_REPEATED)),
        as_plain=float(np.mean([beside.get(entity_id) == text for entity_id, text in texts.items()])),
        tokens_per_step=run.load_manifest().generation.sides[side].stats.tokens_per_step,
    )


def by_id(run: RunFolder, side: Side) -> dict[str, str]:
    rows: pa.Table = read_parquet(run.knowledge_folder(side), ["entity_id", "text"])
    return dict(zip(rows["entity_id"].to_pylist(), rows["text"].to_pylist(), strict=True))


def item_errors(item: Entity, text: str) -> dict[str, bool]:
    """For each fact, whether the text lacks it."""
    facts, path = item.attributes, item.attributes["category"]
    named = {
        "category": (set(path[:1]), {top for top in TOP_CATEGORIES if has(text, top)}),
        "kind": (set(path[1:2]), {kind for _, kind, _ in CATEGORY_PATHS if has(text, kind)} - set(TOP_CATEGORIES)),
        "era": ({facts["era"]}, {era for era in ERAS if has(text, era)}),
        "mood": ({facts["mood"]}, {mood for mood in MOODS if has(text.lower(), mood)}),
        "theme": ({THEMES[title_themes(facts["title"]).main].name}, {
            theme.name for theme in THEMES if has(text.lower(), theme.name)
        }),
    }  # fmt: skip
    errors = {name: bool(truth) and not truth <= named_in_text for name, (truth, named_in_text) in named.items()}
    return errors | {"creator": facts["creator"] not in text}


class UserErrors:
    """Finds errors in a user's text: titles, creators and first genre that the user's history does not support."""

    def __init__(self, tables: Tables) -> None:
        self.titles = tables.items["title"].to_pylist()
        self.creators = sorted(set(tables.items["creator"].to_pylist()))

    def __call__(self, user: Entity, text: str) -> dict[str, bool]:
        own_titles = {event.title for event in user.history}
        own_creators = {event.attributes["creator"] for event in user.history}
        titles = {title for title in self.titles if has(text, title)}
        titles = {title for title in titles if not any(title != other and title in other for other in titles)}
        counts = Counter(event.attributes["category"][0] for event in user.history)
        most = {top for top, number in counts.items() if number == max(counts.values())}
        genre = text.partition("2. ")[0]
        places = {genre.find(top): top for top in TOP_CATEGORIES if top in genre}
        return {
            "title": not titles <= own_titles,
            "creator": not {name for name in self.creators if name in text} <= own_creators,
            "first genre": bool(most) and (not places or places[min(places)] not in most),
        }


def has(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def aucs_of(workspace: Workspace, scale: Scale) -> list[dict]:
    """The CTR comparison on the last night's features, a row per model and variant."""
    command = [*CLI, "ctr", "compare", "--workspace", str(workspace.root), "--seeds", str(scale.num_seeds), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["rows"]


def figures_of(rows: list[Row], scale: Scale) -> list[Figure]:
    """Figures of the errors in the last third of the nights: the share of relaxed texts minus that of plain texts."""
    last = range(scale.num_nights - max(1, scale.num_nights // 3) + 1, scale.num_nights + 1)
    figures = []
    for side in SIDES:
        means = {}
        for chain in CHAINS:
            own = [row for row in rows if row.chain == chain and row.side == side and row.night in last]
            means[chain] = {name: float(np.mean([row.errors[name] for row in own])) for name in own[0].errors}
        for name, plain in means["plain"].items():
            figures.append(
                Figure.at_most(f"{side} texts with a wrong {name}, added", means["relaxed"][name] - plain, MAX_ADDED)
            )
    return figures


def described(row: Row) -> dict:
    """A row's values for COLUMNS."""
    return vars(row) | {"shares": "  ".join(f"{name} {share:.1%}" for name, share in row.errors.items())}


if __name__ == "__main__":
    main()
