"""Independent samples of small models, merged into a tree (SpecInfer; SpecTr; of one chain: Leviathan et al.)."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.drafters.growing import DraftModel, GrowingTrees, draft_noise
from laserbatch.pipeline.decoding.sequence import Sequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch


@dataclass(frozen=True)
class Chains:
    """`width` chains of `length` tokens, each sampled alone, from the models in turn; equal beginnings are one path."""

    width: int
    length: int

    def grow(self, models: SequenceOf[DraftModel], sequences: list[Sequence], temperature: float) -> TreeBatch:
        trees = GrowingTrees(len(sequences))
        tree_of = np.repeat(np.arange(len(sequences)), self.width)
        chain = np.tile(np.arange(self.width), len(sequences))
        places = np.full(len(tree_of), -1)  # of each chain, its last node
        for depth in range(self.length):
            so_far = trees.batch()
            log_q = torch.cat(
                [
                    model.log_q(so_far, tree_of[chain % len(models) == number], places[chain % len(models) == number])
                    for number, model in enumerate(models)
                ]
            )
            rows = np.empty(len(chain), np.int64)  # of each chain
            rows[np.argsort(chain % len(models), kind="stable")] = np.arange(len(chain))
            log_q = torch.log_softmax(log_q / temperature, -1)
            noise = draft_noise(sequences, tree_of, depth, chain, log_q)
            tokens = (log_q[torch.from_numpy(rows)] + noise).argmax(-1).cpu().numpy()
            found, first, of_chain = np.unique(
                np.stack((tree_of, places, tokens)), axis=1, return_index=True, return_inverse=True
            )
            order = np.argsort(first)  # as they were drawn
            new = np.empty(len(first), np.int64)
            new[order] = trees.add(*found[:, order], np.zeros(len(first)))
            places = new[of_chain.ravel()]
            trees.drawn(tree_of, places, rows, log_q)
        return trees.batch()
