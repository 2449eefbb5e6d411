"""Random groups: the same everywhere, about equal in size."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from laserbatch.retrieval_pools.routing.baselines import random_group


def test_groups_are_readable_and_about_equal_in_size():
    counts = Counter(random_group(number, 4, seed=0) for number in range(4000))
    assert set(counts) == {"random/0", "random/1", "random/2", "random/3"}
    assert min(counts.values()) > 850


def test_another_process_with_another_hash_seed_agrees():
    program = "from laserbatch.retrieval_pools.routing.baselines import random_group as g; "
    program += "print(g('ä', 1000, 3), g(17, 1000, 3))"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[2], env={"PYTHONHASHSEED": "123"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.split() == [random_group("ä", 1000, 3), random_group(17, 1000, 3)]


def test_another_seed_is_another_grouping():
    same = sum(random_group(number, 10, 0) == random_group(number, 10, 1) for number in range(1000))
    assert 50 < same < 150
