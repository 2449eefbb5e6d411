"""Beam search that samples its beams, drafted and verified loosely (AtSpeed: Lin et al., ICLR 2025, 3.2, Algorithm 2).

A level's beams are K different paths drawn from the target's distribution over what may follow those before. A draft
that was drawn by a small model is accepted with probability min(1, p / q) each, so paths that are none of the target's
own draws may stay. What is missing of K is drawn from norm(max(0, p - q)). For K = 1 that is speculative sampling, and
exact; for more, paths are all different, for which p is nearly right while K is small beside what may follow.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laserbatch.research.recommending.beams import BeamResult, Beams
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.item_trie import ItemTrie


def followers(trees: CodeTrees, trie: ItemTrie, user: int, beams: Beams) -> tuple[Beams, np.ndarray] | None:
    """All paths one level on, and their log probabilities, which are those of all together; None: one is not known."""
    rows = [trees.log_p(user, path, node) for path, node in zip(beams.paths, beams.nodes.tolist(), strict=True)]
    if any(row is None for row in rows):
        return None
    scores = (beams.scores[:, None] + np.stack(rows)).ravel()
    known = np.flatnonzero(np.isfinite(scores))
    above, places = np.divmod(known, rows[0].size)
    codes, nodes = (table[beams.level][beams.nodes[above], places] for table in (trie.codes, trie.nodes))
    paths = tuple((*beams.paths[row], code) for row, code in zip(above.tolist(), codes.tolist(), strict=True))
    log_p = scores[known] - np.logaddexp.reduce(scores[known])
    return Beams(paths, nodes, scores[known]), log_p


def drawn(log_p: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Places of `size` different draws, in their order (Gumbel top-k: Kool et al. 2019)."""
    noise = log_p + rng.gumbel(size=len(log_p))
    return np.argsort(-noise, kind="stable")[: min(size, int(np.isfinite(log_p).sum()))]


def verified(
    log_p: np.ndarray, log_q: np.ndarray, drafted: np.ndarray, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, bool]:
    """Places of `size` different paths by p, of those that were drawn by q, and whether these were enough.

    `log_p` and `log_q` float64[n] of all paths; `drafted` places in the order of their draws.
    """
    accepts = np.log(rng.random(len(drafted))) <= (log_p - log_q)[drafted]
    out = drafted[accepts][:size]
    num_wanted = min(size, int(np.isfinite(log_p).sum()))
    if len(out) >= num_wanted:
        return out, True
    left = np.maximum(0, np.exp(log_p) - np.exp(log_q))
    left[out] = 0
    if np.count_nonzero(left) < num_wanted - len(out):  # both say the same of what is left
        left = np.exp(log_p)
        left[out] = 0
    with np.errstate(divide="ignore"):
        more = drawn(np.log(left), num_wanted - len(out), rng)
    return np.concatenate((out, more)), False


def _picked(beams: Beams, places: np.ndarray) -> Beams:
    return Beams(tuple(beams.paths[place] for place in places.tolist()), beams.nodes[places], beams.scores[places])


def _scored(beams: Beams, draft: Beams) -> Beams:
    """Beams with what the draft that they are of scored them by."""
    scores = dict(zip(draft.paths, draft.scores.tolist(), strict=True))
    return replace(beams, scores=np.array([scores[path] for path in beams.paths]))


def sampled_search(
    trees: CodeTrees, trie: ItemTrie, size: int, seeds: Sequence[int], small: CodeTrees | None = None,
    num_drafted: int = 40,
) -> list[BeamResult]:  # fmt: skip
    """`size` sampled items of each user, the likeliest first; of each `seeds` has one of its random numbers.

    `small` : what a small model says of the same users, which drafts `num_drafted` paths a level; None: nothing drafts.
    """
    num_users, last = len(seeds), trie.num_levels - 1
    rngs = [np.random.default_rng(seed) for seed in seeds]
    beams, num_forwards = [Beams() for _ in seeds], np.zeros(num_users, np.int64)
    live = list(range(num_users))
    while live:
        drafts: list[dict[int, Beams]] = [{} for _ in seeds]  # by level
        if small is not None:
            own = list(beams)
            for level in range(min(own[user].level for user in live), trie.num_levels):
                at = [user for user in live if own[user].level == level]
                prefixes = [[*own[user].prefixes(trie)] if user in at else [] for user in range(num_users)]
                small.add(prefixes)
                for user in at:
                    every, log_q = followers(small, trie, user, own[user])
                    own[user] = drafts[user][level + 1] = _picked(every, drawn(log_q, num_drafted, rngs[user]))
        prefixes = [[] for _ in seeds]
        for user in live:
            drafted_levels = [beam for level, beam in drafts[user].items() if level <= last]
            of_drafts = (pair for beam in drafted_levels for pair in beam.prefixes(trie))
            prefixes[user] = [*beams[user].prefixes(trie), *of_drafts]
        trees.add(prefixes)
        num_forwards[live] += 1
        for user in live:
            while beams[user].level < trie.num_levels:
                known = followers(trees, trie, user, beams[user])
                if known is None:
                    break
                every, log_p = known
                draft = drafts[user].get(beams[user].level + 1)
                if draft is None:
                    beams[user] = _picked(every, drawn(log_p, size, rngs[user]))
                    continue
                place_of = {path: place for place, path in enumerate(every.paths)}
                above = drafts[user].get(beams[user].level)
                own = beams[user] if above is None else _scored(beams[user], above)
                _, log_q = followers(small, trie, user, own)
                drafted = np.array([place_of[path] for path in draft.paths if path in place_of], np.int64)
                places, is_accepted = verified(log_p, log_q, drafted, size, rngs[user])
                beams[user] = _picked(every, places)
                if not is_accepted:
                    drafts[user] = {}
        live = [user for user in live if beams[user].level < trie.num_levels]
    results = []
    for beam, number in zip(beams, (trie.num_levels - num_forwards).tolist(), strict=True):
        order = np.argsort(-beam.scores, kind="stable")
        results.append(BeamResult(beam.nodes[order], beam.scores[order], number))
    return results
