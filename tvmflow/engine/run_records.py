"""Run records: `history/ID.json` in the store, for each run that did something; and logs of stages.

An id is the run's start time as seven characters of Crockford's base 32, so ids sort by time.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import logging
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from tvmflow.core import packages
from tvmflow.core.codec import Mismatch, from_json, to_json
from tvmflow.core.documents import Unreadable, quote, read_file, read_json
from tvmflow.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_KILLED,
    EXIT_OK,
    EXIT_UNREAD,
    TvmflowError,
    UsageError,
)
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, excerpt, names_text, printable
from tvmflow.core.project import shortest_path
from tvmflow.core.termination import signal_name
from tvmflow.core.text import nearest
from tvmflow.core.types import Json
from tvmflow.core.version import VERSION
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.stage_runs import log_path
from tvmflow.executors import Event
from tvmflow.planning.environment import without_password
from tvmflow.provenance import read_source_state
from tvmflow.store.local import LocalStore
from tvmflow.targets.host import read_host

if TYPE_CHECKING:
    from tvmflow.engine.driver import Observer

FOLDER: Final = "history"
LATEST: Final = "latest"

_FORMAT: Final = 1
_SUFFIX: Final = ".json"
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_LENGTH: Final = 7
# The epoch of ids is 2025-01-01; seven characters last until 2059.
_EPOCH_S: Final = 1_735_689_600
_TICKS_PER_SECOND: Final = 32
# A recipe is a few kB; only the digest of a larger file is recorded.
_MAX_TEXT: Final = 256 << 10
# While a run is in progress, its record is rewritten at most this often, and for at most this share of the time.
_INTERVAL_S: Final = 1.0
_SHARE: Final = 0.02
_KEPT: Final = (
    "finished stages and measured trials are kept, and the same command continues from here"
)
_UNFINISHED: Final = f"the run was killed, or has not ended yet: {_KEPT}"

_log = logging.getLogger(__name__)


class Machine(NamedTuple):
    """A machine that ran stages: its name (such as `linux-x86_64`), CPU model, and usable CPUs."""

    name: str
    platform: str
    cpu: str
    cpus: int


class SourceText(NamedTuple):
    """A user's file: `recipe`, `pipeline` or `lock`; the text of a large file is not recorded."""

    kind: str
    path: str
    sha256: str
    text: str


class RecipeSource(NamedTuple):
    """The files of a planned recipe or variant, and the commit that was checked out.

    `clean` says whether the files equal those of the commit: `yes`, `no`, or why this is unknown.
    """

    recipe: str
    variant: str
    path: str
    pipeline: str
    commit: str
    clean: str


