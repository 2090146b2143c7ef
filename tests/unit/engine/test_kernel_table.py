"""The kernels of a build, from the facts of its stages."""

from __future__ import annotations

import pytest

from tests.support.facts import (
    kernel_facts,
    pick_best_facts,
    profile,
    seconds,
    tune_facts,
    verify_facts,
    workload_facts,
)
from tvmflow.core.codec import from_json
from tvmflow.engine.kernel_details import KernelRow, list_kernel_rows
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.build import BuildFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.pick_best import PickBestFacts
from tvmflow.stages.verify.verdict import Verdict
from tvmflow.tuning.tuning_job import TuneFacts

BUILT = BuildFacts(
    kernels=3,
    schedule_rules={"tuned": ("conv",), "elementwise": ("add", "relu")},
    kernel_nodes={"conv": [[0], [1]], "relu": [[2]]},
)


def test_the_slowest_kernel_comes_first() -> None:
    """By the library's profile; what no stage knows of a kernel is None."""
    kernels = [
        kernel_facts("conv", calls=2, untuned_us=9.0, tuned_us=3.0),
        kernel_facts("relu", untuned_us=2.0, tuned_us=None),
    ]
    rows = list_kernel_rows(
        BUILT,
        KnownFacts(
            {
                ImportFacts: ImportFacts(nodes=("/a/Conv", "/b/Conv", "/c/Relu")),
                TuneFacts: from_json(
                    TuneFacts, tune_facts(workloads=[workload_facts("conv", key="ab")])
                ),
                PickBestFacts: from_json(PickBestFacts, pick_best_facts(kernels=kernels)),
                BuildFacts: BUILT,
                Verdict: verify_facts(
                    latency={"library": seconds(10e-6)}, profile=profile(conv=0.7, relu=0.2)
                ),
            }
        ),
    )
    conv = KernelRow("conv", 0.7, 2, 0.7 * 10e-6, 6e-6, "tuned", "ab", "/a/Conv and 1 other call")
    assert rows == [
        conv,
        KernelRow("relu", 0.2, 1, 0.2 * 10e-6, 2e-6, "elementwise", "", "/c/Relu"),
        KernelRow("add", None, None, None, None, "elementwise", "", ""),
    ]
    # times have the ratio of the shares: both are of one call of the library
    times, shares = [row.seconds or 0 for row in rows], [row.share or 0 for row in rows]
    assert times[0] / times[1] == pytest.approx(shares[0] / shares[1])


def test_a_build_without_measurements_has_its_schedules() -> None:
    """As a recipe for another machine has, which was not run."""
    rows = list_kernel_rows(BUILT, KnownFacts({BuildFacts: BUILT}))
    assert [(row.name, row.share, row.schedule) for row in rows] == [
        ("add", None, "elementwise"),
        ("conv", None, "tuned"),
        ("relu", None, "elementwise"),
    ]
