"""Who drafts from a collaborative group, and who by attributes: by interactions and age, or by a user's own function.

The function is named in the configuration and imported from Python's path by the process that plans; it is never
pickled, and never taken from a file of a pool. Knows no groups.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.routing.settings import RoutingSettings

CHOICES = ("collaborative", "attribute")


@dataclass(frozen=True)
class EntityFacts:
    """What a rule is told of one entity.

    Attributes
    ----------
    num_interactions : how many it has now.
    age_days : days since its `created_at`; None where that is not known.
    attributes : column names to values; what is not known is missing or None.
    """

    num_interactions: int
    age_days: float | None
    attributes: Mapping[str, object]


@dataclass(frozen=True)
class RoutingRule:
    """Decides for one entity at a time. Made by `of`.

    Attributes
    ----------
    min_interactions, min_age_days : as in the settings, where there is no function.
    name, function : the user's own, with the setting that names it.
    """

    min_interactions: int
    min_age_days: float | None = None
    name: str | None = None
    function: Callable[[EntityFacts], str] | None = None

    @classmethod
    def of(cls, settings: RoutingSettings) -> "RoutingRule":
        """The rule of the settings.

        Raises
        ------
        PoolError
            `routing.rule` names a module that cannot be imported, or nothing in it that can be called.
        """
        function = None if settings.rule is None else _imported(settings.rule)
        return cls(settings.min_interactions, settings.min_age_days, settings.rule, function)

    def prefers_collaborative(self, entity_id: str | int, facts: EntityFacts) -> bool:
        """Whether the entity is to have its collaborative group, if it has one.

        Raises
        ------
        PoolError
            The user's function raised, or returned neither "collaborative" nor "attribute".
        """
        if self.function is not None:
            return self._asked(entity_id, facts) == "collaborative"
        age_days = math.nan if facts.age_days is None else facts.age_days
        return bool(self.meets_limits(np.int64(facts.num_interactions), np.float64(age_days)))

    def meets_limits(self, num_interactions: np.ndarray, age_days: np.ndarray) -> np.ndarray:
        """Which of many entities have enough interactions and age, bool (n,); an age of NaN, not known, is enough."""
        is_young = age_days < (-math.inf if self.min_age_days is None else self.min_age_days)
        return (num_interactions >= self.min_interactions) & ~is_young

    def _asked(self, entity_id: str | int, facts: EntityFacts) -> str:
        try:
            choice = self.function(facts)
        except Exception as error:
            raise PoolError(
                f"routing.rule {self.name!r} raised {type(error).__name__}: {error} for the entity {entity_id!r} "
                f"({facts}); correct the function"
            ) from error
        if not isinstance(choice, str) or choice not in CHOICES:
            raise PoolError(
                f"routing.rule {self.name!r} returned {choice!r} for the entity {entity_id!r}; "
                f"expected {' or '.join(repr(known) for known in CHOICES)}"
            )
        return choice


def _imported(name: str) -> Callable[[EntityFacts], str]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        raise PoolError(
            f"routing.rule {name!r}: the module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "install it, or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "nothing of that name" if function is None else f"a {type(function).__name__}"
        raise PoolError(f"routing.rule {name!r}: expected a function {function_name!r} in {module_name}, found {found}")
    return function
