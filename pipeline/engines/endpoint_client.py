"""Requests to a server with OpenAI's API: paced by its limits, sent again while it cannot answer.

It knows no prompts and no texts. Its errors have our own words and the server's message only, because the exceptions of
the OpenAI library have requests that hold the key.
"""

import asyncio
import json
import logging
import random
import re
import ssl
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any

import openai

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import ConfigError, EndpointGone, RowError

for name in ("openai", "httpx", "httpx2"):  # they log a line per request
    logging.getLogger(name).setLevel(logging.WARNING)

VLLM, SGLANG = "vllm", "sglang"  # `owned_by` in `/v1/models`; both take stop tokens, and return tokens
# Times that the server went away during a request, before it is sent without others, and before it fails.
CRASHES_TOGETHER, MAX_CRASHES = 2, 4
MAX_TRIES = 8  # of a request that alone fails: the server answers it with an error, or answers others meanwhile
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0  # before a request is sent again; doubled each time
LIST_TIMEOUT_S = 30.0  # for the list of models, which servers send at once
POLL_S = 2.0  # between checks whether a server that went away is back
NOT_IN_TIME = "no answer in time"
MAX_SAID = 300  # characters of a server's message
TOO_MANY, TIMED_OUT, CONFLICT, ERROR = 429, 408, 409, 500  # status codes after which a request is sent again
STRAY = "surrogateescape"  # the way in which bytes that are no UTF-8 are kept until they are checked for
FIRST_REFUSAL = 400  # the lowest status code of a refusal; lower ones are redirects


