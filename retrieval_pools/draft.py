"""Drafting for one sequence or for all sequences of a step: the call that the engine makes once a step.

The compiled part begins in `drafting/tree.py` and takes flat arrays.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from laserbatch.retrieval_pools.drafting import state
from laserbatch.retrieval_pools.drafting.state import MAX_NODES, new_scratch
from laserbatch.retrieval_pools.drafting.tree import compiled_draft_trees
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL, Pool

SHARE = 8  # sequences that a thread drafts at a time; fewer take less time than waking the thread
UNLIMITED_DEPTH = MAX_NODES
_NO_TOKENS = np.empty(0, np.int32)
_INT32, _ONE_AFTER_THE_OTHER = _NO_TOKENS.dtype, _NO_TOKENS.strides


@dataclass(frozen=True)
class DraftOptions:
    """The options of a call of `draft` or `draft_batch`.

    Attributes
    ----------
    max_nodes : the largest number of draft tokens of a sequence, 0 to 64.
    min_acceptance : paths with a lower estimated probability of acceptance are not drafted, nor those below 1/2048.
    use_prompt, use_output, use_previous : which of the sequence's own texts may be drafted from.
    as_chains : for engines that verify no trees: each draft is a single path of up to `max_nodes` tokens, the one with
        the largest sum of its tokens' probabilities of acceptance; later tokens count less (`state.DEPTH_DISCOUNT`). It
        need not begin with the likeliest token; it is searched for among the MAX_NODES likeliest candidate nodes.
    """

    max_nodes: int = 16
    min_acceptance: float = 0.07
    use_prompt: bool = True
    use_output: bool = True
    use_previous: bool = True
    as_chains: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources that are drafted from."""
        used = {"previous": self.use_previous, "prompt": self.use_prompt, "output": self.use_output, "pool": True}
        return tuple(name for name, is_used in used.items() if is_used)


def _row(number: int, is_float: bool = False) -> Any:
    """A property: a view of a row of a draft's array."""
    return property(lambda self: self._rows[number].view(np.float32) if is_float else self._rows[number])


class Draft:
    """A tree of likely next tokens, the most probable path first; parents precede their children.

    Made by `draft`; its arrays are views of a single array.

    Attributes
    ----------
    token_ids : int32[n]
    parents : int32[n], index of the parent node, -1 for the last token of the context.
    log_acceptance : float32[n], log of the estimated probability that the whole path to this node is accepted.
    source : int32[n], the source that contributes most to the node's own probability: a code of `sources`.
    relative_count : float32[n], share of the node's token among the tokens that follow its parent, blended over all
        contexts; the pool's calibration maps it to the node's own probability.
    kind : int32[n], the node's kind in `drafting.estimate`, by its token and its place in the draft.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.shape[1]

    token_ids, parents, source, kind = map(_row, (state.OUT_TOKEN, state.OUT_PARENT, state.OUT_SOURCE, state.OUT_KIND))
    log_acceptance, relative_count = _row(state.OUT_LOG_ACCEPTANCE, True), _row(state.OUT_RELATIVE_COUNT, True)


class Drafts:
    """The drafts of several sequences, in one array; made by `draft_batch`."""

    def __init__(self, outputs: np.ndarray, num_nodes: np.ndarray) -> None:
        # int32[num_sequences, state.NUM_OUTPUTS, max_nodes]; only the first `num_nodes` of each sequence are set.
        self._outputs = outputs
        self._num_nodes = num_nodes

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Draft]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Draft:
        return Draft(self._outputs[number, :, : self._num_nodes[number]])

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The nodes of all drafts, joined in the order of the sequences.

        Returns
        -------
        The number of nodes of each draft, int64[num_sequences]; then `token_ids` and `parents`, int32[n],
        `log_acceptance`, float32[n], and `source`, uint8[n], of all nodes, as in `Draft`.
        """
        is_node = np.arange(self._outputs.shape[2]) < self._num_nodes[:, None]
        token_ids, parents, log_acceptance, source = (
            self._outputs[:, output][is_node]
            for output in (state.OUT_TOKEN, state.OUT_PARENT, state.OUT_LOG_ACCEPTANCE, state.OUT_SOURCE)
        )
        return self._num_nodes, token_ids, parents, log_acceptance.view(np.float32), source.astype(np.uint8)


