"""A tuning: its request, its options, its result, its clock, and the phases of its children."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.codec import without_empty
from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.file_locks import WaitingTime
from tvmflow.core.fork_server import ChildFunction, Emit, ForkServer, Outcome
from tvmflow.core.types import Json
from tvmflow.targets import devices
from tvmflow.tuning.budget import BudgetRules
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import Failure


def search_name(strategy: str, seed: int, schedules: int) -> str:
    """Return the name of a search in the ledger's mark of an exhausted space.

    The version of the schedule rules is a part of it: other rules have other candidates.
    """
    return f"{strategy}/{seed}/rules {schedules}"


class SearchOptions(NamedTuple):
    """The options of a search.

    Attributes:
        strategy: `evolutionary` or `replay-trace`.
        cost_model: `xgb`, `mlp` or `random`.
        trial_timeout_s: Seconds after which a trial is given up.
        schedules: The version of the schedule rules.
    """

    rules: BudgetRules
    seed: int
    strategy: str
    cost_model: str
    timing: Timing
    trial_timeout_s: float
    schedules: int

    @property
    def name(self) -> str:
        """The search in the ledger's mark of an exhausted space."""
        return search_name(self.strategy, self.seed, self.schedules)


class WorkloadFacts(NamedTuple):
    """The outcome for one workload; times in µs of one call, and in seconds; None if one is not known.

    Attributes:
        trials: The trials of the budget that it has had.
        untuned_us: Its time without tuning.
        best_us: The time of its fastest trial.
        measured: How many trials this run measured.
        failed: Failures among all its trials.
        roofline_us: Its time at the roofline of the machine.
        at_roofline: It is about as fast as the machine allows.
        finished: It had its share of the budget in an earlier search.
        spread: The spread of its fastest trial.
        seconds: The time that this run spent on it.
        first_failure: Phase and message of its first failure.
        sizes: The sizes at which each schedule was measured; times are geometric means of them. None if
            all are fixed.
    """

    key: str
    name: str
    trials: int
    calls: int
    untuned_us: float | None
    best_us: float | None
    measured: int = 0
    failed: int = 0
    roofline_us: float | None = None
    at_roofline: bool = False
    finished: bool = False
    spread: float = 0.0
    seconds: float = 0.0
    first_failure: str = ""
    sizes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the facts as plain JSON."""
        return without_empty(self._asdict(), ("sizes",))


class BannedSchedule(NamedTuple):
    """A schedule that computes wrong values: its kernel, its trial, why, and since when."""

    name: str
    trial: str
    reason: str
    when: str


class TuneFacts(NamedTuple):
    """The outcome of a search.

    Attributes:
        trials: The budget.
        measured: The trials of this run.
        reused: Those of the ledger.
        stopped: `budget`, `time`, `exhausted`, `converged`, `finished` or `no search`.
        drift: By how much one kernel's time changed meanwhile.
        exhausted: The workloads without a schedule left to try.
        untunable: The workloads whose trials all failed.
        repairs: A sentence for each repair of the ledger, and each search that failed.
        known: All trials in the ledger.
        threads: The threads that kernels ran with; None if nothing was measured.
        usable_cpus: The CPUs of this machine that the run might use.
        starting_points: How many schedules were measured first because they are good on near targets.
        spent_s: The seconds of the budget that it and earlier searches took.
        gain: The speedup `found`, estimated from the best trials, and the `possible` one at the
            roofline; empty if one of the times is not known.
        banned: The schedules that are never chosen again.
    """

    trials: int
    measured: int
    reused: int
    failed: int
    stopped: str
    seconds: float
    drift: float
    exhausted: tuple[str, ...]
    untunable: tuple[str, ...]
    repairs: tuple[str, ...]
    workloads: tuple[WorkloadFacts, ...]
    known: int = 0
    threads: int | None = None
    usable_cpus: int = 0
    cpus: int = 0
    starting_points: int = 0
    near_targets: tuple[str, ...] = ()
    spent_s: float = 0.0
    gain: Mapping[str, float] = MappingProxyType({})
    banned: tuple[BannedSchedule, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the facts as plain JSON."""
        return without_empty(self._asdict(), ("banned",))


NOT_TUNED: Final = TuneFacts(
    trials=0,
    measured=0,
    reused=0,
    failed=0,
    stopped="budget",
    seconds=0.0,
    drift=0.0,
    exhausted=(),
    untunable=(),
    repairs=(),
    workloads=(),
)
"""The outcome where the budget is 0."""


# ---------------------------------------------------------------- work clock

# A process that has not looked at the ticking clock for long, and that used less than this share of a
# CPU meanwhile, did not run; one that computes may have had no time to look.
_MIN_BUSY: Final = 0.1