class RunRecord(NamedTuple):
    """The record of a run that did something.

    The command line has no passwords. `sources` lists each of the user's files once, `builds` the results by recipe and
    target, `damage` the paths of damaged files in the store. `release` is None if the run makes no release, `message`
    is empty unless an error ended the run, and `timeline` is a `Timeline` as JSON.
    """

    id: str
    argv: tuple[str, ...]
    folder: str
    began_s: float
    seconds: float
    exit_code: int
    tvmflow: str
    machine: Machine
    recipes: tuple[RecipeSource, ...]
    sources: tuple[SourceText, ...]
    stages: tuple[StageReport, ...]
    builds: tuple[Build, ...]
    delivered: tuple[str, ...]
    damage: tuple[str, ...]
    release: Json = None
    message: str = ""
    timeline: Json = None

    @property
    def report(self) -> RunReport:
        """The run's report, as far as the record contains it."""
        return RunReport(self.stages, self.delivered, self.damage, self.seconds)

    @property
    def end(self) -> str:
        """How the run ended: `ok`, `stopped`, `unfinished`, or its exit code."""
        if self.exit_code == EXIT_OK:
            return "ok"
        if self.exit_code == EXIT_KILLED:
            return "unfinished"
        return "stopped" if signal_name(self.exit_code) else f"exit {self.exit_code}"

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON."""
        return {"format": _FORMAT, **to_json(self._asdict())}

    @classmethod
    def from_json(cls, value: Json) -> RunRecord:
        """Return the record that `to_json` wrote, or raise Unreadable."""
        if isinstance(value, dict) and value.get("format", _FORMAT) != _FORMAT:
            raise Unreadable("it was written by another version of tvmflow")
        try:
            return from_json(cls, value)
        except Mismatch as error:
            raise Unreadable(f"it is not a record of a run ({error})") from error


class Recording:
    """The record of a run in progress; the run fills in the fields.

    It is rewritten as stages end, marked as unfinished, so that a record exists even if the process is killed.
    `did_more` says that the run did something besides stages, such as a release.
    """

    def __init__(self, store: LocalStore, argv: Sequence[str]) -> None:
        self._store, self._argv = store, tuple(argv)
        self._began_s, self._started = time.time(), time.monotonic()
        self.report: RunReport | None = None
        self.exit_code = EXIT_BUG
        self.release: Json = None
        self.lock: str | None = None
        self.did_more = False
        self.message = self._id = ""
        self._make_report: Callable[[], RunReport] | None = None
        self._next_s = float("-inf")
        self._lock = threading.Lock()

    def note_progress(self, make_report: Callable[[], RunReport]) -> None:
        """Write the record so far, marked as unfinished. Thread-safe."""
        with self._lock:
            self._make_report = make_report
            began_s = time.monotonic()
            if began_s < self._next_s:
                return
            with contextlib.suppress(OSError, TvmflowError):
                self._write(make_report(), EXIT_KILLED, _UNFINISHED)
            now_s = time.monotonic()
            self._next_s = now_s + max(_INTERVAL_S, (now_s - began_s) / _SHARE)

    def save(self) -> None:
        """Write the record if the run did something; log a warning if it cannot be written."""
        report = self.report or (self._make_report and self._make_report())
        try:
            if report is not None and (
                self.did_more
                or self.exit_code != EXIT_OK
                or report.damage
                or any(stage.outcome != "hit" for stage in report.stages)
            ):
                name = signal_name(self.exit_code)
                stopped = f"stopped by {name}: {_KEPT}" if name else ""
                self._write(report, self.exit_code, self.message or stopped)
            elif self._id:
                _path(self._store, self._id).unlink()
        except (OSError, TvmflowError) as error:
            text = error.message if isinstance(error, TvmflowError) else str(error)
            _log.warning("the record of this run cannot be written: %s", text)

    def _write(self, report: RunReport, exit_code: int, message: str) -> None:
        self._id, host = self._id or _choose_id(self._store, self._began_s), read_host()
        record = RunRecord(
            id=self._id,
            argv=tuple(map(without_password, self._argv)),
            folder=str(Path.cwd()),
            began_s=self._began_s,
            seconds=time.monotonic() - self._started,
            exit_code=exit_code,
            tvmflow=VERSION,
            machine=Machine(platform.node(), packages.host_platform(), host.model, host.cores),
            recipes=tuple(_list_recipes(report)),
            sources=tuple(_list_sources(report, self.lock)),
            stages=tuple(_with_log(stage, self._store) for stage in report.stages),
            builds=list_builds(report),
            delivered=report.delivered,
            damage=report.damage,
            release=self.release,
            message=message,
            timeline=report.timeline,
        )
        content = json.dumps(record.to_json()).encode()
        self._store.write_file(str(_path(self._store, self._id)), content)


def _with_log(stage: StageReport, store: LocalStore) -> StageReport:
    log = log_path(store, stage.recipe, stage.label)
    was_executed = stage.outcome not in ("hit", "fetched", "skipped")
    return stage._replace(log=str(log)) if was_executed and log.is_file() else stage


@contextlib.contextmanager
def record_run(store: LocalStore, argv: Sequence[str]) -> Iterator[Recording]:
    """Yield the record of a run, and write it however the block ends."""
    recording = Recording(store, argv)
    try:
        yield recording
    except TvmflowError as error:
        recording.exit_code, recording.message = error.exit_code, error.message
        raise
    except KeyboardInterrupt:
        recording.exit_code = EXIT_INTERRUPTED
        raise
    except BrokenPipeError:
        recording.exit_code = EXIT_UNREAD
        raise
    finally:
        recording.save()


def _choose_id(store: LocalStore, began_s: float) -> str:
    """Return the run's id; it sorts after earlier ids even if the clock was set back."""
    ticks = max(0, int((began_s - _EPOCH_S) * _TICKS_PER_SECOND))
    earlier = [name for name in list_ids(store) if set(name) <= set(_DIGITS)]
    if earlier:
        digits = enumerate(reversed(earlier[-1]))
        number = sum(_DIGITS.index(digit) * len(_DIGITS) ** power for power, digit in digits)
        ticks = max(ticks, number + 1)
    while _path(store, _encode(ticks)).exists():
        ticks += 1
    return _encode(ticks)


