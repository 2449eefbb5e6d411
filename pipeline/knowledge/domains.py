"""What people, items and what matters to a choice are called in some domains, read from `configs/domains.yaml`."""

import re
from collections.abc import Collection
from functools import cache

from laserbatch.pipeline.knowledge.templates import CONFIGS, KnowledgeSettings, Words
from laserbatch.pipeline.validation import Strict, read_yaml


class Domain(Strict):
    """The words, factors and paths of a domain, as `KnowledgeSettings` has them."""

    names: str | None = None  # a pattern of what files and ids of items are called; None: never proposed
    columns: str | None = None  # and of what other columns of them are
    words: Words
    user_factors: tuple[str, ...]
    item_factors: tuple[str, ...]
    paths: tuple[str, ...] = ()


@cache
def domains() -> dict[str, Domain]:
    """The known domains by name, the more special ones first."""
    path = CONFIGS / "domains.yaml"
    return {name: Domain.model_validate(raw) for name, raw in read_yaml(path, "domains", "install anew").items()}


def domain_of(names: Collection[str], columns: Collection[str] = ()) -> Domain | None:
    """The domain that the names of a file of items and of its id speak of, else its other columns; None without one."""
    for pattern, present in (("names", names), ("columns", columns)):
        for domain in domains().values():
            wanted = getattr(domain, pattern)
            if wanted and any(re.search(wanted, name, re.IGNORECASE) for name in present):
                return domain
    return None


def of_domain(knowledge: KnowledgeSettings, name: str) -> KnowledgeSettings:
    """The settings with the words, factors and paths of a domain where they have none of their own."""
    domain = domains()[name]
    factors = {
        key: getattr(knowledge, key) or getattr(domain, key) for key in ("user_factors", "item_factors", "paths")
    }
    words, usual = dict(domain.words), dict(Words())
    words |= {key: word for key, word in knowledge.words if word != usual[key]}
    return knowledge.model_copy(update=factors | {"words": Words(**words)})
