"""The drafter that settings name."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

from laserbatch.pipeline.decoding.drafters.aligned import AlignedDrafter
from laserbatch.pipeline.decoding.drafters.beams import Beams
from laserbatch.pipeline.decoding.drafters.blended import BlendedDrafter
from laserbatch.pipeline.decoding.drafters.chains import Chains
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.drafters.growing import Growth
from laserbatch.pipeline.decoding.drafters.lookahead import LookaheadDrafter
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.drafters.rsd import Branching, StochasticBeams
from laserbatch.pipeline.decoding.drafters.small_model import SmallModel, SmallModelDrafter
from laserbatch.pipeline.decoding.kv_cache import UNBOUNDED
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.settings import SAMPLING_RULES, TEXT_SOURCES, Budget, DecodingSettings
from laserbatch.pipeline.errors import ModelError


@dataclass(frozen=True)
class DraftModels:
    """What was trained to draft for a target, loaded; each small model's cache holds `max_tokens`."""

    small: tuple[LoadedModel, ...] = ()
    max_tokens: int = UNBOUNDED

    @classmethod
    def load(cls, settings: DecodingSettings, target: LoadedModel, max_tokens: int) -> "DraftModels":
        """Those that settings name. Raises ModelError: one cannot be read, or is of another tokenizer."""
        small = []
        for folder in settings.draft_models:
            loaded = load_model(folder, settings.dtype, str(target.device))
            if loaded.vocab_size != target.vocab_size or vocabulary_of(loaded) != vocabulary_of(target):
                raise ModelError(
                    f"draft model {folder} has another vocabulary ({loaded.vocab_size} tokens) than {target.model_id} "
                    f"({target.vocab_size}): a draft model needs its target's tokenizer"
                )
            small.append(loaded)
        return cls(tuple(small), max_tokens)


def vocabulary_of(loaded: LoadedModel) -> dict[str, int] | None:
    """Of its tokenizer, where it has one."""
    return None if loaded.tokenizer is None else loaded.tokenizer.get_vocab()


def drafter_from(
    settings: DecodingSettings,
    pool=None,
    budget: Budget | None = None,
    num_threads: int = 1,
    models: DraftModels | None = None,
) -> Drafter:
    """The drafter over a pool or none; `budget` None is that of the settings."""
    budget, models = budget or Budget.of(settings), models or DraftModels()
    if budget.max_draft_tokens == 0:
        return NoDrafter()
    drafters: list[Drafter] = []
    for loaded in [models.small] if settings.verifier in SAMPLING_RULES else [(one,) for one in models.small]:
        small = [SmallModel(one, settings.batch_size, models.max_tokens) for one in loaded]
        drafters.append(SmallModelDrafter(small, growth_of(settings, budget), settings.temperature))
    if sources := tuple(source for source in settings.drafters if source in TEXT_SOURCES):
        limits = budget.max_draft_tokens, budget.min_acceptance
        drafters.append(RetrievalDrafter(pool, sources, *limits, num_threads))
    others: SequenceOf[tuple[str, type[Drafter]]] = (("aligned", AlignedDrafter), ("lookahead", LookaheadDrafter))
    drafters += [kind() for name, kind in others if name in settings.drafters]
    if len(drafters) > 1:
        return BlendedDrafter(drafters, budget.max_draft_tokens)
    return drafters[0] if drafters else NoDrafter()


def growth_of(settings: DecodingSettings, budget: Budget) -> Growth:
    """How small models' drafts grow under a rule; never above the budget, since what was drawn must stay whole."""
    width = min(settings.draft_width, budget.max_draft_tokens)
    length = min(settings.draft_length, budget.max_draft_tokens // width)
    match settings.verifier:
        case "leviathan":
            return Chains(1, min(settings.draft_length, budget.max_draft_tokens))
        case "specinfer" | "k_seq":
            return Chains(width, length)
        case "rsd" if settings.draft_branching:
            levels = accumulate(settings.draft_branching, int.__mul__)
            fitting = sum(total <= budget.max_draft_tokens for total in accumulate(levels))
            return Branching(settings.draft_branching[:fitting])
        case "rsd":
            return StochasticBeams(width, length)
    return Beams(width, length)
