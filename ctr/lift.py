"""The lift of CTR models by several ways of writing and using texts, all trained and judged on the same rows.

A way has its own texts, settings and basis, as it would have alone, so ways may have different encoders. Each way is
compared with models without texts under its settings; ways whose settings differ only in the use of texts share these.
Rows, models and seeds are the same for all ways, so that every difference is paired.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from laserbatch.ctr.compare import CtrRow, Scores, describe_split, item_rate, summarise, train_models, verdicts
from laserbatch.ctr.dataset import build_dataset
from laserbatch.ctr.errors import CtrError
from laserbatch.ctr.feature_set import FeatureSet
from laserbatch.ctr.knowledge import build_knowledge
from laserbatch.ctr.log import EntityTables
from laserbatch.ctr.settings import CtrOptions, CtrSettings
from laserbatch.pipeline.storage.figures import CtrScores, CtrVerdict

# Settings that decide the test rows, the number of trainings, and what counts as a difference.
JUDGED_BY = ("models", "num_seeds", "label", "equivalence_margin")
USE_OF_TEXTS = {"adaptor", "vector_dim", "history"}  # settings that do not affect models without texts


@dataclass(frozen=True)
class Way:
    """Texts, as features, and the settings by which models use them. Training rows see the latest texts."""

    features: FeatureSet
    settings: CtrSettings


@dataclass(frozen=True)
class Lift:
    """The lift of a way: verdicts on AUC compared with no texts, by model and for "all", and the compared rows."""

    over_none: dict[str, CtrVerdict]
    rows: list[CtrScores]  # scores of the models without texts ("none") and of the way's models


@dataclass(frozen=True)
class Lifts:
    """The lift of every way, and for each pair (way, other way) the verdict over all models."""

    split: dict[str, int]
    item_rate: CtrScores
    ways: dict[str, Lift]
    between: dict[tuple[str, str], CtrVerdict] = field(default_factory=dict)


def train_ways(
    tables: EntityTables,
    ways: Mapping[str, Way],
    as_of: datetime.date,
    on_fit: Callable[[CtrRow], object] = lambda row: None,
) -> Lifts:
    """Train and judge every model with every way, and once without texts.

    Raises CtrError as `train_ctr` and `require_same_judgement` do.
    """
    require_same_judgement({name: way.settings for name, way in ways.items()})
    margin = next(iter(ways.values())).settings

    lifts: dict[str, Lift] = {}
    scores: dict[str, Scores] = {}
    data = None  # its test rows are the same under all settings
    for names in _alike_without_texts(ways):
        settings = ways[names[0]].settings
        data = build_dataset(tables, as_of, settings)
        none, without = train_models("none", data, data, None, settings, on_fit)
        for name in names:
            way = ways[name]
            knowledge = build_knowledge(tables, data, {name: way.features}, as_of, way.settings)[name]
            rows, scores[name] = train_models(name, data, data, knowledge, way.settings, on_fit)
            lifts[name] = Lift(verdicts(data, scores[name], without, margin), [*summarise(none), *summarise(rows)])
    assert data is not None
    between = {}
    for base, other in combinations(ways, 2):
        between[base, other] = verdicts(data, scores[base], scores[other], margin)["all"]
        between[other, base] = verdicts(data, scores[other], scores[base], margin)["all"]
    return Lifts(describe_split(data), item_rate(data), {name: lifts[name] for name in ways}, between)


def num_trainings(ways: Mapping[str, Way]) -> int:
    """The number of trainings of `train_ways`."""
    settings = next(iter(ways.values())).settings
    return (len(ways) + len(_alike_without_texts(ways))) * len(settings.models) * settings.num_seeds


def require_same_judgement(settings: Mapping[str, CtrOptions]) -> None:
    """Raise CtrError if the settings that decide on which rows, and by which trainings, ways are judged differ."""
    for key in JUDGED_BY:
        values_by_way = {name: getattr(of_way, key) for name, of_way in settings.items()}
        if len(set(values_by_way.values())) > 1:
            values = ", ".join(f"{name}: {value!r}" for name, value in values_by_way.items())
            raise CtrError(f"ctr.{key} differs, so variants would be judged differently ({values}); set one for all")
    if len({of_way.history == "split" for of_way in settings.values()}) > 1:
        raise CtrError("ctr.history is split for some variants, which train on other rows; set it for all")


def _alike_without_texts(ways: Mapping[str, Way]) -> list[list[str]]:
    """Group the names of ways whose models without texts are the same."""
    groups: dict[str, list[str]] = {}
    for name, way in ways.items():
        groups.setdefault(way.settings.model_dump_json(exclude=USE_OF_TEXTS), []).append(name)
    return list(groups.values())
