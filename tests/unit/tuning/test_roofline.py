"""The measured peak of the machine, and the chart of kernels against it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import tvm
from tvm import te

from tests.support.kernels import host_level
from tvmflow.compiler.options import SCHEDULES_VERSION
from tvmflow.tuning.roofline import (
    MeasuredKernel,
    Roofline,
    gflops,
    measure_peak,
    measure_roofline,
    render_roofline,
)

SVG = "{http://www.w3.org/2000/svg}"


def kernel(name: str, flops: float, tuned_us: float | None) -> MeasuredKernel:
    return MeasuredKernel(name, 2, untuned_us=100.0, tuned_us=tuned_us, flops=flops)


def module(shape: tuple[int, ...], dtype: str) -> str:
    """A workload that adds two arrays."""
    x, y = (te.placeholder(shape, dtype, name) for name in "xy")
    function = te.create_prim_func([x, y, te.compute(shape, lambda *i: x(*i) + y(*i))])
    return str(tvm.ir.save_json(tvm.IRModule({"main": function})))


def test_the_roofline_is_the_longer_of_computing_and_moving_data() -> None:
    """With the bandwidth of the cache that the data fit into; the peak is that of float32 alone."""
    machine = Roofline(100.0, ((1e6, 5e10), (1e7, 2e10)))
    assert [machine.bandwidth(size) for size in (1e3, 1e6, 5e6, 1e9)] == [5e10, 5e10, 2e10, 2e10]
    floats, bytes_ = module((1000, 1000), "float32"), module((1000, 1000), "int8")
    assert machine.least_seconds(floats, 1e6) == pytest.approx(12e6 / 2e10)
    assert machine.least_seconds(floats, 1e9) == pytest.approx(1e-2)
    assert machine.least_seconds(bytes_, 1e9) == pytest.approx(3e6 / 2e10)


def test_the_roofline_of_this_machine_is_measured() -> None:
    """Peak and bandwidths; there are none for a target without a model of its CPU."""
    payload = {"target": host_level(), "rules_version": SCHEDULES_VERSION}
    measured = measure_roofline(payload, lambda _: None)
    assert measured["gflops"] > 0 and all(speed > 0 for _, speed in measured["bandwidths"])
    board = {"kind": "llvm", "mtriple": "powerpc64le-linux-gnu", "num-cores": 2}
    assert measure_roofline({**payload, "target": board}, lambda _: None) == {"gflops": None}


def test_the_peak_uses_vector_instructions() -> None:
    """More than one operation a cycle at any clock; there is no peak for a target without a model of its CPU."""
    assert measure_peak({"target": host_level()}, lambda _: None)["gflops"] > 6
    board = {"kind": "llvm", "mtriple": "powerpc64le-linux-gnu", "num-cores": 2}
    assert measure_peak({"target": board}, lambda _: None) == {"gflops": None}


def test_the_gflops_of_a_kernel_are_those_of_its_best_schedule() -> None:
    """10 million operations in 50 µs are 200 GFLOPS; a kernel without arithmetic has none."""
    assert gflops(kernel("conv", 1e7, 50.0)) == 200
    assert gflops(kernel("conv", 1e7, None)) == 100
    assert gflops(kernel("copy", 0, 50.0)) is None


def test_the_chart_has_a_bar_for_each_kernel_and_a_line_at_the_peak() -> None:
    """It is well-formed for any kernel name, and bars are proportional."""
    kernels = [kernel("a<b>&", 1e7, 50.0), kernel("copy", 0, None), kernel("c", 1e7, None)]
    root = ElementTree.fromstring(render_roofline(kernels, 400.0))
    bars = [entry for entry in root.iter(f"{SVG}rect") if entry.find(f"{SVG}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == 2
    assert widths[0] == 2 * widths[1]
    texts = [entry.text for entry in root.iter(f"{SVG}text")]
    assert {"a<b>&", "200 (50%)", "100 (25%)", "peak of this machine: 400"} <= set(texts)


def test_a_chart_without_kernels_or_peak_is_valid() -> None:
    """No kernel was tuned, or no peak could be measured."""
    assert len(list(ElementTree.fromstring(render_roofline([], None)).iter(f"{SVG}line"))) == 0
