"""Stages on other machines: the same results, whatever happens to those machines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import small_runs
from tests.support.cache_server import cache_server
from tests.support.clusters import Client, Cluster, cluster, files
from tests.support.small_runs import outcomes, plan_of
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import InputFile, Plan
from tvmflow.executors import cluster_worker

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers, whose nannies start them again when they are killed."""
    with cluster(tmp_path_factory.mktemp("cluster"), "w1", "w2") as started:
        yield started


@pytest.fixture
def client(two: Cluster, tmp_path: Path) -> Iterator[Client]:
    made = _client(two, tmp_path)
    yield made
    made.executor.close()


def _client(of: Cluster, folder: Path, **more: Any) -> Client:
    (folder / "shared").mkdir()
    return Client(folder, of.address, str(folder / "shared"), **more)


def _with(plan: Plan, label: str, **settings: Any) -> Plan:
    """The plan with other settings of one stage."""
    stages = tuple(
        spec._replace(settings={**spec.settings, **settings}) if spec.label == label else spec
        for spec in plan.stages
    )
    return plan._replace(stages=stages)


def _alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_a_cluster_gives_what_one_worker_gives(
    client: Client, two: Cluster, tmp_path: Path
) -> None:
    """All stages run, their files and logs come back, and nothing runs a second time."""
    plan = plan_of(width=3)
    report = client.run(plan)
    assert set(outcomes(report).values()) == {"ran"}
    assert client.executor.slots == 2
    by_kind = {kind: [e for e in client.events if e["event"] == kind] for kind in ("place", "span")}
    assert {event["worker"] for event in by_kind["place"]} == {"w1", "w2"}
    assert {"fetch inputs", "upload outputs"} <= {event["name"] for event in by_kind["span"]}
    (tmp_path / "again").mkdir()
    again = _client(two, tmp_path / "again")
    again.run(plan)
    again.executor.close()
    assert files(client.store, plan) == files(again.store, plan)
    assert {file.name for file in files(client.store, plan)["import"]} == {
        "main.bin",
        "deep/more.bin",
    }
    log = Path(client.store.root, "logs", "net", "import.log").read_text()
    assert log.startswith("ran on worker w") and "a line for the log" in log
    assert set(outcomes(client.run(plan)).values()) == {"hit"}
    assert (client.dist / "net" / "t0" / "net.bin").is_file()


def test_a_killed_worker_costs_one_attempt(client: Client, two: Cluster, tmp_path: Path) -> None:
    """After a SIGKILL during a stage another worker runs it again, with the same results."""
    plan = plan_of(width=2)
    killed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "ready" and event["stage_id"] == "net:build/t0" and not killed:
            stage, _, worker, *_ = event["pids"]
            killed.append(stage)
            os.kill(worker, signal.SIGKILL)

    client.on_event = kill
    flag = {"do": "hang-once", "flag": str(tmp_path / "flag")}
    report = client.run(_with(plan, "build/t0", **flag))
    assert set(outcomes(report).values()) == {"ran"}
    messages = [event["message"] for event in client.events if event["event"] == "cluster"]
    assert (
        len(messages) == 1
        and "ended while it ran this stage; w" in messages[0]
        and "runs it again" in messages[0]
    )
    assert not _alive(killed[0])
    (tmp_path / "plain").mkdir()
    plain = _client(two, tmp_path / "plain")
    plain.run(plan)
    plain.executor.close()
    results = [
        {label: list(stored) for label, stored in files(one.store, plan).items()}
        for one in (client, plain)
    ]
    assert results[0] == results[1]


def test_a_crash_in_native_code_gives_the_same_message(client: Client) -> None:
    """The worker keeps running, and the log has the stack."""
    report = client.run(_with(plan_of(), "build/t0", do="crash"))
    build = next(stage for stage in report.stages if stage.stage_id == "net:build/t0")
    assert (build.outcome, build.message) == (
        "crashed",
        "crashed in native code (SIGSEGV: Segmentation fault)",
    )
    assert "string_at" in Path(build.log).read_text()
    assert set(outcomes(client.run(plan_of())).values()) <= {"ran", "hit"}


def test_messages_have_the_users_path_of_a_model(client: Client, tmp_path: Path) -> None:
    """Files are uploaded by content; messages name the user's file."""
    model = tmp_path / "net.onnx"
    model.write_text("a model")
    plan = _with(plan_of(), "import", do="say")
    first = plan.stages[0]._replace(files=(InputFile("model", str(model), "net.yaml:1:1"),))
    report = client.run(Plan((first, *plan.stages[1:]), ()))
    assert report.stages[0].message == f"{model} is not a model"
    assert report.stages[0].outcome == "failed"


