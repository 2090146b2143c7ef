"""Which worker may run a stage: told to dask as resources, and to people in words."""

from __future__ import annotations

from typing import Any

import pytest

from tvmflow.executors import matching
from tvmflow.executors.matching import About
from tvmflow.values import StageCall

HERE = About(
    "0.1.0+aa", "linux-x86_64", "c1", "Some CPU, 2 cores", {"apache-tvm": "0.27+x", "onnx": "1+y"}
)
CPU = {"kind": "cpu", "class": "Some CPU"}


def call(stage: str, *tools: str, **settings: Any) -> StageCall:
    return StageCall(stage, settings, {}, "", "", "", "", 1.0, tools)


def test_a_worker_is_known_by_its_resources() -> None:
    """What it offers says all that it said of itself."""
    assert matching.about_worker(matching.offers(HERE)) == HERE


def test_a_worker_of_somebody_else_is_strange() -> None:
    """One that dask itself started has no such resources."""
    assert matching.about_worker({"GPU": 1.0}) is None
    assert matching.strange(HERE, None, ()) == ["`tvmflow worker` did not start it"]


def test_this_machine_may_run_every_stage() -> None:
    """All that the TOOLS of a stage name is offered."""
    here = matching.about_here()
    asked = matching.asks(call("tune", "apache-tvm", "ziglang", "numpy", device=CPU), here)
    assert asked.keys() <= matching.offers(here).keys()
    assert matching.misfits(call("tune", "apache-tvm"), here, here) == []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (HERE._replace(tvmflow="0.2.0+bb"), ["its tvmflow is 0.2.0+bb, and here it is 0.1.0+aa"]),
        (
            HERE._replace(machine="linux-aarch64"),
            ["its machine is linux-aarch64, and here it is linux-x86_64"],
        ),
        (
            HERE._replace(tools={"onnx": "1+y"}),
            ["its apache-tvm is absent, and here it is 0.27+x"],
        ),
        (HERE._replace(tools={**HERE.tools, "onnx": "2+z"}), []),
        (HERE._replace(cpu="c2"), []),
    ],
)
def test_only_what_the_stage_uses_must_be_the_same(other: About, why: list[str]) -> None:
    """In words; and dask's resources agree with them."""
    build = call("build", "apache-tvm")
    assert matching.misfits(build, HERE, other) == why
    fits = matching.asks(build, HERE).keys() <= matching.offers(other).keys()
    assert fits == (not why)


@pytest.mark.parametrize(
    ("stage", "measures"),
    [
        (call("tune", device=CPU), True),
        (call("tune", device={"kind": "rpc", "class": "tx2"}), False),
        (call("tune", tune={"trials": 0}), False),
        (call("build", target={"device": CPU, "why_not": ""}), False),
        (call("verify", target={"device": CPU, "why_not": ""}), True),
        (call("verify", target={"device": CPU, "why_not": "it lacks avx512f"}), False),
        (call("verify", target={"device": CPU, "why_not": ""}, run_on="qemu"), False),
        (call("verify", target={"parts": {"a": {"device": CPU, "why_not": ""}}}), True),
    ],
)
def test_what_is_measured_needs_the_cpu_alone(stage: StageCall, measures: bool) -> None:
    """A stage that runs what it made here asks for the one CPU of a worker; others do not."""
    assert matching.measures_here(stage) == measures
    assert (matching.asks(stage, HERE).get("cpu:c1") == 1.0) == measures
    assert matching.offers(HERE)["cpu:c1"] == 1.0
    other = HERE._replace(cpu="c2", host="Other CPU, 8 cores")
    words = ["its CPU is Other CPU, 8 cores, and the plan is for Some CPU, 2 cores"]
    assert matching.misfits(stage, HERE, other) == (words if measures else [])
