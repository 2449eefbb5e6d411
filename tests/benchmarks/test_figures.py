"""The pages of figures agree with the committed results."""

import json
import sys

import figures as figures_page
import pytest
from figures import BEGIN, END, HEADLINES, PAGE, README, RESULTS, headline, page, read_figures, with_headline


def test_committed_pages_are_those_of_the_committed_results():
    figures = read_figures(RESULTS)
    assert PAGE.read_text(encoding="utf-8") == page(figures), "run python benchmarks/figures.py"
    readme = README.read_text(encoding="utf-8")
    assert readme == with_headline(readme, headline(figures)), "run python benchmarks/figures.py"


def test_missed_figures_stand_first_and_are_marked():
    met = {"name": "a", "measured": 2.0, "wanted": 1.0, "comparison": ">=", "met": True}
    missed = {"name": "b", "measured": 0.5, "wanted": 1.0, "comparison": ">=", "met": False}
    lines = page({"one": [met, missed]}).splitlines()
    assert "## one.json: 1 of 2 met" in lines
    assert lines.index("| **missed** b | 0.5 | >= 1 |") == lines.index("| a | 2 | >= 1 |") - 1
    assert lines[lines.index("| a | 2 | >= 1 |") + 2] == "## Tried and left out"


def test_a_missing_figure_is_named():
    with pytest.raises(ValueError, match=f"results/{HEADLINES[0].file}.json has no figure"):
        headline({})


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "broken.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.json is not a benchmark's result"):
        read_figures(tmp_path)
    (tmp_path / "broken.json").write_text(json.dumps({"rows": []}), encoding="utf-8")
    assert read_figures(tmp_path) == {}


def test_check_writes_nothing_and_says_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for name, value in (("README", readme), ("PAGE", tmp_path / "page.md"), ("REPOSITORY", tmp_path)):
        monkeypatch.setattr(figures_page, name, value)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures_page.main() == 1 and "out of date: README.md" in capsys.readouterr().out
    assert "old" in readme.read_text(encoding="utf-8") and not (tmp_path / "page.md").exists()
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures_page.main() == 0
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures_page.main() == 0
    written = readme.read_text(encoding="utf-8")
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
