"""The rules by their names in the configuration."""

from collections.abc import Callable, Mapping

from laserbatch.pipeline.decoding.plugins import verifier_plugin
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers.relaxed import Greedy, Relaxed
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier

NAMED: Mapping[str, Callable[[DecodingSettings], Verifier]] = {
    "greedy": lambda settings: Greedy(),
    "top_k": lambda settings: Relaxed(settings.top_k, 0.0),
    "probability": lambda settings: Relaxed(None, settings.min_probability),
    "relaxed": lambda settings: Relaxed(settings.top_k, settings.min_probability),
}


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The rule that the settings name."""
    made = NAMED.get(settings.verifier) or verifier_plugin(settings.verifier).make
    return made(settings)
