"""`laserbatch`: the table of its commands, and the one place where an error becomes a line and an exit code."""

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version

import typer

from laserbatch.jobs.console import ExitCode, LazyCommand, lazy_app, logger, print_line
from laserbatch.jobs.failures import end_at_sigterm, exit_code_of, failure_object, line_of
from laserbatch.pipeline.plugins import UnknownPlugin, installed, load_plugin

# transformers loads torchao wherever it is installed, which then warns about parts that do not fit the machine.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

_HELP = {  # by command: the first line of its help
    "data": "Sample, import and check input tables.",
    "init": "Write a short configuration for your own tables, and a guessed mapping for you to correct.",
    "model": "Make a model folder from a GGUF file.",
    "config": "Show every option with its value, its default and what it does.",
    "try": "Write the text of one entity: show prompt, pool, the source of each part, and whether a night would keep "
    "it.",
    "nightly": "Run a whole night: generate, encode, build pools, compare, report, publish.",
    "backfill": "Run the nights of a range of dates, each built on the one before it; finished nights are skipped.",
    "experiment": "Try templates, models or frameworks on a sample of entities; published runs do not change.",
    "ctr": "Train, evaluate, apply and compare CTR models on the features of a run.",
    "features": "Join features to a log by time; export them to other tools.",
    "runs": "List, compare, publish, roll back and remove the runs of nights.",
    "forget": "Remove users or items from every run and pool of a workspace, and write a receipt of what was removed.",
    "pools": "Build, list, choose and remove retrieval pools.",
    "status": "Show which run is under way, how far it is, how long it will take, and what is published.",
    "doctor": "Check whether a night can run here, from versions and GPU to model, disk and tables; print how to fix "
    "faults.",
    "demo": "Run two nights on a sample world with the bundled model; the second drafts from the texts of the first.",
}
_TARGETS = {"try": "try_one:try_one", "backfill": "nightly:backfill", "demo": "nightly:demo"}
_TARGETS |= {name: f"{name}:app" for name in ("data", "model", "ctr", "features", "runs", "pools")}
COMMANDS = {name: LazyCommand(_TARGETS.get(name, f"{name}:{name}"), about) for name, about in _HELP.items()}


def _commands_of_plugins() -> Iterator[tuple[str, LazyCommand]]:
    """Yield the commands of other packages; skip a command that cannot be loaded or has the name of one of ours."""
    try:
        names = list(installed("commands"))
    except UnknownPlugin as error:
        print_line(f"laserbatch: the commands of other packages are left out: {error}")
        return
    for name in names:
        try:
            command = load_plugin("commands", name)
        except UnknownPlugin as error:
            print_line(f"laserbatch: the command {name} is left out: {error}")
            continue
        if name in COMMANDS:
            print_line(f"laserbatch: the command {name} of another package is left out: laserbatch has one itself")
        else:
            yield name, command


app = lazy_app(
    {**COMMANDS, **dict(_commands_of_plugins())},
    rich_markup_mode="markdown",
    help="Every night, write texts about users and items with an LLM, drafted from the texts of earlier nights, and "
    "turn them into features for CTR models.\n\n"
    "Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 bad input or configuration, or no room on the disk, "
    "4 the result is refused (by a gate, a limit, a provider; an id to forget is found nowhere), 5 the workspace is in "
    "use, 6 a server, Ray or a bucket does not answer (try again), 130 interrupted, 141 broken pipe, 143 ended by "
    "SIGTERM; docs/nights.md explains them. With --json a failure is an object too.",
)


def _say_version(is_requested: bool) -> None:
    if is_requested:
        print(f"laserbatch {version('laserbatch')}")
        raise typer.Exit


@app.callback()
def _global(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log every shard; show tracebacks."),
    _version: bool = typer.Option(
        False, "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)


def report_error(error: BaseException) -> int | str | None:
    """Print why a command ended, as a line and, with --json, also as an object; return its exit code."""
    while isinstance(error, SystemExit | typer.Exit | typer.Abort) and error.__context__ is not None:
        error = error.__context__  # the error that Typer caught
    if isinstance(error, SystemExit | typer.Exit):
        return error.code if isinstance(error, SystemExit) else error.exit_code
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it ends
        return ExitCode.NOT_READ
    usage_message = getattr(error, "format_message", None)  # Typer has printed it
    if usage_message is not None:
        code, line = getattr(error, "exit_code", ExitCode.USAGE), usage_message()
    else:
        code, line = exit_code_of(error), line_of(error)
    if "-v" in sys.argv or "--verbose" in sys.argv:
        traceback.print_exception(error)
    if usage_message is None:
        print_line(f"laserbatch: {line}")
    if "--json" in sys.argv:
        print(json.dumps(failure_object(error) | {"error": line, "exit_code": int(code)}, ensure_ascii=False))
    return code


def main() -> None:
    os.umask(os.umask(0o022) | 0o002)  # no file is writable for everybody
    end_at_sigterm()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BaseException as error:  # printed as one line, whatever it is
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
