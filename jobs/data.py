"""`laserbatch data`: make, import and check input tables.

Owns the commands; what they do is `pipeline.tables`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jobs.console import ExitCode, progress, say, summary

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Sample, import and check input tables.")

NUM_LINES_OF_FINDINGS = 200
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


class SourceFormat(StrEnum):
    """What `data import` reads."""

    MOVIELENS_100K = "movielens-100k"
    MOVIELENS_1M = "movielens-1m"
    MOVIELENS_10M = "movielens-10m"
    TABLE = "table"


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="Folder with users, items and interactions.")],
    as_json: JsonOption = False,
) -> None:
    """Check that tables can be used, and name table, column, row and value of all that is wrong.

    Exit code 0 when nothing is, 3 otherwise.

    Example: laserbatch data check mytables/
    """
    num_faults = _report_check(path, as_json)
    if num_faults:
        raise typer.Exit(ExitCode.BAD_INPUT)


@app.command(name="import")
def import_(
    source_format: Annotated[
        SourceFormat,
        typer.Argument(
            metavar="FORMAT", help="movielens-100k, movielens-1m, movielens-10m, or table (any Parquet or CSV)."
        ),
    ],
    source: Annotated[Path, typer.Argument(help="Folder with the files to read.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the tables to.")],
    mapping: Annotated[
        Path | None,
        typer.Option(
            help="For `table`: YAML that says which column becomes which; configs/import_example.yaml explains it."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make tables from the files of MovieLens, or from any Parquet or CSV by a column mapping, and check them.

    OUT appears whole or not at all. Exit code 3 when a file cannot be read, or the result has faults (it is kept).

    Example: laserbatch data import movielens-1m ml-1m/ tables/

    Example: laserbatch data import table exports/ tables/ --mapping mapping.yaml
    """  # fmt: skip
    from pipeline.storage.atomic import atomic_folder
    from pipeline.tables.mapping import import_mapped, load_mapping
    from pipeline.tables.movielens import import_movielens

    if (mapping is not None) != (source_format is SourceFormat.TABLE):
        raise typer.BadParameter("--mapping goes with the format `table`, which needs it, and with no other")
    loaded = load_mapping(mapping) if mapping is not None else None
    with atomic_folder(out, overwrite) as folder, progress("importing rows") as bar:
        if loaded is not None:
            import_mapped(loaded, source, folder, bar)
        else:
            import_movielens(source_format.value, source, folder, bar)
    if _report_check(out, as_json, tables=True):
        raise typer.Exit(ExitCode.BAD_INPUT)


@app.command()
def sample(
    out: Annotated[Path, typer.Argument(help="Folder to write the tables to.")],
    num_users: Annotated[int, typer.Option(min=1, help="Users; a million works, streamed to disk.")] = 400,
    num_items: Annotated[int, typer.Option(min=20, help="Items of the made-up catalogue.")] = 300,
    days: Annotated[
        int, typer.Option(min=2, help="Days of ratings; the last brings new users, items and behaviour.")
    ] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same files.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a sample world of our own making: catalogue, users with tastes, ratings over some weeks.

    Example: laserbatch data sample world/ --num-users 1000 --seed 7
    """
    from pipeline.storage.atomic import atomic_folder
    from pipeline.tables.sample_world import write_sample_world

    with atomic_folder(out, overwrite) as folder, progress("sample world", num_users) as bar:
        num_written = 0

        def tell(num_done: int, _num_users: int) -> None:
            nonlocal num_written
            bar.advance(num_done - num_written)
            num_written = num_done

        write_sample_world(folder, num_users=num_users, num_items=num_items, days=days, seed=seed, progress=tell)
    if _report_check(out, as_json, tables=True):
        raise typer.Exit(ExitCode.BAD_INPUT)


def _report_check(path: Path, as_json: bool, tables: bool = False) -> int:
    """Check the tables and print the summary; `tables`: with row counts, faults or not. Gives the number of faults."""
    from pipeline.tables.check import check_tables
    from pipeline.tables.read import describe

    findings = check_tables(path)
    num_faults = sum(1 + finding.num_more for finding in findings)
    outcome: dict = {"path": str(path), "num_faults": num_faults}
    if not findings or tables:
        described = describe(path)
        outcome |= {f"num_{name}": entry["num_rows"] for name, entry in described.items()}
    if as_json:
        outcome["findings"] = [finding.as_json() for finding in findings]
    else:
        for finding in findings[:NUM_LINES_OF_FINDINGS]:
            say(str(finding))
        if len(findings) > NUM_LINES_OF_FINDINGS:
            say(f"... and {len(findings) - NUM_LINES_OF_FINDINGS} more; --json lists all")
    summary(outcome, as_json)
    return num_faults
