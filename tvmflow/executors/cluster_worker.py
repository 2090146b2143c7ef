"""What runs in a dask worker: one stage, in a child process as everywhere, with its files by way of the remote.

A worker has a store of its own. Contents that stages need are fetched into it once and checked
on their way; what a stage makes goes into it and to the remote. Of a stage that was killed, its
work folder and its measured trials are still there when it begins again on the same machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, TvmflowError, outcome_of
from tvmflow.executors import matching
from tvmflow.executors.processes import ProcessExecutor
from tvmflow.stores.local import Damaged, LocalStore, Slot
from tvmflow.stores.remote import open_remote
from tvmflow.stores.remote._base import RemoteProblem
from tvmflow.stores.remote.actions import Content
from tvmflow.stores.remote.tier import Access, Tier
from tvmflow.targets.devices import machine_locks
from tvmflow.values import StageCall, StageResult

if TYPE_CHECKING:
    from tvmflow.tuning.records import Here

TOPIC: Final = "tvmflow"
# What `tvmflow worker` tells the process that dask starts for it: the store, and the remote if it names one.
STORE: Final = "TVMFLOW_WORKER_STORE"
REMOTE: Final = "TVMFLOW_WORKER_REMOTE"
_LOOK_S: Final = 0.2
_TRIALS_EVERY_S: Final = 20.0
_LONGEST_LOG: Final = 1 << 18


class Order(NamedTuple):
    """A stage to be run, as plain JSON. `token` is what its events carry.

    `key` stands for all that the stage is given, `call` is a StageCall without its paths, and
    `inputs` are `(digest, size, path)` by name; the path is what a user knows the file by, and
    empty for a file that another stage made. `asks` is what `matching.asks` said.
    """

    token: str
    key: str
    remote: str
    timeout_s: float
    call: dict[str, Any]
    inputs: dict[str, tuple[str, int, str]]
    asks: dict[str, float]


class Answer(NamedTuple):
    """How it ended, as plain JSON: a StageResult with the end of its log, and the files that are in the remote."""

    result: dict[str, Any]
    files: list[tuple[str, str, int]]
    worker: str


def run_stage(order: Mapping[str, Any]) -> dict[str, Any]:
    """Called by dask with an Order as a dict; gives an Answer as one."""
    task, wanted = _Task(str(order["token"])), Order(**order)
    task.say({"begun": task.name})
    started = time.monotonic()
    try:
        answer = _run(wanted, task)
    except (TvmflowError, RemoteProblem, Damaged) as problem:
        seconds = time.monotonic() - started
        answer = Answer(_problem(problem, seconds, task.name)._asdict(), [], task.name)
    return answer._asdict()


def _problem(problem: Exception, seconds: float, worker: str) -> StageResult:
    """What is in the way of a stage is in the way on this worker: it is named."""
    if not isinstance(problem, TvmflowError):
        text = str(problem)
        problem = EnvironmentProblem(
            text, fix="`tvmflow worker` must reach the remote and may write to it"
        )
    outcome: Any = outcome_of(type(problem))
    return StageResult(outcome, f"worker {worker}: {problem.message}", problem.fix, {}, seconds, "")


class _Task:
    """The dask task that this thread works on."""

    def __init__(self, token: str) -> None:
        from distributed.worker import get_worker, thread_state

        self._worker = get_worker()
        self._key = thread_state.key
        self._token = token
        self.name = str(self._worker.name)

    def say(self, event: Mapping[str, Any]) -> None:
        """Tell whoever waits for this stage."""
        self._worker.log_event(TOPIC, {"token": self._token, **event})

    @property
    def unwanted(self) -> bool:
        """Whether the run that asked for it is gone, or was stopped."""
        state = self._worker.state.tasks.get(self._key)
        return state is None or state.state in ("cancelled", "released", "forgotten")


# ---------------------------------------------------------------- one stage


def _run(order: Order, task: _Task) -> Answer:
    _check_unchanged(order)
    store = _store()
    url = os.environ.get(REMOTE) or order.remote
    with store.running(), _remote(url, store, order, task) as tier:
        for digest, size, _ in order.inputs.values():
            _fetch(tier, store, Content(digest, size))
        with store.claim(order.key) as slot:
            call = _call(order, store, slot)
            log = Path(store.root, "logs", "cluster", f"{order.key}.log")
            with _trials_shared(tier, call, task) as watched, _stoppable(task) as executor:
                result = executor.execute(call, log, watched)
            files = _send(tier, store, slot) if result.outcome in ("ok", "rejected") else []
            if result.outcome == "ok":
                store.release(slot)
    shown = _in_users_words(result, log, order, call)
    return Answer(shown._asdict(), files, task.name)


def _check_unchanged(order: Order) -> None:
    """Raises EnvironmentProblem when this machine is no longer what it told the scheduler."""
    lost = sorted(order.asks.keys() - matching.offers(matching.about_here()).keys())
    if lost:
        raise EnvironmentProblem(
            f"it has changed since it was started, and no longer has {', '.join(lost)}",
            fix="start `tvmflow worker` again there",
        )


@functools.cache
def _store() -> LocalStore:
    """The one of this process: what it has checked once it need not check again."""
    store = LocalStore(os.environ[STORE])
    store.create()
    return store


@contextlib.contextmanager
def _remote(url: str, store: LocalStore, order: Order, task: _Task) -> Iterator[Tier]:
    from tvmflow import signing

    access = Access(
        writes=True,
        signer=signing.own_key(),
        trusted=signing.trusted_keys(),
        patience_s=order.timeout_s,
    )
    remote = open_remote(url, timeout_s=order.timeout_s)

    def tell(text: str) -> None:
        task.say({"event": {"event": "remote", "message": f"worker {task.name}: {text}"}})

    tier = Tier(remote, store, access, tell, lambda: task.unwanted)
    try:
        yield tier
    except RemoteProblem as problem:
        raise type(problem)(f"{remote.place}: {problem}") from problem
    finally:
        tier.finish(0.0)


def _fetch(tier: Tier, store: LocalStore, content: Content) -> None:
    """Have a content in the store, read and found right."""
    with contextlib.suppress(Damaged):
        store.checked_blob(content.digest)
        return
    path = Path(store.temporary())
    try:
        if not tier.download(content, path):
            raise EnvironmentProblem(
                f"{tier.remote.place} does not have the content {content.digest[:12]}",
                fix="run again: what is missing there is sent; a remote must keep contents for as long as a run lasts",
            )
        store.add_file(str(path))
    finally:
        path.unlink(missing_ok=True)


def _call(order: Order, store: LocalStore, slot: Slot) -> StageCall:
    """The stage with paths of this machine. A file from outside keeps its name: what is said of it names it."""
    inputs = {}
    named = Path(slot.folder, "inputs")
    for number, (name, (digest, _, shown)) in enumerate(order.inputs.items()):
        path = Path(store.blob(digest))
        if shown:
            link = named / str(number) / Path(shown).name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            path = link
        inputs[name] = str(path)
    places = {"out": slot.out, "work": slot.work, "ledger": store.ledger, "locks": machine_locks()}
    return StageCall(**{**order.call, **places, "inputs": inputs})


def _send(tier: Tier, store: LocalStore, slot: Slot) -> list[tuple[str, str, int]]:
    """Give the remote all that the stage made; `(name, digest, size)` of each."""
    files = []
    root = Path(slot.out)
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        name, size = path.relative_to(root).as_posix(), path.stat().st_size
        digest = store.add_file(str(path))
        tier.send_file(Content(digest, size), Path(store.blob(digest)))
        files.append((name, digest, size))
    return files


def _in_users_words(result: StageResult, log: Path, order: Order, call: StageCall) -> StageResult:
    """The result with the end of its log, in which the user's files are called what they are to the user."""
    words = {call.inputs[name]: shown for name, (_, _, shown) in order.inputs.items() if shown}

    def told(text: str) -> str:
        for here, there in words.items():
            text = text.replace(here, there)
        return text

    with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:
        stream.seek(max(log.stat().st_size - _LONGEST_LOG, 0))
        words_of_log = told(stream.read().decode(errors="replace"))
        return result._replace(message=told(result.message), fix=told(result.fix), log=words_of_log)
    return result._replace(message=told(result.message), fix=told(result.fix), log="")


