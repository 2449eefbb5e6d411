"""A toy target over four tokens that depends on the last token alone, and the distribution of its sampled texts."""

import numpy as np
import torch
from reference import HeldLogits

from laserbatch.pipeline.decoding.acceptance import verify
from laserbatch.pipeline.decoding.guided import GuidedLogits
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy

VOCAB, TEMPERATURE, MIN_P = 4, 0.7, 1e-3
AFTER = torch.tensor(np.random.default_rng(5).normal(size=(VOCAB + 1, VOCAB)) * 1.5, dtype=torch.float32)
NO_END = np.zeros(VOCAB, bool)
MIN_EXPECTED = 10  # in a cell, so that the chi-square distribution holds
NUM_BEFORE = 9  # prompt tokens of every text


class Without:
    """Stands in for a guide whose grammar allows every token but one."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def num_allowed(self, token_ids: list[int]) -> int:
        return [*token_ids, self._token_id].index(self._token_id)

    def write_mask(self, path: list[int], mask: np.ndarray) -> None:
        mask[0] ^= np.uint32(1 << self._token_id)


def first_tokens(trees: TreeBatch, num_tokens: int, sampled, guide=None) -> np.ndarray:
    """The first tokens of the toy's texts, with a draft tree for each text: int64 (num_trees, num_tokens).

    `sampled`: makes rows of samples; a text's number is its seed. Tokens after the tree are neither drafted nor guided.
    """
    num_texts = trees.num_trees
    before = np.concatenate([[VOCAB, *tree.token_ids] for tree in trees])  # of each row, the last token
    starts = trees.starts + np.arange(num_texts)
    held = HeldLogits(AFTER[torch.from_numpy(before.astype(np.int64))])
    how = range(num_texts), [NUM_BEFORE] * num_texts, trees
    guides = [guide] * num_texts
    masked = guide and sampled(TEMPERATURE, GuidedLogits(held, guides, trees), *how)
    acceptances = verify(Greedy(), sampled(TEMPERATURE, held, *how), trees, starts, NO_END, guides, masked)
    texts = [
        [*tree.token_ids[acceptance.nodes].tolist(), acceptance.next_token]
        for tree, acceptance in zip(trees, acceptances, strict=True)
    ]
    while short := [number for number, text in enumerate(texts) if len(text) < num_tokens]:
        none = TreeBatch.empty(len(short))
        held = HeldLogits(AFTER[torch.tensor([texts[number][-1] for number in short])])
        rows = sampled(TEMPERATURE, held, short, [NUM_BEFORE + len(texts[number]) for number in short], none)
        for number, acceptance in zip(short, verify(Greedy(), rows, none, np.arange(len(short)), NO_END), strict=True):
            texts[number].append(acceptance.next_token)
    return np.array([text[:num_tokens] for text in texts])


def counts_and_expected(texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Observed and expected counts of each pair of first tokens, under the toy's own distribution.

    Pairs with expected counts below MIN_EXPECTED are merged into one.
    """
    p = torch.softmax(AFTER.double() / TEMPERATURE, -1).numpy()
    joint = p[VOCAB][:, None] * p[:VOCAB]
    observed = np.bincount(texts[:, 0] * VOCAB + texts[:, 1], minlength=VOCAB**2)
    expected = joint.flatten() * len(texts)
    is_rare = expected < MIN_EXPECTED
    return tuple(np.append(counts[~is_rare], counts[is_rare].sum()) for counts in (observed, expected))
