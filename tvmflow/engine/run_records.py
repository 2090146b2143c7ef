"""Run records: what each run did, kept in the store as `history/ID.json`.

A run that was up to date leaves no record. An id is the time at which the run began, so that ids
sort by it: seven characters of Crockford's base 32, which leaves out those that look alike.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from tvmflow.core.formatting import count_text, excerpt
from tvmflow.core.project import shortest_path
from tvmflow.core.termination import signal_name
from tvmflow.core.types import Json
from tvmflow.core.version import VERSION
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.stage_runs import log_path
from tvmflow.planning.environment import without_password
from tvmflow.provenance.delivered import read_source_state
from tvmflow.store.local import LocalStore
from tvmflow.targets.host import read_host

FOLDER: Final = "history"
LATEST: Final = "latest"

_FORMAT: Final = 1
_SUFFIX: Final = ".json"
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_LENGTH: Final = 7
# 2025-01-01; the ids last until 2059.
_EPOCH_S: Final = 1_735_689_600
_TICKS_PER_SECOND: Final = 32
# A recipe is some kB; what is larger is recorded by its digest alone.
_MAX_TEXT: Final = 256 << 10
# The record of a run in progress is written again after this time, and takes at most this share of it.
_INTERVAL_S: Final = 1.0
_SHARE: Final = 0.02
_UNFINISHED: Final = (
    "the run was killed, or has not ended yet: finished stages and measured trials are kept, "
    "and the same command continues from here"
)

_log = logging.getLogger(__name__)


class Machine(NamedTuple):
    """A machine that ran stages: name, `linux-x86_64`, the model of its CPU, and its usable CPUs."""

    name: str
    platform: str
    cpu: str
    cpus: int


class SourceText(NamedTuple):
    """A file that a user wrote: `recipe`, `pipeline` or `lock`, and its content if not too large."""

    kind: str
    path: str
    sha256: str
    text: str


class RecipeSource(NamedTuple):
    """The files of a planned recipe or variant, and the commit that was checked out in their repository.

    `clean` says whether the files were as in that commit: `yes`, `no`, or why that is unknown.
    """

    recipe: str
    variant: str
    path: str
    pipeline: str
    commit: str
    clean: str


class RunRecord(NamedTuple):
    """A run that did something.

    The command line is without passwords; `sources` has the files of the recipes, each once; `builds` the
    results for each recipe and target; `damage` the paths of damaged files in the store. `release` is None
    for a run that makes none, and `message` is empty unless an error ended the run. `timeline` is a
    `Timeline` as JSON, which only those read who need it; None in records of earlier versions.
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
        """The report of the run, as far as the record has it."""
        return RunReport(self.stages, self.delivered, self.damage, self.seconds)

    @property
    def end(self) -> str:
        """The end of the run in one or two words: `ok`, `stopped`, `unfinished`, or its exit code."""
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
        """Return the record that `to_json` wrote.

        Raises:
            Unreadable: It is none, or of a later version.
        """
        if isinstance(value, dict) and value.get("format", _FORMAT) != _FORMAT:
            raise Unreadable("it was written by another version of tvmflow")
        try:
            return from_json(cls, value)
        except Mismatch as error:
            raise Unreadable(f"it is not a record of a run ({error})") from error


# ---------------------------------------------------------------- writing


class Recording:
    """The record of a run in progress; whoever runs fills in what is known.

    Whatever ends the process, the record is there: it is written again as stages end, and says that the run is
    unfinished. `did_more` means something besides stages, such as a release.
    """

    def __init__(self, store: LocalStore, argv: Sequence[str]) -> None:
        self._store = store
        self._argv = tuple(argv)
        self._began_s = time.time()
        self._started = time.monotonic()
        self.report: RunReport | None = None
        self.exit_code = EXIT_BUG
        self.release: Json = None
        self.lock: str | None = None
        self.did_more = False
        self.message = ""
        self._id = ""
        self._make_report: Callable[[], RunReport] | None = None
        self._next_s = float("-inf")
        self._lock = threading.Lock()

    def note_progress(self, make_report: Callable[[], RunReport]) -> None:
        """Write what is known of the run so far, as of a run that was killed. Called from several threads."""
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
        """Write the record, if the run did something; a record that cannot be written is reported."""
        report = self.report or (self._make_report and self._make_report())
        try:
            if report is not None and self._did_something(report):
                self._write(report, self.exit_code, self.message or _describe_stop(self.exit_code))
            elif self._id:
                _path(self._store, self._id).unlink()
        except (OSError, TvmflowError) as error:
            text = error.message if isinstance(error, TvmflowError) else str(error)
            _log.warning("the record of this run cannot be written: %s", text)

    def _write(self, report: RunReport, exit_code: int, message: str) -> None:
        self._id = self._id or _choose_id(self._store, self._began_s)
        record = self._make(self._id, report, exit_code, message)
        content = json.dumps(record.to_json()).encode()
        self._store.write_file(str(_path(self._store, self._id)), content)

    def _did_something(self, report: RunReport) -> bool:
        is_failed = self.exit_code != EXIT_OK or bool(report.damage)
        return self.did_more or is_failed or any(stage.outcome != "hit" for stage in report.stages)

    def _make(self, name: str, report: RunReport, exit_code: int, message: str) -> RunRecord:
        host = read_host()
        return RunRecord(
            id=name,
            argv=tuple(map(without_password, self._argv)),
            folder=str(Path.cwd()),
            began_s=self._began_s,
            seconds=time.monotonic() - self._started,
            exit_code=exit_code,
            tvmflow=VERSION,
            machine=Machine(platform.node(), packages.host_platform(), host.model, host.cores),
            recipes=tuple(_list_recipes(report)),
            sources=tuple(_list_sources(report, self.lock)),
            stages=tuple(self._with_log(stage) for stage in report.stages),
            builds=list_builds(report),
            delivered=report.delivered,
            damage=report.damage,
            release=self.release,
            message=message,
            timeline=report.timeline,
        )

    def _with_log(self, stage: StageReport) -> StageReport:
        log = log_path(self._store, stage.recipe, stage.label)
        was_executed = stage.outcome not in ("hit", "fetched", "skipped")
        return stage._replace(log=str(log)) if was_executed and log.is_file() else stage


