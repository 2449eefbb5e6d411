"""The pages name files, headings, commands and options that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from laserbatch.jobs.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))])
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")


def broken_links(page: Path, text: str) -> Iterator[str]:
    """The relative links of a page whose file or heading does not exist."""
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
    """The words after `laserbatch`, of commands between backticks and of lines of shell blocks."""
    shell = (line for language, block in FENCED.findall(text) if language == "sh" for line in block.splitlines())
    for line in [*INLINE.findall(FENCED.sub("", text)), *shell]:
        program, *words = line.partition(" #")[0].replace("\\|", "|").split() or [""]
        if program == "laserbatch":
            yield re.sub(r" ?\| ?", "|", " ".join(words)).split()


def unknown_words(words: list[str]) -> Iterator[str]:
    """The words of a command line that are neither a command nor an option of it; `a|b` stands for either."""
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
    yield from (option for option in options_given if option not in options | {"--help"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page):
    text = page.read_text(encoding="utf-8")
    assert not list(broken_links(page, text))
    unknown = {" ".join(words): list(unknown_words(words)) for words in command_lines(text)}
    assert not {line: words for line, words in unknown.items() if words}


def test_a_link_to_nothing_is_found():
    text = "# One page\n[a](#one-page) [b](#two) [c](gone.md)\n[d](README.md#gone) [e](https://a.b/c) `[f](gone.md)`\n"
    assert list(broken_links(ROOT / "page.md", text)) == ["#two", "gone.md", "README.md#gone"]


def test_a_command_or_option_that_is_not_there_is_found():
    text = "`laserbatch rums list` `laserbatch runs list \\| lost` `laserbatch try --itm a`\n"
    text += "```sh\nlaserbatch nightly --day D  # x\n```\n"
    assert [list(unknown_words(words)) for words in command_lines(text)] == [["rums"], ["lost"], ["--itm"], ["--day"]]
