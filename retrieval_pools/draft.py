"""Drafting for one sequence or for all of a step: the call that the engine makes once a step.

What is compiled begins in `drafting/tree.py` and takes flat arrays.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from laserbatch.retrieval_pools.drafting import state
from laserbatch.retrieval_pools.drafting.state import MAX_NODES, new_scratch
from laserbatch.retrieval_pools.drafting.tree import compiled_draft_trees
from laserbatch.retrieval_pools.index.pool import EMPTY_POOL, Pool

SHARE = 8  # sequences that a thread drafts at a time; fewer take less time than it takes to wake up
UNLIMITED_DEPTH = MAX_NODES
_NO_TOKENS = np.empty(0, np.int32)
_INT32, _ONE_AFTER_THE_OTHER = _NO_TOKENS.dtype, _NO_TOKENS.strides


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are asked for.

    Attributes
    ----------
    max_nodes : at most this many tokens are drafted, 0 to 64.
    min_acceptance : paths estimated to be less likely are not drafted, nor those of a product of estimates below
        1/2048.
    use_prompt, use_output, use_previous : which of the sequence's own texts may be drafted from.
    as_chains : for engines that verify no trees: of each sequence the one path of at most `max_nodes` tokens that is
        worth most, by the sum of its tokens' probabilities, those further on counting less (`state.DEPTH_DISCOUNT`). It
        need not begin with the likeliest token; it is looked for among the MAX_NODES likeliest that could be in it.
    """

    max_nodes: int = 16
    min_acceptance: float = 0.07
    use_prompt: bool = True
    use_output: bool = True
    use_previous: bool = True
    as_chains: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """What is drafted from, by name."""
        used = {"previous": self.use_previous, "prompt": self.use_prompt, "output": self.use_output, "pool": True}
        return tuple(name for name, is_used in used.items() if is_used)


