"""Elements: their text and attributes are escaped, whoever wrote them."""

from __future__ import annotations

import pytest

from tvmflow.core.generated_text import Child, Markup, element, join, lines


@pytest.mark.parametrize(
    ("child", "text"),
    [
        ("<b>&", "&lt;b&gt;&amp;"),
        (3, "3"),
        (None, ""),
        (["a", [Markup("<i></i>"), None], "b"], "a<i></i>b"),
        (element("b", "<"), "<b>&lt;</b>"),
        ("\x1b[31m\u202e", "\\x1b[31m\\u202e"),
    ],
)
def test_children_are_escaped_unless_they_are_markup(child: Child, text: str) -> None:
    assert join(child) == text


def test_attributes() -> None:
    """Underscores are dashes, and a value cannot end its attribute."""
    made = element("a", class_="x", aria_label='"><script>', hidden=True, id=None, title=False)
    assert made == '<a class="x" aria-label="&quot;&gt;&lt;script&gt;" hidden></a>'
    assert element("path", d=1.0 / 3, x=2) == '<path d="0.3333333" x="2"/>'
    assert element("rect", element("title", "a")) == "<rect><title>a</title></rect>"
    assert element("meta", name="a", content="b") == '<meta name="a" content="b">'


def test_lines_stay_lines() -> None:
    assert lines("a:\n\t<b>\r\n\x00") == "a:\n    &lt;b&gt;\n\\x00"
