"""vLLM as a worker's engine: its own forwards and cache, our pools by `retrieval_pools.integrations.vllm`.

It verifies greedily. Steps are taken here one by one, so that a watcher sees the worker go on, and because the tokens
that a step adds to a text tell how many drafts it accepted. docs/vllm.md says how nights use it.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import host_memory, num_stored_values
from laserbatch.pipeline.decoding.grammar import after_thoughts
from laserbatch.pipeline.decoding.model import folder as files
from laserbatch.pipeline.decoding.model.adapters import find_adapter
from laserbatch.pipeline.decoding.model.compute_type import choose_dtype
from laserbatch.pipeline.decoding.model.described_weights import require_described_weights, require_token_rows
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.engines.answers import Answers
from laserbatch.pipeline.engines.engine import TextEngine
from laserbatch.pipeline.errors import ModelError, RowError, first_line
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.atomic import atomic_path
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.pipeline.storage.scratch import ScratchFolder
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.integrations import vllm_steps
from laserbatch.retrieval_pools.routing.route_table import write_routes
from laserbatch.retrieval_pools.sources import NUM_SOURCES, SOURCE_POOL, SOURCE_TARGET

logger = logging.getLogger(__name__)

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # allowed values of `max_lora_rank`
CACHE_SHARE = 0.25  # of the free memory of a machine without GPU, divided among its engines
NUM_DRAFTED = "vllm:spec_decode_num_draft_tokens"


@dataclass
class _Text:
    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    num_steps: int = 0
    finish_reason: str = ""

    def extend(self, token_ids: list[int]) -> None:
        """Add the tokens of a step: accepted drafts, then the model's own token."""
        if token_ids:
            self.token_ids += token_ids
            self.sources += [SOURCE_POOL] * (len(token_ids) - 1) + [SOURCE_TARGET]
            self.num_steps += 1


