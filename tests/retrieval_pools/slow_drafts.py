"""The slow reference of drafting: the same drafts as the compiled query, by looking at every position of every text.

It has no index, no sampling and no heap. A pool is a list of texts, an occurrence is a (text, position), the frontier
is a sorted list. The tests compare `draft` with this, and a reader may start here.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from laserbatch.retrieval_pools.drafting.estimate import (
    COUNT_KNOTS,
    DEPTH_EDGES,
    FREQUENCY_EXPONENTS,
    IDENTITY_CURVES,
    IN_OUTPUT,
    IN_PROMPT,
    NUM_DEPTHS,
    NUM_FREQUENCIES,
    NUM_PLACES,
    SEEN_EDGES,
)
from laserbatch.retrieval_pools.index.pool import DEFAULT_POOL_ESCAPE
from laserbatch.retrieval_pools.settings import DraftSettings
from laserbatch.retrieval_pools.sources import SOURCE_OUTPUT, SOURCE_POOL, SOURCE_PREVIOUS, SOURCE_PROMPT

START = END = -1  # placed before and after every text
MIN_ACCEPTANCE = 1 / 2048
MIN_SHARE_LEFT = 1 / 32
NUM_LOCAL_POSITIONS = 16
NUM_OWN_TOKENS = 512

Tokens = list[int]
NGrams = set[tuple[int, ...]]


@dataclass(frozen=True)
class ReferenceText:
    """One text of the pool: START, its tokens, END. `entity`: the entity that it is about, for `min_support`."""

    tokens: Tokens
    group: str
    entity: str | int = ""


class Place(NamedTuple):
    """The position `text[at]` of a next token, and its weight."""

    text: Tokens
    at: int
    weight: float

    @property
    def token(self) -> int:
        """The next token."""
        return self.text[self.at]


@dataclass(frozen=True)
class Level:
    """A predictor of the next token: the places of a source that follow the last `length` tokens of the context.

    `drafted`: the n-grams that may be drafted; None: all.
    """

    source: int
    length: int
    escape: float
    places: list[Place]
    max_depth: int
    drafted: NGrams | None = None

    def may_draft(self, place: Place) -> bool:
        """Whether enough entities have the n-gram of the matched context, the path so far, and the token at a place."""
        return self.drafted is None or tuple(place.text[place.at - self.length : place.at + 1]) in self.drafted

    def has_next(self) -> bool:
        """Whether any token may be drafted."""
        return any(self.may_draft(place) for place in self.places)

    def by_token(self) -> dict[int, list[Place]]:
        """The places, grouped by their token."""
        places: dict[int, list[Place]] = {}
        for place in self.places:
            places.setdefault(place.token, []).append(place)
        return places

    def after(self, token: int) -> "Level":
        """The level after `token` was appended to the path: the places that continue with it, one position further."""
        deeper = [p._replace(at=p.at + 1) for p in self.places if p.token == token and p.at + 1 < len(p.text)]
        if self.length + 1 >= self.max_depth:
            deeper = []
        return replace(self, length=self.length + 1, places=deeper)


@dataclass(frozen=True)
class TokenKinds:
    """What a token's kind depends on: the latest tokens of prompt and output, and the pool's token counts."""

    prompt: Tokens
    output: Tokens
    num_occurrences: Counter[int]

    @classmethod
    def of(cls, texts: Sequence[ReferenceText], prompt: Tokens, output: Tokens) -> "TokenKinds":
        """Collect the counts of the pool's texts and the latest tokens of a sequence."""
        occurrences = Counter(token for text in texts for token in (*text.tokens, END))
        return cls(prompt[-NUM_OWN_TOKENS:], output[-NUM_OWN_TOKENS:], occurrences)

    def kind(self, token: int) -> int:
        """The kind of a token, without its place in the tree; see `drafting.estimate`."""
        stands_in = IN_PROMPT * (token in self.prompt) + IN_OUTPUT * (token in self.output)
        return token_kind(stands_in, self.num_occurrences[token], self.num_occurrences.total())


@dataclass(frozen=True)
class ReferenceNode:
    """A drafted token: the fields of a `Draft`, with the probability in place of its logarithm."""

    token_id: int
    parent: int
    probability: float
    source: int
    relative_count: float
    kind: int


@dataclass(frozen=True)
class _Path:
    """A path on the frontier. `order` is the order in which paths are drafted."""

    probability: float
    token: int
    parent: int
    source: int
    relative_count: float
    kind: int
    levels: list[Level]

    def order(self) -> tuple[float, int, int]:
        return (-self.probability, self.token, self.parent)

    def drafted(self) -> ReferenceNode:
        """The node of the path's last token."""
        own = self.source, self.relative_count, self.kind
        return ReferenceNode(self.token, self.parent, self.probability, *own)


