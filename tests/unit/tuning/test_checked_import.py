"""Kernels travel with their trials: each is used only after it was found to be what its key says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tuning
from tests.support.trials import DEVICE, TARGET, sealed
from tests.unit.tuning.traces import CRASHES, GOOD, WRONG, of
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.types import Json
from tvmflow.tuning.budget import Task
from tvmflow.tuning.ledger import Ledger, MachineClass, WorkloadDescription
from tvmflow.tuning.packs import ImportResult, export_pack, import_pack
from tvmflow.tuning.replay import TraceCheck

HERE = MachineClass("test", DEVICE)


@pytest.fixture(scope="module")
def task() -> Task:
    return tuning.task_of(tuning.model(tuning.dense(16)))


@pytest.fixture(scope="module")
def other() -> Task:
    return tuning.task_of(tuning.model(tuning.dense(24)))


@pytest.fixture
def pack(tmp_path: Path, task: Task) -> Path:
    """A pack with the kernel, a good trace, one that does not apply and one that crashes TVM."""
    ledger = tuning.open_ledger(tmp_path / "here")
    ledger.describe(task.key, WorkloadDescription(task.name, task.flops), task.mod)
    traces: list[Json] = [GOOD, WRONG, CRASHES, [[], []]]
    ledger.workload(task.key).extend(of(trace, tvm="test") for trace in traces)
    export_pack(tmp_path / "x.jsonl", tmp_path / "here" / "ledger")
    return tmp_path / "x.jsonl"


@pytest.fixture
def take(fork_server: ForkServer, pack: Path, tmp_path: Path) -> Callable[..., ImportResult]:
    def take(kernels: dict[str, str] | None = None) -> ImportResult:
        checker = TraceCheck(fork_server, kernels or {})
        return import_pack(pack, tmp_path / "there", HERE, checker)

    return take


def with_kernel(pack: Path, kernel: str | None) -> None:
    """Put another kernel into a pack of one workload."""
    header, line, rest = pack.read_bytes().split(b"\n", 2)
    value = json.loads(line)
    if kernel is None:
        del value["kernel"]
    else:
        value["kernel"] = kernel
    line = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    pack.write_bytes(sealed(b"\n".join([header, line, rest])))


@pytest.mark.slow
def test_a_checked_import_refuses_what_does_not_apply(
    take: Callable[..., ImportResult], tmp_path: Path, task: Task
) -> None:
    """Also what crashes TVM; each is named, and all others are taken."""
    result = take()
    assert [(target.new, target.invalid) for target in result.targets] == [(2, 2)]
    assert ["does not apply" in problem for problem in result.problems] == [True, True]
    assert of(WRONG).id[:12] in "".join(result.problems)
    received = Ledger.open(tmp_path / "there", TARGET, "test", DEVICE)
    assert set(received.workload(task.key).trials) == {of(GOOD).id, of([[], []]).id}
    assert received.kernel(task.key) == task.mod


def test_a_kernel_that_its_key_is_not_the_digest_of_is_refused(
    take: Callable[..., ImportResult], pack: Path, tmp_path: Path, other: Task
) -> None:
    """With all of its records: the digest of their workload is false."""
    for kernel, reason in (
        (other.mod, f"that of workload {other.key[:12]}"),
        ("{", "cannot be used"),
    ):
        with_kernel(pack, kernel)
        result = take()
        assert [(target.new, target.invalid) for target in result.targets] == [(0, 4)]
        assert all(reason in problem for problem in result.problems)
    assert not list((tmp_path / "there").glob("*/*.jsonl"))


def test_a_trace_without_a_known_kernel_is_refused_unless_the_store_has_it(
    take: Callable[..., ImportResult], pack: Path, task: Task
) -> None:
    """Packs of version 0.1 have no kernels."""
    with_kernel(pack, None)
    assert "its kernel is not known" in take().problems[0]
    assert [(target.new, target.invalid) for target in take({task.key: task.mod}).targets] == [
        (2, 2)
    ]


def test_of_two_descriptions_the_same_one_stays(tmp_path: Path) -> None:
    """In either order; one with a kernel before one without; only a name may differ."""
    conv, dense = (WorkloadDescription(name, 1.0) for name in ("conv", "dense"))
    false = WorkloadDescription("conv", 2.0)
    results: list[tuple[WorkloadDescription, str]] = []
    for order in (
        [(conv, "k"), (dense, "k"), (false, "")],
        [(false, ""), (dense, "k"), (conv, "k")],
    ):
        ledger = Ledger(tmp_path / str(len(results)))
        ledger.folder.mkdir()
        for description, kernel in order:
            ledger.adopt_description("x", description, kernel)
        results.append((ledger.description("x"), ledger.kernel("x")))
    assert results == [(conv, "k")] * 2
    ledger.adopt_description("x", false, "other")
    assert (ledger.description("x"), ledger.kernel("x")) == (conv, "k")
    ledger.describe("x", false, "own")
    assert (ledger.description("x"), ledger.kernel("x")) == (false, "own")
