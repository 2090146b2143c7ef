"""The remote cache client: a second machine repeats nothing, and no failure of a remote cache fails a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cache_server import Cache, cache_server
from tests.support.interruption import slow_server
from tests.support.registry import docker_registry, needs_registry
from tests.support.small_runs import FETCHED, WRITES, RecordingExecutor, RunHost, outcomes, plan_of
from tvmflow.engine.summary import summary
from tvmflow.store.http_client import advise
from tvmflow.store.local import LocalStore

PLAN = plan_of(width=2)


@pytest.fixture
def filled(cache: Cache, tmp_path: Path) -> Cache:
    """Return a remote cache that has all results of `PLAN`."""
    RunHost(tmp_path / "one", cache.url, **WRITES).run(PLAN)
    assert len(cache.ac) == len(PLAN.stages)
    cache.requests.clear()
    return cache


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Return what starts a registry, and gives the URL of a remote cache in it."""
    with contextlib.ExitStack() as stack:

        def start() -> str:
            host = stack.enter_context(docker_registry(tmp_path / "registry"))
            return f"oci://{host}/cache"

        yield start


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- the second machine


@pytest.mark.parametrize("kind", ["http", "folder", pytest.param("oci", marks=needs_registry)])
def test_a_second_machine_repeats_nothing(
    kind: str, cache: Cache, registry: Callable[[], str], tmp_path: Path
) -> None:
    """An empty store elsewhere gets every stage, the same bytes are delivered, and no worker starts."""
    shared = tmp_path / "shared"
    shared.mkdir()
    url = {"http": lambda: cache.url, "folder": shared.as_uri, "oci": registry}[kind]()
    one = RunHost(tmp_path / "one", url, **WRITES)
    first = one.run(PLAN)
    assert first.remote is not None and first.remote.uploaded == 7 and first.remote.waiting == 0
    two = RunHost(tmp_path / "two", url)
    second = two.run(PLAN)
    assert outcomes(second) == FETCHED
    assert (two.executor.calls, two.executor.started, two.messages) == ([], 0, [])
    assert everything(two.dist) == everything(one.dist) != {}
    assert second.remote is not None
    assert second.remote.fetched == 7 and second.remote.fetched_bytes > 0
    assert "7 fetched (" in summary(second) and second.exit_code == 0
    assert {stage.reason for stage in second.stages} == {
        f"from {second.remote.address}, not signed"
    }
    third = two.run(PLAN)
    assert set(outcomes(third).values()) == {"hit"}


def test_only_what_is_missing_is_downloaded(filled: Cache, tmp_path: Path) -> None:
    """Blobs that the store has are not requested, nor are stages that are up to date."""
    two = RunHost(tmp_path / "two", filled.url)
    two.run(PLAN)
    downloads = len(filled.list_requests("GET", "cas"))
    filled.requests.clear()
    action = next(Path(two.store.root, "actions").rglob("?" * 64))
    action.unlink()
    report = two.run(PLAN)
    assert sorted(outcomes(report).values()) == ["fetched"] + ["hit"] * 6
    # the one content is our own part of the action
    assert [len(filled.list_requests("GET", kind)) for kind in ("ac", "cas")] == [1, 1]
    assert downloads > 7 and report.remote is not None and report.remote.fetched_bytes == 0


def test_what_the_remote_cache_lacks_runs_and_the_rest_is_fetched(
    filled: Cache, tmp_path: Path
) -> None:
    """A missing stage in the middle is made, and what follows is fetched all the same."""
    one = LocalStore(str(tmp_path / "one/store"))
    key = one.last_key("net", "build/t0")
    assert key is not None
    del filled.ac[key]
    two = RunHost(tmp_path / "two", filled.url)
    assert outcomes(two.run(PLAN)) == {**FETCHED, "build/t0": "ran"}
    assert two.executor.calls == ["build"]
    assert filled.list_requests("PUT") == []


def test_reading_alone_never_writes_and_writing_alone_never_reads(
    cache: Cache, tmp_path: Path
) -> None:
    """`--remote-mode read` (the default) and `write`."""
    RunHost(tmp_path / "one", cache.url).run(PLAN)
    assert cache.list_requests("PUT") == []
    writer: dict[str, Any] = {"reads": False, "writes": True}
    RunHost(tmp_path / "two", cache.url, **writer).run(PLAN)
    assert len(cache.ac) == 7
    third = RunHost(tmp_path / "three", cache.url, **writer)
    assert set(outcomes(third.run(PLAN)).values()) == {"ran"}


