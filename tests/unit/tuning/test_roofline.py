"""The machine's measured peak, and the picture of what kernels reach of it."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from tests.support.kernels import host_level
from tvmflow.tuning.roofline import gflops, measure_peak, picture

SVG = "{http://www.w3.org/2000/svg}"


def kernel(name: str, flops: float, tuned_us: float | None) -> dict[str, Any]:
    return {"name": name, "calls": 2, "flops": flops, "untuned_us": 100.0, "tuned_us": tuned_us}


def test_the_peak_is_that_of_vectors() -> None:
    """More than one operation each cycle at any clock that a machine has; nothing is said of machines without a road."""
    assert measure_peak({"target": host_level()}, lambda _: None)["gflops"] > 6
    board = {"kind": "llvm", "mtriple": "powerpc64le-linux-gnu", "num-cores": 2}
    assert measure_peak({"target": board}, lambda _: None) == {"gflops": None}


def test_what_a_kernel_reaches_is_that_of_its_best_schedule() -> None:
    """10 million operations in 50 µs are 200 GFLOPS; what does no arithmetic has no place in the picture."""
    assert gflops(kernel("conv", 1e7, 50.0)) == 200
    assert gflops(kernel("conv", 1e7, None)) == 100
    assert gflops(kernel("copy", 0, 50.0)) is None


def test_a_picture_has_a_bar_for_each_kernel_and_a_line_at_the_peak() -> None:
    """It is well-formed whatever kernels are called, and bars are as long as their share."""
    kernels = [kernel("a<b>&", 1e7, 50.0), kernel("copy", 0, None), kernel("c", 1e7, None)]
    root = ElementTree.fromstring(picture(kernels, 400.0))
    bars = [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == 2
    assert widths[0] == 2 * widths[1]
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert {"a<b>&", "200 (50%)", "100 (25%)", "peak of this machine: 400"} <= set(texts)


def test_a_picture_of_nothing_is_one_too() -> None:
    """No kernel was tuned, or no peak could be measured."""
    assert len(list(ElementTree.fromstring(picture([], None)).iter(f"{SVG}line"))) == 0
