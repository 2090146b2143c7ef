"""The kernel that a command line names, in the libraries of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def library(name: str, *kernels: str) -> BuiltLibrary:
    facts = {"build": {"schedule_rules": {"elementwise": list(kernels)}}}
    return BuiltLibrary(name, "tvmflow run net.yaml", facts, {"build": "0" * 64})


def test_a_kernel_is_named_by_its_beginning() -> None:
    """A whole name is no beginning of others; libraries without the kernel are left out."""
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
    rules = {"schedule_rules": {"register_tiles": ["conv"]}, "kernel_nodes": {"conv": [[0], [1]]}}
    workload = {"name": "conv", "key": "ab", "trials": 9, "failed": 2, "roofline_us": 2.0}
    workload |= {"untuned_us": 9.0, "best_us": 5.0}
    judged = {"name": "conv", "calls": 2, "untuned_us": 4.0, "tuned_us": None, "flops": 8e6}
    facts: dict[str, dict[str, Any]] = {
        "net:import": {"nodes": ["whole", "model"]},
        "net:cut/host.0": {"nodes": ["/a/Conv", "/b/Conv"]},
        "net:tune/host.0": {"workloads": [workload]},
        "net:pick_best/host.0": {"kernels": [judged], "peak_gflops": 4000.0},
        "net:build/host.0": rules,
        "net:build/edge": {"schedule_rules": {"tuned": ["pool"]}},
        "net:verify/edge": {"profile": {"kernels": {"pool": 0.5}}},
    }
    stages = [StageReport(name, "hit", "", 0.0, value) for name, value in facts.items()]
    first, second = list_libraries(stages, "tvmflow run net.yaml")
    store = store_in(tmp_path)
    details = read_details(first, "conv", store)
    assert (first.name, details.nodes) == ("net/host.0", (("/a/Conv",), ("/b/Conv",)))
    assert (details.trials, details.failed, details.best_trial_s) == (9, 2, 5e-6)
    assert (details.call_s, details.row.alone_s, details.row.calls) == (4e-6, 8e-6, 2)
    assert (details.gflops, details.roofline_share) == (2000.0, 0.5)
    (row,) = list_rows(second, store)
    assert (row.name, row.share, row.seconds) == ("pool", 0.5, None)


def test_what_garbage_collection_removed_is_said(tmp_path: Path) -> None:
    """With the command that makes it again."""
    with pytest.raises(UsageError, match="no longer has all that net/host was built from") as error:
        make_kernel_code(library("net/host", "a"), "a", store_in(tmp_path), with_assembly=False)
    assert error.value.fix == "`tvmflow run net.yaml` makes it again"
