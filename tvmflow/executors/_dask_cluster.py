"""The connection to a dask cluster: its scheduler, its workers, and which of them can run what."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from tvmflow.core.documentation import page_url
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.generated_text import shell_word
from tvmflow.core.types import StageCall
from tvmflow.executors import worker_matching
from tvmflow.executors._base import ExecutorContext
from tvmflow.executors.worker_matching import WorkerDescription

_log: Final = logging.getLogger(__name__)

POLL_S: Final = 0.05
CONNECT_S: Final = 10.0
_WAIT_STEP_S: Final = 0.5
_MAX_LISTED: Final = 8
# Every stage needs the same build of TVM.
_COMMON_TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")


class Worker(NamedTuple):
    """A worker of the cluster: its name, the number of stages that it runs at a time, its description."""

    name: str
    slots: int
    description: WorkerDescription | None


class DaskCluster:
    """A connected cluster, seen from the machine that made the plan."""

    def __init__(self, context: ExecutorContext, is_cancelled: Callable[[], bool]) -> None:
        self._context = context
        self._is_cancelled = is_cancelled
        self.planner = worker_matching.describe_this_host()
        self.client = _connect(context.scheduler)

    def list_workers(self) -> list[Worker]:
        """Return the workers of the cluster.

        Raises:
            EnvironmentProblem: when the connection to the scheduler is lost.
        """
        while self.client.status == "connecting":
            time.sleep(POLL_S)
        if self.client.status != "running":
            raise self.connection_lost()
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return [
            Worker(
                str(info["name"]),
                info["nthreads"],
                worker_matching.parse_resources(info["resources"] or {}),
            )
            for info in workers
        ]

    def wait_for_slots(self) -> int:
        """Return how many stages the workers run at a time, and notify the user of workers that are not used.

        Raises:
            EnvironmentProblem: when no worker can run stages, nor joins in time.
        """
        slots, refused = 0, list[str]()
        for is_last in self._wait_steps():
            slots, refused = self._count_slots()
            if slots or is_last:
                break
        if not slots:
            scheduler = self._context.scheduler
            reasons = "\n  ".join(["", *_first_lines(refused)]) if refused else "it has none"
            raise EnvironmentProblem(
                f"no worker of {scheduler} can run stages: {reasons}",
                fix=f"start some with `tvmflow worker --scheduler {shell_word(scheduler)}`, where the same "
                "tvmflow and TVM are installed; --wait-for-workers SECONDS waits for them",
            )
        for reason in refused:
            self._context.notify(f"worker {reason}; it is not used")
        return slots

    def _count_slots(self) -> tuple[int, list[str]]:
        """Return the slots of all usable workers, and the reasons against the others."""
        slots, refused = 0, []
        for worker in self.list_workers():
            mismatches = worker_matching.list_version_mismatches(
                self.planner, worker.description, _COMMON_TOOLS
            )
            if mismatches:
                refused.append(f"{worker.name}: {'; '.join(mismatches)}")
            else:
                slots += worker.slots
        _log.debug("%d slots; refused workers: %s", slots, refused)
        return slots, refused

    def wait_for_worker(self, call: StageCall) -> None:
        """Wait until a worker can run a stage.

        Raises:
            EnvironmentProblem: when none can, nor joins in time.
        """
        for is_last in self._wait_steps():
            reasons = self.refusals(call)
            if reasons is None:
                return
            if is_last:
                raise self.no_worker(reasons)

    def refusals(self, call: StageCall) -> list[str] | None:
        """Return why each of the workers cannot run a stage; None when one of them can."""
        refusals = []
        for worker in self.list_workers():
            reasons = worker_matching.list_incompatibilities(call, self.planner, worker.description)
            if not reasons:
                return None
            refusals.append(f"{worker.name}: {'; '.join(reasons)}")
        _log.debug("no worker can run %s: %s", call.stage, refusals)
        return refusals

    def _wait_steps(self) -> Iterator[bool]:
        """Yield, now and again while workers are waited for, whether this is the last time."""
        deadline = time.monotonic() + self._context.wait_s
        while True:
            is_last = time.monotonic() >= deadline or self._is_cancelled()
            yield is_last
            if is_last:
                return
            time.sleep(_WAIT_STEP_S)

    def no_worker(self, refusals: list[str]) -> EnvironmentProblem:
        """Return the error for a stage that no worker can run."""
        return EnvironmentProblem(
            "no worker of the cluster can run this stage: "
            + ("; ".join(_first_lines(refusals)) or "it has none"),
            fix=f"start one that can with `tvmflow worker --scheduler {shell_word(self._context.scheduler)}`; "
            "--wait-for-workers SECONDS waits for it",
        )

    def connection_lost(self) -> EnvironmentProblem:
        """Return the error for a scheduler that is gone."""
        return EnvironmentProblem(
            f"the connection to the scheduler {self._context.scheduler} was lost",
            fix="run again when it is back; finished results are kept",
        )


def _connect(scheduler: str) -> Any:
    """Return dask's client of a scheduler."""
    distributed = import_distributed("--executor dask")
    check_certificates(scheduler, "client")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return distributed.Client(
                scheduler, timeout=CONNECT_S, set_as_default=False, name="tvmflow"
            )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"the scheduler {scheduler} does not answer: {first_line(error)}",
            fix="start one with `tvmflow scheduler`, and give the address that it prints: "
            "tcp://HOST:PORT, or tls://HOST:PORT",
        ) from error


def import_distributed(user: str) -> Any:
    """Import dask's package, whose own log says nothing: tvmflow reports each problem in one message.

    Args:
        user: What needs it, for the message when it is not installed.
    """
    try:
        import distributed
    except ImportError as missing:
        raise EnvironmentProblem(
            f"{user} needs the package distributed ({missing})", fix="pip install 'tvmflow[dask]'"
        ) from missing
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    return distributed


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_certificates(address: str, role: str) -> None:
    """Check that dask has the certificates that an address needs.

    Args:
        address: Of a scheduler; `tls://…` needs certificates.
        role: Whose certificates: `client`, `worker` or `scheduler`.

    Raises:
        EnvironmentProblem: when dask's configuration names none, or some that cannot be used.
    """
    if not address.startswith("tls://"):
        return
    from distributed import Security

    try:
        context = Security().get_connection_args(role).get("ssl_context")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"dask cannot use the certificates that its configuration names: {error}",
            fix=f"see {page_url('teams')}",
        ) from error
    if context is None:
        raise EnvironmentProblem(
            f"{address} needs certificates, and dask's configuration names none",
            fix="set DASK_DISTRIBUTED__COMM__TLS__CA_FILE and, ending in __CERT and __KEY, "
            f"DASK_DISTRIBUTED__COMM__TLS__{role.upper()}__…: see {page_url('teams')}",
        )


def _first_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    return lines[:_MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
