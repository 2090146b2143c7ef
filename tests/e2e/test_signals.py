"""Whatever a command does or waits for, a signal ends it soon: its exit code, one sentence, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import Count
from tests.e2e.faults import descendants, inject_fault, remove_fault
from tests.support.interruption import Ended, RunningCommand, slow_server
from tests.support.project import STAGES, Project

CPU_LOCK = f"runtime/tvmflow-{os.getuid()}/locks/cpu.lock"
RUN = ("run", "tiny.yaml")
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

Preparation = Callable[[Project], AbstractContextManager[object]]


class State(NamedTuple):
    """A state of a command.

    Attributes:
        words: The command line.
        ready: A pattern in its output, after which it is in this state soon.
        prepare: Makes it get there, and stay.
        delay_s: How long after `ready`, and after it handles signals, the signal is sent.
    """

    words: tuple[str, ...]
    ready: str
    prepare: Preparation = lambda _: contextlib.nullcontext()
    delay_s: float = 0.3


# ---------------------------------------------------------------- preparations


def hang(stage: str, fault: str = "hang") -> Preparation:
    """Have a stage hang in its worker."""

    def prepare(project: Project) -> AbstractContextManager[None]:
        inject_fault(project, stage, fault)
        return contextlib.nullcontext()

    return prepare


def locked(path: str) -> Preparation:
    """Hold the lock of a file."""

    @contextlib.contextmanager
    def prepare(project: Project) -> Iterator[None]:
        file = project.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    return prepare


@contextlib.contextmanager
def tuned(project: Project) -> Iterator[None]:
    """Let the recipe tune for long."""
    project.spend_whole_budget()
    project.write_recipe(trials=500)
    yield


@contextlib.contextmanager
def claimed(project: Project) -> Iterator[None]:
    """Let another run work on the first stage."""
    inject_fault(project, "import_model", "hang")
    other = RunningCommand(project.command(*RUN, "--json"), project.folder, project.environment)
    try:
        other.wait_for("stage_started")
        yield
    finally:
        other.kill()


def downloaded(first: bytes = b"", drip: bytes = b"") -> Preparation:
    """Let the recipe's model come from a slow server."""

    @contextlib.contextmanager
    def prepare(project: Project) -> Iterator[None]:
        digest = hashlib.sha256((project.folder / "tiny.onnx").read_bytes()).hexdigest()
        with slow_server(first, drip) as url:
            project.edit_recipe("onnx: tiny.onnx", f"onnx: {url}/m.onnx\n  sha256: {digest}")
            yield

    return prepare


@contextlib.contextmanager
def remote(project: Project) -> Iterator[None]:
    """Let the remote cache be a server that sends its header byte by byte."""
    with slow_server(b"HTTP/1.1 200", b" ") as url:
        project.environment["TVMFLOW_REMOTE"] = url
        yield


@contextlib.contextmanager
def busy_device(project: Project) -> Iterator[None]:
    """Hold the CPU when it is the turn of the stage whose worker locks it."""
    tasks = project.tvmflow("run", "tiny.yaml", "--until", "extract_tasks")
    assert tasks.code == 0, tasks.out + tasks.err
    project.edit_recipe("trials: 0", "trials: 4")
    with locked(CPU_LOCK)(project):
        yield


@contextlib.contextmanager
def locked_store(project: Project) -> Iterator[None]:
    """Hold the lock under which a result is removed that nothing needs."""
    assert project.run("--until", "import").code == 0
    project.write_model(seed=1)
    assert project.run("--until", "import").code == 0
    # what was used in the last seconds is kept
    for path in (project.folder / "cache/actions").glob("*/*"):
        os.utime(path, (0, 0))
    with locked("cache/use.lock")(project):
        yield


@contextlib.contextmanager
def finished(project: Project) -> Iterator[None]:
    """Have results in the store, and a remote cache that answers slowly."""
    assert project.run("--until", "build").code == 0
    with remote(project):
        yield


BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"
STARTED = '"stage_started".*tiny:{}'
WAITING = '"waiting"'

