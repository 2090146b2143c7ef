"""The document of a page: its head, the switch of colours, the sections that have content, and the style."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from tvmflow.core.markup import Markup, element, join
from tvmflow.core.version import VERSION
from tvmflow.pages.content import Page
from tvmflow.pages.sections import list_sections
from tvmflow.pages.summary import describe_lead, draw_tiles
from tvmflow.pages.tables import pairs

_THEMES: Final = ("auto", "light", "dark")


def render_page(page: Page) -> str:
    """Return the HTML of a page: one file that loads nothing, and shows everything without JavaScript.

    The same content gives the same text.
    """
    sections = [
        (name, title, markup)
        for name, title, content in list_sections(page)
        if (markup := join(content))
    ]
    style, script = _read("page.css"), _read("page.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"tvmflow {VERSION}"),
        # without an address of its own, a browser asks the server for one
        element("link", rel="icon", href="data:,"),
        element("title", f"{page.title} · {page.kind}"),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        _header(page, sections),
        element("main", *map(_section, sections), id="content", tabindex=-1),
        _footer(),
        element("div", id="tooltip", role="tooltip", hidden=True),
        element("script", Markup(script)),
    )
    return f'<!doctype html>\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _read(name: str) -> str:
    return files("tvmflow.pages").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return the policy that forbids every request, and every script but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _header(page: Page, sections: Sequence[tuple[str, str, Markup]]) -> Markup:
    links = (element("li", element("a", title, href=f"#{name}")) for name, title, _ in sections)
    return element(
        "header",
        element("div", element("p", f"{page.kind} report", class_="kind"), _switch(), class_="top"),
        element("h1", page.title),
        element("p", describe_lead(page), class_="lead"),
        draw_tiles(page),
        pairs(page.about),
        element("nav", element("ul", links), aria_label="Sections"),
    )


def _switch() -> Markup:
    """Return the choice of colours, which works without JavaScript."""
    choices = (
        join(
            element(
                "input",
                type="radio",
                name="theme",
                id=f"theme-{theme}",
                value=theme,
                checked=theme == "auto",
            ),
            element("label", theme.capitalize(), for_=f"theme-{theme}"),
        )
        for theme in _THEMES
    )
    legend = element("legend", "Colours", class_="hidden")
    return element("fieldset", legend, choices, class_="switch")


def _section(section: tuple[str, str, Markup]) -> Markup:
    name, title, content = section
    heading = element("h2", title, id=f"{name}-title")
    return element("section", heading, content, id=name, aria_labelledby=f"{name}-title")


def _footer() -> Markup:
    return element("footer", element("p", f"Made by tvmflow {VERSION}."))
