"""Runs stages on a dask cluster. Files go through the remote by digest; what crosses the wire to dask is small JSON.

A worker that ends in the middle of a stage costs that attempt: dask gives the stage to another
one. The stage itself runs in a child of the worker, so a crash in native code is an answer.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, Interrupted, UsageError
from tvmflow.executors import Asked, cluster_worker, matching
from tvmflow.executors.cluster_worker import Answer, Order
from tvmflow.keys import digest_of
from tvmflow.stores.filestat import FileDigests
from tvmflow.stores.local import disk_errors, hash_file
from tvmflow.stores.remote._base import RemoteProblem
from tvmflow.stores.remote.actions import Content
from tvmflow.values import StageCall, StageResult

OnEvent = Callable[[dict[str, Any]], None]

INSTALL: Final = "pip install 'tvmflow[dask]'"
_CONNECT_S: Final = 10.0
_LOOK_S: Final = 0.05
_LOOK_AT_WORKERS_S: Final = 2.0
# A nanny starts its worker again: that takes some seconds.
_COMING_BACK_S: Final = 20.0
_MOST_WORKERS: Final = 3
_SHOWN: Final = 8
# Any stage of this build of TVM needs these.
_COMMON_TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")


class Worker(NamedTuple):
    """A worker of the cluster: what it is called, how many stages it takes at a time, what it said of itself."""

    name: str
    slots: int
    about: matching.About | None


class _Watch:
    """What is heard of one stage while it runs."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque()
        self.workers: list[str] = []


