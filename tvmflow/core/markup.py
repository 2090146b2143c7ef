"""HTML and SVG as values: text is escaped unless it is markup already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from tvmflow.core.generated_text import html_text

_VOID: Final = frozenset({"br", "input", "link", "meta"})
_SHAPES: Final = frozenset({"line", "path", "rect"})


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
    if tag in _SHAPES and not children:
        return Markup(f"{start[:-1]}/>")
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
