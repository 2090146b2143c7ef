"""Memory: what this machine has, and workers that are stopped when they take more than they may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.core import fork_server_calls
from tvmflow.core import memory, processes
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.core.memory import MemoryExcess, MemoryWatch

CALLS = fork_server_calls.__name__
MB = 10**6


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer.start() as started:
        yield started


class Worker(threading.Thread):
    """A call that is watched, and how it ended; with `holds` it keeps its memory until it is released."""

    def __init__(
        self,
        server: ForkServer,
        watch: MemoryWatch,
        call: str,
        megabytes: int,
        limit: int | None,
        *,
        holds: bool = False,
    ) -> None:
        super().__init__()
        self._pids: list[int] = []
        self._watch, self._limit = watch, limit
        self._server, self._call, self._megabytes = server, call, megabytes
        self.grown, self.released = threading.Event(), threading.Event()
        if not holds:
            self.released.set()
        self.outcome: Outcome | None = None
        self.excess: MemoryExcess | None = None
        self.start()

    def _begin(self, pid: int) -> None:
        self._pids.append(pid)
        self._watch.add(pid, self._limit)

    def _tell_growth(self, _: object) -> None:
        self.grown.set()
        self.released.wait(60)

    def run(self) -> None:
        self.outcome = self._server.call(
            f"{CALLS}:{self._call}",
            self._megabytes,
            timeout_s=60,
            emit=self._tell_growth,
            on_start=self._begin,
        )
        for pid in self._pids:
            self.excess = self._watch.remove(pid)

    def end(self) -> tuple[Outcome, MemoryExcess | None]:
        self.join()
        assert self.outcome is not None
        return self.outcome, self.excess


def test_a_worker_is_stopped_at_its_limit_and_others_go_on(fork_server: ForkServer) -> None:
    watch = MemoryWatch()
    small = Worker(fork_server, watch, "grow", 20, 150 * MB)
    large = Worker(fork_server, watch, "grow", 300, 150 * MB)
    outcome, excess = large.end()
    assert outcome.kind == "crashed" and excess is not None and excess.is_stopped
    assert excess.limit == 150 * MB < excess.used < 1000 * MB
    assert excess.text.startswith("took ") and "more than the limit of 150.0 MB" in excess.text
    assert small.end() == (small.outcome, None)
    assert small.outcome is not None and small.outcome.value == 20


def test_workers_share_what_is_not_limited(fork_server: ForkServer) -> None:
    """The largest is stopped, once they take too much together; one without a limit counts for nothing."""
    watch = MemoryWatch(shared_limit=300 * MB)
    free = Worker(fork_server, watch, "grow", 400, 0)
    small = Worker(fork_server, watch, "grow", 100, None, holds=True)
    assert small.grown.wait(30)
    large = Worker(fork_server, watch, "grow", 220, None)
    outcome, excess = large.end()
    assert outcome.kind == "crashed" and excess is not None and excess.is_shared
    assert "was the largest when all stages took" in excess.text
    small.released.set()
    assert [worker.end()[1] for worker in (free, small)] == [None, None]


def test_a_process_that_a_worker_has_started_is_stopped_alone(fork_server: ForkServer) -> None:
    """The worker goes on, and says how: a measurement that fails is not the end of a search."""
    outcome, excess = Worker(fork_server, MemoryWatch(), "grow_in_a_child", 300, 150 * MB).end()
    assert (outcome.kind, outcome.value) == ("ok", -9)
    assert excess is not None and not excess.is_stopped
    assert "with a process that it had started, which was stopped" in excess.text


def test_a_watch_ends_with_its_workers_and_begins_again(fork_server: ForkServer) -> None:
    watch = MemoryWatch()
    for _ in range(2):
        outcome, excess = Worker(fork_server, watch, "echo", 1, 500 * MB).end()
        assert outcome.kind == "ok" and excess is None


def test_a_container_has_less_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest limit of the groups that a process is in counts, in both versions of control groups."""
    total = memory.machine_bytes()
    assert 0 < total < 1 << 50
    texts = {
        "/proc/self/cgroup": "4:memory:/box/inner\n0::/slice/run\n",
        "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/slice/memory.max": "1000000\n",
        "/sys/fs/cgroup/slice/run/memory.max": "max\n",
        "/proc/vmstat": "oom_kill 3\noom_kill_x 9\n",
        "/sys/fs/cgroup/slice/run/memory.events": "low 0\noom_kill 2\n",
    }
    for module in (processes, memory):
        monkeypatch.setattr(module, "read_text", lambda path: texts.get(path, ""))
    assert memory.machine_bytes() == 1_000_000
    texts["/sys/fs/cgroup/memory/box/inner/memory.limit_in_bytes"] = "700000\n"
    assert memory.machine_bytes() == 700_000
    assert memory.count_oom_kills() == 5
    texts.clear()
    assert memory.count_oom_kills() is None and memory.machine_bytes() >= total
