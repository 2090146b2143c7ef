"""The fork server: every way in which a call can end is a result, and nothing outlives its parent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.core import fork_server_calls
from tvmflow.core import fork_server as fork_server_module
from tvmflow.core import fork_server_process, memory
from tvmflow.core.fork_server import ForkServer

CALLS = fork_server_calls.__name__


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer.start() as started:
        yield started


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def test_a_call_gives_its_value_and_its_events(fork_server: ForkServer) -> None:
    """What the function returns comes back, and what it emits arrives on the way."""
    events: list[dict[str, object]] = []
    outcome = fork_server.call(f"{CALLS}:add", [1, 2], timeout_s=10, emit=events.append)
    assert (outcome.kind, outcome.value) == ("ok", 3)
    assert events == [{"event": "adding", "numbers": [1, 2]}]
    # a function that can be imported is its own name
    assert fork_server.call(fork_server_calls.add, [2, 2], timeout_s=10).value == 4


def test_a_call_can_tell_that_it_is_in_a_child(fork_server: ForkServer) -> None:
    """It is so whether the server was started or forked: a child does not ask for a process of its own."""
    assert fork_server.call(fork_server_calls.tell_whether_child, None, timeout_s=10).value is True
    with ForkServer.fork() as forked:
        assert forked.call(fork_server_calls.tell_whether_child, None, timeout_s=10).value is True
    assert not fork_server_process.is_child


def test_tvm_is_imported_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start a GPU's driver, which does not work in children; they can import it themselves."""
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer.start(["tvm_ffi"]) as server:
        outcome = server.call(fork_server_calls.find_torch, None, timeout_s=60)
    assert outcome.value == [False, True], outcome


def test_a_segmentation_fault_is_a_result(fork_server: ForkServer, tmp_path: Path) -> None:
    """A crash in native code names its signal and leaves the stack in the log; the next call works."""
    log = tmp_path / "log"
    outcome = fork_server.call(f"{CALLS}:crash", None, timeout_s=10, log=log)
    assert outcome.kind == "crashed"
    assert outcome.message == "crashed in native code (SIGSEGV: Segmentation fault)"
    assert "fork_server_calls.py" in log.read_text()
    assert fork_server.call(f"{CALLS}:add", [2, 2], timeout_s=10).value == 4


def test_a_hang_is_stopped_with_all_it_started(fork_server: ForkServer) -> None:
    """At its time limit a call is killed, and so are the processes that it started."""
    events: list[dict[str, int]] = []
    # On a busy machine the process may not have been started within half a second.
    for limit_s in (0.5, 5, 50):
        outcome = fork_server.call(f"{CALLS}:hang", None, timeout_s=limit_s, emit=events.append)
        message = f"took longer than {limit_s} s and was stopped"
        assert (outcome.kind, outcome.message) == ("timeout", message)
        if events:
            break
    wait_until_gone(events[0]["child"])


def test_errors_keep_their_message_and_fix(fork_server: ForkServer, tmp_path: Path) -> None:
    """Errors of tvmflow arrive with message and fix; others with their last line, the rest in the log."""
    known = fork_server.call(f"{CALLS}:refuse", None, timeout_s=10)
    assert (known.kind, known.message, known.fix) == ("error", "no such operator", "use another")
    assert known.error == "ImportFailed"
    log = tmp_path / "log"
    other = fork_server.call(f"{CALLS}:stumble", None, timeout_s=10, log=log)
    assert (other.kind, other.message) == ("error", "ValueError: the point")
    assert "Traceback" in log.read_text()


def test_the_output_of_a_call_is_in_its_log(fork_server: ForkServer, tmp_path: Path) -> None:
    """Python's output and that of subprocesses end up in the log, in order."""
    log = tmp_path / "log"
    fork_server.call(f"{CALLS}:talk", None, timeout_s=10, log=log)
    assert log.read_text() == "from Python\nfrom a subprocess\n"


