"""Trains recommenders over codes, and small models that draft for them."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from laserbatch.pipeline.decoding.model.folder import model_identity
from laserbatch.pipeline.errors import ConfigError
from laserbatch.research.learning import (
    CHECKPOINT_NAME,
    batches_by_length,
    drop_files,
    padded,
    read_facts,
    require_own_folder,
    save_whole,
    train_steps,
)
from laserbatch.research.recommending.baselines import neighbour_lists, popular_list
from laserbatch.research.recommending.beams import BeamDrafter, search
from laserbatch.research.recommending.card import CARD_NAME, Ranking, RecommenderCard, codes_digest
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.codes import ItemCodes
from laserbatch.research.recommending.item_trie import ItemTrie
from laserbatch.research.recommending.losses import NUM_ALIGNED, OF_LISTS, Rows, draft_loss
from laserbatch.research.recommending.models import Recommender, drop_out, extended_model, new_model, save_recommender
from laserbatch.research.recommending.settings import DraftLoss

MIN_HISTORIES = 20
HELD_BACK, MAX_HELD_BACK = 0.1, 1000  # share and number of histories whose last item is held out
LISTS_AT_ONCE = 32
NO_LABEL = -100  # label of padding in windows
BEST_NAME = "best.safetensors"  # weights of the best epoch so far; deleted when the training ends

OnProgress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class RecommenderOptions:
    """A draft model learns from the target's lists of `num_listed` histories, `num_picked` items of a list per step."""

    hidden_size: int = 256
    num_layers: int = 4
    dropout: float = 0.2  # only in a new target
    history: int = 20
    epochs: int = 15
    batch_size: int = 64
    learning_rate: float = 2e-3
    num_listed: int = 4000
    num_picked: int = 3
    seed: int = 0


