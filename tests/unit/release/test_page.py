"""The pages of a release: what it has, and what was measured beside the previous release."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.release.page_locks import lock
from tvmflow.pages.content import Library, Page
from tvmflow.pages.document import render_page
from tvmflow.recipe.lock_file import (
    Measurements,
)
from tvmflow.release.gates import MeasuredTarget, MeasurementsFile
from tvmflow.release.page import describe_gates, describe_measurements, describe_release

CURRENT = Measurements(
    accuracy=0.9, max_abs_error=1e-6, latency_us=100.0, coverage=0.8, bytes={"net.so": 1200}
)


def latency(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("mean", "median", "min", "max", "std"), seconds)


VERDICT = {
    "passed": True,
    "against": "reference",
    "reference": "ONNX Runtime 1.0",
    "outputs": {},
    "latency": {"library": latency(1e-4), "untuned": latency(2e-4)},
    "speedup": {"median": 2.0, "low": 1.9, "high": 2.1, "pairs": 8, "is_slower": False},
    "compared": {
        "openvino": {
            "name": "OpenVINO 2026",
            "latency": latency(3e-4),
            "speedup": {"median": 3.0, "low": 2.9, "high": 3.1, "pairs": 9, "is_slower": False},
        }
    },
}


def measure(compared_with: str = "all-1.0", **fields: Any) -> MeasurementsFile:
    target = MeasuredTarget(measured=CURRENT, previous=Measurements())
    target = target.model_copy(update={"library_bytes": 5000, **fields})
    return MeasurementsFile(
        measurements=1,
        compared_with=compared_with,
        added=["net/new"],
        removed=["old"],
        gates={"min_accuracy": 0.85, "max_bytes": 1000.0, "max_slowdown": 0.1},
        recipes={"net": {"host": target}},
        verification={"net": {"host": VERDICT}},
    )


def page(**fields: Any) -> Page:
    return describe_measurements("all-1.1", lock(), measure(**fields))


def only(page: Page) -> Library:
    (library,) = page.libraries
    return library


def test_the_report_has_no_figure_that_a_run_measures() -> None:
    """They are on a page of their own, which it links to."""
    report = describe_release("all-1.1", lock())
    html = render_page(report)
    assert not [figure for figure in ("123", "456", "50.00%") if figure in html]
    assert 'href="measurements.html"' in html
    assert (only(report).build.kernels, only(report).build.tuned_kernels) == (2, 1)
    assert "llvm &lt;skylake&gt;" in html and "1.2 kB" in html and "0.27+abc" in html
    assert render_page(describe_release("all-1.1", lock())) == html


def test_measurements_are_those_of_verify() -> None:
    library = only(page())
    assert library.build.latency_s == pytest.approx(1e-4)
    assert library.build.untuned_latency_s == 2e-4
    assert [peer.name for peer in library.build.peers] == ["OpenVINO 2026"]
    assert (library.build.accuracy, library.build.error) == (0.9, 1e-6)
    assert (library.build.size_bytes, library.files) == (5000, {"net.so": 1200})
    assert library.previous is None and library.state == "verified"


@pytest.mark.parametrize(
    ("fields", "latency_s", "note"),
    [
        ({"current_s": 9e-5, "previous_s": 1e-4}, 9e-5, "measured interleaved"),
        ({"is_same_library": True}, 1e-4, "the same library"),
        ({"not_timed_reason": "no <GPU>"}, 1e-4, "not timed again: no <GPU>"),
        ({}, 1e-4, ""),
    ],
)
def test_the_source_of_a_latency_is_named(
    fields: dict[str, Any], latency_s: float, note: str
) -> None:
    library = only(page(previous=CURRENT, **fields))
    assert library.build.latency_s == pytest.approx(latency_s) and library.note == note
    assert library.previous is not None
    assert library.previous.latency_s == pytest.approx(1e-4)
    assert library.previous_files == {"net.so": 1200}


def test_gates_have_their_limits_and_values() -> None:
    """Whoever passed is told with which value; nothing to compare with is not measured."""
    gates = {gate.gate: gate for gate in page().gates}
    assert {name: (gate.limit, gate.value, gate.state) for name, gate in gates.items()} == {
        "min_accuracy": ("85.00%", "90.00%", "passed"),
        "max_slowdown": ("10.00%", "–", "not measured"),
        "max_bytes": ("1.0 kB", "1.2 kB", "failed"),
    }


def test_gates_are_read_from_the_record_of_a_run() -> None:
    entry = {"label": "net/host", "gate": "min_accuracy", "limit": 0.9, "value": 0.8}
    (gate,) = describe_gates([{**entry, "is_failed": True}])
    assert (gate.label, gate.limit, gate.state) == ("net/host", "90.00%", "failed")


def test_what_is_new_and_what_is_gone_has_a_line() -> None:
    assert page().notes == ("New: net/new", "No longer in it: old")
    first = describe_measurements("all-1.0", lock(), measure(""))
    assert first.notes[0] == "This is the first release."


def test_kernels_are_those_of_the_lock_file_where_the_store_is_not_at_hand() -> None:
    """The one that takes longest first."""
    (tuned,) = page().kernels
    assert [kernel.name for kernel in tuned.kernels] == ["pool", "conv"]
    assert tuned.kernels[0].tuned_s == pytest.approx(88e-6) and "in the store" in tuned.notes[0]


@pytest.mark.parametrize(
    ("names", "recipes"),
    [
        (["net"], [("net", "")]),
        (["net-a"], [("net-a", "")]),
        (["net-a", "net-b"], [("net", "a"), ("net", "b")]),
        (["my-net-a-1", "my-net-a-2"], [("my-net-a", "1"), ("my-net-a", "2")]),
    ],
)
def test_variants_are_those_of_one_file(names: list[str], recipes: list[tuple[str, str]]) -> None:
    libraries = describe_release("all-1.1", lock(*names)).libraries
    assert [(library.recipe, library.build.variant) for library in libraries] == recipes