def draft_reference(
    texts: Sequence[ReferenceText],
    settings: DraftSettings,
    prompt: Tokens,
    output: Tokens,
    previous: Tokens | None,
    group: str | None,
    *,
    max_nodes: int,
    min_acceptance: float,
    use_prompt: bool = True,
    use_output: bool = True,
    use_previous: bool = True,
    max_depth: int = 64,
    curves: np.ndarray = IDENTITY_CURVES,
) -> list[ReferenceNode]:
    """The result of `draft`, computed from every occurrence. Texts are given without START and END.

    The frontier keeps at most as many paths as nodes may still be drafted. When it is full, paths less probable than
    its last one are skipped.
    """
    min_acceptance = max(min_acceptance, MIN_ACCEPTANCE)
    context = [START, *output]
    own_texts = {  # the order of levels of equal length
        SOURCE_PREVIOUS: [START, *previous, END] if use_previous and previous else [],
        SOURCE_OUTPUT: output if use_output else [],
        SOURCE_PROMPT: prompt if use_prompt else [],
    }
    levels = all_levels(texts, settings, context, own_texts, group)
    is_first = not output and not (use_previous and previous)  # such a draft ignores which tokens are in the prompt
    kinds = TokenKinds.of(texts, prompt if use_prompt and not is_first else [], output if use_output else [])
    nodes: list[ReferenceNode] = []
    frontier: list[_Path] = []
    depth_of = {-1: 0}
    node, depth, probability = -1, 0, 1.0
    while len(nodes) < max_nodes:
        if depth < max_depth:
            room = max_nodes - len(nodes)
            least = frontier[-1].probability if len(frontier) == room else 0.0
            paths = next_paths(levels, node, depth, probability, max(least, min_acceptance), kinds, curves)
            frontier += (path for path in paths if path.token != END and path.probability >= min_acceptance)
            frontier = sorted(frontier, key=_Path.order)[:room]
        if not frontier:
            break
        path = frontier.pop(0)
        node, probability = len(nodes), path.probability
        depth = depth_of[path.parent] + 1
        depth_of[node] = depth
        nodes.append(path.drafted())
        levels = [level.after(path.token) for level in path.levels]
    return nodes


def best_chain(nodes: Sequence[ReferenceNode]) -> tuple[Tokens, float]:
    """The path of a tree with the highest worth, and its worth: the sum over its tokens of the probability of the path
    to the token, halved with each token after the first.
    """
    best: tuple[Tokens, float] = [], 0.0
    for node in nodes:
        path = [node]
        while path[0].parent >= 0:
            path.insert(0, nodes[path[0].parent])
        worth = sum(node.probability / 2**place for place, node in enumerate(path))
        if worth > best[1]:
            best = [node.token_id for node in path], worth
    return best


def next_paths(
    levels: list[Level],
    parent: int,
    depth: int,
    probability: float,
    least_acceptance: float,
    kinds: TokenKinds,
    curves: np.ndarray,
) -> Iterator[_Path]:
    """The extensions of a path by one token: each level, longest first, takes a share of what the others left."""
    shares: dict[int, Counter[int]] = {}  # token -> source -> share
    seen: dict[int, int] = {}  # token -> number of occurrences of the longest context that predicts it
    if probability < least_acceptance:
        return
    left = 1.0
    for level in levels:
        if left < MIN_SHARE_LEFT:
            break
        num_seen = len(level.places)  # the evidence; weights of groups do not change it
        if num_seen == 0:
            continue
        by_token = level.by_token()
        escape = level.escape if level.source == SOURCE_POOL else level.escape / level.length
        confidence = num_seen / (num_seen + escape * len(by_token))
        weight = sum(place.weight for place in level.places)
        weight_of_place = left * confidence / weight
        left *= 1 - confidence
        for token, places in sorted(by_token.items()):
            counted = weight_of_place * sum(place.weight for place in places)
            if not level.may_draft(places[0]):
                left += counted
                continue
            seen.setdefault(token, num_seen)
            shares.setdefault(token, Counter())[level.source] += counted
    for token, by_source in shares.items():
        source = max(sorted(by_source), key=by_source.__getitem__)
        relative_count = sum(by_source.values())
        kind = node_kind(kinds.kind(token), seen[token], depth)
        own = acceptance(curves[source, kind], relative_count)
        yield _Path(probability * own, token, parent, source, relative_count, kind, levels)


def node_kind(of_token: int, num_seen: int, depth: int) -> int:
    """The kind of a node: its token's kind, how often the context that predicts it occurs, and its depth."""
    seen, deep = (sum(n >= edge for edge in edges) for n, edges in ((num_seen, SEEN_EDGES), (depth, DEPTH_EDGES)))
    return of_token * NUM_PLACES + seen * NUM_DEPTHS + deep


