"""Figures that `gpu_vllm.py` computes from its rows."""

from argparse import Namespace

import gpu_vllm
from gpu_vllm import Contest, figures_of, print_table, vllms_of


def test_figures_are_ratios_of_medians_and_only_of_what_was_measured(capsys):
    speeds = {"plain": (90.0, 100.0, 95.0), "vllm": (100.0,), "vllm-laserbatch": (150.0,), "relaxed K8": (300.0,)}
    rows = [{"batch": 64, "system": name, "tokens_per_s": speed} for name, values in speeds.items() for speed in values]
    rows += [{"batch": 1, "system": "plain", "tokens_per_s": 1.0}, {"item": "ours", "failed": "no answer"}]
    by_name = {figure.name: (figure.measured, figure.met) for figure in figures_of(rows)}
    assert by_name == {
        "batch 64: plain over vllm, tokens per second": (0.95, True),
        "batch 64: relaxed drafts over vllm, tokens per second": (3.0, True),
        "batch 64: relaxed drafts over vllm-laserbatch, tokens per second": (2.0, True),
    }
    print_table(rows)
    assert "3.00 of vLLM" in capsys.readouterr().out


def test_n_gram_drafts_are_measured_where_four_processes_hold_the_batch(monkeypatch, tmp_path):
    assert vllms_of([64, 256]) == ("vllm", "vllm-laserbatch")
    assert vllms_of([1, 32]) == ("vllm", "vllm-ngram", "vllm-laserbatch")
    processes = dict.fromkeys(vllms_of([1]), "vLLM") | {"ours": "ours"}
    contest = Contest(Namespace(), None, None, processes, ())
    assert [contest.worker_of(name) for name in ("vllm-ngram", "relaxed K8")] == ["vLLM", "ours"]
    monkeypatch.setattr(gpu_vllm, "Worker", lambda name, command, out, environment: command[-1])
    options = Namespace(
        draft_tokens=4, smoke=False, vllm_path=None, vllm_python="python", folder=tmp_path, out=tmp_path
    )
    assert '"method": "ngram", "num_speculative_tokens": 4' in gpu_vllm.start_vllm(options, "vllm-ngram", 1000, None)
    assert '"speculative_config": null' in gpu_vllm.start_vllm(options, "vllm", 1000, None)
