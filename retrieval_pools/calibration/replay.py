"""Replaying texts against a pool, with no LLM: what would have been drafted, and how much of it accepted.

A draft is compared with how the text really goes on, as a greedy verifier would whose model had written that text: the
longest path of the tree that agrees is accepted, one more token is the verifier's own (the bonus), and the next draft
starts behind it. A relaxed verifier also takes tokens that the text does not have, so a night that verifies so accepts
more than a replay of its texts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from laserbatch.retrieval_pools.draft import Draft, DraftOptions, draft
from laserbatch.retrieval_pools.index.pool import Pool

NODE = np.dtype(
    [
        ("source", np.uint8),  # a code of `sources`
        ("relative_count", np.float32),  # share of the token among what follows its parent, before calibration
        ("kind", np.int32),  # see `drafting.estimate`
        ("log_acceptance", np.float32),  # the draft's own estimate, for the whole path
        ("is_parent_accepted", bool),
        ("is_accepted", bool),
    ]
)


@dataclass(frozen=True)
class ReplayText:
    """A text and what a draft knew when it was written.

    Of `is_form`, bool[m], are the tokens that the form of the answer left no choice of; where a draft does not take
    them, they are appended without a step. None: no token.
    """

    prompt_ids: np.ndarray  # int32[n], as the model was given it, chat form and all
    text_ids: np.ndarray  # int32[m], without its end token
    previous_ids: np.ndarray | None = None  # int32[k], the entity's text of an earlier night
    group: str | None = None  # whose texts count more
    is_form: np.ndarray | None = None

    @property
    def num_form(self) -> int:
        return 0 if self.is_form is None else int(np.count_nonzero(self.is_form))

    @cached_property
    def next_open(self) -> np.ndarray:
        """int64[m + 1]: the first position from each one on whose token the form did not append, m for the end."""
        places = np.arange(len(self.text_ids) + 1)
        if self.is_form is not None:
            places[:-1][self.is_form] = len(self.text_ids)
        return np.minimum.accumulate(places[::-1])[::-1]


class Tree(Protocol):
    """What is used of a draft: parents come before their children, -1 is the context's last token."""

    @property
    def token_ids(self) -> Sequence[int] | np.ndarray: ...
    @property
    def parents(self) -> Sequence[int] | np.ndarray: ...


TreeT = TypeVar("TreeT", bound=Tree)


@dataclass(frozen=True)
class ReplayStep(Generic[TreeT]):
    """One draft along a text."""

    position: int  # tokens of the text that were known
    tree: TreeT
    path: list[int]  # its nodes that the text takes, from the root down, those that are not verified too
    draft_us: float  # microseconds that drafting took


@dataclass(frozen=True)
class Tally:
    """Counts of replays by text, float64[num_texts] each."""

    num_steps: np.ndarray  # verify steps, the one that only ends the text among them
    num_drafted: np.ndarray  # draft tokens
    num_accepted: np.ndarray  # those of them that the text goes along, and the tokens that its form appended

    @property
    def mean_accepted(self) -> float:
        """AAL over the steps of all texts: accepted draft tokens of a step, the bonus token not counted."""
        return float(self.num_accepted.sum() / max(1, self.num_steps.sum()))


def replay(pool: Pool | None, texts: Iterable[ReplayText], options: DraftOptions | None = None) -> Tally:
    """Draft along texts, none of which is in the pool, and count. The same inputs give the same counts."""
    counts = []
    for text in texts:
        steps = list(pool_steps(pool, text, options))
        num_accepted = len(text.text_ids) + 1 - len(steps)  # each step ends with a token that was not drafted
        counts.append((len(steps), sum(len(step.tree) for step in steps), num_accepted))
    return Tally(*np.array(counts, float).reshape(-1, 3).T)


