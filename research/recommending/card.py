"""The card of a recommender, without its weights: `recommender.json` in the folder of a causal safetensors model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from laserbatch.pipeline.decoding.model.folder import read_config
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.storage.atomic import read_json, sha256_file
from laserbatch.pipeline.validation import Strict, explain
from laserbatch.research.learning import trained_shapes
from laserbatch.research.recommending.codes import ItemCodes, read_codes

CARD_NAME, CODES_NAME, WEIGHTS_NAME = "recommender.json", "item_codes.parquet", "model.safetensors"


class Ranking(Strict):
    """The accuracy of lists of ten items for the last item of held-back histories."""

    num_histories: int
    recall_10: float
    ndcg_10: float  # with one item to find: 1 / log2(1 + its rank)

    @classmethod
    def of(cls, lists: Sequence[np.ndarray], answers: Sequence[int]) -> "Ranking":
        """Judge lists of catalogue rows, best first; `answers` has the row that each list should hold."""
        places = [np.flatnonzero(rows[:10] == answer) for rows, answer in zip(lists, answers, strict=True)]
        ranks = [int(place[0]) + 1 for place in places if len(place)]
        count = max(1, len(lists))
        ndcg = float(sum(1 / np.log2(1 + rank) for rank in ranks) / count)
        return cls(num_histories=len(lists), recall_10=len(ranks) / count, ndcg_10=ndcg)


class RecommenderCard(Strict):
    """The vocabulary and the training of a recommender; code c of level j is token begin + 1 + sum(sizes[:j]) + c."""

    sizes: tuple[int, ...]  # number of codes of each level that have tokens
    begin: int = 0  # the token that begins every history; lower ids belong to the extended language model
    codes: str  # digest of the item codes that it was trained on
    history: int = 20  # number of a user's newest items in a prompt
    loss: str | None = None  # the loss of a draft model
    target: str | None = None  # the target of a draft model
    num_histories: int = 0
    training_seconds: float = 0.0
    held_back: Ranking | None = None  # accuracy of the recommender's lists
    popular: Ranking | None = None  # accuracy of the list of the most popular items
    neighbours: Ranking | None = None  # accuracy of lists of the neighbours of a user's items
    epoch: int | None = None  # the epoch whose weights are kept, with the best result on held-back items

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return tuple(self.begin + 1 + int(before) for before in np.cumsum((0, *self.sizes[:-1])))

    @property
    def vocab_size(self) -> int:
        return self.begin + 1 + sum(self.sizes)

    def prompt(self, items: np.ndarray) -> np.ndarray:
        """Token ids, int64, of the newest items of a history; `items` are codes (n, num_levels), oldest first."""
        return self.tokens(items[-self.history :])

    def tokens(self, items: np.ndarray) -> np.ndarray:
        """Token ids, int64, of all items of a history; see `prompt`."""
        return np.concatenate(([self.begin], (items.astype(np.int64) + np.array(self.first_tokens)).ravel()))


@dataclass(frozen=True)
class KnownRecommender:
    """A recommender without its weights; `model_id` is the name of its folder and the digest of its weights."""

    card: RecommenderCard
    model_id: str

    def require(self, codes: ItemCodes) -> None:
        """Raise ModelError if it was trained on other codes."""
        if self.card.codes != codes_digest(codes):
            raise ModelError(f"{self.model_id} was trained on other item codes: train it again, or restore its codes")

    def require_drafts_for(self, target: "KnownRecommender") -> None:
        """Raise ModelError if its vocabulary differs from its target's."""
        if (self.card.sizes, self.card.codes) != (target.card.sizes, target.card.codes):
            raise ModelError(
                f"the draft model {self.model_id} has another vocabulary of codes {self.card.sizes} than "
                f"{target.model_id} {target.card.sizes}: train a draft model for this target (--draft-for)"
            )


def known_recommender(folder: Path) -> KnownRecommender:
    """The recommender of a folder. Raises ModelError if the folder holds none."""
    path, weights = folder / CARD_NAME, folder / WEIGHTS_NAME
    if not path.is_file() or not weights.is_file():
        raise ModelError(f"{folder} holds no recommender: `laserbatch recommender train --out {folder}` makes one")
    try:
        card = RecommenderCard.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, RecommenderCard)}; train it again") from None
    trained_shapes(weights)
    read_config(folder)
    return KnownRecommender(card, f"{folder.resolve().name}-{sha256_file(weights)[:12]}")


def codes_of_recommender(folder: Path, recommender: KnownRecommender) -> ItemCodes:
    """The item codes in a recommender's folder, with the sizes for which the recommender has tokens.

    Raises TableError if there are none, ModelError if the recommender was trained on other codes.
    """
    codes = read_codes(folder / CODES_NAME)
    recommender.require(codes)
    return replace(codes, sizes=recommender.card.sizes)


def codes_digest(codes: ItemCodes) -> str:
    """A digest of the codes of all items, by id."""
    names = np.array([str(item_id) for item_id in codes.item_ids.to_pylist()])
    order = np.argsort(names)
    return hashlib.sha256("\n".join(names[order]).encode() + codes.codes[order].tobytes()).hexdigest()[:16]
