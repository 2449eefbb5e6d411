"""Reads folders of trained drafters: weights, and `drafter.json` with the kind and the measured acceptance."""

from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

from laserbatch.pipeline.decoding.device_memory import cache_bytes_per_token
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.model.output_head import OutputHead
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.validation import Strict, explain
from laserbatch.research.drafters.eagle import EagleHead, EagleModel
from laserbatch.research.drafters.medusa import MedusaHeads, MedusaModel
from laserbatch.research.drafters.model_drafter import DraftModel
from laserbatch.research.learning import trained_shapes

CARD_NAME, WEIGHTS_NAME = "drafter.json", "model.safetensors"
CONFIDENCES = tuple(k / 10 for k in range(11))  # the points of acceptance curves
MIN_ACCEPTANCE = 1e-4
Share = Annotated[float, Field(ge=0, le=1)]


class DrafterCard(Strict):
    """The kind of a trained drafter, and its acceptance on held-back texts.

    The `acceptance` of a depth is the share of most likely tokens that were right, given that all above were right. The
    curve of a depth has the share of right tokens at each of CONFIDENCES, the drafter's probability. `tokens_per_step`
    is measured by a replay of the texts with chains of most likely tokens, and includes the bonus token.
    """

    kind: Literal["medusa", "eagle", "hass", "small"]
    target: str  # id of the model whose states or texts it was trained on
    num_heads: int = 0  # number of Medusa heads
    layer: dict[str, float | int | None] = Field(default_factory=dict)  # configuration of an EAGLE head
    num_texts: int = 0
    num_held_back: int = 0
    training_seconds: float = 0.0
    acceptance: tuple[Share, ...] = ()
    curves: tuple[tuple[Share, ...], ...] = ()
    tokens_per_step: float = 1.0

    def log_acceptance(self, depth: int, log_q: np.ndarray) -> np.ndarray:
        """The log acceptance of tokens at a depth, float[...], from their `log_q`, float[...]; see `DraftModel`."""
        if not self.curves:
            return log_q
        curve = self.curves[min(depth, len(self.curves) - 1)]
        log_rate = np.log(np.maximum(np.interp(np.exp(log_q), CONFIDENCES, curve), MIN_ACCEPTANCE))
        return np.where(np.isneginf(log_q), log_q, log_rate)


def read_card(folder: Path) -> DrafterCard | None:
    """The card of a folder; None if it has none. Raises ModelError if the card is invalid."""
    path = folder / CARD_NAME
    if not path.is_file():
        return None
    try:
        return DrafterCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, DrafterCard)}; train it again") from None


def require_head(folder: Path, model_id: str, hidden_size: int) -> DrafterCard:
    """The card of a head. Raises ModelError if the folder has no head, a damaged head, or a head for another model."""
    card, path = read_card(folder), folder / WEIGHTS_NAME
    if card is None or card.kind == "small":
        reason = "is a small model: name it in trained.models" if card else f"has no {CARD_NAME}: train a head"
        raise ModelError(f"trained.head {folder} {reason} (`laserbatch drafter train` makes heads)")
    if card.target != model_id:
        raise ModelError(
            f"trained.head {folder} was trained for {card.target}, but the model is {model_id}: train a head"
        )
    with torch.device("meta"):
        expected = {name: list(each.shape) for name, each in new_head(card, hidden_size).state_dict().items()}
    shapes = trained_shapes(path)
    if wrong := [name for name in sorted({*expected, *shapes}) if expected.get(name) != shapes.get(name)]:
        found, fits = (tensors.get(wrong[0], "no such tensor") for tensors in (shapes, expected))
        raise ModelError(f"{path}: {wrong[0]} has the shape {found}, expected {fits} for {model_id}; train it again")
    return card


class TrainedHead:
    """A head in memory. Raises ModelError as `require_head` does."""

    def __init__(self, folder: Path, target: LoadedModel) -> None:
        hidden_size = target.model.config.get_text_config().hidden_size
        self.card, self._target = require_head(folder, target.model_id, hidden_size), target
        self._head = new_head(self.card, hidden_size)
        self._head.load_state_dict(load_file(folder / WEIGHTS_NAME))
        self._embed = cast("nn.Embedding", target.model.get_input_embeddings())
        weight = self._embed.weight
        self._head.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token in the KV cache of the head's layer; 0 without a layer."""
        dtype = next(self._head.parameters()).dtype
        return cache_bytes_per_token(LlamaConfig.from_dict(self.card.layer), dtype) if self.card.layer else 0

    def draft_model(self, max_rows: int, max_tokens: int, attention: str) -> DraftModel:
        """A new draft model with this head; `attention` as in `decoding.attention`."""
        model = self._target.model
        logits_of = (getattr(model, "fused", None) or OutputHead(model)).logits_of
        if isinstance(self._head, MedusaHeads):
            return MedusaModel(self._head, logits_of, self.card.log_acceptance)
        return EagleModel(self._head, self._embed, logits_of, max_rows, max_tokens, self.card.log_acceptance, attention)


def new_head(card: DrafterCard, hidden_size: int) -> MedusaHeads | EagleHead:
    if card.kind == "medusa":
        return MedusaHeads(hidden_size, card.num_heads)
    return EagleHead(LlamaConfig.from_dict(card.layer))


def layer_of(config) -> dict[str, float | int | None]:
    """The configuration of an EAGLE head's layer, with the sizes of a target's configuration."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(config, name, None) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    sizes["rms_norm_eps"] = sizes["rms_norm_eps"] or 1e-6
    return {name: value for name, value in sizes.items() if value is not None} | {"num_hidden_layers": 1}