def test_a_second_writer_uploads_nothing(filled: Cache, tmp_path: Path) -> None:
    """Although the server may change the bytes of an action."""
    other = RunHost(tmp_path / "other", filled.url, reads=False, writes=True)
    report = other.run(PLAN)
    assert report.remote is not None
    assert (report.remote.uploaded, report.remote.waiting) == (0, 0)
    assert filled.list_requests("PUT") == []


# ---------------------------------------------------------------- dead, slow, and forbidding


def test_a_dead_remote_cache_is_reported_once_and_costs_little(tmp_path: Path) -> None:
    """One line, and the run continues without it; its results wait."""
    with cache_server() as stopped:
        url = stopped.url
    machine = RunHost(tmp_path, url, **WRITES)
    report = machine.run(plan_of(width=3))
    assert set(outcomes(report).values()) == {"ran"} and report.exit_code == 0
    assert machine.messages == [f"{url}: connection refused; this run continues without it"]
    assert report.remote is not None and report.remote.waiting == 10


def test_a_remote_cache_that_never_answers_costs_a_limited_time(
    cache: Cache, tmp_path: Path
) -> None:
    """Each wait is limited, and so is their sum."""
    cache.slow_s = 20.0
    machine = RunHost(tmp_path, cache.url, patience_s=0.3)
    machine.timeout_s = 0.3
    report = machine.run(PLAN)
    assert set(outcomes(report).values()) == {"ran"}
    assert machine.messages == [
        f"{cache.url}: no answer within 0.15 s; this run continues without it"
    ]


def test_a_run_survives_a_server_that_dies(filled: Cache, tmp_path: Path) -> None:
    """What was fetched is kept, the rest is made here."""
    filled.die_after = 6
    two = RunHost(tmp_path / "two", filled.url, **WRITES)
    report = two.run(PLAN)
    assert report.exit_code == 0
    ended = list(outcomes(report).values())
    assert set(ended) == {"fetched", "ran"} and "fetched" in ended
    assert len(two.messages) == 1
    # it comes back: the next run sends what waited, although there is nothing else to do
    filled.die_after = -1
    waiting = report.remote.waiting if report.remote else 0
    assert waiting == ended.count("ran")
    again = two.run(PLAN)
    assert again.remote is not None and again.remote.waiting == 0


@pytest.mark.parametrize("status", [503, 429])
def test_temporary_failures_are_retried(status: int, filled: Cache, tmp_path: Path) -> None:
    """Two such answers are followed by the right one."""
    filled.statuses = [status, status]
    two = RunHost(tmp_path / "two", filled.url)
    assert outcomes(two.run(PLAN)) == FETCHED
    assert two.messages == []


def test_refused_access_is_reported_once(filled: Cache, tmp_path: Path) -> None:
    """401: one line, and no further request."""
    filled.token = "Bearer right"
    two = RunHost(tmp_path / "two", filled.url)
    assert set(outcomes(two.run(PLAN)).values()) == {"ran"}
    assert two.messages == [
        f"{filled.url}: it answers 401 Unauthorized; this run continues without it"
    ]
    assert len(filled.requests) == 1


def test_one_failed_request_is_reported(tmp_path: Path) -> None:
    """A run of one stage says why it was not fetched."""
    with cache_server() as stopped:
        url = stopped.url
    machine = RunHost(tmp_path, url)
    machine.run(plan_of()._replace(stages=plan_of().stages[:1], deliveries=()))
    assert machine.messages == [f"{url}: connection refused; this run continues without it"]


def test_one_rejected_blob_does_not_stop_the_others(cache: Cache, tmp_path: Path) -> None:
    """413: it is reported and waits; everything else is uploaded."""
    cache.statuses = [413]
    machine = RunHost(tmp_path, cache.url, reads=False, writes=True)
    report = machine.run(PLAN)
    assert report.remote is not None and report.remote.uploaded == 6 and report.remote.waiting == 1
    assert len(machine.messages) == 1 and "is not uploaded: it answers 413" in machine.messages[0]


