"""`laserbatch`: every command, wired; and the one place where an error becomes a line and an exit code."""

import logging
import sys

import typer

from ctr.errors import CtrError
from jobs.console import ExitCode, logger, stderr
from jobs.lazy_commands import LazyCommand, add_lazy_commands, lazy_group
from pipeline.errors import PipelineError, RunFailed, WorkspaceBusy
from retrieval_pools.errors import PoolError

# transformers loads torchao wherever it is installed, which then tells which of its own parts do not fit the machine.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

COMMANDS = {
    "data": LazyCommand("jobs.data:app", "Sample, import and check input tables."),
    "init": LazyCommand(
        "jobs.init:init",
        "Write a commented configuration for your own tables, with a guessed mapping to be corrected.",
    ),
    "try": LazyCommand(
        "jobs.try_one:try_one",
        "Show one entity being written: its prompt, its pool, its text by source, and whether a night keeps it.",
    ),
    "nightly": LazyCommand(
        "jobs.nightly:nightly", "Run a whole night: generate, encode, compare, publish, build pools, report."
    ),
    "generate": LazyCommand("jobs.generate:generate", "Generate the knowledge of a date; nothing is published."),
    "encode": LazyCommand(
        "jobs.encode:encode", "Encode the texts of a run into feature tables, by the run's own settings."
    ),
    "ctr": LazyCommand("jobs.ctr:app", "Train and compare CTR models on the features of a run."),
    "pools": LazyCommand("jobs.pools:app", "Build, list, inspect, query and simulate retrieval pools."),
    "report": LazyCommand(
        "jobs.report_command:report", "Write the HTML report of a run again, from the run's manifest alone."
    ),
    "demo": LazyCommand(
        "jobs.nightly:demo",
        "Two nights on a sample world, with the bundled model: the second is faster because the first happened.",
    ),
}

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Nightly LLM knowledge for recommender systems, by retrieval speculative decoding.\n\n"
    "Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 bad input or configuration, "
    "4 too many rows failed, 5 the workspace is in use.",
)
add_lazy_commands(app, COMMANDS)


@app.callback()
def _global(verbose: bool = typer.Option(False, "--verbose", "-v", help="Log every shard; show tracebacks.")) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)


def exit_code_of(error: Exception) -> ExitCode:
    """The exit code that an error ends a command with."""
    if isinstance(error, WorkspaceBusy):
        return ExitCode.BUSY
    if isinstance(error, RunFailed):
        return ExitCode.RUN_FAILED
    if isinstance(error, PipelineError | PoolError | CtrError):
        return ExitCode.BAD_INPUT
    return ExitCode.UNEXPECTED


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KeyboardInterrupt:
        stderr.print("interrupted; run the same command again to go on where it stopped", markup=False)
        sys.exit(130)
    except Exception as error:
        code = exit_code_of(error)
        if code is ExitCode.UNEXPECTED or "-v" in sys.argv or "--verbose" in sys.argv:
            logging.getLogger("laserbatch").exception("unexpected error")
        stderr.print(f"laserbatch: {error}", markup=False, soft_wrap=True)
        sys.exit(code)