def token_kind(stands_in: int, num_occurrences: int, num_positions: int) -> int:
    """The kind of a token.

    Parameters
    ----------
    stands_in : IN_PROMPT and IN_OUTPUT, or one of them, or 0.
    num_occurrences : of the token in the pool.
    num_positions : of the pool: its tokens and the ends of its texts.
    """
    frequency = sum((num_occurrences << -exponent) >= max(num_positions, 1) for exponent in FREQUENCY_EXPONENTS)
    return stands_in * NUM_FREQUENCIES + frequency


def acceptance(curve: np.ndarray, relative_count: float) -> float:
    """A curve with values at COUNT_KNOTS: linear between them, and below the first knot to the origin."""
    x, knots, values = np.float64(np.float32(relative_count)), COUNT_KNOTS.astype(float), curve.astype(float)
    return float(values[0] * (x / knots[0])) if x < knots[0] else float(np.interp(x, knots, values))


def all_levels(
    texts: Sequence[ReferenceText],
    settings: DraftSettings,
    context: Tokens,
    own_texts: dict[int, Tokens],
    group: str | None,
) -> list[Level]:
    """The levels of the own texts (by source) and of the pool, longest first; among equals the pool's are last."""
    levels = []
    for source, text in own_texts.items():
        escape = settings.previous_escape if source == SOURCE_PREVIOUS else settings.local_escape
        levels += own_level(source, text, context, escape, settings)
    levels += pool_levels(texts, settings, context, group)
    return sorted(levels, key=lambda level: -level.length)


def pool_levels(
    texts: Sequence[ReferenceText], settings: DraftSettings, context: Tokens, group: str | None
) -> list[Level]:
    """The longest context that the pool can continue, then shorter ones that occur twice as often as the last one."""
    drafted = supported_ngrams(texts, settings)
    escape = settings.pool_escape_per_token or DEFAULT_POOL_ESCAPE
    of_length: dict[int, Level] = {}
    for length in range(1, settings.max_match_tokens + 1):
        places = _places(texts, settings, context, length, group)
        of_length[length] = Level(SOURCE_POOL, length, escape, places, settings.index_depth, drafted)
    length = max((level.length for level in of_length.values() if level.has_next()), default=0)
    levels: list[Level] = []
    before = 0
    while length >= 1 and len(levels) < settings.num_context_lengths:
        num_seen = len(of_length[length].places)
        if num_seen >= 2 * before or (length == 1 and num_seen > before):
            levels.append(of_length[length])
            before = num_seen
        length = length - 1 if length <= 4 else 2 * length // 3
    return levels


def supported_ngrams(texts: Sequence[ReferenceText], settings: DraftSettings) -> NGrams | None:
    """The n-grams in texts of at least `min_support` entities, with START and END as tokens; None if that is all."""
    if settings.min_support == 1:
        return None
    entities: dict[tuple[int, ...], set[str | int]] = {}
    for text in texts:
        tokens = (START, *text.tokens, END)
        for first in range(len(tokens) - 1):
            for last in range(first + 1, min(first + settings.index_depth, len(tokens)) + 1):
                entities.setdefault(tokens[first:last], set()).add(text.entity)
    return {ngram for ngram, of in entities.items() if len(of) >= settings.min_support}


def _places(
    texts: Sequence[ReferenceText], settings: DraftSettings, context: Tokens, length: int, group: str | None
) -> list[Place]:
    if length > len(context) or START in context[len(context) - length + 1 :] or min(context[1:], default=0) < 0:
        return []
    ending = context[len(context) - length :]
    places = []
    known_groups = {text.group for text in texts}
    for text in texts:
        counts = _weight(settings, text.group, group, known_groups)
        tokens = [START, *text.tokens, END]
        for at in range(length, len(tokens)):
            if tokens[at - length : at] == ending and counts > 0:
                places.append(Place(tokens, at, counts))
    return places


def _weight(settings: DraftSettings, of_text: str, group: str | None, known_groups: set[str]) -> float:
    if group is None:
        return 1.0
    if group not in known_groups:
        return 0.0 if settings.scope == "group" else 1.0
    if settings.scope == "group":
        return 1.0 if of_text == group else 0.0
    return settings.group_weight if of_text == group else 1.0


def own_level(source: int, text: Tokens, context: Tokens, escape: float, settings: DraftSettings) -> list[Level]:
    """The latest places of the context's longest suffix in the sequence's own text, or no level."""
    matches = []
    for at in range(1, len(text)):
        length = 0
        while (
            length < min(at, len(context), settings.max_match_tokens) and text[at - 1 - length] == context[-1 - length]
        ):
            length += 1
        if length > 0:
            matches.append((length, at))
    longest = max((length for length, _ in matches), default=0)
    latest = [at for length, at in reversed(matches) if length == longest][:NUM_LOCAL_POSITIONS]
    never = math.inf
    return [Level(source, longest, escape, [Place(text, at, 1.0) for at in latest], never)] if latest else []
