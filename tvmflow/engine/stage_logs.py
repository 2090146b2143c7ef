"""The logs of stages: one file for each stage of each recipe, of its last execution."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import names_text, printable
from tvmflow.core.project import shortest_path
from tvmflow.core.text import nearest
from tvmflow.engine.run_records import RunRecord
from tvmflow.executors import Event
from tvmflow.store.local import LocalStore

_SUFFIX: Final = ".log"
_POLL_S: Final = 0.2


class StageLog(NamedTuple):
    """The log of a stage: stage, file, size, and when it was last written (seconds since 1970)."""

    stage_id: str
    path: str
    bytes: int
    written_s: float


def find_logs(
    store: LocalStore, stage: str = "", run: RunRecord | None = None, recipes: Collection[str] = ()
) -> list[StageLog]:
    """Return the logs of a stage, the one that was written last at the end.

    The stage is `STAGE` or `STAGE/TARGET`, each also with `RECIPE:`; empty for all. Logs are only those of a run or
    of some recipes, if these are given. The store may not exist.

    Raises:
        UsageError: There is none, or a later run has replaced it.
    """
    logs = sorted(_list_logs(store), key=lambda log: log.written_s)
    if recipes:
        logs = [log for log in logs if log.stage_id.partition(":")[0] in recipes]
    if run is not None:
        logs = _select_run(logs, run, stage)
    selected = [log for log in logs if not stage or _matches(log.stage_id, stage)]
    if selected:
        return selected
    if not logs:
        of = f" of {names_text(sorted(recipes))}" if recipes else ""
        raise UsageError(
            f"{shortest_path(store.root)} has no log of a stage{of}",
            fix="a stage that is executed leaves one; `--store DIR` names another store",
        )
    names = [log.stage_id for log in logs]
    labels = [name.partition(":")[2] for name in names]
    candidates = nearest(stage, {*labels, *(label.partition("/")[0] for label in labels)})
    hint = f"did you mean '{candidates[0]}'? " if candidates else ""
    raise UsageError(
        f"there is no log of a stage '{stage}'", fix=f"{hint}there are: {names_text(names)}"
    )


def _select_run(logs: list[StageLog], run: RunRecord, stage: str) -> list[StageLog]:
    """Return the logs that a run left, as far as no later one has replaced them."""
    executed = {entry.stage_id for entry in run.stages if entry.log}
    own = [log for log in logs if log.stage_id in executed]
    kept = [log for log in own if log.written_s <= run.began_s + run.seconds + 1]
    named = [log for log in own if not stage or _matches(log.stage_id, stage)]
    if named and not set(named) & set(kept):
        raise UsageError(
            f"a later run has replaced the log of {named[0].stage_id} of run {run.id}",
            fix="without --run, the log of its last execution is shown",
        )
    if not kept:
        raise UsageError(
            f"run {run.id} executed no stage that left a log", fix="`tvmflow logs` lists all logs"
        )
    return kept


def _list_logs(store: LocalStore) -> Iterator[StageLog]:
    for path in Path(store.root, "logs").glob(f"*/*{_SUFFIX}"):
        try:
            status = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            # `tvmflow cache verify` names it; whoever reads a pipe waits
            continue
        label = path.name.removesuffix(_SUFFIX).replace("+", "/")
        stage_id = f"{path.parent.name}:{label}"
        yield StageLog(stage_id, shortest_path(str(path)), status.st_size, status.st_mtime)


def _matches(stage_id: str, stage: str) -> bool:
    name = stage_id if ":" in stage else stage_id.partition(":")[2]
    return stage in (name, name.partition("/")[0])


def read_text(log: StageLog) -> str:
    """Return the whole text of a log."""
    return Path(log.path).read_text(encoding="utf-8", errors="replace")


def follow(log: StageLog, is_written: Callable[[], bool]) -> Iterator[str]:
    """Yield the text of a log, and then what is written to it; a new file is read from its beginning.

    Args:
        log: The log.
        is_written: Returns whether something may still be written to it; when it does not, the rest ends the text.
    """
    while True:
        with Path(log.path).open(encoding="utf-8", errors="replace") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            while True:
                # asked first, so that nothing is missed that is written before the end
                is_complete = not is_written()
                if text := stream.read():
                    yield text
                elif _was_replaced(log.path, inode, stream.tell()):
                    break
                elif is_complete:
                    return
                else:
                    time.sleep(_POLL_S)


def _was_replaced(path: str, inode: int, position: int) -> bool:
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        return False
    return status.st_ino != inode or status.st_size < position


# ---------------------------------------------------------------- worker logs
# The logs of running stages, copied to a stream while their workers write them.


class WorkerLogs:
    """Copies the lines of the logs of all running stages, each with the name of its stage."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._logs: dict[str, _GrowingLog] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="worker-logs", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        """Note that a stage has started, or copy the rest of its log when it has ended."""
        with self._lock:
            if event["event"] == "stage_started":
                self._logs[event["stage_id"]] = _GrowingLog(Path(event["log"]))
            elif event["event"] == "stage_finished" and event["stage_id"] in self._logs:
                log = self._logs.pop(event["stage_id"])
                self._write(event["stage_id"], [*log.read_lines(), *log.read_rest()])

    def close(self) -> None:
        """Stop copying."""
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            with self._lock:
                for stage_id, log in self._logs.items():
                    self._write(stage_id, log.read_lines())

    def _write(self, stage_id: str, lines: list[str]) -> None:
        self._stream.write("".join(f"{stage_id} | {printable(line)}\n" for line in lines))
        self._stream.flush()


class _GrowingLog:
    """A log and how much of it was read; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                content = stream.read()
        except FileNotFoundError:
            return []
        self._position += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [_decode(line) for line in lines]

    def read_rest(self) -> list[str]:
        """Return what stands behind the last complete line, if anything."""
        return [_decode(self._rest)] if self._rest else []


def _decode(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").expandtabs()
