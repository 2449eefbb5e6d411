"""What a leaf of the attribute tree holds, in words: "(Mystery or Romance) and era=1950s and pages 120..".

Reads LightGBM's own description of a tree. A split sends what is not among its values, the unknown too, to the right.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_NAMED = 4  # values of a feature that are written out


@dataclass(frozen=True)
class Allowed:
    """What a leaf lets through of one feature: some of its numbered values, and perhaps the unknown."""

    values: frozenset[int]
    unknown: bool


def leaf_rules(tree: Mapping, names: Sequence[Sequence[str]], num_leaves: int) -> tuple[str, ...]:
    """One sentence a leaf, in the order of their numbers.

    Parameters
    ----------
    tree : mapping
        A node of LightGBM's `dump_model`, the root.
    names : sequence of sequences of str
        For each feature the names of its values 0, 1, ..., then that of the unknown, which is lower than all.
    num_leaves : int

    Returns
    -------
    tuple of str
        "everything" for a leaf that no split leads to.
    """
    rules = ["everything"] * num_leaves
    for leaf, allowed in _leaves(tree, {}, names):
        parts = [_words(names[feature], allowed[feature]) for feature in sorted(allowed)]
        rules[leaf] = " and ".join(parts) or "everything"
    return tuple(rules)


def _leaves(
    node: Mapping, allowed: dict[int, Allowed], names: Sequence[Sequence[str]]
) -> Iterator[tuple[int, dict[int, Allowed]]]:
    if "split_feature" not in node:
        yield node.get("leaf_index", 0), allowed
        return
    feature = node["split_feature"]
    here = allowed.get(feature, Allowed(frozenset(range(len(names[feature]) - 1)), True))
    is_category = node["decision_type"] == "=="
    if is_category:
        chosen = frozenset(int(code) for code in node["threshold"].split("||"))
    else:
        chosen = frozenset(code for code in here.values if code <= node["threshold"])
    left = Allowed(here.values & chosen, here.unknown and not is_category)
    right = Allowed(here.values - chosen, here.unknown and is_category)
    yield from _leaves(node["left_child"], allowed | {feature: left}, names)
    yield from _leaves(node["right_child"], allowed | {feature: right}, names)


def _words(names: Sequence[str], allowed: Allowed) -> str:
    *values, unknown = names
    if allowed.unknown and len(allowed.values) > len(values) / 2:
        return f"not {_any_of([name for code, name in enumerate(values) if code not in allowed.values])}"
    return _any_of([values[code] for code in sorted(allowed.values)] + [unknown] * allowed.unknown)


def _any_of(names: Sequence[str]) -> str:
    shown = list(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        shown.append(f"{len(names) - MAX_NAMED} more")
    return shown[0] if len(shown) == 1 else f"({' or '.join(shown)})"
