"""A step and its stream, and `commit`, which adds the accepted tokens to the cache and the texts."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters import Drafter, Observation
from laserbatch.pipeline.decoding.kv_cache import KVCache
from laserbatch.pipeline.decoding.model.runner import StepOutput
from laserbatch.pipeline.decoding.scheduler import Scheduler
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.pipeline.decoding.step_budget import StepBudget
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Verifier

_NO_NODES, _NOTHING = np.empty(0, np.int64), ()


@dataclass(frozen=True)
class Stream:
    """One call of `Engine.generate`: its sequences, and how they are drafted and verified."""

    scheduler: Scheduler
    drafter: Drafter
    verifier: Verifier
    budget: Budget
    step_budget: StepBudget | None = None  # chooses the part of it that each step verifies; None: all


@dataclass
class Step:
    """The tokens that sequences add to a forward, and afterwards its output or its error.

    `number` : the forward's number in the engine; `submit_s` : seconds that the host took to submit it.
    """

    sequences: list[DecodingSequence]
    feeds: list[Feed]
    trees: TreeBatch
    output: StepOutput | None = None
    error: Exception | None = None
    number: int = 0
    submit_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.trees) + sum(len(feed.chain_ids) for feed in self.feeds)


def commit(
    step: Step, accepted: list[Acceptance | None], cache: KVCache, is_end: np.ndarray
) -> dict[DecodingSequence, str]:
    """Commit accepted tokens to the cache and the texts; return the finish reasons of the sequences that ended.

    A sequence whose acceptance is None stays as it was. `is_end` : bool[vocab_size], the end tokens.
    """
    outcomes: dict[DecodingSequence, str] = {}
    assert step.output is not None
    batch, trees = step.output.batch, step.trees
    finite, nodes, lengths = _accepted_nodes(step, accepted)
    token_ids, sources = trees.token_ids[nodes], trees.source[nodes]
    if len(finite):
        is_committed = batch.committed_mask(finite, nodes)
        counts = np.add.reduceat(is_committed, batch.offsets, dtype=np.int64)[finite]
        cache.commit(batch.rows[finite], counts, batch.slot_mapping[is_committed])
    # Lists of Python numbers, because a step of many sequences spends most of its host time in this loop.
    numbers, next_tokens = finite.tolist(), [accepted[i].next_token for i in finite.tolist()]
    paths = pairwise(accumulate(lengths, initial=0))  # each path's part of the tokens
    cached, starts = cache.lengths[batch.rows[finite]].tolist(), trees.starts[finite].tolist()
    per_sequence = zip(
        numbers, paths, next_tokens, is_end[next_tokens].tolist(), batch.num_committed[finite].tolist(), cached, starts,
        trees.sizes[finite].tolist(), strict=True,
    )  # fmt: skip
    for i, (start, end), next_token, at_end, num_before, num_cached, first_node, num_nodes in per_sequence:
        sequence = step.sequences[i]
        if num_before < sequence.num_prompt:  # the step computed a part of its prompt
            cache.remember_prefix(sequence.row, sequence.prompt_ids[:num_cached])
        if num_cached < sequence.length:  # the rest of a long prompt is not computed yet
            continue
        new_token = None if at_end else next_token
        if num_nodes:
            drafted = trees.source[first_node : first_node + num_nodes]
            sequence.append(token_ids[start:end], sources[start:end], new_token, drafted)
        else:
            sequence.append(_NOTHING, _NOTHING, new_token)
        if at_end or sequence.num_left == 0:
            sequence.end_id = next_token if at_end else None
            outcomes[sequence] = "end_of_text" if at_end else "length"
    return outcomes


def observation_of(step: Step, accepted: list[Acceptance | None]) -> Observation:
    """The part of a committed step that drafters observe."""
    assert step.output is not None
    batch = step.output.batch
    finite, nodes, _ = _accepted_nodes(step, accepted)
    committed = np.flatnonzero(batch.committed_mask(finite, nodes))
    hidden = step.output.rows.hidden
    return Observation(
        sequences=step.sequences, trees=step.trees, sequence_of=batch.feed_of[committed],
        positions=batch.positions[committed], hidden=hidden.index_select(0, to_device(committed, hidden.device)),
        rows=step.output.rows, starts=batch.logit_starts,
    )  # fmt: skip


def _accepted_nodes(step: Step, accepted: list[Acceptance | None]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The sequences with finite logits, their accepted nodes (indices over all trees), and the number of each."""
    finite = np.array([i for i, acceptance in enumerate(accepted) if acceptance is not None], np.int64)
    paths = [accepted[i].nodes for i in finite.tolist()]
    lengths = [len(path) for path in paths]
    nodes = np.concatenate([*paths, _NO_NODES]) + np.repeat(step.trees.starts[finite], lengths)
    return finite, nodes, lengths