def replay_nodes(
    pool: Pool | None,
    texts: Iterable[ReplayText],
    options: DraftOptions | None = None,
    verified: DraftOptions | None = None,
) -> np.ndarray:
    """Draft along texts and keep every drafted token with what became of it: NODE[n]; `verified` as in `pool_steps`."""
    drafts = (_nodes(step) for text in texts for step in pool_steps(pool, text, options, verified))
    return np.concatenate([np.empty(0, NODE), *drafts])


def _nodes(step: ReplayStep[Draft]) -> np.ndarray:
    tree = step.tree
    is_accepted = np.zeros(len(tree) + 1, bool)
    is_accepted[[*step.path, -1]] = True  # the root comes last: it is the parent -1
    nodes = np.empty(len(tree), NODE)
    for name in ("source", "relative_count", "kind", "log_acceptance"):
        nodes[name] = getattr(tree, name)
    nodes["is_parent_accepted"], nodes["is_accepted"] = is_accepted[tree.parents], is_accepted[:-1]
    return nodes


def pool_steps(
    pool: Pool | None, text: ReplayText, options: DraftOptions | None = None, verified: DraftOptions | None = None
) -> Iterator[ReplayStep[Draft]]:
    """The drafts along one text, as `draft` makes them for a sequence whose model writes that text.

    `verified` says what of each tree is verified, by its size and its probability alone; the next draft starts behind
    that. None: all of it.
    """
    options = DraftOptions() if options is None else options
    context = np.concatenate([text.prompt_ids, text.text_ids]).astype(np.int32)
    num_prompt = len(text.prompt_ids)

    def draft_after(position: int) -> Draft:
        return draft(pool, context[: num_prompt + position], num_prompt, text.previous_ids, text.group, options)

    if verified is None:
        return steps_along(text.text_ids, draft_after, next_open=text.next_open)

    def num_verified(tree: Draft) -> int:  # the most probable nodes come first
        is_likely = np.exp(tree.log_acceptance) >= verified.min_acceptance
        return min(verified.max_nodes, int(np.count_nonzero(is_likely)))

    return steps_along(text.text_ids, draft_after, num_verified, text.next_open)


def steps_along(
    text_ids: np.ndarray,
    draft_after: Callable[[int], TreeT],
    num_verified: Callable[[TreeT], int] | None = None,
    next_open: np.ndarray | None = None,
) -> Iterator[ReplayStep[TreeT]]:
    """Draft along a text with any drafter. Every step ends with a bonus token, the last one with the end token.

    Parameters
    ----------
    text_ids : int[n], without its end token.
    draft_after : a draft when so many tokens of the text are known; it alone is timed. It is asked for rising numbers.
    num_verified : how many of a draft's first nodes are verified; the next draft starts behind what is accepted of
        those. None: all.
    next_open : as of a `ReplayText`; None: no token was appended without a step.
    """
    truth = text_ids.tolist()
    places = range(len(truth) + 1) if next_open is None else next_open.tolist()
    position = 0
    while position < len(places):
        position = places[position]
        start_ns = time.perf_counter_ns()
        tree = draft_after(position)
        draft_us = (time.perf_counter_ns() - start_ns) / 1e3
        path = accepted_path(tree, truth, position)
        first_nodes = len(tree.token_ids) if num_verified is None else num_verified(tree)
        yield ReplayStep(position, tree, path, draft_us)
        position += sum(node < first_nodes for node in path) + 1


def accepted_path(tree: Tree, truth: Sequence[int], position: int = 0) -> list[int]:
    """Nodes of the longest path of a draft that a text takes from `position` on."""
    path: list[int] = []
    place, parent = position, -1
    token_ids, parents = (  # lists are walked faster
        values.tolist() if isinstance(values, np.ndarray) else values for values in (tree.token_ids, tree.parents)
    )
    for node, (token, above) in enumerate(zip(token_ids, parents, strict=True)):
        if place == len(truth):
            break
        if above == parent and token == truth[place]:
            path.append(node)
            place, parent = place + 1, node
    return path
