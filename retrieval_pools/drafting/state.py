"""What a draft works on: flat arrays under names, and the limits that size them."""

from typing import NamedTuple

import numpy as np

MAX_NODES = 64
LEAST_LEFT = 1 / 32  # shorter contexts are asked while so much is left to them: whatever the budget, so that estimates
# do not depend on it and a smaller budget's tree is the beginning of a larger one's
MIN_ACCEPTANCE = 1 / 2048  # the paths not yet drafted exclude each other, so no more than 2048 of them are as likely
END = -1  # the separator: the text ends here
LEAST_SAMPLES_BITS = 4  # behind unlikely paths a 16th of the samples is enough
NUM_LOCAL_POSITIONS = 16  # occurrences of a context followed in each of the sequence's own texts, the latest ones
NUM_OWN_TOKENS = 512  # of the prompt and of the output, the latest ones, in which a token is looked for
NUM_OWN_SLOTS = 2048  # of the hash table of these; a power of two
MAX_LEVELS = 12
NUM_CANDIDATES = 1024
NUM_SLOTS = 2048  # of the hash table from token to candidate; a power of two
NUM_RUNS = NUM_CANDIDATES  # of next tokens of a level
EVERYONE, UNKNOWN = -1, -2  # in place of a group: a sequence of none, one of a group that has no texts
NUM_SEQUENCE_COLUMNS = 8
CONTEXT_BEGIN, CONTEXT_END, NUM_PROMPT, PREVIOUS_BEGIN, PREVIOUS_END, GROUP, MAX_DEPTH, NUM_NODES = range(
    NUM_SEQUENCE_COLUMNS
)
NUM_OUTPUTS = 6
OUT_TOKEN, OUT_PARENT, OUT_LOG_ACCEPTANCE, OUT_SOURCE, OUT_RELATIVE_COUNT, OUT_KIND = range(NUM_OUTPUTS)


class Index(NamedTuple):
    """The arrays of a pool: `group_codes[k]` belongs to the text of position `order[k]`; see `suffix_order`.

    Likewise `support[k]`, how many tokens from `order[k]` on enough entities have (see `support.py`); None where
    nothing is kept back.
    """

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray | None
    depth: int


class CompiledIndex(NamedTuple):
    """The same in compiled code: `support` is empty where nothing is kept back, and one array of codes always is."""

    tokens: np.ndarray
    order: np.ndarray
    group_codes: np.ndarray
    wide_codes: np.ndarray
    starts: np.ndarray
    support: np.ndarray
    depth: int


class Estimates(NamedTuple):
    """What makes probabilities of counts; see `estimate`. `frequencies[token + 1]` is a token's bin."""

    frequencies: np.ndarray
    bounds: np.ndarray
    curves: np.ndarray


class Preference(NamedTuple):
    """How much an occurrence counts in the pool: `inside` texts of the group, `outside` them."""

    group: int
    inside: float
    outside: float
    num_samples: int


class Context(NamedTuple):
    """The sequence: `tokens[:num_prompt]` is the prompt, the rest the output; `previous` an earlier night's text."""

    tokens: np.ndarray
    num_prompt: int
    previous: np.ndarray
    max_match: int
    max_tokens: int


class Options(NamedTuple):
    """What holds of all sequences of a call; see `PoolSettings` and `draft`."""

    num_context_lengths: int
    pool_escape: float
    previous_escape: float
    local_escape: float
    use_output: bool
    use_prompt: bool
    max_nodes: int
    min_acceptance: float
    end_token_id: int


class Levels(NamedTuple):
    """Who is asked, longest context first, and where each stands at every node of the tree (node 0: the root).

    `first` and `last`, (MAX_NODES + 1, MAX_LEVELS): the interval of the pool's order that begins with context and path;
    for the sequence's own texts 0 and the number of `positions`, (MAX_NODES + 1, NUM_SOURCES, NUM_LOCAL_POSITIONS),
    where the next token would stand. `depth` of every node; of `known_at`, `counted` and `may_know` a bit for each
    level: whether those are known there, whether every occurrence was counted, and whether there may be any.
    """

    source: np.ndarray
    length: np.ndarray
    escape: np.ndarray
    first: np.ndarray
    last: np.ndarray
    positions: np.ndarray
    depth: np.ndarray
    known_at: np.ndarray
    counted: np.ndarray
    may_know: np.ndarray


class Lookup(NamedTuple):
    """What is looked up: `recent` tokens in the pool, and `found`, the interval of each number of them, -1: not yet.

    `own` is a hash table of the tokens of prompt and output, see `estimate.kind_of`.
    """

    recent: np.ndarray
    found: np.ndarray
    own: np.ndarray


class Candidates(NamedTuple):
    """Possible next tokens of a node: `total[c]` is the relative count of `token[c]`, `pool[c]` the pool's part of it.

    Each own text adds at most once: `own[c]` is the largest such part, `own_source[c]` whose it is. `slots` is a hash
    table from token to c + 1, `slot_of[c]` the place of c in it. `runs[c, level]` is the token's run at a level, as in
    `Runs`, if bit `level` of `has_run[c]` is set.
    """

    token: np.ndarray
    total: np.ndarray
    pool: np.ndarray
    own: np.ndarray
    own_source: np.ndarray
    slots: np.ndarray
    slot_of: np.ndarray
    runs: np.ndarray
    has_run: np.ndarray


class Runs(NamedTuple):
    """Next tokens of a level: how much each counts, and whether it may be drafted.

    `begin` and `end` say where a pool's run stands in its interval: by the numbers of its samples, or exactly where the
    whole interval was counted; 0 and 0 where that is not known.
    """

    token: np.ndarray
    weight: np.ndarray
    is_drafted: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Frontier(NamedTuple):
    """Paths in the order in which they are drafted: those drafted already, then those that may be.

    `probability` is in that order, and so is `slots`, which says where the rest of a path stands: `runs` and `has_run`
    are those of its last token, see `Candidates`.
    """

    probability: np.ndarray
    slots: np.ndarray
    token: np.ndarray
    parent: np.ndarray
    source: np.ndarray
    relative_count: np.ndarray
    kind: np.ndarray
    runs: np.ndarray
    has_run: np.ndarray


class Scratch(NamedTuple):
    """All that one draft works on; the next one may use it again."""

    lookup: Lookup
    levels: Levels
    candidates: Candidates
    runs: Runs
    frontier: Frontier