def test_payloads_and_results_may_be_large(fork_server: ForkServer) -> None:
    """Payloads and results larger than any pipe buffer pass."""
    text = "x" * 3_000_000
    assert fork_server.call(f"{CALLS}:echo", text, timeout_s=30).value == text


def test_calls_from_several_threads_run_side_by_side(fork_server: ForkServer) -> None:
    """Eight threads get their own results."""
    results: dict[int, object] = {}

    def ask(number: int) -> None:
        results[number] = fork_server.call(f"{CALLS}:add", [number, 1], timeout_s=30).value

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number + 1 for number in range(8)}


def test_the_wait_of_a_child_for_its_caller_does_not_count(fork_server: ForkServer) -> None:
    """It goes on when the caller's function has returned; only its own seconds are limited."""
    outcome = fork_server.call(f"{CALLS}:ask", 0, timeout_s=2, emit=lambda _: time.sleep(2.5))
    assert outcome.kind == "ok"
    assert outcome.value >= 2.5
    late = fork_server.call(f"{CALLS}:ask", 60, timeout_s=0.5, emit=lambda _: time.sleep(0.8))
    assert late.kind == "timeout"
    assert late.seconds < 60


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((7, 8), ": memory ran out, and the kernel killed a process for that"),
        ((7, 7), " by another process; the kernel killed none for lack of memory"),
        ((None, None), "; perhaps the machine ran out of memory"),
    ],
)
def test_a_kill_from_outside_differs_from_a_crash(
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    message: str,
) -> None:
    """The message says whether the kernel's out-of-memory killer was at work, where that is known."""
    monkeypatch.setattr(memory, "count_oom_kills", iter(counts).__next__)
    outcome = fork_server.call(f"{CALLS}:kill_itself", None, timeout_s=10)
    assert outcome.message == f"was killed (SIGKILL){message}"


def test_cancel_stops_what_runs_and_what_comes() -> None:
    """After a cancel, the running call and every later one say so at once."""
    with ForkServer.start() as own:
        started = threading.Event()
        outcomes = []

        def hang() -> None:
            outcomes.append(
                own.call(f"{CALLS}:hang", None, timeout_s=60, emit=lambda _: started.set())
            )

        thread = threading.Thread(target=hang)
        thread.start()
        started.wait()
        own.cancel()
        thread.join()
        outcomes.append(own.call(f"{CALLS}:add", [1, 1], timeout_s=10))
    assert [outcome.kind for outcome in outcomes] == ["cancelled", "cancelled"]


def test_a_call_may_fork_a_server_of_its_own(fork_server: ForkServer) -> None:
    """A stage that measures forks its own fork server, so that a bad kernel costs one trial."""
    outcome = fork_server.call(f"{CALLS}:nested", 5, timeout_s=30)
    assert outcome.value == ["crashed"] * 5 + [3]


def test_nothing_outlives_a_killed_client(tmp_path: Path) -> None:
    """kill -9 of the client ends the server, the call and its children."""
    notes = tmp_path / "pids"
    client = subprocess.Popen([sys.executable, "-m", CALLS, str(notes)])
    deadline = time.monotonic() + 20
    while not (notes.exists() and notes.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(word) for word in notes.read_text().split()]
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.faults
def test_a_storm_of_kills_loses_only_the_calls_it_hits(fork_server: ForkServer) -> None:
    """Every one of a hundred calls comes back, killed or not, and the fork server still works."""
    kinds = []
    for number in range(100):
        name = "kill_itself" if number % 3 == 0 else "echo"
        kinds.append(fork_server.call(f"{CALLS}:{name}", "x" * 200_000, timeout_s=30).kind)
    assert kinds == ["crashed" if number % 3 == 0 else "ok" for number in range(100)]


def test_signals_to_every_process_of_a_run_are_left_to_the_client(tmp_path: Path) -> None:
    """The server has a session of its own and ignores them, while it imports and later."""
    with ForkServer.start() as server:
        events: list[dict[str, int]] = []

        def end_server(event: dict[str, int]) -> None:
            events.append(event)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                os.kill(event["server"], number)
            os.kill(event["own"], signal.SIGKILL)

        first = server.call(f"{CALLS}:hang", None, timeout_s=10, emit=end_server)
        assert first.message.startswith("was killed")
        assert os.getsid(events[0]["server"]) == events[0]["server"]
        assert server.call(f"{CALLS}:add", [1, 2], timeout_s=10).value == 3


