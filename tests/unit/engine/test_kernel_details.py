"""The kernel that a command line names, in the libraries of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.facts import (
    build_facts,
    kernel_facts,
    pick_best_facts,
    profile,
    tune_facts,
    verify_facts,
    workload_facts,
)
from tests.support.small_runs import store_in
from tvmflow.core.errors import UsageError
from tvmflow.engine.kernel_details import (
    BuiltLibrary,
    find_kernel,
    list_libraries,
    list_rows,
    make_kernel_code,
    read_details,
)
from tvmflow.engine.report import StageReport
from tvmflow.stages.base import KnownFacts
from tvmflow.stages.build import BuildFacts


def library(name: str, *kernels: str) -> BuiltLibrary:
    built = BuildFacts(kernels=len(kernels), schedule_rules={"elementwise": kernels})
    facts = KnownFacts({BuildFacts: built})
    return BuiltLibrary(name, "tvmflow run net.yaml", facts, {"build": "0" * 64})


def test_a_kernel_is_named_by_its_beginning() -> None:
    """A whole name is not a beginning of others; libraries without the kernel are left out."""
    libraries = [library("net/host", "conv", "conv1", "softmax"), library("net/edge", "conv1")]
    assert find_kernel(libraries, "conv") == {"net/host": "conv"}
    assert find_kernel(libraries, "conv1") == {"net/host": "conv1", "net/edge": "conv1"}
    assert find_kernel(libraries, "s") == {"net/host": "softmax"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("con", "'con' is the beginning of 2 kernels: conv, conv1"),
        ("sofmax", "there is no kernel 'sofmax'; did you mean 'softmax'\\?"),
        ("", "there is no kernel ''"),
    ],
)
def test_a_name_that_means_no_kernel(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_kernel([library("net/host", "conv", "conv1", "softmax")], name)


def test_all_stages_tell_of_a_kernel(tmp_path: Path) -> None:
    """Those of its own target, and those for all; of a part, the nodes of the part."""
    rules = {"register_tiles": ["conv"]}
    workload = workload_facts("conv", trials=9, failed=2, roofline_us=2.0, best_us=5.0)
    judged = kernel_facts("conv", calls=2, untuned_us=4.0, tuned_us=None, flops=8e6)
    facts: dict[str, dict[str, Any]] = {
        "net:import": {"nodes": ["whole", "model"]},
        "net:cut/host.0": {"nodes": ["/a/Conv", "/b/Conv"]},
        "net:tune/host.0": tune_facts(workloads=[workload]),
        "net:pick_best/host.0": pick_best_facts(kernels=[judged], peak_gflops=4000.0),
        "net:build/host.0": build_facts(schedule_rules=rules, kernel_nodes={"conv": [[0], [1]]}),
        "net:build/edge": build_facts(schedule_rules={"tuned": ["pool"]}),
        "net:verify/edge": verify_facts(profile=profile(pool=0.5)),
    }
    stages = [StageReport(name, facts=value) for name, value in facts.items()]
    first, second = list_libraries(stages, "tvmflow run net.yaml")
    store = store_in(tmp_path)
    details = read_details(first, "conv", store)
    assert (first.name, details.nodes) == ("net/host.0", (("/a/Conv",), ("/b/Conv",)))
    assert (details.trials, details.failed, details.best_trial_s) == (9, 2, 5e-6)
    assert (details.call_s, details.row.alone_s, details.row.calls) == (4e-6, 8e-6, 2)
    assert (details.gflops, details.roofline_share) == (2000.0, 0.5)
    (row,) = list_rows(second, store)
    assert (row.name, row.share, row.seconds) == ("pool", 0.5, None)


def test_facts_that_cannot_be_read_are_refused_with_the_command_that_makes_them(
    tmp_path: Path,
) -> None:
    """Those of a damaged record: what is wrong is named."""
    damaged = build_facts(schedule_rules={"tuned": 3})
    (broken,) = list_libraries(
        [StageReport("net:build/host", facts=damaged)], "tvmflow run net.yaml"
    )
    message = "schedule_rules: tuned: an integer instead of a list"
    with pytest.raises(UsageError, match=message) as error:
        list_rows(broken, store_in(tmp_path))
    assert error.value.fix == "`tvmflow run net.yaml` makes what is missing"
    with pytest.raises(UsageError, match=message):
        find_kernel([broken], "conv")


def test_what_garbage_collection_removed_is_said(tmp_path: Path) -> None:
    """With the command that makes it again."""
    with pytest.raises(
        UsageError, match="no longer has all files that net/host was built from"
    ) as error:
        make_kernel_code(library("net/host", "a"), "a", store_in(tmp_path), with_assembly=False)
    assert error.value.fix == "`tvmflow run net.yaml` makes it again"
