"""The doit adapter: runs tasks in dependency order. Only this module imports doit.

doit orders tasks and runs them in threads. It remembers nothing between runs (the store does) and prints nothing.
`api.dodo_file` is for doit's own command line.
"""

from __future__ import annotations

import contextlib
import dbm
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from doit import plugin
from doit.cmd_base import TaskLoader2
from doit.dependency import DbmDB, JSONCodec, JsonDB, MD5Checker
from doit.doit_cmd import DoitMain
from doit.exceptions import InvalidDodoFile, TaskFailed, UnmetDependency
from doit.task import Task

from tvmflow.core.errors import InternalError, TvmflowError
from tvmflow.store.disk import Notes

_log = logging.getLogger(__name__)

# doit's exit status if it could not run the tasks at all.
_DOIT_FAILED = 3
# The folder of notes about tasks that are in doit's database.
_NOTES: Final = "doit"


class EngineTask(NamedTuple):
    """One task: its function, and the names of the tasks that must succeed before it.

    `run` returns the reason of a failure, or an empty string. `is_up_to_date` is called in the main thread once all
    `dependencies` have succeeded.
    """

    name: str
    run: Callable[[], str]
    is_up_to_date: Callable[[], bool]
    dependencies: tuple[str, ...]

    def to_doit(self) -> dict[str, Any]:
        """Return the task as a dictionary, as dodo files define tasks."""

        def run() -> TaskFailed | None:
            failure = self.run()
            return TaskFailed(failure) if failure else None

        return {
            "name": self.name,
            "actions": [(run,)],
            "task_dep": list(self.dependencies),
            "uptodate": [self.is_up_to_date],
            # doit's output capturing fails if tasks run in threads.
            "io": {"capture": False},
        }


def run_tasks(tasks: Sequence[EngineTask], *, jobs: int, keep_going: bool) -> None:
    """Run the tasks that are not up to date, in topological order (doit is slow with other orders).

    Raises:
        Exception: the first exception raised by a task; a failure is not an exception, because `run` returns it.
        InternalError: when doit cannot run the tasks.
    """
    errors: list[Exception] = []
    reporter = _ProblemReporter()
    loader = _Loader(
        [Task(**_stop_at_exception(task, errors).to_doit()) for task in tasks],
        {
            "backend": "memory",
            "reporter": reporter,
            "verbosity": 0,
            "num_process": jobs if jobs > 1 else 0,
            "par_type": "thread",
            "continue": keep_going,
        },
    )
    backend = {"memory": f"{__name__}:{_MemoryDatabase.__name__}"}
    main = DoitMain(loader, config_filenames=(), extra_config={"BACKEND": backend})
    with _without_plugins():
        status = main.run(["run"])
    _log.debug("doit ran %d tasks in %d threads: status %s", len(tasks), jobs, status)
    if errors:
        raise errors[0]
    if reporter.problems or status == _DOIT_FAILED:
        raise InternalError(f"doit could not run the plan: {'; '.join(reporter.problems)}")


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep doit from searching for plug-ins, because it reads the metadata of all packages three times."""
    before = plugin.entry_points_impl
    plugin.entry_points_impl = lambda: lambda **_: ()
    try:
        yield
    finally:
        plugin.entry_points_impl = before


def find_missing_tasks(database: str, names: Sequence[str], notes: Notes) -> frozenset[str]:
    """Return the tasks that `doit forget` removed from doit's database. Call this before doit opens it.

    All tasks are entered into the database, and noted in the store. So a task with a note but without an entry was
    forgotten. Without a database, nothing was forgotten.
    """
    if dbm.whichdb(database) is None:
        for name in notes.list(_NOTES):
            notes.remove(_NOTES, name)
    entries = DbmDB(database, JSONCodec())
    forgotten = set()
    for name in names:
        if notes.read(_NOTES, name) is None:
            if not entries.in_(name):
                entries.set(name, "checker:", MD5Checker.__name__)
            notes.write("", _NOTES, name)
        elif not entries.in_(name):
            forgotten.add(name)
    entries.dump()
    return frozenset(forgotten)


def note_failure(name: str, notes: Notes) -> None:
    """Remove a failed task's note: doit drops its entry, which would look like `doit forget`."""
    notes.remove(_NOTES, name)


def dodo_error(error: TvmflowError) -> InvalidDodoFile:
    """Return an error as doit's own error type, which doit shows without a traceback."""
    return InvalidDodoFile(str(error))


def _stop_at_exception(task: EngineTask, errors: list[Exception]) -> EngineTask:
    """Wrap a task so that an exception ends the run and is kept in `errors`; doit would hide it."""

    def run() -> str:
        if errors:
            return "the run was stopped"
        try:
            return task.run()
        except Exception as error:
            errors.append(error)
            return f"{type(error).__name__}: {error}"

    def is_up_to_date() -> bool:
        try:
            return not errors and task.is_up_to_date()
        except Exception as error:
            errors.append(error)
            return False

    return task._replace(run=run, is_up_to_date=is_up_to_date)


class _MemoryDatabase(JsonDB):  # type: ignore[misc]
    """A database for doit in memory, which is discarded after the run."""

    def __init__(self, name: str, codec: Any, **_: Any) -> None:
        self.name = name
        self.codec = codec
        self._db: dict[str, Any] = {}

    def dump(self) -> None:
        """Write nothing."""


class _ProblemReporter:
    """A doit reporter that prints nothing and keeps errors that no task has reported itself."""

    desc = "problems"

    def __init__(self) -> None:
        self.problems: list[str] = []

    def add_failure(self, task: Task, fail_info: Any) -> None:
        """Keep a failure, unless a task failed itself or needs a failed one: these are reported already."""
        if not isinstance(fail_info, TaskFailed | UnmetDependency):
            self.problems.append(f"{task.name}: {fail_info.get_msg()}")

    def runtime_error(self, message: str) -> None:
        self.problems.append(message)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Loader(TaskLoader2):  # type: ignore[misc]
    """Tasks and settings, handed to doit's own command through its public interface."""

    def __init__(self, tasks: list[Task], config: dict[str, Any]) -> None:
        super().__init__()
        self._tasks = tasks
        self._config = config

    def setup(self, opt_values: Any) -> None:
        """Read nothing from disk."""

    def load_doit_config(self) -> dict[str, Any]:
        return self._config

    def load_tasks(self, cmd: Any, pos_args: Any) -> list[Task]:
        return self._tasks
