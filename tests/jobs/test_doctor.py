"""`laserbatch doctor`: its findings in sound and faulty set-ups, and its advice."""

import json
import re
import shutil
import subprocess
from collections import namedtuple

import pytest
import torch
from night_world import make_world, run_here, write_config
from parrots import parrot
from trained_drafters import trained

from laserbatch.jobs.checks import machine, model, trial
from laserbatch.jobs.commands import doctor
from laserbatch.jobs.settings import load_settings
from laserbatch.jobs.stages import inputs
from laserbatch.pipeline import gpus as gpus_module
from laserbatch.pipeline.decoding.model import compute_type, cuda_graphs
from laserbatch.pipeline.decoding.model.folder import (
    SAMPLE_MODEL,
    is_mixture_of_experts,
    load_tokenizer,
    quantization_of,
)

GB = 10**9


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def findings(config, *checks):
    return {finding.about: finding for finding in doctor.examine(load_settings(config), checks or doctor.CHECKS)}


def test_a_machine_that_is_well_has_no_fault_and_nothing_is_left(world, capfd):
    config = str(write_config(world))
    before = sorted(world.rglob("*"))
    done = run_here(capfd, "doctor", "--config", config, "--no-ray", "--json")
    report = json.loads(done.stdout)
    faults = [finding for finding in report["findings"] if finding["level"] == "fault"]
    assert (done.returncode, report["num_faults"], faults) == (0, 0, [])
    abouts = {finding["about"] for finding in report["findings"]}
    assert abouts >= {"versions", "GPU", "memory", "model", "disk", "workspace", "encoder", "pools", "tables"}
    assert sorted(world.rglob("*")) == before


def test_every_fault_is_told_with_how_to_mend_it_and_the_code_is_3(world, tmp_path, capfd):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("no workspace")
    config = write_config(
        world, "broken.yaml", workspace=str(tmp_path / "notes"), tables={"path": "nowhere"},
        decoding={"model": "no-model"} | trained("pool", models=["no-small"]), encoding={"encoder": "no-encoder"},
        extensions={"recommending": {"model": "no-recommender"}},
    )  # fmt: skip
    done = run_here(capfd, "doctor", "--config", str(config), "--no-ray")
    assert done.returncode == 3
    lines = [line for line in done.stdout.splitlines() if line.startswith("fault")]
    for about, advice in (
        ("model: there is no model folder", "give the path of a folder"),
        ("no-small, which is not there", "Correct the path"),
        ("workspace: ", "Give a new or empty folder"),
        ("encoder: encoder folder", "expected a folder"),
        ("tables: ", "nowhere"),
        ("extensions: ", "`laserbatch recommender train"),
    ):
        assert [line for line in lines if about in line and advice in line], (about, lines)


def test_prompts_that_are_all_too_long_are_a_fault(world):
    config = write_config(world, "short.yaml", knowledge={"max_prompt_tokens": 16})
    found = findings(config, "machine.check_tables")
    assert found["tables"].level == "ok" and found["prompts"].level == "fault"
    assert "no prompt (too-long (" in found["prompts"].found and "Raise knowledge.max_prompt" in found["prompts"].hint


@pytest.fixture
def sample_copy(tmp_path):
    return shutil.copytree(SAMPLE_MODEL, tmp_path / "model")


def model_faults(world, folder):
    settings = load_settings(write_config(world, "model.yaml", decoding={"model": str(folder)}))
    results = doctor.examine(settings, ["model.check_model"])
    return [finding.found for finding in results if finding.about == "model" and finding.level == "fault"]


