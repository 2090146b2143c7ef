"""Groups of arguments that several commands share.

The help of every command imports this module, so it imports little at the top.
"""

from __future__ import annotations

import functools
import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar

from tvmflow.cli.options import (
    Options,
    argument,
    flag,
    minutes,
    option,
    positive_int,
    seconds,
    size,
    time_limit,
)
from tvmflow.core.errors import UsageError
from tvmflow.core.project import STORE_VARIABLE, find_project, shortest_path, store_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmflow.engine.driver import DriverSettings
    from tvmflow.engine.remote_access import RemoteSettings
    from tvmflow.planning.prepare import RunRequest
    from tvmflow.store.local import LocalStore

JSON_HELP: Final = "print the result as one line of JSON"
JSON_LINES_HELP: Final = "print events and results as JSON, one object per line"
REMOTE_CACHE_MODES: Final = ("read", "write", "both", "off")
_DEFAULT_REMOTE_TIMEOUT_S: Final = 10.0
_SHORTEST_TIMEOUT_S: Final = 0.01


class OutputOptions(Options):
    """The display of a run's progress and results."""

    json: bool = flag(JSON_LINES_HELP)
    verbosity: int

    @property
    def quiet(self) -> bool:
        """True if only problems, and a line for each delivery, are shown."""
        return self.verbosity < 0


class StoreOption(NamedTuple):
    """The value of `--store`, None without it."""

    path: str | None = None

    def locate(self) -> LocalStore:
        """Return the store of `--store`, `$TVMFLOW_STORE` or the project, which may not exist yet."""
        from tvmflow.store.local import LocalStore

        words = [] if self.path is None else ["--store", self.path]
        return LocalStore(store_root(words, find_project().store))

    def locate_named(self) -> LocalStore:
        """Return the same store; UsageError if the named folder is not a store."""
        is_named = self.path is not None or os.environ.get(STORE_VARIABLE)
        return self.require() if is_named else self.locate()

    def require(self) -> LocalStore:
        """Return the same store; UsageError if the folder is not a store."""
        from tvmflow.store.inventory import require_store

        return require_store(self.locate())

    def origin(self) -> str:
        """Return the setting that names the store."""
        if self.path is not None:
            return "--store"
        is_named = os.environ.get(STORE_VARIABLE)
        return f"${STORE_VARIABLE}" if is_named else find_project().origin("store")

    def open(self) -> LocalStore:
        """Return the same store, created if it does not exist yet."""
        store = self.locate()
        store.create()
        return store

    def open_to_read(self) -> LocalStore:
        """Open the store for a read-only command; create it if its folder is writable."""
        store = self.locate()
        store.create_if_writable()
        return store


def store_option(content: str = "results are") -> StoreOption:
    """Return the field of `--store`."""
    text = f"the folder in which {content} stored ($TVMFLOW_STORE, or cache in the project's root)"
    return option("DIR", text, default=StoreOption())


class StoreOptions(Options):
    """The store of a command, and the form of its output."""

    store: StoreOption = store_option()
    json: bool = flag(JSON_HELP)
    verbosity: int


_Options = TypeVar("_Options", bound=StoreOptions)


def with_disk_errors(run: Callable[[_Options], int]) -> Callable[[_Options], int]:
    """Return a command that reports a full disk or a missing permission as an environment error."""

    @functools.wraps(run)
    def wrapped(options: _Options) -> int:
        from tvmflow.core.disk_errors import disk_errors

        with disk_errors(options.store.locate().root):
            return run(options)

    return wrapped


class DistOption(NamedTuple):
    """The value of `--dist`, None without it."""

    path: str | None = None

    def locate(self) -> str:
        """Return the folder of `--dist`, or else of the project, as a short path."""
        return shortest_path(find_project().dist) if self.path is None else self.path

    def origin(self) -> str:
        """Return the setting that names the folder of deliveries."""
        return find_project().origin("dist") if self.path is None else "--dist"


def dist_option() -> DistOption:
    """Return the field of `--dist`."""
    text = "where files are delivered (dist in the project's root)"
    return option("DIR", text, default=DistOption())


def pipeline_option() -> str | None:
    """Return the field of `--pipeline`."""
    text = "use this pipeline instead of the recipe's: compile, tune, or a file"
    return option("NAME", text)


RECIPE_SUFFIXES: Final = (".yaml", ".yml")
"""Arguments with these suffixes are recipes or pipelines."""


class RecipeOptions(Options):
    """The recipes or pipeline of a command, and the targets, variants and stages to select."""

    TITLE: ClassVar = "selection"

    recipes: tuple[str, ...] = argument("RECIPE", "a recipe, or a pipeline that names recipes", "+")
    targets: tuple[str, ...] = option(
        "T", "only this target (may be repeated)", default=(), name="--target"
    )
    variants: tuple[str, ...] = option(
        "V", "only this variant (may be repeated)", default=(), name="--variant"
    )
    until: str | None = option("STAGE", "stop after this stage")
    minutes: float | None = option(
        "M",
        "minutes to search for faster kernels, instead of the recipe's budget; 0: no search",
        type=minutes,
    )
    pipeline: str | None = pipeline_option()

    def request(self, lock: str | None = None, force: tuple[str, ...] = ()) -> RunRequest:
        """Return the request to plan; `lock` is the lock file to enforce."""
        from tvmflow.planning.prepare import RunRequest

        return RunRequest(
            recipes=self.recipes,
            pipeline=self.pipeline,
            targets=self.targets,
            until=self.until,
            variants=self.variants,
            lock=lock,
            minutes=self.minutes,
            force=force,
        )


