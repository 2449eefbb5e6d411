"""Our attention as a function of transformers' attention interface, so that its models run unmodified.

What a forward needs to know comes through a context variable, not keyword arguments, which some models drop. No mask
function is registered under our name, so transformers builds no mask of its own.
"""

from contextvars import ContextVar

import torch
from transformers import AttentionInterface

from laserbatch.pipeline.decoding.attention.plan import StepPlan
from laserbatch.pipeline.errors import ModelError

ATTENTION_NAME = "laserbatch_slots"
_ABSENT = object()
step_plan: ContextVar[StepPlan] = ContextVar("laserbatch_step_plan")


def slot_attention(
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
    """Attention of one layer in a batch of packed sequences, in the form of transformers' attention interface.

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
    assert query.shape[0] == 1, "not a packed batch"
    out = plan.attend(module.layer_idx, query[0], key[0], value[0], scaling, window, softcap, s_aux)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
