"""Lists of items by beam search over codes: drafted and verified, beside plain beams and those of transformers.

    python benchmarks/beams.py --quick --json OUT

A recommender, and small models that draft for it, one for each way to train them, learn from Amazon Beauty's training
sequences (`--data`), minutes on two cores, kept in the cache. Test users, whose last item nobody has seen, are answered
by all in turns: our own batched constrained beam search, `transformers.generate` with beams, strict verification of
what each small model drafts and of lists that are there already (`lists`: those before the user's last item came), and
sampled beams with relaxed verification. Rows are `{method, k, batch, speedup, accepted_steps, recall_10, ndcg_10}`:
`speedup` is users a second over our own plain beams of the same kind, `accepted_steps` the levels of a user that needed
no forward. Ablations of the drafts' loss: without the density term, without constrained alignment.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from common import Figure, Spread, begin, benchmark_parser, finish, scale_of, turns
from methods import table

from laserbatch.pipeline.recommending import losses
from laserbatch.pipeline.recommending.beams import BeamDrafter, Found, search
from laserbatch.pipeline.recommending.code_trees import CodeTrees
from laserbatch.pipeline.recommending.codes import ItemCodes, read_codes
from laserbatch.pipeline.recommending.drafters import ListedItems, ModelBeams
from laserbatch.pipeline.recommending.item_trie import ItemTrie
from laserbatch.pipeline.recommending.losses import strict_loss
from laserbatch.pipeline.recommending.models import Recommender, load_recommender
from laserbatch.pipeline.recommending.sampled import sampled_search
from laserbatch.pipeline.recommending.training import RecommenderOptions, train_draft, train_recommender

NUM_DRAFTED = 40
RANKED = 10
KINDS = ("sft", "wordkd", "tvdkd", "seqkd", "atspeed_s", "atspeed_r")
ABLATIONS = {
    "atspeed_s, no density": lambda rows: strict_loss(rows, is_dense=False),
    "atspeed_s, unconstrained": lambda rows: strict_loss(rows, is_constrained=False),
}


@dataclass(frozen=True)
class Scale:
    """Users trained on and asked, list lengths, users side by side, repetitions; epochs of target and drafts."""

    num_trained: int
    num_users: int
    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    num_repetitions: int
    epochs: tuple[int, int]
    num_listed: int


FULL = Scale(19_383, 512, (1, 3, 5, 10, 20), (1, 8, 32), 3, (8, 4), 4000)
QUICK = Scale(19_383, 256, (10,), (1, 32), 2, (3, 1), 600)
SMOKE = Scale(200, 8, (3,), (4,), 1, (1, 1), 40)


@dataclass(frozen=True)
class World:
    """Histories as rows of the catalogue: those trained on, and of each asked user what is known and what came then."""

    codes: ItemCodes
    trie: ItemTrie
    trained: list[np.ndarray]
    asked: list[np.ndarray]
    answers: np.ndarray


def world_of(data: Path, scale: Scale) -> World:
    """Users' training items; those with an item of the test are asked for its first, by what came before it."""
    codes = read_codes(data / "beauty" / "item_codes.parquet")
    rows = {item: number for number, item in enumerate(codes.item_ids.to_pylist())}
    parts: dict[str, dict[str, list[int]]] = {}
    for row in pq.read_table(data / "beauty" / "sequences.parquet").to_pylist():
        items = [rows[item] for item in row["items"] if item in rows]
        parts.setdefault(row["user_id"], {})[row["split"]] = items
    trained = [np.array(one["train"]) for one in parts.values() if len(one["train"]) > 1][: scale.num_trained]
    users = [one for one in parts.values() if one["test"] and len(one["train"]) > 1]
    chosen = [users[place] for place in np.random.default_rng(0).permutation(len(users))[: scale.num_users]]
    asked = [np.array([*one["train"], *one["valid"]]) for one in chosen]
    return World(codes, ItemTrie.of(codes), trained, asked, np.array([one["test"][0] for one in chosen]))


