"""Drafters and verifiers that other packages provide, as the configuration sees them: no torch, no model.

A package declares them by entry points in the groups `laserbatch.drafters` and `laserbatch.verifiers`. In the
signatures below `decoding` is a `DecodingSettings`, `target` a `LoadedModel`; settings import this module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from laserbatch.pipeline.plugins import UnknownPlugin, load_plugin
from laserbatch.pipeline.validation import Strict

TEXT_SOURCES = ("previous", "prompt", "output", "pool")  # drafters that are built in
# Verifiers that are built in: what they accept, and whether texts depend on drafts.
RULES = {
    "greedy": "accepts a draft token only if plain decoding would write it, so drafts change no text",
    "top_k": "accepts a draft token among the top_k most likely ones, so texts depend on drafts",
    "probability": "accepts a draft token above min_probability, so texts depend on drafts",
    "relaxed": "accepts a draft token among the top_k most likely ones and above min_probability, so texts depend on "
    "drafts",
}


class LoadedDrafter(Protocol):
    """A plug-in drafter that is loaded for a target model."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of a text takes in the drafter's own KV caches."""
        ...

    def drafters(self, decoding: Any, budget: Any, max_tokens: int) -> list[Any]:
        """New `Drafter`s, which know no text yet; each of their KV caches holds at most `max_tokens`."""
        ...


class DrafterPlugin:
    """A drafter that a package provides. An entry point may also name a `Drafter` class that takes no arguments.

    Attributes
    ----------
    Options : the keys of its section, `decoding.drafter_options.<name>`.
    is_calibrated : whether its estimates of acceptance were fitted on held-back texts.
    """

    Options: ClassVar[type[Strict]] = Strict
    is_calibrated: ClassVar[bool] = False

    def check(self, options: Any, decoding: Any) -> None:
        """Raise ValueError if its options and those of decoding contradict each other."""

    def check_files(self, options: Any, decoding: Any, model_dir: Path) -> None:
        """Raise ModelError if the files that it reads are damaged, or do not fit the model in `model_dir`; no weight is
        loaded."""

    def load(self, options: Any, decoding: Any, target: Any) -> LoadedDrafter:
        """Load the models that it drafts with. Raises ModelError: one cannot be read, or does not fit the target."""
        raise NotImplementedError

    def warning(self, options: Mapping[str, Any], drafted_by_source: Mapping[str, int]) -> str | None:
        """A warning for the report about the drafts of a side; `options` are its section as the manifest has it."""


class VerifierPlugin:
    """A rule of acceptance that a package provides.

    `samples` : whether it needs a temperature above 0 and its texts are samples of the model; `summary` : what it
    accepts, and whether texts depend on drafts, as the predicate of a sentence.
    """

    samples: ClassVar[bool] = False
    summary: str = ""

    def check(self, decoding: Any) -> None:
        """Raise ValueError if the options of decoding do not fit it."""

    def make(self, decoding: Any) -> Any:
        """The `Verifier`."""
        raise NotImplementedError


@dataclass(frozen=True)
class _OneClass(DrafterPlugin):
    """A drafter whose entry point names its class."""

    new: Callable[[], Any]
    bytes_per_token: int = 0

    def load(self, options, decoding, target) -> LoadedDrafter:
        return self

    def drafters(self, decoding, budget, max_tokens) -> list[Any]:
        return [self.new()]


def drafter_plugin(name: str) -> DrafterPlugin:
    """The drafter of this name that another package provides. Raises UnknownPlugin."""
    plugin = load_plugin("drafters", name, TEXT_SOURCES)
    if not isinstance(plugin, DrafterPlugin) and not hasattr(plugin, "draft_all"):
        raise UnknownPlugin(f"the entry point of {name!r} names {plugin!r}; expected a Drafter class or DrafterPlugin")
    return plugin if isinstance(plugin, DrafterPlugin) else _OneClass(plugin)


def verifier_plugin(name: str) -> VerifierPlugin:
    """The rule of this name that another package provides. Raises UnknownPlugin."""
    plugin = load_plugin("verifiers", name, tuple(RULES))
    if not isinstance(plugin, VerifierPlugin):
        raise UnknownPlugin(f"the entry point of {name!r} names {plugin!r}; expected an instance of VerifierPlugin")
    return plugin


def rule_sentence(name: str) -> str:
    """What a rule accepts, and whether texts depend on drafts; empty if it does not say, or is not installed."""
    try:
        summary = RULES.get(name) or verifier_plugin(name).summary
    except UnknownPlugin:
        summary = ""
    return f"The rule {name} {summary}." if summary else ""