def draft(
    pool: Pool | None,
    context: np.ndarray,
    num_prompt: int,
    previous: np.ndarray | None = None,
    group: str | None = None,
    options: DraftOptions | None = None,
    max_depth: int = UNLIMITED_DEPTH,
) -> Draft:
    """Draft the likely next tokens of a sequence. Deterministic; safe to call from several threads; frees the GIL.

    Parameters
    ----------
    pool : the pool of the entity's side; None: only the sequence's own texts are drafted from.
    context : int32[n], the prompt and, after it, the output so far.
    num_prompt : number of tokens of `context` that are the prompt.
    previous : int32[m], the entity's text of an earlier night without its end token, or None.
    group : the sequence's group. If the pool does not know it, all texts count the same (scope "side") or none are
        drafted from (scope "group"). None: all texts count the same.
    max_depth : the largest number of draft tokens on a path.

    Raises
    ------
    ValueError
        `max_nodes` is above 64, `num_prompt` is longer than the context, or an array does not hold integers in one row.
    """
    options = DraftOptions() if options is None else options
    if not 0 <= num_prompt <= len(context):
        raise ValueError(f"num_prompt is {num_prompt}; expected 0 to {len(context)}, the tokens of the context")
    pool = EMPTY_POOL if pool is None else pool
    context = int32_row(context)
    previous = int32_row(previous) if options.use_previous and previous is not None else _NO_TOKENS
    compiled_options = _compiled_options(options)
    places, weights, _ = pool.handle
    mine = _workspace
    max_depth = min(max_depth, options.max_nodes) if options.as_chains else max_depth
    _fill_row(mine.row, 0, 0, len(context), num_prompt, 0, len(previous), pool.group_code(group), max_depth, 0)
    outputs = np.empty((1, state.NUM_OUTPUTS, compiled_options[2]), np.int32)
    compiled_draft_trees()(places, weights, mine.scratch, context, previous, mine.sequences, *compiled_options, outputs)
    return Draft(outputs[0, :, : mine.row[state.NUM_NODES]])


