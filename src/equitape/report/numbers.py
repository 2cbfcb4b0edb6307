"""Number formats of pages, plots, tables and the terminal."""

import math

from ..runs.results import PERCENT

MISSING = "-"
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def decimals(value: float, digits: int = 4) -> int:
    """The number of decimals that shows `digits` significant digits, at most 8."""
    if value == 0 or not math.isfinite(value):
        return 2
    return min(max(0, digits - 1 - math.floor(math.log10(abs(value)))), 8)


def number(value: float | None, places: int | None = None, *, digits: int = 4) -> str:
    """A number with four significant digits and thousands separators; "-" for None and NaN.

    places: a fixed number of decimals. Integers have no decimals. Numbers below 1e-4 use powers of ten.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if isinstance(value, int):
        return f"{value:,}"
    if places is None and 0 < abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.{decimals(value, digits) if places is None else places}f}"


def percent_decimals(value: float) -> int:
    """Two decimals, or as many as show that a small share is not zero: 0.00 means none."""
    return max(2, decimals(value, 2)) if 0 < abs(value) < 0.005 else 2


def with_unit(value: float | None, unit: str) -> str:
    """A value in its unit: two decimals for per cent, more below 0.005; four significant digits otherwise."""
    if unit != PERCENT or value is None:
        return number(value)
    return number(float(value), percent_decimals(value))


def signed(value: float, places: int) -> str:
    """A signed difference; no sign if it rounds to zero."""
    text = number(abs(float(value)), places)
    return text if text.strip("0.") == "" else ("-" if value < 0 else "+") + text


def duration(seconds: float, shortest: float | None = None) -> str:
    """Seconds, minutes or hours. shortest: the smallest value of a column, which sets its unit."""
    shortest = seconds if shortest is None else shortest
    size, unit = (1, "s") if shortest < 120 else (60, "min") if shortest < 7200 else (3600, "h")
    return f"{seconds / size:,.1f} {unit}"


def quantity(value: float, unit: str = "", *, digits: int = 4) -> str:
    """A number with a prefix: 1234567 as 1.235 M. Numbers below 1000 are rounded to whole ones."""
    if value < 1000:
        return f"{value:.0f} {unit}".rstrip()
    power = min(int(math.log10(value)) // 3, len(PREFIXES) - 1)
    return f"{number(value / 1000**power, digits=digits)} {PREFIXES[power]}{unit}"


def readable(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")
