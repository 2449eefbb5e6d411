"""Stages of a night as values, and the loop that times each, records its result and skips those that are done."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from laserbatch.jobs.stages.night import Night


@dataclass(frozen=True)
class Stage:
    """One stage of a night."""

    name: str  # in the report, the events and `status`
    run: Callable[..., Any]  # called with the night and what `run_stages` was given; does what is not done yet
    result: str | None = None  # `group.field` of the manifest that gets what `run` returns; None: nothing is returned
    is_due: Callable[[Night], bool] = lambda night: True  # False where the stage is done, or not wanted


def run_stages(night: Night, stages: Iterable[Stage], *values: Any) -> None:
    """Run the stages that are due, one after another; the manifest is saved after each."""
    for stage in stages:
        if stage.is_due(night):
            with night.stage(stage.name):
                value = stage.run(night, *values)
                if stage.result is not None:
                    group, field = stage.result.split(".")
                    setattr(getattr(night.manifest, group), field, value)