def test_weights_that_the_configuration_does_not_describe_are_a_fault(world, sample_copy):
    assert model_faults(world, sample_copy) == []
    config = json.loads((sample_copy / "config.json").read_text())
    (sample_copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    (fault,) = model_faults(world, sample_copy)
    assert "does not describe: model.layers.3.input_layernorm.weight" in fault and "correct config.json" in fault


def test_a_folder_without_configuration_is_one_fault(world, sample_copy):
    (sample_copy / "config.json").unlink()
    settings = load_settings(write_config(world, "model.yaml", decoding={"model": str(sample_copy)}))
    (finding,) = doctor.examine(settings, ["model.check_model", "model.check_dtype"])
    assert "has no config.json" in finding.found


def test_added_tokens_without_rows_in_the_embedding_are_a_fault(world, sample_copy):
    tokenizer = load_tokenizer(sample_copy)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|unused|>"]})
    tokenizer.save_pretrained(sample_copy)
    settings = load_settings(write_config(world, "model.yaml", decoding={"model": str(sample_copy)}))
    levels = {result.found: result.level for result in doctor.examine(settings, ["model.check_model"])}
    assert [level for result, level in levels.items() if "'<|unused|>'" in result] == ["warning"]
    tokenizer.add_tokens(["Heat", "crime"])
    tokenizer.save_pretrained(sample_copy)
    (fault,) = model_faults(world, sample_copy)
    assert "without a row in the embedding" in fault and "'Heat' (" in fault and "'crime'" in fault


@pytest.mark.parametrize(
    ("script", "end", "level", "expected"),
    [
        (["Red", "."], "<|end|>", "ok", "answered 'Red.', in 2 tokens, and ended with '<|end|>'"),
        (["Red", "<|end|>", "<|user|>", " Why?"], "<|pad|>", "warning", "ended at '<|end|>', a role mark or end token"),
        ([f" a{n}" for n in range(trial.MAX_ANSWER_TOKENS + 1)], "<|end|>", "warning", "no end token came"),
    ],
)
def test_whether_an_end_token_comes_is_tried_with_a_short_question(world, tmp_path, script, end, level, expected):
    folder = parrot(tmp_path / "model", script, end=end)
    config = write_config(world, "parrot.yaml", decoding={"model": str(folder)})
    answer = findings(config, "trial.check_answer")["answer"]
    assert answer.level == level and expected in answer.found
    assert answer.hint is None or "eos_token_id in" in answer.hint


def about_model(capfd, config, model_dir, *options) -> dict[str, list[dict]]:
    """The findings of `doctor --model`, grouped by subject."""
    done = run_here(capfd, "doctor", "--config", str(config), "--model", str(model_dir), "--json", *options)
    assert done.returncode == 0, done.stderr
    by_subject: dict[str, list[dict]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        by_subject.setdefault(finding["about"], []).append(finding)
    return by_subject


def test_a_model_is_measured_before_it_is_configured(world, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trial, "SPEED_S", 0.1)
    monkeypatch.setattr(trial, "NUM_TEXTS", 4)
    config = write_config(world, "measured.yaml", decoding={"max_new_tokens": 80})
    shutil.copytree(SAMPLE_MODEL, tmp_path / "copy")
    findings = about_model(capfd, config, tmp_path / "copy")
    assert findings.keys() >= {"dtype", "memory", "architecture", "answer", "speed", "form", "hours"}
    assert "GPU" not in findings, "the model alone is looked at"
    assert findings["architecture"][0]["found"] == "LlamaForCausalLM, computed by fused layers"
    assert re.search(r"\d tokens/s at batch 1 and .* at batch 4 in plain decoding", findings["speed"][0]["found"])
    message = r"writes \d+ users and \d+ items, \d+ tokens each: about .* at batch \d+, without drafts"
    assert re.search(message, findings["hours"][0]["found"])
    (of_items,) = (result for result in findings["form"] if "item texts" in result["found"])
    assert of_items["level"] == "ok" and re.search(r"kar_item@\d+: 2 of 2", of_items["found"])


def test_texts_without_the_form_that_is_asked_for_are_counted_by_their_reasons(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trial, "SPEED_S", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laserbatch.yaml").write_text("decoding: {guided: off}")
    folder = parrot(tmp_path / "model", ["Red", "."])
    findings = about_model(capfd, "laserbatch.yaml", folder)
    assert [result["level"] for result in findings["form"]] == ["warning", "ok"]  # items accept any text
    assert "hours" not in findings, "there are no tables"
    assert findings["form"][0]["found"].endswith("0 of 8 user texts have the requested form; rejected: unparsable (8)")
    assert "stops if more than 50 % of a side's first texts are rejected" in findings["form"][0]["hint"]
    assert "if more than 30 % of a side's texts are, or 5 % of its entities" in findings["form"][0]["hint"]
    assert "with prompts of the sample world" in findings["speed"][0]["found"]
    monkeypatch.setattr(trial, "TEXTS_S", 0.0)
    findings = about_model(capfd, "laserbatch.yaml", folder)
    assert "too short" in findings["speed"][0]["found"] and "none of 8 user texts ended" in findings["form"][0]["found"]


def test_a_folder_that_cannot_be_locked_is_told(world, monkeypatch):
    def refuse(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(machine.fcntl, "flock", refuse)
    result = findings(write_config(world), "machine.check_workspace")["workspace"]
    assert result.level == "fault" and "Operation not supported" in result.found and "NFS 4" in result.hint


def test_a_full_disk_and_versions_of_another_time_are_told(world, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage(10**12, 10**12, 10**6))
    result = findings(write_config(world), "machine.check_workspace")["disk"]
    assert (result.level, result.found[:6]) == ("fault", "0.0 GB") and "pools gc" in result.hint
    monkeypatch.setattr(machine, "version", lambda name: "0.0.1" if name == "ray" else "99")
    faults = [finding.found for finding in machine.check_versions(None) if finding.level == "fault"]
    assert any(fault.startswith("ray is 0.0.1; ray>=") for fault in faults)


@pytest.mark.parametrize(
    ("is_installed", "returncode", "level", "expected"),
    [
        (False, 0, "fault", "not installed"),
        (True, 1, "fault", "cannot be imported: ImportError: libcudart"),
        (True, 0, "ok", "vLLM 0.20.2 can be imported"),
    ],
)
def test_vllm_that_is_not_installed_or_cannot_be_imported_is_told(
    world, monkeypatch, is_installed, returncode, level, expected
):
    done = subprocess.CompletedProcess((), returncode, "0.20.2\n", "Traceback\nImportError: libcudart.so.12\n")
    monkeypatch.setattr(inputs, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(machine.subprocess, "run", lambda *arguments, **options: done)
    result = findings(write_config(world, "vllm.yaml", decoding={"engine": "vllm"}), "machine.check_engine")["engine"]
    assert result.level == level and expected in result.found


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two pretended GPUs; a test may change their memory and let them fail."""
    facts = {"free": 84 * GB, "total": 85 * GB, "capability": (9, 0), "error": None, "number": 2}
    driver = tmp_path / "nvidiactl"
    driver.touch()

    def add(tensor, other):
        if facts["error"]:
            raise RuntimeError(facts["error"])
        return tensor

    properties = namedtuple("properties", "total_memory")
    make = torch.ones
    monkeypatch.setattr(gpus_module, "GPU_DRIVERS", (str(driver),))
    monkeypatch.setattr(torch, "ones", lambda size, device: make(size))
    monkeypatch.setattr(torch.Tensor, "add", add)
    for name, value in {
        "device_count": lambda: facts["number"],
        "mem_get_info": lambda device=None: (facts["free"], facts["total"]),
        "get_device_name": lambda device=None: "NVIDIA H100",
        "get_device_capability": lambda device=None: facts["capability"],
        "get_device_properties": lambda device: properties(facts["total"]),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return facts


def of_gpu(config, *checks):
    checks = checks or (
        "machine.check_gpu",
        "machine.check_kernels",
        "model.check_dtype",
        "model.check_model",
    )
    return doctor.examine(load_settings(config), list(checks))


def levels(results):
    return {(finding.about, finding.level) for finding in results}


def test_a_machine_with_gpus_has_no_fault(world, gpus):
    pytest.importorskip("triton")
    results = of_gpu(write_config(world))
    assert {level for _, level in levels(results)} == {"ok"}
    text = "\n".join(finding.found for finding in results)
    assert text.count("NVIDIA H100, 84.0 of 85.0 GB free") == 2 and "driver" in text
    assert (
        "Triton's kernel, small steps as CUDA graphs" in text and "bfloat16: the weights are stored in bfloat16" in text
    )
    assert "laserbatch's own engine fits this model and machine: the model fits one GPU" in text


def test_a_batch_that_is_small_for_a_gpu_is_warned_of(world, gpus):
    results = of_gpu(write_config(world, decoding={"batch_size": 16}), "machine.check_batch")
    assert levels(results) == {("batch", "warning")} and "batch_size is 16" in results[0].found
    assert of_gpu(write_config(world, decoding={"batch_size": 64}), "machine.check_batch") == []
    gpus["number"] = 0
    assert of_gpu(write_config(world, decoding={"batch_size": 16}), "machine.check_batch") == []


def test_gpu_that_other_processes_use_is_warned_of(world, gpus):
    gpus["free"] = 60 * GB
    results = of_gpu(write_config(world), "machine.check_gpu")
    assert ("GPU", "warning") in levels(results) and "nvidia-smi" in results[-1].hint


def test_gpu_that_cannot_compute_is_a_fault_and_the_next_is_examined(world, gpus, monkeypatch):
    def refuse(device):
        raise RuntimeError("The NVIDIA driver is too old")

    gpus["error"] = "CUDA error: no kernel image is available for execution on the device\nCompile with ..."
    faults = [finding for finding in of_gpu(write_config(world), "machine.check_gpu") if finding.level == "fault"]
    assert [finding.found[:20] for finding in faults] == ["GPU 0 cannot compute", "GPU 1 cannot compute"]
    assert "Compile with" not in faults[0].found
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    results = of_gpu(write_config(world), "model.check_model")
    (fault,) = [result for result in results if result.level == "fault"]
    assert "driver is too old" in fault.found and fault.hint is None
    gpus["number"] = 0
    assert "torch sees no GPU" in of_gpu(write_config(world), "machine.check_gpu")[-1].found


def test_doctor_names_attention_and_dtype_of_a_gpu(world, gpus, monkeypatch):
    pytest.importorskip("triton")
    checks = "machine.check_kernels", "model.check_dtype"
    with monkeypatch.context() as patched:
        patched.setattr(cuda_graphs, "kernel_for", lambda choice, device: None)
        results = of_gpu(write_config(world, "t.yaml", decoding={"dtype": "bfloat16"}), *checks)
    assert [(finding.about, finding.level) for finding in results] == [("attention", "warning"), ("dtype", "ok")]
    results = of_gpu(write_config(world, "f.yaml", decoding={"dtype": "float32"}), *checks)
    assert results[-1].level == "warning" and "Set decoding.dtype: bfloat16" in results[-1].hint
    gpus["capability"] = (7, 5)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    results = of_gpu(write_config(world, "b.yaml", decoding={"dtype": "bfloat16"}), *checks)
    assert [(finding.about, finding.level) for finding in results] == [("attention", "warning"), ("dtype", "warning")]

    def broken(choice, device):
        raise ImportError("libtriton.so: undefined symbol")

    monkeypatch.setattr(cuda_graphs, "kernel_for", broken)
    results = of_gpu(write_config(world), *checks)
    assert "undefined symbol" in results[0].found and "or remove Triton" in results[0].hint


@pytest.mark.parametrize(
    ("is_native", "decoding", "level", "says"),
    [
        (True, {}, "ok", "bfloat16: the weights are stored in bfloat16, and this processor multiplies bfloat16"),
        (True, {"dtype": "float32"}, "warning", "float32: decoding.dtype; bfloat16 is faster on this processor"),
        (False, {}, "ok", "float32: the weights are stored in bfloat16, and this processor does not multiply it"),
        (False, {"dtype": "bfloat16"}, "fault", "this processor has no instructions for it"),
    ],
)
def test_doctor_names_the_dtype_of_a_cpu_and_its_reason(world, gpus, monkeypatch, is_native, decoding, level, says):
    gpus["number"] = 0
    monkeypatch.setattr(compute_type, "multiplies_bfloat16", lambda: is_native)
    (result,) = of_gpu(write_config(world, "cpu.yaml", decoding=decoding), "model.check_dtype")
    assert (result.about, result.level) == ("dtype", level) and says in result.found


@pytest.mark.parametrize(
    ("changed", "decoding", "level", "advice"),
    [
        ({}, {}, "ok", None),
        ({"total": 10**6, "free": 10**6}, {}, "warning", "Install vLLM and set decoding.engine: vllm with dec"),
        ({}, {"verifier": "greedy"}, "ok", None),
        ({}, {"engine": "vllm"}, "warning", "Set decoding.engine: laserbatch"),
        ({"total": 3 * 10**6}, {"engine": "vllm"}, "warning", "Set decoding.engine: vllm with decoding.vllm: {tensor_"),
        ({"number": 0}, {"engine": "vllm"}, "warning", "Set decoding.engine: laserbatch"),
        ({"number": 0}, {"verifier": "greedy"}, "ok", None),
    ],
)
def test_the_engine_that_fits_is_advised_and_another_is_no_fault(
    world, gpus, monkeypatch, changed, decoding, level, advice
):
    gpus |= changed
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    config = write_config(world, "fit.yaml", decoding=decoding)
    result = findings(config, "model.check_model")["fitting engine"]
    assert result.level == level
    assert result.hint is None if advice is None else advice in result.hint


def test_nothing_is_said_of_the_machines_of_a_cluster(world, monkeypatch):
    monkeypatch.setattr(gpus_module, "GPU_DRIVERS", ())
    config = write_config(world, "cluster.yaml", cluster={"ray_address": "auto"})
    results = findings(config, "machine.check_gpu", "model.check_model")
    assert "not known here" in results["fitting engine"].found and "Ray cluster" in results["GPU"].found


def test_experts_and_quantisation_of_a_model_are_read_from_its_configuration():
    assert is_mixture_of_experts({"num_local_experts": 8})
    assert is_mixture_of_experts({"text_config": {"num_experts": 64}})
    assert not is_mixture_of_experts({"num_experts": 0, "n_routed_experts": None, "num_experts_per_tok": 2})
    assert quantization_of({"quantization_config": {"quant_method": "fp8"}}) == "fp8" and quantization_of({}) is None


@pytest.mark.parametrize(
    ("kernel_module", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build\n", "535.183.01"),
        ("", None),
    ],
)
def test_version_of_the_driver(tmp_path, kernel_module, expected):
    (tmp_path / "version").write_text(kernel_module)
    assert gpus_module.driver_version(tmp_path / "version") == expected
    assert gpus_module.driver_version(tmp_path / "none") is None
