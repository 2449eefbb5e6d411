"""The target's runner-up at every token of a text: what it nearly wrote, for tomorrow's pools to draft as well.

Read from logits that verification has looked at: after the last committed token and after each accepted
node. Knows no sequences, trees or caches.
"""

import math

import numpy as np
import torch

from laserbatch.pipeline.decoding.acceptance import Acceptance
from laserbatch.pipeline.decoding.device_copy import to_device
from laserbatch.pipeline.decoding.model.output_head import HeldLogits, StepLogits
from laserbatch.pipeline.decoding.packed_trees import PackedTrees
from laserbatch.pipeline.decoding.row_verdicts import CHUNK_ROWS

NO_ALTERNATIVE = -1
# A rarer runner-up is neither accepted by the relaxed rule (above 0.1 by default) nor likely to be the choice in a
# context that differs a little, so drafting it would cost more than it brings.
MIN_PROBABILITY = 0.1


def runners_up(
    logits: torch.Tensor | StepLogits,
    rows: np.ndarray,
    token_ids: np.ndarray,
    is_end: np.ndarray,
    min_probability: float = MIN_PROBABILITY,
) -> np.ndarray:
    """The most probable token beside the one that was written: the second, or the choice where another was accepted.

    Parameters
    ----------
    logits : (num_rows, vocab_size) on any device, or what computes them.
    rows : int64[n], the row that each written token follows.
    token_ids : int64[n], the written tokens.
    is_end : bool[vocab_size]; an end token is no alternative, since texts in pools have none.
    min_probability : less probable ones are not worth recording.

    Returns
    -------
    int32[n], NO_ALTERNATIVE where none is worth recording.
    """
    source = HeldLogits(logits) if isinstance(logits, torch.Tensor) else logits
    size = CHUNK_ROWS["cpu" if source.device.type == "cpu" else "cuda"]
    parts = []
    for first in range(0, len(rows), size):
        chunk = slice(first, first + size)
        followed = source.of(rows[chunk]).float()
        written = to_device(token_ids[chunk], followed.device)[:, None]
        log_normalizer = torch.logsumexp(followed, -1)
        best, runner_up = followed.scatter(1, written, -math.inf).max(-1)
        probability = torch.exp(best - log_normalizer)
        parts.append(torch.stack((runner_up.double(), probability.double())))
    report = torch.cat(parts, 1).cpu().numpy()  # one copy, one synchronisation
    found = report[0].astype(np.int64)
    worth = (report[1] >= min_probability) & ~is_end[found]
    return np.where(worth, found, NO_ALTERNATIVE).astype(np.int32)


def step_alternatives(
    logits: torch.Tensor | StepLogits,
    trees: PackedTrees,
    starts: np.ndarray,
    accepted: list[Acceptance | None],
    is_end: np.ndarray,
) -> list[np.ndarray | None]:
    """Runners-up of what one step adds to each sequence: the accepted path, then the target's own next token.

    Parameters
    ----------
    logits, trees, starts, is_end : as `acceptance.verify` takes them.
    accepted : as it gives them.

    Returns
    -------
    int32[num_accepted + 1] a sequence, None where nothing was accepted because logits are not finite.
    """
    found: list[np.ndarray | None] = [None] * len(accepted)
    sound = [i for i, acceptance in enumerate(accepted) if acceptance is not None]
    if not sound:
        return found
    rows = [starts[i] + np.append(0, accepted[i].nodes + 1) for i in sound]
    written = [np.append(trees.token_ids[trees.starts[i] + accepted[i].nodes], accepted[i].next_token) for i in sound]
    together = runners_up(logits, np.concatenate(rows), np.concatenate(written).astype(np.int64), is_end)
    ends = np.cumsum([len(part) for part in rows])
    for i, part in zip(sound, np.split(together, ends[:-1]), strict=True):
        found[i] = part
    return found
