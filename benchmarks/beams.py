"""Lists of items by beam search over codes: drafted and verified beams, plain beams, and transformers' beams.

    python benchmarks/beams.py --quick --json OUT

A recommender and its draft models, one for each training method, are trained on Amazon Beauty's training sequences
(`--data`): half an hour on two cores, kept in the cache. Then all methods take turns at lists for test users, whose
last item no model has seen: our batched constrained beam search, `transformers.generate` with beams, strict
verification of the drafts of each draft model and of earlier lists (`lists`: those from before the user's last item),
the drafts of a night (`nights`: earlier lists, drafting as much as was fastest for other users), and sampled beams with
relaxed verification. Rows are `{method, k, batch, speedup, accepted_steps, forwards, tokens}`: `speedup` is users per
second over our plain beams of the same kind; `accepted_steps` is the number of a user's levels that needed no forward.
If every forward costs the same, the ratio of `forwards` to plain ones is what drafts gain; if its cost grows with its
tokens, that of `tokens` per user is. `quality`, how good lists are, is measured on many more users. Ablations: drafts
without the density term or without constrained alignment; verification without a tree, each path by itself.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch
from common import Figure, Spread, begin, benchmark_parser, finish, scale_of, table, turns
from sampled_beams import sampled_search

from laserbatch.research.recommending import losses
from laserbatch.research.recommending.baselines import neighbour_lists, popular_list
from laserbatch.research.recommending.beams import BeamDrafter, BeamResult, ListedItems, ModelBeams, search
from laserbatch.research.recommending.card import Ranking
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.codes import ItemCodes, read_codes
from laserbatch.research.recommending.item_trie import ItemTrie
from laserbatch.research.recommending.list_worker import TRIED_SHARES, fastest, tried_seconds
from laserbatch.research.recommending.losses import strict_loss
from laserbatch.research.recommending.models import Recommender, load_recommender
from laserbatch.research.recommending.settings import DraftLoss
from laserbatch.research.recommending.training import RecommenderOptions, train_draft, train_recommender

WIDTH = 4  # width of draft models' beams and of earlier lists, as a multiple of a list's length
QUALITY_OF = 10
TRIED = 4  # number of untimed batches of users that choose how much `nights` drafts
SAMPLED = ("atspeed_r", "sft")
KINDS: dict[str, DraftLoss] = {kind: kind for kind in get_args(DraftLoss)}
ABLATIONS = {
    "atspeed_s, no density": lambda rows: strict_loss(rows, is_dense=False),
    "atspeed_s, unconstrained": lambda rows: strict_loss(rows, is_constrained=False),
}


@dataclass(frozen=True)
class Scale:
    """The numbers of training, timed and judged users; list lengths, batch sizes and repetitions; the epochs of target
    and draft models."""

    num_trained: int
    num_users: int
    num_judged: int
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    num_repetitions: int
    epochs: tuple[int, int]
    num_listed: int


FULL = Scale(19_383, 128, 4000, (1, 3, 5, 10, 20), (1, 8, 32), 2, (8, 2), 2000)
QUICK = Scale(2500, 64, 300, (10,), (1, 32), 2, (2, 1), 200)
SMOKE = Scale(200, 8, 8, (3,), (4,), 1, (1, 1), 40)


@dataclass(frozen=True)
class World:
    """Histories as rows of the catalogue: training histories, and each test user's history and next item."""

    codes: ItemCodes
    trie: ItemTrie
    trained: list[np.ndarray]
    histories: list[np.ndarray]
    answers: np.ndarray


def world_of(data: Path, scale: Scale) -> World:
    """Read the data set. A test user's answer is the first item of the test split; the history is what came before."""
    codes = read_codes(data / "beauty" / "item_codes.parquet")
    rows = {item: number for number, item in enumerate(codes.item_ids.to_pylist())}
    parts: dict[str, dict[str, list[int]]] = {}
    for row in pq.read_table(data / "beauty" / "sequences.parquet").to_pylist():
        items = [rows[item] for item in row["items"] if item in rows]
        parts.setdefault(row["user_id"], {})[row["split"]] = items
    trained = [np.array(user["train"]) for user in parts.values() if len(user["train"]) > 1][: scale.num_trained]
    users = [user for user in parts.values() if user["test"] and len(user["train"]) > 1]
    chosen = [users[place] for place in np.random.default_rng(0).permutation(len(users))[: scale.num_judged]]
    histories = [np.array([*user["train"], *user["valid"]]) for user in chosen]
    return World(codes, ItemTrie.of(codes), trained, histories, np.array([user["test"][0] for user in chosen]))


