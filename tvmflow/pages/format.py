"""Values of pages as text, with what is not known as a dash."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

from tvmflow.core.formatting import latency_text, size_text

UNKNOWN: Final = "–"
_Value = TypeVar("_Value", int, float)


def format_known(value: _Value | None, show: Callable[[_Value], str]) -> str:
    """Return a value as text, or a dash where it is not known."""
    return UNKNOWN if value is None else show(value)


def latency(value: float | None) -> str:
    """Return a latency."""
    return format_known(value, latency_text)


def size(value: float | None) -> str:
    """Return a size."""
    return format_known(value, size_text)


def error(value: float | None) -> str:
    """Return an error in two digits."""
    return format_known(value, "{:.2g}".format)


def share(value: float | None) -> str:
    """Return a share in percent."""
    return format_known(value, "{:.0%}".format)


def accuracy(value: float | None) -> str:
    """Return an accuracy in percent with two more digits."""
    return format_known(value, "{:.2%}".format)


def ratio(value: float | None) -> str:
    """Return a ratio in three digits: 1.23×, 15.5×, 120×."""
    if value is None:
        return UNKNOWN
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 2)}f}×"


def plain(value: float) -> str:
    """Return a number in at most three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def change(previous: float | None, current: float | None) -> float | None:
    """Return by which share a value has changed; None where one is not known."""
    return current / previous - 1 if previous and current is not None else None
