"""The verifiers of this package, by their names in the configuration."""

from functools import partial

from laserbatch.pipeline.decoding.plugins import VerifierPlugin


class Unsure(VerifierPlugin):
    """A rule of `unsure.py`; the option min_probability sets its `parameter`, if it has one."""

    def __init__(self, name: str, summary: str, parameter: str | None = None) -> None:
        self._name, self._parameter = name, parameter
        self.summary = f"accepts {summary}, so texts depend on drafts"

    def make(self, decoding):
        from laserbatch.research.verifiers import unsure

        options = {} if self._parameter is None else {self._parameter: decoding.min_probability}
        return getattr(unsure, self._name)(**options)


class Sampling(VerifierPlugin):
    """A rule that judges sampled drafts of models by a function of `rejection.py`, such as `first_draw`."""

    samples = True

    def __init__(self, draw: str, summary: str, judges_several: bool = False, **arguments) -> None:
        self.summary = (
            f"judges {summary} by rejection sampling: texts keep the model's distribution, but which sample a text is "
            "depends on the drafts"
        )
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


TYPICAL = Unsure("Typical", "a draft token that is likely enough for the model's entropy", "epsilon")
AASD = Unsure("AASD", "a draft token above a probability that rises with the model's entropy", "beta")
FLY = Unsure("FLy", "any draft token where the model is unsure and then continues as the draft does")
LEVIATHAN = Sampling("first_draw", "the first draw of a draft model")
SPECINFER = Sampling("recursive_rejection", "independent draws of draft models in turn", judges_several=True)
K_SEQ = Sampling("k_seq", "all independent draws of a draft model with one factor")
RSD = Sampling("recursive_rejection", "draws of a draft model without replacement", without_replacement=True)
