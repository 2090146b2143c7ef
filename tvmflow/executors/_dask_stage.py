"""One stage on a dask cluster, from its submission to its end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import StageCall
from tvmflow.executors import cluster_worker
from tvmflow.executors._base import Event, OnEvent
from tvmflow.executors._dask_cluster import CONNECT_S, POLL_S, DaskCluster
from tvmflow.executors.cluster_messages import StageRequest, StageResponse

_log: Final = logging.getLogger(__name__)

_CHECK_WORKERS_S: Final = 2.0
# A nanny starts its worker again, which takes some seconds.
_RESTART_S: Final = 20.0
_MAX_WORKERS: Final = 3


class RemoteStage:
    """A stage that was submitted to the cluster.

    `events` and `workers` are filled by dask's thread: progress, and the workers that began it.
    """

    def __init__(self, cluster: DaskCluster, call: StageCall, request: StageRequest) -> None:
        self.events: deque[Event] = deque()
        self.workers: list[str] = []
        self._cluster = cluster
        self._call = call
        self._request = request
        self._future: Any = None
        self._reported_workers = 1
        self._next_check = 0.0
        self._unserved_since: float | None = None

    @contextlib.contextmanager
    def submitted(self) -> Iterator[None]:
        """Submit the stage; at the end of the block, release it, or stop it where it still runs."""
        self._future = self._cluster.client.submit(
            cluster_worker.run_stage,
            self._request.to_json(),
            key=f"tvmflow-{self._call.stage}-{self._request.token}",
            resources=self._request.resources,
            pure=False,
        )
        try:
            yield
        finally:
            # the connection may be lost by now
            with contextlib.suppress(Exception):
                if self._future.done():
                    self._future.release()
                else:
                    self._future.cancel()

    def wait(
        self, on_event: OnEvent, is_cancelled: Callable[[], bool], patience_s: float
    ) -> StageResponse | None:
        """Pass on the events of the stage until it ends.

        Args:
            on_event: Takes each event.
            is_cancelled: Tells whether the run was cancelled.
            patience_s: Seconds for which it may be without a worker that can run it.

        Returns:
            Its response; None when the run was cancelled.

        Raises:
            EnvironmentProblem: when no worker could run it to its end, or the scheduler is lost.
        """
        self._next_check = time.monotonic()
        while self._future.status == "pending":
            if is_cancelled():
                return None
            self._pass_on(on_event)
            self._check_workers(max(patience_s, _RESTART_S))
            time.sleep(POLL_S)
        self._pass_on(on_event)
        if self._future.status == "finished":
            return StageResponse.from_json(self._future.result(timeout=CONNECT_S))
        if self._future.status == "error":
            raise self._describe_failure(self._future.exception(timeout=CONNECT_S))
        if is_cancelled():
            return None
        raise self._cluster.connection_lost()

    def _pass_on(self, on_event: OnEvent) -> None:
        while self.events:
            on_event(self.events.popleft())
        if len(self.workers) > _MAX_WORKERS:
            raise _workers_lost(self.workers[:-1])
        if len(self.workers) > self._reported_workers:
            self._reported_workers = len(self.workers)
            lost, successor = self.workers[-2:]
            message = f"worker {lost} ended while it ran this stage; {successor} runs it again"
            on_event({"event": "cluster", "message": message})

    def _check_workers(self, patience_s: float) -> None:
        """Raise EnvironmentProblem when no worker can run the stage any more, nor joins in time."""
        now = time.monotonic()
        if now <= self._next_check:
            return
        self._next_check = now + _CHECK_WORKERS_S
        refusals = self._cluster.refusals(self._call)
        if refusals is None:
            self._unserved_since = None
            return
        self._unserved_since = self._unserved_since or now
        if now - self._unserved_since > patience_s:
            raise self._cluster.no_worker(refusals)

    def _describe_failure(self, error: Exception) -> EnvironmentProblem:
        from distributed import KilledWorker

        _log.debug("%s failed on %s: %r", self._call.stage, self.workers, error)
        if isinstance(error, KilledWorker):
            return _workers_lost(self.workers)
        worker = self.workers[-1] if self.workers else "a worker"
        return EnvironmentProblem(
            f"worker {worker} could not run it: {type(error).__name__}: {error}",
            fix="look at what `tvmflow worker` printed there",
        )


def _workers_lost(names: list[str]) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{len(names)} workers ended while they ran it: {', '.join(names)}",
        fix="look at what `tvmflow worker` printed there, and whether those machines ran out of memory",
    )