def models_of(world: World, cache: Path, scale: Scale) -> dict[str, Recommender]:
    """The target and each draft model, trained or from the cache."""
    digest = hashlib.sha256(repr(scale).encode() + world.codes.codes.tobytes()).hexdigest()[:10]
    folder, recommenders = cache / f"beauty-{digest}", {}
    if not (folder / "target" / "recommender.json").exists():
        train_recommender(world.codes, world.trained, folder / "target", RecommenderOptions(epochs=scale.epochs[0]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recommenders["target"] = load_recommender(folder / "target", device)
    options = RecommenderOptions(hidden_size=64, num_layers=1, epochs=scale.epochs[1], num_listed=scale.num_listed)
    for name in (*KINDS, *ABLATIONS):
        own = folder / name.replace(", ", "-").replace(" ", "-")
        if not (own / "recommender.json").exists():
            kind = KINDS.get(name, "atspeed_s")
            # Methods that learn from lists see fewer histories, each of them more often.
            epochs = scale.epochs[1]
            if kind.startswith("atspeed") or kind == "seqkd":
                epochs = max(1, round(epochs * len(world.trained) / scale.num_listed / 4))
            with patch.dict(losses.OF_LISTS, {kind: ABLATIONS[name]} if name in ABLATIONS else {}):
                own_options = replace(options, epochs=epochs)
                train_draft(kind, recommenders["target"], world.codes, world.trained, own, own_options)
        recommenders[name] = load_recommender(own, device)
    return recommenders


Run = Callable[[Sequence[int]], tuple[list[BeamResult], CodeTrees | None]]  # positions of users -> their lists


class WithoutATree(CodeTrees):
    """Trees at the cost of verifying each drafted path by itself: each path computes its ancestors once more."""

    def _forward(self, new, num_new: int, is_first: bool) -> torch.Tensor:
        apart = []
        for pairs in new:
            paths = [path for path, _ in pairs]
            above = {path[:-1] for path in paths}
            apart.append(sum(len(path) for path in paths if path not in above))
        return super()._forward(new, max(num_new, *apart), is_first)


def methods_of(world: World, models: dict[str, Recommender], size: int, scale: Scale, batch: int) -> dict[str, Run]:
    """The methods to compare, by name; the names of sampling methods end in `sampled`."""
    target, trie = models["target"], world.trie
    width = WIDTH * size

    def trees(model: Recommender, users: Sequence[int], kind: type[CodeTrees] = CodeTrees) -> CodeTrees:
        own = [model.card.prompt(world.codes.codes[world.histories[user]]) for user in users]
        return kind(model.model, trie, model.card.first_tokens, own)

    def by(drafter_of: Callable[[Sequence[int]], BeamDrafter], kind: type[CodeTrees] = CodeTrees) -> Run:
        def run(users: Sequence[int]) -> tuple[list[BeamResult], CodeTrees]:
            own = trees(target, users, kind)
            return search(own, trie, len(users), size, drafter_of(users)), own

        return run

    def small(name: str, kind: type[CodeTrees] = CodeTrees) -> Run:
        return by(lambda users: ModelBeams(trees(models[name], users), trie, len(users), width), kind)

    def sampled(name: str | None) -> Run:
        def run(users: Sequence[int]) -> tuple[list[BeamResult], CodeTrees]:
            own, draft = trees(target, users), None if name is None else trees(models[name], users)
            return sampled_search(own, trie, size, users, draft, width), own

        return run

    known, num_asked = [], min(scale.num_users + TRIED * batch, len(world.histories))
    for start in range(0, num_asked, 32):
        histories = world.histories[start : start + 32]
        before = [target.card.prompt(world.codes.codes[history[:-1]]) for history in histories]
        trees_before = CodeTrees(target.model, trie, target.card.first_tokens, before)
        known += search(trees_before, trie, len(before), width, BeamDrafter())
    lists = [[tuple(world.codes.codes[row].tolist()) for row in result.rows] for result in known]

    def listed(budget: int) -> Run:
        if budget == 0:
            return by(lambda users: BeamDrafter())
        return by(lambda users: ListedItems([lists[user] for user in users], trie, budget))

    apart = [range(start, start + batch) for start in range(scale.num_users, num_asked, batch)]
    apart = [part for part in apart if part[-1] < len(world.histories)] or [range(min(batch, len(world.histories)))]
    chosen, _ = fastest(tried_seconds(apart, size, lambda users, budget: listed(budget)(users)))
    methods = {
        "plain": listed(0),
        "transformers": lambda users: (by_transformers(world, target, users, size), None),
        **{f"lists, {share:g} k": listed(round(share * size)) for share in TRIED_SHARES},
        "nights": listed(chosen),
    }
    methods |= {name: small(name) for name in models if name != "target"}
    methods |= {"atspeed_s, no tree": small("atspeed_s", WithoutATree)}
    return methods | {"plain, sampled": sampled(None)} | {f"{name}, sampled": sampled(name) for name in SAMPLED}


@torch.inference_mode()
def by_transformers(world: World, target: Recommender, users: Sequence[int], size: int) -> list[BeamResult]:
    """Lists by transformers' beam search, limited to items by `prefix_allowed_tokens_fn`."""
    prompts = [target.card.prompt(world.codes.codes[world.histories[user]]) for user in users]
    trie, firsts = world.trie, target.card.first_tokens
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, longest - len(prompt) :], mask[number, longest - len(prompt) :] = torch.from_numpy(prompt), 1

    def allowed(_, sent: torch.Tensor) -> list[int]:
        path = tuple(int(token) - firsts[level] for level, token in enumerate(sent[longest:].tolist()))
        node, level = trie.node_of(path), len(path)
        if node is None:
            return [0]
        return (trie.codes[level][node, : trie.num_children[level][node]] + firsts[level]).tolist()

    out = target.model.generate(  # pyright: ignore[reportCallIssue]
        ids.to(target.model.device), attention_mask=mask.to(target.model.device), num_beams=size,
        max_new_tokens=trie.num_levels, min_new_tokens=trie.num_levels,
        num_return_sequences=size, do_sample=False, length_penalty=0.0, pad_token_id=0, eos_token_id=None,
        prefix_allowed_tokens_fn=allowed, renormalize_logits=True,
    )[:, longest:].reshape(len(prompts), size, -1).cpu()  # fmt: skip
    rows = [[trie.node_of(tuple((row - torch.tensor(firsts)).tolist())) for row in of_user] for of_user in out]
    nodes = (np.array([-1 if row is None else row for row in of_user]) for of_user in rows)
    return [BeamResult(of_user, np.zeros(size), 0) for of_user in nodes]


def rows_of(world: World, models: dict[str, Recommender], scale: Scale) -> Iterator[dict]:
    num_asked = min(len(world.histories), scale.num_users)
    for batch in scale.batches:
        num_timed = num_asked if batch > 8 else max(1, num_asked // 4)  # fewer users at small batch sizes
        parts = [range(start, min(start + batch, num_timed)) for start in range(0, num_timed, batch)]
        for size in scale.sizes:
            methods = methods_of(world, models, size, scale, batch)
            seconds = {name: [] for name in methods}
            results: dict[str, list[BeamResult]] = {}
            forwards, tokens = {}, {}
            for run in methods.values():
                run(parts[0])
            orders = turns(list(methods))
            for _ in range(scale.num_repetitions):
                for name in next(orders):
                    start_s = time.perf_counter()
                    done = [methods[name](list(part)) for part in parts]
                    seconds[name].append(time.perf_counter() - start_s)
                    results[name] = [result for lists, _ in done for result in lists]
                    counted = [trees for _, trees in done if trees is not None]
                    forwards[name] = sum(trees.num_forwards for trees in counted) / len(parts) or None
                    tokens[name] = sum(trees.num_tokens for trees in counted) / num_timed or None
            for name in methods:
                lists = results[name]
                plain = "plain, sampled" if name.endswith("sampled") else "plain"
                both = zip(lists, results[plain], strict=True)
                yield {
                    "method": name, "k": size, "batch": batch,
                    "speedup": Spread.of([a / b for a, b in zip(seconds[plain], seconds[name], strict=True)]),
                    "accepted_steps": float(np.mean([result.num_accepted for result in lists])),
                    "forwards": forwards[name], "tokens": tokens[name],
                    "users_a_second": Spread.of([len(lists) / s for s in seconds[name]]),
                    "same_as_plain": float(np.mean([np.array_equal(a.rows, b.rows) for a, b in both])),
                }  # fmt: skip


def quality_of(world: World, models: dict[str, Recommender], scale: Scale) -> Iterator[dict]:
    """Recall and NDCG of the lists of all users; strictly verified lists are the plain ones."""
    methods = methods_of(world, models, QUALITY_OF, scale, 32)
    parts = [range(start, min(start + 32, len(world.histories))) for start in range(0, len(world.histories), 32)]
    chosen = ("plain", "atspeed_s", "plain, sampled", *(f"{name}, sampled" for name in SAMPLED))
    lists = {name: [result.rows for part in parts for result in methods[name](list(part))[0]] for name in chosen}
    lists["most popular items"] = [popular_list(world.trained, len(world.codes), 10)] * len(world.histories)
    lists["neighbours' items"] = neighbour_lists(world.trained, len(world.codes), world.histories, 10)
    for name, listed in lists.items():
        row = {"method": name, "k": QUALITY_OF, "num_users": len(listed)}
        for cut in (5, 10):
            ranking = Ranking.of([ranked[:cut] for ranked in listed], world.answers.tolist())
            row |= {f"recall_{cut}": ranking.recall_10, f"ndcg_{cut}": ranking.ndcg_10}
        yield row


def figures_of(rows: Sequence[dict], quality: Sequence[dict]) -> Iterator[Figure]:
    """The figures: strict lists equal plain ones, quality, and what verification gains."""
    apart = ("plain", "transformers")
    strict = [row for row in rows if not row["method"].endswith("sampled") and row["method"] not in apart]
    yield Figure.at_least(
        "least share of drafted lists that are plain ones", min(r["same_as_plain"] for r in strict), 1
    )
    of = {row["method"]: row["recall_10"] for row in quality}
    yield Figure.at_least("recall@10, strict over plain", of["atspeed_s"] / of["plain"] if of["plain"] else 1.0, 1)
    for name in ("most popular items", "neighbours' items"):
        yield Figure.at_least(f"recall@10 of the recommender less that of {name}", of["plain"] - of[name], 0)
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in strict if row["batch"] == batch]
        nights = [row["speedup"].median for row in own if row["method"] == "nights"]
        yield Figure.at_least(f"batch {batch}: as nights draft, over plain, at worst", min(nights), 0.97)
        loose = [row for row in rows if row["batch"] == batch and row["method"].endswith(", sampled")]
        loose = [row for row in loose if row["method"] != "plain, sampled"]
        for kind, some, wanted in (("strict", own, 1.9 if batch == 1 else 1.2), ("relaxed", loose, 2.5)):
            best = max(some, key=lambda row: row["speedup"].median)
            label = f"batch {batch}: {kind} over plain, {best['method']}, k {best['k']}"
            yield Figure.at_least(label, best["speedup"].median, wanted)
            name = "plain" if kind == "strict" else "plain, sampled"
            fewer = [
                row["forwards"] / other["forwards"]
                for row in rows if (row["method"], row["batch"]) == (name, batch)
                for other in some if other["k"] == row["k"]
            ]  # fmt: skip
            yield Figure.at_least(f"batch {batch}: plain forwards over {kind} ones, at best", max(fewer), wanted)
        slow = [1 / row["speedup"].median for row in rows if (row["batch"], row["method"]) == (batch, "transformers")]
        yield Figure.at_least(f"batch {batch}: plain over transformers' beams, at worst", min(slow), 1)


COLUMNS = {
    "batch": "{batch}", "k": "{k}", "method": "{method}", "users/s over plain": "{speedup}",
    "accepted": "{accepted_steps:.2f}", "forwards": "{forwards}", "tokens": "{tokens}",
    "as plain": "{same_as_plain:.0%}",
}  # fmt: skip
QUALITY = {
    "method": "{method}", "users": "{num_users}", "recall@5": "{recall_5:.4f}", "recall@10": "{recall_10:.4f}",
    "ndcg@5": "{ndcg_5:.4f}", "ndcg@10": "{ndcg_10:.4f}",
}  # fmt: skip


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "data", "threads", "cache").parse_args()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    world = world_of(arguments.data, scale)
    models = models_of(world, arguments.cache, scale)
    rows, quality = list(rows_of(world, models, scale)), list(quality_of(world, models, scale))
    trained = {
        name: {"training_seconds": each.card.training_seconds, "num_parameters": each.model.num_parameters()}
        for name, each in models.items()
    }
    tables = [table(rows, COLUMNS), table(quality, QUALITY)]
    finish(
        arguments.json, list(figures_of(rows, quality)), tables, {"trained": trained, "rows": rows, "quality": quality}
    )


if __name__ == "__main__":
    main()
