"""From a forward's hidden states to logits, of those tokens only whose logits are looked at, a few at a time.

A causal language model is a body, which gives hidden states, and a head: an output layer and what some models do with
its result. The head here is the model's own forward, over a body that returns what it is given; so no model's scaling
or capping of logits is written again. Models that cannot be taken apart so compute their logits whole.
"""

import copy
import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from laserbatch.pipeline.decoding.memory.device_memory import to_device

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.01}  # relative, of logits in two steps
PROBE_TOKENS = 8


class StepLogits(Protocol):
    """The tokens of a step whose logits may be asked for: `num_rows` of them, on `device`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_rows(self) -> int: ...

    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n]: (n, vocab_size)."""
        ...


@dataclass(frozen=True)
class HeldLogits:
    """Logits that are there already: (num_rows, vocab_size)."""

    logits: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def num_rows(self) -> int:
        return len(self.logits)

    def of(self, rows: np.ndarray) -> torch.Tensor:
        if len(rows) == self.num_rows and (rows == np.arange(self.num_rows)).all():
            return self.logits
        return self.logits.index_select(0, to_device(rows, self.device))


class OutputHead:
    """A causal language model in two parts that share its weights.

    Parameters
    ----------
    model : of transformers; layers that are replaced later are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._body = getattr(model, model.base_model_prefix)
        # A copy of the model's own attributes, so that only the copy has another body.
        self._head = copy.copy(model)
        self._head.__dict__["_modules"] = dict(model._modules) | {model.base_model_prefix: _GivenStates()}

    def hidden_of(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a forward of the body: (num_tokens, hidden_size) for ids (1, num_tokens)."""
        return self._body(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state[0]

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab_size) of hidden states (n, hidden_size)."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]


@dataclass(frozen=True)
class HiddenRows:
    """Rows whose logits are computed when they are asked for.

    `hidden` (num_tokens, hidden_size) of a whole step, of which the tokens `keep` int64[num_rows] are the rows.
    """

    head: OutputHead
    hidden: torch.Tensor
    keep: np.ndarray

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def num_rows(self) -> int:
        return len(self.keep)

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        tokens = self.keep[rows]
        if len(tokens) == len(self.hidden) and (tokens == np.arange(len(tokens))).all():
            return self.head.logits_of(self.hidden)
        return self.head.logits_of(self.hidden.index_select(0, to_device(tokens, self.device)))


class _GivenStates(nn.Module):
    """Stands where a body was: its hidden states are its inputs. Its result has the fields of every body's."""

    def forward(self, *_, inputs_embeds: torch.Tensor, **__) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


@torch.inference_mode()
def has_output_head(model: nn.Module, vocab_size: int) -> bool:
    """Whether a model, with attention of its own still, gives the same logits by `OutputHead` as by itself."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not isinstance(getattr(model, prefix, None), nn.Module):
        return False
    device = next(model.parameters()).device
    input_ids = torch.arange(1, PROBE_TOKENS + 1, device=device)[None] % vocab_size
    try:
        expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
        head = OutputHead(model)
        found = head.logits_of(head.hidden_of(input_ids)).float()
    except Exception as error:  # whatever a model's own code says to a body that is not its own
        logger.info("logits are computed with the model's body: %s: %s", type(error).__name__, error)
        return False
    if found.shape != expected.shape:
        return False
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-12))
    return error <= TOLERANCE.get(model.dtype, 1e-5)
