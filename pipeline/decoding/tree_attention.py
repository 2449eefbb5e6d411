"""Attention of a packed step: every sequence's nodes in one row of tokens, each seeing its own past and its ancestors.

Registered with transformers' attention interface, so that its models run unmodified. What a forward needs to know
comes through a context variable, not keyword arguments, which some models drop. No mask function is registered under
our name, so transformers builds no mask of its own.

All index and mask tensors are made once a step; a layer writes its new keys and values into the store and runs one
scaled-dot-product attention for each group of neighbouring rows, on a view of the store. Query heads that share a
key-value head are folded into the query length, so that no key is repeated for them.

Knows layers' shapes only: no model, no sequence, no draft.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from pipeline.decoding.kv_store import KVStore

ATTENTION_NAME = "laserbatch_tree"
step_plan: ContextVar["StepPlan"] = ContextVar("laserbatch_step_plan")


@dataclass
class AttentionGroup:
    """Neighbouring rows of the store that share one attention call, padded to their longest.

    `queries` maps (row, padded node) to the token's index in the pack: int64[num_rows, num_padded], padding repeats
    the row's first token and its result is dropped. `sees` is bool[num_rows, num_padded, width]: committed slots, own
    ancestors and the node itself. `positions` are absolute: of queries int32[num_rows, num_padded], of slots
    int32[num_rows, width].
    """

    first_row: int
    queries: np.ndarray
    sees: np.ndarray
    query_positions: np.ndarray
    slot_positions: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.sees.shape[0]

    @property
    def num_padded(self) -> int:
        return self.sees.shape[1]

    @property
    def width(self) -> int:
        return self.sees.shape[2]


@dataclass
class StepPlan:
    """What the attention function needs in one forward of `num_tokens` packed tokens.

    `rows`, `slots`: int64[num_tokens], where in the store each token's key and value goes.
    """

    store: KVStore
    num_tokens: int
    rows: np.ndarray
    slots: np.ndarray
    groups: list[AttentionGroup]
    layers_seen: list[int] = field(default_factory=list)
    _indices: dict = field(default_factory=dict)
    _masks: dict = field(default_factory=dict)
    _gathers: dict = field(default_factory=dict)
    _scatters: dict = field(default_factory=dict)

    @cached_property
    def one_token_a_row(self) -> bool:
        """Whether the pack is one group of one token a row, in the order of rows: plain decoding."""
        only = self.groups[0] if len(self.groups) == 1 else None
        return only is not None and only.num_padded == 1 and bool((np.diff(only.queries[:, 0]) == 1).all())

    def write_index(self, num_kv_heads: int, device: torch.device) -> torch.Tensor:
        """The tokens' flat index in a layer of the store."""
        if num_kv_heads not in self._indices:
            index = self.store.flat_index(self.rows, self.slots, num_kv_heads)
            self._indices[num_kv_heads] = torch.from_numpy(index).to(device)
        return self._indices[num_kv_heads]

    def mask(self, index: int, window: int | None, num_heads_folded: int, like: torch.Tensor) -> torch.Tensor:
        """Additive mask of a group: (num_rows, 1, num_heads_folded * num_padded, width), 0 where seen."""
        key = (index, window, num_heads_folded, like.dtype)
        if key not in self._masks:
            group = self.groups[index]
            sees = group.sees
            if window is not None:
                near = group.query_positions[:, :, None] - group.slot_positions[:, None, :] < window
                sees = sees & near
            # A finite minimum: where a whole block of slots is masked, minus infinity would make NaN of it.
            lowest = torch.finfo(like.dtype).min
            additive = np.where(sees, np.float32(0), np.float32(lowest))
            mask = torch.from_numpy(additive).to(like.device, like.dtype)[:, None]
            if num_heads_folded > 1:
                mask = mask.repeat(1, 1, num_heads_folded, 1)
            self._masks[key] = mask
        return self._masks[key]

    def gather(self, index: int, num_kv_heads: int, num_folded: int, device: torch.device) -> torch.Tensor:
        """Rows of the flat queries (num_heads * num_tokens) in the order (row, kv head, folded head, padded node)."""
        key = (index, num_kv_heads, num_folded)
        if key not in self._gathers:
            tokens = self.groups[index].queries[:, None, None, :]
            heads = np.arange(num_kv_heads * num_folded).reshape(1, num_kv_heads, num_folded, 1)
            self._gathers[key] = torch.from_numpy((heads * self.num_tokens + tokens).reshape(-1)).to(device)
        return self._gathers[key]

    def scatter(self, num_kv_heads: int, num_folded: int, device: torch.device) -> torch.Tensor:
        """For each (token, head) of the pack, its row in the groups' concatenated results, the inverse of `gather`."""
        key = (num_kv_heads, num_folded)
        if key not in self._scatters:
            num_heads = num_kv_heads * num_folded
            places = np.empty((self.num_tokens, num_heads), np.int64)
            start = 0
            for group in self.groups:
                size = group.num_rows * num_heads * group.num_padded
                order = np.arange(start, start + size).reshape(group.num_rows, num_heads, group.num_padded)
                # Padding repeats the first token: written in reverse, the true place of each token is written last.
                places[group.queries[:, ::-1].reshape(-1)] = order.transpose(0, 2, 1)[:, ::-1].reshape(-1, num_heads)
                start += size
            self._scatters[key] = torch.from_numpy(places.reshape(-1)).to(device)
        return self._scatters[key]


