"""Computes logits from a forward's hidden states, only for the tokens whose logits are needed, a few at a time.

A causal language model is a body, which gives hidden states, and a head: an output layer and what some models do with
its result. The head here is the model's own forward, over a body that returns its input, so that no model's scaling or
capping of logits is written again. A model that cannot be split this way is refused when it is loaded (`checks`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OutputHead:
    """A causal language model of transformers in two parts that share its weights."""

    def __init__(self, model: "PreTrainedModel") -> None:
        name = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
        self.body = getattr(model, name)
        # A copy of the model's own attributes, so that only the copy has another body.
        self._head = copy.copy(model)
        self._head.__dict__["_modules"] = dict(model._modules) | {name: _GivenStates()}

    def hidden_of(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of a forward of the body: (num_tokens, hidden_size) for ids (1, num_tokens)."""
        return self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state[0]

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab_size) of hidden states (n, hidden_size)."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]


class StepLogits(Protocol):
    """Logits of `num_rows` tokens of a step, on `device`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_rows(self) -> int: ...

    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n]: (n, vocab_size)."""
        ...


@dataclass(frozen=True)
class HiddenRows:
    """Rows whose logits are computed on demand.

    `hidden` (num_tokens, hidden_size) belongs to the whole step; the rows are its tokens `keep` int64[num_rows].
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
        """Logits of some rows, int64[n]: (n, vocab_size)."""
        tokens = self.keep[rows]
        if len(tokens) == len(self.hidden) and (tokens == np.arange(len(tokens))).all():
            return self.head.logits_of(self.hidden)
        return self.head.logits_of(self.hidden.index_select(0, to_device(tokens, self.device)))


class _States(BaseModelOutputWithPast):
    """A body's result; all other fields that the results of some bodies have are None."""

    def __getattr__(self, name: str) -> None:
        return None


class _GivenStates(nn.Module):
    """Replaces a body: its hidden states are its inputs."""

    def forward(self, *_, inputs_embeds: torch.Tensor, **__) -> _States:
        return _States(last_hidden_state=inputs_embeds)


class ContextIds:
    """Token ids of live sequences' contexts on a device, by row of the KV cache: a step sends only new ones.

    After its end a context repeats its first token.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self._ids = torch.zeros((num_rows, 0), dtype=torch.int64, device=device)
        self._lengths = np.zeros(num_rows, np.int64)  # number of each row's tokens on the device
        self._owners: list[DecodingSequence | None] = [None] * num_rows  # sequence of each row

    @torch.inference_mode()
    def of(self, sequences: Sequence[DecodingSequence]) -> torch.Tensor:
        """The sequences' contexts, prompt and committed tokens: int64 (num_sequences, longest context)."""
        rows = np.array([sequence.row for sequence in sequences])
        lengths = np.array([len(sequence.context) for sequence in sequences])
        is_begun = np.array([self._owners[sequence.row] is not sequence for sequence in sequences])
        num_known = np.where(is_begun, 0, self._lengths[rows])
        self._widen(int(lengths.max()))
        width, counts = self._ids.shape[1], lengths - num_known
        places = np.arange(counts.sum()) + np.repeat(rows * width + num_known - (np.cumsum(counts) - counts), counts)
        new = [sequence.context[start:] for sequence, start in zip(sequences, num_known.tolist(), strict=True)]
        firsts = np.array([sequence.context[0] for sequence in sequences])
        sent = rows, rows[is_begun], firsts[is_begun], places, np.concatenate(new)
        parts = to_device(np.concatenate(sent, dtype=np.int64), self._device).split([len(part) for part in sent])
        self._ids.index_copy_(0, parts[1], parts[2][:, None].expand(-1, width))
        self._ids.view(-1).index_copy_(0, *parts[3:])
        self._lengths[rows] = lengths
        for sequence in sequences:
            self._owners[sequence.row] = sequence
        return self._ids.index_select(0, parts[0])[:, : int(lengths.max())]

    def _widen(self, width: int) -> None:
        num_rows, held = self._ids.shape
        if width > held:
            ids = self._ids.new_zeros(num_rows, max(width, 2 * held))
            ids[:] = self._ids[:, :1] if held else 0
            ids[:, :held] = self._ids
            self._ids = ids


class PenalisedLogits:
    """The rows of a step, where logits of tokens on a row's path are divided by a penalty, or multiplied if negative.

    A path is the context, the ancestors and the node itself. Each sequence has a row after its last committed token,
    then one after each node of its tree. `context_ids` : the contexts from `ContextIds.of`.
    """

    def __init__(self, penalty: float, rows: StepLogits, context_ids: torch.Tensor, trees: TreeBatch) -> None:
        self._penalty, self._rows, self._context_ids = penalty, rows, context_ids
        self.device, self.num_rows = rows.device, rows.num_rows
        self._context_of = np.repeat(np.arange(len(context_ids)), trees.sizes + 1)  # each row's context
        self._path_ids = np.full((self.num_rows, trees.sizes.max()), -1)  # -1: none
        if len(trees):
            number = np.arange(trees.sizes.max())
            is_above = (trees.ancestors[:, None] >> number) & 1 > 0
            nodes = np.minimum(trees.starts[trees.tree_of, None] + number, len(trees) - 1)
            rows_of_nodes = np.arange(len(trees)) + trees.tree_of + 1
            self._path_ids[rows_of_nodes] = np.where(is_above, trees.token_ids[nodes], -1)

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n]: float32 (n, vocab_size), as in transformers' `generate`."""
        logits = self._rows.of(rows).to(torch.float32, copy=True)
        context_ids = self._context_ids.index_select(0, to_device(self._context_of[rows], self.device))
        path_ids = to_device(self._path_ids[rows], self.device)
        # A token that is named twice is penalised once.
        token_ids = torch.cat((context_ids, torch.where(path_ids < 0, context_ids[:, :1], path_ids)), 1)
        scores = logits.gather(1, token_ids)
        scores = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return logits.scatter_(1, token_ids, scores)
