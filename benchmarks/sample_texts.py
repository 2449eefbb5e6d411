"""The texts that the sample model learns to write: knowledge of the sample world, by grammar.

What follows from a prompt (counts over the history, the lore in titles and sign-up statements) is put into words, those
of `sample_phrases.yaml`, never the latent tastes that made the world. Which of several phrasings is used depends on the
person's age band or the item's mood most of the time, and on chance otherwise: predictable, not constant.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from entities import Entity, HistoryEvent
from sample_lore import about_themes, title_themes

from laserbatch.pipeline.sample.lore import ABOUT, AGE_BANDS, ERAS, MOODS, THEMES, TOP_CATEGORIES

PHRASES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("sample_phrases.yaml").read_text("utf-8"))
SHARE_USUAL_PHRASE = 0.9
POSITIVE_RATING = 4
POOR_RATING = 2


@dataclass(frozen=True)
class Evidence:
    """What a prompt lets one conclude about a person; None or empty where it says nothing."""

    categories: list[str]  # most frequent first
    middle: str | None  # second level most frequent within the first category
    themes: list[int]
    moods: list[str]
    eras: list[str]
    creator: str | None  # liked at least twice
    recent_like: HistoryEvent | None
    disliked_theme: int | None
    disliked_title: str | None
    mean_rating: float | None
    strictness: int  # from the statement: -1 generous, 1 strict, 0 not said
    num_events: int


def _ranked(counts: Counter, newest_first: list) -> list:
    """Keys by count, ties to the one seen last."""
    place = {key: -index for index, key in reversed(list(enumerate(newest_first)))}
    return sorted(counts, key=lambda key: (counts[key], place.get(key, -len(newest_first))), reverse=True)


def read_evidence(entity: Entity, history: tuple[HistoryEvent, ...]) -> Evidence:
    """Conclude from a user's attributes and the events that the prompt shows."""
    about = str(entity.attributes.get("about", ""))
    newest = list(reversed(history))
    liked = [event for event in newest if event.rating >= POSITIVE_RATING]
    poor = [event for event in newest if event.rating <= POOR_RATING]

    tops = [event.attributes["category"][0] for event in newest]
    described_tops = [top for top in TOP_CATEGORIES if top.lower() in about.lower()]
    categories = _ranked(Counter(tops), tops)
    categories += [top for top in described_tops if top not in categories]
    middles = [
        e.attributes["category"][1] for e in newest if categories and e.attributes["category"][0] == categories[0]
    ]
    middle = _ranked(Counter(middles), middles)[:1]

    described_themes = about_themes(about)
    liked_themes = [title_themes(event.title).main for event in liked]
    theme_counts = Counter(liked_themes)
    for weight, theme in zip((3, 2), described_themes, strict=False):
        theme_counts[theme] += weight
    poor_themes = [title_themes(event.title).main for event in poor]
    disliked = [theme for theme in _ranked(Counter(poor_themes), poor_themes) if theme not in described_themes][:1]

    def described_and_liked(column: str, words: tuple[str, ...]) -> list[str]:
        values = [str(event.attributes[column]) for event in liked]
        counts = Counter(values)
        for word in words:
            if word in about.lower():
                counts[word] += 3
        return _ranked(counts, values)

    creators = [str(event.attributes["creator"]) for event in liked]
    creator_counts = Counter(creators)
    creator = next((name for name in _ranked(creator_counts, creators) if creator_counts[name] > 1), None)
    strict = any(phrase.lower() in about.lower() for phrase in ABOUT["strict"])
    generous = any(phrase.lower() in about.lower() for phrase in ABOUT["generous"])
    return Evidence(
        categories=categories,
        middle=middle[0] if middle else None,
        themes=_ranked(theme_counts, liked_themes),
        moods=described_and_liked("mood", MOODS),
        eras=described_and_liked("era", ERAS),
        creator=creator,
        recent_like=liked[0] if liked else None,
        disliked_theme=disliked[0] if disliked else None,
        disliked_title=next((event.title for event in poor if title_themes(event.title).main in disliked), None),
        mean_rating=float(np.mean([event.rating for event in history])) if history else None,
        strictness=int(strict) - int(generous),
        num_events=len(history),
    )


class _Phrases:
    """Picks among phrasings: the style's usual one, now and then another."""

    def __init__(self, style: int, rng: np.random.Generator) -> None:
        self._style = style
        self._rng = rng

    def __call__(self, name: str, *values: object, salt: int = 0, **named: object) -> str:
        options = PHRASES[name]
        place = (self._style + salt) % len(options)
        if self._rng.random() >= SHARE_USUAL_PHRASE:
            place = int(self._rng.integers(len(options)))
        return options[place].format(*values, **named)


