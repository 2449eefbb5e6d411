"""Losses of drafts against plain loops; training that learns, and gives the same bytes each time."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.errors import ConfigError, ModelError
from laserbatch.research import learning
from laserbatch.research.recommending.baselines import neighbour_lists, popular_list
from laserbatch.research.recommending.beams import BeamDrafter, ModelBeams, search
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.codes import ItemCodes
from laserbatch.research.recommending.item_trie import ItemTrie
from laserbatch.research.recommending.losses import (
    NUM_ALIGNED,
    Rows,
    relaxed_loss,
    strict_loss,
    variation_loss,
    word_loss,
)
from laserbatch.research.recommending.models import load_recommender
from laserbatch.research.recommending.plugin import RECOMMENDING
from laserbatch.research.recommending.settings import RecommendingSettings
from laserbatch.research.recommending.training import (
    RecommenderOptions,
    _catalogue_loss,
    _held_back,
    _starts,
    listed,
    train_draft,
    train_recommender,
)

KINDS = ("sft", "wordkd", "tvdkd", "seqkd", "atspeed_s", "atspeed_r")


def some_rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn((6, 30), generator=generator) for _ in range(2))
    allowed = torch.rand((6, 30), generator=generator) < 0.9
    labels = allowed.float().argmax(-1)
    return Rows(p, q, labels, allowed, torch.randn(6, generator=generator) - 2)


def test_losses_are_their_definitions():
    rows = some_rows()
    word, variation, strict, plain_kl, relaxed = ([] for _ in range(5))
    for p, q, allowed, least in zip(rows.p, rows.q, rows.allowed, rows.least.tolist(), strict=True):
        whole_p, whole_q = torch.softmax(p, -1).tolist(), torch.softmax(q, -1).tolist()
        word.append(-sum(a * np.log(b) for a, b in zip(whole_p, whole_q, strict=True)))
        variation.append(sum(abs(a - b) for a, b in zip(whole_p, whole_q, strict=True)) / 2)
        own_p, own_q = torch.softmax(p[allowed], -1).tolist(), torch.softmax(q[allowed], -1).tolist()
        best = sorted(range(len(own_q)), key=lambda place: -own_q[place])[:NUM_ALIGNED]
        plain_kl.append(sum(own_q[i] * np.log(own_q[i] / own_p[i]) for i in best))
        strict.append(plain_kl[-1] - sum(own_q[i] * (np.log(own_q[i]) - least) for i in best))
        best = sorted(range(len(own_p)), key=lambda place: -own_p[place])[:NUM_ALIGNED]
        sums = [sum(probabilities[i] for i in best) for probabilities in (own_p, own_q)]
        relaxed.append(sum(abs(own_p[i] / sums[0] - own_q[i] / sums[1]) for i in best) / 2)
    for actual, expected in (
        (word_loss(rows), word), (variation_loss(rows), variation), (strict_loss(rows), strict),
        (strict_loss(rows, is_dense=False), plain_kl), (relaxed_loss(rows), relaxed),
    ):  # fmt: skip
        assert float(actual) == pytest.approx(np.mean(expected), rel=1e-4)


def test_windows_hold_every_item_behind_another():
    for length in range(2, 60):
        predicted = [place for start in _starts(length, 7) for place in range(start + 1, min(start + 8, length))]
        assert predicted == list(range(1, length)), length


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Items with few codes, users who mostly go on from one item to the next, and a target trained on them."""
    rng = np.random.default_rng(0)
    codes = np.array(sorted({tuple(row) for row in rng.integers(0, (4, 3, 3), (30, 3)).tolist()}), np.int32)
    items = ItemCodes(pa.array([str(number) for number in range(len(codes))]), codes, (4, 3, 3))
    histories = []
    for _ in range(200):
        steps = rng.choice([1, 1, 1, 2], int(rng.integers(4, 12)))
        histories.append((int(rng.integers(len(codes))) + np.cumsum(steps)) % len(codes))
    folder = tmp_path_factory.mktemp("recommenders")
    options = RecommenderOptions(hidden_size=64, num_layers=2, epochs=9, batch_size=8, learning_rate=4e-3)
    train_recommender(items, histories, folder / "target", options)
    return items, histories, folder


def test_a_recommender_learns_what_comes_next_and_only_says_items(world):
    items, histories, folder = world
    target, trie = load_recommender(folder / "target"), ItemTrie.of(items)
    trained_on = histories[:40]
    trees = CodeTrees(
        target.model,
        trie,
        target.card.first_tokens,
        [target.card.prompt(items.codes[history[:-1]]) for history in trained_on],
    )
    results = search(trees, trie, len(trained_on), 3, BeamDrafter())
    assert np.mean([history[-1] in list.rows for history, list in zip(trained_on, results, strict=True)]) > 0.8
    assert np.mean([history[-2] + 1 == list.rows[0] for history, list in zip(trained_on, results, strict=True)]) > 0.7