def models_of(world: World, cache: Path, scale: Scale) -> dict[str, Recommender]:
    """The target and each small model, trained or from the cache."""
    digest = hashlib.sha256(repr(scale).encode() + world.codes.codes.tobytes()).hexdigest()[:10]
    folder, found = cache / f"beauty-{digest}", {}
    if not (folder / "target" / "recommender.json").exists():
        train_recommender(world.codes, world.trained, folder / "target", RecommenderOptions(epochs=scale.epochs[0]))
    found["target"] = load_recommender(folder / "target")
    options = RecommenderOptions(hidden_size=64, num_layers=1, epochs=scale.epochs[1], num_listed=scale.num_listed)
    for name in (*KINDS, *ABLATIONS):
        own = folder / name.replace(", ", "-").replace(" ", "-")
        if not (own / "recommender.json").exists():
            kind = name.partition(",")[0]
            # Those that learn from lists see fewer histories, each as much oftener.
            epochs = scale.epochs[1]
            if kind.startswith("atspeed") or kind == "seqkd":
                epochs = max(1, round(epochs * len(world.trained) / scale.num_listed / 4))
            with replaced_strict_loss(ABLATIONS.get(name)):
                own_options = replace(options, epochs=epochs)
                train_draft(kind, found["target"], world.codes, world.trained, own, own_options)
        found[name] = load_recommender(own)
    return found


@contextmanager
def replaced_strict_loss(loss: Callable | None) -> Iterator[None]:
    """Within the block drafts are aligned by another loss, where one is given."""
    own = losses.strict_loss
    losses.strict_loss = loss or own
    try:
        yield
    finally:
        losses.strict_loss = own


Run = Callable[[Sequence[int]], list[Found]]  # from places of asked users to their lists


