"""Training of drafters: losses against plain loops, the gain of a trained drafter, and a training that was killed."""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from trained_drafters import loaded_engine
from trained_drafters import trained as trained_by
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, model_identity
from laserbatch.pipeline.decoding.plugins import TEXT_SOURCES
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.errors import ConfigError
from laserbatch.research import learning
from laserbatch.research.drafter_training import train as training
from laserbatch.research.drafter_training.eagle import CLASS_WEIGHT, NUM_LIKELIEST, Eagle
from laserbatch.research.drafter_training.medusa import ADAPTER_NAME
from laserbatch.research.drafter_training.method import judged
from laserbatch.research.drafter_training.small import Small
from laserbatch.research.drafter_training.texts import Target, TrainingText, held_back
from laserbatch.research.drafter_training.train import TrainingOptions, small_config, train_drafter
from laserbatch.research.drafter_training.train_on_runs import train_on_runs
from laserbatch.research.drafters.eagle import EagleHead
from laserbatch.research.drafters.trained import CARD_NAME, DrafterCard, layer_of

KINDS = ("medusa", "eagle", "hass", "small")


@pytest.fixture(scope="module")
def texts() -> list[TrainingText]:
    """The texts that the bundled model writes for a few prompts."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    titles = ("red", "blue", "old", "new", "small", "wide", "cold", "late")
    prompts = [
        f"The {title} {kind} of the {other}"
        for title in titles
        for kind in ("story", "game", "song")
        for other in titles[:1]
    ]
    engine = Engine.from_pretrained("sample", DecodingSettings(verifier="greedy", batch_size=8))
    requests = [
        GenerationRequest(str(number), np.array(tokenizer(prompt).input_ids, np.int32), max_new_tokens=24)
        for number, prompt in enumerate(prompts)
    ]
    written = {result.request_id: result.token_ids for result in engine.generate(requests)}
    return [
        TrainingText(request.prompt_ids, written[request.request_id])
        for request in requests
        if len(written[request.request_id]) > 8
    ]


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory) -> dict[str, tuple[Path, DrafterCard]]:
    folder = tmp_path_factory.mktemp("trained")
    return {
        kind: (
            folder / kind,
            train_drafter(kind, SAMPLE_MODEL, texts, folder / kind, TrainingOptions(epochs=2, batch_size=4)),
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_drafter_is_often_right_and_changes_no_text(kind, trained, texts):
    folder, card = trained[kind]
    assert card == DrafterCard.model_validate_json((folder / CARD_NAME).read_text())
    assert not (folder / training.CHECKPOINT_NAME).exists()
    assert card.acceptance[0] > 0.2 and card.tokens_per_step > 1.1
    named = trained_by(**{"models": [folder]} if kind == "small" else {"head": folder})
    settings = DecodingSettings(verifier="greedy", batch_size=4, min_acceptance=0, **named)
    engine, drafter = loaded_engine(settings)
    _, judging = held_back(texts)
    requests = [
        GenerationRequest(str(number), text.prompt_ids, max_new_tokens=24) for number, text in enumerate(judging)
    ]
    results = list(engine.generate(requests, drafter))
    for result in results:
        expected = judging[int(result.request_id)].token_ids
        assert result.token_ids.tolist() == expected.tolist()
    pace = sum(len(r.token_ids) for r in results) / sum(r.num_steps for r in results)
    assert pace == pytest.approx(card.tokens_per_step, rel=0.1)  # the card says how the drafter works


def plain_target() -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(SAMPLE_MODEL, dtype=torch.float32))


def test_the_loss_of_aligned_steps_is_that_of_a_plain_loop(texts):
    """One text, one token at a time: the j-th drafted token depends on the features of the j - 1 before it."""
    target, text = plain_target(), texts[1]
    text = TrainingText(text.prompt_ids, text.token_ids[:7])
    torch.manual_seed(1)
    method = Eagle(target, LlamaConfig(**layer_of(target.model.config)), num_steps=3, distils=True)
    batch = target.batch([text])
    expected = 0.0
    with torch.no_grad():
        steps = plain_steps(method.module, target, batch.features[0], text.token_ids.tolist(), 3)
        for outputs in steps:
            target_features = batch.features[0, 1:]
            p, q = (torch.softmax(target.logits_of(each), -1) for each in (target_features, outputs))
            for place in range(7):
                of_features = torch.nn.functional.smooth_l1_loss(outputs[place], target_features[place])
                best = p[place].topk(NUM_LIKELIEST)
                of_classes = -(p[place] * q[place].log()).sum()
                of_best = -sum(value * q[place, index].log() for value, index in zip(*best, strict=True))
                expected += float(of_features + CLASS_WEIGHT * of_classes + of_best) / 7
    assert float(method.loss(batch)) == pytest.approx(expected, rel=1e-3)


def plain_steps(head: EagleHead, target: Target, features: torch.Tensor, tokens: list[int], num_steps: int):
    """A head's features by step: each position is computed alone, from everything that it would see while drafting."""
    plain = copy.deepcopy(head)
    plain.config._attn_implementation = plain.layer.self_attn.config._attn_implementation = "eager"
    embeddings = target.embed(torch.tensor(tokens))
    inputs_by_step = [features[:-1]]  # by step: the input feature at each position
    for step in range(num_steps):
        outputs = []
        for place in range(len(tokens)):
            # The last `step` positions were drafted: the nearest one in the previous step, and so on.
            inputs = [inputs_by_step[max(0, step - (place - other))][other] for other in range(place + 1)]
            hidden = plain.join(torch.cat((embeddings[: place + 1], torch.stack(inputs)), -1))[None]
            positions = torch.arange(place + 1)[None]
            mask = torch.full((place + 1, place + 1), -torch.inf).triu(1)[None, None]
            out = plain.layer(hidden, attention_mask=mask, position_embeddings=plain.rotary(hidden, positions))
            outputs.append((out if isinstance(out, torch.Tensor) else out[0])[0, -1])
        yield (stacked := torch.stack(outputs))
        inputs_by_step.append(torch.cat((features[:1], stacked[:-1])))


