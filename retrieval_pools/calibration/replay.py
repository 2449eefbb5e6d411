"""Replaying texts against a pool, with no LLM: what would have been drafted, and how much of it accepted.

A draft is compared with how the text really goes on, as a greedy verifier would whose model had written that text: the
longest path of the tree that agrees is accepted, one more token is the verifier's own (the bonus), and the next draft
starts behind it. A relaxed verifier also takes tokens that the text does not have, so a night that verifies so accepts
more than a replay of its texts. Knows no corpus, no tables and no prompt template.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from laserbatch.retrieval_pools.draft import Draft, draft
from laserbatch.retrieval_pools.index.pool import Pool


@dataclass(frozen=True)
class ReplayText:
    """A text and what a draft knew when it was written.

    Parameters
    ----------
    prompt_ids : int32[n], the prompt as the model was given it, chat form and all.
    text_ids : int32[m], the text without its end token.
    previous_ids : int32[k], the entity's text of an earlier night, or None.
    group : the group whose texts count more, or None.
    """

    prompt_ids: np.ndarray
    text_ids: np.ndarray
    previous_ids: np.ndarray | None = None
    group: str | None = None


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are asked for; the options of `draft` by their names there."""

    max_nodes: int = 16
    min_acceptance: float = 0.07
    use_prompt: bool = True
    use_output: bool = True
    use_previous: bool = True
    end_token_id: int | None = None


