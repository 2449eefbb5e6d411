"""What `laserbatch-pools` has in common with `laserbatch`, read from the project's pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = ("numpy", "numba", "pyarrow", "pydantic", "pygtrie")
FOR_FITTING = ("scikit-learn", "scipy", "threadpoolctl")  # routers and calibrations


def requirements(names: tuple[str, ...]) -> list[str]:
    """The lines of laserbatch's dependencies for these packages."""
    by_name = {re.match(r"[\w-]+", line).group(): line for line in PROJECT["dependencies"]}
    return [by_name[name] for name in names]


setup(
    version=PROJECT["version"],
    long_description=(ROOT / "docs" / "pools-library.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=PROJECT["requires-python"],
    install_requires=requirements(NEEDED),
    extras_require={"fit": requirements(FOR_FITTING)},
    entry_points={
        group: [f"{name} = {path}" for name, path in points.items()]
        for group, points in PROJECT["entry-points"].items()
    },
)
