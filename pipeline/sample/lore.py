"""Words of the sample world, read from `lore.yaml`.

Words carry a meaning, the *lore*: each word of a title belongs to one theme, and no column of the tables says which.
`world.py` draws from the lists, and the texts that the sample model learns are written with them.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

_LORE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Theme:
    name: str  # its name in texts; never appears in a table
    nouns: list[str]  # title words, each belonging to this theme alone; adjectives too
    adjectives: list[str]
    images: list[str]  # phrases by which texts describe it
    feeling: str  # the feeling that its listeners look for
    cues: list[str]  # statements at sign-up of a listener who likes it


THEMES = tuple(Theme(**theme) for theme in _LORE["themes"])
CATEGORY_PATHS = tuple(
    (top, middle, leaf)
    for top, middles in _LORE["categories"].items()
    for middle, leaves in middles.items()
    for leaf in leaves
)
TOP_CATEGORIES: tuple[str, ...] = tuple(_LORE["categories"])
MOODS, ERAS, REGIONS, AGE_BANDS = (tuple(_LORE[name]) for name in ("moods", "eras", "regions", "age_bands"))
PLACES, FIRST_NAMES, LAST_NAMES = (tuple(_LORE[name]) for name in ("places", "first_names", "last_names"))
TITLE_PATTERNS: tuple[str, ...] = tuple(_LORE["title_patterns"])
ABOUT: dict[str, list[str]] = _LORE["about"]  # patterns of a sign-up statement, by topic