def write_user_text(entity: Entity, history: tuple[HistoryEvent, ...], rng: np.random.Generator) -> str:
    """Preferences by numbered aspects, as the KAR user template asks for them."""
    seen, say = read_evidence(entity, history), _persons_phrases(entity, rng)
    lines = [
        f"Genre: {_genre(seen, say)}",
        f"Theme: {_theme(seen, say)}",
        f"Mood: {_mood(seen, say)}",
        f"Era: {say('era', seen.eras[0]) if seen.eras else say('no_era')}",
        f"Creators: {_creators(seen, say)}",
        f"Rating habit: {say(_habit(seen))}",
        f"Dislikes: {_dislikes(seen, say)}",
        f"Summary: {_summary(seen, say)}",
    ]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def write_user_profile(entity: Entity, history: tuple[HistoryEvent, ...], rng: np.random.Generator) -> str:
    """What a person would enjoy, which names no title, and what that follows from, as RLMRec asks for them."""
    seen, say = read_evidence(entity, history), _persons_phrases(entity, rng)
    summary = [_enjoys(seen, say), _theme(seen, say), _mood(seen, say)]
    summary += [say("era", seen.eras[0])] if seen.eras else []
    reasoning = [_genre(seen, say), say(_habit(seen)), _creators(seen, say)]
    reasoning += [say("last_like", seen.recent_like.title)] if seen.recent_like else []
    return _profile(summary, [*reasoning, _dislikes(seen, say)])


def _persons_phrases(entity: Entity, rng: np.random.Generator) -> _Phrases:
    age = entity.attributes.get("age_band")
    return _Phrases(AGE_BANDS.index(age) if age in AGE_BANDS else 0, rng)


def _profile(summary: list[str], reasoning: list[str]) -> str:
    """JSON of two texts, each of sentences."""
    fields = {"summary": summary, "reasoning": reasoning}
    texts = {name: " ".join(words[0].upper() + words[1:] for words in of) for name, of in fields.items()}
    return json.dumps(texts, ensure_ascii=False)


def _genre(seen: Evidence, say: _Phrases) -> str:
    if not seen.categories:
        return say("no_genre")
    text = say("genre", seen.categories[0])
    if seen.middle:
        text += say("genre_middle", seen.middle, salt=1)
    return text + (say("genre_second", seen.categories[1]) if len(seen.categories) > 1 else ".")


def _theme(seen: Evidence, say: _Phrases) -> str:
    if not seen.themes:
        return say("no_theme")
    main = THEMES[seen.themes[0]]
    text = f"{say('theme')} {main.name}: {say('images', images=main.images)}"
    if len(seen.themes) > 1:
        text += say("theme_second", THEMES[seen.themes[1]])
    return text + "."


def _mood(seen: Evidence, say: _Phrases) -> str:
    if not seen.moods:
        return say("no_mood")
    text = say("mood", seen.moods[0])
    if len(seen.moods) > 1:
        text += say("mood_second", seen.moods[1], salt=1)
    return text + "."


def _creators(seen: Evidence, say: _Phrases) -> str:
    if seen.creator:
        return say("creator", seen.creator)
    if seen.recent_like:
        return say("creator_once", seen.recent_like.attributes["creator"])
    return say("no_creator")


def _habit(seen: Evidence) -> str:
    if seen.mean_rating is None or seen.num_events < 4:
        return {1: "says_strict", -1: "says_generous", 0: "no_habit"}[seen.strictness]
    if seen.mean_rating < 2.9:
        return "strict"
    return "generous" if seen.mean_rating > 3.7 else "balanced"


def _dislikes(seen: Evidence, say: _Phrases) -> str:
    if seen.disliked_theme is None:
        return say("no_dislike")
    return say("dislike", THEMES[seen.disliked_theme], title=seen.disliked_title)


def _summary(seen: Evidence, say: _Phrases) -> str:
    text = _enjoys(seen, say).removesuffix(".")
    if seen.recent_like:
        text += say("summary_like", seen.recent_like.title)
    return text + "."


def _enjoys(seen: Evidence, say: _Phrases) -> str:
    mood = f"{seen.moods[0]} " if seen.moods else ""
    category = seen.categories[0] if seen.categories else "title"
    theme = f" about {THEMES[seen.themes[0]].name}, for its {THEMES[seen.themes[0]].feeling}" if seen.themes else ""
    return say("summary", mood + category, theme) + "."


def write_item_text(entity: Entity, rng: np.random.Generator) -> str:
    """A description, as the KAR item template asks for it."""
    return " ".join(_item_sentences(entity, rng).values())


def write_item_profile(entity: Entity, rng: np.random.Generator) -> str:
    """Who would enjoy an item, and what that follows from, as RLMRec asks for them."""
    says = _item_sentences(entity, rng)
    theme = THEMES[title_themes(str(entity.attributes["title"])).main]
    summary = [says["listeners"], f"It is about {theme.name}.", *([says["undertone"]] if "undertone" in says else [])]
    return _profile(summary, [says["item"], says["creator"]])


def _item_sentences(entity: Entity, rng: np.random.Generator) -> dict[str, str]:
    about = entity.attributes
    top, middle, leaf = about["category"]
    lore = title_themes(str(about["title"]))
    main, undertone = THEMES[lore.main], THEMES[lore.undertone]
    say = _Phrases(MOODS.index(about["mood"]), rng)
    images = [say("images", images=main.images) for _ in PHRASES["item"]]
    capital = main.name[0].upper() + main.name[1:]
    says = {
        "item": say(
            "item", mood=about["mood"], top=top, middle=middle, leaf=leaf, main=main, capital=capital, images=images
        )
    }
    if lore.undertone != lore.main:
        says["undertone"] = say("item_undertone", undertone, salt=1)
    says["creator"] = say("item_creator", creator=about["creator"], era=about["era"], salt=2)
    return says | {"listeners": say("item_listeners", main=main, top=top)}


# of each framework that the sample model learns: what it writes about a user, about an item
WRITERS = {"kar": (write_user_text, write_item_text), "rlmrec": (write_user_profile, write_item_profile)}