def test_the_loss_is_over_what_a_catalogue_has_there(world):
    items, histories, folder = world
    target, trie = load_recommender(folder / "target"), ItemTrie.of(items)
    card, windows = target.card, [histories[0][:3], histories[1][:5]]
    ids = torch.zeros((2, 1 + 5 * 3), dtype=torch.int64)
    for row, window in enumerate(windows):
        tokens = card.tokens(items.codes[window])
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
    with torch.no_grad():
        logits = target.model(ids).logits[:, :-1]
    losses = []
    for row, window in enumerate(windows):
        for number, item in enumerate(window.tolist()):
            for level, code in enumerate(items.codes[item].tolist()):
                alike = items.codes[(items.codes[:, :level] == items.codes[item, :level]).all(1)]
                level_logits = logits[row, 3 * number + level]
                codes = alike[:, level]
                allowed = {int(other): float(level_logits[card.first_tokens[level] + other]) for other in codes}
                losses.append(np.logaddexp.reduce(list(allowed.values())) - allowed[code])
    loss = _catalogue_loss(logits, trie, card, windows, trie.ways_to(items.codes))
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-5)


def test_baselines_are_their_definitions():
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, 12, int(rng.integers(1, 7))) for _ in range(40)]
    queries = [np.array([3]), np.array([1, 5, 5]), np.array([11, 0])]
    lists, has = (
        neighbour_lists(histories, 12, queries, 4),
        np.array([[i in history for i in range(12)] for history in histories]),
    )
    for own, items in zip(queries, lists, strict=True):
        cosine = [
            sum(
                np.sum(has[:, i] & has[:, j]) / np.sqrt(max(1, has[:, i].sum()) * max(1, has[:, j].sum()))
                for i in set(own.tolist())
            )
            for j in range(12)
        ]
        others = [j for j in sorted(range(12), key=lambda j: (-round(cosine[j], 5), j)) if j not in own]
        assert items.tolist() == [j for j in others if cosine[j] > 0][:4]
    counts = np.bincount(np.concatenate(histories), minlength=12)
    assert popular_list(histories, 12, 3).tolist() == sorted(range(12), key=lambda i: -counts[i])[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_saves_forwards_and_changes_no_list(kind, world, tmp_path):
    items, histories, folder = world
    target, trie = load_recommender(folder / "target"), ItemTrie.of(items)
    options = RecommenderOptions(hidden_size=64, num_layers=1, epochs=3, batch_size=8, num_listed=40)
    train_draft(kind, target, items, histories[:80], tmp_path / kind, options)
    draft = load_recommender(tmp_path / kind)
    draft.require_drafts_for(target)
    prompts = [target.card.prompt(items.codes[entry[:-1]]) for entry in histories[:20]]

    def lists(drafter_of):
        trees = CodeTrees(target.model, trie, target.card.first_tokens, prompts)
        return search(trees, trie, len(prompts), 3, drafter_of())

    def small():
        trees = CodeTrees(draft.model, trie, draft.card.first_tokens, prompts)
        return ModelBeams(trees, trie, len(prompts), 12)

    plain, drafted = lists(BeamDrafter), lists(small)
    assert [entry.rows.tolist() for entry in plain] == [entry.rows.tolist() for entry in drafted]
    assert sum(entry.num_accepted for entry in drafted) > sum(entry.num_accepted for entry in plain)


def test_the_same_training_gives_the_same_bytes(world, tmp_path):
    items, histories, _ = world
    histories = histories[:40]
    options = RecommenderOptions(hidden_size=32, num_layers=1, epochs=1, batch_size=16)
    for name in ("a", "b"):
        train_recommender(items, histories, tmp_path / name, options)
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")}) == 1


def test_what_does_not_fit_is_refused(world, tmp_path):
    items, histories, folder = world
    target = load_recommender(folder / "target")
    others = ItemCodes(items.item_ids, items.codes[::-1], items.sizes)
    with pytest.raises(ModelError, match="was trained on other item codes"):
        target.require(others)
    train_recommender(
        others, histories[:20], tmp_path / "other", RecommenderOptions(hidden_size=64, num_layers=1, epochs=1)
    )
    with pytest.raises(ModelError, match="another vocabulary of codes"):
        load_recommender(tmp_path / "other").require_drafts_for(target)
    weights = tmp_path / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*; train it again"):
        load_recommender(tmp_path / "other")
    with pytest.raises(ModelError, match="holds no recommender"):
        load_recommender(tmp_path)
    with pytest.raises(ConfigError, match="3 users with two or more items that have codes are too few"):
        train_recommender(items, [*histories[:3], histories[3][:1]], tmp_path / "few")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="has files that do not belong to a recommender"):
        train_recommender(items, histories, tmp_path / "texts")


