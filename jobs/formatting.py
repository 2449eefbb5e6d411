"""Formats numbers and names for readers: separators, units, a real minus sign, a dash for a missing number."""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import wraps

MISSING = "–"

SOURCE_LABELS = {
    "pool": "pool", "previous": "own previous text", "prompt": "own prompt", "output": "own output",
    "aligned": "AASD alternatives", "lookahead": "lookahead n-grams", "model": "small model", "head": "trained head",
    "form": "form of the answer", "target": "the model itself",
}  # fmt: skip
ROUTE_LABELS = {
    "collaborative": "collaborative group", "attribute": "attribute group", "random": "random group",
    "global": "one global pool", "none": "no pool",
}  # fmt: skip


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`; None if either is None or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def _or_dash(show: Callable[..., str]) -> Callable[..., str]:
    @wraps(show)
    def shown(value: float | None, *arguments, **options) -> str:
        return MISSING if value is None or not math.isfinite(value) else show(value, *arguments, **options)

    return shown


@_or_dash
def count(value: float | None) -> str:
    """`12,345`."""
    return f"{value:,.0f}"


def counted(value: float | None, noun: str) -> str:
    """`1 text`, `2,000 texts`."""
    return f"{count(value)} {noun if value == 1 else noun + 's'}"


def format_counts(counts: Mapping[str, int]) -> str:
    """`unparsable (1,200), too-long (3)`."""
    return ", ".join(f"{name} ({count(number)})" for name, number in counts.items())


@_or_dash
def decimal(value: float | None, digits: int = 2, *, signed: bool = False) -> str:
    """`4.67`, and `+0.0120` or `−0.0004` when signed."""
    return f"{value:{'+' if signed else ''}z,.{digits}f}".replace("-", "−")


@_or_dash
def significant(value: float) -> str:
    """Four significant digits without an exponent: `0.7123`, `0.00002`, `12,350`."""
    return f"{Decimal(f'{value:.4g}'):,f}"


@_or_dash
def rate(value: float) -> str:
    """A rate to about three digits: `8.40`, `84.0`, `1,234`."""
    return decimal(value, 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2)


@_or_dash
def times(value: float) -> str:
    """A factor: `3.2×`."""
    return decimal(value, 0 if value >= 99.95 else 1 if value >= 1.095 else 2) + "×"


@_or_dash
def percent(value: float, digits: int = 0) -> str:
    """A share between 0 and 1 as `87 %`; a share below 1 % gets a digit after the point, or becomes `under 0.1 %`.

    A share below 1 that would round to `100 %` becomes `over 99 %`.
    """
    digits = digits or int(0 < value < 0.01)
    least = 10.0**-digits
    if 0 < value < 1 and round(100 * value, digits) in (0, 100):
        return f"under {decimal(least, digits)} %" if value < 0.5 else f"over {decimal(100 - least, digits)} %"
    return f"{decimal(100 * value, digits)} %"


@_or_dash
def seconds(value: float) -> str:
    """`0.34 s`, `21.5 s`, `3 min 20 s`, `2 h 05 min`."""
    if value < 59.95:
        return f"{value:.{2 if value < 9.995 else 1}f} s"
    if value < 3599.5:
        return "{} min {:02d} s".format(*divmod(round(value), 60))
    return "{:,} h {:02d} min".format(*divmod(round(value / 60), 60))
