"""Pages for everybody: order, names, keyboard and contrast, as far as they can be checked without a browser.

tests/e2e/test_reports.py has a browser and axe-core check the rest.
"""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import NamedTuple

import pytest

from tests.unit.pages.full_page import full_page
from tvmflow.pages.content import Change, KernelChange
from tvmflow.pages.document import render_page

STYLE = files("tvmflow.pages").joinpath("page.css").read_text(encoding="utf-8")
SCHEMES = ("light", "dark")
COLOUR = re.compile(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)")
# The ratios that WCAG 2.2 asks for at level AA: text, and what is not text.
TEXT, GRAPHICS = 4.5, 3.0


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str | None]


class Elements(HTMLParser):
    """Collects the elements of a page in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.entries: list[Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.entries.append(Element(tag, dict(attrs)))

    def named(self, *tags: str) -> list[Element]:
        return [element for element in self.entries if element.tag in tags]


@pytest.fixture(scope="module")
def page() -> Elements:
    """Return the elements of a page with every section."""
    made = full_page()._replace(
        kernel_changes=(KernelChange("net/host", "conv", 1e-3, 2e-3),),
        changes=(Change("everywhere", "package", "1 -> 2"),),
    )
    return Elements(render_page(made))


def test_a_page_has_a_language_and_one_main_part(page: Elements) -> None:
    assert [element.attributes["lang"] for element in page.named("html")] == ["en"]
    assert len(page.named("main")) == len(page.named("h1")) == 1


def test_headings_leave_out_no_level(page: Elements) -> None:
    levels = [int(element.tag[1]) for element in page.named("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_cells_have_headings(page: Elements) -> None:
    """Of their column and of their row; and every table has a caption."""
    headings = page.named("th")
    assert headings and {cell.attributes.get("scope") for cell in headings} == {"col", "row"}
    assert len(page.named("table")) == len(page.named("caption")) > 0


def test_what_scrolls_and_what_is_drawn_has_a_name(page: Elements) -> None:
    """The keyboard reaches what scrolls; a picture is named, or hidden where text says the same."""
    areas = [e for e in page.entries if "scroll" in (e.attributes.get("class") or "").split()]
    assert areas
    for element in areas:
        assert element.attributes["tabindex"] == "0" and element.attributes["aria-label"]
        assert element.attributes["role"] in ("group", "region")
    for element in page.named("svg"):
        attributes = element.attributes
        assert attributes.get("aria-hidden") == "true" or attributes["aria-label"]
    for element in page.entries:
        if element.attributes.get("role") == "img":
            assert element.attributes["aria-label"]


def test_every_choice_has_a_label(page: Elements) -> None:
    ids = {element.attributes.get("id") for element in page.entries}
    labels = {element.attributes.get("for") for element in page.named("label")}
    assert {element.attributes["id"] for element in page.named("input")} == labels
    for element in page.entries:
        assert element.attributes.get("aria-labelledby") in (None, *ids)


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG defines it."""
    values = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_have_enough_contrast(scheme: str) -> None:
    """Texts with both backgrounds, and what charts are drawn with."""
    palette = {name: values[SCHEMES.index(scheme)] for name, *values in COLOUR.findall(STYLE)}
    assert len(palette) == 16
    weak = [
        (name, background, round(contrast(palette[name], palette[background]), 2))
        for name in palette
        for background in ("paper", "raised")
        if name not in ("paper", "raised", "line")
        and contrast(palette[name], palette[background])
        < (GRAPHICS if re.fullmatch(r"s\d", name) else TEXT)
    ]
    assert weak == []
