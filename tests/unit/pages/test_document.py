"""Pages: complete HTML that loads nothing, with every text escaped, and only the sections that have content."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from tests.unit.pages.full_page import full_page, library
from tvmflow.engine.builds import Build, Peer, SizeResult, Speedup
from tvmflow.engine.report import StageReport
from tvmflow.pages.content import (
    Gate,
    Kernel,
    LibraryKernels,
    Page,
    StageEntry,
)
from tvmflow.pages.document import render_page

EVIL = "<img src=x onerror=alert(1)>\"'&</script>\u202e"

VOID = frozenset({"meta", "link", "input", "br"})


class Document(HTMLParser):
    """Checks that elements are closed in order, and collects ids, links, headings and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def values(self, name: str) -> list[str]:
        return [value or "" for attribute, value in self.attributes if attribute == name]


def test_a_page_has_all_sections_and_is_well_formed() -> None:
    html = render_page(full_page())
    document = Document(html)
    ids = document.values("id")
    assert len(ids) == len(set(ids))
    sections = [
        "libraries",
        "sizes",
        "pareto",
        "gates",
        "files",
        "tuning",
        "kernels",
        "layers",
        "time",
        "stages",
    ]
    assert re.findall(r'<section id="(\w+)"', html) == [*sections, "recipes", "provenance"]
    assert {link[1:] for link in document.values("href") if link.startswith("#")} <= set(ids)


def test_a_search_that_kept_nothing_has_no_speedup() -> None:
    """Its best trials were lucky: measured again, interleaved, the rules were fastest."""
    page = full_page()
    (kernels,) = page.kernels
    vain = tuple(kernel._replace(tuned_s=None) for kernel in kernels.kernels)
    html = render_page(
        page._replace(libraries=(), kernels=(kernels._replace(kernels=vain, kept=0),))
    )
    assert (
        "net: accepted tuned schedules for 0 of 2 kernels: those of the rules are the fastest."
        in html
    )
    assert "speedup by tuning</th>" not in html and "Time of all kernels over trials" not in html
    assert "which was no faster in an interleaved measurement" in html
    gain = Speedup(1.04, 1.02, 1.05, 20)
    html = render_page(
        page._replace(libraries=(), kernels=(kernels._replace(kept=1, speedup=gain),))
    )
    # the best trials alone halve the time; the library is 4 % faster, and that is what is shown
    table = html.partition("Tuning of each library</caption>")[2].partition("</table>")[0]
    assert "1 of 2" in table and "1.04×" in table and "2.00×" not in table


def test_the_times_of_kernels_add_up_to_the_latency() -> None:
    """With what is between them; each was slower by itself, which is not shown beside."""
    kernels = (
        Kernel("conv", calls=2, untuned_s=9e-6, share=0.6, library_s=2.1e-6),
        Kernel("pool", untuned_s=10e-6, share=0.2, library_s=1.4e-6),
    )
    html = render_page(Page("Run", "net", kernels=(LibraryKernels("net/host", kernels),)))
    rows = re.findall(r'data-value="([0-9.e-]+)"', html.partition("between kernels")[0])
    assert "9 µs" not in html and "19 µs" not in html
    assert "4.2 µs" in html and "1.4 µs" in html and rows
    rest = html.partition("between kernels")[2]
    assert "1.4 µs" in rest and "20.0%" in rest


def test_a_page_without_content_is_a_page() -> None:
    html = render_page(Page("Run", "net"))
    assert Document(html).tags.count("section") == 0
    assert "<h1>net</h1>" in html


def test_nobody_can_add_elements() -> None:
    """Whatever models, kernels, targets and files are called."""
    html = render_page(full_page(EVIL))
    document = Document(html)
    assert "img" not in document.tags and document.tags.count("script") == 1
    assert not [name for name, _ in document.attributes if name.startswith("on")]
    assert "\u202e" not in html and "&lt;img src=x" in html
    # the attributes are those of the page itself
    plain = Document(render_page(full_page()))
    assert {name for name, _ in document.attributes} == {name for name, _ in plain.attributes}


def test_a_page_loads_nothing() -> None:
    """Its policy forbids it, and lets only the page's own script run."""
    html = render_page(full_page())
    document = Document(html)
    assert not document.values("src")
    assert {link for link in document.values("href") if link[0] != "#"} == {"data:,", "report.html"}
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)[0]
    assert "@import" not in style and "url(" not in style
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src &#x27;none&#x27;" in policy and f"sha256-{digest}" in policy


def test_the_same_content_gives_the_same_text() -> None:
    assert render_page(full_page()) == render_page(full_page())


