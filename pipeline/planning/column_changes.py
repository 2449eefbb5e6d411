"""Which columns changed for most entities of a side: their last prompts, as runs planned them, beside tonight's.

Of many entities a sample is compared. What a prompt showed is in the plan of the run that wrote its text.
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

MAX_COMPARED = 1000  # entities a side
ANOTHER_ORDER = "all attributes"
_SAME_WORDS = {"yes": "true", "no": "false", "1": "true", "0": "false"}
ITEM_ATTRIBUTES = "attributes of items"
ItemTexts = Mapping[str, Mapping[str, str]]
Pairs = Sequence[tuple[Mapping[str, str], Mapping[str, str]]]  # of an entity, its attributes by name: before, now


def shown_in_plan(folder: Path, side: Side, ids: Collection[str]) -> dict[str, dict[str, str | None]]:
    """By entity, its id as text: fingerprint, lines of attributes and history as a run's plan has them.

    Entities are missing where the run, or its plan, is gone.
    """
    shown = {}
    for batch in iter_parquet(folder / "plan" / side, ["entity_id", "fingerprint", "attributes", "history"]):
        keys = batch["entity_id"].cast(pa.string())
        is_requested = pc.is_in(keys, value_set=pa.array(ids, pa.string()))
        shown |= dict(zip(keys.filter(is_requested).to_pylist(), batch.filter(is_requested).to_pylist(), strict=True))
    return shown


def attributes_of(lines: str | None, columns: AttributeLines) -> dict[str, str]:
    """Attributes by column, from the lines of a prompt; none where a line does not name its column."""
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
    """What became of each column that changed, and for how many pairs; the most frequent first.

    A column that is new where another one of the same values is gone was renamed. Where the same attributes stand in
    another order, this is said of `ANOTHER_ORDER`.
    """
    counts: Counter[tuple[str, str]] = Counter()
    renamed: Counter[tuple[str, str]] = Counter()
    for before, after in pairs:
        added, gone = [name for name in after if name not in before], [name for name in before if name not in after]
        counts.update((name, "is new") for name in added)
        counts.update((name, "is gone") for name in gone)
        renamed.update((new, old) for new in added for old in gone if _is_alike(before[old], after[new]))
        changed = [name for name in after if name in before and after[name] != before[name]]
        for name in changed:
            is_alike = _is_alike(before[name], after[name])
            counts[name, "has the same values, written differently" if is_alike else "has other values"] += 1
        if before == after and list(before) != list(after):
            counts[ANOTHER_ORDER, "stand in another order"] += 1
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
    """As `changed_columns`, of columns of items that pairs of histories, as plans have them, show of the same titles.

    `separator` stands between the attributes of an item; `texts_of` is `SideQuestions.item_texts` of tonight.
    """
    changed: list[dict[str, str]] = []  # of each pair: what was shown, by title, of items that are shown differently
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
    became = {ITEM_ATTRIBUTES: "are gone from histories, or stand in another order there"}
    return {name: (became.get(name, "is shown differently in histories"), num) for name, num in counts.most_common()}


def _is_alike(before: str, after: str) -> bool:
    """Whether two texts are of one number, truth value or list, or differ in case alone."""
    first, second = before.casefold(), after.casefold()
    if _SAME_WORDS.get(first, first) == _SAME_WORDS.get(second, second):
        return True
    try:
        return Decimal(first) == Decimal(second)
    except InvalidOperation:
        between = r"\s*[>,|;]\s*"
        return sorted(re.split(between, first)) == sorted(re.split(between, second))