# ---------------------------------------------------------------- the process that runs it

# Servers that wait for the next stage, each with TVM loaded.
_idle: list[ProcessExecutor] = []


@contextlib.contextmanager
def _stoppable(task: _Task) -> Iterator[ProcessExecutor]:
    """An executor that is stopped when nobody wants the stage any more."""
    try:
        executor = _idle.pop()
    except IndexError:
        executor = ProcessExecutor()
    # before anybody may stop it: a server that is not there cannot be told
    executor.start()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_S):
            if task.unwanted:
                executor.cancel()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield executor
    finally:
        done.set()
        watcher.join()
        if executor.cancelled:
            executor.close()
        else:
            _idle.append(executor)


# ---------------------------------------------------------------- measured trials


@contextlib.contextmanager
def _trials_shared(
    tier: Tier, call: StageCall, task: _Task
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Before tuning, take the trials of others; while it goes on and at its end, give them those made here.

    Gives what takes the stage's events. A worker may be gone at any moment: what it had given
    by then need not be measured again.
    """
    from tvmflow.stores.remote import ledger

    here = ledger.measured_on(call.settings) if call.stage == "tune" else None
    if here is None:
        yield lambda event: task.say({"event": event})
        return
    with _troubles_told(tier):
        ledger.pull(tier, here)
    measured, done = threading.Event(), threading.Event()

    def watched(event: dict[str, Any]) -> None:
        measured.set()
        task.say({"event": event})

    def give_now_and_then() -> None:
        while not done.wait(_TRIALS_EVERY_S):
            if measured.is_set():
                measured.clear()
                _give(tier, here)

    giver = threading.Thread(target=give_now_and_then, daemon=True)
    giver.start()
    try:
        yield watched
    finally:
        done.set()
        giver.join()
        _give(tier, here)


def _give(tier: Tier, here: Here) -> None:
    from tvmflow.stores.remote import ledger

    with _troubles_told(tier):
        ledger.push(tier, here)


@contextlib.contextmanager
def _troubles_told(tier: Tier) -> Iterator[None]:
    """Trials that cannot be shared are no reason to fail: they are in the ledger."""
    try:
        yield
    except (RemoteProblem, TvmflowError) as problem:
        tier.tell(f"trials are not shared: {problem}")
