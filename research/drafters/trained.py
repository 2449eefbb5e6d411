"""Folders of what was trained to draft for a target: `drafter.json`, what it is and how good, beside its weights."""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

from laserbatch.pipeline.decoding.device_memory import cache_bytes_per_token
from laserbatch.pipeline.decoding.model.load import LoadedModel
from laserbatch.pipeline.decoding.model.output_head import OutputHead
from laserbatch.pipeline.errors import ModelError, first_line
from laserbatch.pipeline.validation import Strict, explain
from laserbatch.research.drafters.eagle import EagleHead, EagleModel
from laserbatch.research.drafters.medusa import MedusaHeads, MedusaModel
from laserbatch.research.drafters.model_drafter import DraftModel

CARD_NAME, WEIGHTS_NAME = "drafter.json", "model.safetensors"
CONFIDENCES = tuple(k / 10 for k in range(11))  # at which curves of acceptance are known
MIN_ACCEPTANCE = 1e-4
Share = Annotated[float, Field(ge=0, le=1)]


class DrafterCard(Strict):
    """What a trained drafter is, and what held-back texts said of it.

    Attributes
    ----------
    target : the model's id whose states or texts it was trained on.
    layer : of EAGLE's head, the configuration of its layer; `num_heads` of Medusa's.
    acceptance : of each depth, the share of its likeliest tokens that were right where all above were.
    curves : of each depth, that share at each of CONFIDENCES, by what the drafter itself says of a token.
    tokens_per_step : of texts that were written again by chains of its likeliest tokens, the target's own included.
    """

    kind: Literal["medusa", "eagle", "hass", "small"]
    target: str
    num_heads: int = 0
    layer: dict[str, float | int | None] = Field(default_factory=dict)
    num_texts: int = 0
    num_held_back: int = 0
    training_seconds: float = 0.0
    acceptance: tuple[Share, ...] = ()
    curves: tuple[tuple[Share, ...], ...] = ()
    tokens_per_step: float = 1.0

    def log_acceptance(self, depth: int, log_q: np.ndarray) -> np.ndarray:
        """Of tokens at a depth by what the drafter says of them, float[...] both; see `DraftModel`."""
        if not self.curves:
            return log_q
        curve = self.curves[min(depth, len(self.curves) - 1)]
        found = np.log(np.maximum(np.interp(np.exp(log_q), CONFIDENCES, curve), MIN_ACCEPTANCE))
        return np.where(np.isneginf(log_q), log_q, found)


def read_card(folder: Path) -> DrafterCard | None:
    """A folder's card, None where it has none. Raises ModelError: it is not one."""
    path = folder / CARD_NAME
    if not path.is_file():
        return None
    try:
        return DrafterCard.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, DrafterCard)}; train it again") from None


class TrainedHead:
    """A head in memory, ready for its target. Raises ModelError: the folder has none, or one for another model."""

    def __init__(self, folder: Path, target: LoadedModel) -> None:
        card = read_card(folder)
        if card is None or card.kind == "small":
            found = "is a small model: name it in trained.models" if card else f"has no {CARD_NAME}: train one into it"
            raise ModelError(f"trained.head {folder} {found} (`laserbatch drafter train` makes heads)")
        if card.target != target.model_id:
            raise ModelError(
                f"trained.head {folder} was trained for {card.target}, but the model is {target.model_id}: train one"
            )
        self.card, self._target = card, target
        self._head = new_head(card, target.model.config.get_text_config().hidden_size)
        try:
            self._head.load_state_dict(load_file(folder / WEIGHTS_NAME))
        except (OSError, RuntimeError) as error:
            raise ModelError(f"{folder / WEIGHTS_NAME}: {first_line(error)}; train it again") from error
        weight = target.model.get_input_embeddings().weight
        self._head.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)

    @property
    def bytes_per_token(self) -> int:
        """Memory of a token in the KV cache of its layer; 0 without one."""
        dtype = next(self._head.parameters()).dtype
        return cache_bytes_per_token(LlamaConfig(**self.card.layer), dtype) if self.card.layer else 0

    def draft_model(self, max_rows: int, max_tokens: int, attention: str) -> DraftModel:
        """With nothing known of any text; `attention` as `decoding.attention`."""
        model = self._target.model
        logits_of = (getattr(model, "fused", None) or OutputHead(model)).logits_of
        if isinstance(self._head, MedusaHeads):
            return MedusaModel(self._head, logits_of, self.card.log_acceptance)
        embed = model.get_input_embeddings()
        return EagleModel(self._head, embed, logits_of, max_rows, max_tokens, self.card.log_acceptance, attention)


def new_head(card: DrafterCard, hidden_size: int) -> nn.Module:
    """Untrained, as a card says."""
    if card.kind == "medusa":
        return MedusaHeads(hidden_size, card.num_heads)
    return EagleHead(LlamaConfig(**card.layer))


def layer_of(config) -> dict[str, float | int | None]:
    """The configuration of a head's layer for a target of a configuration: of its sizes."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    found = {name: getattr(config, name, None) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    found["rms_norm_eps"] = found["rms_norm_eps"] or 1e-6
    return {name: value for name, value in found.items() if value is not None} | {"num_hidden_layers": 1}
