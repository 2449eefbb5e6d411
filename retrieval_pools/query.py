"""Drafting for one sequence: the call that the engine makes once a step.

Compiles the query when it is first needed (once a machine: numba caches it on disk) and hands it flat arrays. Knows
nothing of models, tokens' meaning, or how drafts are verified.
"""

from functools import cache

import numpy as np

from retrieval_pools.drafting.state import (
    MAX_NODES,
    OUT_LOG_ACCEPTANCE,
    OUT_MATCH_LENGTH,
    OUT_NUM_SEEN,
    OUT_PARENT,
    OUT_RELATIVE_COUNT,
    OUT_SOURCE,
    OUT_TOKEN,
)
from retrieval_pools.drafting.tree import compile_draft_tree
from retrieval_pools.pool import EMPTY_POOL, Pool

MAX_FIRST_DRAFTS = 4096  # remembered of a pool
_NO_TOKENS = np.empty(0, np.int32)


class Draft:
    """A tree of likely next tokens, the most probable path first; parents precede their children.

    Made by `draft`; its arrays are views of one.

    Attributes
    ----------
    token_ids : int32[n]
    parents : int32[n], index of the parent node, -1 for the last token of the context.
    log_acceptance : float32[n], log of the estimated probability that the text goes along the whole path to this node.
    source : int32[n], the source that most of the node's own probability comes from: a code of `sources`.
    num_seen : int32[n], how often the longest context that the node's token is known behind was seen.
    match_length : int32[n], tokens of that context, the node's path included.
    relative_count : float32[n], share of the node's token in what follows its parent, all contexts blended: what the
        pool's calibration makes the node's own probability of.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.shape[1]

    @property
    def token_ids(self) -> np.ndarray:
        return self._rows[OUT_TOKEN]

    @property
    def parents(self) -> np.ndarray:
        return self._rows[OUT_PARENT]

    @property
    def log_acceptance(self) -> np.ndarray:
        return self._rows[OUT_LOG_ACCEPTANCE].view(np.float32)

    @property
    def source(self) -> np.ndarray:
        return self._rows[OUT_SOURCE]

    @property
    def num_seen(self) -> np.ndarray:
        return self._rows[OUT_NUM_SEEN]

    @property
    def match_length(self) -> np.ndarray:
        return self._rows[OUT_MATCH_LENGTH]

    @property
    def relative_count(self) -> np.ndarray:
        return self._rows[OUT_RELATIVE_COUNT].view(np.float32)


compiled_query = cache(compile_draft_tree)  # compiled when it is first needed


def draft(
    pool: Pool | None,
    context: np.ndarray,
    num_prompt: int,
    previous: np.ndarray | None = None,
    group: str | None = None,
    *,
    max_nodes: int = 16,
    min_probability: float = 0.02,
    use_prompt: bool = True,
    use_output: bool = True,
    use_previous: bool = True,
    end_token_id: int | None = None,
) -> Draft:
    """What a sequence is likely to go on with. Deterministic; safe to call from several threads; frees the GIL.

    The arrays of a draft are read-only: it may be shared with other callers.

    Parameters
    ----------
    pool : the routed side's pool, None for the sequence's own texts alone.
    context : int32[n], the prompt and, after it, the output so far.
    num_prompt : how many tokens of `context` are the prompt.
    previous : int32[m], the entity's text of an earlier night without its end token, or None.
    group : the sequence's group; one that the pool does not know counts nothing more (scope "side") or has no texts
        (scope "group"). None: all texts count the same.
    max_nodes : at most this many tokens are drafted, 0 to 64.
    min_probability : paths estimated to be less likely are not drafted, nor those of a product of estimates below
        1/2048.
    use_prompt, use_output, use_previous : which of the sequence's own texts may be drafted from.
    end_token_id : draft this token where texts are known to end. None: an end takes its share of the probability but is
        not drafted.

    Raises
    ------
    ValueError
        `max_nodes` is above 64, `num_prompt` is longer than the context, or an array does not hold integers in one row.
    """
    if not 0 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}; a tree has 0 to {MAX_NODES} nodes")
    if not 0 <= num_prompt <= len(context):
        raise ValueError(f"num_prompt is {num_prompt}; the context has {len(context)} tokens")
    pool = EMPTY_POOL if pool is None else pool
    use_previous = use_previous and previous is not None and len(previous) > 0
    if num_prompt < len(context) or use_previous:
        own = use_previous, use_output, use_prompt
        known = _int32_row(context), num_prompt, _int32_row(previous) if use_previous else _NO_TOKENS
        return _draft(pool, group, known, own, max_nodes, min_probability, end_token_id)
    # How texts begin depends on nothing else where there is no earlier one: drafted once, then remembered.
    asked = group, max_nodes, min_probability, end_token_id
    found = pool.first_drafts.get(asked)
    if found is None:
        found = _draft(pool, group, (_NO_TOKENS, 0, _NO_TOKENS), (False, False, False), *asked[1:])
        if len(pool.first_drafts) < MAX_FIRST_DRAFTS:
            pool.first_drafts[asked] = found
    return found


def _draft(
    pool: Pool,
    group: str | None,
    known: tuple[np.ndarray, int, np.ndarray],
    own: tuple[bool, bool, bool],
    max_nodes: int,
    min_probability: float,
    end_token_id: int | None,
) -> Draft:
    rows = compiled_query(pool.variant)(
        *pool.index_arguments,
        *pool.preference_arguments(group),
        *known,
        *pool.option_arguments,
        *own,
        max_nodes,
        min_probability,
        -1 if end_token_id is None else end_token_id,
    )
    rows.flags.writeable = False  # it may be remembered
    return Draft(rows)


def _int32_row(tokens: np.ndarray) -> np.ndarray:
    if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be one row of integers, found shape {tokens.shape} of {tokens.dtype}")
    return np.ascontiguousarray(tokens, np.int32)
