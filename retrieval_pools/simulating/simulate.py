"""What a way of drafting would gain on texts that its pool does not hold: pools built, texts replayed, counts kept.

A simulation has three kinds of replay: without the entities' previous texts, as tomorrow's new entities are written;
with them, as changed ones are, for the held-back texts that have one; and both in the shares that a night writes. Pools
are calibrated, as those of a night are, on texts that are neither in them nor measured. Knows no table, no run and no
model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from laserbatch.retrieval_pools.calibration.budget_replay import with_budgets
from laserbatch.retrieval_pools.calibration.calibrate import calibrate, refit
from laserbatch.retrieval_pools.calibration.estimates import Bootstrap, Estimate, Tally
from laserbatch.retrieval_pools.calibration.replay import DraftOptions, Replay, ReplayText, replay
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.index.manifest import Side
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.settings import BUILT_SETTINGS, PoolSettings

SOURCES = ("previous", "prompt", "output", "pool")
MIN_WITH_PREVIOUS = 10  # held-back texts with a previous one; of fewer nothing can be said

Kind = Literal["new", "changed", "mixed"]


@dataclass(frozen=True)
class Grouping:
    """A group for every text; None: no group, all texts count the same.

    Parameters
    ----------
    pool_groups : of the pool's texts.
    held_back_groups : of the held-back texts.
    calibration_groups : of the texts that pools are calibrated with.
    """

    pool_groups: Sequence[str | None]
    held_back_groups: Sequence[str | None]
    calibration_groups: Sequence[str | None] = ()

    @property
    def num_groups(self) -> int:
        """Groups that have texts in the pool."""
        return len(set(self.pool_groups))


@dataclass(frozen=True)
class DraftSetting:
    """One way to draft.

    Attributes
    ----------
    grouping : name of one of the simulation's groupings.
    pool : how the pool is built and drafted from.
    sources : which of `SOURCES` drafts may come from.
    max_draft_tokens, min_acceptance : the budget of a draft; 0 tokens: plain decoding.
    num_pool_texts : a sample of the pool's texts; None: all.
    """

    grouping: str
    pool: PoolSettings = field(default_factory=PoolSettings)
    sources: tuple[str, ...] = SOURCES
    max_draft_tokens: int = 16
    min_acceptance: float = 0.07
    num_pool_texts: int | None = None

    def with_pool(self, **changes: object) -> "DraftSetting":
        """The same with other options of the pool."""
        return replace(self, pool=PoolSettings.model_validate(self.pool.model_dump() | changes))

    def with_budget(self, max_draft_tokens: int, min_acceptance: float) -> "DraftSetting":
        """The same with another budget."""
        return replace(self, max_draft_tokens=max_draft_tokens, min_acceptance=min_acceptance)


@dataclass(frozen=True)
class CalibrationTexts:
    """What pools are calibrated with.

    Attributes
    ----------
    texts : neither in a pool nor measured; their groups are not looked at. Fewer than two calibrate nothing.
    base : the setting whose pool is calibrated as that of a night is.
    """

    texts: Sequence[ReplayText]
    base: DraftSetting


@dataclass(frozen=True)
class PoolCorpus:
    """The texts that a side's pools are built from: int32[n] token ids and entity of each."""

    side: Side
    token_ids: Sequence[np.ndarray]
    entity_ids: Sequence[str | int]

    def __len__(self) -> int:
        return len(self.token_ids)