def test_the_loss_of_a_small_model_is_its_definition(texts):
    target, part = plain_target(), texts[:3]
    torch.manual_seed(2)
    method = Small(target, small_config(target.model.config, 0.5))
    values = []
    with torch.no_grad():
        for text in part:
            ids = torch.tensor([[*text.prompt_ids.tolist(), *text.token_ids.tolist()]])
            p, q = (torch.softmax(model(input_ids=ids).logits[0], -1) for model in (target.model, method.module))
            for place in range(len(text.prompt_ids), len(text.prompt_ids) + len(text.token_ids)):
                values.append(-(p[place - 1] * q[place - 1].log()).sum())
    assert float(method.loss(target.batch(part))) == pytest.approx(float(np.mean(values)), rel=1e-4)


def test_an_adapted_target_stays_near_itself_and_is_drafted_for(texts, tmp_path):
    card = train_drafter("medusa2", SAMPLE_MODEL, texts[:24], tmp_path, TrainingOptions(epochs=3))
    assert card.kind == "medusa" and card.target == model_identity(SAMPLE_MODEL, tmp_path / ADAPTER_NAME)
    assert str(SAMPLE_MODEL) not in (tmp_path / ADAPTER_NAME / "adapter_config.json").read_text()
    options = {"verifier": "greedy", "batch_size": 4, "adapter": str(tmp_path / ADAPTER_NAME)}
    engine, drafter = loaded_engine(DecodingSettings(**options, **trained_by(head=tmp_path, width=2)))
    requests = [GenerationRequest(str(i), text.prompt_ids, max_new_tokens=24) for i, text in enumerate(texts[:12])]
    plain = {result.request_id: result.token_ids.tolist() for result in engine.generate(requests)}
    results = list(engine.generate(requests, drafter))
    assert all(result.token_ids.tolist() == plain[result.request_id] for result in results)
    assert sum(result.num_accepted for result in results) > 0
    same = [plain[str(i)] == text.token_ids.tolist() for i, text in enumerate(texts[:12])]
    assert np.mean(same) > 0.5  # compared with texts of the original model


def test_a_killed_training_goes_on_to_the_same_bytes(texts, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)

    class Killed(Exception):
        pass

    def kill_at(step, loss):
        if step == 7:
            raise Killed

    options = TrainingOptions(epochs=2, batch_size=4)
    with pytest.raises(Killed):
        train_drafter("eagle", SAMPLE_MODEL, texts, tmp_path, options, kill_at)
    assert (tmp_path / training.CHECKPOINT_NAME).exists()
    steps, umask = [], os.umask(0o027)
    try:
        train_drafter("eagle", SAMPLE_MODEL, texts, tmp_path, options, lambda step, *_: steps.append(step))
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    assert steps[0] == 7  # before the checkpoint of the seventh step
    whole = trained["eagle"][0]
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    cards = [json.loads((folder / CARD_NAME).read_text()) | {"training_seconds": 0} for folder in (tmp_path, whole)]
    assert cards[0] == cards[1]


