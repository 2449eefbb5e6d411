"""Items of the sample world, and random draws of them.

Besides title, category path, creator, era and mood, an item has hidden properties behind its interactions: themes,
quality and popularity.
"""

from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.sample import lore
from laserbatch.pipeline.sample.lore import FIRST_NAMES, LAST_NAMES, PLACES, THEMES, TITLE_PATTERNS

SHARE_LATE_ITEMS = 0.06  # share of items that are added during the period
SHARE_NEW_ITEMS = 0.04  # share of items that are added on the last day
SHARE_PLAIN_TITLES = 0.6  # share of items with main theme and undertone alike


@dataclass(frozen=True)
class Catalogue:
    """The items, each field a list or an array over them; indices point into the lists of `lore.py`."""

    titles: list[str]
    category: np.ndarray  # int, into CATEGORY_PATHS
    top: np.ndarray  # int, into TOP_CATEGORIES
    theme: np.ndarray  # int, into THEMES; hidden, shown by the title's noun
    undertone: np.ndarray  # int, into THEMES; hidden, shown by the title's adjective
    mood: np.ndarray
    era: np.ndarray
    creators: list[str]
    quality: np.ndarray  # float64, hidden
    popularity: np.ndarray  # float64, hidden, positive
    created_day: np.ndarray  # int, may be negative: before the period


def make_catalogue(num_items: int, days: int, rng: np.random.Generator) -> Catalogue:
    """Draw a catalogue of `num_items` items, some of which are added on the last of `days` days."""
    num_creators = int(np.clip(num_items // 8, 8, len(FIRST_NAMES) * len(LAST_NAMES)))
    names = rng.permutation(len(FIRST_NAMES) * len(LAST_NAMES))[:num_creators]
    creator_category = rng.integers(len(lore.CATEGORY_PATHS), size=num_creators)
    creator_theme = rng.integers(len(THEMES), size=num_creators)

    creator = rng.integers(num_creators, size=num_items)
    category = _mostly(rng, 0.5, creator_category[creator], len(lore.CATEGORY_PATHS))
    theme = _mostly(rng, 0.4, creator_theme[creator], len(THEMES))
    undertone = _mostly(rng, SHARE_PLAIN_TITLES, theme, len(THEMES))
    created_day = rng.integers(-300, 1, size=num_items)
    order = rng.permutation(num_items)
    num_new = max(2, round(num_items * SHARE_NEW_ITEMS))
    num_late = round(num_items * SHARE_LATE_ITEMS)
    created_day[order[:num_new]] = days - 1
    created_day[order[num_new : num_new + num_late]] = rng.integers(0, max(1, days - 1), size=num_late)
    return Catalogue(
        titles=_titles(theme, undertone, rng),
        category=category,
        top=np.array([lore.TOP_CATEGORIES.index(path[0]) for path in lore.CATEGORY_PATHS])[category],
        theme=theme,
        undertone=undertone,
        mood=rng.integers(len(lore.MOODS), size=num_items),
        era=rng.integers(len(lore.ERAS), size=num_items),
        creators=[
            f"{FIRST_NAMES[name // len(LAST_NAMES)]} {LAST_NAMES[name % len(LAST_NAMES)]}" for name in names[creator]
        ],
        quality=rng.normal(0.0, 0.3, size=num_items),
        popularity=rng.lognormal(0.0, 0.7, size=num_items),
        created_day=created_day,
    )


def _mostly(rng: np.random.Generator, share: float, usual: np.ndarray, num_values: int) -> np.ndarray:
    """`usual` for about `share` of the entries, a random value for each of the others."""
    other = rng.integers(num_values, size=len(usual))
    return np.where(rng.random(len(usual)) < share, usual, other)


def _titles(theme: np.ndarray, undertone: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Compose titles; a title that is already taken is drawn anew, a few times at most."""
    taken: set[str] = set()
    titles = []
    for main, under in zip(theme.tolist(), undertone.tolist(), strict=True):
        nouns, adjectives = THEMES[main].nouns, THEMES[under].adjectives
        title = ""
        for _ in range(8):
            title = TITLE_PATTERNS[rng.integers(len(TITLE_PATTERNS))].format(
                n=nouns[rng.integers(len(nouns))],
                a=adjectives[rng.integers(len(adjectives))],
                p=PLACES[rng.integers(len(PLACES))],
            )
            if title not in taken:
                break
        taken.add(title)
        titles.append(title)
    return titles


class WeightedGroups:
    """Draws one item from each of many groups of items, 0 to `num_groups - 1`, in proportion to weight.

    `group_of`, int[num_items], is below 0 for items in no group; a draw from an empty group falls back to all items.
    """

    def __init__(self, group_of: np.ndarray, weights: np.ndarray, num_groups: int) -> None:
        grouped = np.flatnonzero(group_of >= 0)
        grouped = grouped[np.argsort(group_of[grouped], kind="stable")]
        self._order = np.concatenate([grouped, np.arange(len(weights))])  # the last "group" is everything
        self._total = np.concatenate([[0.0], np.cumsum(weights[self._order])])
        starts = np.searchsorted(group_of[grouped], np.arange(num_groups + 1))
        self._starts = np.append(starts[:-1], len(grouped))
        self._ends = np.append(starts[1:], len(self._order))
        empty = self._starts == self._ends
        self._starts[empty], self._ends[empty] = len(grouped), len(self._order)

    def draw(self, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw one item for each entry of `groups` (int[n]; `num_groups` means any item)."""
        low, high = self._total[self._starts[groups]], self._total[self._ends[groups]]
        point = low + rng.random(len(groups)) * (high - low)
        place = np.searchsorted(self._total, point, side="right") - 1
        return self._order[np.clip(place, self._starts[groups], self._ends[groups] - 1)]