def train_recommender(
    codes: ItemCodes, histories: Sequence[np.ndarray], folder: Path, options: RecommenderOptions = RecommenderOptions(),
    on_progress: OnProgress = lambda step, num_steps, loss: None, base: Path | None = None,
) -> RecommenderCard:  # fmt: skip
    """Train a recommender to predict the codes of the next item in histories, which are rows of `codes`, oldest first.

    The last item of some histories is held out; the weights of the epoch with the lowest loss on them are written. The
    same inputs give the same bytes, however often the training was killed.

    `base` : folder of a language model that is extended by the codes and adapted by a LoRA; None: a new model of the
        options' size.

    Raises ConfigError if too few histories have two items, or the folder holds other files.
    """
    usable = _enough(histories, folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, card = _initial_model(codes, options, base, device)
    is_held = _held_back(len(usable), options.seed)
    held_out = [usable[number] for number in np.flatnonzero(is_held)]
    learned = [history[:-1] if held else history for history, held in zip(usable, is_held, strict=True)]
    size = options.history + 1
    windows = [history[at : at + size] for history in learned for at in _starts(len(history), options.history)]
    trie = ItemTrie.of(codes)
    ways = trie.ways_to(codes.codes)

    def loss_of(numbered: tuple[int, Sequence[int]]) -> torch.Tensor:
        step, batch = numbered
        torch.manual_seed(options.seed + step)  # dropout depends only on the step, also after a resume
        part = [windows[number] for number in batch]
        ids = padded([card.tokens(codes.codes[window]) for window in part], card.begin)[0].to(device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return _catalogue_loss(logits, trie, card, part, ways)

    digest = _digest("target" if base is None else model_identity(base), codes, usable, options)
    best = folder / BEST_NAME
    batches = list(enumerate(_batches([len(window) for window in windows], options)))
    num_in_epoch = len(batches) // options.epochs

    def after(step: int) -> None:
        if step % num_in_epoch:
            return
        model.eval()
        surprise, before = _surprise(model, card, codes, trie, held_out), read_facts(best)
        if before.get("digest") != digest or surprise < before["surprise"]:
            facts = {"digest": digest, "surprise": surprise, "epoch": step // num_in_epoch}
            weights = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
            save_whole(weights, best, facts)  # `named_parameters` has shared weights once

    seconds = train_steps(
        model, batches, loss_of, folder, digest, options.learning_rate,
        on_progress=lambda step, loss: on_progress(step, len(batches), loss), after=after,
    )  # fmt: skip
    model.load_state_dict(load_file(best), strict=False)
    merge = getattr(model, "merge_and_unload", None)  # models with a LoRA have it
    model = model if merge is None else merge()
    training_facts = {
        "num_histories": len(usable),
        "training_seconds": round(seconds, 1),
        "epoch": read_facts(best)["epoch"],
    }
    rankings = _rankings(model, card, trie, codes, learned, held_out)
    return _saved(model, card.model_copy(update=training_facts | rankings), folder)


def _initial_model(
    codes: ItemCodes, options: RecommenderOptions, base: Path | None, device: str
) -> tuple[torch.nn.Module, RecommenderCard]:
    card = RecommenderCard(sizes=codes.sizes, codes=codes_digest(codes), history=options.history)
    if base is None:
        model = new_model(card, options.hidden_size, options.num_layers, options.seed)
        drop_out(model, options.dropout)
    else:
        model, card = extended_model(base, card, options.seed)
    return torch.nn.Module.to(model, device), card


def _rankings(
    model, card: RecommenderCard, trie: ItemTrie, codes: ItemCodes, learned: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
) -> dict[str, Ranking]:  # fmt: skip
    answers, before = [history[-1] for history in held_out], [history[:-1] for history in held_out]
    lists = {
        "held_back": listed(model, card, trie, codes, before),
        "popular": [popular_list(learned, len(codes), 10)] * len(held_out),
        "neighbours": neighbour_lists(learned, len(codes), before, 10),
    }
    return {name: Ranking.of(items, answers) for name, items in lists.items()}


def train_draft(
    kind: DraftLoss, target: Recommender, codes: ItemCodes, histories: Sequence[np.ndarray], folder: Path,
    options: RecommenderOptions = RecommenderOptions(hidden_size=64, num_layers=1),
    on_progress: OnProgress = lambda step, num_steps, loss: None,
) -> RecommenderCard:  # fmt: skip
    """Train a small model to draft for a target; it learns to predict the last item of each history.

    Lists are the target's, not mixed with the draft's (lambda = 1 in D' of Eq. 3). Raises as `train_recommender` does.
    """
    usable = _enough(histories, folder)
    target.require(codes)
    trie, rng = ItemTrie.of(codes), np.random.default_rng(options.seed)
    card = RecommenderCard(
        sizes=target.card.sizes, codes=target.card.codes, history=target.card.history, loss=kind, target=target.model_id
    )
    device = target.model.device
    model = torch.nn.Module.to(new_model(card, options.hidden_size, options.num_layers, options.seed), device)
    lists = []
    if kind in OF_LISTS:
        usable = [usable[number] for number in rng.permutation(len(usable))[: options.num_listed]]
        lists = listed(target.model, target.card, trie, codes, [history[:-1] for history in usable])

    def loss_of(numbered: tuple[int, Sequence[int]]) -> torch.Tensor:
        step, batch = numbered
        of_logs = _rows_of(target, model, trie, card, codes, [usable[number] for number in batch])
        of_lists = None
        if lists:
            drawn = np.random.default_rng((options.seed, step))  # depends only on the step
            of_batch = [lists[number] for number in batch]
            picked = [
                [*drawn.choice(rows, min(options.num_picked, len(rows)), replace=False), rows[-1]] for rows in of_batch
            ]
            sequences = [[*usable[n][:-1], item] for n, items in zip(batch, picked, strict=True) for item in items]
            of_lists = _rows_of(target, model, trie, card, codes, sequences, [len(items) for items in picked])
        return draft_loss(kind, of_logs, of_lists)

    batches = list(enumerate(_batches([len(history) for history in usable], options)))
    seconds = train_steps(
        model, batches, loss_of, folder, _digest(f"{kind} {target.model_id}", codes, usable, options),
        options.learning_rate, on_progress=lambda step, loss: on_progress(step, len(batches), loss),
    )  # fmt: skip
    update = {"num_histories": len(usable), "training_seconds": round(seconds, 1)}
    return _saved(model, card.model_copy(update=update), folder)


def listed(
    model: PreTrainedModel, card: RecommenderCard, trie: ItemTrie, codes: ItemCodes, histories: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """A model's NUM_ALIGNED best items after each history, without its items, as rows of `codes`, best first."""
    lists = []
    for start in range(0, len(histories), LISTS_AT_ONCE):
        part = histories[start : start + LISTS_AT_ONCE]
        trees = CodeTrees(model, trie, card.first_tokens, [card.prompt(codes.codes[history]) for history in part])
        left_out = [trie.emptied_by(codes.codes[np.unique(history)]) for history in part]
        lists += [result.rows for result in search(trees, trie, len(part), NUM_ALIGNED, BeamDrafter(), left_out)]
    return lists


def _catalogue_loss(
    logits: torch.Tensor, trie: ItemTrie, card: RecommenderCard, windows: Sequence[np.ndarray],
    ways: tuple[np.ndarray, np.ndarray],
) -> torch.Tensor:  # fmt: skip
    """Cross entropy of codes over the codes that the catalogue has at each place, as in beam search.

    Over all codes, a model would first memorise the catalogue. `logits` (B, T, vocab_size) belong to windows padded on
    the right; `ways` is the result of `ItemTrie.ways_to`.
    """
    items = np.full((len(windows), logits.shape[1] // trie.num_levels), -1)
    for row, window in enumerate(windows):
        items[row, : len(window)] = window
    total = logits.new_zeros(())
    for level, level_logits in enumerate(logits.unflatten(1, (-1, trie.num_levels)).unbind(2)):
        followers = trie.codes[level][ways[0][items, level]]
        tokens = torch.from_numpy(np.maximum(followers, 0) + card.first_tokens[level]).to(logits.device)
        is_none = torch.from_numpy(followers < 0).to(logits.device)
        scores = level_logits.float().gather(2, tokens).masked_fill(is_none, -torch.inf)
        labels = torch.from_numpy(np.where(items < 0, NO_LABEL, ways[1][items, level])).to(logits.device)
        total = total + torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
    return total / trie.num_levels


@torch.no_grad()
def _surprise(model, card: RecommenderCard, codes: ItemCodes, trie: ItemTrie, held_out: Sequence[np.ndarray]) -> float:
    """The mean over histories of -log p(last item), normalised over the items of the catalogue."""
    total = 0.0
    for start in range(0, len(held_out), LISTS_AT_ONCE):
        part = held_out[start : start + LISTS_AT_ONCE]
        logits, labels, allowed = _said_of_last(model, trie, card, codes, part)
        log_p = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), -1)
        total -= float(log_p.gather(2, labels[..., None]).sum())
    return total / max(1, len(held_out))


def _rows_of(
    target: Recommender, model, trie: ItemTrie, card: RecommenderCard, codes: ItemCodes,
    sequences: Sequence[npt.ArrayLike], counts: Sequence[int] = (),
) -> Rows:  # fmt: skip
    """The rows of the codes of each sequence's last item. `counts` : sequences per list; item K's comes last."""
    with torch.no_grad():
        p, _, _ = _said_of_last(target.model, trie, target.card, codes, sequences)
    q, labels, allowed = _said_of_last(model, trie, card, codes, sequences)
    least = torch.zeros(labels.shape, device=labels.device)
    if counts:
        log_p = torch.log_softmax(p.masked_fill(~allowed, -torch.inf), -1).gather(2, labels[..., None])[..., 0]
        ends = np.cumsum(counts) - 1
        least = log_p[torch.from_numpy(np.repeat(ends, counts)).to(log_p.device)]
    return Rows(p.flatten(0, 1), q.flatten(0, 1), labels.flatten(), allowed.flatten(0, 1), least.flatten())


def _said_of_last(
    model, trie: ItemTrie, card: RecommenderCard, codes: ItemCodes, sequences: Sequence[npt.ArrayLike]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the codes of each sequence's last item: logits (B, num_levels, V), tokens int64 (B, num_levels), and the mask
    of codes that the catalogue has there, bool (B, num_levels, V). Token ids are relative to `card.begin`.
    """
    num_levels, items = codes.codes.shape[1], [np.asarray(sequence)[-card.history - 1 :] for sequence in sequences]
    rows = padded([card.tokens(codes.codes[sequence]) for sequence in items], card.begin, left=True)
    ids, is_seen = (each.to(model.device) for each in rows)
    inputs = {"input_ids": ids, "attention_mask": is_seen.long(), "logits_to_keep": num_levels + 1}
    logits = model(**inputs, use_cache=False).logits[:, :-1, card.begin :].float()
    allowed = np.zeros(logits.shape, bool)
    for number, sequence in enumerate(items):
        path = codes.codes[sequence[-1]].tolist()
        for level in range(num_levels):
            node = trie.node_of(tuple(path[:level]))
            children = trie.codes[level][node, : trie.num_children[level][node]]
            allowed[number, level, children + card.first_tokens[level] - card.begin] = True
    return logits, ids[:, -num_levels:] - card.begin, torch.from_numpy(allowed).to(model.device)


def _saved(model, card: RecommenderCard, folder: Path) -> RecommenderCard:
    save_recommender(model, card, folder)
    drop_files(folder, CHECKPOINT_NAME, BEST_NAME)
    return card


def _batches(lengths: Sequence[int], options: RecommenderOptions) -> Iterator[list[int]]:
    """Yield batches of similar lengths; each epoch has all of them in another order."""
    batches = batches_by_length(lengths, options.batch_size)
    for epoch in range(options.epochs):
        yield from (batches[number] for number in np.random.default_rng(options.seed + epoch).permutation(len(batches)))


def _enough(histories: Sequence[np.ndarray], folder: Path) -> list[np.ndarray]:
    usable = [history for history in histories if len(history) > 1]
    if len(usable) < MIN_HISTORIES:
        raise ConfigError(
            f"{len(usable)} users with two or more items that have codes are too few to train a recommender on; "
            f"expected at least {MIN_HISTORIES}: use more interactions, or codes of more items"
        )
    require_own_folder(folder, "recommender", CARD_NAME, BEST_NAME)
    folder.mkdir(parents=True, exist_ok=True)
    return usable


def _held_back(num_histories: int, seed: int) -> np.ndarray:
    num_held = max(1, min(MAX_HELD_BACK, round(HELD_BACK * num_histories)))
    is_held = np.zeros(num_histories, bool)
    is_held[np.random.default_rng(seed).permutation(num_histories)[:num_held]] = True
    return is_held


def _digest(kind: str, codes: ItemCodes, histories: Sequence[np.ndarray], options: RecommenderOptions) -> str:
    digest = hashlib.sha256(f"{kind} {options} {codes_digest(codes)}".encode())
    for history in histories:
        digest.update(np.asarray(history, np.int64).tobytes() + b"|")
    return digest.hexdigest()


def _starts(length: int, history: int) -> range:
    """The starts of windows of `history` + 1 items; each item but the first follows its predecessor in one window."""
    return range(0, length - 1, history)
