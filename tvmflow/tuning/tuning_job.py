"""The options, facts and clock of a `tune` stage, and the phases of its child processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.codec import omits_empty
from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.file_locks import WaitingTime
from tvmflow.core.fork_server import Emit, Outcome
from tvmflow.core.types import Json
from tvmflow.tuning.budget import BudgetRules
from tvmflow.tuning.trials import Failure


def search_name(strategy: str, seed: int, schedules: int) -> str:
    """Return the name of a search for the ledger's notes about it.

    It contains the version of the schedule rules, because other rules have other candidates.
    """
    return f"{strategy}/{seed}/rules {schedules}"


class SearchOptions(NamedTuple):
    """The options of a search.

    Attributes:
        strategy: `evolutionary` or `replay-trace`.
        cost_model: `xgb`, `mlp` or `random`.
    """

    rules: BudgetRules
    seed: int
    strategy: str
    cost_model: str


@omits_empty("sizes")
class WorkloadFacts(NamedTuple):
    """The outcome for one workload; times are µs per call if the name ends in `_us`; None if unknown.

    Attributes:
        trials: How many trials of the budget the workload had.
        untuned_us: The time of the untuned kernel.
        best_us: The time of the fastest trial.
        measured: How many trials this run measured.
        failed: How many of all its trials failed.
        roofline_us: The time at the machine's roofline.
        at_roofline: Whether the kernel is near the machine's roofline.
        finished: Whether an earlier search with this budget finished the workload.
        spread: The spread of the fastest trial.
        seconds: The seconds that this run spent on the workload.
        first_failure: The phase and message of the first failure.
        sizes: The sizes at which each schedule was measured; times are geometric means over these. Empty if shapes
            are fixed.
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


class BannedSchedule(NamedTuple):
    """A schedule that computes wrong values: its kernel, its trial, the reason, and the time of the ban."""

    name: str
    trial: str
    reason: str
    when: str


@omits_empty("banned")
class TuneFacts(NamedTuple):
    """The outcome of a search.

    Attributes:
        trials: The budget in trials.
        measured: How many trials this run measured.
        reused: How many trials were reused from the ledger.
        stopped: `budget`, `time`, `exhausted`, `converged`, `finished` or `no search`.
        drift: The relative change of one kernel's time during the search.
        exhausted: The workloads that have no schedule left to try.
        untunable: The workloads whose trials all failed.
        repairs: A sentence for each repair of the ledger, and each search that failed.
        known: How many trials of the workloads the ledger has.
        threads: The number of threads that kernels ran with; None if nothing was measured.
        usable_cpus: How many CPUs of this machine the run might use.
        starting_points: The number of measured schedules from similar targets.
        spent_s: The seconds of the budget that this search and earlier ones took.
        gain: The speedup `found`, estimated from the best trials, and the speedup `possible` at the roofline; empty
            if a time is unknown.
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
"""The outcome for a budget of 0."""


# ---------------------------------------------------------------- work clock

# If the process did not read the ticking clock for long, and used less than this share of a CPU meanwhile, it was
# stopped. Above this share it was computing, and had no time to read the clock.
_MIN_BUSY: Final = 0.1


class WorkClock:
    """Counts seconds of work.

    Not counted are seconds in which at least one thread waited for another run. While the clock ticks, seconds in
    which the process was stopped (Ctrl-Z, SIGSTOP, a sleeping machine) are not counted either. A ticking clock is read
    every `tick_s`; `max_silent_s` is the longest interval between two readings in a process that runs.
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
        """Read the clock periodically while the block runs, to notice when the process was stopped."""
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
    """Reports the current phase of a child, and records the seconds of each phase.

    Attributes:
        current: The phase that began most recently.
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
    """Run a function that reports its phases; return its result or failure, with `phase_secs`.

    Exceptions in `fatal` are raised: neither the candidate nor the device caused them.
    """
    phases = PhaseReporter(emit)
    try:
        result = work(phases)
    except fatal:
        raise
    # TVM and the session raise various exceptions. The parent decides whether candidate or device is the cause.
    except Exception as error:
        kind = "timeout" if "RPCSessionTimeoutError" in str(error) else "error"
        result = {"failure": Failure(phases.current, kind, summarize_error(error))._asdict()}
    return {**result, "phase_secs": phases.seconds}


def summarize_error(error: Exception) -> str:
    """Return one sentence for an error; for TVM's long messages, their last line."""
    if isinstance(error, TvmflowError):
        return " ".join(error.message.split())[:_MAX_MESSAGE]
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:_MAX_MESSAGE]


# ---------------------------------------------------------------- in its parent


class PhaseSpans:
    """Follows the phases of a child, and records each as a span of this process."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._began_s = 0.0

    def begin(self, name: str) -> None:
        """Begin a phase, and end the previous one."""
        self.end()
        self.names.append(name)

    def end(self) -> None:
        """End the current phase."""
        now_s = time.time()
        if self.names:
            spans.add_span(self.names[-1], self._began_s, now_s)
        self._began_s = now_s


def read_failure(outcome: Outcome, phases: Sequence[str]) -> Failure | None:
    """Return the failure of a call in a child; None if it succeeded.

    Raises:
        StageError: The candidate is not the cause of the outcome.
    """
    if outcome.kind == "cancelled":
        raise StageError("tuning was cancelled", fix="run it again to resume")
    if outcome.kind == "error" and outcome.error == StageError.__name__:
        raise StageError(outcome.message, fix=outcome.fix)
    if outcome.kind != "ok":
        if not phases or outcome.is_external:
            # The child had not begun with the candidate, or another process ended it.
            raise StageError(
                f"trials cannot be run: {outcome.message}",
                fix="run `tvmflow doctor` to check the installation, then run it again to resume",
            )
        return Failure(phases[-1], outcome.kind, outcome.message)
    return Failure(**outcome.value["failure"]) if "failure" in outcome.value else None