class EndpointClient:
    """A client of one server, used from one event loop. Raises ConfigError: the key is not in the environment.

    Without `sends_again` the first failure of a request is a RowError, whatever it is.
    """

    def __init__(self, settings: EndpointSettings, spending: Spending, sends_again: bool = True) -> None:
        self._settings, self._spending, self._key = settings, spending, settings.key()
        self._sends_again = sends_again
        # `post` sends again.
        self._client = openai.AsyncOpenAI(
            base_url=settings.url, api_key=self._key or "none", timeout=settings.timeout_s, max_retries=0
        )
        self._options: Any = {} if self._key else {"headers": {"Authorization": openai.Omit()}}
        self._free_at_s = 0.0  # when the next request may be sent
        self._last_answer_s = time.monotonic()
        self._answered: tuple[str, dict[str, Any]] | None = None  # the last answered request for a text
        self._gone_s = 0.0  # when the server was last found gone
        self._returning, self._alone = asyncio.Lock(), asyncio.Lock()  # held until it is back; by a request sent alone

    def begin(self) -> None:
        """Count the time without an answer from now on."""
        self._last_answer_s = time.monotonic()

    async def card(self) -> dict[str, Any]:
        """The server's description of the model (`/v1/models`); empty if it lists none.

        Raises ConfigError: it lists other models. EndpointGone: it does not answer.
        """
        try:
            listed = await self.get("/models")
        except NoSuchPath:
            return {}
        except RowError as error:
            raise ConfigError(f"{self._settings.url} does not list its models: {error.reason}") from None
        data = listed.get("data")
        cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        model = self._settings.model
        served = next((card for card in cards if card.get("id") == model), None)
        if cards and served is None:
            names = ", ".join(str(card.get("id")) for card in cards[:5])
            raise ConfigError(
                f"{self._settings.url} has no model {model!r}; set decoding.endpoint.model to one that it has: {names}"
            )
        return served or {}

    async def post(self, path: str, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The answer to a request of at most `num_tokens` tokens, prompt included.

        Raises RowError: the server refuses the request, or its answer is no JSON object. ConfigError: it knows neither
        key nor model. EndpointGone: it does not answer.
        """
        try:
            answer = self._object(await self._sent("POST", path, body, num_tokens))
            self._answered = (path, body) if num_tokens else None
            return answer
        except NoSuchPath as error:
            raise ConfigError(
                f"{self._settings.url} has no {path}, or no model {self._settings.model!r} ({error}); check "
                "decoding.endpoint.url, which usually ends in /v1, and its model and api"
            ) from None

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises NoSuchPath, and otherwise like `post`."""
        return self._object(await self.text(path, LIST_TIMEOUT_S))

    async def at_root(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = LIST_TIMEOUT_S
    ) -> dict[str, Any]:
        """The JSON object at a path next to `/v1`, where servers have their own routes; by POST if there is a body.

        Raises NoSuchPath, and otherwise like `post`.
        """
        method, url = "GET" if body is None else "POST", self._settings.url.removesuffix("/v1") + path
        return self._object(await self._sent(method, url, body, 0, {"timeout": timeout_s}))

    async def close(self) -> None:
        await self._client.close()

    async def text(self, path: str, timeout_s: float | None = None) -> str:
        """The file at a path. Raises NoSuchPath, and otherwise like `post`."""
        return await self._sent("GET", path, None, 0, {} if timeout_s is None else {"timeout": timeout_s})

    async def upload(self, path: str, fields: dict[str, str], file: tuple[str, bytes]) -> dict[str, Any]:
        """The answer to a form with a file, given by name and content. Raises the errors of `post`."""
        headers = {**self._options.get("headers", {}), "Content-Type": "multipart/form-data"}
        try:
            return self._object(await self._sent("POST", path, fields, 0, {"headers": headers}, files=[("file", file)]))
        except NoSuchPath as error:
            raise ConfigError(
                f"{self._settings.url} has no {path} ({error}), so no batch API; set decoding.endpoint.mode: requests"
            ) from None

    async def _sent(
        self, method: str, path: str, body: dict[str, Any] | None, num_tokens: int, options: Any = MappingProxyType({}),
        **content: Any,
    ) -> str:  # fmt: skip
        num_failures, num_tries, num_crashes, failed_s = 0, 0, 0, time.monotonic()
        async with AsyncExitStack() as alone:
            while True:
                await self._wait_for_turn(num_tokens)
                if num_crashes < CRASHES_TOGETHER:
                    async with self._alone:
                        pass
                sent_s = time.monotonic()
                try:
                    sending = self._sent_once(method, path, body, options, **content)
                    answer = await (self._unless_silent(sending) if num_tokens else sending)
                    self._last_answer_s = time.monotonic()
                    return answer
                except _Unanswered as error:
                    failure = error
                status, reason, retry_after_s = failure.status, failure.reason, failure.retry_after_s
                if not self._sends_again:
                    raise RowError(f"server-error: {reason}")
                num_failures += 1
                self._spending.num_retries += 1
                counts = status == ERROR or (status != TOO_MANY and self._last_answer_s > failed_s)
                num_tries, failed_s = num_tries + counts, time.monotonic()
                if num_tries >= MAX_TRIES:
                    raise RowError(f"server-error: {num_failures} times: {reason}")
                if num_tokens and status != TOO_MANY and await self._was_gone_since(sent_s, reason):
                    num_crashes += 1
                    if num_crashes == CRASHES_TOGETHER:
                        await alone.enter_async_context(self._alone)
                    if num_crashes == MAX_CRASHES:
                        raise RowError(f"server-crash: the server was gone {num_crashes} times after this prompt")
                delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (num_failures - 1)) * random.uniform(0.5, 1.5)
                delay_s = delay_s if retry_after_s is None else retry_after_s + random.uniform(0, FIRST_DELAY_S)
                is_of_row = status == ERROR and not retry_after_s  # MAX_TRIES ends it
                left_s = MAX_DELAY_S if is_of_row else await self._time_left(retry_after_s or 0.0, reason)
                if status == TOO_MANY:  # others wait, too
                    self._free_at_s = max(self._free_at_s, time.monotonic() + (retry_after_s or 0))
                await asyncio.sleep(min(delay_s, left_s))

    async def _sent_once(
        self, method: str, path: str, body: dict[str, Any] | None, options: Mapping[str, Any], **content: Any
    ) -> str:
        """The answer to a request. Raises _Unanswered: it may be answered if it is sent again."""
        sending = self._client.get if method == "GET" else self._client.post
        content |= {} if body is None else {"body": body}
        plain = {"follow_redirects": False}  # otherwise prompts could go to a server that nobody named
        try:
            received = await sending(path, cast_to=bytes, options=self._options | plain | options, **content)
        except openai.APIStatusError as error:
            message = self._message_of(error.body)
            self._raise_if_final(error.status_code, message)
            retry_after_s = _retry_after(error.response.headers.get("retry-after"))
            raise _Unanswered(error.status_code, f"HTTP {error.status_code}: {message}", retry_after_s) from None
        except openai.APIError as error:
            self._require_certificate(error)
            is_late = isinstance(error, openai.APITimeoutError)
            raise _Unanswered(0, NOT_IN_TIME if is_late else "the connection fails") from None
        except UnicodeError:
            raise RowError("undecodable: the prompt cannot be written in UTF-8") from None
        answer = self._without_key(received.decode("utf-8", STRAY))  # texts made of it are stored
        status, error_body = _failure_in(answer) if method == "POST" else (0, None)
        if status == 0:
            return answer
        message = self._message_of(error_body)
        self._raise_if_final(status, message)
        raise _Unanswered(status, f"HTTP 200 with the error {status}: {message}")

    async def _unless_silent(self, sending: Coroutine[Any, Any, str]) -> str:
        """The answer to a request, which times out once the server has answered nothing for `give_up_after_s`."""
        task, sent_s = asyncio.ensure_future(sending), time.monotonic()
        try:
            while not task.done():
                silent_s = time.monotonic() - max(sent_s, self._last_answer_s)
                if silent_s >= self._settings.give_up_after_s:
                    raise _Unanswered(0, NOT_IN_TIME)
                await asyncio.wait([task], timeout=self._settings.give_up_after_s - silent_s)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _was_gone_since(self, sent_s: float, reason: str) -> bool:
        """Wait until the server answers; return whether it was gone at some time since a request was sent."""
        async with self._returning:
            if not await self._is_there():
                self._gone_s = time.monotonic()
                while not await self._is_there():
                    await asyncio.sleep(min(POLL_S, await self._time_left(0.0, reason)))
                self._last_answer_s = time.monotonic()
        return sent_s < self._gone_s

    async def _is_there(self) -> bool:
        try:
            await self._client.get("/models", cast_to=bytes, options=self._options | {"timeout": LIST_TIMEOUT_S})
        except openai.APIStatusError as error:
            return error.status_code < ERROR
        except openai.APIError:
            return False
        return True

    async def _wait_for_turn(self, num_tokens: int) -> None:
        limits = self._settings
        now_s = time.monotonic()
        turn_s = max(self._free_at_s, now_s)
        taken_s = 60 / limits.requests_per_minute if limits.requests_per_minute else 0.0
        if limits.tokens_per_minute:
            taken_s = max(taken_s, 60 * num_tokens / limits.tokens_per_minute)
        self._free_at_s = turn_s + taken_s
        if turn_s > now_s:
            await asyncio.sleep(turn_s - now_s)

    async def _time_left(self, retry_after_s: float, reason: str) -> float:
        """Seconds until the server is given up.

        Raises EndpointGone: nothing was answered for too long, the wait that the server asks for included. RowError:
        the same, but the server still answers a request that it answered before.
        """
        waited_s = time.monotonic() - self._last_answer_s
        if waited_s + retry_after_s <= self._settings.give_up_after_s:
            return self._settings.give_up_after_s - waited_s
        if await self._answers_again():
            raise RowError(f"server-error: {reason}; other requests are answered")
        wait = f", and it asks to wait {retry_after_s:.0f} seconds" if retry_after_s else ""
        raise EndpointGone(
            f"{self._settings.url} has answered nothing for {waited_s:.0f} seconds{wait} ({reason}; see "
            "decoding.endpoint.give_up_after_s); the same command continues"
        )

    async def _answers_again(self) -> bool:
        """Whether the server still answers a request that it answered before; the answer is discarded."""
        if self._answered is None:
            return False
        try:
            await self._sent_once("POST", *self._answered, {"timeout": LIST_TIMEOUT_S})
        except (RowError, ConfigError, NoSuchPath, _Unanswered):
            return False
        return True

    def _raise_if_final(self, status: int, message: str) -> None:
        """Raise an error if sending again would change nothing; the refusal then counts as an answer."""
        if status >= ERROR or status in (TOO_MANY, TIMED_OUT, CONFLICT):
            return
        self._last_answer_s = time.monotonic()
        if status in (401, 403):
            named = self._settings.api_key_env
            which = f"the key in {named}" if named else "requests without a key; set decoding.endpoint.api_key_env"
            raise ConfigError(f"{self._settings.url} refuses {which} (HTTP {status}: {message})") from None
        if status in (404, 405):
            raise NoSuchPath(f"HTTP {status}: {message}") from None
        if status < FIRST_REFUSAL:
            raise ConfigError(
                f"{self._settings.url} redirects requests to another URL (HTTP {status}), and redirects are not "
                "followed; set decoding.endpoint.url to the server itself (check https and the path)"
            ) from None
        raise RowError(f"refused: HTTP {status}: {message}") from None

    def _require_certificate(self, error: BaseException | None) -> None:
        """Raise ConfigError if a connection failed because the server's certificate is not accepted."""
        while error is not None:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConfigError(
                    f"{self._settings.url}: the certificate is not accepted ({error.verify_message}); set "
                    "SSL_CERT_FILE to a file with your authority's certificates, or correct decoding.endpoint.url"
                ) from None
            error = error.__cause__ or error.__context__

    def _object(self, answer: str) -> dict[str, Any]:
        try:
            require_utf8(answer)
            content = json.loads(answer)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise RowError(f"malformed-answer: the answer is not a JSON object: {answer[:80]!r}")
        return content

    def _message_of(self, body: Any) -> str:
        """The server's message, without the key, which some servers repeat."""
        body = body.get("error", body) if isinstance(body, dict) else body
        body = body.get("message", body) if isinstance(body, dict) else body
        return " ".join(self._without_key(str(body or "")).split())[:MAX_SAID] or "no message"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


def require_utf8(answer: str) -> None:
    """Raise RowError if an answer was no UTF-8: a text would have other characters than the server sent."""
    try:
        answer.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"malformed-answer: the answer is not UTF-8 at character {error.start}") from None


def _failure_in(answer: str) -> tuple[int, Any]:
    """The status of an error that gateways send as HTTP 200, and the error itself; 0 if the answer is no error."""
    try:
        content = json.loads(answer) if '"error"' in answer else None
    except (ValueError, RecursionError):
        return 0, None
    error = content.get("error") if isinstance(content, dict) and not content.get("choices") else None
    if not error:
        return 0, None
    code = str(error.get("code")) if isinstance(error, dict) else ""
    is_status = re.fullmatch("[45][0-9]{2}", code) is not None
    return int(code) if is_status else FIRST_REFUSAL, error


class _Unanswered(Exception):
    """A request got no answer, but may get one if it is sent again; status 0: nothing was received."""

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s


class NoSuchPath(Exception):
    """The server does not know a path, or the requested model."""


def _retry_after(header: str | None) -> float | None:
    """Seconds that a server asks to wait; None if it names none, or a date."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
