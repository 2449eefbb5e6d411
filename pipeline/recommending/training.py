"""Training of recommenders over codes, and of the small models that draft for them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.recommending.beams import BeamDrafter, search
from laserbatch.pipeline.recommending.card import BEGIN, RecommenderCard, codes_digest
from laserbatch.pipeline.recommending.code_trees import CodeTrees
from laserbatch.pipeline.recommending.codes import ItemCodes
from laserbatch.pipeline.recommending.item_trie import ItemTrie
from laserbatch.pipeline.recommending.losses import NUM_ALIGNED, OF_LISTS, Rows, draft_loss
from laserbatch.pipeline.recommending.models import Recommender, new_model, save_recommender
from laserbatch.pipeline.recommending.settings import DraftLoss

LEAST_HISTORIES = 20
LISTS_AT_ONCE = 32
WARM_UP = 0.05  # of all steps
NO_LABEL = -100

Tell = Callable[[int, int, float], None]


@dataclass(frozen=True)
class RecommenderOptions:
    """`num_listed`, of a draft model: histories whose lists by the target are learned from; `num_picked` items of each
    a step."""

    hidden_size: int = 256
    num_layers: int = 4
    history: int = 20
    epochs: int = 5
    batch_size: int = 64
    learning_rate: float = 2e-3
    num_listed: int = 4000
    num_picked: int = 3
    seed: int = 0


def train_recommender(
    codes: ItemCodes,
    histories: Sequence[np.ndarray],
    folder: Path,
    options: RecommenderOptions | None = None,
    tell: Tell = lambda step, num_steps, loss: None,
) -> RecommenderCard:
    """Train one to say the next item's codes behind each item of histories, rows of `codes` the oldest first.

    The same inputs, the same bytes. Raises ConfigError: too few histories have two items.
    """
    options = options or RecommenderOptions()
    told = _enough(histories)
    card = RecommenderCard(sizes=codes.sizes, codes=codes_digest(codes), history=options.history)
    model, start_s = new_model(codes.sizes, options.hidden_size, options.num_layers, options.seed), time.perf_counter()
    windows = [one[start : start + options.history + 1] for one in told for start in _starts(len(one), options.history)]

    def loss_of(batch: Sequence[int]) -> torch.Tensor:
        rows = [_tokens(card, codes, windows[number]) for number in batch]
        ids = _padded(rows)
        labels = ids.masked_fill(ids == BEGIN, NO_LABEL)  # which fills rows, too
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    _train(model, loss_of, [len(one) for one in windows], options, tell)
    return _saved(model, card, folder, len(told), start_s)


def train_draft(
    kind: DraftLoss,
    target: Recommender,
    codes: ItemCodes,
    histories: Sequence[np.ndarray],
    folder: Path,
    options: RecommenderOptions | None = None,
    tell: Tell = lambda step, num_steps, loss: None,
) -> RecommenderCard:
    """Train a small model to draft for a target; the last item of each history is what is to be said.

    Lists are the target's own, not mixed with the draft's (lambda = 1 in D' of Eq. 3). Raises as `train_recommender`.
    """
    options = options or RecommenderOptions(hidden_size=64, num_layers=1)
    told, start_s = _enough(histories), time.perf_counter()
    target.require(codes)
    trie, rng = ItemTrie.of(codes), np.random.default_rng(options.seed)
    card = target.card.model_copy(update={"loss": kind, "target": target.model_id})
    model = new_model(codes.sizes, options.hidden_size, options.num_layers, options.seed)
    lists = []
    if kind in OF_LISTS:
        told = [told[number] for number in rng.permutation(len(told))[: options.num_listed]]
        lists = listed(target, trie, [card.prompt(codes.codes[one[:-1]]) for one in told])

    def loss_of(batch: Sequence[int]) -> torch.Tensor:
        of_logs = _rows_of(target, model, trie, card, codes, [told[number] for number in batch])
        of_lists = None
        if lists:
            own = [lists[number] for number in batch]
            picked = [[*rng.choice(rows, min(options.num_picked, len(rows)), replace=False), rows[-1]] for rows in own]
            sequences = [[*told[n][:-1], item] for n, items in zip(batch, picked, strict=True) for item in items]
            of_lists = _rows_of(target, model, trie, card, codes, sequences, [len(items) for items in picked])
        return draft_loss(kind, of_logs, of_lists)

    _train(model, loss_of, [len(one) for one in told], options, tell)
    return _saved(model, card, folder, len(told), start_s)


def listed(target: Recommender, trie: ItemTrie, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The target's best NUM_ALIGNED items of each prompt, rows of `codes`, the best first."""
    found = []
    for start in range(0, len(prompts), LISTS_AT_ONCE):
        part = prompts[start : start + LISTS_AT_ONCE]
        trees = CodeTrees(target.model, trie, target.card.first_tokens, part)
        found += [one.rows for one in search(trees, trie, len(part), NUM_ALIGNED, BeamDrafter())]
    return found


def _rows_of(
    target: Recommender, model, trie: ItemTrie, card: RecommenderCard, codes: ItemCodes,
    sequences: Sequence[Sequence[int]], counts: Sequence[int] = (),
) -> Rows:  # fmt: skip
    """The places of each sequence's last item's codes. `counts` : sequences of each list, whose last is the K-th."""
    num_levels = codes.codes.shape[1]
    ids = _padded([_tokens(card, codes, np.asarray(one)[-card.history - 1 :]) for one in sequences], left=True)
    inputs = {"input_ids": ids, "attention_mask": _seen(ids), "use_cache": False, "logits_to_keep": num_levels + 1}
    with torch.no_grad():
        p = target.model(**inputs).logits[:, :-1].float()
    q = model(**inputs).logits[:, :-1].float()
    labels = ids[:, -num_levels:]
    allowed = torch.zeros(q.shape, dtype=torch.bool)
    for number, one in enumerate(sequences):
        node, last = 0, codes.codes[one[-1]].tolist()
        for level, code in enumerate(last):
            children = trie.codes[level][node, : trie.num_children[level][node]]
            allowed[number, level, torch.from_numpy(children) + card.first_tokens[level]] = True
            node = int(trie.nodes[level][node, int(np.searchsorted(children, code))])
    least = torch.zeros(labels.shape)
    if counts:
        own = torch.log_softmax(p.masked_fill(~allowed, -torch.inf), -1).gather(2, labels[..., None])[..., 0]
        ends = np.cumsum(counts) - 1
        least = own[torch.from_numpy(np.repeat(ends, counts))]
    return Rows(*(each.flatten(0, 1) for each in (p, q)), labels.flatten(), allowed.flatten(0, 1), least.flatten())


def _train(model, loss_of, lengths: Sequence[int], options: RecommenderOptions, tell: Tell) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.01)
    batches = list(_batches(lengths, options))
    num_warm = max(1, int(WARM_UP * len(batches)))
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min((step + 1) / num_warm, (len(batches) - step) / len(batches))
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tell(step + 1, len(batches), loss.item())
    model.eval()