def draft_batch(
    pool: Pool | None,
    contexts: Sequence[np.ndarray],
    num_prompts: Sequence[int],
    previous: Sequence[np.ndarray | None] | None = None,
    groups: Sequence[str | None] | None = None,
    max_depths: Sequence[int] | None = None,
    options: DraftOptions | None = None,
    num_threads: int = 1,
) -> Drafts:
    """Draft for many sequences in one call, such as those of a step of the engine, with the same results as `draft`.

    Parameters
    ----------
    contexts, num_prompts, previous, groups, max_depths : for every sequence one value, as `draft` takes it; None: all
        sequences have the default of `draft`.
    num_threads : number of threads that draft in parallel, the caller's included; fewer if there are few sequences.

    Raises
    ------
    ValueError
        As `draft`, or the arguments do not have the same number of values.
    """
    options = DraftOptions() if options is None else options
    num_sequences = len(contexts)
    pool = EMPTY_POOL if pool is None else pool
    previous = [None] * num_sequences if previous is None or not options.use_previous else previous
    groups = [None] * num_sequences if groups is None else groups
    max_depths = [UNLIMITED_DEPTH] * num_sequences if max_depths is None else max_depths
    compiled_options = _compiled_options(options)
    numbers = list(map(len, (contexts, num_prompts, previous, groups, max_depths)))
    if len(set(numbers)) > 1:
        raise ValueError(f"contexts, num_prompts, previous, groups, max_depths are {numbers}; expected equal numbers")
    sequences = np.zeros((num_sequences, state.NUM_SEQUENCE_COLUMNS), np.int64)
    packed_contexts = _pack(contexts, sequences[:, state.CONTEXT_BEGIN : state.CONTEXT_END + 1])
    packed_previous = _pack(previous, sequences[:, state.PREVIOUS_BEGIN : state.PREVIOUS_END + 1])
    sequences[:, state.NUM_PROMPT] = prompts = np.asarray(num_prompts, np.int64)
    sequences[:, state.GROUP] = list(map(pool.group_code, groups))
    sequences[:, state.MAX_DEPTH] = max_depths
    num_known = sequences[:, state.CONTEXT_END] - sequences[:, state.CONTEXT_BEGIN]
    if ((num_known < prompts) | (prompts < 0)).any():
        raise ValueError(f"num_prompts are {prompts.tolist()}; the contexts have {list(map(len, contexts))} tokens")
    if options.as_chains:
        np.minimum(sequences[:, state.MAX_DEPTH], options.max_nodes, out=sequences[:, state.MAX_DEPTH])
    outputs = np.empty((num_sequences, state.NUM_OUTPUTS, compiled_options[2]), np.int32)
    compiled, (places, weights, _) = compiled_draft_trees(), pool.handle
    num_threads = min(num_threads, num_sequences // SHARE)
    share = SHARE if num_threads > 1 else max(num_sequences, 1)
    starts = iter(range(0, num_sequences, share))

    def draft_shares() -> None:
        for start in starts:  # each thread takes the next share that is left
            part = slice(start, start + share)
            compiled(
                places, weights, _workspace.scratch, packed_contexts, packed_previous, sequences[part],
                *compiled_options, outputs[part],
            )  # fmt: skip

    futures = [_threads(num_threads).submit(draft_shares) for _ in range(1, num_threads)]
    draft_shares()
    for future in futures:
        future.result()
    return Drafts(outputs, sequences[:, state.NUM_NODES].copy())


def _compiled_options(options: DraftOptions) -> tuple[bool, bool, int, float, bool]:
    """The options in the form that `tree.draft_trees` takes."""
    max_nodes, as_chains = options.max_nodes, options.as_chains
    if not 0 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}; expected 0 to {MAX_NODES}")
    num_outputs = MAX_NODES if as_chains and max_nodes else max_nodes
    return options.use_output, options.use_prompt, num_outputs, options.min_acceptance, as_chains


def _pack(rows: Sequence[np.ndarray | None], bounds: np.ndarray) -> np.ndarray:
    """Rows of token ids end to end, None as an empty row; writes the begin and end of each to `bounds`, int64[n, 2]."""
    if all(row is None for row in rows):
        bounds[:] = 0
        return _NO_TOKENS
    rows = [_NO_TOKENS if row is None else row for row in rows]
    bounds[:, 1] = np.cumsum([len(row) for row in rows], dtype=np.int64)
    bounds[1:, 0] = bounds[:-1, 1]
    packed = np.concatenate([_NO_TOKENS, *rows])
    if packed.dtype == np.int32:
        return packed
    return np.concatenate([_NO_TOKENS, *map(int32_row, rows)])


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="draft")


class _Workspace(threading.local):
    """Memory that a thread reuses for its drafts: `scratch`, and one row of `sequences`, of which `row` is a view."""

    def __init__(self) -> None:
        self.scratch = new_scratch()
        self.sequences = np.zeros((1, state.NUM_SEQUENCE_COLUMNS), np.int64)
        self.row = self.sequences.data.cast("B").cast("q")


_workspace = _Workspace()
_fill_row = struct.Struct(f"{state.NUM_SEQUENCE_COLUMNS}q").pack_into


def int32_row(tokens: np.ndarray) -> np.ndarray:
    if type(tokens) is np.ndarray and tokens.dtype is _INT32 and tokens.strides == _ONE_AFTER_THE_OTHER:
        return tokens
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be one row of integers, found shape {tokens.shape} of {tokens.dtype}")
    row = np.ascontiguousarray(tokens, np.int32)
    if (is_cut := row != tokens).any():
        place = int(is_cut.argmax())
        raise ValueError(f"token id number {place} (from 0) of {tokens.size} is {tokens[place]}; expected an int32")
    return row
