"""Heads of a target, Medusa's and EAGLE's: drafts follow their predictions, and texts equal those of plain decoding."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import plain_texts, requests_for, tiny_model, tiny_prompts
from trained_drafters import engine_of_loaded, trained
from transformers import LlamaConfig

from laserbatch.pipeline.decoding.drafters import Drafter, load_plugin_drafters
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import prepare_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.errors import ModelError
from laserbatch.research.drafters.eagle import EagleHead
from laserbatch.research.drafters.medusa import MedusaHeads
from laserbatch.research.drafters.trained import (
    CARD_NAME,
    WEIGHTS_NAME,
    DrafterCard,
    TrainedHead,
    layer_of,
    new_head,
)

MODEL, PROMPTS, MAX_NEW = tiny_model(), tiny_prompts(7), 14
HIDDEN = MODEL.config.hidden_size


def card_of(kind: str, target: str = "unnamed") -> DrafterCard:
    if kind == "medusa":
        return DrafterCard(kind=kind, target=target, num_heads=3)
    return DrafterCard(kind=kind, target=target, layer=layer_of(MODEL.config))


def written_head(folder, kind: str, target: str = "unnamed"):
    """Write a head with random weights that differ from zero; returns its folder."""
    torch.manual_seed(3)
    head = new_head(card_of(kind), HIDDEN)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    folder.mkdir(exist_ok=True)
    save_file(head.state_dict(), folder / WEIGHTS_NAME)
    (folder / CARD_NAME).write_text(card_of(kind, target).model_dump_json())
    return folder


def engine_of(folder, *others: str, **options) -> tuple[Engine, Drafter]:
    settings = DecodingSettings(verifier="greedy", **trained(*others, head=folder, width=2, length=3), **options)
    return engine_of_loaded(prepare_model(copy.deepcopy(MODEL)), settings)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_memory_of_a_token_is_that_of_the_heads_cache(kind, tmp_path):
    engine, drafter = engine_of(written_head(tmp_path / kind, kind))
    list(engine.generate(requests_for(PROMPTS[:2], 4), drafter))
    (model,) = drafter._models
    num_bytes = model._cache.bytes_per_token() if kind == "eagle" else 0
    (plugin,) = load_plugin_drafters(engine.settings, engine.loaded)
    assert plugin.bytes_per_token == num_bytes
    assert (num_bytes > 0) == (kind == "eagle")


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_greedy_texts_are_plain_ones(kind, tmp_path):
    folder = written_head(tmp_path / kind, kind)
    cases = ((1, (), {}), (4, (), {}), (9, (), {"max_cache_tokens": 150}), (4, ("output",), {}))
    for batch_size, others, options in cases:
        engine, drafter = engine_of(folder, *others, batch_size=batch_size, **options)
        engine.max_prefill_tokens = 16
        results = {r.request_id: r for r in engine.generate(requests_for(PROMPTS, MAX_NEW), drafter)}
        assert [results[str(i)].token_ids.tolist() for i in range(len(PROMPTS))] == plain_texts(MODEL, PROMPTS, MAX_NEW)
        assert sum(r.num_drafted for r in results.values()) > 100


class Asked:
    """A draft model that delegates to another one and records the requests."""

    def __init__(self, model) -> None:
        self._model, self.answers, self._drafting = model, [], []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def begin(self, sequences) -> None:
        self._drafting = [sequence.context.copy() for sequence in sequences]
        self._prompts = [sequence.num_prompt for sequence in sequences]
        self._model.begin(sequences)

    def log_q(self, trees: TreeBatch, tree_of, places):
        log_q = self._model.log_q(trees, tree_of, places)
        for row, tree, place in zip(log_q, tree_of.tolist(), places.tolist(), strict=True):
            path = []
            while place >= 0:
                path.insert(0, int(trees[tree].token_ids[place]))
                place = int(trees[tree].parents[place])
            self.answers.append((self._drafting[tree], self._prompts[tree], path, row.clone()))
        return log_q


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_say_what_they_say_alone(kind, tmp_path):
    """Compared with the head on the states of transformers' forward, one text at a time, without a cache."""
    engine, drafter = engine_of(written_head(tmp_path / kind, kind), batch_size=4)
    watched = drafter._models[0] = Asked(drafter._models[0])
    list(engine.generate(requests_for(PROMPTS[:5], 8), drafter))
    head, slow = TrainedHead(tmp_path / kind, engine.loaded)._head, slow_medusa if kind == "medusa" else slow_eagle
    assert len(watched.answers) > 60
    for context, num_prompt, path, log_q in watched.answers[::3]:
        torch.testing.assert_close(log_q, slow(head, context, num_prompt, path), rtol=5e-3, atol=5e-3)