class Draft:
    """A tree of likely next tokens, the most probable path first; parents precede their children.

    Made by `draft`; its arrays are views of one.

    Attributes
    ----------
    token_ids : int32[n]
    parents : int32[n], index of the parent node, -1 for the last token of the context.
    log_acceptance : float32[n], log of the estimated probability that the text goes along the whole path to this node.
    source : int32[n], the source that most of the node's own probability comes from: a code of `sources`.
    relative_count : float32[n], share of the node's token in what follows its parent, all contexts blended: what the
        pool's calibration makes the node's own probability of.
    kind : int32[n], a kind of `drafting.estimate`: of the token, and of its place in the draft.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.shape[1]

    @property
    def token_ids(self) -> np.ndarray:
        return self._rows[state.OUT_TOKEN]

    @property
    def parents(self) -> np.ndarray:
        return self._rows[state.OUT_PARENT]

    @property
    def log_acceptance(self) -> np.ndarray:
        return self._rows[state.OUT_LOG_ACCEPTANCE].view(np.float32)

    @property
    def source(self) -> np.ndarray:
        return self._rows[state.OUT_SOURCE]

    @property
    def relative_count(self) -> np.ndarray:
        return self._rows[state.OUT_RELATIVE_COUNT].view(np.float32)

    @property
    def kind(self) -> np.ndarray:
        return self._rows[state.OUT_KIND]


class Drafts:
    """What `draft_batch` found for several sequences, all of it in one array."""

    def __init__(self, outputs: np.ndarray, num_nodes: np.ndarray) -> None:
        # int32[num_sequences, state.NUM_OUTPUTS, max_nodes]; of each sequence the first `num_nodes` are set.
        self._outputs = outputs
        self._num_nodes = num_nodes

    def __len__(self) -> int:
        return len(self._outputs)

    def __iter__(self) -> Iterator[Draft]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Draft:
        return Draft(self._outputs[number, :, : self._num_nodes[number]])

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All nodes, one draft's after another's.

        Returns
        -------
        How many each draft has, int64[num_sequences]; and of nodes `token_ids` and `parents` int32[n],
        `log_acceptance` float32[n] and `source` uint8[n], as `Draft` has them.
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
    """What a sequence is likely to go on with. Deterministic; safe to call from several threads; frees the GIL.

    Parameters
    ----------
    pool : the routed side's pool, None for the sequence's own texts alone.
    context : int32[n], the prompt and, after it, the output so far.
    num_prompt : how many tokens of `context` are the prompt.
    previous : int32[m], the entity's text of an earlier night without its end token, or None.
    group : the sequence's group; one that the pool does not know counts nothing more (scope "side") or has no texts
        (scope "group"). None: all texts count the same.
    max_depth : at most so many tokens follow each other.

    Raises
    ------
    ValueError
        `max_nodes` is above 64, `num_prompt` is longer than the context, or an array does not hold integers in one row.
    """
    options = DraftOptions() if options is None else options
    if not 0 <= num_prompt <= len(context):
        raise ValueError(f"num_prompt is {num_prompt}; the context has {len(context)} tokens")
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
    """What `draft` says of each of many sequences, asked at once: a step of the engine.

    Parameters
    ----------
    contexts, num_prompts, previous, groups, max_depths : one of each for every sequence, as `draft` takes them; None:
        what is its default there, for all of them.
    num_threads : threads that draft side by side, the caller's among them; fewer where there are few sequences.

    Raises
    ------
    ValueError
        As `draft`, or there is not one of each for every sequence.
    """
    options = DraftOptions() if options is None else options
    num_sequences = len(contexts)
    pool = EMPTY_POOL if pool is None else pool
    previous = [None] * num_sequences if previous is None or not options.use_previous else previous
    groups = [None] * num_sequences if groups is None else groups
    max_depths = [UNLIMITED_DEPTH] * num_sequences if max_depths is None else max_depths
    compiled_options = _compiled_options(options)
    packed_contexts, packed_previous, sequences = _pack_sequences(
        pool, contexts, num_prompts, previous, groups, max_depths
    )
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
        raise ValueError(f"max_nodes is {max_nodes}; a tree has 0 to {MAX_NODES} nodes")
    num_outputs = MAX_NODES if as_chains and max_nodes else max_nodes
    return options.use_output, options.use_prompt, num_outputs, options.min_acceptance, as_chains


def _pack_sequences(
    pool: Pool,
    contexts: Sequence[np.ndarray],
    num_prompts: Sequence[int],
    previous: Sequence[np.ndarray | None],
    groups: Sequence[str | None],
    max_depths: Sequence[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contexts end to end, previous texts likewise, and the columns of `state` that say where each sequence's stand."""
    num_sequences = len(contexts)
    numbers = list(map(len, (contexts, num_prompts, previous, groups, max_depths)))
    if len(set(numbers)) > 1:
        raise ValueError(f"contexts, num_prompts, previous, groups, max_depths are {numbers}; as many of each expected")
    sequences = np.zeros((num_sequences, state.NUM_SEQUENCE_COLUMNS), np.int64)
    packed_contexts = _pack(contexts, sequences[:, state.CONTEXT_BEGIN : state.CONTEXT_END + 1])
    packed_previous = _pack(previous, sequences[:, state.PREVIOUS_BEGIN : state.PREVIOUS_END + 1])
    sequences[:, state.NUM_PROMPT] = prompts = np.asarray(num_prompts, np.int64)
    sequences[:, state.GROUP] = list(map(pool.group_code, groups))
    sequences[:, state.MAX_DEPTH] = max_depths
    num_known = sequences[:, state.CONTEXT_END] - sequences[:, state.CONTEXT_BEGIN]
    if ((num_known < prompts) | (prompts < 0)).any():
        raise ValueError(f"num_prompts are {prompts.tolist()}; the contexts have {list(map(len, contexts))} tokens")
    return packed_contexts, packed_previous, sequences


def _pack(rows: Sequence[np.ndarray | None], bounds: np.ndarray) -> np.ndarray:
    """Rows of token ids end to end, None being empty; where each begins and ends is written: int64[n, 2]."""
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
    """What a thread's drafts use one after the other: `scratch`, and the row of one sequence, written as `row`."""

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
        raise ValueError(f"token id {place} of {tokens.size}, from 0, is {tokens[place]}; expected an int32")
    return row
