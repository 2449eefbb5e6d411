"""`laserbatch data`: make, import and check input tables."""

from collections.abc import Iterable
from pathlib import Path

import typer

from laserbatch.jobs.console import ExitCode, progress, say, summary
from laserbatch.jobs.settings import CONFIG, JSON, config_here, load_settings
from laserbatch.jobs.stages.inputs import check_inputs, left_out_of_prompts
from laserbatch.pipeline.errors import TableError
from laserbatch.pipeline.sample.world import write_sample_world
from laserbatch.pipeline.storage.atomic import TEMPORARY_SUFFIX, atomic_folder, folders_beside
from laserbatch.pipeline.tables.findings import count_faults
from laserbatch.pipeline.tables.mapping import import_mapped, load_mapping
from laserbatch.pipeline.tables.parts import require_only_tables
from laserbatch.pipeline.tables.read import describe, find_exact_copies
from laserbatch.pipeline.tables.source import list_source
from laserbatch.pipeline.tables.streamed import open_tables

app = typer.Typer(no_args_is_help=True, add_completion=False)

NUM_LINES_OF_FINDINGS = 200


@app.command()
def check(
    path: str | None = typer.Argument(
        None, help="Folder with users, items and interactions, or its URI; default: the configured tables."
    ),
    config: Path | None = CONFIG,
    as_json: bool = JSON,
) -> None:
    """Check that tables can be used, as `nightly` does, and name table, column, row and value of every fault.

    A warning names the files of a table's folder that are left out (hidden, empty, not Parquet).

    Exit code 0 if there is no fault (warnings are allowed); 3 otherwise.

    Example: laserbatch data check mytables/ --config laserbatch.yaml
    """
    _report_check(path, as_json, config=config)


@app.command(name="import")
def import_(
    source: Path = typer.Argument(..., help="Folder with the files to read."),
    out: Path = typer.Argument(..., help="Folder to write the tables to."),
    mapping: Path = typer.Option(
        ..., help="YAML that says which column becomes which; configs/import_example.yaml explains it."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Make tables by a column mapping from any Parquet or CSV files or from database queries, and check them.

    A TSV has no quoted fields unless the mapping sets `csv: {quote: '"'}` for it; quoted fields over several lines
    are counted and shown, and files that are left out are named. OUT appears whole or not at all. --overwrite replaces
    a folder of tables, and nothing else.
    Exit code 3 when a file cannot be read, or the result has faults (it is kept).

    Example: laserbatch data import exports/ tables/ --mapping mapping.yaml
    """
    loaded = load_mapping(mapping)
    read = [file.path for table, part in loaded.tables().items() for file in list_source(part, source, table).files]
    target = _replaceable(out, [source, *read])
    with atomic_folder(target, overwrite) as folder, progress("importing rows") as bar:
        notes: list[str] = []
        dropped = import_mapped(loaded, source, folder, bar.advance, notes.append)
    for left in folders_beside(target, TEMPORARY_SUFFIX):
        notes.append(f"{left} was left by a command that was killed; remove it, unless another one is writing {out}")
    if not as_json:
        for note in notes:
            say(note)
    written = ({"rows left out": dropped} if dropped else {}) | ({"notes": notes} if as_json and notes else {})
    _report_check(out, as_json, written, config_here())


@app.command()
def sample(
    out: Path = typer.Argument(..., help="Folder to write the tables to."),
    num_users: int = typer.Option(400, min=1, help="Number of users; they are streamed to disk, so a million works."),
    num_items: int = typer.Option(300, min=20, help="Number of items in the catalogue."),
    days: int = typer.Option(60, min=2, help="Days of ratings; the last brings new users, items and behaviour."),
    seed: int = typer.Option(0, min=0, help="Seed of the sample; the same seed gives the same files."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT if it is there."),
    as_json: bool = JSON,
) -> None:
    """Write a synthetic sample world: a catalogue, users with tastes, and ratings over some weeks.

    Example: laserbatch data sample world/ --num-users 1000 --seed 7
    """
    with atomic_folder(_replaceable(out), overwrite) as folder, progress("sample world", num_users) as bar:
        write_sample_world(folder, num_users, num_items, days, seed=seed, progress=bar.advance)
    _report_check(out, as_json, {})


def _replaceable(out: Path, read: Iterable[Path] = ()) -> Path:
    """Resolve OUT. Raises TableError if OUT must not be replaced: it holds an input file or anything but tables."""
    target = out.resolve()
    for path in read:
        if path.resolve().is_relative_to(target):
            raise TableError(f"{out} would replace {path}, which is being imported; give another folder.")
    if target.is_dir():
        require_only_tables(target)
    return target


def _report_check(
    path: Path | str | None, as_json: bool, written: dict | None = None, config: Path | None = None
) -> None:
    """Check tables, by default the configured ones, and print a summary; if there are faults, exit with code 3.

    `written` has further facts on tables that were just written; their rows are counted even if they have faults.
    """
    settings = load_settings(config)
    path = path or settings.tables.required_path
    findings = check_inputs(path, settings)
    num_faults = count_faults(findings)
    if not num_faults:
        findings += left_out_of_prompts(settings, open_tables(path))
    outcome: dict = {"path": str(path), "num_faults": num_faults}
    if not num_faults and not settings.tables.keep_duplicates and (num_copies := find_exact_copies(path).sum()):
        outcome["exact copies of interactions, left out by runs"] = int(num_copies)
    outcome["num_warnings"] = sum(finding.is_warning for finding in findings)
    if not num_faults or written is not None:
        outcome |= {f"num_{name}": entry["num_rows"] for name, entry in describe(path).items()}
    outcome |= written or {}
    if as_json:
        outcome["findings"] = [finding.as_json() for finding in findings]
    else:
        for finding in findings[:NUM_LINES_OF_FINDINGS]:
            say(str(finding))
        if len(findings) > NUM_LINES_OF_FINDINGS:
            say(f"... and {len(findings) - NUM_LINES_OF_FINDINGS} more; --json lists all")
    summary(outcome, as_json)
    if num_faults:
        raise typer.Exit(ExitCode.BAD_INPUT)