class Simulator:
    """Replays the held-back texts under any setting. Each pool is built once, each replay is done once.

    Parameters
    ----------
    corpus : texts for the pools; none of them is held back.
    held_back : texts to replay, with the entity's previous text where there is one; their groups are not looked at.
    groupings : by name, over `corpus`, `held_back` and `calibration`.
    folder : where pools may be written; it is the caller's to remove.
    seed : of the samples of the pool's texts: a smaller one is part of a larger one.
    calibration : None: relative counts are believed as they are.
    share_changed : of the texts that a night writes, those whose entity has an earlier one.
    """

    def __init__(
        self,
        corpus: PoolCorpus,
        held_back: Sequence[ReplayText],
        groupings: Mapping[str, Grouping],
        folder: Path,
        seed: int = 0,
        calibration: CalibrationTexts | None = None,
        share_changed: float = 0.0,
    ) -> None:
        self.corpus, self.held_back, self.groupings = corpus, held_back, groupings
        self.share_changed = share_changed
        self.calibration = calibration if calibration is not None and len(calibration.texts) > 1 else None
        self._folder = folder
        self._order = np.random.default_rng(seed).permutation(len(corpus))
        self._pools: dict[tuple, Pool] = {}
        self._curves: dict[DraftSetting, Pool] = {}
        self._known: dict[tuple[DraftSetting, bool], dict[int, Replay]] = {}

    @property
    def num_with_previous(self) -> int:
        """Held-back texts whose entity has a previous text."""
        return sum(text.previous_ids is not None for text in self.held_back)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What can be replayed; the last is that of a night: mixed where enough texts have a previous one."""
        return ("new", "changed", "mixed") if self.num_with_previous >= MIN_WITH_PREVIOUS else ("new",)

    @property
    def num_calibration_texts(self) -> int:
        """Texts that pools are calibrated with; 0: they are not calibrated."""
        return 0 if self.calibration is None else len(self.calibration.texts)

    def replay(self, setting: DraftSetting, kind: Kind = "new") -> Tally:
        """Counts by text.

        Parameters
        ----------
        kind : "new": all texts, none given its previous one; "changed": those that have one, given it; "mixed": all,
            given what they have, and weighted so that changed ones are `share_changed` of them.
        """
        is_changed = np.array([text.previous_ids is not None for text in self.held_back])
        if kind == "new":
            return Tally.of(self._replays(setting, range(len(is_changed)), with_previous=False))
        changed = self._replays(setting, np.flatnonzero(is_changed), with_previous=True)
        if kind == "changed":
            return Tally.of(changed)
        new = self._replays(setting, np.flatnonzero(~is_changed), with_previous=False)
        share = self.share_changed if new else 1.0
        weights = [(1 - share) / max(1, len(new)), share / max(1, len(changed))]
        of_kind = iter(new), iter(changed)
        tally = Tally.of([next(of_kind[int(one)]) for one in is_changed])  # in the order of the texts
        return tally.weighted(len(is_changed) * np.where(is_changed, weights[1], weights[0]))

    def _replays(self, setting: DraftSetting, numbers: Iterable[int], with_previous: bool) -> list[Replay]:
        known = self._known.setdefault((setting, with_previous), {})
        groups, options = self.groupings[setting.grouping].held_back_groups, _options(setting, with_previous)
        pool = self.pool(setting) if "pool" in setting.sources and setting.max_draft_tokens else None
        for number in map(int, numbers):
            if number not in known:
                text = replace(self.held_back[number], group=groups[number])
                known[number] = _replayed(pool, text, options)
        return [known[int(number)] for number in numbers]

    def full_pool_tokens_per_step(
        self, setting: DraftSetting, num_texts: int, bootstrap: Bootstrap, kind: Kind = "new"
    ) -> Estimate | None:
        """Tokens per step from a pool of `num_texts` texts, the held-back ones among them, by extrapolation.

        What the last doubling of the pool brought, the missing part of a doubling brings in proportion. None where more
        than one doubling is missing, or the pool is too small to halve.
        """
        half = len(self.corpus) // 2
        if half == 0 or num_texts > 2 * len(self.corpus):
            return None
        whole, halved = (
            bootstrap.sums(self.replay(one, kind)).tokens_per_step
            for one in (setting, replace(setting, num_pool_texts=half))
        )
        doublings = np.log2(num_texts / len(self.corpus)) / np.log2(len(self.corpus) / half)
        return Estimate.of(whole + doublings * (whole - halved))

    def pool(self, setting: DraftSetting) -> Pool:
        """The pool that a setting drafts from, calibrated; settings that estimate alike share the curves.

        The base is calibrated as a night's pool is. The curves of every setting, the base's too, are fitted to one more
        replay of the same texts, which drafts by those: fitted in two ways, equal settings would not be equal. Budgets,
        and a source less, take the base's; a pool without an escape of its own takes the base's.
        """
        pool = self._uncalibrated(setting)
        if self.calibration is None:
            return pool
        pool = pool.with_calibration(self._base_calibration)
        alike = _estimating_alike(setting, self.calibration.base)
        if alike not in self._curves:
            options = _options(alike, with_previous=True)
            self._curves[alike] = refit(pool, self._calibration_texts(alike), options)
        return pool.with_curves_of(self._curves[alike])

    def night_pool(self, base: DraftSetting) -> Pool:
        """The base's pool as a night leaves it: what every draft budget gains is kept with it, where it is calibrated.

        Budgets are replayed on the texts that it is calibrated with, as those of a night are.
        """
        pool = self._uncalibrated(base)
        if self.calibration is None:
            return pool
        texts, options = self._calibration_texts(base), _options(base, with_previous=True)
        return pool.with_calibration(with_budgets(self._base_calibration, pool, texts, options))

    @cached_property
    def _base_calibration(self) -> Calibration:
        base = self.calibration.base
        return calibrate(self._uncalibrated(base), self._calibration_texts(base), _options(base, with_previous=True))

    def _calibration_texts(self, setting: DraftSetting) -> list[ReplayText]:
        return _grouped(self.calibration.texts, self.groupings[setting.grouping].calibration_groups)

    def _uncalibrated(self, setting: DraftSetting) -> Pool:
        key = setting.grouping, setting.num_pool_texts, *(getattr(setting.pool, name) for name in BUILT_SETTINGS)
        if key not in self._pools:
            self._pools[key] = build_pool(
                self._texts(setting),
                self._folder / str(len(self._pools)),
                side=self.corpus.side,
                tokenizer_hash="simulation",  # these pools live as long as the simulation
                model_id="simulation",
                settings=setting.pool,
            )
        queried = setting.pool.model_dump(exclude=set(BUILT_SETTINGS))
        return self._pools[key].with_settings(**queried)

    def _texts(self, setting: DraftSetting):
        corpus, groups = self.corpus, self.groupings[setting.grouping].pool_groups
        for number in np.sort(self._order[: setting.num_pool_texts]).tolist():
            yield PoolText(corpus.token_ids[number], groups[number] or "", corpus.entity_ids[number])


def _estimating_alike(setting: DraftSetting, base: DraftSetting) -> DraftSetting:
    """The setting whose curves are taken: with the base's budget, and with its sources too."""
    sources = tuple(source for source in SOURCES if source in base.sources or source in setting.sources)
    if set(sources) == set(base.sources):
        sources = base.sources
    budget = {"max_draft_tokens": base.max_draft_tokens, "min_acceptance": base.min_acceptance}
    return replace(setting, sources=sources, **budget)


def _options(setting: DraftSetting, with_previous: bool) -> DraftOptions:
    return DraftOptions(
        max_nodes=setting.max_draft_tokens,
        min_probability=setting.min_acceptance,
        use_prompt="prompt" in setting.sources,
        use_output="output" in setting.sources,
        use_previous=with_previous and "previous" in setting.sources,
    )


def _replayed(pool: Pool | None, text: ReplayText, options: DraftOptions) -> Replay:
    if options.max_nodes:
        return replay(pool, [text], options)
    num_steps = len(text.text_ids) + 1  # the last one ends the text
    return Replay([0] * num_steps, [0] * num_steps, [0.0] * num_steps)


def _grouped(texts: Sequence[ReplayText], groups: Sequence[str | None]) -> list[ReplayText]:
    return [replace(text, group=group) for text, group in zip(texts, groups, strict=True)]
