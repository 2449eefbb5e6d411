"""Recommenders in memory: causal models over tokens of codes."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from laserbatch.pipeline.decoding.model.folder import require_whole_files
from laserbatch.pipeline.storage.atomic import share_weights, write_json
from laserbatch.research.learning import whole_model, with_lora
from laserbatch.research.recommending.card import CARD_NAME, KnownRecommender, RecommenderCard, known_recommender

LORA_RANK = 16


@dataclass(frozen=True)
class Recommender(KnownRecommender):
    model: PreTrainedModel


def new_model(card: RecommenderCard, hidden_size: int, num_layers: int, seed: int) -> LlamaForCausalLM:
    """An untrained model for the tokens of a card."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    num_heads = max(1, hidden_size // 64)
    config = LlamaConfig(
        vocab_size=card.vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=card.begin, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def drop_out(model: LlamaForCausalLM, share: float) -> None:
    """Apply dropout to the outputs of embeddings, attention and MLPs during training."""

    def hook(module: torch.nn.Module, _, output):
        first = output[0] if isinstance(output, tuple) else output
        first = torch.nn.functional.dropout(first, share, module.training)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    for module in [
        model.model.embed_tokens,
        *(part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)),
    ]:
        module.register_forward_hook(hook)


def extended_model(base: Path, card: RecommenderCard, seed: int) -> tuple[torch.nn.Module, RecommenderCard]:
    """Extend a language model by the tokens of a card and an untrained LoRA; also return the card with their offset.

    The LoRA of all linear layers and the embeddings are trainable. Raises ConfigError if peft is not installed,
    ModelError if the folder holds no model.
    """
    require_whole_files(base)
    transformers_logging.set_verbosity_error()  # it warns of new embeddings
    torch.manual_seed(seed)
    model = whole_model(base)
    card = card.model_copy(update={"begin": model.get_input_embeddings().num_embeddings})
    model.resize_token_embeddings(card.vocab_size)
    adapted = with_lora(model, LORA_RANK, 2 * LORA_RANK)
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embeddings is not None:
            embeddings.weight.requires_grad_(True)
    return adapted, card


def save_recommender(model, card: RecommenderCard, folder: Path) -> None:
    model.save_pretrained(folder)
    write_json(card.model_dump(mode="json"), folder / CARD_NAME)
    share_weights(folder / CARD_NAME)


def load_recommender(folder: Path, device: str = "cpu") -> Recommender:
    """The recommender of a folder. Raises ModelError if the folder holds none."""
    recommender = known_recommender(folder)
    return Recommender(recommender.card, recommender.model_id, whole_model(folder, device).eval())