def _saved(model, card: RecommenderCard, folder: Path, num_histories: int, start_s: float) -> RecommenderCard:
    seconds = round(time.perf_counter() - start_s, 1)
    card = card.model_copy(update={"num_histories": num_histories, "training_seconds": seconds})
    save_recommender(model, card, folder)
    return card


def _batches(lengths: Sequence[int], options: RecommenderOptions) -> Iterator[list[int]]:
    """Of every epoch all, those of like length together, in another order."""
    order = np.argsort(lengths, kind="stable")
    batches = [order[start : start + options.batch_size].tolist() for start in range(0, len(order), options.batch_size)]
    for epoch in range(options.epochs):
        yield from (batches[number] for number in np.random.default_rng(options.seed + epoch).permutation(len(batches)))


def _enough(histories: Sequence[np.ndarray]) -> list[np.ndarray]:
    told = [one for one in histories if len(one) > 1]
    if len(told) < LEAST_HISTORIES:
        raise ConfigError(
            f"{len(told)} users with two items or more are too few to train a recommender on, at least "
            f"{LEAST_HISTORIES} are needed"
        )
    return told


def _starts(length: int, history: int) -> range:
    """Of windows of history + 1 items, in which each item but the first of all is behind another."""
    return range(0, length - 1, history)


def _tokens(card: RecommenderCard, codes: ItemCodes, rows: np.ndarray) -> np.ndarray:
    return np.concatenate(([BEGIN], (codes.codes[rows].astype(np.int64) + np.array(card.first_tokens)).ravel()))


def _padded(rows: Sequence[np.ndarray], left: bool = False) -> torch.Tensor:
    """int64 (len(rows), longest), with BEGIN where nothing is."""
    longest = max(map(len, rows))
    ids = np.full((len(rows), longest), BEGIN, np.int64)
    for number, row in enumerate(rows):
        ids[number, slice(longest - len(row), longest) if left else slice(0, len(row))] = row
    return torch.from_numpy(ids)


def _seen(ids: torch.Tensor) -> torch.Tensor:
    """Attention mask of rows that are filled on the left: from their last BEGIN on."""
    is_begin = ids == BEGIN
    return (is_begin.sum(1, keepdim=True) - is_begin.cumsum(1) == 0).long()
