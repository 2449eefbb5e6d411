"""Writing texts from prompts, with drafts: a callable class for Ray Data's `map_batches`, or for your own loop.

    prompts.map_batches(TextWriter, fn_constructor_kwargs={"model": "qwen", "pools": "workspace/pools"}, batch_size=512,
                        compute=ray.data.ActorPoolStrategy(size=4), num_gpus=1)

It knows no tables, templates or runs. docs/ray-data.md describes its use.
"""

import datetime
import hashlib
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import ray

from laserbatch.pipeline.budget.choice import OFF, PLAIN, budget_step_cost, by_step, side_budget
from laserbatch.pipeline.decoding.model.folder import SAMPLE_MODEL, tokenizer_folder
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.distributed.settings import usable_cores
from laserbatch.pipeline.distributed.tasks import ends_process_if_device_is_lost
from laserbatch.pipeline.engines.answers import UNCLOSED_THOUGHTS, unclosed_thoughts
from laserbatch.pipeline.errors import ConfigError, RowError
from laserbatch.pipeline.knowledge.chat_format import encode_chat, encode_content
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.validation import validated
from laserbatch.retrieval_pools.draft import int32_row
from laserbatch.retrieval_pools.index.manifest import tokenizer_hash
from laserbatch.retrieval_pools.library import open_pool

Columns = dict[str, np.ndarray]
Tokens = str | Sequence[int] | np.ndarray
_NONE = np.zeros(0, np.int64)
NOTHING = GenerationResult("", _NONE, _NONE, "", "", 0, 0, 0, _NONE, _NONE)  # for a row that could not be written

logger = logging.getLogger(__name__)


