"""What `gpu_vllm.py` makes of its rows."""

from gpu_vllm import figures_of, print_table


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
