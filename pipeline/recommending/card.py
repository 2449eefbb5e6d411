"""What a recommender on disk is, without its weights: `recommender.json` beside a causal model of safetensors."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.recommending.codes import ItemCodes
from laserbatch.pipeline.storage.atomic import read_json, sha256_file
from laserbatch.pipeline.validation import Strict, explain

CARD_NAME, CODES_NAME, WEIGHTS_NAME = "recommender.json", "item_codes.parquet", "model.safetensors"
BEGIN = 0  # the token that every history begins with


class RecommenderCard(Strict):
    """What a recommender knows.

    Attributes
    ----------
    sizes : codes of each level that it has tokens for; code c of level j is token 1 + sum(sizes[:j]) + c.
    codes : digest of the items' codes that it was trained on.
    history : newest items of a user that it is shown.
    loss : that a draft model learned by, of which target; None: it was trained on the log alone.
    """

    sizes: tuple[int, ...]
    codes: str
    history: int = 20
    loss: str | None = None
    target: str | None = None
    num_histories: int = 0
    training_seconds: float = 0.0

    @property
    def first_tokens(self) -> tuple[int, ...]:
        return tuple(1 + int(before) for before in np.cumsum((0, *self.sizes[:-1])))

    def prompt(self, items: np.ndarray) -> np.ndarray:
        """Token ids int64 of a history, codes (n, num_levels) of its items, the oldest first."""
        tokens = items[-self.history :].astype(np.int64) + np.array(self.first_tokens)
        return np.concatenate(([BEGIN], tokens.ravel()))


@dataclass(frozen=True)
class KnownRecommender:
    """A recommender whose weights need not be loaded. `model_id` : its folder's name and the digest of its weights."""

    card: RecommenderCard
    model_id: str

    def require(self, codes: ItemCodes) -> None:
        """Raises ModelError where it was trained on other codes."""
        if self.card.codes != codes_digest(codes):
            raise ModelError(f"{self.model_id} was trained on other item codes: train it again, or give those")

    def require_drafts_for(self, target: "KnownRecommender") -> None:
        """Raises ModelError where its vocabulary is another than its target's."""
        if (self.card.sizes, self.card.codes) != (target.card.sizes, target.card.codes):
            raise ModelError(
                f"the draft model {self.model_id} has another vocabulary of codes {self.card.sizes} than "
                f"{target.model_id} {target.card.sizes}: a draft model needs its target's codes"
            )


def known_recommender(folder: Path) -> KnownRecommender:
    """Raises ModelError: the folder holds none."""
    path, weights = folder / CARD_NAME, folder / WEIGHTS_NAME
    if not path.is_file() or not weights.is_file():
        raise ModelError(f"{folder} holds no recommender: `laserbatch recommender train --out {folder}` makes one")
    try:
        card = RecommenderCard.model_validate(read_json(path))
    except ValidationError as error:
        raise ModelError(f"{path}: {explain(error, RecommenderCard)}; train it again") from None
    return KnownRecommender(card, f"{folder.resolve().name}-{sha256_file(weights)[:12]}")


def codes_digest(codes: ItemCodes) -> str:
    """Of the codes of all items by id."""
    order = np.argsort(np.array([str(one) for one in codes.item_ids.to_pylist()]))
    named = [str(codes.item_ids[row]) for row in order.tolist()]
    return hashlib.sha256("\n".join(named).encode() + codes.codes[order].tobytes()).hexdigest()[:16]
