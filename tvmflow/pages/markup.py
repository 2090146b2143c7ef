"""HTML and SVG as values: text is escaped unless it is markup already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias, TypeVar

from tvmflow.core.formatting import latency_text, size_text
from tvmflow.core.generated_text import html_text

_VOID: Final = frozenset({"br", "input", "link", "meta"})


class Markup(str):
    """HTML that is written as it is."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
"""What an element may contain; nothing is written for None."""

Attribute: TypeAlias = str | int | float | bool | None


def element(tag: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        tag: Its name.
        children: Its content in order.
        attributes: Its attributes: `_` stands for `-`, and one at the end is left out (`class_`). None and
            False leave an attribute out, True writes its name alone.
    """
    start = f"<{tag}{''.join(_format_attribute(*item) for item in attributes.items())}>"
    if tag in _VOID:
        return Markup(start)
    return Markup(f"{start}{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Return the markup of several values, one after the other."""
    return Markup("".join(map(_format_child, children)))


def lines(text: str) -> Markup:
    """Return escaped text that keeps its lines."""
    return Markup("\n".join(html_text(line.expandtabs(4)) for line in text.splitlines()))


def _format_child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int):
        return html_text(str(child))
    return "".join(map(_format_child, child))


def _format_attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    return f' {name}="{html_text(text)}"'


# ---------------------------------------------------------------- format
# Values of pages as text, with what is not known as a dash.


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