STATES = {
    "device lock": State(RUN, WAITING, locked(CPU_LOCK)),
    "device lock of a worker": State(RUN, '"waiting".*tiny:tune', busy_device),
    "claim": State(RUN, WAITING, claimed),
    "store lock": State(RUN, WAITING, locked("cache/use.lock")),
    "download that drips": State(RUN, '"download"', downloaded(BODY, b"x")),
    "download without a header": State(RUN, STARTED.format("import"), downloaded()),
    "remote cache": State((*RUN, "--remote-timeout", "60"), "", remote, 2.0),
    "pull": State(("cache", "pull", "tiny.yaml", "--remote-timeout", "60"), "", remote, 2.0),
    "push": State(("cache", "push", "--all", "--remote-timeout", "60"), "", finished, 2.0),
    "measuring": State(RUN, '"progress"', tuned),
    "searching": State(RUN, STARTED.format("tune"), tuned, 1.0),
    "native code": State(RUN, STARTED.format("build"), hang("build", "native-hang")),
    "loading TVM": State(RUN, STARTED.format("import"), delay_s=0.1),
    "collecting garbage": State(
        ("cache", "gc", "--max-size", "1B"), "waiting for the lock file .*use.lock", locked_store
    ),
    "doctor": State(("doctor",), "", delay_s=1.5),
    "devices": State(("device", "ls", "--tracker", "{server}"), "", delay_s=1.0),
    "targets": State(("targets", "--cpus", "x86_64"), "", delay_s=0.8),
    "records": State(("records", "export", "trials.jsonl.gz"), "", delay_s=0.1),
    **{
        stage: State(RUN, STARTED.format(stage), hang(module))
        for stage, module in zip(STAGES, ("import_model", *STAGES[1:]), strict=True)
    },
    **{
        f"{words[0]} after {delay_s:.2f} s": State(words, "", delay_s=delay_s)
        for words in (RUN, ("plan", "tiny.yaml"))
        for delay_s in (0.02, 0.1, 0.25, 0.5)
    },
}
_LEAST_DELAY_S = 0.02
CHEAP = (("device lock", TERM), ("download that drips", INT), ("loading TVM", TERM))
"""What the default tests look at; a signal to the group where there are several processes."""


def interrupt(
    project: Project, state: State, number: int, *, to_group: bool = False, times: int = 1
) -> Ended:
    """Bring a command into a state, and end it by a signal."""
    project.environment["XDG_RUNTIME_DIR"] = str(project.folder / "runtime")
    with state.prepare(project), slow_server() as server:
        words = [word.format(server=server.partition("//")[2]) for word in state.words]
        if words[0] == "run":
            words.append("--json")
        running = RunningCommand(project.command(*words), project.folder, project.environment)
        try:
            running.wait_for_handlers()
            running.wait_for(state.ready)
            time.sleep(state.delay_s)
            return running.end(number, to_group=to_group, times=times)
        finally:
            running.kill()


def has_said_all(ended: Ended) -> bool:
    """Return whether a command had succeeded, or reported an error of its own, before the signal."""
    return ended.code == 0 or (bool(ended.err) and "tvmflow: interrupted" not in ended.err)


def check(ended: Ended, number: int) -> None:
    """Check everything that holds in every state."""
    name = signal.Signals(number).name
    announcements = [
        line for line in ended.err.splitlines() if line.startswith("tvmflow: interrupted")
    ]
    assert ended.code == 128 + number, ended
    assert len(announcements) == 1 and f"({name})" in announcements[0], ended
    assert "Traceback" not in ended.err + ended.out, ended
    assert "memory" not in ended.out, ended
    assert ended.survivors == [], ended
    for line in ended.out.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "run_finished":
            assert event["exit_code"] == ended.code
            assert {stage["outcome"] for stage in event["stages"]} <= {
                "hit",
                "ran",
                "cancelled",
                "skipped",
            }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), CHEAP, ids=lambda value: str(value))
def test_a_run_ends_at_a_signal(project: Project, name: str, number: int) -> None:
    """While it waits for a device, for a server, and while its workers start."""
    ended = interrupt(project, STATES[name], number, to_group=name == "loading TVM")
    check(ended, number)
    if name == "device lock":
        events = [json.loads(line) for line in ended.out.splitlines()]
        messages = [event["message"] for event in events if event["event"] == "waiting"]
        assert len(messages) == 1
        assert f"the device cpu of this machine, held by pid {os.getpid()} (" in messages[0]


