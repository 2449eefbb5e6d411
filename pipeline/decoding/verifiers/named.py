"""The rules by their names in the configuration."""

from collections.abc import Callable, Mapping
from functools import partial

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers.draws import SamplingRule
from laserbatch.pipeline.decoding.verifiers.rejection import first_draw, k_seq, recursive_rejection
from laserbatch.pipeline.decoding.verifiers.relaxed import Greedy, Relaxed
from laserbatch.pipeline.decoding.verifiers.unsure import Conditional, Loosely, Typical
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier

NAMED: Mapping[str, Callable[[DecodingSettings], Verifier]] = {
    "greedy": lambda settings: Greedy(),
    "top_k": lambda settings: Relaxed(settings.top_k, 0.0),
    "probability": lambda settings: Relaxed(None, settings.min_probability),
    "relaxed": lambda settings: Relaxed(settings.top_k, settings.min_probability),
    "typical": lambda settings: Typical(settings.min_probability),
    "aasd": lambda settings: Conditional(beta=settings.min_probability),
    "fly": lambda settings: Loosely(),
    "leviathan": lambda settings: SamplingRule(first_draw),
    "specinfer": lambda settings: SamplingRule(recursive_rejection),
    "k_seq": lambda settings: SamplingRule(k_seq),
    "rsd": lambda settings: SamplingRule(partial(recursive_rejection, without_replacement=True)),
}


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The rule that the settings name."""
    return NAMED[settings.verifier](settings)
