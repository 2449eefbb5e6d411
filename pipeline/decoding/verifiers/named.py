"""The rules by their names in the configuration."""

from collections.abc import Callable, Mapping

from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.decoding.verifiers.conditional import Conditional
from laserbatch.pipeline.decoding.verifiers.greedy import Greedy
from laserbatch.pipeline.decoding.verifiers.k_seq import KSeq
from laserbatch.pipeline.decoding.verifiers.leviathan import Leviathan
from laserbatch.pipeline.decoding.verifiers.loosely import Loosely
from laserbatch.pipeline.decoding.verifiers.relaxed import Relaxed
from laserbatch.pipeline.decoding.verifiers.rsd import RecursiveRejection
from laserbatch.pipeline.decoding.verifiers.specinfer import MultiRound
from laserbatch.pipeline.decoding.verifiers.typical import Typical
from laserbatch.pipeline.decoding.verifiers.verifier import Verifier

NAMED: Mapping[str, Callable[[DecodingSettings], Verifier]] = {
    "greedy": lambda settings: Greedy(),
    "top_k": lambda settings: Relaxed(settings.top_k, 0.0),
    "probability": lambda settings: Relaxed(None, settings.min_probability),
    "relaxed": lambda settings: Relaxed(settings.top_k, settings.min_probability),
    "typical": lambda settings: Typical(settings.min_probability),
    "aasd": lambda settings: Conditional(beta=settings.min_probability),
    "fly": lambda settings: Loosely(),
    "leviathan": lambda settings: Leviathan(),
    "specinfer": lambda settings: MultiRound(),
    "k_seq": lambda settings: KSeq(),
    "rsd": lambda settings: RecursiveRejection(),
}


def verifier_from(settings: DecodingSettings) -> Verifier:
    """The rule that the settings name."""
    return NAMED[settings.verifier](settings)
