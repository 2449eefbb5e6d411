"""Finds the columns that changed for most entities of a side, by comparing their last prompts with tonight's.

If there are many entities, a sample is compared. The attributes of an earlier prompt are in the plan of its run.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from laserbatch.pipeline.knowledge.templates import AttributeLines
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.parquet import iter_parquet

MAX_COMPARED = 1000  # entities per side
ANOTHER_ORDER = "all attributes"
_SAME_WORDS = {"yes": "true", "no": "false", "1": "true", "0": "false"}
ITEM_ATTRIBUTES = "attributes of items"
ItemTexts = Mapping[str, Mapping[str, str]]
Pairs = Sequence[tuple[Mapping[str, str], Mapping[str, str]]]  # each entity's attributes by name: (before, now)


def shown_in_plan(folder: Path, side: Side, ids: Collection[str]) -> dict[str, dict[str, str | None]]:
    """The fingerprint, attribute lines and history of entities in a run's plan, by the entity's id as text.

    Entities that the plan does not have are missing; so are all if the run or its plan is gone.
    """
    shown = {}
    for batch in iter_parquet(folder / "plan" / side, ["entity_id", "fingerprint", "attributes", "history"]):
        keys = batch["entity_id"].cast(pa.string())
        is_requested = pc.is_in(keys, value_set=pa.array(ids, pa.string()))
        shown |= dict(zip(keys.filter(is_requested).to_pylist(), batch.filter(is_requested).to_pylist(), strict=True))
    return shown


def attributes_of(lines: str | None, columns: AttributeLines) -> dict[str, str]:
    """The attributes by column, from the lines of a prompt; empty if the template's lines do not name their column."""
    if "{label}" not in columns.line:
        return {}
    named, seen = [], set()
    for literal, field, _, _ in string.Formatter().parse(columns.line):
        group = "" if field is None else f"(?P={field})" if field in seen else f"(?P<{field}>.*?)"
        named.append(re.escape(literal) + group)
        seen.add(field)
    matches = (re.fullmatch("".join(named), line) for line in (lines or "").split("\n"))
    names = {label: name for name, label in columns.labels.items()}
    rows = (match.groupdict() for match in matches if match is not None)
    return {names.get(row["label"], row["label"]): row.get("value", "") for row in rows}


def changed_columns(pairs: Pairs) -> dict[str, tuple[str, int]]:
    """The change of each column that changed, in words, and its number of pairs; the most frequent first.

    A column counts as renamed if it is new where another one with the same values is gone. Attributes that only have
    another order count for `ANOTHER_ORDER`.
    """
    counts: Counter[tuple[str, str]] = Counter()
    renamed: Counter[tuple[str, str]] = Counter()
    for before, after in pairs:
        added, gone = [name for name in after if name not in before], [name for name in before if name not in after]
        counts.update((name, "is new") for name in added)
        counts.update((name, "is gone") for name in gone)
        renamed.update((new, old) for new in added for old in gone if _is_alike(before[old], after[new]))
        for name in (name for name in after if name in before and after[name] != before[name]):
            is_alike = _is_alike(before[name], after[name])
            counts[name, "has the same values, written differently" if is_alike else "has other values"] += 1
        if before == after and list(before) != list(after):
            counts[ANOTHER_ORDER, "are in another order"] += 1
    for (new, old), num in renamed.most_common():
        if 2 * num > counts[new, "is new"] > 0 and 2 * num > counts[old, "is gone"] > 0:
            del counts[new, "is new"], counts[old, "is gone"]
            counts[new, f"was called {old}"] = num
    changes: dict[str, tuple[str, int]] = {}
    for (name, what), num in sorted(counts.items(), key=lambda change: (-change[1], change[0])):
        changes[name] = (changes[name][0], changes[name][1] + num) if name in changes else (what, num)
    return changes


def changed_in_histories(
    pairs: Iterable[tuple[str | None, str | None]], separator: str, texts_of: Callable[[set[str]], ItemTexts]
) -> dict[str, tuple[str, int]]:
    """Like `changed_columns`, for the columns of items, from pairs of histories in plans; titles identify the items.

    `separator` is between the attributes of an item; `texts_of` is tonight's `SideQuestions.item_texts`.
    """
    changed: list[dict[str, str]] = []  # for each pair the earlier text, by title, of items that are shown differently
    for histories in pairs:
        before, after = ({title: shown or "" for title, shown, _ in json.loads(text or "[]")} for text in histories)
        changed.append({title: before[title] for title in after if before.get(title, after[title]) != after[title]})
    texts, counts = texts_of({title for shown_before in changed for title in shown_before}), Counter()
    for shown_before in changed:
        columns = set()
        for title, shown in shown_before.items():
            old = f"{separator}{shown}{separator}"
            new = {name for name, text in texts.get(title, {}).items() if f"{separator}{text}{separator}" not in old}
            columns |= new or {ITEM_ATTRIBUTES}
        counts.update(columns)
    became = {ITEM_ATTRIBUTES: "are gone from histories, or are in another order there"}
    return {name: (became.get(name, "is shown differently in histories"), num) for name, num in counts.most_common()}


def _is_alike(before: str, after: str) -> bool:
    """Whether two texts are the same number, truth value or list, or differ only in case."""
    first, second = before.casefold(), after.casefold()
    if _SAME_WORDS.get(first, first) == _SAME_WORDS.get(second, second):
        return True
    try:
        return Decimal(first) == Decimal(second)
    except InvalidOperation:
        between = r"\s*[>,|;]\s*"
        return sorted(re.split(between, first)) == sorted(re.split(between, second))