@pytest.mark.parametrize("status", [405, 404, 501, 413, 400])
def test_a_cache_that_takes_nothing_is_reported_once(
    cache: Cache, tmp_path: Path, status: int
) -> None:
    """Not a line for each stage: what it says of all requests at once, and what it says again after three results."""
    cache.put_status = status
    machine = RunHost(tmp_path, cache.url, reads=False, writes=True)
    report = machine.run(PLAN)
    assert report.remote is not None and report.remote.waiting == 7
    declined = [text for text in machine.messages if "is not uploaded" in text]
    assert len(declined) == (1 if status in (413, 400) else 0)
    assert len(machine.messages) == len(declined) + 1
    assert "; results wait in the store to be uploaded" in machine.messages[-1]


def test_refused_uploads_do_not_stop_reading(filled: Cache, tmp_path: Path) -> None:
    """403 for an upload stops uploads alone; the result waits, and nothing fails."""
    filled.put_status = 403
    key = next(iter(filled.ac))
    del filled.ac[key]
    two = RunHost(tmp_path / "two", filled.url, **WRITES)
    report = two.run(PLAN)
    assert sorted(outcomes(report).values()).count("fetched") == 6
    assert two.messages == [
        f"{filled.url}: it answers 403 Forbidden; results wait in the store to be uploaded"
    ]
    assert report.remote is not None and report.remote.waiting == 1


def test_a_run_waits_a_limited_time_for_uploads(cache: Cache, tmp_path: Path) -> None:
    """What was not uploaded is in the spool, and the next run uploads it."""
    cache.slow_s = 0.3
    slow = RunHost(tmp_path, cache.url, **WRITES, wait_s=0.1)
    report = slow.run(plan_of())
    assert report.remote is not None and report.remote.waiting > 0
    assert "not yet uploaded to" in summary(report)
    cache.slow_s = 0.0
    again = RunHost(tmp_path, cache.url, **WRITES).run(plan_of())
    assert again.remote is not None
    assert again.remote.waiting == 0 and len(cache.ac) == 4


def test_a_slow_remote_cache_costs_no_more_than_it_may_save(cache: Cache, tmp_path: Path) -> None:
    """Where the stages are known to take no time, a second in all is spent on it, and the user is told."""
    machine = RunHost(tmp_path, cache.url)
    machine.run(plan_of())
    cache.requests.clear()
    cache.slow_s = 0.4
    report = machine.run(plan_of(value=7))
    assert set(outcomes(report).values()) == {"ran"}
    (message,) = machine.messages
    assert message.startswith(f"{cache.url}: it is slow: ")
    assert message.endswith("not worth more waiting; this run continues without it")
    # asked one after the other, they would be four, each with two attempts; a busy machine adds to each
    assert 0 < len(cache.requests) <= 3


def test_a_slow_remote_cache_is_used_while_it_saves_more(filled: Cache, tmp_path: Path) -> None:
    """Whatever it costs, where nobody knows how long the stages take, or they take longer."""
    filled.slow_s = 0.1
    machine = RunHost(tmp_path / "two", filled.url)
    assert set(outcomes(machine.run(PLAN)).values()) == {"fetched"}
    assert machine.messages == []


def test_a_server_that_sends_its_header_byte_by_byte_has_one_time_limit(tmp_path: Path) -> None:
    """The limit is that of the answer, not of each byte."""
    with slow_server(b"HTTP/1.1 200", b" ", 0.05) as url:
        machine = RunHost(tmp_path, url, patience_s=0.5)
        assert set(outcomes(machine.run(PLAN)).values()) == {"ran"}
    assert machine.messages == [f"{url}: no answer within 0.25 s; this run continues without it"]


