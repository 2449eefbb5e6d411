"""Trains any kind of drafter into a folder; the same call continues a training that was killed."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedConfig

from laserbatch.pipeline.decoding.model.folder import model_identity
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.storage.atomic import share_weights, write_json
from laserbatch.research.drafter_training.eagle import ALIGNED_STEPS, Eagle
from laserbatch.research.drafter_training.medusa import ADAPTER_NAME, Medusa, Medusa2
from laserbatch.research.drafter_training.method import Method, judged
from laserbatch.research.drafter_training.small import Small
from laserbatch.research.drafter_training.texts import HELD_BACK_EVERY, Target, TrainingText, batches_of, held_back
from laserbatch.research.drafters.options import Kind
from laserbatch.research.drafters.trained import CARD_NAME, DrafterCard, layer_of
from laserbatch.research.learning import CHECKPOINT_NAME, drop_files, require_own_folder, train_steps, whole_model

MIN_TEXTS = 20
USUAL_WIDTH = 256


@dataclass(frozen=True)
class TrainingOptions:
    """`small_share` is the width of a small model as a share of the target's. `learning_rate` is for targets up to the
    width USUAL_WIDTH; wider ones get a proportionally lower rate (Yang et al. 2022)."""

    epochs: int = 3
    batch_size: int = 8
    learning_rate: float = 3e-3
    num_heads: int = 4
    small_share: float = 0.5
    seed: int = 0


def train_drafter(
    kind: Kind, model_dir: Path, texts: Sequence[TrainingText], folder: Path, options: TrainingOptions | None = None,
    on_progress: Callable[[int, float], None] = lambda step, loss: None,
) -> DrafterCard:  # fmt: skip
    """Train a drafter for the model in `model_dir` on texts that it wrote, and write the drafter into `folder`.

    Equal inputs give equal bytes. `on_progress` is called after each step with its number and its loss. Raises
    ConfigError if there are too few texts, or other files in the folder.
    """
    options = options or TrainingOptions()
    if len(texts) < MIN_TEXTS:
        raise ConfigError(
            f"{len(texts)} texts are too few to train a drafter on; expected at least {MIN_TEXTS}: name a later run "
            "(--run), which has more texts"
        )
    require_own_folder(folder, "drafter", CARD_NAME)
    torch.manual_seed(options.seed)
    target = Target(whole_model(model_dir, "cuda" if torch.cuda.is_available() else "cpu"))
    shown, judging = held_back(texts)
    method, card = _method(kind, target, options)
    folder.mkdir(parents=True, exist_ok=True)
    seeds = (options.seed + epoch for epoch in range(options.epochs))
    seconds = train_steps(
        method.module,
        [batch for seed in seeds for batch in batches_of(shown, options.batch_size, seed)],
        lambda batch: method.loss(target.batch(batch)),
        folder,
        _digest(kind, model_dir, texts, options),
        options.learning_rate * USUAL_WIDTH / max(USUAL_WIDTH, target.embed.weight.shape[1]),
        method.pace,
        on_progress,
    )
    start_s = time.perf_counter()
    card = judged(card, method, target, judging)
    method.save(folder, model_dir)
    adapter = folder / ADAPTER_NAME if kind == "medusa2" else None
    facts = {
        "target": model_identity(model_dir, adapter), "num_texts": len(shown), "num_held_back": len(judging),
        "training_seconds": round(seconds + time.perf_counter() - start_s, 1),
    }  # fmt: skip
    card = card.model_copy(update=facts)
    write_json(card.model_dump(mode="json"), folder / CARD_NAME)
    share_weights(folder / CARD_NAME)
    drop_files(folder, CHECKPOINT_NAME)
    return card


def num_steps(num_texts: int, options: TrainingOptions) -> int:
    """The number of steps of a training on `num_texts` texts, some of which are held back."""
    num_shown = num_texts - -(-num_texts // HELD_BACK_EVERY)
    return options.epochs * -(-num_shown // options.batch_size)


def _method(kind: Kind, target: Target, options: TrainingOptions) -> tuple[Method, DrafterCard]:
    config = target.model.config.get_text_config()
    if kind in ("medusa", "medusa2"):
        method = (Medusa if kind == "medusa" else Medusa2)(target, options.num_heads)
        return method, DrafterCard(kind="medusa", target="", num_heads=options.num_heads)
    if kind == "small":
        return Small(target, small_config(config, options.small_share)), DrafterCard(kind=kind, target="")
    layer = layer_of(config)
    method = Eagle(target, LlamaConfig.from_dict(layer), ALIGNED_STEPS if kind == "hass" else 1, distils=kind == "hass")
    return method, DrafterCard(kind=kind, target="", layer=layer)


def small_config(config: PreTrainedConfig, share: float) -> LlamaConfig:
    """The configuration of a Llama with two layers, `share` of the width, and the same vocabulary."""
    head_dim = 64
    num_heads = max(1, int(config.hidden_size * share) // head_dim)
    return LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=num_heads * head_dim, intermediate_size=3 * num_heads * head_dim,
        num_hidden_layers=2, num_attention_heads=num_heads, num_key_value_heads=num_heads, head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=True,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
    )  # fmt: skip


def _digest(kind: Kind, model_dir: Path, texts: Sequence[TrainingText], options: TrainingOptions) -> str:
    digest = hashlib.sha256(repr((kind, model_identity(model_dir), options)).encode())
    for text in texts:
        digest.update(text.prompt_ids.tobytes() + text.token_ids.tobytes())
    return digest.hexdigest()
