"""The draft models of a target in memory: small models and a trained head."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.drafter import Drafter
from laserbatch.pipeline.decoding.model.described_weights import require_described_weights
from laserbatch.pipeline.decoding.model.folder import load_tokenizer, model_identity, require_whole_files
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model, packable_config
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.errors import ModelError
from laserbatch.research.drafters.model_drafter import CachedModel, DraftModel, ModelDrafter, TreeShape
from laserbatch.research.drafters.options import TrainedOptions
from laserbatch.research.drafters.trained import DrafterCard, TrainedHead, read_card, require_head
from laserbatch.research.drafters.tree_shapes import Beams, Branching, Chains, StochasticBeams
from laserbatch.retrieval_pools.sources import SOURCE_HEAD, SOURCE_MODEL

logger = logging.getLogger(__name__)
DEFAULTS = TrainedOptions()


class SmallModel(CachedModel):
    """A small model that drafts for the target, with its own KV cache."""

    def __init__(
        self, loaded: LoadedModel, max_rows: int, max_tokens: int, log_acceptance=None, attention: str = "torch"
    ) -> None:
        super().__init__(loaded.model, loaded.device, max_rows, max_tokens, log_acceptance, attention)
        self._loaded, self._has_warned = loaded, False

    def begin(self, sequences: list[DecodingSequence]) -> None:
        rows = [self._rows[sequence] for sequence in sequences]
        pairs = zip(rows, sequences, strict=True)
        new = [Feed(row, sequence.context[self._cache.lengths[row] :]) for row, sequence in pairs]
        self._root = self._read(new).logits
        for feed, sequence in zip(new, sequences, strict=True):
            if self._cache.lengths[feed.row] < sequence.num_prompt:
                self._cache.remember_prefix(feed.row, sequence.prompt_ids[: self._cache.lengths[feed.row]])

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        if len(trees) == 0:
            return torch.log_softmax(self._root[to_device(tree_of, self._root.device)].float(), -1)
        output = self._runner.forward(self._feeds, trees)
        return torch.log_softmax(output.rows.of(output.batch.logit_starts[tree_of] + 1 + places).float(), -1)

    def has_room(self, sequence: DecodingSequence) -> bool:
        expected, limit = len(sequence.context) + sequence.num_left, self._loaded.max_context
        if expected > limit and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the draft model %s reads at most %d tokens, so it drafts nothing for a longer prompt with its text: "
                "this one may have %d. Take a draft model with a longer context, or lower knowledge.max_prompt_tokens "
                "or decoding.max_new_tokens", self._loaded.model_id, limit, expected,
            )  # fmt: skip
        return expected <= limit and self._has_row(sequence, sequence.context, expected)


@dataclass(frozen=True)
class DraftModels:
    """Small models with their cards, and a head; `options` sets the size of their drafts."""

    small: tuple[LoadedModel, ...] = ()
    cards: tuple[DrafterCard | None, ...] = ()
    head: TrainedHead | None = None
    options: TrainedOptions = DEFAULTS

    @classmethod
    def load(cls, options: TrainedOptions, dtype: str, target: LoadedModel) -> "DraftModels":
        """Load the configured models. Raises ModelError if one cannot be read, or has another tokenizer."""
        small = []
        for folder in options.models:
            with _of_models():
                loaded = load_model(folder, dtype, str(target.device))
                pairs = (loaded.tokenizer, loaded.vocab_size), (target.tokenizer, target.vocab_size)
                require_same_vocabulary(folder, target.model_id, *pairs)
            small.append(loaded)
        head = None if options.head is None else TrainedHead(options.head, target)
        return cls(tuple(small), tuple(map(read_card, options.models)), head, options)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token in the KV caches of all draft models."""
        of_head = 0 if self.head is None else self.head.bytes_per_token
        return of_head + sum(loaded.bytes_per_token for loaded in self.small)

    def drafters(self, decoding: DecodingSettings, budget: Budget, max_tokens: int) -> list[Drafter]:
        """A drafter for each model; a verifier of sampled drafts gets one for all small models and one for the head."""
        limits, options = (decoding.batch_size, max_tokens), self.options
        if decoding.verifier_samples and self.head is not None and (depth := self.head.card.num_heads):
            # Below its last head Medusa has no distribution to draw from.
            shorter = {"length": min(options.length, depth), "branching": options.branching[:depth]}
            options = options.model_copy(update=shorter)
        shape = shape_of(options, decoding.verifier, budget)
        small: list[DraftModel] = [
            SmallModel(loaded, *limits, card and card.log_acceptance, decoding.attention)
            for loaded, card in zip(self.small, self.cards, strict=True)
        ]
        heads = [] if self.head is None else [self.head.draft_model(*limits, decoding.attention)]
        sides = ((small, SOURCE_MODEL), (heads, SOURCE_HEAD))
        if decoding.verifier_samples:
            groups = [(models, source) for models, source in sides if models]
        else:
            groups = [([model], source) for models, source in sides for model in models]
        return [ModelDrafter(models, shape, decoding.temperature, source) for models, source in groups]


def require_fitting(options: TrainedOptions, model_dir: Path, adapter: str | None) -> None:
    """Raise ModelError if a configured folder is damaged or does not fit the model; no weight is read."""
    model_id, target = model_identity(model_dir, adapter), load_tokenizer(model_dir, adapter)
    num_rows = require_described_weights(model_dir)
    for folder in options.models:
        with _of_models():
            require_whole_files(folder)
            packable_config(folder)
            pair = load_tokenizer(folder), require_described_weights(folder)
            require_same_vocabulary(folder, model_id, pair, (target, num_rows))
            read_card(folder)
    if options.head is not None:
        require_head(options.head, model_id, packable_config(model_dir).get_text_config().hidden_size)


def require_same_vocabulary(folder: Path, target_id: str, *pairs: tuple) -> None:
    """Raise ModelError if draft model and target, each a tokenizer and its number of rows, have other vocabularies."""
    (vocabulary, num_rows), (of_target, num_of_target) = (
        (None if tokenizer is None else tokenizer.get_vocab(), num_rows) for tokenizer, num_rows in pairs
    )
    if num_rows != num_of_target or vocabulary != of_target:
        raise ModelError(
            f"{folder} has another vocabulary ({num_rows} tokens) than {target_id} ({num_of_target}): use a draft "
            "model with the target's tokenizer"
        )


@contextmanager
def _of_models() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"drafter_options.trained.models: {error}") from None


def shape_of(options: TrainedOptions, verifier: str, budget: Budget) -> TreeShape:
    """The tree shape for a verifier. It keeps to the budget, since sampled drafts must not be cut later."""
    width = min(options.width, budget.max_draft_tokens)
    length = min(options.length, budget.max_draft_tokens // width)
    match verifier:
        case "leviathan":
            return Chains(1, min(options.length, budget.max_draft_tokens))
        case "specinfer" | "k_seq":
            return Chains(width, length)
        case "rsd" if options.branching:
            levels = accumulate(options.branching, int.__mul__)
            fitting = sum(total <= budget.max_draft_tokens for total in accumulate(levels))
            return Branching(options.branching[:fitting])
        case "rsd":
            return StochasticBeams(width, length)
    return Beams(width, length)
