"""What the benchmarks' command lines share: their options, their log, how a run ends.

Knows no engine and no table.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common import DEFAULT_DATA, DEFAULT_MODEL, REPOSITORY, Figure, describe_figures, write_json

START_S = time.perf_counter()  # of this process, or nearly
Scale = TypeVar("Scale")


def benchmark_parser(about: str, quick: str, smoke: str, writes: str) -> argparse.ArgumentParser:
    """A parser with `--quick`, `--smoke` (`size` says which, or "full") and `--json`; the texts say what each means."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help=quick)
    size.add_argument("--smoke", dest="size", action="store_const", const="smoke", help=smoke)
    parser.set_defaults(size="full")
    parser.add_argument("--json", type=Path, help=f"write machine, command, {writes} here")
    return parser


def add_data(parser: argparse.ArgumentParser, holds: str = "reki/ and goodreads/") -> None:
    """Add `--data`, a folder of public texts."""
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {holds}")


def add_model(parser: argparse.ArgumentParser, about: str) -> None:
    """Add `--model`, one folder."""
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=about)


def add_models(parser: argparse.ArgumentParser, default: Sequence[Path]) -> None:
    """Add `--model`, one folder or several."""
    parser.add_argument("--model", type=Path, nargs="+", default=list(default), help="model folders")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, `--dtype` and `--threads`, for whole steps on any device."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2, help="torch threads")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark with an engine has: `--threads` and `--cache`."""
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every system")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".night", help="where texts are kept by model")


def existing(folders: Sequence[Path]) -> Iterator[Path]:
    """Those of `folders` that are there; the others are named on standard error."""
    for folder in folders:
        if folder.is_dir():
            yield folder
        else:
            print(f"left out, no such folder: {folder.name}", file=sys.stderr)


def scale_of(arguments: argparse.Namespace, full: Scale, quick: Scale, smoke: Scale) -> Scale:
    """The scale that the options ask for."""
    return {"full": full, "quick": quick, "smoke": smoke}[arguments.size]


def show_progress(*names: str) -> None:
    """Log what the modules `names` do, and warnings of everybody else."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)


def finish(json: Path | None, figures: Sequence[Figure], tables: Sequence[str], content: dict[str, Any]) -> dict:
    """Print figures, tables and the time of the run; write them with `content` to `json`, if it is given.

    `met` is whether all figures are, unless `content` has its own. Returns what is written, but for the machine.
    """
    wall_s = time.perf_counter() - START_S
    print(describe_figures(figures), *tables, f"{wall_s:.0f} s in all", sep="\n\n")
    met = all(figure.met for figure in figures)
    document = {"met": met, "figures": figures, **content, "wall_s": wall_s}
    if json:
        write_json(json, document)
    return document
