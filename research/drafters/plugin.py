"""The drafter `trained` of the configuration: small models and a head that were trained to draft for the model."""

from itertools import accumulate

from laserbatch.pipeline.decoding.plugins import DrafterPlugin, LoadedDrafter
from laserbatch.pipeline.decoding.settings import Budget
from laserbatch.research.drafters.options import MAX_TREE, TrainedOptions

USUAL = TrainedOptions()  # a smaller limit shortens these drafts


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
        if options.width > 1 and decoding.verifier == "leviathan":
            raise ValueError(
                f"drafter_options.trained.width is {options.width}, but verifier leviathan judges one token at each "
                "depth: leave width out, or set `verifier: specinfer`"
            )
        limit = MAX_TREE if decoding.chooses_by_step else Budget.of(decoding).max_draft_tokens
        name, num_tokens = "width times length", options.width * options.length
        if options.branching:
            name, num_tokens = "branching", sum(accumulate(options.branching, int.__mul__))
        is_usual = name != "branching" and (options.width, options.length) == (USUAL.width, USUAL.length)
        if 0 < limit < num_tokens and not is_usual:
            advice = f", or set max_draft_tokens: {num_tokens}" if num_tokens <= MAX_TREE else ""
            raise ValueError(
                f"drafter_options.trained: a draft by {name} has {num_tokens} tokens, but a draft has at most {limit}: "
                f"lower {name}{advice}"
            )

    def check_files(self, options: TrainedOptions, decoding, model_dir) -> None:
        from laserbatch.research.drafters.draft_models import require_fitting

        require_fitting(options, model_dir, decoding.adapter)

    def load(self, options: TrainedOptions, decoding, target) -> LoadedDrafter:
        from laserbatch.research.drafters.draft_models import DraftModels

        return DraftModels.load(options, decoding.dtype, target)

    def warning(self, options, drafted_by_source) -> str | None:
        if not options.get("models") or drafted_by_source.get("model"):
            return None
        return (
            "the models of decoding.drafter_options.trained drafted nothing. They draft for no prompt that together "
            "with its text is longer than their context (max_position_embeddings in config.json): take models with a "
            "longer context, or lower knowledge.max_prompt_tokens"
        )


TRAINED = TrainedPlugin()
