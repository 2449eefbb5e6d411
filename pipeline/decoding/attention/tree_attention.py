"""Attention of a packed step: every sequence's nodes in one row of tokens, each seeing its own past and its ancestors.

Registered with transformers' attention interface, so that its models run unmodified. What a forward needs to know
comes through a context variable, not keyword arguments, which some models drop. No mask function is registered under
our name, so transformers builds no mask of its own.

A layer writes its new keys and values into the store and runs one scaled-dot-product attention for each group of the
step's plan. Query heads that share a key-value head are folded into the query length, so that no key is repeated for
them. Where the plan is a `PackedPlan`, it does both itself, without groups; a step of single tokens on few CPU cores
has loops of its own (`single_attention`).

Knows layers' shapes only: no model, no sequence, no draft.
"""

from contextvars import ContextVar

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from laserbatch.pipeline.decoding.attention.attention_plan import StepPlan
from laserbatch.pipeline.decoding.attention.packed_plan import PackedPlan
from laserbatch.pipeline.decoding.attention.single_attention import single_attention, suits_single_attention
from laserbatch.pipeline.errors import ModelError

ATTENTION_NAME = "laserbatch_tree"
_ABSENT = object()
step_plan: ContextVar[StepPlan | PackedPlan] = ContextVar("laserbatch_step_plan")


def tree_attention(
    module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | object | None = _ABSENT,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a packed step, in the form of transformers' attention interface.

    Parameters
    ----------
    query : (1, num_heads, num_tokens, head_dim), after rotary embedding; key and value with their own head counts.
    sliding_window : a token sees those less than this many positions before it; None: all of them. Of a model that does
        not say it, it is the layer's attribute.
    softcap, s_aux : Gemma's bounded scores and GPT-OSS's attention sinks.

    Returns
    -------
    (1, num_tokens, num_heads, value_dim) and None.

    Raises
    ------
    ModelError : the model masks or biases scores in a way of its own.
    """
    plan = step_plan.get()
    window = getattr(module, "sliding_window", None) if sliding_window is _ABSENT else sliding_window
    unknown = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name != "position_ids"]
    if unknown or attention_mask is not None:
        raise ModelError(f"its attention takes {', '.join(unknown) or 'a mask of its own'}, which is not done packed")
    if isinstance(plan, PackedPlan):
        assert query.shape[0] == 1, "not a packed step"
        out = plan.attend(module.layer_idx, query[0], key[0], value[0], scaling, window, softcap, s_aux)
        return out[None], None
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[-1]
    assert query.shape[0] == 1 and num_tokens == key.shape[2] == plan.num_tokens, "not a packed step"
    plan.layers_seen.append(module.layer_idx)
    cache = plan.store.write(module.layer_idx, plan.write_index(num_kv_heads, key.device), key[0], value[0])
    is_plain = softcap is None and s_aux is None and plan.build_single is not None
    if is_plain and suits_single_attention(query, num_tokens):
        by_token = query[0].transpose(0, 1)  # (num_tokens, num_heads, head_dim)
        out = single_attention(by_token, cache.keys, cache.values, plan.single_tokens, scaling, window)
        return out[None], None
    folded = num_heads // num_kv_heads
    in_order = plan.one_token_a_row  # then the pack's order is already that of rows
    by_token = query[0].transpose(0, 1)  # (num_tokens, num_heads, head_dim)
    flat_query = None if in_order else query.reshape(num_heads * num_tokens, head_dim)

    results = []
    num_done = 0
    for index, group in enumerate(plan.groups):
        keys, values = group.read(cache)  # (num_rows, num_kv_heads, width, head_dim)
        if in_order:
            queries = by_token[num_done : num_done + group.num_rows].unflatten(1, (num_kv_heads, folded))
            num_done += group.num_rows
        else:
            queries = flat_query.index_select(0, plan.gather(index, num_kv_heads, folded, query.device))
            queries = queries.view(group.num_rows, num_kv_heads, folded * group.num_padded, head_dim)
        mask = plan.mask(index, window, folded, query)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        else:
            out = reference_attention(queries, keys, values, mask, scaling, softcap, s_aux)
        results.append(out.reshape(-1, value_dim))
    result = results[0] if len(results) == 1 else torch.cat(results)
    if not in_order:
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
