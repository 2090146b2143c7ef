"""Which worker may run a stage: as resources for dask, and as reasons for people."""

from __future__ import annotations

import pytest

from tests.support.clusters import call
from tvmflow.core.types import StageCall
from tvmflow.executors import cluster_worker
from tvmflow.executors.cluster_worker import WorkerDescription

PLANNER = WorkerDescription(
    "0.1.0+aa", "linux-x86_64", "c1", "Some CPU, 2 cores", {"apache-tvm": "0.27+x", "onnx": "1+y"}
)


def test_resources_describe_a_worker_completely() -> None:
    """Its description can be read back from them."""
    assert cluster_worker.parse_resources(cluster_worker.offered_resources(PLANNER)) == PLANNER


def test_a_worker_that_dask_started_has_no_description() -> None:
    """It has no such resources."""
    assert cluster_worker.parse_resources({"GPU": 1.0}) is None
    assert cluster_worker.list_version_mismatches(PLANNER, None, ()) == [
        "it was not started by `tvmflow worker`"
    ]


def test_this_machine_may_run_every_stage() -> None:
    """It offers every tool that a stage can name."""
    host = cluster_worker.describe_this_host()
    required = cluster_worker.required_resources(
        call("tune", "apache-tvm", "ziglang", "numpy")._replace(devices=("cpu",)), host
    )
    assert required.keys() <= cluster_worker.offered_resources(host).keys()
    assert cluster_worker.list_incompatibilities(call("tune", "apache-tvm"), host, host) == []


@pytest.mark.parametrize(
    ("other", "reasons"),
    [
        (
            PLANNER._replace(tvmflow="0.2.0+bb"),
            ["its tvmflow is 0.2.0+bb, and this machine has 0.1.0+aa"],
        ),
        (
            PLANNER._replace(platform="linux-aarch64"),
            ["its platform is linux-aarch64, and this machine has linux-x86_64"],
        ),
        (
            PLANNER._replace(tools={"onnx": "1+y"}),
            ["its apache-tvm is not installed, and this machine has 0.27+x"],
        ),
        (PLANNER._replace(tools={**PLANNER.tools, "onnx": "2+z"}), []),
        (PLANNER._replace(cpu="c2"), []),
    ],
)
def test_only_tools_that_the_stage_uses_must_be_the_same(
    other: WorkerDescription, reasons: list[str]
) -> None:
    """The reasons agree with dask's resources."""
    build = call("build", "apache-tvm")
    assert cluster_worker.list_incompatibilities(build, PLANNER, other) == reasons
    is_compatible = (
        cluster_worker.required_resources(build, PLANNER).keys()
        <= cluster_worker.offered_resources(other).keys()
    )
    assert is_compatible == (not reasons)


@pytest.mark.parametrize(
    ("stage", "measures"),
    [
        (call("tune")._replace(devices=("cpu",)), True),
        (call("verify")._replace(devices=("cpu", "cuda")), True),
        (call("tune")._replace(devices=("cuda",)), False),
        (call("build"), False),
    ],
)
def test_a_stage_that_measures_requires_the_cpu_exclusively(
    stage: StageCall, measures: bool
) -> None:
    """It requires the one CPU of a worker; other stages do not."""
    assert cluster_worker.measures_cpu(stage) == measures
    assert (cluster_worker.required_resources(stage, PLANNER).get("cpu:c1") == 1.0) == measures
    assert cluster_worker.offered_resources(PLANNER)["cpu:c1"] == 1.0
    other = PLANNER._replace(cpu="c2", host="Other CPU, 8 cores")
    reasons = ["its CPU is Other CPU, 8 cores, and the plan is for Some CPU, 2 cores"]
    assert cluster_worker.list_incompatibilities(stage, PLANNER, other) == (
        reasons if measures else []
    )
