"""The drafting methods that `methods.py` compares: their trained models and their settings. Measures nothing."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_systems import WITH_POOL
from safetensors import safe_open
from tasks import Task, own_texts

from laserbatch.pipeline.decoding.drafters import Drafter, drafter_from, load_plugin_drafters
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.research.drafter_training.texts import TrainingText
from laserbatch.research.drafter_training.train import TrainingOptions, train_drafter
from laserbatch.research.drafters.options import Kind
from laserbatch.research.drafters.trained import DrafterCard, read_card

logger = logging.getLogger("benchmarks")

KINDS: tuple[Kind, ...] = ("medusa", "eagle", "hass", "small")
SAMPLING_RULES = ("leviathan", "specinfer", "k_seq", "rsd")
LENGTH, WIDTH = 5, 3  # of the draft models' trees


@dataclass(frozen=True)
class Trained:
    """A trained drafter: its folder, its card, and its number of parameters as a share of the target's."""

    folder: Path
    card: DrafterCard
    share: float


def trained_drafters(
    model: Path, engine: Engine, tasks: Sequence[Task], cache: Path, options: TrainingOptions
) -> dict[Kind, Trained]:
    """One drafter of each kind, trained on the model's texts for the pool prompts of all tasks; kept in the cache."""
    texts = [
        TrainingText(prompt, text)
        for task in tasks
        for prompt, text in zip(task.pool_prompts, own_texts(engine, task, cache), strict=True)
        if len(text)
    ]
    digest = hashlib.sha256(repr(options).encode() + b"".join(text.prompt_ids.tobytes() for text in texts))
    trained = {}
    for kind in KINDS:
        folder = cache / engine.model_id / "drafters" / f"{kind}-{digest.hexdigest()[:12]}"
        card = read_card(folder)
        if card is None:
            logger.info("training %s on %d texts (kept for later runs)", kind, len(texts))
            card = train_drafter(kind, model, texts, folder, options)
        with safe_open(folder / "model.safetensors", "pt") as opened:
            sizes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
        num_parameters = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in sizes)
        trained[kind] = Trained(folder, card, num_parameters / engine.loaded.num_parameters)
    return trained


def settings_by_method(trained: Mapping[Kind, Trained]) -> dict[str, DecodingSettings]:
    """Settings of each method for greedy verification, alone and with the pool."""
    tree = {"width": WIDTH, "length": LENGTH}
    alone = {
        "model": {"models": [trained["small"].folder], "length": LENGTH},
        "model, tree": {"models": [trained["small"].folder]} | tree,
        **{kind: {"head": trained[kind].folder} | tree for kind in ("medusa", "eagle", "hass")},
    }
    texts = {"pool": WITH_POOL, "lookahead": ("lookahead",), "aligned": ("aligned",)}
    options = {name: {"drafters": drafters} for name, drafters in texts.items()}
    options |= {name: of_models((), **own) for name, own in alone.items()}
    options |= {f"pool + {name}": of_models(WITH_POOL, **own) for name, own in alone.items() if name != "model"}
    return {name: DecodingSettings(verifier="greedy", **own) for name, own in options.items()}


def settings_by_rule(small: Path, budgets: Sequence[int], length: int) -> dict[tuple[str, int], DecodingSettings]:
    """Settings for sampling at temperature 1, by rule and budget of draft tokens; all drafts have one length.

    Trees are as wide as the budget allows at that length (RSD, section 5, fixed budget). `leviathan` drafts one chain,
    and so does `greedy`, whose budget is that chain and which samples with the target's own noise.
    """
    settings = {}
    for budget in budgets:
        shape = {"width": max(1, budget // length), "length": length}
        for rule in SAMPLING_RULES:
            own = shape if rule != "leviathan" else {"width": 1, "length": length}
            settings[rule, budget] = sampled(small, rule, **own)
        branching = (max(1, budget // length), *[1] * (length - 1))
        settings["rsd-c", budget] = sampled(small, "rsd", branching=branching)
    settings["greedy", length] = sampled(small, "greedy", width=1, length=length)
    return settings


def sampled(small: Path, rule: str, **options) -> DecodingSettings:
    return DecodingSettings(verifier=rule, temperature=1.0, **of_models((), models=[small], **options))


def of_models(others: Sequence[str], **options) -> dict:
    """Settings with the drafter `trained` and the `others`."""
    return {"drafters": (*others, "trained"), "drafter_options": {"trained": options}}


def made(settings: DecodingSettings, engine: Engine, pool, budget: Budget) -> Drafter:
    """The drafter that the settings name, made for an engine and its batch size."""
    named = settings.model_copy(update={"batch_size": engine.settings.batch_size})
    plugins = load_plugin_drafters(named, engine.loaded)
    return drafter_from(named, pool, budget, engine.num_draft_threads, plugins, engine.cache.max_tokens)
