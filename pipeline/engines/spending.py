"""The use of a server, over all attempts at a run: tokens, requests, and who answered."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laserbatch.pipeline.decoding.endpoint_settings import EndpointSettings, TokenPrices
from laserbatch.pipeline.storage.atomic import read_json, write_json
from laserbatch.pipeline.storage.figures import EndpointFigures

SPENDING_FILE = "endpoint.json"  # in the run's folder


@dataclass
class Spending:
    """Counts that a worker adds to, kept in a file of the run's folder."""

    num_requests: int = 0  # answered ones
    num_retries: int = 0
    num_prompt_tokens: int = 0  # cached ones included
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    answered_by: dict[str, int] = field(default_factory=dict)  # the server's description of itself -> number of answers

    @classmethod
    def of(cls, run_dir: Path) -> "Spending":
        """The spending of a run so far. Raises WorkspaceError: its file is damaged."""
        path = run_dir / SPENDING_FILE
        return cls(**read_json(path)) if path.exists() else cls()

    def save(self, run_dir: Path) -> None:
        write_json(asdict(self), run_dir / SPENDING_FILE)

    def add(self, usage: Any, num_prompt: int, num_completion: int, answered_by: str) -> None:
        """Count an answer by the server's `usage` or, if it has none, by our own numbers of tokens."""
        self.num_requests += 1
        self.answered_by[answered_by] = self.answered_by.get(answered_by, 0) + 1
        num_prompt = _counted(usage, "prompt_tokens", num_prompt)
        self.num_prompt_tokens += num_prompt
        self.num_completion_tokens += _counted(usage, "completion_tokens", num_completion)
        details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
        self.num_cached_tokens += min(_counted(details, "cached_tokens", 0), num_prompt)

    def cost(self, prices: TokenPrices | None) -> float | None:
        """The cost of all tokens; None without prices."""
        tokens = self.num_prompt_tokens, self.num_completion_tokens, self.num_cached_tokens
        return None if prices is None else prices.cost(*tokens)

    def figures(self, settings: EndpointSettings) -> EndpointFigures:
        """These counts for a manifest, with the server and the cost."""
        return EndpointFigures(
            url=settings.url, model=settings.model, api=settings.api, cost=self.cost(settings.price_per_million_tokens),
            **asdict(self),
        )  # fmt: skip


def _counted(usage: Any, name: str, otherwise: int) -> int:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and count >= 0 else otherwise
