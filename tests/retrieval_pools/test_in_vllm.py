"""vLLM with our proposer, in its environment (`make test-vllm`): it writes its greedy texts, and accepts drafts."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.integrations.vllm import SETTINGS_VARIABLE, read_step_cost
from laserbatch.retrieval_pools.integrations.vllm_steps import speculative_config
from laserbatch.retrieval_pools.routing.route_table import write_routes

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` does it", allow_module_level=True)

ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
ON_A_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
# vLLM's own drafter counts rejections, and is read within this process, so the engine runs in it, too.
WRITE = """
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
model, prompts, speculative, out = json.loads(sys.argv[1])
llm = LLM(model, **json.loads(sys.argv[2]), speculative_config=speculative)
sampling = SamplingParams(temperature=0, max_tokens=120, ignore_eos=False)
found = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
output = {"texts": [one.outputs[0].token_ids for one in found]}
if speculative is not None:
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    output |= {name: getattr(drafter, name) for name in ("num_failed", "num_drafted", "num_accepted", "num_started")}
Path(out).write_text(json.dumps(output))
"""


def run(*arguments):
    environment = os.environ | ON_A_CPU
    ran = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def written(folder, model, prompts, speculative=None):
    """The output of vLLM in a separate process."""
    out = folder / "output.json"
    run("-c", WRITE, json.dumps([str(model), prompts, speculative, str(out)]), json.dumps(ENGINE))
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def world(shared_models, tmp_path_factory):
    """A model, prompts, their plain texts, a pool of half of these and of beginnings of others, and its settings."""
    folder, model = tmp_path_factory.mktemp("vllm"), shared_models / "bench-target"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    questions = [f'Describe the book "{title}" in one or two sentences.' for title in
             ("The Silent Harbour", "Dune", "Emma", "A Winter Tale", "The Hobbit", "Silas Marner")]  # fmt: skip
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in questions
    ]
    plain = written(folder, model, prompts)["texts"]
    with PoolStore(folder / "pools").publish("v1") as version:
        rows = [PoolText(np.array(text[:-1], np.int32), "books") for text in plain[:3]]
        build_pool(rows, version / "user", side="user", tokenizer_hash=tokenizer_hash(model), model_id="m")
    write_routes(folder / "routes.parquet", [(np.array(prompts[5]), "books", np.array(plain[5][:-1]))])
    settings = {"pools": "pools", "side": "user", "routes": "routes.parquet", "min_acceptance": 0.01}
    (folder / "drafts.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SETTINGS_VARIABLE, str(folder / "drafts.json"))
        yield folder, model, prompts, plain


def test_texts_are_those_of_plain_decoding_and_drafts_are_accepted(world):
    folder, model, prompts, plain = world
    output = written(folder, model, prompts, speculative_config(model, 6))
    assert output["texts"] == plain
    assert output["num_failed"] == 0
    assert output["num_started"] == len(prompts)  # more than fit in the batch, so rows are reused
    own = sum(len(text) for text in (*plain[:3], plain[5]))  # texts that the pool or the routes have
    assert output["num_accepted"] > own / 2
    assert output["num_drafted"] > output["num_accepted"]


def test_what_is_wrong_is_said_before_the_engine_loads(world, tmp_path, monkeypatch):
    _, model, _, _ = world
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(PoolError, match=r"^\S+ was built with the tokenizer"):
        speculative_config(other)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "gone.json"))
    with pytest.raises(PoolError, match="does not say what to draft from"):
        speculative_config(model)


def test_the_cost_of_steps_is_measured_and_chooses(world):
    folder, model, prompts, plain = world
    cost = folder / "cost.json"
    run("-m", "laserbatch.retrieval_pools.integrations.vllm_steps", str(model), "--out", str(cost), "--batch", "1", "4",
        "--tokens", "6", "--engine", json.dumps(ENGINE))  # fmt: skip
    seconds = read_step_cost(cost).seconds_between(4, np.array([0, 4, 24]))
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all()
    settings = json.loads((folder / "drafts.json").read_text())
    (folder / "drafts.json").write_text(json.dumps(settings | {"step_cost": "cost.json"}))
    assert written(folder, model, prompts, speculative_config(model, 6))["texts"] == plain


def test_the_page_can_be_followed_as_it_stands(world, tmp_path):
    folder, model, _, _ = world
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "pools").symlink_to(folder / "pools")
    environment = os.environ | ON_A_CPU | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    programs = {"python": [sys.executable, "-c"], "sh": ["bash", "-ec"]}
    blocks = re.findall(r"^```(json|python|sh) ?(\S*)\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert [language for language, _, _ in blocks] == ["json", "python", "sh", "python"]
    for language, name, block in blocks:
        block = block.replace("MODEL", str(model))
        if language == "json":
            (tmp_path / name).write_text(block)
            continue
        ran = subprocess.run(
            [*programs[language], block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr[-3000:]


def test_nights_on_vllm_write_the_texts_of_our_engine(tmp_path):
    """In float32, except for near-ties in at most one of twenty texts. The second night drafts."""
    pytest.importorskip("ray")
    from laserbatch.pipeline.sample.world import write_sample_world

    write_sample_world(tmp_path / "tables", num_users=16, num_items=24)
    engines = {"vllm": {"engine": "vllm", "vllm": {"enforce_eager": True}}, "ours": {"verifier": "greedy"}}
    nights = {}
    for name, decoding in engines.items():
        settings = {
            "workspace": name, "tables": {"path": "tables"}, "decoding": decoding | {"batch_size": 8},
            "night": {"train_ctr": False}, "cluster": {"num_workers": 1},
        }  # fmt: skip
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(settings))
        for date in ("2025-03-01", "2025-03-05"):
            command = [Path(sys.executable).with_name("laserbatch"), "nightly", "--config", config, "--date", date]
            environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
            ran = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, ran.stderr[-3000:]
            result = json.loads(ran.stdout)
            rows = [
                row for side in ("user", "item")
                for row in pq.read_table(tmp_path / name / "runs" / result["run_id"] / "knowledge" / side).to_pylist()
            ]  # fmt: skip
            nights[name, date] = result, {(row["side"], row["entity_id"]): row for row in rows}
    for date in ("2025-03-01", "2025-03-05"):
        (result, by_vllm), (_, own) = nights["vllm", date], nights["ours", date]
        assert by_vllm.keys() == own.keys()
        num_other = sum(row["text"] != own[key]["text"] for key, row in by_vllm.items())
        print(f"{date}: {num_other} of {len(by_vllm)} texts differ")
        assert num_other <= len(by_vllm) / 20
        assert {row["finish_reason"] for row in by_vllm.values()} == {row["finish_reason"] for row in own.values()}
        provenance = json.loads(next(iter(by_vllm.values()))["decoding_json"])
        assert provenance["verifier"] == "greedy" and provenance["engine"] == "vllm"
    result, rows = nights["vllm", "2025-03-05"]
    assert result["users"]["num_generated"] > 0 and result["users"]["tokens_per_step"] > 1.5, "drafts of night 1"
    for row in rows.values():
        assert (
            len(row["token_ids"]) <= row["num_steps"] + row["num_accepted"]
            and row["num_drafted"] >= row["num_accepted"]
        )


WITH_ADAPTER = """
import json, sys
from pathlib import Path
import numpy as np
from laserbatch.pipeline.decoding.sequence import GenerationRequest
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.engines.vllm import VllmEngine
model, adapter, prompts, folder = json.loads(sys.argv[1])
arguments = {"enforce_eager": True, "max_model_len": 512}
decoding = DecodingSettings(engine="vllm", adapter=adapter, verifier="greedy", dtype="float32", vllm=arguments)
engine = VllmEngine(Path(model), decoding, "cpu", 1, 1, {}, Path(folder))
requests = [GenerationRequest(str(number), np.array(ids), None, None, 40) for number, ids in enumerate(prompts)]
texts = {one.request_id: one.token_ids.tolist() for one in engine.generate("item", requests, decoding)}
(Path(folder) / "texts.json").write_text(json.dumps([engine.model.id, [texts[one.request_id] for one in requests]]))
"""


def test_an_adapter_writes_the_texts_of_the_model_that_it_is_merged_into(world, tmp_path):
    pytest.importorskip("ray")
    import torch
    from safetensors.torch import load_file, save_file

    _, model, prompts, plain = world
    weights = load_file(model / "model.safetensors")
    rank, alpha, drawn = 4, 8, torch.Generator().manual_seed(0)
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    merged.mkdir()
    adapter.mkdir()
    tensors = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        num_out, num_in = weights[name].shape
        down = torch.randn(rank, num_in, generator=drawn) / num_in**0.5
        up = torch.randn(num_out, rank, generator=drawn) * 0.3
        weights[name] = weights[name].float() + alpha / rank * up @ down
        place = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    for path in model.iterdir():
        if path.name != "model.safetensors":
            (merged / path.name).symlink_to(path)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(facts | {"bias": "none", "task_type": "CAUSAL_LM"}))

    texts = {}
    for name, arguments in {"merged": [str(merged), None], "adapter": [str(model), str(adapter)]}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        run("-c", WITH_ADAPTER, json.dumps([*arguments, prompts, str(tmp_path / name)]))
        texts[name] = json.loads((tmp_path / name / "texts.json").read_text())
    assert texts["adapter"][1] == texts["merged"][1]
    assert texts["adapter"][1] != [text[:40] for text in plain]
    assert texts["adapter"][0] != texts["merged"][0] and "adapter" in texts["adapter"][0]