@pytest.mark.faults
def test_every_state_ends_at_every_signal(project: Project, tmp_path: Path, count: Count) -> None:
    """To the process, to its group, and Ctrl-C five times, which makes nothing worse."""
    deliveries = {
        "SIGINT": (INT, False, 1),
        "SIGHUP": (HUP, False, 1),
        "SIGTERM to the group": (TERM, True, 1),
        "Ctrl-C five times": (INT, True, 5),
    }
    durations_s: dict[str, float] = {}
    failures: list[str] = []
    folders = itertools.count()

    def send(state: State, number: int, to_group: bool, times: int) -> Ended:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        return interrupt(Project(folder), state, number, to_group=to_group, times=times)

    for name, state in STATES.items():
        for delivery, (number, to_group, times) in deliveries.items():
            try:
                ended = send(state, number, to_group, times)
                # On a fast machine it may have ended by itself before.
                while has_said_all(ended) and state.delay_s > _LEAST_DELAY_S:
                    state = state._replace(delay_s=state.delay_s / 2)
                    ended = send(state, number, to_group, times)
                durations_s[f"{name}: {delivery}"] = ended.seconds
                check(ended, number)
            except AssertionError as failure:
                failures.append(f"{name}: {delivery}: {failure}")
    count("states of a command", len(STATES))
    count("signals", len(durations_s))
    count("signals that were obeyed within 2 s", sum(s < 2 for s in durations_s.values()))
    assert failures == []


@pytest.mark.slow
def test_a_run_ends_when_nobody_reads_its_output(project: Project) -> None:
    """As in `tvmflow run … | head -1`: no traceback, and nothing goes on for hours."""
    project.write_recipe(trials=500)
    process = project.start()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
def test_workers_end_with_a_killed_run(project: Project) -> None:
    """Nothing is told to processes whose parent gets SIGKILL, and they end all the same."""
    for name in ("measuring", "native code"):
        folder = project.folder / name
        folder.mkdir()
        ended = interrupt(Project(folder), STATES[name], signal.SIGKILL)
        assert (ended.code, ended.survivors) == (-signal.SIGKILL, [])
        last = Project(folder).tvmflow("runs", "--json")
        assert json.loads(last.out)["runs"][0]["end"] == "unfinished"


@pytest.mark.faults
def test_stopped_processes_go_on_where_they_were(project: Project, count: Count) -> None:
    """SIGSTOP and SIGCONT of all workers in every stage, then Ctrl-Z and `fg`: the run ends as an undisturbed one."""
    project.spend_whole_budget()
    project.write_recipe(trials=4)
    running = RunningCommand(project.command(*RUN, "--json"), project.folder, project.environment)
    try:
        running.wait_for_handlers()
        for stage in STAGES:
            running.wait_for(STARTED.format(stage))
            workers = list(descendants(running.process.pid))
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                        count(f"{number.name} of workers", 1)
                time.sleep(0.3)
            for number in (signal.SIGTSTP, signal.SIGCONT):
                running.process.send_signal(number)
                time.sleep(0.3)
        assert running.process.wait(300) == 0, running.output("out")
    finally:
        running.kill()
    assert "Traceback" not in running.output("err")
    assert len(set(project.trials())) == len(project.trials()) == 4
    assert project.run().ran == []


@pytest.mark.faults
def test_a_worker_that_stays_stopped_runs_into_the_time_limit(project: Project) -> None:
    """It is ended with everything that it started; without the limit, the command can be interrupted."""
    words = (*RUN, "--json", "--stage-timeout", "20")
    inject_fault(project, "build", "hang")
    running = RunningCommand(project.command(*words), project.folder, project.environment)
    try:
        running.wait_for(STARTED.format("build"))
        time.sleep(0.2)
        for pid in list(descendants(running.process.pid))[1:]:
            os.kill(pid, signal.SIGSTOP)
        assert running.process.wait(120) == 1
        assert running.list_processes() == []
    finally:
        running.kill()
    assert "took longer than 20 s and was stopped" in running.output("out")
    remove_fault(project)
    assert project.run().code == 0
