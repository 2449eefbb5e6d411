"""All draft methods in the engine: drafts change how fast a text comes, and not the text."""

import copy
import dataclasses
import itertools
import re
import shutil
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, plain_texts, requests_for, tiny_engine, tiny_model, tiny_prompts
from trained_drafters import drafter_of, trained

from laserbatch.jobs.checks.model import check_drafters
from laserbatch.jobs.settings import PACKAGE_ROOT, Settings
from laserbatch.pipeline.decoding import engine as engine_module
from laserbatch.pipeline.decoding.drafters import Drafter, drafter_from
from laserbatch.pipeline.decoding.drafters.blended import BlendedDrafter, blend
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.plugins import drafter_plugin
from laserbatch.pipeline.decoding.sequence import DecodingSequence, GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import ROOT, TokenTree, TreeBatch
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.engines.own import OwnEngine
from laserbatch.pipeline.errors import ModelError
from laserbatch.research.drafters.aligned import AlignedDrafter, ngrams_behind
from laserbatch.research.drafters.draft_models import SmallModel
from laserbatch.research.drafters.lookahead import LookaheadDrafter
from laserbatch.retrieval_pools.sources import SOURCE_LOOKAHEAD, SOURCE_MODEL, SOURCE_POOL

SAMPLE_MODEL = PACKAGE_ROOT / "models" / "sample"
MODEL, PROMPTS, MAX_NEW = tiny_model(), tiny_prompts(6), 16


@cache
def plain() -> list[list[int]]:
    return plain_texts(MODEL, PROMPTS, MAX_NEW)


