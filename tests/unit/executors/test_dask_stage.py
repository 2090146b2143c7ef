"""One stage on a cluster: its events, its workers, and every way in which it can end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.support.clusters import call
from tvmflow.core.codec import to_json
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import StageResult
from tvmflow.executors import dask
from tvmflow.executors.cluster_worker import StageRequest, StageResponse
from tvmflow.executors.dask import DaskCluster, RemoteStage
from tvmflow.store.remote.connection import BlobRef

distributed = pytest.importorskip("distributed")

REQUEST = StageRequest("token", "key", "remote", 1.0, {}, {}, {"cpu:c1": 1.0})
OK = StageResult("ok", "", "", {"value": 1}, 0.5, "the log")
RESPONSE = StageResponse(OK, {"main.bin": BlobRef("1" * 64, 3)}, "w1")


class Future:
    """A future of dask whose status a test sets: `steps` are called, one at a time it is asked."""

    def __init__(self, *steps: Callable[[], str], value: Any = None) -> None:
        self._steps = list(steps)
        self._value = value
        self.ended = ""
        self._status = "pending"

    @property
    def status(self) -> str:
        if self._steps:
            self._status = self._steps.pop(0)()
        return self._status

    def done(self) -> bool:
        return self._status != "pending"

    def release(self) -> None:
        self.ended = "released"

    def cancel(self) -> None:
        self.ended = "cancelled"

    def result(self, timeout: float) -> Any:
        return self._value

    def exception(self, timeout: float) -> Any:
        return self._value


class Cluster:
    """A cluster whose client gives one future, and whose refusals a test sets."""

    def __init__(self, future: Future) -> None:
        self.client = self
        self.submitted: list[dict[str, Any]] = []
        self.refused: list[str] | None = None
        self._future = future

    def submit(self, function: Any, request: Any, **options: Any) -> Future:
        self.submitted.append({"function": function, "request": request, **options})
        return self._future

    def refusals(self, _: Any) -> list[str] | None:
        return self.refused

    def no_worker(self, refusals: list[str]) -> EnvironmentProblem:
        return EnvironmentProblem(f"no worker: {refusals}", fix="start one")

    def connection_lost(self) -> EnvironmentProblem:
        return EnvironmentProblem("lost", fix="run again")


def run(
    *steps: Callable[[RemoteStage], str],
    value: Any = None,
    refused: list[str] | None = None,
    cancelled: bool = False,
) -> tuple[StageResponse | None, list[dict[str, Any]], Future]:
    """Wait for a stage; each step changes it and gives the status of its future."""
    stage: RemoteStage
    future = Future(*((lambda step=step: step(stage)) for step in steps), value=value)
    cluster = Cluster(future)
    cluster.refused = refused
    stage = RemoteStage(cast(DaskCluster, cluster), call("build"), REQUEST)
    events: list[dict[str, Any]] = []
    with stage.submitted():
        response = stage.wait(events.append, lambda: cancelled, 0.0)
    assert cluster.submitted[0]["resources"] == REQUEST.resources
    return response, events, future


def status(name: str, *workers: str, events: int = 0) -> Callable[[RemoteStage], str]:
    """A step: these workers have begun the stage, and it has sent so many events."""

    def step(stage: RemoteStage) -> str:
        stage.workers += workers
        stage.events.extend({"event": "progress", "number": number} for number in range(events))
        return name

    return step


def test_a_stage_that_ends_well_gives_its_response_and_all_events() -> None:
    """Also those that arrive with its end."""
    response, events, future = run(
        status("pending", "w1", events=2), status("finished", events=1), value=to_json(RESPONSE)
    )
    assert response == RESPONSE
    assert [event["number"] for event in events] == [0, 1, 0]
    assert future.ended == "released"


def test_the_loss_of_a_worker_is_reported_with_its_successor() -> None:
    """Once for each."""
    _, events, _ = run(
        status("pending", "w1"),
        status("pending", "w2"),
        status("pending"),
        status("finished"),
        value=to_json(RESPONSE),
    )
    message = "worker w1 ended while it ran this stage; w2 runs it again"
    assert events == [{"event": "cluster", "message": message}]


def test_a_stage_that_costs_many_workers_is_given_up() -> None:
    """It would end every worker of the cluster; a running one is cancelled."""
    with pytest.raises(EnvironmentProblem, match="3 workers ended while they ran it: a, b, c"):
        run(status("pending", "a", "b", "c", "d"), status("pending"))


def test_a_worker_that_dask_gave_up_is_named() -> None:
    """Dask raises KilledWorker after some of them."""
    killed = distributed.KilledWorker("task", None, 3)
    with pytest.raises(EnvironmentProblem, match="2 workers ended while they ran it: a, b"):
        run(status("pending", "a", "b"), status("error"), value=killed)


def test_an_exception_in_a_worker_is_a_problem_of_that_worker() -> None:
    """With its type and message."""
    with pytest.raises(EnvironmentProblem) as failed:
        run(status("pending", "w1"), status("error"), value=ValueError("no memory"))
    assert failed.value.message == "worker w1 could not run it: ValueError: no memory"


def test_a_future_that_is_neither_finished_nor_failed_means_a_lost_scheduler() -> None:
    """Dask cancels all futures of a client that lost it."""
    with pytest.raises(EnvironmentProblem, match="lost"):
        run(status("cancelled"))


def test_a_cancelled_run_gets_no_response_and_stops_the_stage() -> None:
    """The worker sees that nobody waits for it."""
    response, _, future = run(status("pending"), cancelled=True)
    assert response is None
    assert future.ended == "cancelled"


def test_a_stage_without_a_worker_is_given_up_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nanny may start its worker again; after that time nobody comes."""
    monkeypatch.setattr(dask, "_CHECK_WORKERS_S", 0.0)
    monkeypatch.setattr(dask, "_RESTART_S", 0.1)
    started = time.monotonic()
    with pytest.raises(EnvironmentProblem, match=r"no worker: .'w1: too old'."):
        run(*[status("pending")] * 50, refused=["w1: too old"])
    assert time.monotonic() - started >= 0.1