@contextlib.contextmanager
def record_run(store: LocalStore, argv: Sequence[str]) -> Iterator[Recording]:
    """Give the record of a run to be filled in, and write it when the block ends, however it ends."""
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


def _describe_stop(exit_code: int) -> str:
    """Return what a signal left of a run; empty for a run that no signal ended."""
    name = signal_name(exit_code)
    kept = "finished stages and measured trials are kept, and the same command continues from here"
    return f"stopped by {name}: {kept}" if name else ""


def _choose_id(store: LocalStore, began_s: float) -> str:
    """Return the id of the run; it sorts after those of earlier runs, also when the clock was set back."""
    ticks = max(0, int((began_s - _EPOCH_S) * _TICKS_PER_SECOND))
    earlier = [name for name in list_ids(store) if set(name) <= set(_DIGITS)]
    if earlier:
        ticks = max(ticks, _decode(earlier[-1]) + 1)
    while _path(store, _encode(ticks)).exists():
        ticks += 1
    return _encode(ticks)


def _decode(name: str) -> int:
    number = 0
    for digit in name:
        number = number * len(_DIGITS) + _DIGITS.index(digit)
    return number


def _encode(number: int) -> str:
    base = len(_DIGITS)
    digits = [_DIGITS[number // base**place % base] for place in reversed(range(_ID_LENGTH))]
    return "".join(digits)


def recorded_path(path: str | Path) -> Path:
    """Return a file's path as records have it: the same one by whatever way its folder was named."""
    return Path(path).parent.resolve() / Path(path).name


def _list_recipes(report: RunReport) -> Iterator[RecipeSource]:
    for origin in report.origins:
        state = read_source_state(origin)
        commit, clean = (state.commit, state.clean) if state else ("", "")
        path, pipeline = (str(recorded_path(name)) for name in (origin.path, origin.pipeline))
        yield RecipeSource(
            recipe=origin.recipe,
            variant=origin.variant,
            path=path,
            pipeline=pipeline,
            commit=commit,
            clean=clean,
        )


def _list_sources(report: RunReport, lock: str | None) -> Iterator[SourceText]:
    """Yield every recipe, pipeline and lock file of a run once; one that has disappeared is left out."""
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
    """The records of a store.

    Attributes:
        runs: The runs, the last one first.
        damaged: The path of each record that cannot be read, with the reason.
    """

    runs: tuple[RunRecord, ...]
    damaged: tuple[tuple[str, str], ...]


def list_runs(store: LocalStore, limit: int | None = None) -> RunHistory:
    """Return the last runs of a store, the last one first.

    The store may not exist.
    """
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
    """Return the ids of all runs of a store, in the order in which they began."""
    names = store.notes.list(FOLDER)
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


def read_run(store: LocalStore, name: str) -> RunRecord:
    """Return the record of a run.

    The name is its id or the beginning of it, `latest`, or `latest~N` for the N-th before.

    Raises:
        UsageError: when there is no such run, several have this beginning, or its record is damaged.
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
    """Return whether a name is that of a run, the beginning of one, or counts from the latest."""
    is_counted = name.partition("~")[0] == LATEST
    return is_counted or any(run.startswith(name.lower()) for run in list_ids(store))


def _find_id(names: Sequence[str], name: str, store: LocalStore) -> str:
    fix = "`tvmflow runs` lists the runs"
    if not names:
        raise UsageError(
            f"{shortest_path(store.root)} has no record of a run",
            fix="a run that does something leaves one; `--store DIR` names another store",
        )
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
    """Return whether this is the undamaged content of the record of a run, of this version or another."""
    try:
        value: Mapping[str, Json] = read_json(content)
        return isinstance(value, dict) and "format" in value and value.get("id", name) == name
    except Unreadable:
        return False
