"""Arguments that several commands share, in groups: frozen values whose fields are the arguments."""

from __future__ import annotations

import functools
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from tvmflow.cli.options import argument, flag, option, positive_int, seconds, size
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import UsageError
from tvmflow.executors import EXECUTORS
from tvmflow.planning.request import RunRequest
from tvmflow.recipe.lock_file import lock_path
from tvmflow.store.local import LocalStore
from tvmflow.store.location import store_root

JSON_HELP: Final = "print the result as one line of JSON"
JSON_LINES_HELP: Final = "print events and results as JSON, one object a line"
SCHEDULER_VARIABLE: Final = "TVMFLOW_SCHEDULER"
REMOTE_CACHE_MODES: Final = ("read", "write", "both", "off")
_DEFAULT_REMOTE_TIMEOUT_S: Final = 10.0
_SHORTEST_TIMEOUT_S: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The display of a run's progress and results."""

    json: bool = flag(JSON_LINES_HELP)
    verbosity: int

    @property
    def quiet(self) -> bool:
        """True if only problems and the summary are shown."""
        return self.verbosity < 0


# ---------------------------------------------------------------- store


class StoreOption(NamedTuple):
    """The value of `--store`, None without it."""

    path: str | None = None

    def locate(self) -> LocalStore:
        """Return the store of `--store`, else of `$TVMFLOW_STORE`, else `./cache`; it may not exist yet."""
        return LocalStore(store_root([] if self.path is None else ["--store", self.path]))

    def open(self) -> LocalStore:
        """Return the same store, created if it does not exist yet."""
        store = self.locate()
        store.create()
        return store


def store_option(content: str = "results are") -> StoreOption:
    """Return the field of `--store`."""
    text = f"the folder in which {content} stored ($TVMFLOW_STORE, or ./cache)"
    return option("DIR", text, default=StoreOption())


class _HasStore(Protocol):
    @property
    def store(self) -> StoreOption: ...


_Options = TypeVar("_Options", bound=_HasStore)


def with_disk_errors(run: Callable[[_Options], int]) -> Callable[[_Options], int]:
    """Return a command that reports a full disk or a missing permission as an error of the environment."""

    @functools.wraps(run)
    def wrapped(options: _Options) -> int:
        with disk_errors(options.store.locate().root):
            return run(options)

    return wrapped


# ---------------------------------------------------------------- recipes


def pipeline_option() -> str | None:
    """Return the field of `--pipeline`."""
    text = "use this pipeline instead of the recipe's: compile, tune, or a file"
    return option("NAME", text)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The recipes, or the pipeline, that a command is about, and how much of them."""

    recipes: tuple[str, ...] = argument("RECIPE", "a recipe, or a pipeline that names recipes", "+")
    targets: tuple[str, ...] = option(
        "T", "only this target (may be repeated)", default=(), name="--target"
    )
    variants: tuple[str, ...] = option(
        "V", "only this variant (may be repeated)", default=(), name="--variant"
    )
    until: str | None = option("STAGE", "stop after this stage")
    pipeline: str | None = pipeline_option()

    def request(self, lock: str | None = None) -> RunRequest:
        """Return what is to be planned, enforcing the lock file `lock` if there is one."""
        return RunRequest(
            self.recipes, self.pipeline, self.targets, self.until, self.variants, lock=lock
        )


# ---------------------------------------------------------------- lock file


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """The lock file that a run enforces, if it is locked."""

    locked: bool = flag(
        "search nothing, and fail unless every file has the digest in the lock file"
    )
    lock: str | None = option("FILE", "the lock file (beside the recipe: RECIPE.lock.yaml)")

    def find(self, recipes: tuple[str, ...]) -> str | None:
        """Return the path of the lock file to enforce; None when the run is not locked.

        Raises:
            UsageError: for `--lock` without `--locked`, and for several recipes without `--lock`.
        """
        if self.locked:
            return self.lock or str(lock_path(recipes))
        if self.lock:
            raise UsageError(
                "--lock names the lock file of a locked run, and this run is not locked",
                fix="add --locked",
            )
        return None


# ---------------------------------------------------------------- remote cache


def _timeout(text: str) -> float:
    value = seconds(text)
    if value < _SHORTEST_TIMEOUT_S:
        raise ArgumentTypeError(f"'{text}' is shorter than {_SHORTEST_TIMEOUT_S} seconds")
    return value


@dataclass(frozen=True, kw_only=True)
class RemoteCacheOptions:
    """The remote cache, and how far it is trusted."""

    remote_url: str | None = option(
        "URL",
        "the remote cache: https://…, s3://…, gs://…, az://… or a folder ($TVMFLOW_REMOTE)",
        name="--remote",
    )
    require_signatures: Path | None = option(
        "FILE|DIR",
        "accept only results that are signed with one of these keys ($TVMFLOW_TRUSTED_KEYS)",
    )
    remote_timeout_s: float = option(
        "SECONDS",
        f"how long to wait for an answer of the remote cache ({_DEFAULT_REMOTE_TIMEOUT_S:.0f})",
        default=_DEFAULT_REMOTE_TIMEOUT_S,
        name="--remote-timeout",
        type=_timeout,
    )


@dataclass(frozen=True, kw_only=True)
class RunRemoteCacheOptions:
    """The use of the remote cache by a run."""

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


# ---------------------------------------------------------------- execution


def scheduler_option() -> str | None:
    """Return the field of `--scheduler`."""
    text = "the address of dask's scheduler: tcp://HOST:PORT or tls://HOST:PORT"
    return option("ADDRESS", f"{text} (${SCHEDULER_VARIABLE})")


def listening_host_option() -> str:
    """Return the field of `--host` of a server."""
    text = "the address to listen on (127.0.0.1: only this machine can connect)"
    return option("ADDRESS", text, default="127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """The executor of a run."""

    executor: str = option(
        "NAME",
        "processes: on this machine (the default); dask: on a cluster, with --remote for its files",
        default="processes",
        choices=EXECUTORS,
    )
    scheduler: str | None = scheduler_option()
    wait_for_workers_s: float = option(
        "SECONDS",
        "how long a stage waits for a worker that can run it (0)",
        default=0.0,
        name="--wait-for-workers",
        type=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """The execution of stages; none of these options changes a result."""

    jobs: int | None = option(
        "N",
        "stages at a time: by default 1, or on a cluster as many as its workers take (measurements stay exclusive)",
        type=positive_int,
    )
    keep_going: bool = flag("after a failure, continue with stages that do not depend on it")
    dist: str = option("DIR", "where files are delivered (./dist)", default="dist")
    stage_timeout_s: float | None = option(
        "SECONDS", "stop any stage that takes longer", name="--stage-timeout"
    )
    stage_memory: int | None = option(
        "SIZE",
        "stop any stage that takes more memory, such as 4GiB; 0 for no limit "
        "(all together: 80 %% of this machine's)",
        type=size,
    )
    remote: RunRemoteCacheOptions
    executor: ExecutorOptions
