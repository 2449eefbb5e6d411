"""Files, headings, commands and options named in pages exist, and so do the commands that benchmarks run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from laserbatch.jobs.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))])
BENCHMARKS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if re.search(r"\[\*CLI, |laserbatch\(", path.read_text(encoding="utf-8"))
]
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")


def broken_links(page: Path, text: str) -> Iterator[str]:
    """The relative links of a page to files or headings that do not exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", INLINE.sub("", FENCED.sub("", text))):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        target = page.parent / path
        headings = anchors(target.read_text(encoding="utf-8") if target.is_file() else "") if path else anchors(text)
        if (path and not target.exists()) or (anchor and anchor not in headings):
            yield link


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(text: str) -> Iterator[list[str]]:
    """The words after `laserbatch` in commands between backticks and in lines of shell blocks."""
    shell = (line for language, block in FENCED.findall(text) if language == "sh" for line in block.splitlines())
    for line in [*INLINE.findall(FENCED.sub("", text)), *shell]:
        program, *words = line.partition(" #")[0].replace("\\|", "|").split() or [""]
        if program == "laserbatch":
            yield re.sub(r" ?\| ?", "|", " ".join(words)).split()


def commands_run(source: str) -> Iterator[list[str]]:
    """The words after `laserbatch` in commands that a benchmark runs: in `laserbatch(...)` and after `[*CLI, ...]`.

    `VALUE` replaces values that only a run knows; starred arguments are left out.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Call(func=ast.Name(id="laserbatch"), args=words)
                | ast.List(elts=[ast.Starred(value=ast.Name(id="CLI")), _, *_] as words)
            ):
                constants = (word.value if isinstance(word, ast.Constant) else "VALUE" for word in words
                             if not isinstance(word, ast.Starred))  # fmt: skip
                yield list(map(str, constants))


def unknown_words(words: list[str]) -> Iterator[str]:
    """The words of a command line that are neither a command nor one of its options; `a|b` means either.

    More words than the command has arguments are unknown too, unless the line has alternatives.
    """
    command, *words = typer.main.get_command(app), *words
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        *others, name = words.pop(0).split("|")
        unknown = [word for word in [*others, name] if word not in command.commands]
        yield from unknown
        if unknown:
            return
        _, command, _ = command.resolve_command(command.context_class(command), [name])
    options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    options_given = [word.partition("=")[0] for word in "|".join(words).split("|") if word.startswith("-")]
    unknown = [option for option in options_given if option not in options | {"--help"}]
    yield from unknown
    if not unknown and words and not hasattr(command, "commands") and "|" not in "".join(words):
        context = command.context_class(command, resilient_parsing=True)
        yield from command.make_parser(context).parse_args(words)[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page):
    text = page.read_text(encoding="utf-8")
    assert not list(broken_links(page, text))
    unknown = {" ".join(words): list(unknown_words(words)) for words in command_lines(text)}
    assert not {line: words for line, words in unknown.items() if words}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_a_benchmark_runs_commands_that_exist(path):
    commands = list(commands_run(path.read_text(encoding="utf-8")))
    assert commands
    assert not [words for words in commands if list(unknown_words(words))]


def test_a_link_to_nothing_is_found():
    text = "# One page\n[a](#one-page) [b](#two) [c](gone.md)\n[d](README.md#gone) [e](https://a.b/c) `[f](gone.md)`\n"
    assert list(broken_links(ROOT / "page.md", text)) == ["#two", "gone.md", "README.md#gone"]


def test_a_command_or_option_that_is_not_there_is_found():
    text = "`laserbatch rums list` `laserbatch runs list \\| lost` `laserbatch try --itm a`\n"
    text += "```sh\nlaserbatch nightly --day D  # x\nlaserbatch data import table A B --mapping C\n```\n"
    expected = [["rums"], ["lost"], ["--itm"], ["--day"], ["B"]]
    assert [list(unknown_words(words)) for words in command_lines(text)] == expected
    source = "laserbatch('data', 'import', a, b, 'c')\nrun([*CLI, 'ctr', 'compare', '--seed', f(x), *more])\n"
    assert [list(unknown_words(words)) for words in commands_run(source)] == [["c"], ["--seed"]]
