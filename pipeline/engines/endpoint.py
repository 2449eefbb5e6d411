"""A server with OpenAI's API as a worker's engine: prompts go out as token ids or messages, answers come back as texts.

Only a tokenizer is loaded, and nothing is drafted. docs/endpoint.md says how nights use it.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np

from laserbatch.pipeline.decoding.model import folder as files
from laserbatch.pipeline.decoding.sequence import GenerationFailure, GenerationRequest, GenerationResult, Outcome
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.engines.answers import Answers
from laserbatch.pipeline.engines.endpoint_batches import EndpointBatches
from laserbatch.pipeline.engines.endpoint_client import SGLANG, VLLM, EndpointClient
from laserbatch.pipeline.engines.engine import TextEngine
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import ConfigError, RowError, RunFailed
from laserbatch.pipeline.sides import Side
from laserbatch.pipeline.storage.figures import ModelFigures
from laserbatch.retrieval_pools.sources import SOURCE_TARGET

THOUGHTS = ("reasoning", "reasoning_content")  # fields of a message in which servers give its thoughts
PATHS = {"completions": "/completions", "chat": "/chat/completions"}
JSON_GRAMMAR = "start: %json "  # beginning of a grammar of `knowledge.forms` that is a JSON schema
TICK_S, SAVE_EVERY_S = 1.0, 1.0  # between a waiting worker's signs of life; between saves of the spending
_T = TypeVar("_T")


class EndpointEngine(TextEngine):
    """A server as a `TextEngine`.

    Raises ModelError: the folder holds no tokenizer. ConfigError: the key is not in the environment, or the server does
    not know it or the model. EndpointGone: it does not answer.

    `model_dir` : folder of the model's tokenizer, or of a borrowed one; it need not hold weights.
    `run_dir` : folder in which the tokens of answers are counted, over all attempts at a run.
    """

    def __init__(self, model_dir: Path, decoding: DecodingSettings, run_dir: Path) -> None:
        assert decoding.endpoint is not None
        self.tokenizer = files.load_tokenizer(model_dir)
        self._settings, self._max_concurrent = decoding.endpoint, decoding.batch_size
        self._chat_options, self._borrows = decoding.chat_options, decoding.borrows_tokenizer
        self._penalty = files.folder_rules(model_dir).get("repetition_penalty", 1.0)
        named = files.served_end_ids(model_dir, self.tokenizer)
        self._answers = Answers(self.tokenizer, named)
        self._end_ids = files.with_rows(model_dir, (*named, *self._answers.role_ids))
        self._num_ids = max(len(self.tokenizer), files.num_rows(model_dir) or 0)
        self._run_dir, self._spending, self._saved_s = run_dir, Spending.of(run_dir), 0.0
        self._loop = asyncio.new_event_loop()
        self._client = EndpointClient(self._settings, self._spending)
        self._card = self._waited(self._client.card())
        self.model = ModelFigures(
            id=files.served_identity(model_dir, decoding), dtype="unknown", device="server", num_parameters=0
        )

    @property
    def server(self) -> str:
        """The server's description of itself: the model, who serves it, and from where."""
        facts = {name: self._card.get(name) for name in ("owned_by", "root", "max_model_len")}
        return f"{self._settings.model} ({', '.join(f'{k} {v}' for k, v in facts.items() if v) or 'nothing more'})"

    def generate(
        self, side: Side, requests: Iterable[GenerationRequest], decoding: DecodingSettings,
        budget: Budget | None = None,
    ) -> Iterator[Outcome]:  # fmt: skip
        """Like `TextEngine.generate`. Raises RunFailed, before sending: the texts may cost more than allowed."""
        requests = [self._answers.unguided_thoughts(request) for request in requests]
        self._require_affordable(requests)
        self._client.begin()
        self._card = self._waited(self._client.card())  # it may have been restarted with another model
        if self._settings.mode == "batch":
            yield from self._waited(self._batch_outcomes(requests))
            self._save()
            return
        waiting, open_tasks, done = iter(requests), set(), set()
        try:
            while True:
                free = self._max_concurrent - len(open_tasks)
                open_tasks |= {self._loop.create_task(self._outcome(request)) for request in islice(waiting, free)}
                if not open_tasks:
                    return
                done, open_tasks = self._waited(asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    yield task.result()
                if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                    self._save()
        finally:
            self._waited(_ended(open_tasks | done))
            self._save()

    def _waited(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        task = self._loop.create_task(coroutine)
        while not task.done():
            self._loop.run_until_complete(asyncio.wait([task], timeout=TICK_S))
            self._num_forwards += 1  # this process is alive; other limits bound how long a server may take
        return task.result()

    def _save(self) -> None:
        self._spending.save(self._run_dir)
        self._saved_s = time.monotonic()

    def _require_affordable(self, requests: list[GenerationRequest]) -> None:
        prices, most = self._settings.price_per_million_tokens, self._settings.max_cost
        if prices is None or most is None:
            return
        spent = self._spending.cost(prices) or 0.0
        added = [self._settings.extra_body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        # The largest one counts if it exceeds max_new_tokens.
        limit = max([0, *(value for value in added if isinstance(value, int))])
        num_completion = sum(max(limit, request.max_new_tokens) for request in requests)
        shard = prices.cost(sum(len(request.prompt_ids) for request in requests), num_completion)
        if spent + shard > most:
            raise RunFailed(
                f"the night has cost {spent:.4g}, and its next shard of {len(requests)} texts may cost {shard:.4g}, "
                f"more than decoding.endpoint.max_cost {most:g} leaves; raise it, and the same command continues"
            )

    async def _outcome(self, request: GenerationRequest) -> Outcome:
        try:
            body = self._body(request)
            num_tokens = len(request.prompt_ids) + body.get("max_tokens", request.max_new_tokens)
            answer = await self._client.post(PATHS[self._settings.api], body, num_tokens)
        except RowError as error:
            answer = error
        return self._finished(request, answer)

    async def _batch_outcomes(self, requests: list[GenerationRequest]) -> list[Outcome]:
        bodies: dict[str, dict[str, Any]] = {}
        answers: dict[str, dict[str, Any] | RowError] = {}
        for number, request in enumerate(requests):
            try:
                bodies[str(number)] = self._body(request)
            except RowError as error:
                answers[str(number)] = error
        path = urlsplit(self._settings.url).path + PATHS[self._settings.api]
        if bodies:
            answers |= await EndpointBatches(self._client, path, self._run_dir).answers(bodies)
        return [self._finished(requests[int(number)], answer) for number, answer in answers.items()]

    def _finished(self, request: GenerationRequest, answer: dict[str, Any] | RowError) -> Outcome:
        try:
            if isinstance(answer, RowError):
                raise answer
            return self._answers.answer(self._result(request, answer), request.prompt_ids)
        except RowError as error:
            is_form = request.grammar is not None and error.reason.startswith("refused")
            advice = "; if it refuses the form of answers, set decoding.guided: off" * is_form
            return GenerationFailure(request.request_id, error.reason + advice)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """The fields of a request. Raises RowError: its prompt leaves no room for an answer."""
        context, num_prompt = self._card.get("max_model_len"), len(request.prompt_ids)
        room = request.max_new_tokens
        if isinstance(context, int) and not self._borrows:
            room = context - num_prompt
        if room < 1:
            raise RowError(f"too-long: the prompt has {num_prompt} tokens, and the server's context has {context}")
        max_tokens = min(request.max_new_tokens, room)
        body: dict[str, Any] = {"model": self._settings.model, "max_tokens": max_tokens, "temperature": 0}
        takes_more = self._card.get("owned_by") in (VLLM, SGLANG)
        if self._settings.api == "completions":
            body["prompt"] = request.prompt_ids.tolist()
        else:
            body["messages"] = [{"role": role, "content": content} for role, content in request.messages]
            body |= {"chat_template_kwargs": self._chat_options} if takes_more else {}
            if self._settings.prediction and request.previous_ids is not None:
                previous = self.tokenizer.decode(request.previous_ids.tolist(), skip_special_tokens=True)
                body["prediction"] = {"type": "content", "content": previous}
        if takes_more and not self._borrows:
            body |= {"stop_token_ids": self._end_ids, "return_token_ids": True}
            body |= {"repetition_penalty": self._penalty} if self._penalty != 1.0 else {}
        if request.grammar is not None:
            body |= self._form(request.grammar)
        body |= self._settings.extra_body
        return {name: value for name, value in body.items() if value is not None}

    def _form(self, grammar: str) -> dict[str, Any]:
        """The fields that make an answer keep its form. Raises ConfigError: this server has no such fields."""
        if self._card.get("owned_by") == VLLM:
            return {"structured_outputs": {"grammar": grammar}}
        if grammar.startswith(JSON_GRAMMAR):
            schema = json.loads(grammar.removeprefix(JSON_GRAMMAR))
            schema.pop("x-guidance", None)  # llguidance's own option for the layout of JSON
            named = {"name": "answer", "strict": True, "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        raise ConfigError(
            f"{self._settings.url} can guide answers only by JSON schemas (its /models does not say vllm), and a "
            "template asks for another form; set decoding.guided: off, or use templates that ask for JSON"
        )

    def _result(self, request: GenerationRequest, answer: dict[str, Any]) -> GenerationResult:
        """The result of an answer; its tokens are counted first. Raises RowError: it has no text, or several."""
        fingerprint = answer.get("system_fingerprint")
        answered_by = self.server + (f", fingerprint {fingerprint}" if fingerprint else "")
        # Without the server's `usage` an answer is counted as if it had reached its limit.
        self._spending.add(answer.get("usage"), len(request.prompt_ids), request.max_new_tokens, answered_by)
        choice = self._choice(answer.get("choices"))
        token_ids, end_id = self._tokens(choice)
        has_ended = choice["finish_reason"] == "stop"
        return GenerationResult(  # a server reports no steps
            request.request_id, np.array(token_ids, np.int32), np.full(len(token_ids), SOURCE_TARGET, np.uint8),
            text=cast("str", self.tokenizer.decode(token_ids, skip_special_tokens=True)),
            finish_reason="end_of_text" if has_ended else "length", end_id=end_id if has_ended else None,
        )  # fmt: skip

    def _choice(self, choices: Any) -> dict[str, Any]:
        """The only choice of an answer, with its `text`, whichever API wrote it. Raises RowError."""
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            count = len(choices) if isinstance(choices, list) else "no"
            raise RowError(f"malformed-answer: the answer has {count} choices; expected 1")
        message = choices[0].get("message")
        choice = choices[0]
        if isinstance(message, dict):
            text, has_thoughts = message.get("content"), any(map(message.get, THOUGHTS))
            # The server cut the thoughts before it; the blank lines after them belong to them, as in our own cut.
            choice = choice | {"text": text.lstrip() if has_thoughts and isinstance(text, str) else text}
        if isinstance(message, dict) and message.get("refusal"):
            raise RowError("refused: the model refuses to answer")
        if (reason := choice.get("finish_reason")) not in ("stop", "length"):
            raise RowError(f"not-finished: the server ended the answer with finish_reason {str(reason)[:40]!r}")
        text = choice.get("text")
        if not isinstance(text, str):
            raise RowError("malformed-answer: the answer has no text")
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RowError("malformed-answer: the text has half of a character (a lone surrogate)")
        return choice

    def _tokens(self, choice: dict[str, Any]) -> tuple[list[int], int | None]:
        """The tokens of a choice without its end token, and the end token: the server's, or those of the text."""
        token_ids = choice.get("token_ids")
        if not self._borrows and isinstance(token_ids, list) and all(type(i) is int and i >= 0 for i in token_ids):
            if (highest := max(token_ids, default=0)) >= self._num_ids:
                raise RowError(
                    f"malformed-answer: the answer has token id {highest}, but the tokenizer in decoding.model has "
                    f"{self._num_ids} tokens: the server has another model than that folder"
                )
            end_id = token_ids[-1] if token_ids and token_ids[-1] in self._end_ids else None
            return token_ids if end_id is None else token_ids[:-1], end_id
        # Marks that are tokens, such as those of thoughts, were written by the model, so they become tokens again.
        token_ids = cast("list[int]", self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"])
        end_id = None if self._borrows else choice.get("stop_reason")  # most servers only say that the text ended
        return token_ids, end_id if end_id in self._end_ids else None


async def _ended(tasks: set[asyncio.Task]) -> None:
    """Cancel requests and wait until they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
