"""Write all committed figures to one page, and the main ones to the README, from the files in `results/`.

Only the end of the page is written by hand: `results/tried.md`, which has measurements of older commits.
"""

import argparse
import fnmatch
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY

RESULTS = Path(__file__).resolve().parent / "results"
PAGE, TRIED = RESULTS / "README.md", RESULTS / "tried.md"
README = REPOSITORY / "README.md"
BEGIN, END = "<!-- figures: benchmarks/figures.py -->", "<!-- end of figures -->"

TASKS = {"reki": "reki", "goodreads": "goodreads-items"}  # one column per corpus; the engine's task for that corpus
DRAFTS_OF = tuple(f"{{corpus}}, K={k}: ours over arctic" for k in (16, 32, 64))


@dataclass(frozen=True)
class Headline:
    """One row of the README's table: its label, its result file, and patterns of its figures' names (`*`: any text)."""

    says: str
    file: str
    figures: tuple[str, ...]


OVER_PLAIN = "{{task}}, batch {batch}: {system}, adaptive, over plain, tokens per second"
OVER_FIXED = "{{task}}, batch {batch}: laser, adaptive over K=*, the best fixed, tokens per second"
HEADLINES = (
    Headline("relaxed drafts over plain decoding, batch 1", "engine", (OVER_PLAIN.format(batch=1, system="laser"),)),
    Headline("the same, batch 16", "engine", (OVER_PLAIN.format(batch=16, system="laser"),)),
    Headline(
        "lossless (greedy) drafts over plain decoding, batch 1", "engine", (OVER_PLAIN.format(batch=1, system="resd"),)
    ),
    Headline(
        "the budget chosen by measurement over the best fixed tree, relaxed, batch 1 / 4 / 16",
        "engine",
        tuple(OVER_FIXED.format(batch=batch) for batch in (1, 4, 16)),
    ),
    Headline(
        "plain decoding over `transformers.generate`, batch 16",
        "engine",
        ("{task}, batch 16: plain over transformers-generate, tokens per second",),
    ),
    Headline(
        "accepted draft tokens over Arctic's SuffixDecoding, trees of 16 / 32 / 64",
        "drafting",
        tuple(f"{drafts}, AAL" for drafts in DRAFTS_OF),
    ),
    Headline(
        "time of such a draft over Arctic's, median",
        "drafting",
        tuple(f"{drafts}, median microseconds a draft" for drafts in DRAFTS_OF),
    ),
)


def read_figures(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The figures of every result file in `folder`, by the file's name without its suffix.

    Raises
    ------
    ValueError
        If a file is not a JSON object; the message names the file.
    """
    by_page = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            figures = result.get("figures", [])
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a benchmark's result ({error}); run its benchmark again") from error
        if figures:
            by_page[path.stem] = figures
    return by_page


def page(figures: dict[str, list[dict[str, Any]]]) -> str:
    """The page of all figures, missed ones first in each file, followed by the text of `TRIED`."""
    lines = [
        "# Figures",
        "",
        "Written by `python benchmarks/figures.py` from the files beside it: what each benchmark was asked for and",
        "what it measured, missed ones first. Each file begins with its command and its machine.",
    ]
    for name, of_file in figures.items():
        num_met = sum(figure["met"] for figure in of_file)
        lines += ["", f"## {name}.json: {num_met} of {len(of_file)} met", ""]
        lines += ["| | measured | wanted |", "|---|---|---|"]
        lines += [
            f"| {'' if figure['met'] else '**missed** '}{figure['name']} | {figure['measured']:.4g} "
            f"| {figure['comparison']} {figure['wanted']:g} |"
            for figure in sorted(of_file, key=lambda figure: figure["met"])
        ]
    return "\n".join([*lines, "", TRIED.read_text(encoding="utf-8")])


def headline(figures: dict[str, list[dict[str, Any]]]) -> str:
    """The README's table of ratios, one column per corpus.

    Raises
    ------
    ValueError
        If a figure is missing from its result file; the message names both.
    """
    lines = ["| | long answers | descriptions |", "|---|---|---|"]
    for row in HEADLINES:
        measured = {figure["name"]: figure["measured"] for figure in figures.get(row.file, [])}
        cells = []
        for corpus, task in TASKS.items():
            patterns = [template.format(corpus=corpus, task=task) for template in row.figures]
            matches = [fnmatch.filter(measured, pattern) for pattern in patterns]
            if missing := [pattern for pattern, names in zip(patterns, matches, strict=True) if not names]:
                raise ValueError(f"results/{row.file}.json has no figure {missing[0]!r}; run its benchmark again")
            cells.append(" / ".join(f"{measured[names[0]]:.2f}" for names in matches))
        lines.append(f"| {row.says} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_headline(readme: str, table: str) -> str:
    """`readme` with `table` between its two marks."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    """Write the page and the README's table; with `--check`, only name the files that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args().check
    figures = read_figures(RESULTS)
    wanted = {PAGE: page(figures), README: with_headline(README.read_text(encoding="utf-8"), headline(figures))}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{'out of date' if check else 'written'}: {path.relative_to(REPOSITORY)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
