"""Beam search over codes: equal to a plain loop and to transformers for all drafts, which save forwards."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laserbatch.research.recommending.beams import BeamDrafter, ListedItems, ModelBeams, search
from laserbatch.research.recommending.code_trees import CodeTrees
from laserbatch.research.recommending.codes import ItemCodes
from laserbatch.research.recommending.item_trie import ItemTrie

SIZES = (5, 4, 6, 3)
FIRST_TOKENS = tuple(10 + sum(SIZES[:level]) for level in range(4))


def model_of(seed: int, width: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=10 + sum(SIZES), hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def catalogue(num_items: int, seed: int = 0) -> ItemCodes:
    rng = np.random.default_rng(seed)
    every = np.array(list(itertools.product(*map(range, SIZES))), np.int32)
    chosen = every[rng.choice(len(every), num_items, replace=False)]
    return ItemCodes(pa.array([f"i{number}" for number in range(num_items)]), chosen, SIZES)


def prompts_of(num_users: int, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 10 + sum(SIZES), int(rng.integers(1, 12))) for _ in range(num_users)]


TARGET, CATALOGUE, PROMPTS = model_of(1), catalogue(60), prompts_of(7)
TRIE = ItemTrie.of(CATALOGUE)


def found_with(size: int, drafter=None, prompts=PROMPTS, trie=TRIE, left_out=None):
    trees = CodeTrees(TARGET, trie, FIRST_TOKENS, prompts)
    return search(trees, trie, len(prompts), size, drafter or BeamDrafter(), left_out), trees.num_forwards


@torch.inference_mode()
def plainly(prompt: np.ndarray, items: ItemCodes, size: int, own=()) -> list[tuple[float, int]]:
    """Beams by whole forwards of each path, with a softmax over existing codes; no path leads to `own` alone."""
    beams, others = [(0.0, ())], [row for number, row in enumerate(items.codes.tolist()) if number not in own]
    for level in range(4):
        after = []
        for score, path in beams:
            followers = sorted({int(row[level]) for row in items.codes if tuple(row[:level]) == path})
            tokens = [*prompt.tolist(), *(FIRST_TOKENS[place] + code for place, code in enumerate(path))]
            logits = TARGET(input_ids=torch.tensor([tokens])).logits[0, -1]
            log_p = torch.log_softmax(logits[[FIRST_TOKENS[level] + code for code in followers]], -1).tolist()
            after += [(score + p, (*path, code)) for p, code in zip(log_p, followers, strict=True)]
        after = [(score, path) for score, path in after if any(tuple(row[: level + 1]) == path for row in others)]
        beams = sorted(after, key=lambda pair: -pair[0])[:size]
    rows = {tuple(row): number for number, row in enumerate(items.codes.tolist())}
    return [(score, rows[path]) for score, path in beams]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_beams_are_those_of_a_plain_loop(size):
    for prompt, result in zip(PROMPTS, found_with(size)[0], strict=True):
        expected = plainly(prompt, CATALOGUE, size)
        assert result.rows.tolist() == [row for _, row in expected]
        np.testing.assert_allclose(result.scores, [score for score, _ in expected], atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 20])
def test_what_is_left_out_is_not_found_and_nothing_else_is_missed(size):
    rng = np.random.default_rng(2)
    own = [rng.choice(60, count, replace=False) for count in (0, 1, 5, 20, 40, 59, 60)]
    own[1] = np.array([plainly(PROMPTS[1], CATALOGUE, 1)[0][1]])
    left_out = [TRIE.emptied_by(CATALOGUE.codes[rows]) for rows in own]
    plain, num_forwards = found_with(size, left_out=left_out)
    drafted, fewer = found_with(size, small_beams(40, 0.1), left_out=left_out)
    assert fewer <= num_forwards
    for prompt, rows, result, other in zip(PROMPTS, own, plain, drafted, strict=True):
        assert result.rows.tolist() == other.rows.tolist()
        assert result.rows.tolist() == [row for _, row in plainly(prompt, CATALOGUE, size, set(rows.tolist()))]


@torch.inference_mode()
def test_beams_are_those_of_transformers():
    """With all paths allowed, transformers' softmax is also over the tokens of a level."""
    every = catalogue(int(np.prod(SIZES)))
    trie = ItemTrie.of(every)
    rows = {tuple(row): number for number, row in enumerate(every.codes.tolist())}
    allowed = [list(range(first, first + size)) for first, size in zip(FIRST_TOKENS, SIZES, strict=True)]
    for prompt in PROMPTS[:3]:
        (result,), _ = found_with(5, prompts=[prompt], trie=trie)
        ids, length = torch.tensor(prompt)[None], len(prompt)
        out = TARGET.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, num_beams=5,
            num_return_sequences=5, do_sample=False, length_penalty=0.0, pad_token_id=0, eos_token_id=None,
            prefix_allowed_tokens_fn=lambda _, sent, length=length: allowed[min(len(sent) - length, 3)],
            renormalize_logits=True,
        )  # fmt: skip
        paths = (out[:, length:] - torch.tensor(FIRST_TOKENS)).tolist()
        assert [rows[tuple(path)] for path in paths] == result.rows.tolist()


def small_beams(size: int, noise: float):
    model = model_of(1)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return ModelBeams(CodeTrees(model, TRIE, FIRST_TOKENS, PROMPTS), TRIE, len(PROMPTS), size)


@pytest.mark.parametrize(("size", "num_drafted"), [(1, 20), (5, 20), (10, 40), (20, 60)])
@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
def test_drafted_beams_are_the_same_items_in_the_same_order_with_the_same_scores(size, num_drafted, noise):
    plain, num_forwards = found_with(size)
    drafted, fewer = found_with(size, small_beams(num_drafted, noise))
    assert fewer <= num_forwards
    for result, other in zip(plain, drafted, strict=True):
        assert result.rows.tolist() == other.rows.tolist()
        np.testing.assert_allclose(result.scores, other.scores, atol=1e-6)
    if noise == 0:  # the target drafts for itself, so one forward verifies everything
        assert fewer == 1 and all(result.num_accepted == 3 for result in drafted)


def test_last_night_s_lists_draft_without_a_model():
    plain, num_forwards = found_with(5)
    lists = [[tuple(CATALOGUE.codes[row].tolist()) for row in result.rows] for result in found_with(20)[0]]
    drafted, fewer = found_with(5, ListedItems(lists, TRIE, 40))
    lists_of_plain = [result.rows.tolist() for result in plain]
    assert [result.rows.tolist() for result in drafted] == lists_of_plain and fewer < num_forwards
    with_removed = [[(9, 9, 9, 9), *result] for result in lists]  # an item that is no longer in the catalogue
    assert [result.rows.tolist() for result in found_with(5, ListedItems(with_removed, TRIE, 40))[0]] == [
        result.rows.tolist() for result in plain
    ]
    none = found_with(5, ListedItems([[] for _ in PROMPTS], TRIE, 40))
    assert [result.rows.tolist() for result in none[0]] == [result.rows.tolist() for result in plain]


def test_more_than_the_catalogue_is_all_of_it():
    results, _ = found_with(100)
    assert all(sorted(result.rows.tolist()) == list(range(60)) for result in results)