class Tree(Protocol):
    """What is used of a draft: parents come before their children, -1 is the context's last token."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int]: ...


AnyTree = TypeVar("AnyTree", bound=Tree)


@dataclass(frozen=True)
class ReplayStep(Generic[AnyTree]):
    """One draft along a text.

    Attributes
    ----------
    position : tokens of the text that were known.
    tree : the draft.
    path : its nodes that the text takes, from the root down, those that are not verified too.
    draft_us : microseconds that drafting took.
    """

    position: int
    tree: AnyTree
    path: list[int]
    draft_us: float


@dataclass(frozen=True)
class Nodes:
    """Drafted tokens and what became of them, in the order of drafting; arrays of one length.

    Attributes
    ----------
    source : uint8[n], a code of `sources`.
    relative_count : float32[n], share of the node's token among what follows its parent, before calibration.
    token_kind : int32[n], see `drafting.estimate`.
    log_acceptance : float32[n], the draft's own estimate, for the whole path.
    is_parent_accepted, is_accepted : bool[n].
    """

    source: np.ndarray
    relative_count: np.ndarray
    token_kind: np.ndarray
    log_acceptance: np.ndarray
    is_parent_accepted: np.ndarray
    is_accepted: np.ndarray

    def __len__(self) -> int:
        return len(self.source)

    def where(self, chosen: np.ndarray) -> "Nodes":
        """The nodes that a mask or an index array chooses."""
        return Nodes(**{name: values[chosen] for name, values in vars(self).items()})

    @classmethod
    def of_steps(cls, steps: Sequence[ReplayStep[Draft]]) -> "Nodes":
        """The nodes of drafts, one behind the other; of one draft at least."""
        sizes = [len(step.tree) for step in steps]
        begins = np.cumsum([0, *sizes])
        num_nodes = root = int(begins[-1])  # the root of every tree comes last
        parents = _joined(steps, "parents")
        parents = np.where(parents < 0, root, parents + np.repeat(begins[:-1], sizes))
        is_accepted = np.zeros(num_nodes + 1, bool)
        is_accepted[root] = True
        for begin, step in zip(begins.tolist(), steps, strict=False):
            is_accepted[[begin + node for node in step.path]] = True
        return cls(
            _joined(steps, "source").astype(np.uint8),
            _joined(steps, "relative_count"),
            _joined(steps, "token_kind"),
            _joined(steps, "log_acceptance"),
            is_accepted[parents],
            is_accepted[:-1],
        )

    @classmethod
    def joined(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Several, one behind the other; at least one."""
        names = vars(parts[0])
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class Replay:
    """The drafts along one text or several, one value a step.

    Attributes
    ----------
    num_drafted, num_accepted : tokens of the draft, and those of them that the text goes along.
    draft_us : microseconds of drafting.
    """

    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    draft_us: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Drafts, each verified by one forward pass of the model."""
        return len(self.num_drafted)

    @property
    def mean_accepted(self) -> float:
        """AAL: accepted draft tokens of a step, the bonus token not counted; 0 without steps."""
        return float(np.mean(self.num_accepted)) if self.num_accepted else 0.0

    def add(self, step: ReplayStep[Draft]) -> None:
        """Count one more step."""
        self.num_drafted.append(len(step.tree.token_ids))
        self.num_accepted.append(len(step.path))
        self.draft_us.append(step.draft_us)


def replay(pool: Pool | None, texts: Iterable[ReplayText], options: DraftOptions | None = None) -> Replay:
    """Draft along texts and count. The same inputs give the same counts; only times differ.

    Parameters
    ----------
    pool : what is drafted from beside a text's own prompt, output and previous text; the text must not be in it.
    """
    result = Replay()
    for text in texts:
        for step in pool_steps(pool, text, options):
            result.add(step)
    return result


def replay_nodes(
    pool: Pool | None,
    texts: Iterable[ReplayText],
    options: DraftOptions | None = None,
    verified: DraftOptions | None = None,
) -> Nodes:
    """Draft along texts and keep every drafted token with what became of it; `verified` as in `pool_steps`."""
    parts = [Nodes.of_steps(list(pool_steps(pool, text, options, verified))) for text in texts]
    return Nodes.joined([_NO_NODES, *parts])


def _joined(steps: Sequence[ReplayStep[Draft]], name: str) -> np.ndarray:
    return np.concatenate([getattr(step.tree, name) for step in steps])


def pool_steps(
    pool: Pool | None, text: ReplayText, options: DraftOptions | None = None, verified: DraftOptions | None = None
) -> Iterator[ReplayStep[Draft]]:
    """The drafts along one text, as `draft` makes them for a sequence whose model writes that text.

    Parameters
    ----------
    verified : what of each tree is verified, by its size and its probability alone: the next draft starts behind that.
        None: all of it.
    """
    asked = vars(DraftOptions() if options is None else options)
    context = np.concatenate([text.prompt_ids, text.text_ids]).astype(np.int32)
    num_prompt = len(text.prompt_ids)

    def draft_after(position: int) -> Draft:
        return draft(pool, context[: num_prompt + position], num_prompt, text.previous_ids, text.group, **asked)

    def num_verified(tree: Draft) -> int:  # the most probable nodes come first
        is_likely = np.exp(tree.log_acceptance) >= verified.min_acceptance
        return min(verified.max_nodes, int(np.count_nonzero(is_likely)))

    return steps_along(text.text_ids, draft_after, asked["end_token_id"], verified and num_verified)


def steps_along(
    text_ids: np.ndarray,
    draft_after: Callable[[int], AnyTree],
    end_token_id: int | None = None,
    num_verified: Callable[[AnyTree], int] | None = None,
) -> Iterator[ReplayStep[AnyTree]]:
    """Draft along a text with any drafter. Every step ends with a bonus token, the last one with the end token.

    Parameters
    ----------
    text_ids : int[n], without its end token.
    draft_after : a draft when so many tokens of the text are known; it alone is timed. It is asked for rising numbers.
    end_token_id : the end token, where it may be drafted too; it is accepted behind the text.
    num_verified : how many of a draft's first nodes are verified; the next draft starts behind what is accepted of
        those. None: all.
    """
    truth = text_ids.tolist() + ([] if end_token_id is None else [end_token_id])
    position = 0
    while position <= len(text_ids):
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
    wanted, parent = position, -1
    nodes = zip(_listed(tree.token_ids), _listed(tree.parents), strict=True)
    for node, (token, above) in enumerate(nodes):
        if wanted == len(truth):
            break
        if above == parent and token == truth[wanted]:
            path.append(node)
            wanted, parent = wanted + 1, node
    return path


def _listed(values: Sequence[int]) -> Sequence[int]:
    """An array as a list, which is walked faster."""
    return values.tolist() if isinstance(values, np.ndarray) else values


_NO_NODES = Nodes(
    source=np.empty(0, np.uint8),
    relative_count=np.empty(0, np.float32),
    token_kind=np.empty(0, np.int32),
    log_acceptance=np.empty(0, np.float32),
    is_parent_accepted=np.empty(0, bool),
    is_accepted=np.empty(0, bool),
)