def test_a_killed_training_goes_on_to_the_same_bytes(world, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    items, histories, _ = world
    histories = histories[:60]
    options = RecommenderOptions(hidden_size=32, num_layers=1, epochs=2, batch_size=8, num_listed=40)

    def train(kind, folder, on_progress=lambda *progress: None):
        if kind == "target":
            return train_recommender(items, histories, folder, options, on_progress)
        return train_draft(kind, load_recommender(world[2] / "target"), items, histories, folder, options, on_progress)

    for kind, last in (("target", 8), ("atspeed_s", 6)):
        whole = train(kind, tmp_path / kind / "whole")

        def killed(step, num_steps, loss, last=last):
            if step == last:
                raise KeyboardInterrupt

        folder, steps = tmp_path / kind / "killed", []
        with pytest.raises(KeyboardInterrupt):
            train(kind, folder, killed)
        with pytest.raises(ModelError, match="holds no recommender"):
            load_recommender(folder)
        card = train(kind, folder, lambda step, *_, steps=steps: steps.append(step))
        assert steps[0] == last and {path.name for path in folder.iterdir()} == {
            "config.json", "generation_config.json", "model.safetensors", "recommender.json"
        }  # fmt: skip
        assert card.model_copy(update={"training_seconds": whole.training_seconds}) == whole
        names = [tmp_path / kind / name / "model.safetensors" for name in ("whole", "killed")]
        assert names[0].read_bytes() == names[1].read_bytes()


def test_the_card_tells_how_lists_do_that_were_held_back(world):
    items, histories, folder = world
    target, trie = load_recommender(folder / "target"), ItemTrie.of(items)
    card = target.card
    held_back = [history for history, held in zip(histories, _held_back(len(histories), 0), strict=True) if held]
    lists = listed(target.model, card, trie, items, [history[:-1] for history in held_back])
    hits = [
        rows.tolist().index(history[-1])
        for history, rows in zip(held_back, lists, strict=True)
        if history[-1] in rows[:10]
    ]
    assert card.held_back.num_histories == card.popular.num_histories == len(held_back) == 20
    assert card.held_back.recall_10 == len(hits) / 20 > 0.9 > card.popular.recall_10
    assert card.held_back.ndcg_10 == pytest.approx(sum(1 / np.log2(2 + place) for place in hits) / 20)


def test_a_language_model_is_extended_by_codes_and_adapted(world, tmp_path):
    pytest.importorskip("peft")
    items, histories, _ = world
    histories = histories[:80]
    options = RecommenderOptions(epochs=4, batch_size=8, learning_rate=5e-3)
    card = train_recommender(items, histories, tmp_path / "target", options, base=SAMPLE_MODEL)
    target, trie = load_recommender(tmp_path / "target"), ItemTrie.of(items)
    before = load_file(SAMPLE_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    assert card.begin == len(before) and target.model.get_input_embeddings().num_embeddings == card.vocab_size
    assert card.held_back.recall_10 > 0.8 > card.popular.recall_10
    small = train_draft(
        "atspeed_s", target, items, histories, tmp_path / "small", replace(options, epochs=1, num_listed=10)
    )
    draft = load_recommender(tmp_path / "small")
    draft.require_drafts_for(target)
    assert small.begin == 0
    queries = [items.codes[entry[:-1]] for entry in histories[:8]]

    def trees(model):
        return CodeTrees(model.model, trie, model.card.first_tokens, [model.card.prompt(codes) for codes in queries])

    plain = search(trees(target), trie, 8, 3, BeamDrafter())
    drafted = search(trees(target), trie, 8, 3, ModelBeams(trees(draft), trie, 8, 12))
    assert [entry.rows.tolist() for entry in plain] == [entry.rows.tolist() for entry in drafted]


@pytest.mark.parametrize("kind", ["sft", "wordkd", "atspeed_s", "atspeed_r"])
def test_recommenders_are_trained_and_asked_on_a_device(kind, world, tmp_path, a_device):
    items, histories, folder = world
    options = RecommenderOptions(hidden_size=64, num_layers=1, epochs=1, batch_size=16, num_listed=20)
    if kind == "sft":
        train_recommender(items, histories[:20], tmp_path / "target", options)
    target, trie = load_recommender(folder / "target", "cuda"), ItemTrie.of(items)
    train_draft(kind, target, items, histories[:20], tmp_path / "draft", options)
    draft = load_recommender(tmp_path / "draft", "cuda")
    assert target.model.device.type == draft.model.device.type == "cuda"
    prompts = [target.card.prompt(items.codes[entry]) for entry in histories[:4]]
    own = CodeTrees(draft.model, trie, draft.card.first_tokens, prompts)
    lists = []
    for drafter in (BeamDrafter(), ModelBeams(own, trie, len(prompts), 10)):
        trees = CodeTrees(target.model, trie, target.card.first_tokens, prompts)
        lists.append([entry.rows.tolist() for entry in search(trees, trie, len(prompts), 5, drafter)])
    assert lists[0] == lists[1]


def test_the_check_of_doctor_names_the_option_of_a_model_that_is_not_set():
    with pytest.raises(ConfigError, match=r"extensions\.recommending\.model is not set"):
        RECOMMENDING.check(RecommendingSettings())
