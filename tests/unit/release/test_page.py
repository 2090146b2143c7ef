"""The report of a release: one HTML file with a row for each recipe and target."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from tvmflow.recipe.lock_file import (
    LockedKernel,
    LockedRecipe,
    LockedTarget,
    LockFile,
    Measurements,
)
from tvmflow.release.content import ContentChange
from tvmflow.release.gates import Comparison
from tvmflow.release.page import render_measurements, render_report
from tvmflow.release.timing import LatencyPair
from tvmflow.tuning.trials import trial_id

TARGET = LockedTarget(
    tvm={"kind": "llvm", "mcpu": "<skylake>"},
    cores=2,
    measured=Measurements(latency_us=123.0, accuracy=0.5, bytes={"net.so": 1200}),
    kernels={
        "a": LockedKernel(names=["conv"], calls=1, untuned_us=456.0),
        "b": LockedKernel(names=["pool"], calls=1, trial=trial_id([]), trace="[]"),
    },
)
RECIPE = LockedRecipe(recipe="net.yaml", version="2", stages={}, targets={"host": TARGET})
LOCK = LockFile(
    lock=1,
    machine="linux-x86_64",
    tools={"apache-tvm": "0.27+abc"},
    recipes={"net": RECIPE},
)
CURRENT = Measurements(
    accuracy=0.9, max_abs_error=1e-6, latency_us=100.0, coverage=0.8, bytes={"net.so": 1200}
)


class _Balanced(HTMLParser):
    """Checks that every element that is opened is closed in order."""

    VOID = frozenset({"meta", "!doctype"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def cells(*comparisons: Comparison, previous: str = "all-1.0") -> list[str]:
    """Return the content of each cell of the report, after a check of its HTML."""
    html = render_measurements("all-1.1", previous, comparisons, ContentChange())
    parser = _Balanced()
    parser.feed(html)
    assert parser.stack == ["html"]
    return re.findall(r"<td>(.*?)</td>", html, re.DOTALL)


def comparison(current: Measurements = CURRENT, **fields: Any) -> Comparison:
    return Comparison("net", "host", current)._replace(**fields)


def test_the_first_release_has_plain_figures() -> None:
    """Without a previous release there is nothing to compare with."""
    assert cells(comparison(), previous="") == [
        "net",
        "host",
        "100 µs",
        "90.00%",
        "1e-06",
        "80%",
        "<div><code>net.so</code> 1,200 B</div>",
    ]
    assert "<p>the first release</p>" in render_measurements("all-1.0", "", [], ContentChange())


def test_the_latencies_of_other_runtimes_are_beside_that_of_the_library() -> None:
    """With their names and versions, also where the library is the one of the release before."""
    timed = CURRENT.model_copy(update={"compared_us": {"OpenVINO <2026>": 1500.0}})
    note = "<small>OpenVINO &lt;2026&gt;: 1.5 ms</small>"
    assert cells(comparison(timed), previous="")[2] == f"100 µs{note}"
    same = cells(comparison(timed, is_same_library=True))[2]
    assert same == f"100 µs<small>the same library</small>{note}"


def test_a_library_that_no_other_one_dominates_is_marked() -> None:
    """In the cell of its target; the others are not."""
    both = [comparison(recipe=name) for name in ("net-full", "net-half")]
    html = render_measurements("all-1.0", "", both, ContentChange(), {("net-half", "host")})
    assert html.count("Pareto-optimal") == 1
    assert "<td>net-half</td><td>host<small>Pareto-optimal</small></td>" in html


def test_values_that_were_not_measured_are_dashes() -> None:
    assert cells(comparison(Measurements())) == [
        *("net", "host", "<small>not timed</small>"),
        *["<small>–</small>"] * 3,
        "",
    ]


@pytest.mark.parametrize(
    ("previous", "column", "kind"),
    [
        (Measurements(accuracy=0.8), 3, "good"),
        (Measurements(accuracy=0.95), 3, "bad"),
        (Measurements(max_abs_error=2e-6), 4, "good"),
        (Measurements(max_abs_error=5e-7), 4, "bad"),
        (Measurements(coverage=0.5), 5, "good"),
        (Measurements(coverage=0.9), 5, "bad"),
        (Measurements(latency_us=200.0), 2, "good"),
        (Measurements(latency_us=50.0), 2, "bad"),
        (Measurements(bytes={"net.so": 2000}), 6, "good"),
        (Measurements(bytes={"net.so": 1000}), 6, "bad"),
    ],
)
def test_changes_are_good_or_bad(previous: Measurements, column: int, kind: str) -> None:
    """More accuracy and coverage are better, less of everything else."""
    row = cells(comparison(previous=previous))
    assert f'class="{kind}"' in row[column]
    assert not any("class=" in cell for index, cell in enumerate(row) if index != column)


def test_equal_values_are_not_marked() -> None:
    row = cells(comparison(previous=CURRENT))
    assert row[2] == "100 µs<small>unchanged</small>"
    assert row[3:6] == ["90.00%", "1e-06", "80%"]
    assert row[6] == "<div><code>net.so</code> 1,200 B<small>unchanged</small></div>"


def test_the_source_of_a_latency_is_named() -> None:
    timed = comparison(previous=CURRENT, latencies=LatencyPair(9e-5, 1e-4))
    assert cells(timed)[2].startswith("90 µs<small>")
    assert "-10.0%" in cells(timed)[2] and "<small>measured alternately</small>" in cells(timed)[2]
    same = comparison(previous=CURRENT, is_same_library=True)
    assert cells(same)[2] == "100 µs<small>the same library</small>"
    failed = comparison(previous=CURRENT, not_timed_reason="no <GPU>")
    assert "<small>not timed again: no &lt;GPU&gt;</small>" in cells(failed)[2]


def test_names_cannot_add_elements() -> None:
    row = cells(Comparison("<b>", "host", Measurements(bytes={"<i>": 1})), previous="<u>")
    assert row[0] == "&lt;b&gt;" and "&lt;i&gt;" in row[6]
    page = render_measurements("<b>", "<u>", [], ContentChange())
    assert "<strong>&lt;u&gt;</strong>" in page and "<h1>&lt;b&gt;: measurements</h1>" in page


def test_what_is_new_and_what_is_gone_has_a_line() -> None:
    content = ContentChange(("net/<new>",), ("old", "net/edge"))
    html = render_measurements("all-1.1", "all-1.0", [], content)
    assert "<p>New: <code>net/&lt;new&gt;</code></p>" in html
    assert "<p>No longer in it: <code>old</code>, <code>net/edge</code></p>" in html


def test_the_report_has_no_figure_that_a_run_measures() -> None:
    """Figures are in a frame, with a page of their own, that a browser also shows without a server."""
    html = render_report("all-1.1", LOCK)
    parser = _Balanced()
    parser.feed(html)
    assert re.findall(r"<td>(.*?)</td>", html, re.DOTALL) == [
        "net 2",
        "host",
        "llvm &lt;skylake&gt;",
        "1 of 2",
        "<div><code>net.so</code> 1,200 B</div>",
    ]
    assert "built on linux-x86_64 with apache-tvm 0.27<" in html
    assert '<iframe src="measurements.html"' in html and 'href="measurements.html"' in html
    assert not [figure for figure in ("123", "456", "50.0%") if figure in html]