def test_a_call_that_somebody_else_ended_has_not_crashed(fork_server: ForkServer) -> None:
    """SIGTERM comes from outside: the message says so, and no candidate is the culprit."""
    outcome = fork_server.call(f"{CALLS}:end_itself", None, timeout_s=10)
    assert (outcome.kind, outcome.is_external) == ("crashed", True)
    assert outcome.message == "was ended by SIGTERM, which another process sent"


def test_cancelling_does_not_wait_for_the_imports_of_the_server(tmp_path: Path) -> None:
    """A call that has not begun ends too, and so does everything that others have started."""
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(100)")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        server = ForkServer.start(["slow_module"])
    with server:
        threading.Timer(0.3, server.cancel).start()
        outcome = server.call(f"{CALLS}:add", [1, 2], timeout_s=60)
    assert outcome.kind == "cancelled"


def test_a_time_limit_holds_while_the_server_imports(tmp_path: Path) -> None:
    """A child that is forked after its time limit is killed at once."""
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(1)")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        server = ForkServer.start(["slow_module"])
    with server:
        assert server.call(f"{CALLS}:hang", None, timeout_s=0.2).kind == "timeout"


@pytest.mark.slow
def test_a_limit_does_not_run_while_the_client_is_stopped() -> None:
    """After SIGSTOP and SIGCONT a child that had to wait for its client is not killed."""
    code = (
        "import sys; from tvmflow.core.fork_server import ForkServer\n"
        "with ForkServer.start() as server:\n"
        f"    print('ready', flush=True); print(server.call('{CALLS}:talk_much', None, timeout_s=6).kind)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.5)
        process.send_signal(signal.SIGSTOP)
        time.sleep(8)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().strip() == "ok"


def test_a_server_that_was_stopped_holds_no_call_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot report the end of a child that ran out of time: it is ended itself."""
    monkeypatch.setattr(fork_server_module, "_REPORT_S", 0.3)
    with ForkServer.start() as server:
        assert server.call(f"{CALLS}:add", [1, 2], timeout_s=60).value == 3

        def stop(_: object) -> None:
            os.kill(server._pid, signal.SIGSTOP)

        outcome = server.call(f"{CALLS}:hang", None, timeout_s=3, emit=stop)
        assert (outcome.kind, outcome.message) == (
            "timeout",
            "took longer than 3 s and was stopped",
        )
        assert server.is_gone


def test_a_child_that_is_stopped_and_continued_finishes() -> None:
    """SIGSTOP and SIGCONT to a worker: its time goes on, and its result arrives."""
    with ForkServer.start() as server:

        def pause(pid: int) -> None:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()

        outcome = server.call(f"{CALLS}:add", [1, 2], timeout_s=30, on_start=pause)
        assert (outcome.kind, outcome.value) == ("ok", 3)
        assert outcome.seconds > 0.4
        stopped = server.call(
            f"{CALLS}:add", [1, 2], timeout_s=0.5, on_start=lambda pid: os.kill(pid, signal.SIGSTOP)
        )
        assert stopped.kind == "timeout"


def test_a_call_without_a_spare_process_says_so() -> None:
    """The server answers, and goes on."""
    read_end, write_end = os.pipe()
    spare = [os.open(os.devnull, os.O_WRONLY) for _ in range(2)]
    fork_server_process._refuse(
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), [write_end, *spare]
    )
    with os.fdopen(read_end) as stream:
        answer, end = map(json.loads, stream)
    assert (answer["kind"], answer["error"]) == ("error", "StoreError")
    assert answer["message"] == "the system starts no more processes or threads for this user"
    assert "ulimit -u" in answer["fix"]
    assert end == {"exit": 0}
