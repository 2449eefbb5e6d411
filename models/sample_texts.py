"""The texts that the sample model learns to write: knowledge of the sample world, by grammar.

What follows from a prompt (counts over the history, the lore in titles and sign-up statements) is put into words, never
the latent tastes that made the world. Which of several phrasings is used depends on the person's age band or the item's
mood most of the time, and on chance otherwise: predictable, not constant.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from laserbatch.pipeline.knowledge.entities import Entity, HistoryEvent
from laserbatch.pipeline.sample.lore import (
    ABOUT_GENEROUS,
    ABOUT_STRICT,
    AGE_BANDS,
    ERAS,
    MOODS,
    THEMES,
    TOP_CATEGORIES,
    about_themes,
    title_themes,
)

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
    told_tops = [top for top in TOP_CATEGORIES if top.lower() in about.lower()]
    categories = _ranked(Counter(tops), tops)
    categories += [top for top in told_tops if top not in categories]
    middles = [
        e.attributes["category"][1] for e in newest if categories and e.attributes["category"][0] == categories[0]
    ]
    middle = _ranked(Counter(middles), middles)[:1]

    told_themes = about_themes(about)
    liked_themes = [title_themes(event.title).main for event in liked]
    theme_counts = Counter(liked_themes)
    for weight, theme in zip((3, 2), told_themes, strict=False):
        theme_counts[theme] += weight
    poor_themes = [title_themes(event.title).main for event in poor]
    disliked = [theme for theme in _ranked(Counter(poor_themes), poor_themes) if theme not in told_themes][:1]

    def told_and_liked(column: str, words: tuple[str, ...]) -> list[str]:
        values = [str(event.attributes[column]) for event in liked]
        counts = Counter(values)
        for word in words:
            if word in about.lower():
                counts[word] += 3
        return _ranked(counts, values)

    creators = [str(event.attributes["creator"]) for event in liked]
    creator_counts = Counter(creators)
    creator = next((name for name in _ranked(creator_counts, creators) if creator_counts[name] > 1), None)
    strict = any(phrase.lower() in about.lower() for phrase in ABOUT_STRICT)
    generous = any(phrase.lower() in about.lower() for phrase in ABOUT_GENEROUS)
    return Evidence(
        categories=categories,
        middle=middle[0] if middle else None,
        themes=_ranked(theme_counts, liked_themes),
        moods=told_and_liked("mood", MOODS),
        eras=told_and_liked("era", ERAS),
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

    def pick(self, *options: str, salt: int = 0) -> str:
        if self._rng.random() < SHARE_USUAL_PHRASE:
            return options[(self._style + salt) % len(options)]
        return options[int(self._rng.integers(len(options)))]


def write_user_text(entity: Entity, history: tuple[HistoryEvent, ...], rng: np.random.Generator) -> str:
    """Preferences by numbered aspects, as the KAR user template asks for them."""
    seen = read_evidence(entity, history)
    age = entity.attributes.get("age_band")
    say = _Phrases(AGE_BANDS.index(age) if age in AGE_BANDS else 0, rng)
    lines = [
        f"Genre: {_genre(seen, say)}",
        f"Theme: {_theme(seen, say)}",
        f"Mood: {_mood(seen, say)}",
        f"Era: {_era(seen, say)}",
        f"Creators: {_creators(seen, say)}",
        f"Rating habit: {_habit(seen, say)}",
        f"Dislikes: {_dislikes(seen, say)}",
        f"Summary: {_summary(seen, say)}",
    ]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _genre(seen: Evidence, say: _Phrases) -> str:
    if not seen.categories:
        return say.pick("no genre stands out so far.", "still open, nothing rated and nothing said.")
    first = seen.categories[0]
    text = say.pick(
        f"mostly {first}", f"{first} above all", f"listens to {first} more than anything", f"a clear lead for {first}"
    )
    if seen.middle:
        text += say.pick(
            f", {seen.middle} in particular",
            f", often of the {seen.middle} kind",
            f", with {seen.middle} ahead",
            salt=1,
        )
    if len(seen.categories) > 1:
        second = seen.categories[1]
        text += say.pick(f"; then {second}.", f", followed by {second}.", f", and {second} at times.")
    else:
        text += "."
    return text


def _images(theme: int, say: _Phrases, salt: int = 0) -> str:
    images = THEMES[theme].images
    return say.pick(
        f"{images[0]} and {images[1]}",
        f"{images[2]} and {images[0]}",
        f"{images[1]} and {images[3]}",
        f"{images[3]} and {images[2]}",
        salt=salt,
    )


def _theme(seen: Evidence, say: _Phrases) -> str:
    if not seen.themes:
        return say.pick("no theme can be told yet.", "too early to name a theme.")
    main = seen.themes[0]
    text = (
        say.pick("drawn to", "most taken by", "keeps coming back to", "responds best to")
        + f" {THEMES[main].name}: {_images(main, say)}"
    )
    if len(seen.themes) > 1:
        other = THEMES[seen.themes[1]]
        text += say.pick(
            f". Also {other.name}, {other.images[0]}",
            f"; a second interest is {other.name} with {other.images[1]}",
            f". Next comes {other.name}, {other.images[2]}",
        )
    return text + "."


def _mood(seen: Evidence, say: _Phrases) -> str:
    if not seen.moods:
        return say.pick("no preference shown.", "not yet clear.")
    text = say.pick(
        f"prefers {seen.moods[0]} stories", f"{seen.moods[0]} in tone", f"a {seen.moods[0]} voice works best"
    )
    if len(seen.moods) > 1:
        text += say.pick(f", sometimes {seen.moods[1]}", f" and now and then {seen.moods[1]}", salt=1)
    return text + "."


def _era(seen: Evidence, say: _Phrases) -> str:
    if not seen.eras:
        return say.pick("any era.", "no era is preferred.")
    return say.pick(f"the {seen.eras[0]} most of all.", f"leans to the {seen.eras[0]}.", f"{seen.eras[0]} productions.")


def _creators(seen: Evidence, say: _Phrases) -> str:
    if seen.creator:
        return say.pick(
            f"returns to {seen.creator}.",
            f"{seen.creator} is a favourite.",
            f"rates {seen.creator} highly more than once.",
        )
    if seen.recent_like:
        name = seen.recent_like.attributes["creator"]
        return say.pick(f"no favourite; {name} was liked last.", f"follows no one name, though {name} pleased lately.")
    return say.pick("none known.", "no creator is named.")


def _habit(seen: Evidence, say: _Phrases) -> str:
    if seen.mean_rating is None or seen.num_events < 4:
        if seen.strictness > 0:
            return say.pick("few ratings; says to be hard to please.", "strict by their own account.")
        if seen.strictness < 0:
            return say.pick("few ratings; says to enjoy most things.", "generous by their own account.")
        return say.pick("too few ratings to tell.", "hardly any ratings yet.")
    if seen.mean_rating < 2.9:
        return say.pick("strict, high marks are rare.", "hard to please, most titles get low marks.")
    if seen.mean_rating > 3.7:
        return say.pick("generous, most titles get high marks.", "easily pleased, low marks are rare.")
    return say.pick("balanced, uses the whole scale.", "even-handed, neither strict nor generous.")


def _dislikes(seen: Evidence, say: _Phrases) -> str:
    if seen.disliked_theme is None:
        return say.pick("nothing in particular.", "no clear dislike.", "none seen.")
    theme = THEMES[seen.disliked_theme]
    return say.pick(
        f"low marks for {theme.name}, as {seen.disliked_title}.",
        f"little patience for {theme.name} and {theme.images[0]}.",
        f"{theme.name}; {seen.disliked_title} disappointed.",
    )


def _summary(seen: Evidence, say: _Phrases) -> str:
    mood = f"{seen.moods[0]} " if seen.moods else ""
    category = seen.categories[0] if seen.categories else "title"
    theme = f" about {THEMES[seen.themes[0]].name}, for its {THEMES[seen.themes[0]].feeling}" if seen.themes else ""
    text = say.pick(
        f"would enjoy a {mood}{category} story{theme}",
        f"a {mood}{category} piece{theme} is a safe choice",
        f"recommend {mood}{category} titles{theme}",
    )
    if seen.recent_like:
        text += say.pick(
            f", like {seen.recent_like.title}",
            f", close to {seen.recent_like.title}",
            f", in the manner of {seen.recent_like.title}",
        )
    return text + "."


def write_item_text(entity: Entity, rng: np.random.Generator) -> str:
    """A description, as the KAR item template asks for it."""
    about = entity.attributes
    top, middle, leaf = about["category"]
    mood, creator, era = about["mood"], about["creator"], about["era"]
    lore = title_themes(str(about["title"]))
    main, undertone = THEMES[lore.main], THEMES[lore.undertone]
    say = _Phrases(MOODS.index(mood), rng)
    text = say.pick(
        f"A {mood} {top} of the {middle} kind ({leaf}), about {main.name}: {_images(lore.main, say)}.",
        f"{main.name[0].upper() + main.name[1:]} is at the heart of this {mood} {top} from the {middle} shelf ({leaf}),"
        f" with {_images(lore.main, say)}.",
        f"This {mood} piece belongs to {top}, {middle}, {leaf}; its theme is {main.name}: {_images(lore.main, say)}.",
    )
    if lore.undertone != lore.main:
        text += say.pick(
            f" An undertone of {undertone.name} brings {undertone.images[0]}.",
            f" There is something of {undertone.name} in it, {undertone.images[1]}.",
            salt=1,
        )
    text += say.pick(
        f" Made by {creator} in the {era}.",
        f" {creator} wrote it in the {era}.",
        f" A work of the {era} by {creator}.",
        salt=2,
    )
    return text + say.pick(
        f" For those who look for {main.feeling} and {top}.",
        f" It suits listeners of {top} who want {main.feeling}.",
        f" Friends of {main.name} will value its {main.feeling}.",
    )
