"""The dask executor on a cluster in this process: stages, files and problems, without another process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import Client, files
from tests.support.small_runs import RecordingExecutor, outcomes, plan_of
from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.core.types import Plan
from tvmflow.executors import ExecutorPlugin, cluster_worker, dask, load_plugin

distributed = pytest.importorskip("distributed")


@pytest.fixture
def worker_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingExecutor:
    """The executor of the worker."""
    made = RecordingExecutor()
    monkeypatch.setenv(cluster_worker.STORE_VARIABLE, str(tmp_path / "worker"))
    monkeypatch.setattr(cluster_worker, "_idle", [made])
    return made


@pytest.fixture
def scheduler(worker_executor: RecordingExecutor) -> Iterator[str]:
    """The address of a scheduler with one worker like this machine."""
    with _cluster(cluster_worker.offered_resources(cluster_worker.describe_this_host())) as address:
        yield address


class _cluster:
    def __init__(self, resources: dict[str, float]) -> None:
        self._resources = resources

    def __enter__(self) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._cluster = distributed.LocalCluster(
                n_workers=1,
                threads_per_worker=1,
                processes=False,
                protocol="inproc",
                dashboard_address=None,
                resources=self._resources,
            )
        return str(self._cluster.scheduler_address)

    def __exit__(self, *_: object) -> None:
        self._cluster.close()


@pytest.fixture
def client(scheduler: str, tmp_path: Path) -> Iterator[Client]:
    (tmp_path / "shared").mkdir()
    made = Client(tmp_path, scheduler, str(tmp_path / "shared"))
    yield made
    made.executor.close()


def test_all_stages_run_on_the_worker_and_their_files_come_back(
    client: Client, worker_executor: RecordingExecutor
) -> None:
    """Results, logs and deliveries are as of a local run, and nothing runs a second time."""
    plan = plan_of()
    assert set(outcomes(client.run(plan)).values()) == {"ran"}
    assert worker_executor.calls == ["import", "build", "export", "verify"]
    names = {"main.bin", "deep/more.bin", "deep/empty.bin"}
    assert {file.name for file in files(client.store, plan)["import"]} == names
    assert (client.dist / "net" / "t0" / "net.bin").is_file()
    log = Path(client.store.root, "logs", "net", "import.log").read_text()
    assert log.startswith("ran on worker ")
    assert set(outcomes(client.run(plan)).values()) == {"hit"}
    assert len(worker_executor.calls) == 4


def test_a_stage_that_no_worker_can_run_is_blocked_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason for each worker; stages before it run."""
    *others, verify = plan_of().stages
    plan = Plan((*others, verify._replace(tools=("no-such-tool",))), ())
    other = cluster_worker.describe_this_host()
    executor = client.executor
    cluster = executor._connect()
    cluster.planner = other._replace(tools={**other.tools, "no-such-tool": "1.0+abc"})
    identity = packages.identity
    monkeypatch.setattr(
        packages, "identity", lambda name: "1.0+abc" if name == "no-such-tool" else identity(name)
    )
    report = client.run(plan)
    assert [stage.outcome for stage in report.stages] == ["ran", "ran", "ran", "blocked"]
    message = report.stages[3].message
    assert message.startswith("no worker of the cluster can run this stage: ")
    assert message.endswith("its no-such-tool is not installed, and this machine has 1.0+abc")


def test_a_run_that_is_cancelled_ends_at_once(
    client: Client, worker_executor: RecordingExecutor
) -> None:
    """Also while a worker still runs its stage."""
    worker_executor.during = lambda stage: client.executor.cancel()
    report = client.run(plan_of())
    assert report.stages[0].outcome == "cancelled"
    assert report.exit_code == 130


def test_contents_that_the_remote_cache_lost_are_uploaded_again(
    client: Client, tmp_path: Path
) -> None:
    """The store has what earlier stages made, and a stage gets it wherever it runs."""
    plan = plan_of()
    client.run(Plan(plan.stages[:1], ()))
    client.executor.close()
    for blob in (tmp_path / "shared").rglob("*"):
        if blob.is_file():
            blob.unlink()
    again = Client(tmp_path, client.executor._context.scheduler, str(tmp_path / "shared"))
    report = again.run(plan)
    again.executor.close()
    assert [stage.outcome for stage in report.stages] == ["hit", "ran", "ran", "ran"]


def test_a_worker_of_another_version_is_refused_by_name(
    worker_executor: RecordingExecutor, tmp_path: Path
) -> None:
    """Before anything runs; the user learns which worker, and what differs."""
    host = cluster_worker.describe_this_host()
    other = host._replace(tools={**host.tools, "apache-tvm": "0.26+old"})
    (tmp_path / "shared").mkdir()
    with _cluster(cluster_worker.offered_resources(other)) as address:
        client = Client(tmp_path, address, str(tmp_path / "shared"))
        with pytest.raises(EnvironmentProblem) as refused:
            client.run(plan_of())
        client.executor.close()
    tvm = host.tools["apache-tvm"]
    assert f"its apache-tvm is 0.26+old, and this machine has {tvm}" in refused.value.message
    assert worker_executor.calls == []


def test_a_worker_that_dask_started_is_refused(
    worker_executor: RecordingExecutor, tmp_path: Path
) -> None:
    """It has none of the resources that stages require."""
    (tmp_path / "shared").mkdir()
    with _cluster({}) as address:
        client = Client(tmp_path, address, str(tmp_path / "shared"))
        with pytest.raises(
            EnvironmentProblem, match="it was not started by `tvmflow worker`"
        ) as refused:
            client.run(plan_of())
        client.executor.close()
    assert f"tvmflow worker --scheduler {address}" in refused.value.fix


def test_the_entry_point_is_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core finds the module by name; it satisfies the Protocol."""
    plugin: ExecutorPlugin = dask
    assert load_plugin("dask") is plugin
    monkeypatch.setenv(dask.SCHEDULER_VARIABLE, "here:1")
    assert plugin.find_scheduler(None) == "tcp://here:1"
    assert plugin.find_scheduler("tls://there:2") == "tls://there:2"


def test_an_unknown_executor_is_refused() -> None:
    """Nothing but the names of installed plug-ins."""
    with pytest.raises(UsageError, match="there is no executor 'mpi'"):
        load_plugin("mpi")