def test_too_few_texts_are_refused(texts, tmp_path):
    with pytest.raises(ConfigError, match="5 texts are too few to train a drafter on; expected at least 20"):
        train_drafter("medusa", SAMPLE_MODEL, texts[:5], tmp_path)


def test_a_folder_of_other_files_is_refused_before_a_run_is_read(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has files that do not belong to a drafter"):
        train_on_runs(None, "small", tmp_path, 40, 1)


def test_judgement_counts_chains(texts):
    """Compared with a plain count of the likeliest tokens that are right in a row."""

    class Fixed:
        module = torch.nn.Identity()

        def log_probs_by_depth(self, batch, num_depths):
            """Depth j predicts the right successor if the token before it is even."""
            for depth in range(1, num_depths + 1):
                labels, before = batch.tokens[:, depth:], batch.tokens[:, depth - 1 : -1]
                guess = torch.where(before % 2 == 0, labels, (labels + 1) % 100)
                yield torch.nn.functional.one_hot(guess, target.embed.weight.shape[0]).float().mul(9).log_softmax(-1)

    target = plain_target()
    card = DrafterCard(kind="medusa", target="")
    acceptance = judged(card, Fixed(), target, texts[:12]).acceptance
    num_asked, right = np.zeros(5), np.zeros(5)
    for text in texts[:12]:
        for place in range(len(text.token_ids)):
            for depth in range(1, 6):
                if place + depth >= len(text.token_ids):
                    break
                num_asked[depth - 1] += 1
                if text.token_ids[place + depth - 1] % 2:
                    break
                right[depth - 1] += 1
    assert acceptance == pytest.approx(right / num_asked, abs=1e-3)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> Path:
    """The bundled model with its first layer only: operations on a pretended device are slow."""
    folder = tmp_path_factory.mktemp("shallow") / "model"
    shutil.copytree(SAMPLE_MODEL, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.num_hidden_layers, model.model.layers = 1, model.model.layers[:1]
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["medusa2", "eagle", "small"])
def test_drafters_are_trained_and_draft_on_a_device(kind, texts, shallow, tmp_path, a_device):
    brief = [TrainingText(text.prompt_ids, text.token_ids[:4]) for text in texts[:20]]
    train_drafter(kind, shallow, brief, tmp_path / kind, TrainingOptions(epochs=1, batch_size=10))
    of_kind = {"models": [tmp_path / kind]} if kind == "small" else {"head": tmp_path / kind}
    named = trained_by(*TEXT_SOURCES, **of_kind)
    if kind == "medusa2":
        named["adapter"] = str(tmp_path / kind / ADAPTER_NAME)
    settings = DecodingSettings(verifier="greedy", batch_size=4, min_acceptance=0, attention="torch", **named)
    engine, drafter = loaded_engine(settings, shallow, "cuda")
    requests = [GenerationRequest(str(n), text.prompt_ids, max_new_tokens=4) for n, text in enumerate(texts[:2])]
    drafted, plain = (
        {result.request_id: result.token_ids.tolist() for result in engine.generate(requests, chosen)}
        for chosen in (drafter, None)
    )
    assert drafted == plain


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_a_damaged_one_is_none(tmp_path, monkeypatch):
    path, synced = tmp_path / training.CHECKPOINT_NAME, []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.exists()) or sync(descriptor))
    learning.save_whole({"a": torch.ones(2)}, path, {"step": 3})
    assert synced == [False, True] and learning.read_facts(path) == {"step": 3}
    path.write_bytes(path.read_bytes()[:20])
    assert learning.read_facts(path) == {}
    for name in (f".{path.name}.1-ab.tmp", ".thesis.txt.1-ab.tmp"):  # remains of a killed writer
        (tmp_path / name).touch()
    assert learning.files_in(tmp_path) == {path.name}
    learning.drop_files(tmp_path, path.name)
    assert os.listdir(tmp_path) == [".thesis.txt.1-ab.tmp"]