def force_option() -> tuple[str, ...]:
    """Return the field of `--force`."""
    text = (
        "run STAGE, STAGE/TARGET or RECIPE:STAGE even if it is up to date, and the stages whose inputs change"
        " (may be repeated)"
    )
    return option("STAGE", text, default=(), name="--force")


class LockOptions(Options):
    """The lock file that a locked run enforces."""

    TITLE: ClassVar = "lock file"

    locked: bool = flag(
        "search nothing, and fail unless every file has the digest in the lock file"
    )
    lock: str | None = option("FILE", "the lock file (beside the recipe: RECIPE.lock.yaml)")

    def find(self, recipes: tuple[str, ...]) -> str | None:
        """Return the lock file to enforce, None without `--locked`; UsageError for `--lock` alone."""
        if self.locked:
            from tvmflow.recipe.lock_file import lock_path

            return self.lock or str(lock_path(recipes))
        if self.lock:
            raise UsageError(
                "--lock names the lock file of a locked run, and this run is not locked",
                fix="add --locked",
            )
        return None


def _timeout(text: str) -> float:
    value = seconds(text)
    if value < _SHORTEST_TIMEOUT_S:
        raise ArgumentTypeError(f"'{text}' is shorter than {_SHORTEST_TIMEOUT_S} seconds")
    return value


class RemoteCacheOptions(Options):
    """The remote cache and the keys whose results are accepted."""

    TITLE: ClassVar = "remote cache"

    remote_url: str | None = option(
        "URL",
        "the remote cache: https://…, oci://…, s3://…, gs://…, az://… or a folder ($TVMFLOW_REMOTE)",
        name="--remote",
    )
    require_signatures: Path | None = option(
        "FILE|DIR",
        "accept only results that are signed with one of these keys ($TVMFLOW_TRUSTED_KEYS)",
    )
    remote_timeout_s: float = option(
        "SECONDS",
        f"how long to wait for a response of the remote cache ({_DEFAULT_REMOTE_TIMEOUT_S:.0f})",
        default=_DEFAULT_REMOTE_TIMEOUT_S,
        name="--remote-timeout",
        type=_timeout,
    )

    def settings(self) -> RemoteSettings:
        """Return these options as the engine's settings."""
        from tvmflow.engine.remote_access import RemoteSettings

        return RemoteSettings(
            self.remote_url,
            timeout_s=self.remote_timeout_s,
            require_signatures=self.require_signatures,
        )


class RunRemoteCacheOptions(Options):
    """The use of the remote cache by a run."""

    TITLE: ClassVar = "remote cache"

    cache: RemoteCacheOptions
    remote_mode: str | None = option(
        "MODE",
        "read (the default), write, both, or off ($TVMFLOW_REMOTE_MODE)",
        choices=REMOTE_CACHE_MODES,
    )
    remote_wait_s: float | None = option(
        "SECONDS",
        "how long a finished run waits for uploads (half as long as it took, 3 to 30)",
        name="--remote-wait",
        type=seconds,
    )

    def settings(self) -> RemoteSettings:
        """Return these options as the engine's settings."""
        return self.cache.settings()._replace(mode=self.remote_mode, wait_s=self.remote_wait_s)


def scheduler_option() -> str | None:
    """Return the field of `--scheduler`."""
    text = "the address of dask's scheduler: tcp://HOST:PORT or tls://HOST:PORT"
    return option("ADDRESS", f"{text} ($TVMFLOW_SCHEDULER)")


def listening_host_option() -> str:
    """Return the field of `--host` of a server."""
    text = "the address to listen on (127.0.0.1: only this machine can connect)"
    return option("ADDRESS", text, default="127.0.0.1")


class ExecutorOptions(Options):
    """The executor of a run."""

    TITLE: ClassVar = "cluster"

    executor: str = option(
        "NAME",
        "processes: on this machine (the default); dask: on a cluster, with --remote for its files",
        default="processes",
    )
    scheduler: str | None = scheduler_option()
    wait_for_workers_s: float = option(
        "SECONDS",
        "how long a stage waits for a worker that can run it (0)",
        default=0.0,
        name="--wait-for-workers",
        type=seconds,
    )


class ExecutionOptions(Options):
    """The execution of stages; none of these options changes a result."""

    TITLE: ClassVar = "execution"

    jobs: int | None = option(
        "N",
        "number of stages to run in parallel (1; on a cluster, the slots of all workers); measurements stay exclusive",
        type=positive_int,
    )
    keep_going: bool = flag("after a failure, continue with stages that do not depend on it")
    dist: DistOption = dist_option()
    stage_timeout_s: float | None = option(
        "SECONDS", "stop any stage that takes longer", name="--stage-timeout", type=time_limit
    )
    stage_memory: int | None = option(
        "SIZE",
        "stop any stage that takes more memory, such as 4GiB; 0 for no limit "
        "(80 %% of this machine's memory for all stages together)",
        type=size,
    )
    remote: RunRemoteCacheOptions
    executor: ExecutorOptions

    def settings(self, *, best_so_far: bool = False) -> DriverSettings:
        """Return these options as the engine's settings."""
        from tvmflow.engine.driver import DriverSettings
        from tvmflow.engine.session import SessionOptions

        return DriverSettings(
            session=SessionOptions(
                jobs=self.jobs,
                keep_going=self.keep_going,
                dist=self.dist.locate(),
                stage_timeout_s=self.stage_timeout_s,
                stage_memory=self.stage_memory,
            ),
            remote=self.remote.settings(),
            executor=self.executor.executor,
            scheduler=self.executor.scheduler,
            wait_for_workers_s=self.executor.wait_for_workers_s,
            best_so_far=best_so_far,
        )
