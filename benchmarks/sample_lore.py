"""Read the themes that titles and sign-up statements of the sample world imply by their words."""

from dataclasses import dataclass

from laserbatch.pipeline.sample.lore import THEMES

_NOUN_THEME = {noun: index for index, theme in enumerate(THEMES) for noun in theme.nouns}
_ADJECTIVE_THEME = {word: index for index, theme in enumerate(THEMES) for word in theme.adjectives}
_CUE_THEME = {cue: index for index, theme in enumerate(THEMES) for cue in theme.cues}


@dataclass(frozen=True)
class TitleThemes:
    """The themes that a title's words imply: indices into `THEMES`."""

    main: int
    undertone: int


def title_themes(title: str) -> TitleThemes:
    """Read the lore in a title of the sample world: the noun gives the main theme, the adjective the undertone."""
    words = title.split()
    main = next(_NOUN_THEME[word] for word in words if word in _NOUN_THEME)
    undertone = next(_ADJECTIVE_THEME[word] for word in words if word in _ADJECTIVE_THEME)
    return TitleThemes(main, undertone)


def about_themes(about: str) -> tuple[int, ...]:
    """The themes that a sign-up statement hints at, in the order of the hints."""
    about = about.lower()  # a sentence begins with a capital
    cues = sorted((about.find(cue.lower()), theme) for cue, theme in _CUE_THEME.items() if cue.lower() in about)
    return tuple(theme for _, theme in cues)