def test_a_stop_reaches_the_stage(client: Client) -> None:
    """Its process on the worker ends, and the run at once."""
    pids: list[int] = []

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            pids.append(event["pids"][0])
            client.executor.cancel()

    client.on_event = stop
    started = time.monotonic()
    report = client.run(_with(plan_of(), "import", do="hang"))
    assert report.stages[0].outcome == "cancelled"
    deadline = time.monotonic() + 40
    while _alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pids[0])
    # the stage would take 100 s
    assert time.monotonic() - started < 80


def test_a_client_that_is_gone_leaves_nothing_running(client: Client) -> None:
    """A stage is stopped when its run disappears."""
    pids: list[int] = []

    def leave(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            pids.append(event["pids"][0])
            client.executor._connect().client.close(timeout=2)

    client.on_event = leave
    report = client.run(_with(plan_of(), "import", do="hang"))
    assert report.stages[0].outcome == "blocked"
    assert "was lost" in report.stages[0].message
    deadline = time.monotonic() + 10
    while _alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pids[0])


def test_another_tvm_is_refused_by_name(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, and each worker with the reason."""
    planner = cluster_worker.describe_this_host()
    other = planner._replace(tools={**planner.tools, "apache-tvm": "0.27.0+other"})
    monkeypatch.setattr(cluster_worker, "describe_this_host", lambda: other)
    with pytest.raises(EnvironmentProblem) as refused:
        client.run(plan_of())
    actual = planner.tools["apache-tvm"]
    assert (
        f": its apache-tvm is {actual}, and this machine has 0.27.0+other" in refused.value.message
    )


def test_what_measures_needs_the_cpu_of_the_plan(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without such a worker the stage fails at once; stages that only compile run."""
    planner = cluster_worker.describe_this_host()
    other = planner._replace(cpu="another", host="Other CPU, 64 cores")
    monkeypatch.setattr(cluster_worker, "describe_this_host", lambda: other)
    *others, verify = plan_of().stages
    plan = Plan((*others, verify._replace(devices=("cpu",))), ())
    report = client.run(plan)
    assert [stage.outcome for stage in report.stages] == ["ran", "ran", "ran", "blocked"]
    assert f"w1: its CPU is {planner.host}, and the plan is for Other CPU, 64 cores" in (
        report.stages[3].message
    )


def test_a_remote_that_may_not_be_written_to_is_named(two: Cluster, tmp_path: Path) -> None:
    """With the permissions that a cluster needs."""
    with cache_server() as cache:
        cache.put_status = 403
        asker = Client(tmp_path, two.address, cache.url)
        report = asker.run(plan_of())
        asker.executor.close()
    assert report.stages[0].outcome == "blocked"
    assert cache.url in report.stages[0].message
    assert "write" in report.stages[0].fix


def test_without_a_worker_nothing_waits(tmp_path: Path) -> None:
    """Nor does anything without a scheduler."""
    with cluster(tmp_path) as empty:
        asker = _client(empty, tmp_path)
        with pytest.raises(EnvironmentProblem, match="it has none"):
            asker.run(plan_of())
        asker.executor.close()
    gone = Client(tmp_path, empty.address, str(tmp_path / "shared"))
    with pytest.raises(EnvironmentProblem, match="does not answer"):
        gone.run(plan_of())
    gone.executor.close()


def test_a_lost_scheduler_ends_the_run_with_a_message(tmp_path: Path) -> None:
    """Finished results are kept."""
    with cluster(tmp_path, "w1") as own:
        asker = _client(own, tmp_path)

        def kill(event: dict[str, Any]) -> None:
            if event["event"] == "ready" and "build" in event["stage_id"]:
                own.scheduler.kill()

        asker.on_event = kill
        report = asker.run(_with(plan_of(), "build/t0", do="hang"))
        asker.executor.close()
    assert [stage.outcome for stage in report.stages] == ["ran", "blocked", "skipped", "skipped"]
    assert "the connection to the scheduler" in report.stages[1].message
    assert small_runs.store_in(tmp_path / "store").keys()


def test_only_this_machine_can_connect_to_a_cluster_on_it(two: Cluster) -> None:
    """Whoever connects to one of these processes can run code in it, so by default none listens on a network."""
    psutil: Any = pytest.importorskip("psutil")
    started = [p for p in psutil.Process().children(recursive=True) if p.pid != os.getpid()]
    listening = [
        connection.laddr.ip
        for process in started
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    # the scheduler, and a nanny and a worker for each name
    assert len(listening) >= 5
    assert set(listening) == {"127.0.0.1"}