def test_uploads_do_not_delay_stages(cache: Cache, tmp_path: Path) -> None:
    """Results are uploaded while later stages run: the first is there before the last is done."""
    uploaded: list[int] = []

    def during(stage: str) -> None:
        if stage == "verify":
            deadline = time.monotonic() + 60
            while not cache.ac and time.monotonic() < deadline:
                time.sleep(0.01)
            uploaded.append(len(cache.ac))

    RunHost(tmp_path, cache.url, executor=RecordingExecutor(during=during), **WRITES).run(plan_of())
    assert uploaded and uploaded[0] > 0


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_is_reported_not_used_and_repaired(filled: Cache, tmp_path: Path) -> None:
    """The stage runs here; a machine that may write replaces the corrupt blob."""
    one = LocalStore(str(tmp_path / "one/store"))
    artifact = one.find(one.last_key("net", "export/t1") or "")
    assert artifact is not None
    digest = artifact.digests(("main.bin",))["main.bin"]
    right = filled.cas[digest]
    filled.flip(digest)
    reader = RunHost(tmp_path / "reader", filled.url)
    assert outcomes(reader.run(PLAN)) == {**FETCHED, "export/t1": "ran"}
    assert len(reader.messages) == 1
    assert (
        f"the result {artifact.key[:12]} of export is corrupt in the remote cache"
        in reader.messages[0]
    )
    assert digest[:12] in reader.messages[0]
    assert filled.cas[digest] != right
    writer = RunHost(tmp_path / "writer", filled.url, **WRITES)
    assert outcomes(writer.run(PLAN)) == {**FETCHED, "export/t1": "ran"}
    assert filled.cas[digest] == right
    assert outcomes(RunHost(tmp_path / "third", filled.url).run(PLAN)) == FETCHED


def test_an_expired_blob_is_a_miss(filled: Cache, tmp_path: Path) -> None:
    """A folder or bucket may remove blobs by age: nothing is reported, and a writer uploads it again."""
    shared = tmp_path / "shared"
    shared.mkdir()
    RunHost(tmp_path / "writer", str(shared), **WRITES).run(plan_of())
    store = LocalStore(str(tmp_path / "writer/store"))
    artifact = store.find(store.last_key("net", "build/t0") or "")
    assert artifact is not None
    digest = artifact.digests(("main.bin",))["main.bin"]
    expired = shared / "cas" / digest[:2] / digest
    expired.unlink()
    other = RunHost(tmp_path / "other", str(shared), **WRITES)
    assert outcomes(other.run(plan_of()))["build/t0"] == "ran"
    assert other.messages == [] and expired.is_file()


def test_a_damaged_local_blob_is_fetched_again(filled: Cache, tmp_path: Path) -> None:
    """The remote cache repairs the local store, too."""
    two = RunHost(tmp_path / "two", filled.url)
    two.run(PLAN)
    artifact = two.store.find(two.store.last_key("net", "export/t0") or "")
    assert artifact is not None
    blob = Path(two.store.blobs.path(artifact.digests(("main.bin",))["main.bin"]))
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[::-1])
    again = RunHost(tmp_path / "two", filled.url)
    again.dist = tmp_path / "elsewhere"
    report = again.run(PLAN)
    assert report.exit_code == 0 and again.executor.calls == []
    assert len(report.damage) == 1 and outcomes(report)["export/t0"] == "fetched"


def test_a_result_that_does_not_fit_on_the_disk_is_reported(
    filled: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is downloaded."""
    monkeypatch.setattr("tvmflow.core.disk_errors.FileSystem.spare", 0)
    two = RunHost(tmp_path / "two", filled.url)
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert (
        all("is not fetched: no space left on the disk" in text for text in two.messages)
        and two.messages
    )


def test_two_machines_may_write_at_once(cache: Cache, tmp_path: Path) -> None:
    """Both end, and a third gets everything."""
    machines = [
        RunHost(tmp_path / name, cache.url, executor=RecordingExecutor(salt=name), **WRITES)
        for name in "ab"
    ]
    threads = [threading.Thread(target=machine.run, args=(PLAN,)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    third = RunHost(tmp_path / "third", cache.url)
    report = third.run(PLAN)
    assert "failed" not in outcomes(report).values() and report.exit_code == 0
    assert outcomes(report)["import"] == "fetched"
    assert list(Path(third.store.root, "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (404, "check the address: h has nothing there, or takes no such requests"),
        (405, "check the address: h has nothing there, or takes no such requests"),
        (413, "see what h allows: another attempt gets the same answer"),
        (429, "run again later"),
        (507, "run again later"),
    ],
)
def test_only_what_may_change_is_tried_again_later(status: int, advice: str) -> None:
    """Of a registry and the Hub."""
    assert advise(status, "h") == advice
