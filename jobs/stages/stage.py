"""Stages of a night as values, and the loop that times each, records its result and skips those that are done."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from laserbatch.jobs.stages.night import Night


@dataclass(frozen=True)
class Stage:
    """One stage of a night.

    Attributes
    ----------
    name : in the report, the events and `status`.
    run : called with the night and what `run_stages` was given; does what is not done yet.
    result : the field of the manifest that gets what `run` returns, `group.field`; None: `run` returns nothing.
    is_due : False where the stage is done, or not wanted.
    """

    name: str
    run: Callable[..., Any]
    result: str | None = None
    is_due: Callable[[Night], bool] = lambda night: True


def run_stages(night: Night, stages: Iterable[Stage], *given: Any) -> None:
    """Run the stages that are due, one after another; the manifest is saved after each."""
    for stage in stages:
        if stage.is_due(night):
            with night.stage(stage.name):
                value = stage.run(night, *given)
                if stage.result is not None:
                    group, field = stage.result.split(".")
                    setattr(getattr(night.manifest, group), field, value)
