"""`laserbatch doctor`: check in seconds whether a night can run here, and say how to fix what prevents it."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from laserbatch.jobs.checks.result import CheckResult
from laserbatch.jobs.console import ExitCode, stdout, summary, visible
from laserbatch.jobs.settings import CONFIG, JSON, SAMPLE_MODEL, WORKSPACE, Settings, load_settings
from laserbatch.pipeline.errors import LaserbatchError

logger = logging.getLogger("laserbatch")

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
# Functions of `jobs/checks`. Their modules are imported when they run, so a failing import of torch is a finding too.
CHECKS = (
    "machine.check_versions", "machine.check_gpu", "machine.check_kernels", "machine.check_batch",
    "machine.check_engine", "model.check_model", "model.check_drafters", "model.check_dtype", "model.check_memory",
    "trial.check_answer", "machine.check_workspace", "machine.check_encoder", "machine.check_pools",
    "machine.check_tables", "machine.check_delivery", "machine.check_extensions",
)  # fmt: skip
MODEL_CHECKS = ("model.check_model", "model.check_dtype", "model.check_memory", "trial.check_model_here")


def doctor(
    config: Path | None = CONFIG,
    workspace: Path | None = WORKSPACE,
    model_dir: str | None = typer.Option(
        None, "--model", metavar="FOLDER", help="Check only the model of this folder, and measure what it writes."
    ),
    with_ray: bool = typer.Option(True, "--ray/--no-ray", help="Start or join Ray, which takes some seconds."),
    as_json: bool = JSON,
) -> None:
    """Check whether a night can run here, from versions and GPU to model, disk and tables; print how to fix faults.

    Your own model, if it fits this machine, answers one short question, which shows whether its texts end. With
    --model, a model is checked before it is configured: how fast it writes here, how many hours your tables take,
    and whether its texts have the form that the templates ask for. That takes up to two minutes.
    Exit code 0: a night can run; 3: it cannot.

    Example: `laserbatch doctor --model qwen`
    """
    overrides: dict[str, Any] = {"workspace": workspace}
    if model_dir is not None:
        overrides["decoding.model"] = model_dir if model_dir == SAMPLE_MODEL else str(Path(model_dir).resolve())
    settings = load_settings(config, overrides)
    checks = MODEL_CHECKS if model_dir is not None else (*CHECKS, "machine.check_ray") if with_ray else CHECKS
    findings = examine(settings, checks)
    num_faults = sum(finding.level == "fault" for finding in findings)
    if as_json:
        summary({"num_faults": num_faults, "findings": [asdict(finding) for finding in findings]}, as_json=True)
    else:
        for finding in findings:
            line = f"{finding.about}: {finding.found}" + (f". {finding.hint}" if finding.hint else "")
            stdout.print(Text(f"{finding.level:<8}", STYLES[finding.level]) + Text(visible(line)), soft_wrap=True)
    if num_faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


def examine(settings: Settings, checks: Sequence[str]) -> list[CheckResult]:
    """The findings of all checks; an error in a check becomes a finding, and the other checks still run."""
    findings: list[CheckResult] = []
    for check in checks:
        module, _, function = check.partition(".")
        about = function.removeprefix("check_").replace("_", " ")
        try:
            findings += getattr(import_module(f"laserbatch.jobs.checks.{module}"), function)(settings)
        except LaserbatchError as error:  # their messages say what to do
            if str(error) not in (finding.found for finding in findings):
                findings.append(CheckResult(about, "fault", str(error)))
        except Exception as error:  # a library's or our own fault; the other checks still help
            logger.debug("the check of %s failed", about, exc_info=True)
            hint = None if isinstance(error, RuntimeError) else "`laserbatch -v doctor` shows the traceback"
            hint = "Check that path, and that it may be read and written" if isinstance(error, OSError) else hint
            findings.append(CheckResult(about, "fault", f"{type(error).__name__}: {error}", hint))
    return findings