class WorkClock:
    """Counts seconds of work.

    Those do not count in which at least one thread waited for another run, nor, while the clock ticks,
    those in which the process was stopped (Ctrl-Z, SIGSTOP, a machine that sleeps).

    Args:
        clock: Returns the current time in seconds.
        cpu_clock: Returns the CPU seconds of this process.
        tick_s: How often a ticking clock is looked at.
        max_silent_s: How long a process that runs may not have looked at it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        *,
        tick_s: float = 1.0,
        max_silent_s: float = 5.0,
    ) -> None:
        self._tick_s, self._max_silent_s = tick_s, max_silent_s
        self._waits = WaitingTime(clock)
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._is_ticking = False
        self._stopped_s = 0.0
        self._last_s, self._last_cpu_s = self._read_s(), cpu_clock()

    def now(self) -> float:
        """Return the clock's time in seconds; only differences are meaningful."""
        with self._lock:
            now_s, cpu_s = self._read_s(), self._cpu_clock()
            silent_s, busy_s = now_s - self._last_s, cpu_s - self._last_cpu_s
            if self._is_ticking and silent_s > self._max_silent_s and busy_s < _MIN_BUSY * silent_s:
                self._stopped_s += silent_s - self._tick_s
            self._last_s, self._last_cpu_s = now_s, cpu_s
            return now_s - self._stopped_s

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Stop the clock while the block waits for a lock that another run may hold."""
        return self._waits.waiting()

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Look at the clock again and again while the block runs, to know when the process was stopped."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(self._tick_s):
                self.now()

        thread = threading.Thread(target=tick, name="work-clock", daemon=True)
        self.now()
        self._is_ticking = True
        thread.start()
        try:
            yield
        finally:
            self.now()
            self._is_ticking = False
            ended.set()
            thread.join()

    def _read_s(self) -> float:
        now_s, waited_s = self._waits.read()
        return now_s - waited_s


# ---------------------------------------------------------------- phases of a child

_MAX_MESSAGE: Final = 500


class PhaseReporter:
    """Reports which phase a child is in, and keeps the seconds of each.

    Attributes:
        current: The phase that began last.
        seconds: The seconds of each finished phase.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._started = 0.0
        self.current = ""
        self.seconds: dict[str, float] = {}

    def phase(self, name: str, *, ask: bool = False) -> PhaseReporter:
        """Return a context manager for a phase; with `ask`, wait for permission first."""
        self.current = name
        self._emit({"event": "phase", "phase": name, "ask": ask})
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.current] = time.perf_counter() - self._started


def report_failure(
    emit: Emit,
    work: Callable[[PhaseReporter], Json],
    fatal: tuple[type[Exception], ...] = (TvmflowError,),
) -> Json:
    """Run a function that reports its phases; return its result, or the failure as JSON.

    Args:
        emit: Sends the event of each phase.
        work: The function; its result gets the field `phase_secs`.
        fatal: Exceptions to raise instead: neither the candidate nor the device caused them.
    """
    phases = PhaseReporter(emit)
    try:
        result = work(phases)
    except fatal:
        raise
    # Whatever TVM or the session raises. The parent decides whether candidate or device is the cause.
    except Exception as error:
        kind = "timeout" if "RPCSessionTimeoutError" in str(error) else "error"
        result = {"failure": Failure(phases.current, kind, summarize_error(error))._asdict()}
    return {**result, "phase_secs": phases.seconds}


def summarize_error(error: Exception) -> str:
    """Return one sentence for an error; TVM has it in the last line of a long text."""
    if isinstance(error, TvmflowError):
        return " ".join(error.message.split())[:_MAX_MESSAGE]
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:_MAX_MESSAGE]


# ---------------------------------------------------------------- in its parent


class PhaseSpans:
    """Follows the phases of a child: each is a span of this process."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._began_s = 0.0

    def begin(self, name: str) -> None:
        """Take the beginning of a phase, which is the end of the one before."""
        self.end()
        self.names.append(name)

    def end(self) -> None:
        """Take the end of the last phase."""
        now_s = time.time()
        if self.names:
            spans.add_span(self.names[-1], self._began_s, now_s)
        self._began_s = now_s


def read_failure(outcome: Outcome, phases: Sequence[str]) -> Failure | None:
    """Return the failure of a call in a child; None when it succeeded.

    Raises:
        StageError: The candidate is not the cause of the outcome.
    """
    if outcome.kind == "cancelled":
        raise StageError("tuning was cancelled", fix="run it again to resume")
    if outcome.kind == "error" and outcome.error == StageError.__name__:
        raise StageError(outcome.message, fix=outcome.fix)
    if outcome.kind != "ok":
        if not phases or outcome.is_external:
            # The child had not touched the candidate yet, or another process ended it.
            raise StageError(
                f"trials cannot be run: {outcome.message}",
                fix="run `tvmflow doctor` to check the installation, then run it again to resume",
            )
        return Failure(phases[-1], outcome.kind, outcome.message)
    return Failure(**outcome.value["failure"]) if "failure" in outcome.value else None


def call_alone(
    fork_server: ForkServer,
    function: ChildFunction,
    payload: Json,
    *,
    device: Mapping[str, str],
    locks: Path,
    timeout_s: float,
    log: Path,
) -> Outcome:
    """Run a function in a child that has a device alone.

    Raises:
        StageError: The run was cancelled.
    """
    with devices.exclusive(locks, device):
        outcome = fork_server.call(function, payload, timeout_s=timeout_s, log=log)
    if outcome.kind == "cancelled":
        raise StageError("measuring was cancelled", fix="run it again")
    return outcome
