"""Words of the sample world, read from `lore.yaml`, and what its titles and sign-up statements imply.

Words carry a meaning, the *lore*: each word of a title belongs to one theme, and no column of the tables says which.
`world.py` draws from the lists, and the texts that the sample model learns are written with them.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

_LORE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Theme:
    """One hidden theme."""

    name: str  # what texts call it; never appears in a table
    nouns: list[str]  # title words, each belonging to this theme alone; adjectives too
    adjectives: list[str]
    images: list[str]  # phrases by which texts describe it
    feeling: str  # what its listeners look for
    cues: list[str]  # what a listener who likes it says at sign-up


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
ABOUT: dict[str, list[str]] = _LORE["about"]  # patterns of a sign-up statement, by what they tell

_NOUN_THEME = {noun: index for index, theme in enumerate(THEMES) for noun in theme.nouns}
_ADJECTIVE_THEME = {word: index for index, theme in enumerate(THEMES) for word in theme.adjectives}
_CUE_THEME = {cue: index for index, theme in enumerate(THEMES) for cue in theme.cues}


@dataclass(frozen=True)
class TitleThemes:
    """What a title's words imply: indices into `THEMES`, None where no word is known."""

    main: int | None
    undertone: int | None


def title_themes(title: str) -> TitleThemes:
    """Read the lore in a title: the noun gives the main theme, the adjective the undertone."""
    words = title.split()
    main = next((_NOUN_THEME[word] for word in words if word in _NOUN_THEME), None)
    undertone = next((_ADJECTIVE_THEME[word] for word in words if word in _ADJECTIVE_THEME), None)
    return TitleThemes(main, undertone)


def about_themes(about: str) -> tuple[int, ...]:
    """Themes that a sign-up statement hints at, in the order in which it does."""
    about = about.lower()  # a sentence begins with a capital
    found = sorted((about.find(cue.lower()), theme) for cue, theme in _CUE_THEME.items() if cue.lower() in about)
    return tuple(theme for _, theme in found)
