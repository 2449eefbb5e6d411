"""Pools of `engine.py`: the model's own texts on other prompts, in groups of similar prompts or in random groups.

Groups are k-means clusters of the prompts' tf-idf vectors, fitted to the pool's prompts. A measured prompt joins the
nearest centre, so its own text is not used. Every pool and its budgets are calibrated like a night's. As on the first
night, some texts are held back from a second pool and replayed against it. As on later nights, pools of relaxed systems
are calibrated by texts on other prompts that were written with relaxed drafts from these pools. Measures nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import SEED
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.preprocessing import normalize
from tasks import Task, build, own_texts
from threadpoolctl import threadpool_limits

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.retrieval_pools.calibration.calibrate import (
    NUM_CALIBRATION_TEXTS,
    calibrate,
    num_held_back,
    spread_positions,
    with_budgets,
)
from laserbatch.retrieval_pools.calibration.replay import ReplayText
from laserbatch.retrieval_pools.draft import DraftOptions
from laserbatch.retrieval_pools.index.build import HeldBack
from laserbatch.retrieval_pools.index.calibration_record import Calibration
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.routing.collaborative import cluster_embeddings, default_num_groups
from laserbatch.retrieval_pools.settings import PoolSettings

logger = logging.getLogger("benchmarks")

NUM_COMPONENTS = 32
DRAFT_OPTIONS = DraftOptions(use_previous=False)
KINDS = {  # settings of the pool, and the grouping of its texts
    "global": ({}, None),
    "preference": ({}, "like"),
    "group": ({"scope": "group"}, "like"),
    "random": ({"scope": "group"}, "random"),
}


Groups = dict[bytes, str]  # the name of each prompt's group, by the prompt's bytes


@dataclass(frozen=True)
class GroupedPool:
    """A calibrated pool and the groups of all prompts.

    If `groups` is None, all texts count the same.
    """

    pool: Pool
    groups: Groups | None


def unseen_prompts(engine: Engine, task: Task, cache: Path) -> Task:
    """The task without the held-out and earlier prompts whose plain text is in the pool word for word."""
    in_pool = {text.tobytes() for text in own_texts(engine, task, cache)}

    def unseen(prompts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        answered = own_texts(engine, replace(task, pool_prompts=prompts), cache)
        return tuple(p for p, text in zip(prompts, answered, strict=True) if text.tobytes() not in in_pool)

    remaining = replace(task, held_out=unseen(task.held_out), earlier_prompts=unseen(task.earlier_prompts))
    num_left_out = len(task.held_out) - len(remaining.held_out)
    if num_left_out:
        logger.info("%s: %d prompts left out, because their texts are in the pool", task.name, num_left_out)
    return remaining


def pools_of(engine: Engine, task: Task, cache: Path, folder: Path, kinds: Sequence[str]) -> dict[str, GroupedPool]:
    """The pools of the task's texts, by kind."""
    texts = own_texts(engine, task, cache)
    groupings = {None: None, "like": like_groups(task), "random": random_groups(task)}
    return {
        kind: calibrated_pool(task, texts, groupings[KINDS[kind][1]], PoolSettings(**KINDS[kind][0]), folder / kind)
        for kind in kinds
    }


def like_groups(task: Task) -> Groups:
    """Clusters of the pool's prompts; other prompts join the nearest cluster."""
    prompts = (*task.pool_prompts, *task.held_out, *task.earlier_prompts)
    num_pool = len(task.pool_prompts)
    bags = _bags(prompts)
    num_components = max(1, min(NUM_COMPONENTS, num_pool - 1))
    with threadpool_limits(1):  # with threads the order of sums varies, but equal inputs must give equal groups
        weights = TfidfTransformer(sublinear_tf=True).fit(bags[:num_pool])
        reduced = TruncatedSVD(num_components, random_state=SEED).fit(weights.transform(bags[:num_pool]))
        vectors = np.asarray(normalize(reduced.transform(weights.transform(bags))))  # (num_prompts, num_components)
    labels = cluster_embeddings(vectors[:num_pool], default_num_groups(num_pool), SEED)
    centres = np.stack([vectors[:num_pool][labels == group].mean(axis=0) for group in range(labels.max() + 1)])
    distances = ((vectors[num_pool:, None] - centres) ** 2).sum(axis=-1)
    return _named(prompts, [*labels, *distances.argmin(axis=-1)])


def random_groups(task: Task) -> Groups:
    """Random groups, as many as `like_groups` asks for."""
    prompts = (*task.pool_prompts, *task.held_out, *task.earlier_prompts)
    num_groups = default_num_groups(len(task.pool_prompts))
    return _named(prompts, np.random.default_rng(SEED).integers(0, num_groups, len(prompts)))


def _named(prompts: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray) -> Groups:
    return {prompt.tobytes(): f"g{label}" for prompt, label in zip(prompts, labels, strict=True)}


def _bags(prompts: Sequence[np.ndarray]) -> csr_array:
    tokens = np.concatenate(prompts)
    starts = np.cumsum([0, *(len(prompt) for prompt in prompts)])
    bags = csr_array((np.ones(len(tokens)), tokens, starts), (len(prompts), int(tokens.max()) + 1))
    bags.sum_duplicates()
    return bags


def calibrated_by(grouped: GroupedPool, prompts: Sequence[np.ndarray], texts: Sequence[ArrayLike]) -> GroupedPool:
    """The same pool, calibrated by replays of the given texts."""
    calibration = _replayed(grouped.pool, _documents(prompts, texts, grouped.groups))
    return replace(grouped, pool=grouped.pool.with_calibration(calibration))


def calibrated_pool(
    task: Task, texts: list[np.ndarray], groups: Groups | None, settings: PoolSettings, folder: Path
) -> GroupedPool:
    """The pool of all texts, calibrated by replaying some of them against a pool without these."""
    documents = _documents(task.pool_prompts, texts, groups)
    numbers = spread_positions(len(documents), num_held_back(len(documents), NUM_CALIBRATION_TEXTS)).tolist()
    held_back = HeldBack(numbers, lambda others: _replayed(others, [documents[number] for number in numbers]))
    names = [document.group or "all" for document in documents]
    pool = build(texts, folder, task.side, names, settings, held_back if len(numbers) > 1 else None)
    return GroupedPool(pool, groups)


def _documents(prompts: Sequence[np.ndarray], texts: Sequence[ArrayLike], groups: Groups | None) -> list[ReplayText]:
    return [
        ReplayText(prompt, np.asarray(text, np.int32), None, groups[prompt.tobytes()] if groups else None)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _replayed(pool: Pool, texts: Sequence[ReplayText]) -> Calibration:
    return with_budgets(calibrate(pool, texts, DRAFT_OPTIONS), pool, texts, DRAFT_OPTIONS)