@pytest.mark.parametrize(
    ("page", "lead"),
    [
        (Page("Run", "net", libraries=(library("host"),)), "1 library, verified."),
        (
            Page("Run", "net", libraries=(library("a"), library("b", verdict="rejected"))),
            "2 libraries for 2 targets, 1 verified, 1 rejected.",
        ),
        (
            Page("Run", "net", libraries=(library("a", verdict=None, is_skipped=True),)),
            "1 library, 0 verified, 1 skipped.",
        ),
        (Page("Release", "net", libraries=(library("a", verdict=None),)), "1 library."),
        (
            Page("Run", "net", stages=(StageEntry(StageReport("net:build/host", "timeout")),)),
            "net:build/host: took too long.",
        ),
        (
            Page("Release", "net", gates=(Gate("net/host", "max_bytes", "1", "2", "failed"),)),
            "1 gate failed.",
        ),
        (
            Page("Release", "net", gates=(Gate("net/host", "max_bytes", "1", "2", "passed"),)),
            "All measured gates passed.",
        ),
        (
            Page(
                "Run",
                "net",
                previous="run abc",
                libraries=(
                    library("a")._replace(previous=Build("net", "a", latency_s=2e-3)),
                    library("b"),
                ),
            ),
            "2 libraries for 2 targets, all verified. Latency -50.0% since run abc.",
        ),
    ],
)
def test_the_headline(page: Page, lead: str) -> None:
    assert f'<p class="lead">{lead}</p>' in render_page(page)


def test_a_gate_that_passed_is_not_marked_as_bad() -> None:
    states = ("passed", "failed", "not measured")
    gates = tuple(Gate(f"net/{state}", "min_accuracy", "95%", "–", state) for state in states)
    html = render_page(Page("Release", "net", gates=gates))
    assert '<span class="good">✓ passed</span>' in html
    assert '<span class="bad">✗ failed</span>' in html
    assert '<span class="faint">○ not measured</span>' in html
    assert html.count('class="bad"') == 1


def test_a_change_has_its_direction_in_words() -> None:
    """Less latency is good; colour is not the only sign."""
    rows = [
        library(target)._replace(previous=Build("net", target, latency_s=before))
        for target, before in (("better", 2e-3), ("worse", 5e-4), ("same", 1e-3))
    ]
    html = render_page(Page("Run", "net", previous="run abc", libraries=tuple(rows)))
    assert '<span class="good">▼ -50.0%</span>' in html
    assert '<span class="bad">▲ +100.0%</span>' in html
    assert '<span class="faint">unchanged</span>' in html


@pytest.mark.parametrize(
    ("speedup", "note"),
    [
        (Speedup(2.0, 1.9, 2.1, 9), '<span class="good">2.00× as fast</span>'),
        (Speedup(0.5, 0.4, 0.6, 9), '<span class="bad">0.50× as fast</span>'),
        (Speedup(1.1, 0.9, 1.2, 9), '<span class="faint">1.10× as fast</span>'),
    ],
)
def test_only_what_is_no_noise_is_coloured(speedup: Speedup, note: str) -> None:
    build = library("host", peers=(Peer("ONNX Runtime", 2e-3, speedup),))
    assert note in render_page(Page("Run", "net", libraries=(build,)))


def test_a_rejected_library_has_no_speed_in_the_head() -> None:
    """It computes wrong numbers; its latency is in the table."""
    peer = Peer("ONNX Runtime", 2e-3, Speedup(2.0, 1.9, 2.1, 9))
    build = library("host", verdict="rejected", peers=(peer,), tuning_speedup=peer.speedup)
    tiles = render_page(Page("Run", "net", libraries=(build,))).partition("</dl>")[0]
    assert "0 of 1" in tiles and "1 ms" not in tiles and "2.00×" not in tiles


def test_all_sizes_of_a_library_are_in_one_table() -> None:
    """With a mark where one is wrong; a library of fixed sizes has no such section."""
    sizes = (SizeResult("seq=16", True, 1e-6, 1e-3, 2e-3), SizeResult("seq=37", False, 2.0))
    page = Page(
        kind="Run",
        title="net",
        libraries=(library("host", sizes=sizes, measured_at="seq=128"), library("other")),
    )
    html = render_page(page)
    section = html.partition('<section id="sizes"')[2].partition("</section>")[0]
    text = re.sub(r"<[^>]+>", " ", section)
    assert "All other figures are at seq=128." in text
    assert re.search(r"seq=16\s+✓ right\s+1e-06\s+1 ms\s+2 ms", text)
    assert re.search(r"seq=37\s+✗ wrong\s+2", text)
    fixed = render_page(page._replace(libraries=(library("other"),)))
    assert 'id="sizes"' not in fixed
