"""The verifiers of this package, by their names in the configuration."""

from functools import partial

from laserbatch.pipeline.decoding.plugins import VerifierPlugin


class Unsure(VerifierPlugin):
    """A rule of `unsure.py`; the option min_probability sets its `parameter`, if it has one."""

    def __init__(self, name: str, parameter: str | None = None) -> None:
        self._name, self._parameter = name, parameter

    def make(self, decoding):
        from laserbatch.research.verifiers import unsure

        options = {} if self._parameter is None else {self._parameter: decoding.min_probability}
        return getattr(unsure, self._name)(**options)


class Sampling(VerifierPlugin):
    """A rule that judges sampled drafts of models by a function of `rejection.py`, such as `first_draw`."""

    samples = True

    def __init__(self, draw: str, judges_several: bool = False, **arguments) -> None:
        self._draw, self._judges_several, self._arguments = draw, judges_several, arguments

    def check(self, decoding) -> None:
        rule = f"verifier {decoding.verifier}"
        if "trained" not in decoding.drafters:
            raise ValueError(
                f"{rule} judges drafts that a small model or a head samples: add trained to drafters, or set `greedy`"
            )
        options = decoding.options_of("trained")
        if options.num_models > 1 and (not self._judges_several or options.head is not None):
            raise ValueError(f"{rule} judges drafts of one model, but {options.num_models} are named: name one")

    def make(self, decoding):
        from laserbatch.research.verifiers import rejection
        from laserbatch.research.verifiers.draws import SamplingRule

        draw = getattr(rejection, self._draw)
        return SamplingRule(partial(draw, **self._arguments) if self._arguments else draw)


TYPICAL, AASD, FLY = Unsure("Typical", "epsilon"), Unsure("AASD", "beta"), Unsure("FLy")
LEVIATHAN = Sampling("first_draw")
SPECINFER = Sampling("recursive_rejection", judges_several=True)
K_SEQ = Sampling("k_seq")
RSD = Sampling("recursive_rejection", without_replacement=True)