@torch.inference_mode()
def states_of(token_ids) -> torch.Tensor:
    return MODEL.model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0]


@torch.inference_mode()
def slow_medusa(heads: MedusaHeads, context: np.ndarray, num_prompt: int, path: list[int]) -> torch.Tensor:
    state = states_of(context[:-1])[-1]  # the state that predicted the last token
    return torch.log_softmax(MODEL.lm_head(heads(state)[len(path)]), -1)


@torch.inference_mode()
def slow_eagle(head: EagleHead, context: np.ndarray, num_prompt: int, path: list[int]) -> torch.Tensor:
    """One token at a time, each with all earlier ones computed anew, with transformers' own attention."""
    plain = EagleHead(LlamaConfig(**layer_of(MODEL.config), attn_implementation="eager"))
    plain.load_state_dict(head.state_dict())
    features = states_of(context[:-1])[num_prompt - 1 :]
    tokens = context[num_prompt:].tolist()
    for token in [None, *path]:
        if token is not None:
            tokens.append(token)
        n = len(tokens)
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        hidden = plain.join(torch.cat((MODEL.model.embed_tokens(torch.tensor(tokens)), features), -1))[None]
        positions = torch.arange(n)[None]
        states = plain.layer(hidden, attention_mask=mask, position_embeddings=plain.rotary(hidden, positions))
        last = (states if isinstance(states, torch.Tensor) else states[0])[0, -1:]
        features = torch.cat((features, last))
    return torch.log_softmax(MODEL.lm_head(last[0]), -1)


def test_drafts_that_medusa_samples_end_at_its_last_head(tmp_path):
    drafted = trained(head=written_head(tmp_path, "medusa"), length=8)
    settings = DecodingSettings(verifier="leviathan", temperature=1.0, **drafted)
    engine, drafter = engine_of_loaded(prepare_model(copy.deepcopy(MODEL)), settings)
    depths = []
    draft_all = drafter.draft_all
    drafter.draft_all = lambda *each: depths.append((trees := draft_all(*each)).depths.max(initial=0)) or trees
    list(engine.generate(requests_for(PROMPTS, MAX_NEW), drafter))
    assert max(depths) == 3


def test_folders_that_do_not_fit_are_refused(tmp_path):
    loaded = prepare_model(copy.deepcopy(MODEL))
    with pytest.raises(ModelError, match=r"has no drafter\.json: train a head"):
        TrainedHead(tmp_path, loaded)
    with pytest.raises(ModelError, match="was trained for another, but the model is unnamed: train a head"):
        TrainedHead(written_head(tmp_path / "other", "eagle", "another"), loaded)
    folder = written_head(tmp_path / "cut", "medusa")
    save_file({"blocks.0.weight": torch.zeros(2, 2)}, folder / WEIGHTS_NAME)
    with pytest.raises(ModelError, match=r"model\.safetensors: blocks\.0\.bias has the shape no .*; train it again"):
        TrainedHead(folder, loaded)
    damaged = written_head(tmp_path / "damaged", "eagle") / WEIGHTS_NAME
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*; train it again"):
        TrainedHead(damaged.parent, loaded)
    (folder / CARD_NAME).write_text('{"kind": "guess", "target": "unnamed"}')
    with pytest.raises(ModelError, match=r"drafter\.json: kind.*; train it again"):
        TrainedHead(folder, loaded)


def test_estimates_are_read_off_the_curves():
    curves = (tuple(k / 20 for k in range(11)), (0.5,) * 11)
    card = DrafterCard(kind="medusa", target="t", acceptance=(0.5, 0.5), curves=curves)
    acceptance = np.exp(card.log_acceptance(0, np.log([1.0, 0.35])))
    assert acceptance == pytest.approx([0.5, 0.175])
    assert np.exp(card.log_acceptance(5, np.log([0.2]))) == pytest.approx([0.5])
    assert np.isneginf(card.log_acceptance(0, np.array([-np.inf]))).all()
