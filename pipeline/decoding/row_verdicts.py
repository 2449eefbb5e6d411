"""What the target's logits say after some tokens of a step: its choices, and a rule's verdicts on what was drafted.

Logits are computed, or copied, for a chunk of rows at a time; what is left of them is a few numbers a row. Knows rows
and the tokens drafted behind them; no trees, no sequences.
"""

from dataclasses import dataclass

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_copy import to_device
from laserbatch.pipeline.decoding.model.output_head import StepLogits
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier

# Rows whose logits are in memory at once: enough that an output layer's weights are read few times, and on a CPU few
# enough that they stay in its cache.
CHUNK_ROWS = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True)
class RowVerdicts:
    """On the host: of rows their argmax int64[n] and whether it is finite bool[n], of nodes a rule's verdicts."""

    choices: np.ndarray
    is_finite: np.ndarray
    accepted: np.ndarray
    log_probability: np.ndarray


@torch.inference_mode()
def judge_rows(
    verifier: Verifier, rows: StepLogits, wanted: np.ndarray, parents: np.ndarray, token_ids: np.ndarray
) -> RowVerdicts:
    """What a rule says of drafted tokens, and the target's choices, from the logits of CHUNK_ROWS rows at a time.

    Parameters
    ----------
    wanted : int64[n], the rows to look at.
    parents, token_ids : int64[m], of each node the place of its parent's row in `wanted`, and its token.
    """
    size = CHUNK_ROWS["cpu" if rows.device.type == "cpu" else "cuda"]
    if len(wanted) <= size:
        by_chunk = [np.arange(len(parents))]
    else:
        order = np.argsort(parents, kind="stable")
        by_chunk = np.split(order, np.searchsorted(parents[order], np.arange(size, len(wanted), size)))
    choices, best, accepted, log_probability = [], [], [], []
    for number, nodes in enumerate(by_chunk):
        first = number * size
        logits = rows.of(wanted[first : first + size])
        choices.append(row_argmax(logits))
        best.append(logits.gather(1, choices[-1][:, None])[:, 0])
        if len(nodes):
            used, at = np.unique(parents[nodes] - first, return_inverse=True)
            sent = to_device(np.concatenate((used, at, token_ids[nodes])), logits.device)
            used_rows, at, tokens = sent.split((len(used), len(nodes), len(nodes)))
            followed, chosen = logits, choices[-1]
            if len(used) < len(logits):
                followed, chosen = logits.index_select(0, used_rows), chosen.index_select(0, used_rows)
            verdicts = verifier(followed, chosen, at, tokens)
            accepted.append(verdicts.accepted)
            log_probability.append(verdicts.log_probability)
    # What the host needs comes in one copy, and with it one synchronisation. float64 holds every token id.
    parts = [part.double() for part in (*choices, *best, *accepted, *log_probability)]
    found = torch.cat(parts).cpu().numpy()
    num_rows, num_nodes = len(wanted), len(parents)
    of_nodes = np.empty((2, num_nodes))
    of_nodes[:, np.concatenate(by_chunk)] = found[2 * num_rows :].reshape(2, num_nodes)
    chosen, is_finite = found[:num_rows].astype(np.int64), np.isfinite(found[num_rows : 2 * num_rows])
    return RowVerdicts(chosen, is_finite, of_nodes[0] > 0, of_nodes[1])


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's first largest logit: int64[num_rows]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))  # vectorised, which torch's is not: a tenth of its time
    return logits.argmax(-1)
