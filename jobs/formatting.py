"""Numbers and names as a reader wants them: separators, units, a real minus sign, a dash where there is no number."""

import math

MISSING = "–"
MINUS = "−"

SOURCE_LABELS = {
    "pool": "pool",
    "previous": "own previous text",
    "prompt": "own prompt",
    "output": "own output",
    "target": "the model itself",
}
ROUTE_LABELS = {
    "collaborative": "collaborative group",
    "attribute": "attribute group",
    "random": "random group",
    "global": "one global pool",
    "none": "no pool",
}


def finite(value: float | None) -> float | None:
    """The value; None where it is missing, NaN or infinite."""
    return None if value is None or not math.isfinite(value) else value


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`, or None where that is no number."""
    top, bottom = finite(numerator), finite(denominator)
    return None if top is None or not bottom else top / bottom


def count(value: float | None) -> str:
    """`12,345`."""
    number = finite(value)
    return MISSING if number is None else f"{number:,.0f}"


def counted(value: float | None, singular: str, plural: str | None = None) -> str:
    """`1 text`, `2,000 texts`."""
    return f"{count(value)} {singular if value == 1 else plural or singular + 's'}"


def decimal(value: float | None, digits: int = 2, *, signed: bool = False) -> str:
    """`4.67`, and `+0.0120` or `−0.0004` when signed."""
    number = finite(value)
    if number is None:
        return MISSING
    text = f"{abs(number):,.{digits}f}"
    if number < 0 and float(text.replace(",", "")) != 0:
        return MINUS + text
    return ("+" if signed else "") + text


def rate(value: float | None) -> str:
    """A rate to three digits or so: `8.4`, `84`, `1,234`."""
    number = finite(value)
    if number is None:
        return MISSING
    return decimal(number, 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2)


def times(value: float | None) -> str:
    """A factor: `3.2×`."""
    number = finite(value)
    return MISSING if number is None else decimal(number, 0 if number >= 100 else 1 if number >= 1.1 else 2) + "×"


def percent(value: float | None, digits: int = 0) -> str:
    """A share of one as `87 %`; shares that are small but not nothing keep a digit."""
    number = finite(value)
    if number is None:
        return MISSING
    if 0 < number < 0.01 and digits == 0:
        digits = 1
    return f"{decimal(100 * number, digits)} %"


def seconds(value: float | None) -> str:
    """`0.34 s`, `21.5 s`, `3 min 20 s`, `2 h 05 min`."""
    number = finite(value)
    if number is None:
        return MISSING
    if number < 60:
        return f"{decimal(number, 2 if number < 9.995 else 1)} s"
    if number < 3600:
        minutes, rest = divmod(round(number), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest = divmod(round(number / 60), 60)
    return f"{hours:,} h {rest:02d} min"


def millions(value: float | None) -> str:
    """A parameter count: `2.5 M`, `8.0 B`."""
    number = finite(value)
    if number is None:
        return MISSING
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