def tree_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a packed step, in the form of transformers' attention interface.

    Parameters
    ----------
    query : (1, num_heads, num_tokens, head_dim), after rotary embedding; key and value with their own head counts.
    sliding_window : a token sees those less than this many positions before it.
    softcap, s_aux : Gemma's bounded scores and GPT-OSS's attention sinks.

    Returns
    -------
    (1, num_tokens, num_heads, value_dim) and None.
    """
    plan = step_plan.get()
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[-1]
    assert query.shape[0] == 1 and num_tokens == key.shape[2] == plan.num_tokens, "not a packed step"
    plan.layers_seen.append(module.layer_idx)
    cache = plan.store.write(module.layer_idx, plan.write_index(num_kv_heads, key.device), key[0], value[0])
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    folded = num_heads // num_kv_heads
    in_order = plan.one_token_a_row  # then the pack's order is already that of rows
    flat_query = query.reshape(num_heads * num_tokens, head_dim)

    results = []
    for index, group in enumerate(plan.groups):
        rows = slice(group.first_row, group.first_row + group.num_rows)
        keys = cache.keys[rows, :, : group.width]  # (num_rows, num_kv_heads, width, head_dim), a view
        values = cache.values[rows, :, : group.width]
        if in_order:
            queries = query[0].transpose(0, 1).view(group.num_rows, num_kv_heads, folded, head_dim)
        else:
            queries = flat_query.index_select(0, plan.gather(index, num_kv_heads, folded, query.device))
            queries = queries.view(group.num_rows, num_kv_heads, folded * group.num_padded, head_dim)
        mask = plan.mask(index, window, folded, query)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        else:
            out = reference_attention(queries, keys, values, mask, scaling, softcap, s_aux)
        if in_order:
            return out.reshape(1, num_tokens, num_heads, value_dim), None
        results.append(out.reshape(-1, value_dim))
    result = results[0] if len(results) == 1 else torch.cat(results)
    result = result.index_select(0, plan.scatter(num_kv_heads, folded, query.device))
    return result.view(1, num_tokens, num_heads, value_dim), None


def reference_attention(queries, keys, values, mask, scaling=None, softcap=None, s_aux=None) -> torch.Tensor:
    """The same attention written out, with softcapped scores and attention sinks; what the fused one is tested against.

    Parameters
    ----------
    queries : (num_rows, num_kv_heads, folded * num_nodes, head_dim).
    keys, values : (num_rows, num_kv_heads, width, head_dim).
    mask : additive, (num_rows, 1, folded * num_nodes, width).
    s_aux : a sink's score for each query head, (num_heads,).
    """
    scores = torch.matmul(queries, keys.transpose(2, 3)) * (scaling or queries.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if s_aux is not None:
        num_rows, num_kv_heads, num_queries, _ = scores.shape
        num_folded = s_aux.numel() // num_kv_heads
        sinks = s_aux.float().view(1, num_kv_heads, num_folded, 1).expand(num_rows, -1, -1, num_queries // num_folded)
        scores = torch.cat([scores, sinks.reshape(num_rows, num_kv_heads, num_queries, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(weights.to(queries.dtype), values)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
