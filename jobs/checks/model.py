"""Checks from its files whether the configured model fits this machine and engine; the model is not loaded."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import torch

from laserbatch.jobs.checks.result import CheckResult
from laserbatch.jobs.formatting import counted, format_counts
from laserbatch.jobs.settings import Settings
from laserbatch.jobs.stages.inputs import NEEDS_A_MODEL, NEEDS_A_TOKENIZER, needs_a_model, writable_folder
from laserbatch.pipeline.decoding.device_memory import host_memory, num_stored_values
from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
from laserbatch.pipeline.decoding.model.described_weights import require_described_weights, require_token_rows
from laserbatch.pipeline.decoding.model.folder import (
    find_weights,
    is_mixture_of_experts,
    load_tokenizer,
    quantization_of,
    read_config,
    stored_dtype,
)
from laserbatch.pipeline.decoding.plugins import drafter_plugin
from laserbatch.pipeline.distributed.cluster import Node, worker_layout
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.engine_choice import choose_engine, vllm_advice
from laserbatch.pipeline.errors import ModelError
from laserbatch.pipeline.gpus import num_gpus
from laserbatch.pipeline.knowledge.histories import labels_of
from laserbatch.pipeline.knowledge.prompts import count_refused, render_shown
from laserbatch.pipeline.knowledge.questions import SideQuestions
from laserbatch.pipeline.plugins import path_fields
from laserbatch.pipeline.sides import SIDES
from laserbatch.pipeline.tables.read import read_tables

NUM_PROMPTS = 64  # of each side that are tried
NO_CHAT_TEMPLATE = (
    "its tokenizer has no chat template: prompts go in as plain text",
    "Most instruction-tuned models have one: use the -Instruct model, or copy its chat_template",
)

BORROWED = (
    "the server's; the bundled tokenizer counts the tokens of prompts, about twice as many as the server (more for "
    "non-Latin scripts). To count as the server does, set decoding.model to a folder with its tokenizer"
)


def check_dtype(settings: Settings) -> Iterator[CheckResult]:
    """Check in which dtype the model computes here, and why."""
    if settings.decoding.engine == "endpoint":
        return
    find_weights(settings.model_dir)  # raises if this is not a model folder
    decoding, has_gpu = settings.decoding, num_gpus() > 0
    stored, quantization = stored_dtype(settings.model_dir), quantization_of(read_config(settings.model_dir))
    choice = choose_dtype(decoding.dtype, "cuda" if has_gpu else "cpu", stored, quantization)
    dtype = stored if choice.name == "auto" else choice.name
    text, hint = f"{dtype}: {choice.reason}", None
    if has_gpu:
        if dtype == "float32":
            text += "; it takes twice the memory of bfloat16"
            hint = "Set decoding.dtype: bfloat16, unless texts must equal those of a CPU"
        elif dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0):
            text += "; this GPU has no fast bfloat16 products"
            hint = "Use a GPU of compute capability 8.0 or above, or decoding.dtype: float32"
    elif decoding.dtype == "float32" and choose_dtype("auto", "cpu", stored, quantization).name == "bfloat16":
        text += "; bfloat16 is faster on this processor"
        hint = "Set decoding.dtype: auto"
    yield CheckResult("dtype", "warning" if hint else "ok", text, hint)


def fitting_engine(settings: Settings, num_values: int, file_bytes: int) -> CheckResult:
    """The engine that fits the configured model and this machine; a warning if another one is configured."""
    decoding, config, number = settings.decoding, read_config(settings.model_dir), num_gpus()
    if not number and settings.cluster.ray_address is not None:
        text = "not known here: run `laserbatch doctor` on a node of the Ray cluster that writes texts"
        return CheckResult("fitting engine", "ok", text)
    quantization = quantization_of(config)
    bytes_per_value = {"float32": 4, "bfloat16": 2}.get(decoding.dtype)
    choice = choose_engine(
        num_parameters=num_values,
        weights_bytes=num_values * bytes_per_value if bytes_per_value and not quantization else file_bytes,
        quantization=quantization,
        is_mixture_of_experts=is_mixture_of_experts(config),
        device_bytes=min((torch.cuda.get_device_properties(i).total_memory for i in range(number)), default=0),
        num_gpus=number,
    )
    name = {"laserbatch": "laserbatch's own engine", "vllm": "vLLM"}[choice.engine]
    text = f"{name} fits this model and machine: {choice.reason}"
    if decoding.engine == choice.engine and decoding.gpus_a_worker >= choice.tensor_parallel_size:
        return CheckResult("fitting engine", "ok", text)
    hint = "set decoding.engine: laserbatch"
    if choice.engine == "vllm":
        hint = "" if decoding.engine == "vllm" or find_spec("vllm") else "install vLLM and "
        refused = (name for name in ("temperature", "plugin_drafters") if getattr(decoding, name))
        hint += vllm_advice(choice.tensor_parallel_size, [f"decoding.{name}" for name in refused])
        hint += "" if decoding.verifier == "greedy" else "; it verifies greedily"
    return CheckResult("fitting engine", "warning", text, hint[0].upper() + hint[1:])


def _served_model(settings: Settings) -> Iterator[CheckResult]:
    if settings.decoding.borrows_tokenizer:
        yield CheckResult("model", "ok", BORROWED)
        return
    tokenizer = load_tokenizer(settings.model_dir)
    yield CheckResult("model", "ok", f"{settings.model_dir}: a tokenizer of {len(tokenizer):,} tokens")
    if settings.tables.path is not None and needs_a_model(settings):
        yield CheckResult("model", "fault", NEEDS_A_TOKENIZER)
    if tokenizer.chat_template is None:
        yield CheckResult("model", "warning", *NO_CHAT_TEMPLATE)


def check_model(settings: Settings) -> Iterator[CheckResult]:
    folder = settings.model_dir
    if settings.decoding.engine == "endpoint":
        yield from _served_model(settings)
        return
    weights = find_weights(folder)
    num_values = num_stored_values(weights)
    files = f"{folder}: {counted(len(weights), 'safetensors file')}, {num_values / 1e6:,.1f} M values"
    num_rows = require_described_weights(folder)
    compared = "" if num_rows else "; tensors were not compared with config.json (unknown to transformers, or packed)"
    yield CheckResult("model", "ok", files + compared)
    if settings.tables.path is not None and needs_a_model(settings):
        yield CheckResult("model", "warning", NEEDS_A_MODEL)
    tokenizer = load_tokenizer(folder, settings.decoding.adapter)
    if num_rows and (warning := require_token_rows(folder, tokenizer, num_rows)):
        yield CheckResult("model", "warning", warning)
    if tokenizer.chat_template is None:
        yield CheckResult("model", "warning", *NO_CHAT_TEMPLATE)
    yield fitting_engine(settings, num_values, sum(path.stat().st_size for path in weights))


def check_prompts(settings: Settings) -> Iterator[CheckResult]:
    """Check whether prompts of the configured tables fit into `knowledge.max_prompt_tokens`, on a sample."""
    of_tables, scratch = settings.tables, writable_folder(settings.workspace)
    tables = read_tables(of_tables.required_path, scratch=scratch, keep_duplicates=of_tables.keep_duplicates)
    tokenizer = load_tokenizer(settings.model_dir, settings.decoding.adapter)
    labels, most = labels_of(tables.interactions, settings.knowledge.words.events), settings.knowledge.max_prompt_tokens
    for side in SIDES:
        template = settings.template(side, labels)
        sample = SideQuestions(tables, side, template, "").sampled(NUM_PROMPTS)
        render = partial(render_shown, template, tokenizer=tokenizer, max_prompt_tokens=most)
        if refused := count_refused(render, sample):
            text = f"{refused.total()} of {len(sample)} sampled {side}s have no prompt ({format_counts(refused)})"
            hint = f"Raise knowledge.max_prompt_tokens (it is {most}), or let the template {template.name} show less"
            yield CheckResult("prompts", "fault" if refused.total() == len(sample) else "warning", text, hint)


def check_drafters(settings: Settings) -> Iterator[CheckResult]:
    """Check that files and folders of plug-in drafters are there, are whole and fit the model."""
    for name in settings.decoding.plugin_drafters:
        options, missing = settings.decoding.options_of(name), []
        for key in path_fields(type(options)):
            value = getattr(options, key)
            paths = value if isinstance(value, tuple) else filter(None, (value,))
            missing += [f"{key} names {path}, which is not there" for path in paths if not path.exists()]
        for what in missing:
            text = f"decoding.drafter_options.{name}.{what}"
            yield CheckResult("drafters", "fault", text, "Correct the path, or leave the drafter out")
        try:
            if not missing:
                drafter_plugin(name).check_files(options, settings.decoding, settings.model_dir)
        except ModelError as error:
            yield CheckResult("drafters", "fault", str(error))


def check_memory(settings: Settings) -> Iterator[CheckResult]:
    if settings.decoding.engine == "endpoint" or num_gpus():
        return  # each GPU holds the weights of one worker, which refuses what does not fit it
    folder, weights, memory = settings.model_dir, find_weights(settings.model_dir), host_memory()
    num_workers = worker_layout(settings.cluster, [Node(usable_cores())]).num_workers
    choice = choose_dtype(settings.decoding.dtype, "cpu", stored_dtype(folder), quantization_of(read_config(folder)))
    bytes_per_value = {"float32": 4, "bfloat16": 2, "auto": 0}[choice.name]
    num_bytes = sum(path.stat().st_size for path in weights)
    needed = num_workers * max(num_bytes, bytes_per_value * num_stored_values(weights))
    message = f"{memory.free_bytes / 1e9:.1f} of {memory.total_bytes / 1e9:.1f} GB free; the weights of {num_workers} "
    message += f"workers take {needed / 1e9:.1f} GB"
    hint = "Take a smaller model, or lower cluster.num_workers" if needed > 0.8 * memory.free_bytes else None
    yield CheckResult("memory", "fault" if needed > memory.free_bytes else "warning" if hint else "ok", message, hint)
