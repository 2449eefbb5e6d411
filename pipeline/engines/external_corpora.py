"""The external corpora of an SGLang server: more texts for its n-gram algorithm to draft from.

A corpus makes the server faster and changes no text. So all failures here are one error, CorpusError, for a warning.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings
from laserbatch.pipeline.engines.endpoint_client import SGLANG, EndpointClient, NoSuchPath
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.errors import ConfigError, LaserbatchError, RowError

BUDGET = "speculative_ngram_external_sam_budget"  # fields of SGLang's `/server_info`
MAX_TOKENS = "speculative_ngram_external_corpus_max_tokens"
_T = TypeVar("_T")


class CorpusError(LaserbatchError):
    """The reason why a server has no corpus of ours, or why it still has one."""


class ExternalCorpora:
    """Requests about the corpora of one server; each is sent once, and blocks until it is answered.

    Raises CorpusError: the server refuses a request, or does not answer it.
    """

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings

    def room(self, corpus_id: str) -> int | None:
        """The number of tokens that a corpus may have besides the server's others; None if this server takes none.

        A server takes corpora if it is SGLang, drafts by n-grams, and was started with draft tokens for corpora.
        """
        return self._asked(lambda client: _room(client, corpus_id))

    def replace(self, corpus_id: str, documents: list[str]) -> int:
        """Upload a corpus in place of the one with its id; returns the number of tokens that the server loaded."""
        body = {"corpus_id": corpus_id, "documents": documents}

        async def replaced(client: EndpointClient) -> dict[str, Any]:
            await _removed(client, corpus_id)
            return await client.at_root("/add_external_corpus", body, self._settings.timeout_s)

        answer = self._asked(replaced)
        num_tokens = answer.get("loaded_token_count")
        if not isinstance(num_tokens, int):
            raise CorpusError("the server does not say how many tokens it loaded")
        return num_tokens

    def remove(self, corpus_id: str) -> None:
        """Remove a corpus, if the server has it."""
        self._asked(lambda client: _removed(client, corpus_id))

    def _asked(self, ask: Callable[[EndpointClient], Awaitable[_T]]) -> _T:
        async def answer() -> _T:
            client = EndpointClient(self._settings, Spending(), sends_again=False)
            try:
                return await ask(client)
            finally:
                await client.close()

        try:
            return asyncio.run(answer())
        except (RowError, ConfigError, NoSuchPath) as error:
            raise CorpusError(str(error)) from None


async def _room(client: EndpointClient, corpus_id: str) -> int | None:
    if (await client.card()).get("owned_by") != SGLANG:
        return None
    try:
        info = await client.at_root("/server_info")
    except NoSuchPath:  # a router in front of several servers
        return None
    budget, max_tokens = info.get(BUDGET), info.get(MAX_TOKENS)
    if info.get("speculative_algorithm") != "NGRAM" or not isinstance(budget, int) or not isinstance(max_tokens, int):
        return None
    if budget < 1:
        return None
    listed = (await client.at_root("/list_external_corpora")).get("corpus_token_counts")
    sizes = listed if isinstance(listed, dict) else {}
    others = [size for name, size in sizes.items() if name != corpus_id and isinstance(size, int)]
    if len(others) >= budget:  # SGLang divides the budget evenly, and drafts from no corpus where this gives 0
        raise CorpusError(f"the server has {len(others)} other corpora, and {BUDGET} is {budget}: no room is left")
    return max(0, max_tokens - sum(others))


async def _removed(client: EndpointClient, corpus_id: str) -> None:
    await client.at_root("/remove_external_corpus", {"corpus_id": corpus_id})
