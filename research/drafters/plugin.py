"""The drafter `trained` of the configuration: small models and a head that were trained to draft for the model."""

from laserbatch.pipeline.decoding.plugins import DrafterPlugin, LoadedDrafter
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.research.drafters.options import TrainedOptions


class TrainedPlugin(DrafterPlugin):
    """Drafts by forwards of trained models; their acceptance estimates were fitted on held-back texts."""

    Options = TrainedOptions
    is_calibrated = True

    def check(self, options: TrainedOptions, decoding) -> None:
        if options.num_models == 0:
            raise ValueError("drafter trained has neither models nor a head: set them in drafter_options.trained")
        if options.branching and decoding.verifier != "rsd":
            raise ValueError(
                f"drafter_options.trained.branching is for verifier rsd, not {decoding.verifier}: set width instead"
            )
        limit = Budget.of(decoding).max_draft_tokens
        if options.branching and 0 < limit < options.branching[0]:
            raise ValueError(
                f"drafter_options.trained.branching starts with {options.branching[0]} tokens, but a draft has at most "
                f"{limit}: lower it, or raise max_draft_tokens"
            )

    def load(self, options: TrainedOptions, decoding, target) -> LoadedDrafter:
        from laserbatch.research.drafters.draft_models import DraftModels

        return DraftModels.load(options, decoding.dtype, target)


TRAINED = TrainedPlugin()
