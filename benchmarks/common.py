"""Shared code of the benchmarks: the command line, turns, medians and intervals, figures, the machine, the JSON.

No output names a host, a user or a folder of the machine.
"""

import argparse
import json
import logging
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

START_S = time.perf_counter()  # about when this process started
REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"  # data and models lie beside the repository, never inside it
DEFAULT_DATA = Path(os.environ.get("LASERBATCH_TEST_DATA", SHARED / "data"))
DEFAULT_MODEL = Path(os.environ.get("LASERBATCH_TEST_MODELS", SHARED / "models")) / "bench-target"
SAMPLE_MODEL = REPOSITORY / "models" / "sample"
SMOLLM2 = "smollm2-135m-instruct"
SEED = 20250301
NUM_RESAMPLES, CONFIDENCE = 2000, 0.95

_LIBRARIES = (
    "torch", "transformers", "triton", "numpy", "numba", "pyarrow", "ray", "lightgbm", "pygtrie", "arctic-inference",
    "laserbatch",
)  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "data": {"type": Path, "default": DEFAULT_DATA, "help": "folder of the public data (reki/, goodreads/, ml-100k/)"},
    "model": {"type": Path, "default": DEFAULT_MODEL, "help": "model folder"},
    "device": {"default": "auto", "choices": ("auto", "cpu", "cuda"), "help": "auto: cuda if there is a device"},
    "dtype": {"default": "auto", "choices": ("auto", "float32", "bfloat16"), "help": "auto: bfloat16 on a GPU"},
    "threads": {"type": int, "default": 2, "help": "torch threads of each system"},
    "cache": {"type": Path, "default": REPOSITORY / ".night", "help": "folder of the cached texts, by model"},
}

Item = TypeVar("Item")
Scale = TypeVar("Scale")


def benchmark_parser(about: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser with `--quick` and `--smoke` (both set `size`; default "full"), `--json` and the shared `options`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    for name, meaning in (("quick", "measure less: under 5 minutes on 2 cores"), ("smoke", "only show that it runs")):
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=meaning)
    parser.set_defaults(size="full")
    parser.add_argument("--json", type=Path, help="write the command, the machine and the measurements to this file")
    for name in options:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    return parser


def scale_of(arguments: argparse.Namespace, full: Scale, quick: Scale, smoke: Scale) -> Scale:
    """The scale that the options ask for."""
    return {"full": full, "quick": quick, "smoke": smoke}[arguments.size]


def begin(num_threads: int) -> None:
    """Set torch's threads and start the benchmarks' log; call this before anything is measured."""
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    show_progress()


def begun_with_smollm2(about: str | None, *options: str) -> tuple[argparse.Namespace, Path]:
    """Begin a benchmark of SmolLM2: its options and the model's folder; without the model the program ends."""
    parser = benchmark_parser(about, "data", "threads", *options)
    parser.add_argument("--models", type=Path, required=True, help=f"folder with {SMOLLM2}/")
    arguments = parser.parse_args()
    model_dir = arguments.models / SMOLLM2
    if not (model_dir / "model.safetensors").is_file():
        print(f"{model_dir} is not there: nothing is measured", file=sys.stderr)
        sys.exit(0)
    begin(arguments.threads)
    return arguments, model_dir


def show_progress() -> None:
    """Log what the benchmarks do, and the warnings of other code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("benchmarks").setLevel(logging.INFO)


def turns(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield the items again and again, each time in a newly drawn order.

    Whatever slows the machine lasts for seconds, so it slows all items; and no item always runs after the one that
    fills the caches.
    """
    order = random.Random(SEED)
    while True:
        yield order.sample(items, len(items))


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
class Interval:
    """A quantity with its 95 % bootstrap interval over texts."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: np.ndarray) -> "Interval":
        """From float64[1 + n]: the measured value, then those of n resamples; non-finite resamples are ignored."""
        resampled = samples[1:][np.isfinite(samples[1:])]
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail]) if len(resampled) else (samples[0], samples[0])
        return cls(float(samples[0]), float(low), float(high))


def resampled_totals(by_text: Sequence[float] | np.ndarray) -> np.ndarray:
    """The sum of a quantity over texts, then over texts resampled with replacement: float64[1 + NUM_RESAMPLES].

    The resamples depend only on the number of texts, so that a ratio of two totals is paired text by text.
    """
    values = np.asarray(by_text, float)
    chosen = np.random.default_rng(SEED).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    return np.append(values.sum(), values[chosen].sum(axis=1))


@dataclass(frozen=True)
class Figure:
    """One figure: the wanted value and the measured one."""

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


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A text table with one line per row; `columns` maps each heading to a format string over the keys of a row."""
    cells = [[form.format_map(row) for form in columns.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (list(columns), *cells))


def finish(json_path: Path | None, figures: Sequence[Figure], tables: Sequence[str], content: dict[str, Any]) -> None:
    """Print figures (unmet ones first), tables and the run's time; write figures, time and `content` to `json_path`.

    `met` in the file says whether all figures are met, unless `content` has a `met`.
    """
    wall_s = time.perf_counter() - START_S
    lines = "\n".join(str(figure) for figure in sorted(figures, key=lambda figure: figure.met))
    print(lines, *tables, f"{wall_s:.0f} s in all", sep="\n\n")
    if json_path:
        met = all(figure.met for figure in figures)
        write_json(json_path, {"met": met, "figures": figures, **content, "wall_s": wall_s})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file: command and machine first, then `content`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": command_line(), "machine": machine(), **content}
    path.write_text(json.dumps(jsonable(document), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def jsonable(value: Any) -> Any:
    """The value with dataclasses as dicts and floats rounded to four significant digits, at every depth."""
    if hasattr(value, "__dataclass_fields__"):
        return jsonable(asdict(value))
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
        "versions": {name: version for name in _LIBRARIES if (version := _version(name))},
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
    """A word of a command line; paths are relative to the repository, and outside it only their last name is kept."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
