"""`laserbatch`: every command, wired; and the one place where an error becomes a line and an exit code."""

import logging
import sys

import typer

from ctr.errors import CtrError
from jobs import ctr, data, encode, generate, init, nightly, pools, try_one
from jobs.console import ExitCode, logger, stderr
from jobs.report_command import report
from pipeline.errors import PipelineError, RunFailed, WorkspaceBusy
from retrieval_pools.errors import PoolError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Nightly LLM knowledge for recommender systems, by retrieval speculative decoding.\n\n"
    "Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 bad input or configuration, "
    "4 too many rows failed, 5 the workspace is in use.",
)
app.add_typer(data.app, name="data", help="Sample, import and check input tables.")
app.add_typer(pools.app, name="pools", help="Build, list, inspect and query retrieval pools.")
app.add_typer(ctr.app, name="ctr", help="Train and compare CTR models on the features of a run.")
app.command()(init.init)
app.command()(nightly.nightly)
app.command()(nightly.demo)
app.command()(generate.generate)
app.command()(encode.encode)
app.command(name="try")(try_one.try_one)
app.command()(report)


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