class DaskExecutor:
    """Stages on the workers of a scheduler. It connects when something must run."""

    def __init__(self, asked: Asked) -> None:
        if not asked.scheduler:
            raise UsageError(
                "--executor dask needs the address of a scheduler",
                fix="give --scheduler tcp://HOST:PORT, or set $TVMFLOW_SCHEDULER",
            )
        self._asked = asked
        # asked for now: a run that has no remote must not find out after an hour
        self._url, self._tier = asked.remote(lambda: self.cancelled)
        self._lock = threading.Lock()
        self._client: Any = None
        self._watched: dict[str, _Watch] = {}
        self._digests = FileDigests(asked.store)
        self.slots = 1
        self.cancelled = False

    # ------------------------------------------------------------ the cluster

    def start(self) -> None:
        """Connect, and see who is there. Raises EnvironmentProblem when nobody can run a stage."""
        with self._lock:
            if self._client is None:
                self._here = matching.about_here()
                self._client = self._connect()
                self._client.subscribe_topic(cluster_worker.TOPIC, self._hear)
                self.slots = self._count_slots()

    def _connect(self) -> Any:
        try:
            import distributed
        except ImportError as missing:
            raise EnvironmentProblem(
                f"--executor dask needs the package distributed ({missing})", fix=INSTALL
            ) from missing
        # what it has to say is said by us, in one sentence
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        check_tls(self._asked.scheduler, "client")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return distributed.Client(
                    self._asked.scheduler,
                    timeout=_CONNECT_S,
                    set_as_default=False,
                    name="tvmflow",
                )
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EnvironmentProblem(
                f"the scheduler {self._asked.scheduler} does not answer: {why}",
                fix="start one with `tvmflow scheduler`, and give its address as it says it: "
                "tcp://HOST:PORT, or tls://HOST:PORT",
            ) from error

    def _workers(self) -> list[Worker]:
        """Who is there. Raises EnvironmentProblem when the scheduler is not."""
        while self._client.status == "connecting":
            time.sleep(_LOOK_S)
        if self._client.status != "running":
            raise self._lost()
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        return [
            Worker(
                str(each["name"]), each["nthreads"], matching.about_worker(each["resources"] or {})
            )
            for each in known.values()
        ]

    def _count_slots(self) -> int:
        """How many stages run at a time. Workers that are not used are named."""
        for left in self._waiting():
            workers = self._workers()
            why_not = {
                each.name: matching.strange(self._here, each.about, _COMMON_TOOLS)
                for each in workers
            }
            slots = sum(each.slots for each in workers if not why_not[each.name])
            if slots or not left:
                break
        refused = [f"{name}: {'; '.join(why)}" for name, why in why_not.items() if why]
        if not slots:
            raise EnvironmentProblem(
                f"no worker of {self._asked.scheduler} can run stages: "
                + ("\n  ".join(["", *_some(refused)]) if refused else "it has none"),
                fix=f"start some with `tvmflow worker --scheduler {self._asked.scheduler}`, where the same "
                "tvmflow and TVM are installed; --wait-for-workers SECONDS waits for them",
            )
        for each in refused:
            self._asked.tell(f"worker {each}; it is not used")
        return slots

    def _waiting(self) -> Iterator[bool]:
        """Look again, and again, for as long as workers are waited for; False the last time."""
        deadline = time.monotonic() + self._asked.wait_s
        while True:
            left = time.monotonic() < deadline and not self.cancelled
            yield left
            if not left:
                return
            time.sleep(0.5)

    def _hear(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Called by dask, in a thread of its own that must not wait, for the events of all runs on this cluster."""
        _, said = event
        watch = self._watched.get(said.get("token", ""))
        if watch is not None and "event" in said:
            watch.events.append(dict(said["event"]))
        elif watch is not None:
            # dask adds where it came from as `worker`
            watch.workers.append(str(said["begun"]))

    # ------------------------------------------------------------ one stage

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage on a worker, and fetch what it made. Raises EnvironmentProblem, Interrupted."""
        self.start()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        self._check_there_is_one(call)
        with self._remote_words():
            order = self._order(call)
            answer = self._ask(call, order, on_event)
            if answer is None:
                return StageResult("cancelled", "the run was cancelled", "", {}, 0.0, str(log))
            for name, digest, size in answer.files:
                self._fetch(Path(call.out), name, Content(digest, size))
        result = StageResult(**answer.result)
        log.write_text(f"ran on worker {answer.worker}\n{result.log}")
        if call.stage == "tune":
            self._take_trials(call)
        return result._replace(log=str(log))

    def _check_there_is_one(self, call: StageCall) -> None:
        """Raises EnvironmentProblem when no worker may run the stage, nor comes in time."""
        for left in self._waiting():
            why_not = self._why_not(call)
            if why_not is None:
                return
            if not left:
                raise self._nobody(why_not)

    def _why_not(self, call: StageCall) -> list[str] | None:
        """Why each of the workers may not run a stage; None when one of them may."""
        why_not = []
        for each in self._workers():
            found = matching.misfits(call, self._here, each.about)
            if not found:
                return None
            why_not.append(f"{each.name}: {'; '.join(found)}")
        return why_not

    def _nobody(self, why_not: list[str]) -> EnvironmentProblem:
        return EnvironmentProblem(
            "no worker of the cluster can run this: "
            + ("; ".join(_some(why_not)) or "it has none"),
            fix=f"start one that can with `tvmflow worker --scheduler {self._asked.scheduler}`; "
            "--wait-for-workers SECONDS waits for it",
        )

    def _order(self, call: StageCall) -> Order:
        inputs = {name: self._provide(path) for name, path in call.inputs.items()}
        fields = call._asdict()
        for name in ("inputs", "out", "work", "ledger", "locks"):
            del fields[name]
        contents = {name: digest for name, (digest, _, _) in inputs.items()}
        return Order(
            token=uuid.uuid4().hex,
            key=digest_of(["cluster", call.stage, call.settings, contents, self._here.tvmflow]),
            remote=self._url,
            timeout_s=self._asked.remote_timeout_s,
            call=fields,
            inputs=inputs,
            asks=matching.asks(call, self._here),
        )

    def _provide(self, path: str) -> tuple[str, int, str]:
        """See that the remote has a file; its digest, its size, and its path unless it is the store's."""
        store, size = self._asked.store, Path(path).stat().st_size
        digest = Path(path).name
        if path == store.blob(digest):
            self._tier.send_file(Content(digest, size), Path(path))
            return digest, size, ""
        digest = self._digests.digest(path)
        if not self._tier.writing.ask(lambda: self._tier.remote.has(digest, size)):
            self._send_copy(path, Content(digest, size))
        return digest, size, path

    def _send_copy(self, path: str, content: Content) -> None:
        """By way of a copy: what changes meanwhile must not get the name of what it was."""
        store = self._asked.store
        aside = Path(store.temporary())
        try:
            with disk_errors(store.root):
                shutil.copyfile(path, aside)
            if hash_file(str(aside)) != content.digest:
                raise EnvironmentProblem(
                    f"{path} was changed while the run read it", fix="run again"
                )
            self._tier.send_file(content, aside)
        finally:
            aside.unlink(missing_ok=True)

    def _ask(self, call: StageCall, order: Order, on_event: OnEvent) -> Answer | None:
        """Have it run, and pass on what is heard of it. None when the run was cancelled meanwhile."""
        watch = self._watched[order.token] = _Watch()
        future = self._client.submit(
            cluster_worker.run_stage,
            order._asdict(),
            key=f"tvmflow-{call.stage}-{order.token}",
            resources=order.asks,
            pure=False,
        )
        try:
            return self._follow(call, future, watch, on_event)
        finally:
            with contextlib.suppress(Exception):
                # frees a finished one; of a running one the worker stops the stage
                if future.done():
                    future.release()
                else:
                    future.cancel()
            del self._watched[order.token]

    def _follow(
        self, call: StageCall, future: Any, watch: _Watch, on_event: OnEvent
    ) -> Answer | None:
        look_at, told, deserted_at = time.monotonic(), 1, None
        while future.status == "pending":
            if self.cancelled:
                return None
            while watch.events:
                on_event(watch.events.popleft())
            if len(watch.workers) > _MOST_WORKERS:
                raise _lost_workers(watch.workers[:-1])
            if len(watch.workers) > told:
                told = len(watch.workers)
                text = f"worker {watch.workers[-2]} ended in the middle; {watch.workers[-1]} begins again"
                on_event({"event": "cluster", "message": text})
            if time.monotonic() > look_at:
                look_at = time.monotonic() + _LOOK_AT_WORKERS_S
                why_not = self._why_not(call)
                deserted_at = None if why_not is None else deserted_at or time.monotonic()
                patience = max(self._asked.wait_s, _COMING_BACK_S)
                if deserted_at and time.monotonic() - deserted_at > patience:
                    raise self._nobody(why_not or [])
            time.sleep(_LOOK_S)
        while watch.events:
            on_event(watch.events.popleft())
        if future.status == "finished":
            return Answer(**future.result(timeout=_CONNECT_S))
        if future.status == "error":
            raise self._failed(future.exception(timeout=_CONNECT_S), watch)
        if self.cancelled:
            return None
        raise self._lost()

    def _lost(self) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"the connection to the scheduler {self._asked.scheduler} was lost",
            fix="run again when it is back; what was finished is kept",
        )

    def _failed(self, error: Exception, watch: _Watch) -> EnvironmentProblem:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return _lost_workers(watch.workers)
        worker = watch.workers[-1] if watch.workers else "a worker"
        return EnvironmentProblem(
            f"worker {worker} could not run it: {type(error).__name__}: {error}",
            fix="look at what `tvmflow worker` printed there",
        )

    def _fetch(self, out: Path, name: str, content: Content) -> None:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise EnvironmentProblem(f"a worker gave a file the name {name!r}")
        path = out / inside
        with disk_errors(str(out)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not self._tier.download(content, path):
            raise EnvironmentProblem(
                f"{self._tier.remote.place} no longer has {name}, which a worker just sent there",
                fix="run again; a remote must keep contents for as long as a run lasts",
            )

    def _take_trials(self, call: StageCall) -> None:
        """What was measured there is worth as much here. The remote keeps it in any case."""
        from tvmflow.errors import StoreError
        from tvmflow.stores.remote import ledger

        here = ledger.measured_on(call.settings)
        if here is not None:
            with contextlib.suppress(RemoteProblem, StoreError, Interrupted):
                ledger.pull(self._tier, here)

    @contextlib.contextmanager
    def _remote_words(self) -> Iterator[None]:
        try:
            yield
        except RemoteProblem as problem:
            raise EnvironmentProblem(
                f"the remote {self._tier.remote.place}: {problem}",
                fix="--executor dask needs a remote that this machine and every worker can reach and may write to",
            ) from problem

    # ------------------------------------------------------------ the end

    def cancel(self) -> None:
        """Stop every stage that runs, and let none start."""
        # may be called by a signal in the middle of anything: those who wait for a stage see it
        self.cancelled = True

    def close(self) -> None:
        """Let go of the cluster; stages that still run there for this run are stopped."""
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close(timeout=5)
        self._tier.finish(0.0)


def check_tls(address: str, role: str) -> None:
    """Raises EnvironmentProblem when an address wants certificates, and dask knows of none for this role."""
    from distributed import Security

    if not address.startswith("tls://"):
        return
    try:
        context = Security().get_connection_args(role).get("ssl_context")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"dask cannot use the certificates that its configuration names: {error}",
            fix="see docs/teams.md",
        ) from error
    if context is None:
        raise EnvironmentProblem(
            f"{address} needs certificates, and dask's configuration names none",
            fix="set DASK_DISTRIBUTED__COMM__TLS__CA_FILE and, ending in __CERT and __KEY, "
            f"DASK_DISTRIBUTED__COMM__TLS__{role.upper()}__…: see docs/teams.md",
        )


def _lost_workers(names: list[str]) -> EnvironmentProblem:
    lost = ", ".join(names)
    return EnvironmentProblem(
        f"{len(names)} workers ended while they ran it: {lost}",
        fix="look at what `tvmflow worker` printed there, and whether those machines ran out of memory",
    )


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
