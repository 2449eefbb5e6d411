"""Replaying texts against a pool, without an LLM: which tokens would have been drafted, and how many accepted.

A draft is compared with the actual continuation of the text, as by a greedy verifier whose model writes that text. The
longest path of the tree that agrees is accepted, one more token is the verifier's own (the bonus token), and the next
draft starts after it. A relaxed verifier also accepts tokens that the text does not have, so a night under it accepts
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
        ("relative_count", np.float32),  # share of the token among those that follow its parent, before calibration
        ("kind", np.int32),  # see `drafting.estimate`
        ("log_acceptance", np.float32),  # the draft's own estimate, for the whole path
        ("is_parent_accepted", bool),
        ("is_accepted", bool),
    ]
)


@dataclass(frozen=True)
class ReplayText:
    """A text, and the data that drafts had when it was written.

    `is_form`, bool[m], marks the tokens for which the form of the answer left no choice: if they are not accepted from
    a draft, they are appended without a step. None: there are no such tokens.
    """

    prompt_ids: np.ndarray  # int32[n], as the model got it, in its chat form
    text_ids: np.ndarray  # int32[m], without its end token
    previous_ids: np.ndarray | None = None  # int32[k], the entity's text of an earlier night
    group: str | None = None  # the group whose texts count more
    is_form: np.ndarray | None = None

    @property
    def num_form(self) -> int:
        return 0 if self.is_form is None else int(np.count_nonzero(self.is_form))

    @cached_property
    def next_open(self) -> np.ndarray:
        """The first position from each position on whose token the form did not append, int64[m + 1]; m at the end."""
        places = np.arange(len(self.text_ids) + 1)
        if self.is_form is not None:
            places[:-1][self.is_form] = len(self.text_ids)
        return np.minimum.accumulate(places[::-1])[::-1]


class Tree(Protocol):
    """The part of a draft that replays use: parents come before their children, -1 is the context's last token."""

    @property
    def token_ids(self) -> Sequence[int] | np.ndarray: ...
    @property
    def parents(self) -> Sequence[int] | np.ndarray: ...


TreeT = TypeVar("TreeT", bound=Tree)


@dataclass(frozen=True)
class ReplayStep(Generic[TreeT]):
    """One draft along a text."""

    position: int  # number of tokens of the text that were known
    tree: TreeT
    path: list[int]  # its nodes that agree with the text, from the root down, including nodes that are not verified
    draft_us: float  # microseconds that drafting took


@dataclass(frozen=True)
class Tally:
    """Counts of replays per text, float64[num_texts] each."""

    num_steps: np.ndarray  # verify steps, including a last one that only writes the end token
    num_drafted: np.ndarray  # draft tokens
    num_accepted: np.ndarray  # accepted draft tokens, and the tokens that the form appended

    @property
    def mean_accepted(self) -> float:
        """AAL over the steps of all texts: accepted tokens per step, without the bonus token."""
        return float(self.num_accepted.sum() / max(1, self.num_steps.sum()))


def replay(pool: Pool | None, texts: Iterable[ReplayText], options: DraftOptions | None = None) -> Tally:
    """Draft along texts that are not in the pool, and count. The same inputs give the same counts."""
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
    """Draft along texts and return every draft token and whether it was accepted, NODE[n]; see `pool_steps`."""
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

    Only `max_nodes` and `min_acceptance` of `verified` are used: they limit which nodes of each tree are verified, and
    so where the next draft starts. None: all nodes are verified.
    """
    options = DraftOptions() if options is None else options
    context = np.concatenate([text.prompt_ids, text.text_ids]).astype(np.int32)
    num_prompt = len(text.prompt_ids)

    def draft_after(position: int) -> Draft:
        return draft(pool, context[: num_prompt + position], num_prompt, text.previous_ids, text.group, options)

    def num_verified(tree: Draft) -> int:  # the most probable nodes come first
        if verified is None:
            return len(tree)
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

    `text_ids`, int[n], are without the end token. `draft_after` returns a draft, given the number of known tokens of
    the text, which rises; only this is timed. `num_verified` returns the number of a draft's first nodes that are
    verified (None: all); the next draft starts after those accepted. `next_open` is as in `ReplayText`; None: no token
    was appended without a step.
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
    """The nodes of the longest path of a draft that agrees with the text from `position` on."""
    path: list[int] = []
    place, parent = position, -1
    token_ids, parents = (  # iterating over lists is faster
        values.tolist() if isinstance(values, np.ndarray) else values for values in (tree.token_ids, tree.parents)
    )
    for node, (token, above) in enumerate(zip(token_ids, parents, strict=True)):
        if place == len(truth):
            break
        if above == parent and token == truth[place]:
            path.append(node)
            place, parent = place + 1, node
    return path