def like(model, noise: float, seed: int = 1):
    """A model that mostly predicts the same tokens as another one."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return other


TWO_MODELS = tuple(prepare_model(like(MODEL, 0.15, seed)) for seed in (1, 2))
ONE_MODEL = TWO_MODELS[:1]


def of_models(small, *others: str, **options) -> Drafter:
    return drafter_of(small, DecodingSettings(**trained(*others, models=["unused"] * len(small), **options)))


def all_drafters() -> Drafter:
    texts = DecodingSettings(drafters=("previous", "prompt", "output", "aligned", "lookahead"))
    return BlendedDrafter([of_models(TWO_MODELS), drafter_from(texts)])


METHODS = {
    "chain": lambda: of_models(ONE_MODEL),
    "tree": lambda: of_models(ONE_MODEL, width=3, length=4),
    "two models": lambda: of_models(TWO_MODELS),
    "lookahead": lambda: drafter_from(DecodingSettings(drafters=("lookahead",))),
    "aligned": lambda: drafter_from(DecodingSettings(drafters=("aligned",))),
    "all": all_drafters,
}


@pytest.mark.parametrize("name", METHODS)
def test_greedy_texts_are_plain_ones_whatever_drafts(name):
    drafted = set()
    for batch_size in (1, 5):
        engine = tiny_engine(MODEL, batch_size=batch_size, verifier="greedy", max_draft_tokens=32)
        results = {r.request_id: r for r in engine.generate(requests_for(PROMPTS, MAX_NEW), METHODS[name]())}
        assert [results[str(i)].token_ids.tolist() for i in range(len(PROMPTS))] == plain()
        drafted.add(tuple(results[str(i)].num_accepted for i in range(len(PROMPTS))))
    assert len(drafted) == 1  # and drafts do not depend on the batch
    assert sum(drafted.pop()) > 0


def test_relaxed_texts_do_not_depend_on_the_batch():
    written = set()
    for batch_size in (1, 4):
        engine = tiny_engine(MODEL, batch_size=batch_size, verifier="relaxed", top_k=8, min_probability=0.01)
        results = {r.request_id: r for r in engine.generate(requests_for(PROMPTS, MAX_NEW), all_drafters())}
        written.add(tuple(tuple(results[str(i)].token_ids.tolist()) for i in range(len(PROMPTS))))
    assert len(written) == 1


SAMPLED = {
    "greedy": ("greedy", {"width": 2}, ONE_MODEL),
    "leviathan": ("leviathan", {}, ONE_MODEL),
    "specinfer": ("specinfer", {"width": 3}, TWO_MODELS),
    "k_seq": ("k_seq", {"width": 3}, ONE_MODEL),
    "rsd": ("rsd", {"width": 3}, ONE_MODEL),
    "rsd-c": ("rsd", {"branching": (3, 2, 1)}, ONE_MODEL),
}


BESIDE = ("previous", "output")


@pytest.mark.parametrize(
    ("name", "drafters"), [*((name, BESIDE) for name in SAMPLED), ("specinfer", ()), ("rsd", ())], ids=str
)
def test_sampled_texts_depend_on_their_seed_alone(name, drafters):
    rule, options, models = SAMPLED[name]
    of_models = trained(*drafters, models=["unused"] * len(models), **options)
    named = DecodingSettings(verifier=rule, temperature=0.8, max_draft_tokens=24, **of_models)
    written, accepted = set(), 0
    for batch_size in (1, 5):
        engine = Engine(prepare_model(copy.deepcopy(MODEL)), named.model_copy(update={"batch_size": batch_size}))
        requests = [
            GenerationRequest(request.request_id, request.prompt_ids, previous_ids=text, max_new_tokens=10, seed=number)
            for number, (request, text) in enumerate(zip(requests_for(PROMPTS, 10), previous_texts(), strict=True))
        ]
        results = {r.request_id: r for r in engine.generate(requests, drafter_of(models, named))}
        written.add(tuple(tuple(results[str(i)].token_ids.tolist()) for i in range(len(PROMPTS))))
        accepted += sum(r.accepted_by_source[SOURCE_MODEL] for r in results.values())
    assert len(written) == 1 and accepted > 0


def previous_texts() -> list[np.ndarray]:
    return [np.array(text, np.int32) for text in plain()]


def test_a_drafter_that_is_the_target_is_always_right():
    drafter = of_models((prepare_model(copy.deepcopy(MODEL)),), length=4)
    engine = tiny_engine(MODEL, batch_size=4, verifier="greedy")
    for result in engine.generate(requests_for(PROMPTS, MAX_NEW), drafter):
        is_cut = result.finish_reason == "length"
        assert result.num_accepted >= result.num_drafted - 4 * (not is_cut)


@pytest.mark.parametrize("method", ["begin", "log_q"])
@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory")])
def test_steps_without_memory_for_a_draft_model_are_taken_without_drafts(monkeypatch, caplog, method, error):
    called, num_calls = getattr(SmallModel, method), itertools.count()

    def starved(*arguments):
        if next(num_calls) % 7 == 1:
            raise error
        return called(*arguments)

    monkeypatch.setattr(SmallModel, method, starved)
    engine = tiny_engine(MODEL, batch_size=4)
    outcomes = engine.generate(requests_for(PROMPTS, MAX_NEW), METHODS["chain"](), Greedy())
    results = {result.request_id: result for result in outcomes}
    assert [results[str(number)].token_ids.tolist() for number in range(len(PROMPTS))] == plain()
    assert sum(result.num_accepted for result in results.values()) > 0
    assert caplog.text.count("steps for which a drafter lacks memory run without drafts") == 1


def test_a_draft_model_whose_context_is_too_short_is_named_once(caplog):
    short = dataclasses.replace(prepare_model(copy.deepcopy(MODEL)), max_context=8)
    engine = tiny_engine(MODEL, batch_size=4, verifier="greedy")
    results = list(engine.generate(requests_for(PROMPTS, MAX_NEW), of_models((short,), length=4)))
    assert sum(result.num_drafted for result in results) == 0
    assert caplog.text.count("reads at most 8 tokens, so it drafts nothing for a longer prompt") == 1


@torch.inference_mode()
def test_a_small_model_s_cache_answers_as_the_model_does_alone():
    """Texts that grow by several tokens at once, trees below them, and a text that pauses and returns."""
    model = like(MODEL, 0.2)
    small = SmallModel(prepare_model(copy.deepcopy(model)), 4, 1 << 20)
    sequences = [DecodingSequence(GenerationRequest(str(i), prompt), 40) for i, prompt in enumerate(PROMPTS[:3])]
    tree = TokenTree(
        np.array([3, 4, 5, 6], np.int32),
        np.array([-1, 0, 0, -1], np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, np.uint8),
    )
    for turn in range(4):
        live = [sequence for number, sequence in enumerate(sequences) if turn != 2 or number != 1]
        assert all(small.has_room(sequence) for sequence in live)
        small.begin(live)
        trees = TreeBatch.of([tree] * len(live))
        where = np.arange(len(live)), np.full(len(live), 2)
        roots = small.log_q(TreeBatch.empty(len(live)), where[0], np.full(len(live), ROOT))
        nodes = small.log_q(trees, *where)
        for actual, path in ((roots, []), (nodes, [3, 5])):
            for row, sequence in zip(actual, live, strict=True):
                ids = torch.tensor([[*sequence.context.tolist(), *path]])
                expected = torch.log_softmax(model(input_ids=ids).logits[0, -1].float(), -1)
                torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)
        for number, sequence in enumerate(live):
            sequence.append(np.array([7, 8][: number % 3], np.int32), np.zeros(min(number % 3, 2), np.uint8), 9 + turn)


def test_alternatives_are_what_the_target_would_sooner_say():
    """Compared with the model alone: for each prompt token, at most two likelier tokens, if there are any."""
    drafter = AlignedDrafter()
    prompts = [np.concatenate((prompt, prompt[:5])).astype(np.int32) for prompt in PROMPTS[:4]]
    drafted = {}
    drafter.forget = lambda sequence: drafted.update({sequence.request.request_id: drafter._alternatives[sequence]})
    list(tiny_engine(MODEL, batch_size=4, max_prefill_tokens=7).generate(requests_for(prompts, 3), drafter))
    for number, prompt in enumerate(prompts):
        logits = MODEL(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0]
        for place in range(1, len(prompt)):
            best = logits[place - 1].topk(2)
            expected = [int(t) for v, t in zip(*best, strict=True) if v > logits[place - 1, prompt[place]]]
            alternatives = drafted[str(number)][place]
            assert alternatives[alternatives >= 0].tolist() == expected


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([1, 2, 3], ([], 1)),
        ([1, 2, 3, 1, 2], ([2], 2)),
        ([5, 1, 2, 9, 5, 1, 2, 8, 7, 1, 2], ([7, 3], 2)),
        ([5, 1, 2, 9, 6, 1, 2, 8, 5, 1, 2], ([3], 3)),
        ([4, 4, 4], ([2], 2)),
    ],
)
def test_ngrams_are_looked_for_behind_the_longest_key(context, expected):
    assert ngrams_behind(np.array(context)) == expected


CYCLE = [24, 25, 26, 27, 28, 29, 30]  # without end tokens


def test_lookahead_drafts_what_it_guessed():
    """The target repeats a cycle, so its guesses are soon right, and n-grams of them are drafted."""
    engine = tiny_engine(cycling_model(), verifier="greedy", max_draft_tokens=32)
    request = GenerationRequest("a", np.array(CYCLE[:2], np.int32), max_new_tokens=40)
    (result,) = engine.generate([request], LookaheadDrafter())
    assert result.token_ids.tolist() == [CYCLE[(2 + i) % len(CYCLE)] for i in range(40)]
    assert result.num_steps < 20 and result.accepted_by_source[SOURCE_LOOKAHEAD] == 40 - result.num_steps


def cycling_model():
    """A model that depends on the last token alone, and predicts its successor in CYCLE."""
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        torch.manual_seed(0)
        table = torch.nn.functional.normalize(torch.randn(VOCAB, model.config.hidden_size))
        model.model.embed_tokens.weight.copy_(table)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[CYCLE] = table[[*CYCLE[-1:], *CYCLE[:-1]]]
    return model


def test_blending_is_a_union_under_the_larger_estimate():
    first = tree_of((5, -1, -0.1), (6, 0, -0.5), (7, 0, -0.9))
    second = tree_of((8, -1, -0.3), (5, -1, -0.6), (7, 1, -0.7), source=SOURCE_POOL)
    for most in (1, 3, 8):
        (blended,) = blend([TreeBatch.of([first]), TreeBatch.of([second])], most)
        paths = {
            path_of(blended, node): (blended.log_acceptance[node], blended.source[node]) for node in range(len(blended))
        }
        expected: dict[tuple[int, ...], tuple[float, int]] = {}
        for tree in (first, second):
            for node in range(len(tree)):
                path, estimate = path_of(tree, node), (tree.log_acceptance[node], tree.source[node])
                expected[path] = max(expected.get(path, (-np.inf, 0)), estimate)
        likeliest = sorted(expected, key=lambda path: -expected[path][0])[:most]
        assert paths == {path: expected[path] for path in likeliest}
        assert all(parent < node for node, parent in enumerate(blended.parents))
        assert all(earlier >= later for earlier, later in pairwise(blended.log_acceptance))


def tree_of(*nodes, source: int = SOURCE_MODEL) -> TokenTree:
    tokens, parents, acceptance = zip(*nodes, strict=True)
    sources = np.full(len(nodes), source, np.uint8)
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(acceptance, np.float32), sources)


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    above = () if tree.parents[node] < 0 else path_of(tree, int(tree.parents[node]))
    return (*above, int(tree.token_ids[node]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"verifier": "rsd"} | trained(models=["a"]), "verifier rsd samples: set a temperature above 0"),
        ({"verifier": "rsd", "temperature": 1}, "verifier rsd judges drafts that a small model or a head samples"),
        ({"verifier": "k_seq", "temperature": 1} | trained(models=["a", "b"]), "judges drafts of one model"),
        (trained(models=["a"], branching=[2]), "trained.branching is for verifier rsd, not relaxed"),
        (trained(models=["a"], branching=[0]), r"branching\.0: Input should be greater than or equal to 1"),
        (
            {"verifier": "rsd", "temperature": 1} | trained(models=["a"], branching=[20]),
            "by branching has 20 tokens, but a draft has at most 16: lower branching, or set max_draft_tokens: 20",
        ),
        ({"verifier": "rsd", "temperature": 1} | trained(models=["a"], branching=[4, 2, 2]), "branching has 28 tokens"),
        (trained(models=["a"], width=4), "width times length has 20 tokens, .* or set max_draft_tokens: 20"),
        (trained(models=["a"], width=64, length=2), "has 128 tokens, but a draft has at most 16: lower width"),
        ({"verifier": "greedy"} | trained(models=["a"], width=13), "has 65 tokens, but a draft has at most 64"),
        (
            {"verifier": "leviathan", "temperature": 1} | trained(models=["a"], width=2),
            "width is 2, but verifier leviathan judges one token at each depth",
        ),
        (trained(), "trained has neither models nor a head"),
        (trained(modles=["a"]), "trained: modles: no such key; did you mean 'models'"),
        ({"engine": "vllm"} | trained(models=["a"]), "drafters trained with engine vllm"),
        ({"drafter_options": {"trained": {"head": "a"}}}, "trained, which is not among drafters"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        DecodingSettings(**options)


def test_a_draft_model_that_is_not_there_is_refused_by_its_option(tmp_path):
    settings = DecodingSettings(**trained(models=[tmp_path / "small"]))
    with pytest.raises(ModelError, match=r"drafter_options\.trained\.models: there is no model folder .*small; give"):
        drafter_plugin("trained").load(settings.options_of("trained"), settings, ONE_MODEL[0])


@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("model.safetensors", lambda data: data[:-1], r"model\.safetensors is damaged \("),
        ("config.json", lambda data: data.replace(b'"llama"', b'"no_such_model"'), "describes no model that this"),
        (
            "config.json",
            lambda data: data.replace(b'"num_hidden_layers": ', b'"num_hidden_layers": 1'),
            "weights in .* lack",
        ),
        ("tokenizer.json", lambda data: data.replace(b"<|system|>", b"<|systems|>"), "another vocabulary"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_doctor_names_a_draft_model_that_nights_would_refuse(name, spoil, problem, tmp_path):
    folder = shutil.copytree(SAMPLE_MODEL, tmp_path / "small")
    settings = Settings(decoding=DecodingSettings(**trained(models=[folder])))
    assert list(check_drafters(settings)) == []
    data = (folder / name).read_bytes()
    assert spoil is None or spoil(data) != data
    (folder / name).unlink() if spoil is None else (folder / name).write_bytes(spoil(data))
    (result,) = check_drafters(settings)
    assert result.level == "fault" and re.search(f"drafter_options.trained.models: .*{problem}", result.found)


def test_the_cache_of_a_worker_leaves_room_for_those_of_its_draft_models(monkeypatch, tmp_path):
    bounded = []

    def bound(device, bytes_per_token, *others):
        bounded.append(bytes_per_token)
        return 5000

    monkeypatch.setattr(engine_module, "cache_bound", bound)
    settings = DecodingSettings(**trained(models=[SAMPLE_MODEL]))
    engine = OwnEngine(SAMPLE_MODEL, settings, "cpu", 1, 1, 1, {}, tmp_path).engine
    assert bounded == [2 * engine.loaded.bytes_per_token]
