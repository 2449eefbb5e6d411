"""The drafter that settings name."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

from laserbatch.pipeline.decoding.drafters.aligned import AlignedDrafter
from laserbatch.pipeline.decoding.drafters.blended import BlendedDrafter
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter
from laserbatch.pipeline.decoding.drafters.growing import DraftModel, Growth, ModelDrafter
from laserbatch.pipeline.decoding.drafters.grown import Beams, Branching, Chains, StochasticBeams
from laserbatch.pipeline.decoding.drafters.lookahead import LookaheadDrafter
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter
from laserbatch.pipeline.decoding.drafters.small_model import SmallModel
from laserbatch.pipeline.decoding.drafters.trained import DrafterCard, TrainedHead, read_card
from laserbatch.pipeline.decoding.kv_cache import UNBOUNDED
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.settings import SAMPLING_RULES, TEXT_SOURCES, Budget, DecodingSettings
from laserbatch.pipeline.errors import ModelError
from laserbatch.retrieval_pools.sources import SOURCE_HEAD, SOURCE_MODEL


@dataclass(frozen=True)
class DraftModels:
    """What was trained to draft for a target, loaded; each small model's cache holds `max_tokens`."""

    small: tuple[LoadedModel, ...] = ()
    cards: tuple[DrafterCard | None, ...] = ()  # of the small ones
    head: TrainedHead | None = None
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
        head = None if settings.draft_head is None else TrainedHead(settings.draft_head, target)
        return cls(tuple(small), tuple(map(read_card, settings.draft_models)), head, max_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Memory of a token in all of their KV caches."""
        of_head = 0 if self.head is None else self.head.bytes_per_token
        return of_head + sum(loaded.bytes_per_token for loaded in self.small)

    def of_texts(self, settings: DecodingSettings) -> list[tuple[DraftModel, int]]:
        """Each with its source, and with nothing known of any text."""
        limits = settings.batch_size, self.max_tokens
        models: list[tuple[DraftModel, int]] = []
        for loaded, card in zip(self.small, self.cards, strict=True):
            log_acceptance = card and card.log_acceptance
            models.append((SmallModel(loaded, *limits, log_acceptance, settings.attention), SOURCE_MODEL))
        if self.head is not None:
            models.append((self.head.draft_model(*limits, settings.attention), SOURCE_HEAD))
        return models


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
    growth, found = growth_of(settings, budget), models.of_texts(settings)
    for source in (SOURCE_MODEL, SOURCE_HEAD) if settings.verifier in SAMPLING_RULES else ():
        if of_source := [model for model, its in found if its == source]:
            drafters.append(ModelDrafter(of_source, growth, settings.temperature, source))
    if settings.verifier not in SAMPLING_RULES:
        drafters += [ModelDrafter([model], growth, settings.temperature, source) for model, source in found]
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
