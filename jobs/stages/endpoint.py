"""What a server that writes texts cost a night, and will probably cost it."""

from collections.abc import Iterator
from contextlib import contextmanager

from laserbatch.jobs.console import say
from laserbatch.jobs.events import emit
from laserbatch.jobs.stages.night import Night, means
from laserbatch.pipeline.engines.spending import Spending
from laserbatch.pipeline.sides import Side


@contextmanager
def recorded_endpoint(night: Night) -> Iterator[None]:
    """Add to the manifest which server wrote the texts of the block and what they cost, also if it ends early."""
    prices = night.settings.decoding.endpoint and night.settings.decoding.endpoint.price_per_million_tokens
    if prices is not None:
        emit("endpoint", prices=prices.model_dump())  # by which the cost is shown while the night runs
    try:
        yield
    finally:
        if (server := night.settings.decoding.endpoint) is not None:
            figures = Spending.of(night.run.root).figures(server)
            night.manifest.generation.endpoint = figures
            if figures.changes:
                say(f"WARNING: {figures.changes}")


def predicted_cost(night: Night, side: Side, num_rows: int, num_tokens: int | None) -> float | None:
    """The predicted price of a side's texts: prompts are as long as those of the night before, and none is cached.

    None without a price, or without a night before.
    """
    server = night.settings.decoding.endpoint
    prices = None if server is None else server.price_per_million_tokens
    if prices is None or night.previous is None or num_tokens is None:
        return None
    (num_prompt,) = means(night.previous, side, ["num_prompt_tokens"])
    return None if num_prompt is None else prices.cost(round(num_rows * num_prompt), num_tokens)
