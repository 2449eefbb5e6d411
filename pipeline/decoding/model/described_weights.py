"""Checks that a model's weights and tokenizer are those that its configuration describes; errors name the tensors."""

import re
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from laserbatch.pipeline.decoding.model.folder import is_mixture_of_experts, quantization_of, read_config
from laserbatch.pipeline.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MAX_NAMED = 3
_CONTROL_FORM = re.compile(r"^(<.+>|\[.+\])$", re.DOTALL)  # as in `knowledge.chat_format`, which engines do not import
# Tensors that change no logit: buffers that a model computes itself, and heads for values (reinforcement learning) or
# for several tokens at once. transformers names more of them by architecture, and reads a tied output layer.
HARMLESS_WEIGHTS = re.compile(
    r"(^|\.)(?:(original_)?inv_freq|(cos|sin)_cached|masked_bias|(attn|attention)\.bias|position_ids|"
    r"(v_head|mtp|mtp_layers)\..*)$"
)
# Scales of an fp8 KV cache, which are stored with quantised weights; our cache is not quantised.
QUANTIZED_EXTRAS = re.compile(r"\.([kqv]_scale|[kqv]_zero_point|[kqv]_proj\.output_(scale|zero_point))$")
# An encoder's folder may hold heads for other tasks; tensors of a numbered layer are the encoder's own.
OUTSIDE_LAYERS = re.compile(r"^(?!.*(^|\.)(layers?|h|blocks?)\.\d+\.)")


def require_whole_weights(
    folder: Path, loading_info: dict, unused: tuple[str, ...] = (), harmless: re.Pattern[str] = HARMLESS_WEIGHTS
) -> None:
    """Refuse a model whose weights are not those that its configuration describes.

    transformers fills missing tensors with random numbers and ignores tensors that the configuration does not describe.

    `loading_info` : returned by `from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)`.
    `unused` : beginnings of the names of tensors that may be missing, since nothing reads them.
    `harmless` : names of tensors that the model need not read, in addition to `HARMLESS_WEIGHTS`.

    Raises ModelError: tensors are missing, of another shape or not described; the message names the first ones.
    """
    copying = "copy the whole checkpoint again, or correct config.json"
    missing = sorted(name for name in loading_info["missing_keys"] if not name.startswith(unused))
    mismatched = [f"{name} {tuple(shape)} where config.json says {tuple(expected)}"
                  for name, shape, expected in sorted(loading_info["mismatched_keys"])]  # fmt: skip
    unread = sorted(name for name in loading_info["unexpected_keys"]
                    if not (HARMLESS_WEIGHTS.search(name) or harmless.search(name)))  # fmt: skip
    tied = f"{copying} (tie_word_embeddings says whether the output layer has weights)"
    described = (
        f"{copying}, which describes another model than these weights (num_hidden_layers says how many layers there "
        "are, attention_bias and mlp_bias whether they have biases; a base model's config.json does not fit every "
        "fine-tune of it); remove the tensors from the file if they belong to no model"
    )
    for names, problem, advice in (
        (missing, "lack", tied),
        (mismatched, "have other shapes than expected:", tied),
        (unread, "hold tensors that config.json does not describe:", described),
    ):
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise ModelError(f"the weights in {folder} {problem} {', '.join(names[:_MAX_NAMED])}{more}; {advice}")


def require_described_weights(folder: Path) -> int | None:
    """Compare the names and shapes of a folder's tensors with its configuration, without reading their values.

    Returns the number of rows of the embedding; None if nothing was compared, because transformers does not know the
    model, or the weights are quantised in a format whose names say nothing. For other quantised weights, the modules
    that have tensors and the shapes of unpacked tensors are compared. Raises ModelError like `require_whole_weights`.
    """
    file_config = read_config(folder)
    is_quantised = quantization_of(file_config) is not None
    if is_quantised and is_mixture_of_experts(file_config):
        return None  # transformers joins the tensors of plain experts, so their names say nothing about packed ones
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    local = {"local_files_only": True, "trust_remote_code": False}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # suppress its own table of tensors
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        if is_quantised:
            delattr(config, "quantization_config")  # its library need not be installed: the plain model is compared
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=config, device_map={"": "meta"}, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **local,
        )  # fmt: skip
    except Exception:  # transformers may raise anything; the engine that loads the model reports the reason
        return None
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, loading_info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if is_quantised and (loading_info := _without_packed(model, loading_info)) is None:
        return None
    require_whole_weights(folder, loading_info, harmless=QUANTIZED_EXTRAS if is_quantised else HARMLESS_WEIGHTS)
    return cast("nn.Embedding", model.get_input_embeddings()).num_embeddings


def _without_packed(model: "PreTrainedModel", loading_info: dict) -> dict | None:
    """Drop entries that packed linear layers cause from the `loading_info` of a plain model with quantised weights.

    Tensors of a packed layer have names below the layer's name: `q_proj.qweight`, `q_proj.weight_scale`. Returns None
    if more than half of the model's weights have no tensor below their names, so that the format uses other names.
    """
    layers = {name: module for name, module in model.named_modules() if getattr(module, "weight", None) is not None}

    def layer_of(key: str) -> str | None:
        parents = accumulate(key.split(".")[:-1], "{}.{}".format)
        return next((name for name in parents if name in layers), None)

    packed = {layer_of(key) for key in loading_info["unexpected_keys"]} - {None}
    unread = [
        key for key in loading_info["unexpected_keys"]
        if (layer := layer_of(key)) is None or key == f"{layer}.bias" or ".lora_" in key
    ]  # fmt: skip
    missing = [key for key in loading_info["missing_keys"] if layer_of(key) not in packed]
    if 2 * len(missing) > len(model.state_dict()):
        return None
    mismatched = [entry for entry in loading_info["mismatched_keys"] if layer_of(entry[0]) not in packed]
    return {"missing_keys": missing, "unexpected_keys": unread, "mismatched_keys": mismatched}


def require_token_rows(folder: Path, tokenizer: "PreTrainedTokenizerBase", num_rows: int) -> str | None:
    """Refuse a tokenizer that makes tokens for which the embedding has no row: a prompt with one cannot be run.

    Returns a warning about tokens without a row that no prompt holds (control tokens that the chat template does not
    write, such as a padding token); None if there are none. Raises ModelError: texts or the chat template make one.
    """
    rowless = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows}
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template or "")
    written = [
        token_id
        for token_id, token in sorted(rowless.items())
        if token_id == tokenizer.bos_token_id
        or token in template
        or not (token_id in added and (added[token_id].special or _CONTROL_FORM.match(added[token_id].content)))
    ]
    shown = ", ".join(f"{rowless[i]!r} ({i})" for i in (written or sorted(rowless))[:_MAX_NAMED])
    shown += f" and {num - _MAX_NAMED} more" if (num := len(written or rowless)) > _MAX_NAMED else ""
    if written:
        raise ModelError(
            f"the tokenizer in {folder} makes tokens without a row in the embedding, which has {num_rows} rows: "
            f"{shown}; copy the tokenizer that was saved with these weights, remove the added tokens from it, or save "
            "the model after model.resize_token_embeddings(len(tokenizer)) and train the new rows"
        )
    return f"control tokens that occur in no prompt have no row in the embedding: {shown}" if rowless else None
