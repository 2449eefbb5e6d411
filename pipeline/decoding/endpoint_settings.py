"""Options of `decoding.engine: endpoint`: the server, the form and rate of requests, and the limit on their cost."""

import os
import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.validation import Strict

BATCH_SHARD_ROWS = 100_000  # rows of a shard under `mode: batch`, which may take hours however many texts it has
# Fields that other options set, or that would change the shape of an answer.
OURS_IN_REQUESTS = {"model", "prompt", "messages", "stream", "n", "best_of", "echo"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TokenPrices(Strict):
    """Prices of a million tokens, in any currency."""

    input: float = Field(ge=0, description="A million tokens of prompts cost this much.")
    output: float = Field(ge=0, description="A million tokens of answers cost this much.")
    cached: float | None = Field(
        default=None, ge=0,
        description="A million tokens of prompts that the server had in its cache cost this much. null: as much as "
        "other tokens of prompts.",
    )  # fmt: skip

    def cost(self, num_prompt: int, num_completion: int, num_cached: int = 0) -> float:
        """The cost of prompt tokens, `num_cached` of them cached, and of answer tokens."""
        cached = self.input if self.cached is None else self.cached
        return ((num_prompt - num_cached) * self.input + num_cached * cached + num_completion * self.output) / 1e6


class EndpointSettings(Strict):
    """The server that writes texts, and the limits that hold for it."""

    url: str = Field(description="The server's API is at this URL, which usually ends in /v1.")
    model: str = Field(description="The server calls the model by this name.")
    api: Literal["completions", "chat"] = Field(
        default="completions",
        description="completions: prompts are sent as token ids, made with the tokenizer in the folder decoding.model. "
        "chat: prompts are sent as messages, to servers that take no token ids; without decoding.model the bundled "
        "tokenizer counts their tokens.",
    )
    mode: Literal["requests", "batch"] = Field(
        default="requests",
        description="requests: each text is a request, answered at once. batch: the requests of a shard go to the "
        "provider's batch API, which answers within a day and often costs half.",
    )
    api_key_env: str | None = Field(
        default=None,
        description="The key of the server is in this environment variable. null: no key is sent.",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=604_800, description="A request that takes more seconds is sent again."
    )
    give_up_after_s: float = Field(
        default=600.0, gt=0,
        le=1500,  # a worker that reports nothing for longer counts as hung
        description="The night ends, and can go on later, if the server answers no request for this many seconds.",
    )  # fmt: skip
    requests_per_minute: float | None = Field(
        default=None, ge=0.01, description="At most this many requests are sent in a minute. null: no limit."
    )
    tokens_per_minute: float | None = Field(
        default=None, ge=1,
        description="Prompts plus max_new_tokens of a minute's requests are at most this many tokens. null: no limit.",
    )  # fmt: skip
    prediction: bool = Field(
        default=False,
        description="The previous text of an entity is sent as `prediction`, for servers that take predicted outputs "
        "(OpenAI, with api chat). They answer faster, and some bill predicted tokens that they reject.",
    )
    extra_body: dict[str, Any] = Field(
        default={},
        description="These fields are added to each request, such as {service_tier: flex}; a field that is null is "
        "left out of requests.",
    )
    price_per_million_tokens: TokenPrices | None = Field(
        default=None,
        description="Tokens cost this much, such as {input: 0.1, output: 0.4, cached: 0.05}; plans and reports then "
        "show costs. null: they show none.",
    )
    max_cost: float | None = Field(
        default=None, gt=0,
        description="A night ends, and can go on later, before its texts cost more than this. null: no limit.",
    )  # fmt: skip

    @field_validator("url")
    @classmethod
    def _is_plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL such as http://localhost:8000/v1")
        return url.rstrip("/")

    @field_validator("extra_body")
    @classmethod
    def _leaves_requests_alone(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(fields.keys() & OURS_IN_REQUESTS):
            raise ValueError(f"extra_body has {', '.join(reserved)}, which laserbatch sets: leave them out")
        return fields

    @model_validator(mode="after")
    def _go_together(self) -> "EndpointSettings":
        # A possible secret is refused here, where the message does not show its value.
        parts = urlsplit(self.url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "url has a user name, a password, a query or a fragment, which reports would show: leave it out, and "
                "set api_key_env to the environment variable that has the key"
            )
        try:
            is_host = bool((parts.hostname or "").encode("idna")) and parts.port != 0
        except ValueError:  # not a valid host name, or the port is no number
            is_host = False
        if not is_host or not self.url.isprintable() or " " in self.url or "$" in self.url:
            raise ValueError(
                "url has an invalid host or port, a space, or a $ (variables are not expanded); expected, for example, "
                "http://localhost:8000/v1"
            )
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            raise ValueError("api_key_env is not the name of an environment variable, such as OPENAI_API_KEY")
        if self.prediction and self.api != "chat":
            raise ValueError("prediction needs `api: chat`; set it, or `prediction: false`")
        if self.max_cost is not None and self.price_per_million_tokens is None:
            raise ValueError("max_cost needs price_per_million_tokens, by which the cost is computed: set both")
        return self

    def key(self) -> str | None:
        """The server's API key, or None if it takes none. Raises ConfigError: the environment variable holds no key."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"the environment variable {self.api_key_env} (decoding.endpoint.api_key_env) is not set, or is empty; "
                "set it where the night runs, and on a Ray cluster also where its workers run"
            )
        if not re.fullmatch("[!-~]+", key):  # it goes into a header; the message does not show it
            raise ConfigError(
                f"the environment variable {self.api_key_env} (decoding.endpoint.api_key_env) holds no valid key: it "
                "has a space, a line break or a character that is not ASCII; copy the key again"
            )
        return key

    def provenance(self) -> dict[str, Any]:
        """The options that change texts: the form of prompts, and the fields that are added to requests."""
        named = {"api": self.api} if self.api != "completions" else {}
        return named | ({"extra_body": self.extra_body} if self.extra_body else {})
