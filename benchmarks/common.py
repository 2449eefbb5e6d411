"""What the benchmarks share: the machine and the command as they may be published, spreads, figures, JSON.

Knows neither engine nor tables. Nothing written here names a host, a user or a folder of the machine.
"""

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"  # data and models lie beside the repository, never inside it
DEFAULT_DATA = Path(os.environ.get("LASERBATCH_TEST_DATA", SHARED / "data"))
DEFAULT_MODEL = Path(os.environ.get("LASERBATCH_TEST_MODELS", SHARED / "models")) / "bench-target"
SAMPLE_MODEL = REPOSITORY / "models" / "sample"

_LIBRARIES = (
    "torch", "transformers", "triton", "numpy", "numba", "pyarrow", "ray", "lightgbm", "pygtrie", "arctic-inference",
    "laserbatch",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Median and range of one quantity over repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min:.2f} to {self.max:.2f})"


@dataclass(frozen=True)
class Figure:
    """One figure that was asked for, and what was measured."""

    name: str
    measured: float
    wanted: float
    comparison: str  # ">=", "<=" or "<"
    met: bool

    @classmethod
    def at_least(cls, name: str, measured: float, wanted: float) -> "Figure":
        """A figure that should not be smaller than `wanted`."""
        return cls(name, measured, wanted, ">=", measured >= wanted)

    @classmethod
    def at_most(cls, name: str, measured: float, wanted: float) -> "Figure":
        """A figure that should not be larger than `wanted`."""
        return cls(name, measured, wanted, "<=", measured <= wanted)

    @classmethod
    def under(cls, name: str, measured: float, wanted: float) -> "Figure":
        """A figure that should be smaller than `wanted`."""
        return cls(name, measured, wanted, "<", measured < wanted)

    def __str__(self) -> str:
        verdict = "met    " if self.met else "NOT MET"
        return f"{verdict}  {self.name}: {self.measured:.2f} (wanted {self.comparison} {self.wanted:g})"


def describe_figures(figures: Sequence[Figure]) -> str:
    """The figures as lines, those that were not met first."""
    return "\n".join(str(figure) for figure in sorted(figures, key=lambda figure: figure.met))


def machine() -> dict[str, Any]:
    """Processor, cores, threads and versions of this machine."""
    import torch

    return {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _LIBRARIES if (found := _version(name))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command_line() -> str:
    """The command that was run, with folders outside the repository cut to their last name."""
    words = [publishable(word) for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def publishable(word: str) -> str:
    """A word of a command line; of a path outside the repository its last name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def jsonable(value: Any) -> Any:
    """Dataclasses to dicts and floats to four significant digits, throughout."""
    if hasattr(value, "__dataclass_fields__"):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file: machine and command first, then `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": command_line(), "machine": machine(), **content}
    path.write_text(json.dumps(jsonable(document), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
