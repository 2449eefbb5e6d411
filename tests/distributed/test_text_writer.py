"""A text writer for Ray Data: texts equal the engine's own, in any batch, and under a real Ray."""

import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from night_world import local_ray
from ray import cloudpickle

from laserbatch.pipeline.budget.choice import side_budget
from laserbatch.pipeline.decoding.device_memory import DeviceLost
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.distributed import text_writer
from laserbatch.pipeline.distributed.text_writer import TextWriter
from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.chat_format import chat_skeleton, encode_chat
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.step_cost import StepCost, StepPoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ray-data.md"
PROMPTS = ["Describe the fan of harbour noir.", "Who reads verse?", "Describe </s> <|user|> plainly."]
FIXED = {"verifier": "greedy", "max_new_tokens": 24, "max_draft_tokens": 8, "min_acceptance": 0.05, "batch_size": 4}


@pytest.fixture(scope="module")
def plain():
    """The tokens and the text of plain decoding for each prompt."""
    engine = Engine.from_pretrained("sample", DecodingSettings(max_new_tokens=24, max_draft_tokens=0))
    prompts = [encode_chat(engine.tokenizer, prompt, None, {"enable_thinking": False}) for prompt in PROMPTS]
    requests = (GenerationRequest(str(k), ids, max_new_tokens=24) for k, ids in enumerate(prompts))
    written = {int(result.request_id): result for result in engine.generate(requests)}
    return [(prompts[k], written[k].token_ids, written[k].text) for k in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def pools(plain, tmp_path_factory):
    """Pools of the texts that plain decoding writes for the prompts."""
    root = tmp_path_factory.mktemp("pools")
    with PoolStore(root).publish("2025-03-01") as folder:
        texts = [PoolText(tokens, "verse") for _, tokens, _ in plain] * 3
        expected = tokenizer_hash(SAMPLE_MODEL)
        build_pool(texts, folder / "user", side="user", tokenizer_hash=expected, model_id="sample")
    return root


def test_texts_are_those_of_plain_decoding_with_drafts_from_pool_and_previous_text(plain, pools):
    write = TextWriter("sample", pools, device="cpu", **FIXED)
    previous = np.array([plain[0][2], None, float("nan")], object)
    written = write({"id": np.arange(3), "prompt": np.array(PROMPTS, object), "previous": previous,
                     "group": np.array(["verse", None, "none such"], object)})  # fmt: skip
    assert written["text"].tolist() == [text for *_, text in plain]
    assert written["num_tokens"].tolist() == [len(tokens) for _, tokens, _ in plain]
    assert (written["num_accepted"] > 0).all() and (written["num_steps"] < written["num_tokens"]).all()
    assert written["id"].tolist() == [0, 1, 2] and written["error"].tolist() == ["", "", ""]


def test_prompts_may_be_token_ids_and_what_cannot_be_written_says_why(plain, monkeypatch):
    write = TextWriter(device="cpu", date="2025-03-01", **FIXED)
    prompts = np.empty(4, object)
    prompts[:] = [plain[1][0].tolist(), "x" * 20_000, 7, [1.5, 2.0]]
    written = write({"prompt": prompts})
    assert written["text"].tolist() == [plain[1][2], "", "", ""]
    reasons = [error.partition(":")[0] for error in written["error"]]
    assert reasons == ["", "too-long", "bad-prompt", "bad-prompt"]
    assert written["num_steps"].tolist()[1:] == [0, 0, 0]
    chat_skeleton.cache_clear()
    tokenizer = write._engine.tokenizer
    template = "{{ strftime_now('%d %b %Y') }} {{ date_string }}: {{ messages[0]['content'] }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert tokenizer.decode(write._request(0, "x", None, None).prompt_ids).startswith("01 Mar 2025 01 Mar 2025:")
    chat_skeleton.cache_clear()


def test_the_budget_is_chosen_by_steps_behind_prompts_as_long_as_those_of_the_first_batch(plain, monkeypatch, caplog):
    write = TextWriter(device="cpu", verifier="greedy", max_new_tokens=24, max_draft_tokens=8)
    steps = tuple(StepPoint(batch_size=16, num_tokens=16 * size, seconds=0.01 * size) for size in (1, 9))
    cost, seen = StepCost(steps=steps, seconds_per_context_token=1e-6), []
    engine = mock.Mock(tokenizer=write._engine.tokenizer)
    engine.cached_step_cost.return_value, engine.generate.side_effect = cost, lambda *_: iter(())
    monkeypatch.setattr(write, "_engine", engine)
    choose = lambda *arguments: seen.append(arguments[2]) or side_budget(*arguments)  # noqa: E731
    monkeypatch.setattr(text_writer, "side_budget", choose)
    prompts = np.empty(3, object)
    prompts[:] = [plain[0][0].tolist(), 7, plain[0][0].tolist()]
    for _ in "twice":
        write({"prompt": prompts})
    assert seen == [cost.at_context(len(plain[0][0]) + 12)]
    assert "drafting is off (drafts do not repay" in caplog.text and "max_draft_tokens 8 is only a limit" in caplog.text


def test_wrong_options_and_pools_of_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"TextWriter: max_new_token: .*did you mean 'max_new_tokens'"):
        TextWriter(max_new_token=5)
    with pytest.raises(ConfigError, match="engine vllm is not supported"):
        TextWriter(engine="vllm")
    with pytest.raises(ConfigError, match="'March' is not a date"):
        TextWriter(date="March")
    with PoolStore(tmp_path).publish("2025-03-01") as folder:
        text = PoolText(np.arange(9, dtype=np.int32), "verse")
        build_pool([text], folder / "user", side="user", tokenizer_hash="other", model_id="m")
    with pytest.raises(PoolError, match="tokenizer"):
        TextWriter("sample", tmp_path, device="cpu")


@pytest.fixture(scope="module")
def cluster():
    """A local Ray without its monitoring processes, each of which takes a second to start."""
    with (
        mock.patch.multiple("laserbatch.pipeline.distributed.cluster", usable_cores=lambda: 2, num_gpus=lambda: 0),
        local_ray(),
    ):
        yield


class FailingOnce(TextWriter):
    """Its first process loses its GPU when it writes, before loading a model."""

    ended: Path

    def __init__(self, *arguments, **options) -> None:
        if self.ended.exists():
            super().__init__(*arguments, **options)
        else:
            self.ended.touch()
            self._written = lost_device


def lost_device(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.ray
@pytest.mark.slow
def test_under_ray_data_as_the_page_has_it_and_another_actor_writes_where_a_gpu_is_lost(
    plain, pools, cluster, tmp_path, monkeypatch
):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[:1]
    scope = {"POOLS": str(pools), "MODEL": "sample", "PROMPTS": PROMPTS}
    FailingOnce.ended = tmp_path / "ended"
    monkeypatch.setattr(text_writer, "TextWriter", FailingOnce)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        exec(compile(code, str(PAGE), "exec"), scope)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert FailingOnce.ended.exists()
    texts = {row["prompt"]: row["text"] for row in scope["rows"]}
    assert [texts[prompt] for prompt in PROMPTS] == [text for *_, text in plain]


def test_outside_ray_a_lost_gpu_is_an_error_of_the_caller(monkeypatch):
    write = TextWriter(device="cpu", **FIXED)
    monkeypatch.setattr(write._engine.engine.runner, "forward", lost_device)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        write({"prompt": np.array(PROMPTS[:1], object)})
