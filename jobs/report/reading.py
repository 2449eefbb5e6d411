"""Reading a manifest that may lack anything: sides, decoding figures, labels. Draws nothing.

A run that failed early, a first night, an empty side: each leaves parts of the manifest out. What is missing reads as
None or as empty, and the sections say so in words.
"""

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laserbatch.jobs.formatting import finite, ratio, whole

SIDE_LABELS = {"user": "Users", "item": "Items"}


@dataclass(frozen=True)
class Decoding:
    """What a decoding pass counted, over one side or several.

    `num_accepted` counts accepted draft tokens; `wall_s` is seconds of writing, as the manifest counts them. `lengths`
    counts texts by their tokens, or by the middle of a few numbers of tokens. `num_rewritten` texts had run on and were
    written again.
    """

    num_texts: int
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_rewritten: int
    wall_s: float
    drafted_by_source: Mapping[str, int]
    accepted_by_source: Mapping[str, int]
    accepted_by_depth: Sequence[int]
    finish_reasons: Mapping[str, int]
    lengths: Mapping[float, int]

    @property
    def acceptance_length(self) -> float | None:
        """Accepted draft tokens per verification step, the bonus token not counted."""
        return ratio(self.num_accepted, self.num_steps)

    @property
    def tokens_per_step(self) -> float | None:
        """Accepted draft tokens per step and the bonus token."""
        accepted = self.acceptance_length
        return None if accepted is None else accepted + 1.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens written per second."""
        return ratio(self.num_tokens, self.wall_s)

    @property
    def drafted_per_step(self) -> float | None:
        """Draft tokens offered per step."""
        return ratio(self.num_drafted, self.num_steps)

    @property
    def target_tokens(self) -> int:
        """Tokens that no draft supplied."""
        return max(0, self.num_tokens - sum(n for name, n in self.accepted_by_source.items() if name != "target"))


def decoding_of(stats: object) -> Decoding | None:
    """The figures of a `stats` object of a manifest; None when it is missing or counts no text."""
    stats = mapping(stats)
    if whole(stats.get("num_texts")) == 0:
        return None
    return Decoding(
        **{
            name: whole(stats.get(name))
            for name in ("num_texts", "num_tokens", "num_steps", "num_drafted", "num_accepted", "num_rewritten")
        },
        wall_s=finite(stats.get("wall_s")) or 0.0,
        **{name: counts(stats.get(name)) for name in ("drafted_by_source", "accepted_by_source", "finish_reasons")},
        accepted_by_depth=[whole(value) for value in sequence(stats.get("accepted_by_depth"))],
        lengths=_length_counts(stats.get("lengths")),
    )


def total(parts: Iterable[Decoding | None]) -> Decoding | None:
    """The sum of several passes; None when there is none."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    sums = {
        name: sum(getattr(part, name) for part in parts) for name in ("num_texts", "num_tokens", "num_steps", "wall_s")
    }
    sums |= {
        name: sum(getattr(part, name) for part in parts) for name in ("num_drafted", "num_accepted", "num_rewritten")
    }
    return Decoding(
        **sums,
        **{
            name: _added([getattr(part, name) for part in parts])
            for name in ("drafted_by_source", "accepted_by_source", "finish_reasons")
        },
        accepted_by_depth=_added_by_depth([part.accepted_by_depth for part in parts]),
        lengths=_added([part.lengths for part in parts]),
    )


@dataclass(frozen=True)
class SideView:
    """One side of a night: its own part of the manifest, and what it is compared with.

    `plain` is of the entities that were written about tonight, where it was counted apart: those that are carried over
    differ in the length of their prompts.
    """

    name: str
    label: str
    data: Mapping
    tonight: Decoding | None
    previous_night: Decoding | None
    plain: Decoding | None

    @property
    def num_entities(self) -> int:
        return whole(self.data.get("num_entities"))

    @property
    def num_generated(self) -> int:
        return whole(self.data.get("num_generated"))

    @property
    def num_carried_over(self) -> int:
        return whole(self.data.get("num_carried_over"))

    @property
    def num_quarantined(self) -> int:
        return whole(self.data.get("num_quarantined"))


def sides_of(manifest: Mapping) -> list[SideView]:
    """The sides of a run, users first."""
    sides = mapping(manifest.get("sides"))
    before = mapping(mapping(manifest.get("previous_night")).get("sides"))
    plain = mapping(manifest.get("plain"))
    ordered = [name for name in SIDE_LABELS if name in sides] + sorted(set(sides) - set(SIDE_LABELS))
    return [
        SideView(
            name=name,
            label=side_label(name),
            data=mapping(sides[name]),
            tonight=decoding_of(mapping(sides[name]).get("stats")),
            previous_night=decoding_of(mapping(before.get(name)).get("stats")),
            plain=_same_texts(mapping(plain.get(name))),
        )
        for name in ordered
    ]


def _same_texts(plain: Mapping) -> Decoding | None:
    return decoding_of(plain.get("stats_of_tonight")) or decoding_of(plain.get("stats"))


def side_label(name: str) -> str:
    """`Users`, `Items`."""
    return SIDE_LABELS.get(name, name.capitalize())


def mapping(value: object) -> Mapping:
    """The value if it is an object of JSON, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def sequence(value: object) -> Sequence:
    """The value if it is an array of JSON, else an empty one."""
    return value if isinstance(value, list | tuple) else []


def counts(value: object) -> dict[str, int]:
    """A JSON object of counts."""
    return {str(name): whole(number) for name, number in mapping(value).items()}


def long_date(text: object) -> str:
    """`2025-03-01` as `1 March 2025`; anything else as it is."""
    try:
        date = datetime.date.fromisoformat(str(text))
    except ValueError:
        return "an unknown date" if text is None else str(text)
    months = "January February March April May June July August September October November December"
    return f"{date.day} {months.split()[date.month - 1]} {date.year}"


def _length_counts(value: object) -> dict[float, int]:
    if not isinstance(value, Mapping):
        return Counter(whole(length) for length in sequence(value))  # as earlier versions kept them: one a text
    width, counted = whole(value.get("bin_width")), enumerate(sequence(value.get("counts")))
    return {number * width + (width - 1) / 2: whole(texts) for number, texts in counted if whole(texts)}


def _added(parts: list[Mapping[Any, int]]) -> dict[Any, int]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _added_by_depth(parts: list[Sequence[int]]) -> list[int]:
    longest = max(map(len, parts), default=0)
    return [sum(part[depth] for part in parts if depth < len(part)) for depth in range(longest)]
