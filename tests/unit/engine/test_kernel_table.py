"""The kernels of a build, from the facts of its stages."""

from __future__ import annotations

from tvmflow.engine.kernel_table import KernelRow, list_kernel_rows

BUILT = {
    "schedule_rules": {"tuned": ["conv"], "elementwise": ["add", "relu"]},
    "kernel_nodes": {"conv": [[0], [1]], "relu": [[2]]},
}


def test_the_slowest_kernel_comes_first() -> None:
    """By the library's profile; what no stage knows of a kernel is None."""
    rows = list_kernel_rows(
        {
            "import": {"nodes": ["/a/Conv", "/b/Conv", "/c/Relu"]},
            "tune": {"workloads": [{"name": "conv", "key": "ab"}]},
            "pick_best": {
                "kernels": [
                    {"name": "conv", "calls": 2, "untuned_us": 9.0, "tuned_us": 3.0},
                    {"name": "relu", "calls": 1, "untuned_us": 2.0, "tuned_us": None},
                ]
            },
            "build": BUILT,
            "verify": {"profile": {"kernels": {"conv": 0.7, "relu": 0.3}}},
        }
    )
    assert rows == [
        KernelRow("conv", 0.7, 2, 6e-6, "tuned", "ab", "/a/Conv and 1 other call"),
        KernelRow("relu", 0.3, 1, 2e-6, "elementwise", "", "/c/Relu"),
        KernelRow("add", None, None, None, "elementwise", "", ""),
    ]


def test_a_build_without_measurements_has_its_schedules() -> None:
    """As a recipe for another machine has, which was not run."""
    rows = list_kernel_rows({"build": BUILT})
    assert [(row.name, row.share, row.schedule) for row in rows] == [
        ("add", None, "elementwise"),
        ("conv", None, "tuned"),
        ("relu", None, "elementwise"),
    ]