def methods_of(world: World, models: dict[str, Recommender], size: int) -> dict[str, Run]:
    """What is compared, by name; those that sample end in `sampled`."""
    target, trie = models["target"], world.trie
    prompts = [target.card.prompt(world.codes.codes[one]) for one in world.asked]

    def trees(model: Recommender, users: Sequence[int]) -> CodeTrees:
        own = [model.card.prompt(world.codes.codes[world.asked[user]]) for user in users]
        return CodeTrees(model.model, trie, model.card.first_tokens, own)

    def by(drafter_of: Callable[[Sequence[int]], BeamDrafter]) -> Run:
        return lambda users: search(trees(target, users), trie, len(users), size, drafter_of(users))

    def small(name: str) -> Run:
        return by(lambda users: ModelBeams(trees(models[name], users), trie, len(users), NUM_DRAFTED))

    def sampled(name: str | None) -> Run:
        def run(users: Sequence[int]) -> list[Found]:
            draft = None if name is None else trees(models[name], users)
            return sampled_search(trees(target, users), trie, size, users, draft, NUM_DRAFTED)

        return run

    before = [target.card.prompt(world.codes.codes[one[:-1]]) for one in world.asked]
    trees_before = CodeTrees(target.model, trie, target.card.first_tokens, before)
    known = search(trees_before, trie, len(before), NUM_DRAFTED, BeamDrafter())
    lists = [[tuple(world.codes.codes[row].tolist()) for row in one.rows] for one in known]
    found = {
        "plain": by(lambda users: BeamDrafter()),
        "transformers": lambda users: by_transformers(world, target, [prompts[user] for user in users], size),
        "lists": by(lambda users: ListedItems([lists[user] for user in users], trie, NUM_DRAFTED)),
        "lists, short": by(lambda users: ListedItems([lists[user] for user in users], trie, size + size // 2)),
    }
    found |= {name: small(name) for name in models if name != "target"}
    found |= {"plain, sampled": sampled(None)} | {f"{name}, sampled": sampled(name) for name in ("atspeed_r", "sft")}
    return found


@torch.inference_mode()
def by_transformers(world: World, target: Recommender, prompts: Sequence[np.ndarray], size: int) -> list[Found]:
    """Its own beams, kept to items by `prefix_allowed_tokens_fn`."""
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

    out = target.model.generate(
        ids, attention_mask=mask, max_new_tokens=trie.num_levels, min_new_tokens=trie.num_levels, num_beams=size,
        num_return_sequences=size, do_sample=False, length_penalty=0.0, pad_token_id=0, eos_token_id=None,
        prefix_allowed_tokens_fn=allowed, renormalize_logits=True,
    )[:, longest:].reshape(len(prompts), size, -1)  # fmt: skip
    rows = [[trie.node_of(tuple((row - torch.tensor(firsts)).tolist())) for row in one] for one in out]
    return [Found(np.array([-1 if row is None else row for row in one]), np.zeros(size), 0) for one in rows]


def rows_of(world: World, models: dict[str, Recommender], scale: Scale) -> Iterator[dict]:
    for batch in scale.batches:
        for size in scale.sizes:
            methods = methods_of(world, models, size)
            num_asked = min(len(world.asked), 32 + 16 * batch)  # alone fewer
            parts = [range(start, min(start + batch, num_asked)) for start in range(0, num_asked, batch)]
            seconds = {name: [] for name in methods}
            found: dict[str, list[Found]] = {}
            for run in methods.values():
                run(parts[0])
            orders = turns(list(methods))
            for _ in range(scale.num_repetitions):
                for name in next(orders):
                    start_s = time.perf_counter()
                    found[name] = [one for part in parts for one in methods[name](list(part))]
                    seconds[name].append(time.perf_counter() - start_s)
            for name in methods:
                lists = found[name]
                plain = "plain, sampled" if name.endswith("sampled") else "plain"
                pairs = zip(lists, world.answers[:num_asked], strict=True)
                ranks = [np.flatnonzero(one.rows[:RANKED] == answer) for one, answer in pairs]
                hits = [int(rank[0]) for rank in ranks if len(rank)]
                both = zip(lists, found[plain], strict=True)
                yield {
                    "method": name, "k": size, "batch": batch,
                    "speedup": Spread.of([a / b for a, b in zip(seconds[plain], seconds[name], strict=True)]),
                    "accepted_steps": float(np.mean([one.num_accepted for one in lists])),
                    f"recall_{RANKED}": len(hits) / len(lists),
                    f"ndcg_{RANKED}": float(sum(1 / np.log2(2 + rank) for rank in hits) / len(lists)),
                    "users_a_second": Spread.of([len(lists) / s for s in seconds[name]]),
                    "same_as_plain": float(np.mean([np.array_equal(a.rows, b.rows) for a, b in both])),
                }  # fmt: skip


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """Strict lists are plain ones; what verification gains."""
    for batch in dict.fromkeys(row["batch"] for row in rows):
        at = [row for row in rows if row["batch"] == batch]
        apart = ("plain", "transformers")
        strict = [row for row in at if not row["method"].endswith("sampled") and row["method"] not in apart]
        same = min(row["same_as_plain"] for row in strict)
        yield Figure.at_least(f"batch {batch}: least share of drafted lists that are plain ones", same, 1)
        best = max(strict, key=lambda row: row["speedup"].median)
        wanted = 1.9 if batch == 1 else 1.2
        told = f"batch {batch}: strict over plain, {best['method']}, k {best['k']}"
        yield Figure.at_least(told, best["speedup"].median, wanted)
        loose = [row for row in at if row["method"].endswith("sampled") and row["method"] != "plain, sampled"]
        best = max(loose, key=lambda row: row["speedup"].median)
        told = f"batch {batch}: relaxed over plain, {best['method']}, k {best['k']}"
        yield Figure.at_least(told, best["speedup"].median, 2.5)
        slow = [1 / row["speedup"].median for row in at if row["method"] == "transformers"]
        yield Figure.at_least(f"batch {batch}: plain over transformers' beams", min(slow), 1)


COLUMNS = {
    "batch": "{batch}", "k": "{k}", "method": "{method}", "users/s over plain": "{speedup}",
    "accepted": "{accepted_steps:.2f}", "recall": "{recall_10:.3f}", "ndcg": "{ndcg_10:.3f}",
    "as plain": "{same_as_plain:.0%}",
}  # fmt: skip


def main() -> None:
    """Measure, print, and write the JSON."""
    arguments = benchmark_parser(__doc__, "data", "threads", "cache").parse_args()
    begin(arguments.threads)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    world = world_of(arguments.data, scale)
    models = models_of(world, arguments.cache, scale)
    rows = list(rows_of(world, models, scale))
    trained = {
        name: {"training_seconds": one.card.training_seconds, "num_parameters": one.model.num_parameters()}
        for name, one in models.items()
    }
    finish(arguments.json, list(figures_of(rows)), [table(rows, COLUMNS)], {"trained": trained, "rows": rows})


if __name__ == "__main__":
    main()
