"""Old and new in turns: what both measured, which way it is better, and what is already there is not run again."""

import json

import compare
import pytest
from compare import ratios_of


def result(speed: float, aal: float, us: float, **changes) -> dict:
    row = {"task": "reki", "batch": 1, "system": "laser", "budget": 8, "tokens_per_s": speed, "tokens_per_step": 3.0}
    drafter = {"drafter": "ours", "corpus": "reki", "k": 16, "aal": aal, "median_us": us}
    figure = {"name": "reki: median microseconds a draft", "measured": us, "comparison": "<="}
    peers = [row | {"system": "transformers-generate"}, drafter | {"drafter": "arctic"}]
    return {"figures": [figure], "rows": [row | changes, drafter, *peers]}


def test_less_than_one_is_worse_whatever_is_measured():
    ratios = {one.name: one for one in ratios_of([result(100.0, 2.0, 10.0)], [result(98.0, 1.97, 20.0)])}
    assert len(ratios) == 5  # nothing of a peer
    assert ratios["reki, 1, laser, 8: tokens_per_s"].ratio == pytest.approx(0.98)
    assert ratios["reki, 1, laser, 8: tokens_per_s"].is_kept
    assert not ratios["reki, 16, ours : aal"].is_kept and ratios["reki, 16, ours : aal"].least == 0.99
    for name in ("reki, 16, ours: median_us", "reki: median microseconds a draft"):
        assert ratios[name].ratio == 0.5 and not ratios[name].is_kept
    assert ratios["reki, 1, laser, 8 : tokens_per_step"].ratio == 1.0


def test_of_several_rounds_medians_are_compared_and_the_worst_stands_first():
    old, new = ([result(speed, 2.0, 10.0) for speed in speeds] for speeds in ((100, 10, 101), (50, 500, 49)))
    (worst, *_) = ratios_of(old, new)
    assert (worst.old, worst.new, worst.ratio) == (100, 50, 0.5) and str(worst).startswith("WORSE")


def test_tokens_per_step_of_another_budget_are_not_compared():
    chosen = {"budget": "adaptive", "max_draft_tokens": 16, "min_acceptance": 0.07}
    old, same, other = (result(1.0, 2.0, 1.0, **chosen | {"max_draft_tokens": most}) for most in (16, 16, 32))
    found = [ratios_of([old], [new]) for new in (same, other)]
    assert [sum("tokens_per_step" in one.name for one in ratios) for ratios in found] == [1, 0]


def test_both_checkouts_run_in_turns_and_what_is_there_is_not_run_again(tmp_path, monkeypatch, capsys):
    script = (
        "import json, sys, laserbatch\n"
        "out = sys.argv[sys.argv.index('--json') + 1]\n"
        "row = {'system': 'plain', 'tokens_per_s': float(open('speed').read())}\n"
        "print('noise')\n"
        "open(out, 'w').write(json.dumps({'rows': [row], 'from': laserbatch.__path__[0], 'words': sys.argv[1:]}))\n"
    )
    for name, speed in (("old", 100), ("new", 90)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks" / "night.py").write_text(script)
        (tmp_path / name / "speed").write_text(str(speed))
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(compare, "REPOSITORY", tmp_path / "new")
    results = tmp_path / "results"
    words = ["night", "--old", str(tmp_path / "old"), "--results", str(results)]
    assert compare.main([*words, "--rounds", "2"]) == 1
    told = capsys.readouterr().out
    assert "WORSE   0.900" in told and "0 of 1 kept" in told and "noise" not in told and str(tmp_path) not in told
    assert sorted(path.name for path in results.glob("*")) == [
        f"night-{side}-{number}.json" for side in ("new", "old") for number in (0, 1)
    ]
    ran = json.loads((results / "night-old-0.json").read_text())
    assert ran["words"][:2] == ["--quick", "--cache"]
    (tmp_path / "new" / "benchmarks" / "night.py").unlink()
    assert compare.main(words) == 1