class VllmEngine(TextEngine):
    """`vllm.LLM` as a `TextEngine`. Raises ModelError, PoolError: vLLM, the model or a pool cannot be used.

    Drafted tokens have the source "pool", whatever the proposer took them from. vLLM counts drafted tokens for all
    texts together: a text's `num_drafted` is its accepted tokens and, by its share of steps, a part of the rejected.

    `num_threads` : number of CPU threads for this engine.
    `num_sharing` : number of engines on this machine.
    """

    def __init__(
        self, model_dir: Path, decoding: DecodingSettings, device: str, num_threads: int, num_sharing: int,
        pool_dirs: Mapping[Side, Path], step_cost_dir: Path,
    ) -> None:  # fmt: skip
        self.tokenizer = files.load_tokenizer(model_dir, decoding.adapter)
        self._rules = files.folder_rules(model_dir)
        # vLLM's loaders skip biases that a configuration does not describe
        num_rows = require_described_weights(model_dir)
        if num_rows and (warning := require_token_rows(model_dir, self.tokenizer, num_rows)):
            logger.warning("%s", warning)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        set_environment(device, num_threads, num_sharing)
        self._folder = ScratchFolder("vllm")  # routes: token ids of prompts and of earlier texts
        arguments = engine_arguments(model_dir, decoding, device)
        speculative = None
        budget = Budget.of(decoding)
        if pool_dirs and decoding.drafters and budget.max_draft_tokens:
            cost = cached_cost(step_cost_dir, model_dir, arguments, budget.max_draft_tokens)
            self._write_settings(pool_dirs, cost, budget)
            speculative = vllm_steps.speculative_config(
                Path(arguments.get("tokenizer", model_dir)), budget.max_draft_tokens
            )
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._lora = None if decoding.adapter is None else LoRARequest("adapter", 1, decoding.adapter)

        _answer_for_llvmlite()
        try:
            self._engine = LLM(**arguments, speculative_config=speculative).llm_engine
        except PoolError:
            raise
        except Exception as error:  # vLLM may raise anything
            adapter = "" if decoding.adapter is None else f" with adapter {decoding.adapter}"
            raise ModelError(f"vLLM cannot load {model_dir}{adapter}: {first_line(error)}") from error
        config = self._engine.model_config
        self._max_context = config.max_model_len
        config_end = getattr(config.hf_text_config, "eos_token_id", None)
        named = files.end_ids_of(self._rules.get("eos_token_id") or config_end, config_end, self.tokenizer)
        self._answers = Answers(self.tokenizer, named, thinks=decoding.thinking == "cut")
        vocab_size = getattr(config.hf_text_config, "vocab_size", len(self.tokenizer))
        self._end_ids = sorted({*named, *(i for i in self._answers.role_ids if i < vocab_size)})
        self.model = ModelFigures(
            id=files.model_identity(model_dir, decoding.adapter), dtype=str(config.dtype).removeprefix("torch."),
            device=device, num_parameters=_num_parameters(model_dir, config.hf_text_config),
        )  # fmt: skip

    def generate(
        self, side: Side, requests: Iterable[GenerationRequest], decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[Outcome]:  # fmt: skip
        """Like `TextEngine.generate`; the proposer, not the budget, decides at each step what is drafted."""
        requests = list(requests)
        if (routes := self._routes(side)).parent.exists():
            write_routes(new := routes.with_suffix(".new"), ((r.prompt_ids, r.group, r.previous_ids) for r in requests))
            new.replace(routes)
        texts: dict[str, _Text] = {}
        for request in requests:
            try:
                self._begin(request)
                texts[request.request_id] = _Text(request)
            except RowError as error:
                yield GenerationFailure(request.request_id, error.reason)
            except ValueError as error:
                yield GenerationFailure(request.request_id, f"refused: {first_line(error)}")
        num_drafted = self._num_drafted()
        while self._engine.has_unfinished_requests():
            for output in self._step():
                (new,), text = output.outputs, texts[output.request_id]
                text.extend(list(new.token_ids))
                text.finish_reason = new.finish_reason or ""
        yield from self._results(list(texts.values()), self._num_drafted() - num_drafted)

    def _begin(self, request: GenerationRequest) -> None:
        """Hand a request to vLLM. Raises RowError: the prompt is too long; ValueError: vLLM refuses it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        request = self._answers.guided(request)
        grammar = request.grammar
        if grammar is not None and request.thoughts is not None:
            grammar = after_thoughts(grammar, request.thoughts)
        room = self._max_context - len(request.prompt_ids)
        if room < 1:
            raise RowError(
                f"too-long: the prompt has {len(request.prompt_ids)} tokens; the model's context {self._max_context}"
            )
        sampling = SamplingParams(
            temperature=0, max_tokens=min(request.max_new_tokens, room), stop_token_ids=self._end_ids,
            repetition_penalty=self._rules.get("repetition_penalty", 1.0), detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
        )  # fmt: skip
        prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
        self._engine.add_request(request.request_id, prompt, sampling, lora_request=self._lora)

    def _step(self) -> list[Any]:
        began_s = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception:
            # The engine cannot be used again. When this process ends, another worker gets the shard, perhaps in halves.
            logger.exception("vLLM's engine failed: this worker ends")
            self._folder.remove()  # os._exit runs no clean-up
            os._exit(1)
        self._num_forwards += 1
        self._costliest_step_s = max(self._costliest_step_s, time.perf_counter() - began_s)
        return outputs

    def _num_drafted(self) -> int:
        return sum(int(metric.value) for metric in self._engine.get_metrics() if metric.name == NUM_DRAFTED)

    def _results(self, texts: list[_Text], num_drafted: int) -> Iterator[GenerationResult]:
        accepted = [sum(source != SOURCE_TARGET for source in text.sources) for text in texts]
        spare, num_steps = max(0, num_drafted - sum(accepted)), max(1, sum(text.num_steps for text in texts))
        num_attributed, num_before = 0, 0  # rejected drafts and steps of the texts so far
        for text, num_accepted in zip(texts, accepted, strict=True):
            num_before += text.num_steps
            num_attributed_before, num_attributed = num_attributed, spare * num_before // num_steps
            num_rejected = num_attributed - num_attributed_before
            at_end, end_id = text.finish_reason == "stop", None
            if at_end and text.token_ids and text.token_ids[-1] in self._end_ids:
                end_id, _ = text.token_ids.pop(), text.sources.pop()
            by_source = np.zeros((2, NUM_SOURCES), np.int64)
            by_source[:, SOURCE_POOL] = num_accepted + num_rejected, num_accepted
            result = GenerationResult(
                request_id=text.request.request_id, token_ids=np.array(text.token_ids, np.int32),
                sources=np.array(text.sources, np.uint8),
                text=cast("str", self.tokenizer.decode(text.token_ids, skip_special_tokens=True)),
                finish_reason="end_of_text" if at_end else "length", num_steps=text.num_steps,
                num_drafted=num_accepted + num_rejected, num_accepted=num_accepted, drafted_by_source=by_source[0],
                accepted_by_source=by_source[1], end_id=end_id,
            )  # fmt: skip
            yield self._answers.answer(result, text.request.prompt_ids)

    def _routes(self, side: Side) -> Path:
        return self._folder.path / side / "routes.parquet"

    def _write_settings(self, pool_dirs: Mapping[Side, Path], cost: Path, budget: Budget) -> None:
        """Write the file that the proposer reads: both sides' pools, each with routes that every shard replaces."""
        pool_settings = []
        for side, folder in pool_dirs.items():
            self._routes(side).parent.mkdir()
            write_routes(self._routes(side), [])
            settings = {"pools": str(folder.parent.parent), "version": folder.parent.name, "side": side}
            settings |= {"routes": str(self._routes(side)), "step_cost": str(cost)}
            pool_settings.append(settings | {"min_acceptance": budget.min_acceptance})
        path = self._folder.path / "drafts.json"
        path.write_text(json.dumps(pool_settings), encoding="utf-8")
        os.environ["LASERBATCH_DRAFTS"] = str(path)


def _num_parameters(model_dir: Path, config: Any) -> int:
    """The number of parameters of the plain model, or of values in its files if transformers does not know it."""
    num_stored = num_stored_values(files.find_weights(model_dir))
    if files.quantization_of(files.read_config(model_dir)) is None:
        return num_stored
    try:
        return files.num_parameters_of(config)
    except ValueError:  # transformers knows no such model
        return num_stored


def _answer_for_llvmlite() -> None:
    """Make llvmlite's library, if it is loaded, report that it has no attributes of its own.

    vLLM 0.32 on a CPU reads `vars` of all objects in all modules. llvmlite's library takes `__dict__` for one of its
    functions, and then vLLM does not load.
    """
    if (binding := sys.modules.get("llvmlite.binding.ffi")) is not None:
        with suppress(AttributeError):
            binding.lib._fntab.setdefault("__dict__", {})


def set_environment(device: str, num_threads: int, num_sharing: int) -> None:
    """Set variables that vLLM reads, most only if unset: one process, no network, and its share of a CPU."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if device == "cpu":
        cache_gib = max(1, int(CACHE_SHARE * host_memory().free_bytes / num_sharing / 2**30))
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def engine_arguments(model_dir: Path, decoding: DecodingSettings, device: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, those of `decoding.vllm` among them."""
    adapter: dict[str, Any] = {}
    if decoding.adapter is not None:
        rank = json.loads(find_adapter(decoding.adapter)[0].read_bytes())["r"]
        adapter = {"enable_lora": True, "max_lora_rank": next((size for size in LORA_RANKS if size >= rank), rank)}
        adapter["tokenizer"] = str(files.tokenizer_folder(model_dir, decoding.adapter))
    return {
        "model": str(model_dir),
        "dtype": choose_dtype(decoding.dtype, device, files.stored_dtype(model_dir)).name,
        "max_num_seqs": decoding.batch_size,
        "generation_config": "vllm",
        "load_format": "safetensors",
        "disable_log_stats": False,  # drafts are counted by them
        "seed": 0,
        "structured_outputs_config": {"backend": "guidance"},  # it reads the grammars of `knowledge.forms`
        **adapter,
        **decoding.vllm,
    }


def cached_cost(folder: Path, model_dir: Path, arguments: Mapping[str, Any], num_tokens: int) -> Path:
    """The file of this engine's step cost on this machine; the cost is measured if there is no such file yet."""
    from vllm import __version__
    from vllm.platforms import current_platform

    facts = [dict(arguments) | {"model": files.model_identity(model_dir)}, num_tokens]
    facts += [current_platform.get_device_name(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), __version__]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    path = folder / "vllm" / f"{digest}.json"
    with suppress(OSError, ValueError):  # the file is missing or damaged
        json.loads(path.read_bytes())
        return path
    logger.info("measuring the cost of vLLM's steps on this machine, once: %s", path)
    sizes = sorted({1, max(1, arguments["max_num_seqs"] // 4), arguments["max_num_seqs"]})
    engine = {name: value for name, value in arguments.items() if name not in ("model", "disable_log_stats")}
    command = [sys.executable, "-m", vllm_steps.__name__, arguments["model"]]
    command += ["--tokens", str(num_tokens), "--batch", *map(str, sizes), "--engine", json.dumps(engine)]
    with atomic_path(path) as new:
        measured = subprocess.run([*command, "--out", str(new)], capture_output=True, text=True, check=False)
        if measured.returncode:
            last_line = (measured.stderr.strip() or "it printed no error").splitlines()[-1]
            raise ModelError(f"the cost of vLLM's steps could not be measured: {last_line}")
    return path
