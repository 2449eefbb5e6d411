"""The cost of the relaxed rule to CTR models, with a real language model: a sample of viewers and films, three rules.

    python benchmarks/rule_auc.py --models DIR --quick --json rule_auc.json

DIR has the folder `smollm2-135m-instruct`; without it nothing is measured. `laserbatch experiment` writes texts of the
same viewers and films of MovieLens 100K by greedy verification, which gives the texts of plain decoding, and by the
relaxed rule at two thresholds. CTR models then show what each variant's texts add, on the interactions after its date.
Drafts have up to 8 tokens from prompts and outputs, since first nights have no pools; in `drift.py` the relaxed texts
of first nights are the furthest from plain ones. `between` has the differences of variants, with intervals.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from common import REPOSITORY, SMOLLM2, Figure, benchmark_parser, finish, scale_of, table
from tasks import movielens_settings

RULES = {
    "greedy": {"verifier": "greedy"},
    "relaxed_01": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.1},
    "relaxed_02": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.2},
}
BUDGET = {"max_draft_tokens": 8, "min_acceptance": 0.0}  # drafts of this size from the first text on
PLAIN = "greedy"
MAX_LOST_AUC = 0.002
COLUMNS = {
    "rule": "{variant}", "tokens per text": "{tokens_per_text[user]:.0f} / {tokens_per_text[item]:.0f}",
    "AUC added, all models": "{lift[all][mean_difference]:+.4f} ({lift[all][low]:+.4f} to {lift[all][high]:+.4f})",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """The numbers of viewers and films in the sample, and the maximum number of tokens of a text."""

    num_users: int
    num_items: int
    max_new_tokens: int


FULL, QUICK, SMOKE = Scale(300, 500, 200), Scale(60, 60, 200), Scale(60, 20, 12)


def laserbatch(*words: object) -> str:
    """Run one command and return its output; its progress goes to standard error; a failure ends the benchmark."""
    command = [str(Path(sys.executable).with_name("laserbatch")), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"laserbatch {words[0]} ended with {done.returncode}; its message is above")
    return done.stdout


def configs_of(work: Path, model: Path, max_new_tokens: int) -> list[Path]:
    """Write a configuration file for each rule."""
    paths, knowledge = [], movielens_settings().model_dump(mode="json", exclude_defaults=True)
    for name, rule in RULES.items():
        decoding = {"model": str(model), "max_new_tokens": max_new_tokens, **BUDGET, **rule}
        settings = {"workspace": str(work / "workspace"), "tables": {"path": str(work / "tables")},
                    "knowledge": knowledge, "decoding": decoding}  # fmt: skip
        paths.append(work / f"{name}.yaml")
        paths[-1].write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return paths


def figures_of(result: dict) -> Iterator[Figure]:
    """The figures: AUC that plain texts add over texts of a relaxed rule, and the share of its texts that are kept."""
    for pair in result["between"]:
        if pair["variant"] == PLAIN:
            about = f"{pair['over']}: AUC that plain texts add beside it, upper end of the interval"
            yield Figure.at_most(about, pair["high"], MAX_LOST_AUC)
    kept = {row["variant"]: sum(row["num_texts"].values()) for row in result["variants"]}
    for name in kept:
        if name != PLAIN:
            yield Figure.at_least(f"{name}: texts kept over those of plain decoding", kept[name] / kept[PLAIN], 0.95)


def main() -> None:
    """Run the experiment with all rules."""
    parser = benchmark_parser(__doc__, "data")
    parser.add_argument("--models", type=Path, required=True, help="folder that has the model's folder")
    arguments = parser.parse_args()
    scale, model = scale_of(arguments, FULL, QUICK, SMOKE), (arguments.models / SMOLLM2).resolve()
    if not model.is_dir():
        raise SystemExit(f"{model} is not there: nothing is measured")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        mapping = REPOSITORY / "configs" / "import_movielens_parquet.yaml"
        laserbatch("data", "import", arguments.data / "ml-100k", work / "tables", "--mapping", mapping)
        configs = [word for path in configs_of(work, model, scale.max_new_tokens) for word in ("--config", path)]
        sizes = ("--users", scale.num_users, "--items", scale.num_items)
        result = json.loads(laserbatch("experiment", *configs, *sizes, "--json"))
    del result["folder"]  # a path of this machine, like `workspace`
    for row in result["variants"]:
        del row["workspace"]
    finish(
        arguments.json,
        list(figures_of(result)),
        [table(result["variants"], COLUMNS)],
        {"model": SMOLLM2, "rules": RULES, **result},
    )


if __name__ == "__main__":
    main()
