"""The words of some domains for users, items and the factors of a choice, read from `configs/domains.yaml`."""

import re
from collections.abc import Collection, Sequence
from functools import cache

from laserbatch.pipeline.knowledge.templates import CONFIGS, KnowledgeSettings, Words
from laserbatch.pipeline.validation import Strict, read_yaml

MIN_SHARE = 0.5  # share of items whose kinds or titles must match a domain; a column that matches counts as much


class Domain(Strict):
    """The words, factors and paths of a domain, as `KnowledgeSettings` has them."""

    names: str | None = None  # a pattern for names of item files and of their ids; None: no names match
    columns: str | None = None  # a pattern for names of their other columns
    kinds: str | None = None  # a pattern for columns of repeating values, such as genres and categories
    titles: str | None = None  # a pattern for titles
    words: Words
    user_factors: tuple[str, ...]
    item_factors: tuple[str, ...]
    paths: tuple[str, ...] = ()


@cache
def domains() -> dict[str, Domain]:
    """The known domains by name, the more specific ones first."""
    path = CONFIGS / "domains.yaml"
    return {name: Domain.model_validate(raw) for name, raw in read_yaml(path, "domains", "install anew").items()}


def domain_of(
    names: Collection[str], columns: Collection[str] = (), kinds: Sequence[str] = (), titles: Sequence[str] = ()
) -> Domain | None:
    """The domain that matches the names of an item file and its id; otherwise its values; otherwise its other columns.

    `kinds` and `titles` have an entry for each item. None if no domain matches.
    """
    values = {"kinds": kinds, "titles": titles}
    return _named("names", names) or _most_like(values, columns) or _named("columns", columns)


def _named(pattern: str, present: Collection[str]) -> Domain | None:
    for domain in domains().values():
        regex = getattr(domain, pattern)
        if regex and any(re.search(regex, name, re.IGNORECASE) for name in present):
            return domain
    return None


def _most_like(values: dict[str, Sequence[str]], columns: Collection[str]) -> Domain | None:
    """The domain that fits the values of most items; None if it fits less than half of them, or if two fit alike.

    Each column that matches counts as half of the items: books with an author can be of the genres of films.
    """
    shares: list[tuple[float, Domain]] = []
    for domain in domains().values():
        pattern = domain.columns or "(?!)"  # matches nothing
        more = MIN_SHARE * sum(re.search(pattern, name, re.IGNORECASE) is not None for name in columns)
        for key, texts in values.items():
            regex = getattr(domain, key)
            if regex and texts:
                share = sum(re.search(regex, text, re.IGNORECASE) is not None for text in texts) / len(texts)
                shares.append((share + more if share else 0.0, domain))
    shares.sort(key=lambda pair: -pair[0])
    if not shares or shares[0][0] < MIN_SHARE:
        return None
    likest = [domain for share, domain in shares if share == shares[0][0]]
    return likest[0] if all(domain is likest[0] for domain in likest) else None


def of_domain(knowledge: KnowledgeSettings, name: str) -> KnowledgeSettings:
    """The settings, with the words, factors and paths of a domain where the settings have none."""
    domain, keys = domains()[name], ("user_factors", "item_factors", "paths")
    factors = {key: getattr(knowledge, key) or getattr(domain, key) for key in keys}
    words, usual = dict(domain.words), dict(Words())
    words |= {key: word for key, word in knowledge.words if word != usual[key]}
    return knowledge.model_copy(update=factors | {"words": Words(**words)})