class TextWriter:
    """Maps a column `prompt` to texts. The model is loaded once, in the process that makes the object.

    The columns of a batch are `prompt`, a user's message or the model's token ids, and optionally `previous`, the
    entity's earlier text, as text or ids, and `group`, the result of the pool's router (`OpenPool.route`). Nothing in a
    message becomes a control token.

    Parameters
    ----------
    model : folder of the model; "sample": the bundled one.
    pools : a workspace's `pools` folder; None: drafts come only from each text's own prompt, output and previous text.
    side, version : side and version of the pools; None: the current version.
    system : a system message for all prompts.
    date : the date that a chat template prints as today's, such as "2025-03-01"; None: the day on which this object is
        made. Give it if texts must be the same on another day.
    device : "auto", "cpu" or "cuda".
    num_threads : threads of a worker on a CPU; None: as many as Ray gave it.
    decoding : options of `decoding:` in the configuration, by name. The parts of the draft budget that they leave open
        are chosen by the cost of a step here, which is measured with the first batch.

    Raises
    ------
    ConfigError, ModelError, PoolError : an option, the model or the pool cannot be used.
    """

    def __init__(
        self, model: Path | str = "sample", pools: Path | str | None = None, side: Side = "user",
        version: str | None = None, system: str | None = None, device: str = "auto", num_threads: int | None = None,
        date: datetime.date | str | None = None, **decoding: Any,
    ) -> None:  # fmt: skip
        self._settings = validated(DecodingSettings, {"model": str(model), **decoding}, "TextWriter")
        if self._settings.engine != "laserbatch":
            engine = f"engine {self._settings.engine} is not supported, only laserbatch"
            raise ConfigError(f"TextWriter: {engine}; docs/ray-data.md shows how Ray Data LLM uses vLLM")
        self._system, self._budget, self._pool = system, None, None
        self._side: Side = side
        try:
            self._date = datetime.date.fromisoformat(str(date)) if date is not None else datetime.date.today()
        except ValueError:
            raise ConfigError(f"TextWriter: {date!r} is not a date; expected one such as 2025-03-01") from None
        folder = SAMPLE_MODEL if str(model) == "sample" else Path(model)
        if pools is not None:
            self._pool = open_pool(
                pools, side, version, tokenizer_hash=tokenizer_hash(tokenizer_folder(folder, self._settings.adapter))
            ).pool
        pool_dirs: dict[Side, Path] = {}
        if self._pool is not None and self._pool.folder is not None:
            pool_dirs[side] = self._pool.folder
        import torch  # here, as is the engine: they take seconds to load, and describing a pipeline does not need them

        from laserbatch.pipeline.budget.cost_cache import user_step_costs
        from laserbatch.pipeline.engines.own import OwnEngine

        num_threads = num_threads or torch.get_num_threads()
        self._engine = OwnEngine(
            folder, self._settings, device, num_threads,
            num_sharing=max(1, usable_cores() // num_threads),  # as many workers as this machine has room for
            num_workers=1,
            pool_dirs=pool_dirs,
            step_cost_dir=user_step_costs(),
        )  # fmt: skip

    def __call__(self, batch: Columns) -> Columns:
        """Add the columns `text`, `finish_reason`, `num_tokens`, `num_steps`, `num_accepted` and `error` to a batch.

        A row that cannot be written has an empty text, and an `error` that begins with a stable word; other rows go on.

        Raises KeyError if there is no column `prompt`, and DeviceLost after a CUDA error by which this process lost its
        device; a Ray actor ends its process instead, so that another one writes the batch.
        """
        is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        with ends_process_if_device_is_lost() if is_actor else nullcontext():
            return self._written(batch)

    def _written(self, batch: Columns) -> Columns:
        num_rows = len(batch["prompt"])
        previous, groups = (batch.get(name, [None] * num_rows) for name in ("previous", "group"))
        errors, requests = [""] * num_rows, []
        for row in range(num_rows):
            try:
                requests.append(self._request(row, batch["prompt"][row], previous[row], groups[row]))
            except RowError as error:
                errors[row] = error.reason
        if self._budget is None and requests:
            prompt_tokens = float(np.median([len(request.prompt_ids) for request in requests]))
            self._budget = self._chosen_budget("previous" in batch, prompt_tokens)
        written: dict[int, GenerationResult] = {}
        for outcome in self._engine.generate(self._side, iter(requests), self._settings, self._budget):
            if isinstance(outcome, GenerationFailure):
                errors[int(outcome.request_id)] = outcome.reason
            elif outcome.finish_reason == UNCLOSED_THOUGHTS:
                errors[int(outcome.request_id)] = unclosed_thoughts(outcome)
            else:
                written[int(outcome.request_id)] = outcome
        results = [written.get(row, NOTHING) for row in range(num_rows)]
        columns = {
            "text": np.array([result.text for result in results], object),
            "finish_reason": np.array([result.finish_reason for result in results], object),
            "num_tokens": np.array([len(result.token_ids) for result in results], np.int64),
            "num_steps": np.array([result.num_steps for result in results], np.int64),
            "num_accepted": np.array([result.num_accepted for result in results], np.int64),
            "error": np.array(errors, object),
        }
        return batch | columns

    def _chosen_budget(self, has_previous: bool, prompt_tokens: float) -> Budget:
        """The draft budget: that of the options, otherwise chosen by the cost of a step after such prompts."""
        engine = self._engine
        step_cost = budget_step_cost(self._settings, lambda: engine.cached_step_cost() or engine.measured_step_cost())
        step_cost = step_cost and step_cost.at_context(prompt_tokens + self._settings.max_new_tokens / 2)
        chosen = by_step(self._settings, side_budget(self._settings, self._pool, step_cost, float(has_previous)))
        if chosen.budget == PLAIN and chosen.forecast.reason != OFF:
            logger.warning("drafting is off (%s)", chosen.forecast.reason)
        return chosen.budget

    def _request(self, row: int, prompt: Tokens, previous: Tokens | None, group: str | None) -> GenerationRequest:
        """Raises RowError if the prompt is neither a text nor tokens, or cannot be encoded without control tokens."""
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            prompt_ids = encode_chat(tokenizer, prompt, self._system, self._settings.chat_options, self._date)
        else:
            prompt_ids = _ids(prompt)
        if isinstance(previous, str):
            previous_ids = np.array(encode_content(tokenizer, previous), np.int32)
        else:
            previous_ids = None if previous is None or np.ndim(previous) == 0 else _ids(previous)  # NaN: no text
        seed = int.from_bytes(hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest(), "little", signed=True)
        group = group if isinstance(group, str) else None
        return GenerationRequest(str(row), prompt_ids, previous_ids, group, self._settings.max_new_tokens, seed)


def _ids(tokens: Tokens) -> np.ndarray:
    try:
        return int32_row(np.asarray(tokens))
    except (ValueError, TypeError):
        raise RowError(f"bad-prompt: {str(tokens)[:60]!r} is neither a text nor one row of token ids") from None