def _encode(number: int) -> str:
    base = len(_DIGITS)
    digits = [_DIGITS[number // base**power % base] for power in reversed(range(_ID_LENGTH))]
    return "".join(digits)


def recorded_path(path: str | Path) -> Path:
    """Return the path of a file as records have it, with symbolic links in its folder resolved."""
    return Path(path).parent.resolve() / Path(path).name


def _list_recipes(report: RunReport) -> Iterator[RecipeSource]:
    for origin in report.origins:
        state = read_source_state(origin)
        yield RecipeSource(
            recipe=origin.recipe,
            variant=origin.variant,
            path=str(recorded_path(origin.path)),
            pipeline=str(recorded_path(origin.pipeline)),
            commit=state.commit if state else "",
            clean=state.clean if state else "",
        )


def _list_sources(report: RunReport, lock: str | None) -> Iterator[SourceText]:
    files = {recorded_path(origin.path): "recipe" for origin in report.origins}
    files |= {recorded_path(origin.pipeline): "pipeline" for origin in report.origins}
    files |= {recorded_path(lock): "lock"} if lock else {}
    for path, kind in files.items():
        with contextlib.suppress(OSError):
            is_small = path.stat().st_size <= _MAX_TEXT
            text = path.read_text(encoding="utf-8", errors="replace") if is_small else ""
            yield SourceText(kind, str(path), hash_file(path), text)


# ---------------------------------------------------------------- reading


class RunHistory(NamedTuple):
    """The records of a store: runs, newest first, and unreadable records with the reason."""

    runs: tuple[RunRecord, ...]
    damaged: tuple[tuple[str, str], ...]


def list_runs(store: LocalStore, limit: int | None = None) -> RunHistory:
    """Return the last runs of a store, newest first; the store need not exist."""
    runs: list[RunRecord] = []
    damaged: list[tuple[str, str]] = []
    for name in reversed(list_ids(store)):
        if limit is not None and len(runs) == limit:
            break
        try:
            runs.append(_read(store, name))
        except Unreadable as error:
            damaged.append((str(_path(store, name)), str(error)))
    return RunHistory(tuple(runs), tuple(damaged))


def list_ids(store: LocalStore) -> list[str]:
    """Return the ids of all runs of a store, oldest first."""
    names = store.notes.list(FOLDER)
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def read_run(store: LocalStore, name: str) -> RunRecord:
    """Return the record of a run: its id, a unique prefix, `latest`, or `latest~N` for the N-th before.

    Raises:
        UsageError: for an unknown run, an ambiguous prefix, or a damaged record.
    """
    run = _find_id(list_ids(store), name, store)
    try:
        return _read(store, run)
    except Unreadable as error:
        raise UsageError(
            f"the record of run {run} cannot be read: {_path(store, run)}: {error}",
            fix="remove the file; `tvmflow runs` lists the others",
        ) from error


def may_name_run(store: LocalStore, name: str) -> bool:
    """Return whether a name can refer to a run: an id, a prefix of one, or `latest~N`."""
    is_counted = name.partition("~")[0] == LATEST
    return is_counted or any(run.startswith(name.lower()) for run in list_ids(store))


def _find_id(names: Sequence[str], name: str, store: LocalStore) -> str:
    fix = "`tvmflow runs` lists the runs"
    if not names:
        fix = "a run that does something leaves one; `--store DIR` names another store"
        raise UsageError(f"{shortest_path(store.root)} has no record of a run", fix=fix)
    latest, _, steps = name.partition("~")
    if latest == LATEST and (steps.isdecimal() or name == LATEST):
        index = int(steps or 0)
        if index < len(names):
            return names[-1 - index]
        text = f"run {name}: the store has records of {count_text(len(names), 'run')} only"
        raise UsageError(text, fix=fix)
    matches = [candidate for candidate in names if name and candidate.startswith(name.lower())]
    if len(matches) == 1:
        return matches[0]
    text = f"there is no run '{excerpt(name)}'"
    if matches:
        text = f"'{name}' is the beginning of {len(matches)} runs: {', '.join(matches[:5])}"
    raise UsageError(text, fix=fix)


def _read(store: LocalStore, name: str) -> RunRecord:
    run = RunRecord.from_json(read_json(read_file(_path(store, name))))
    if run.id != name:
        raise Unreadable(f"it is the record of run {quote(run.id)}")
    return run


def _path(store: LocalStore, name: str) -> Path:
    return Path(store.notes.path(FOLDER, f"{name}{_SUFFIX}"))


def is_record(content: bytes, name: str) -> bool:
    """Return whether this is the undamaged content of a record of any version."""
    try:
        value: Mapping[str, Json] = read_json(content)
        return isinstance(value, dict) and "format" in value and value.get("id", name) == name
    except Unreadable:
        return False


# ---------------------------------------------------------------- logs of stages
# One file for each stage of each recipe, with the log of its last execution.

_LOG_SUFFIX: Final = ".log"
_POLL_S: Final = 0.2
_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class StageLog(NamedTuple):
    """The log of a stage: stage, file, size, and last modification (seconds since 1970)."""

    stage_id: str
    path: str
    bytes: int
    written_s: float


def find_logs(
    store: LocalStore, stage: str = "", run: RunRecord | None = None, recipes: Collection[str] = ()
) -> list[StageLog]:
    """Return the logs of a stage, the newest at the end.

    `stage` is `STAGE` or `STAGE/TARGET`, with or without `RECIPE:`; empty for all stages. `run` and `recipes` select
    logs of a run or of some recipes. The store need not exist.

    Raises:
        UsageError: There is no such log, or a later run has replaced it.
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
        fix = "a stage that is executed leaves one; `--store DIR` names another store"
        raise UsageError(f"{shortest_path(store.root)} has no log of a stage{of}", fix=fix)
    names = [log.stage_id for log in logs]
    labels = [name.partition(":")[2] for name in names]
    candidates = nearest(stage, {*labels, *(label.partition("/")[0] for label in labels)})
    hint = f"did you mean '{candidates[0]}'? " if candidates else ""
    raise UsageError(
        f"there is no log of a stage '{stage}'", fix=f"{hint}there are: {names_text(names)}"
    )


def _select_run(logs: list[StageLog], run: RunRecord, stage: str) -> list[StageLog]:
    """Return the logs of a run that no later run has replaced."""
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
    for path in Path(store.root, "logs").glob(f"*/*{_LOG_SUFFIX}"):
        try:
            status = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            # Skipped, because reading a pipe would block; `tvmflow cache verify` reports it.
            continue
        label = path.name.removesuffix(_LOG_SUFFIX).replace("+", "/")
        stage_id = f"{path.parent.name}:{label}"
        yield StageLog(stage_id, shortest_path(str(path)), status.st_size, status.st_mtime)


def _matches(stage_id: str, stage: str) -> bool:
    name = stage_id if ":" in stage else stage_id.partition(":")[2]
    return stage in (name, name.partition("/")[0])


def follow(path: str | Path, is_written: Callable[[], bool]) -> Iterator[str]:
    """Yield a log's text, then new text while its writer may run; a replaced file is read from its start.

    The file may not exist yet.
    """
    decoder, position, inode = _new_decoder(errors="replace"), 0, 0
    while True:
        # Check this before reading, so that text written just before the end is not missed.
        is_complete, content = not is_written(), b""
        with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != inode or status.st_size < position:
                decoder, position, inode = _new_decoder(errors="replace"), 0, status.st_ino
            stream.seek(position)
            content = stream.read()
            position += len(content)
        if text := decoder.decode(content, final=is_complete):
            yield text
        elif is_complete:
            return
        else:
            time.sleep(_POLL_S)


class WorkerLogs:
    """An observer that copies the logs of running stages to a stream, each line with its stage."""

    def __init__(self, stream: TextIO, observer: Observer) -> None:
        self._stream, self._observer = stream, observer
        self._threads: dict[str, threading.Thread] = {}
        self.interrupted: Callable[[], str] = observer.interrupted

    def event(self, event: Event) -> None:
        """Pass on an event; follow the log of a stage that has started, until it has ended."""
        stage_id = event.get("stage_id", "")
        if event["event"] == "stage_started":
            copy = functools.partial(self._copy, stage_id, event["log"])
            thread = self._threads[stage_id] = threading.Thread(target=copy, daemon=True)
            thread.start()
        elif event["event"] == "stage_finished" and stage_id in self._threads:
            self._threads.pop(stage_id).join()
        self._observer.event(event)

    def close(self) -> None:
        """Copy what is left."""
        while self._threads:
            self._threads.popitem()[1].join()

    def _copy(self, stage_id: str, path: str) -> None:
        rest = ""
        for text in follow(path, lambda: stage_id in self._threads):
            *lines, rest = (rest + text).split("\n")
            self._write(stage_id, lines)
        self._write(stage_id, [rest] if rest else [])

    def _write(self, stage_id: str, lines: Sequence[str]) -> None:
        shown = (printable(line.rstrip("\r").expandtabs()) for line in lines)
        self._stream.write("".join(f"{stage_id} | {line}\n" for line in shown))
        self._stream.flush()
