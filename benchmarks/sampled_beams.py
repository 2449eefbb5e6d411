"""Beam search with sampled beams and relaxed verification of drafts (AtSpeed: Lin et al., ICLR 2025, 3.2, Algorithm 2).

The beams of a level are K different paths, drawn from the target's distribution over all continuations of the previous
beams. Each path drawn by a draft model is accepted with probability min(1, p / q), so paths that the target did not
draw may stay. The paths missing from K are drawn from norm(max(0, p - q)). For K = 1 this is speculative sampling and
exact. For larger K all paths differ, and p is nearly right as long as K is small compared with the continuations.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from laserbatch.research.recommending.beams import BeamResult, Beams
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.item_trie import ItemTrie


def followers(trees: CodeTrees, trie: ItemTrie, user: int, beams: Beams) -> tuple[Beams, np.ndarray] | None:
    """All paths of the next level and their log probabilities, normalised over all; None if any row is not computed."""
    computed = [trees.log_p(user, path, node) for path, node in zip(beams.paths, beams.nodes.tolist(), strict=True)]
    rows = [row for row in computed if row is not None]
    if len(rows) < len(computed):
        return None
    scores = (beams.scores[:, None] + np.stack(rows)).ravel()
    known = np.flatnonzero(np.isfinite(scores))
    above, places = np.divmod(known, rows[0].size)
    codes, nodes = (table[beams.level][beams.nodes[above], places] for table in (trie.codes, trie.nodes))
    paths = tuple((*beams.paths[row], code) for row, code in zip(above.tolist(), codes.tolist(), strict=True))
    log_p = scores[known] - np.logaddexp.reduce(scores[known])
    return Beams(paths, nodes, scores[known]), log_p


def drawn(log_p: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The indices of `size` draws without replacement, in order (Gumbel top-k: Kool et al. 2019)."""
    noise = log_p + rng.gumbel(size=len(log_p))
    return np.argsort(-noise, kind="stable")[: min(size, int(np.isfinite(log_p).sum()))]


def verified(
    log_p: np.ndarray, log_q: np.ndarray, drafted: np.ndarray, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, bool]:
    """Verify paths drawn from q: the indices of `size` different paths, and whether the accepted drafts were enough.

    `log_p` and `log_q` are float64[n], of all paths; `drafted` has indices in the order of their draws.
    """
    accepts = np.log(rng.random(len(drafted))) <= (log_p - log_q)[drafted]
    out = drafted[accepts][:size]
    num_wanted = min(size, int(np.isfinite(log_p).sum()))
    if len(out) >= num_wanted:
        return out, True
    left = np.maximum(0, np.exp(log_p) - np.exp(log_q))
    left[out] = 0
    if np.count_nonzero(left) < num_wanted - len(out):  # p and q agree on the remaining paths
        left = np.exp(log_p)
        left[out] = 0
    with np.errstate(divide="ignore"):
        more = drawn(np.log(left), num_wanted - len(out), rng)
    return np.concatenate((out, more)), False


def _picked(beams: Beams, places: np.ndarray) -> Beams:
    return Beams(tuple(beams.paths[place] for place in places.tolist()), beams.nodes[places], beams.scores[places])


def _scored(beams: Beams, draft: Beams) -> Beams:
    """The beams with the scores that their draft gave them."""
    scores = dict(zip(draft.paths, draft.scores.tolist(), strict=True))
    return replace(beams, scores=np.array([scores[path] for path in beams.paths]))


def sampled_search(
    trees: CodeTrees, trie: ItemTrie, size: int, seeds: Sequence[int], small: CodeTrees | None = None,
    num_drafted: int = 40,
) -> list[BeamResult]:  # fmt: skip
    """Sample `size` items for each user, the likeliest first; `seeds` has one random seed per user.

    `small` : the code trees of a draft model for the same users, which drafts `num_drafted` paths per level; or None.
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
                    every, log_q = followers(small, trie, user, own[user])  # pyright: ignore[reportGeneralTypeIssues]
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
                if draft is None or small is None:
                    beams[user] = _picked(every, drawn(log_p, size, rngs[user]))
                    continue
                place_of = {path: place for place, path in enumerate(every.paths)}
                above = drafts[user].get(beams[user].level)
                own = beams[user] if above is None else _scored(beams[user], above)
                _, log_q = followers(small, trie, user, own)  # pyright: ignore[reportGeneralTypeIssues]
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
