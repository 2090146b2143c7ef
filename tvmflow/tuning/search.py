"""Search for schedules: spend the budget on trials that the ledger lacks, and record each trial.

The ledger is the only state. Its trials feed the search and its cost model, count toward the budget, and are never
measured again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.formatting import last_line
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning.budget import (
    BATCH_SIZE,
    Budget,
    Task,
    end_name,
    find_time_shares,
    workload_shares,
)
from tvmflow.tuning.ledger import Ledger, TargetDescription, WorkloadLedger
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders
from tvmflow.tuning.measure import apply_trace, trace_json
from tvmflow.tuning.measurer import DriftMonitor, MeasureContext, MeasureJob, Measurer
from tvmflow.tuning.replay import quarantine_inapplicable
from tvmflow.tuning.roofline import Roofline
from tvmflow.tuning.trials import Failure, SearchEnd, SearchTime, Trial, timestamp, trial_id
from tvmflow.tuning.tuning_job import SearchOptions, TuneFacts, WorkloadFacts, search_name

if TYPE_CHECKING:
    from tvm.s_tir.schedule import Schedule

_log = logging.getLogger(__name__)

# The remaining time is shown after this many trials: the first ones are slow.
_MIN_TRIALS: Final = 8
# Untuned kernels that take longer are timed once.
_SLOW_S: Final = 0.1
# Up to this many of the best schedules on similar targets are measured first. A similar target has the same code, but
# another thread count or device, so its times are not valid here.
_MAX_STARTING_POINTS: Final = 8
# The cost of evolution depends on its population and not on the batch. With four candidates for each measured one, it
# is about the cost of building that one.
_POPULATION: Final = 4 * BATCH_SIZE
# The cost model and the population start from at most this many trials of a workload.
_MAX_RECALLED: Final = 256
_MAX_DRAWS: Final = 6


class Tuning:
    """A search that measures the trials of its budget that the ledger lacks.

    If it is killed and run again, it resumes, and loses only the trials that were being measured.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        options: SearchOptions,
        context: MeasureContext,
        ledger: Ledger,
        fork_server: ForkServer,
        emit: Emit,
        measurer: Measurer | None = None,
        measure_roofline: Callable[[], Roofline | None] = lambda: None,
    ) -> None:
        """Prepare the tuning of tasks; `emit` takes an event after each trial."""
        self._tasks = {task.key: task for task in tasks}
        self._options = options
        self._context = context
        self._emit = emit
        self._measurer = measurer or Measurer(context, fork_server)
        self._measure_roofline = measure_roofline
        self._clock = context.clock
        self._search = search_name(options.strategy, options.seed, context.rules_version)
        self._started = self._clock.now()
        self._trials = {key: ledger.workload(key) for key in self._tasks}
        self._ledger_repairs = ledger.repairs
        self._fork_server = fork_server
        self._starting_points = StartingPoints(ledger, self._quarantine_inapplicable)
        self._measured = dict.fromkeys(self._tasks, 0)
        self._seconds = dict.fromkeys(self._tasks, 0.0)
        self._noted_s = dict.fromkeys(self._tasks, 0.0)
        self._reused_s = 0.0
        # With 0 minutes, nothing is measured: only the trials in the ledger are used.
        self._measures = options.rules.minutes != 0
        self._proposals: dict[str, Proposals] = {}
        self._spent_in_round = 0
        self._untuned: dict[str, float] = {}
        self._first_trial_s: float | None = None
        self._drift = DriftMonitor(self._measurer, options.seed)

    def run(self) -> TuneFacts:
        """Search until the budget or the time is spent, or all search spaces are exhausted."""
        self._untuned = self._measure_untuned()
        self._budget = Budget(
            workload_shares(
                list(self._tasks.values()),
                self._trials,
                self._options.rules,
                self._context.rules_version,
                self._search,
            ),
            self._options.rules,
        )
        stopped = "budget"
        while planned := self._budget.next_round():
            if self._measures and not self._has_time():
                stopped = "time"
                break
            _log.debug("next round: %s", {key[:12]: count for key, count in planned.items()})
            self._run_round(planned)
            self._drift.check(sum(self._measured.values()))
        if not self._measures:
            stopped = "no search"
        elif stopped == "budget" and self._budget.spent < self._options.rules.trials:
            is_finished = bool(self._budget.finished)
            is_converged = bool(self._budget.left_out)
            stopped = "finished" if is_finished else "converged" if is_converged else "exhausted"
        if self._measures:
            self._note_end()
        ordered = sorted(
            self._tasks.values(), key=lambda task: (-task.calls * task.flops, task.key)
        )
        workloads = tuple(map(self._make_facts, ordered))
        return TuneFacts(
            trials=self._options.rules.trials,
            measured=sum(w.measured for w in workloads),
            reused=sum(max(w.trials - w.measured, 0) for w in workloads),
            failed=sum(w.failed for w in workloads),
            stopped=stopped,
            seconds=round(sum(w.seconds for w in workloads), 3),
            drift=round(self._drift.drift, 4),
            exhausted=tuple(
                task.name for task in ordered if self._trials[task.key].is_exhausted(self._search)
            ),
            untunable=tuple(w.name for w in workloads if w.trials and w.best_us is None),
            repairs=tuple(self._repairs()),
            workloads=workloads,
            known=sum(map(len, self._trials.values())),
            starting_points=self._starting_points.measured,
            near_targets=tuple(self._starting_points.targets),
            spent_s=round(self._spent_s(), 3),
        )

    def _measure_untuned(self) -> dict[str, float]:
        """Return the seconds of each untuned kernel that can be run, which tuning has to beat."""
        known = self._read_untuned()
        missing = [task for key, task in self._tasks.items() if key not in known]
        version = self._context.rules_version
        roofline = self._measure_roofline() if missing and self._has_time() else None
        start = self._clock.now()

        def record(index: int, trial: Trial) -> None:
            nonlocal start
            task = missing[index]
            self._seconds[task.key] += self._clock.now() - start
            start = self._clock.now()
            least_s = roofline.least_seconds(task.mod, task.flops) if roofline else 0.0
            if trial.run_secs:
                self._trials[task.key].record_untuned(version, trial.seconds, least_s)

        # With this as the best time, a kernel that takes seconds is measured only once, in its first look.
        jobs = [
            MeasureJob(
                id=task.key,
                mod=task.mod,
                trace=None,
                best_s=_SLOW_S,
                seed=self._options.seed,
                name=f"{task.name}, untuned",
            )
            for task in missing
        ]
        self._measurer.measure(jobs, record, self._has_time)
        return self._read_untuned()

    def _read_untuned(self) -> dict[str, float]:
        version = self._context.rules_version
        times = {key: self._trials[key].untuned_seconds(version) for key in self._tasks}
        return {key: seconds for key, seconds in times.items() if seconds is not None}

    def _has_time(self) -> bool:
        return self._spent_s() < self._options.rules.seconds

    def _spent_s(self) -> float:
        """Return the spent seconds of the budget, including what earlier searches spent on reused trials."""
        return self._reused_s + self._clock.now() - self._started

    def _note_time(self, keys: Iterable[str]) -> None:
        """Record the time spent on workloads since the last record in the ledger."""
        for key in keys:
            trials, new_s = self._trials[key], self._seconds[key] - self._noted_s[key]
            if new_s > 0 and len(trials):
                earlier_s = trials.search_time.seconds if trials.search_time else 0.0
                self._noted_s[key] = self._seconds[key]
                trials.add([SearchTime(round(earlier_s + new_s, 3), len(trials), timestamp())])

    def _note_end(self) -> None:
        """Record in the ledger that a search with this budget ended for each workload."""
        rules, tasks = self._options.rules, list(self._tasks.values())
        name = end_name(self._search, rules)
        shares = find_time_shares(tasks, self._trials, self._context.rules_version)
        for key, trials in self._trials.items():
            limits, share = (rules.trials, rules.minutes), round(shares[key], 6)
            trials.add([SearchEnd(name, *limits, share, len(trials), timestamp())])

    # ---------------------------------------------------------------- one round of the budget

    def _run_round(self, planned: Mapping[str, int]) -> None:
        """Give each workload its trials: first those in the ledger, then measured ones."""
        goals = {key: self._budget.spent_on(key) + count for key, count in planned.items()}
        measured_before = dict(self._measured)
        self._spent_in_round = sum(
            min(len(self._trials[key]), goal) - self._budget.spent_on(key)
            for key, goal in goals.items()
        )
        with contextlib.ExitStack() as locks:
            # Lock in a fixed order, so that two runs cannot deadlock.
            is_missing = (key for key in goals if len(self._trials[key]) < goals[key])
            for key in sorted(is_missing) if self._measures else ():
                with self._clock.waiting():
                    locks.enter_context(self._trials[key].exclusive_search())
            while missing := self._missing_trials(goals):
                if not self._has_time() or not self._measure_candidates(missing):
                    break
        is_time_left = self._has_time()
        for key, count in planned.items():
            first = self._budget.spent_on(key)
            trials = self._trials[key].in_order()[first : first + count]
            # If no time is left, too few trials do not mean that the space is exhausted: the next round ends the run.
            is_exhausted = len(trials) < count and (is_time_left or not self._measures)
            reused = max(len(trials) - (self._measured[key] - measured_before[key]), 0)
            times = [trial.seconds for trial in trials]
            self._budget.record(key, times, reused=reused, exhausted=is_exhausted)
        self._reused_s = self._budget.reused_s
        self._spent_in_round = 0

    def _missing_trials(self, goals: Mapping[str, int]) -> dict[str, int]:
        missing = {key: goal - len(self._trials[key]) for key, goal in goals.items()}
        return {
            key: count
            for key, count in missing.items()
            if count > 0 and not self._trials[key].is_exhausted(self._search)
        }

    def _measure_candidates(self, missing: Mapping[str, int]) -> bool:
        """Propose and measure new candidates; return whether there were any."""
        if self._first_trial_s is None:
            self._first_trial_s = self._clock.now()
        chosen = self._propose(missing)
        learned: dict[str, list[tuple[Candidate, Trial]]] = {}
        start = self._clock.now()

        def record(index: int, trial: Trial) -> None:
            nonlocal start
            key, candidate = chosen[index]
            self._trials[key].append(trial)
            learned.setdefault(key, []).append((candidate, trial))
            self._measured[key] += 1
            self._starting_points.record(trial.id)
            self._spent_in_round += 1
            self._seconds[key] += self._clock.now() - start
            start = self._clock.now()
            self._drift.offer(self._tasks[key].mod, trial)
            self._emit(self._progress_event(self._tasks[key]))

        jobs = [self._job(key, candidate) for key, candidate in chosen]
        self._measurer.measure(jobs, record, self._has_time)
        for key, pairs in learned.items():
            candidates, trials = zip(*pairs, strict=True)
            with self._timed(key, "cost model"):
                self._proposals[key].learn(candidates, trials)
        self._note_time(learned)
        return bool(chosen)

    @contextlib.contextmanager
    def _timed(self, key: str, part: str) -> Iterator[None]:
        start = self._clock.now()
        with spans.span(f"{part} of {self._tasks[key].name}"):
            yield
        self._seconds[key] += self._clock.now() - start

    def _propose(self, missing: Mapping[str, int]) -> list[tuple[str, Candidate]]:
        """Return up to `missing` new candidates for each workload, and mark exhausted searches."""
        chosen: list[tuple[str, Candidate]] = []
        for key, count in missing.items():
            with self._timed(key, "candidates"):
                candidates = self._proposals_for(key).propose(count)
            if not candidates:
                _log.debug("the search space of workload %s is exhausted", key[:12])
                self._trials[key].mark_exhausted(self._search)
            chosen += [(key, candidate) for candidate in candidates]
        return chosen

    def _job(self, key: str, candidate: Candidate) -> MeasureJob:
        best = self._trials[key].valid()
        known = [self._untuned.get(key), best[0].seconds if best else None]
        best_s = min((seconds for seconds in known if seconds is not None), default=None)
        task = self._tasks[key]
        return MeasureJob(
            id=candidate.id,
            mod=task.mod,
            trace=candidate.trace,
            best_s=best_s,
            seed=self._options.seed,
            name=task.name,
        )

    def _proposals_for(self, key: str) -> Proposals:
        if key not in self._proposals:
            task, trials = self._tasks[key], self._trials[key]
            self._quarantine_inapplicable(task.mod, trials)
            self._proposals[key] = Proposals(
                task.mod,
                trials,
                self._context,
                self._options,
                None if task.sizes else lambda: self._cost_model,
                self._starting_points.find(key, task.mod),
            )
        return self._proposals[key]

    def _quarantine_inapplicable(self, mod: str, trials: WorkloadLedger) -> None:
        """Quarantine trials that do not apply, in a child: a foreign trace could crash this process."""
        quarantine_inapplicable(self._fork_server, mod, self._context.target, trials)

    @functools.cached_property
    def _cost_model(self) -> Any:
        return make_cost_model(self._options.cost_model)

    # ---------------------------------------------------------------- results

    def _progress_event(self, task: Task) -> dict[str, Any]:
        trials = self._trials[task.key]
        best = trials.valid()
        untuned = self._untuned.get(task.key)
        done = self._budget.spent + self._spent_in_round
        rules = self._options.rules
        return {
            "event": "progress",
            "unit": "trial",
            "done": done,
            "total": None if rules.trials >= UNLIMITED_TRIALS else rules.trials,
            "limit_s": None if math.isinf(rules.seconds) else rules.seconds,
            "workload": task.name,
            "calls": task.calls,
            "trials": len(trials),
            "best_us": round(best[0].seconds * 1e6, 3) if best else None,
            "untuned_us": round(untuned * 1e6, 3) if untuned else None,
            "gflops": round(task.flops / best[0].seconds / 1e9, 3) if best else None,
            "spread": round(best[0].spread, 4) if best else None,
            "failed": sum(len(self._failures(key)) for key in self._tasks),
            **self._latencies(),
            "seconds_left": self._seconds_left(done),
        }

    def _latencies(self) -> dict[str, float | None]:
        timed = [task for key, task in self._tasks.items() if key in self._untuned]
        untuned = sum(task.calls * self._untuned[task.key] for task in timed)
        best = sum(
            task.calls
            * min([self._untuned[task.key], *(t.seconds for t in self._trials[task.key].valid())])
            for task in timed
        )
        return {
            "untuned_latency_us": round(untuned * 1e6, 3) if timed else None,
            "best_latency_us": round(best * 1e6, 3) if timed else None,
        }

    def _seconds_left(self, done: int) -> float | None:
        """Return the estimated seconds for the rest of the budget; None after too few trials."""
        now, limit = self._clock.now(), self._options.rules.seconds
        measured = sum(self._measured.values())
        limits = [] if math.isinf(limit) else [max(limit - self._spent_s(), 0.0)]
        is_unlimited = self._options.rules.trials >= UNLIMITED_TRIALS
        if self._first_trial_s is not None and not is_unlimited:
            if measured >= _MIN_TRIALS:
                pace = (now - self._first_trial_s) / measured
                limits.append((self._options.rules.trials - done) * pace)
            else:
                limits = []
        return round(min(limits), 1) if limits else None

    def _failures(self, key: str) -> list[Failure]:
        return [trial.failure for trial in self._trials[key].in_order() if trial.failure]

    def _repairs(self) -> list[str]:
        repairs = [text for trials in self._trials.values() for text in trials.repairs]
        problems = [
            f"{self._tasks[key].name}: {text}"
            for key, proposals in self._proposals.items()
            for text in proposals.problems
        ]
        return self._ledger_repairs + repairs + problems

    def _make_facts(self, task: Task) -> WorkloadFacts:
        trials = self._trials[task.key]
        best, failures = trials.valid(), self._failures(task.key)
        baseline = trials.baselines.get(self._context.rules_version)
        return WorkloadFacts(
            key=task.key,
            name=task.name,
            trials=self._budget.spent_on(task.key),
            calls=task.calls,
            untuned_us=_microseconds(self._untuned.get(task.key)),
            best_us=_microseconds(best[0].seconds if best else None),
            measured=self._measured[task.key],
            failed=len(failures),
            roofline_us=_microseconds(baseline.least_s or None if baseline else None),
            at_roofline=self._budget.is_at_roofline(task.key),
            finished=task.key in self._budget.finished,
            spread=round(best[0].spread, 4) if best else 0.0,
            seconds=round(self._seconds[task.key], 3),
            first_failure=f"{failures[0].phase}: {failures[0].message}" if failures else "",
            sizes=task.sizes,
        )


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


# ---------------------------------------------------------------- starting points


CheckTrials = Callable[[str, WorkloadLedger], None]
"""A function that quarantines those trials that do not apply to a saved module."""


class StartingPoints:
    """The best trials of workloads on similar targets.

    Attributes:
        measured: How many of these trials were measured on this target.
        targets: Readable texts of the similar targets that these trials are from.
    """

    def __init__(self, ledger: Ledger, check: CheckTrials) -> None:
        self._similar = list_similar_targets(ledger)
        self._check = check
        self._origins: dict[str, str] = {}
        self.measured = 0
        self.targets: list[str] = []
        _log.debug("similar targets: %s", [folder.text for folder in self._similar])

    def find(self, key: str, mod: str) -> list[Trial]:
        """Return the best trials of a workload, with the most similar target's first."""
        best: dict[str, Trial] = {}
        for folder in self._similar:
            trials = WorkloadLedger(folder.path / f"{key}.jsonl")
            if len(trials):
                self._check(mod, trials)
            for trial in trials.valid()[: _MAX_STARTING_POINTS - len(best)]:
                best.setdefault(trial.id, trial)
                self._origins.setdefault(trial.id, folder.text)
        return list(best.values())

    def record(self, trial_id: str) -> None:
        """Count a measured trial if it is a starting point."""
        if trial_id in self._origins:
            self.measured += 1
            if self._origins[trial_id] not in self.targets:
                self.targets.append(self._origins[trial_id])


def list_similar_targets(ledger: Ledger) -> list[TargetFolder]:
    """Return the targets with the same code; same devices first, then by similar thread count."""
    folders = list_target_folders(ledger.folder.parent)
    own = next((folder.description for folder in folders if folder.path == ledger.folder), None)
    if own is None:
        return []

    def distance(other: TargetDescription) -> tuple[bool, float]:
        ratio = (other.threads or 1) / (own.threads or 1)
        return other.device != own.device, abs(math.log2(ratio))

    similar = [
        (distance(folder.description), folder.key, folder)
        for folder in folders
        if folder.description is not None and folder.description.is_similar(own)
    ]
    return [folder for _, _, folder in sorted(similar)]


# ---------------------------------------------------------------- proposals


class Candidate(NamedTuple):
    """A schedule not measured on this target; `proposal` is MetaSchedule's object, or None."""

    id: str
    trace: Json
    proposal: Any


def make_cost_model(kind: str) -> Any:
    """Make MetaSchedule's cost model of this kind.

    Raises:
        EnvironmentProblem: A package that the cost model needs is not installed.
    """
    from tvm.s_tir import meta_schedule as ms

    if kind == "xgb":
        # Batches are small, so the model may predict after the first one. With several threads, training took ten
        # times as long, because they wait for each other every few microseconds.
        return ms.cost_model.XGBModel(num_warmup_samples=BATCH_SIZE, num_tuning_cores=1)
    try:
        return ms.cost_model.CostModel.create(kind)
    except ImportError as error:
        raise EnvironmentProblem(
            f"the cost model '{kind}' needs a package that is not installed: {error.name}",
            fix=f"`pip install {error.name}`, or choose tune.cost_model: xgb",
        ) from error


class Proposals:
    """The search for one workload: proposes new schedules and learns from measured ones.

    It begins with the best schedules on similar targets. If a schedule rule fits the kernel, only the rule's candidates
    follow, ranked by estimated cost. For other kernels, MetaSchedule proposes random schedules, then evolves them.
    Evolution needs a measured population: without one, the same result costs forty times as much. MetaSchedule fails
    on loops of dynamic extents (apache-tvm 0.27).

    Attributes:
        problems: A sentence for each part of the search that failed.
    """

    def __init__(
        self,
        mod: str,
        trials: WorkloadLedger,
        context: MeasureContext,
        options: SearchOptions,
        find_cost_model: Callable[[], Any] | None,
        starting_points: Sequence[Trial] = (),
    ) -> None:
        """Prepare the search for a saved module.

        `find_cost_model` returns MetaSchedule's cost model, which all workloads share; it is None for a workload with
        dynamic shapes. `starting_points` are trials on similar targets.
        """
        import tvm
        from tvm.s_tir import meta_schedule as ms

        target = context.target
        self.problems: list[str] = []
        self._mod = tvm.ir.load_json(mod)
        self._trials = trials
        self._starting_points = list(starting_points)
        self._learned: set[str] = set()
        self._left_over: deque[Candidate] = deque()
        self._random: Any = None
        self._evolution: Any = None
        self._rule_candidates: Iterator[Candidate] = iter(())
        if find_cost_model is None or options.strategy == "evolutionary":
            candidates = self._generate_rule_candidates(context)
            # skip the first candidate, the untuned kernel, which was measured already
            if next(candidates, None) is not None or find_cost_model is None:
                self._rule_candidates = candidates
                return
        self._cost_model = find_cost_model()
        self._target = tvm.target.Target(dict(target))
        backend = backend_for(target)
        cores = 1 if backend.RUNS_ON_HOST_CPU else read_host().cores
        self._threads = split_threads(target)[1] or cores
        self._space = make_space(backend.SEARCH_RULES)
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(self._mod)
        self._seed = _derive_seed(options.seed, trials.path.stem, len(trials))
        self._random = self._make_context(ms.search_strategy.ReplayTrace())
        if options.strategy == "evolutionary":
            self._evolution = self._make_context(
                ms.search_strategy.EvolutionarySearch(
                    population_size=_POPULATION, init_min_unmeasured=BATCH_SIZE
                )
            )

    def _generate_rule_candidates(self, context: MeasureContext) -> Iterator[Candidate]:
        """Yield the schedules of the rule that fits the kernel; the first one is the untuned kernel's."""
        from tvmflow.compiler import generate_schedules

        choices = generate_schedules(self._mod, context.target, context.rules_version)
        return (self._candidate(choice.schedule) for choice in choices)

    def _make_context(self, strategy: Any) -> Any:
        from tvm.s_tir import meta_schedule as ms

        context = ms.TuneContext(
            self._mod,
            target=self._target,
            space_generator=self._space,
            search_strategy=strategy,
            rand_state=self._seed,
            num_threads=self._threads,
        )
        # MetaSchedule must not end the search: the budget does.
        context.pre_tuning(
            max_trials=1 << 30,
            num_trials_per_iter=BATCH_SIZE,
            design_spaces=context.generate_design_space(),
            database=self._database,
            cost_model=self._cost_model,
        )
        return context

    # ---------------------------------------------------------------- proposing

    def propose(self, size: int) -> list[Candidate]:
        """Return up to `size` schedules that the ledger lacks; none if the space seems exhausted."""
        self._recall()
        fresh: dict[str, Candidate] = {}
        known = (
            self._replay(trial)
            for trial in self._starting_points
            if trial.id not in self._trials.trials
        )
        for candidate in itertools.chain(known, self._rule_candidates, self._draw()):
            if candidate.id not in self._trials.trials:
                fresh.setdefault(candidate.id, candidate)
            if len(fresh) == size:
                break
        return list(fresh.values())

    def _candidate(self, schedule: Schedule) -> Candidate:
        trace = trace_json(schedule.trace)
        return Candidate(trial_id(trace), trace, self._make_proposal(schedule))

    def _replay(self, trial: Trial) -> Candidate:
        """Return a recorded schedule as a candidate. Raises any exception of TVM."""
        proposal = self._make_proposal(apply_trace(self._mod, trial.trace))
        return Candidate(trial.id, trial.trace, proposal)

    def _make_proposal(self, schedule: Schedule) -> Any:
        if self._random is None:
            return None
        from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

        return MeasureCandidate(schedule, self._arguments)

    @property
    def _can_evolve(self) -> bool:
        return self._evolution is not None and len(self._trials) >= BATCH_SIZE

    def _draw(self) -> Iterator[Candidate]:
        """Yield schedules from MetaSchedule; the last ones are random, because evolution misses some."""
        if self._can_evolve:
            # Drop random schedules of an earlier draw, because evolution finds better ones.
            self._left_over.clear()
        while self._left_over:
            yield self._left_over.popleft()
        for draw in range(_MAX_DRAWS if self._random is not None else 0):
            if self._can_evolve and draw < _MAX_DRAWS // 2:
                proposals = self._evolve()
            else:
                proposals = self._random.generate_measure_candidates() or []
            self._left_over.extend(self._candidate(proposal.sch) for proposal in proposals)
            while self._left_over:
                yield self._left_over.popleft()

    def _evolve(self) -> Sequence[Any]:
        """Return a batch from evolution; if it fails, on a trial it cannot mutate, go on without it."""
        try:
            return self._evolution.generate_measure_candidates() or []
        except RuntimeError as error:
            self._evolution = None
            self.problems.append(
                f"evolutionary search failed, random search continues: {last_line(error)}"
            )
            _log.debug("%s", self.problems[-1])
            return []

    # ---------------------------------------------------------------- learning

    def learn(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        """Add measured trials to the population and to the cost model."""
        if self._random is None:
            return
        from tvm.s_tir.meta_schedule.database import TuningRecord
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        proposals = [candidate.proposal for candidate in candidates]
        results = [
            RunnerResult(list(trial.run_secs) or None, trial.failure and trial.failure.message)
            for trial in trials
        ]
        self._cost_model.update(self._random, proposals, results)
        for candidate, trial in zip(candidates, trials, strict=True):
            self._learned.add(trial.id)
            if trial.run_secs and _has_choices(trial.trace):
                trace, run_secs = candidate.proposal.sch.trace, list(trial.run_secs)
                self._database.commit_tuning_record(
                    TuningRecord(trace, self._workload, run_secs, self._target, self._arguments)
                )

    def _recall(self) -> None:
        """Learn from trials in the ledger that are new here, of earlier runs and other processes."""
        if self._random is None:
            return
        unknown = [trial for trial in self._trials.in_order() if trial.id not in self._learned]
        candidates, trials = [], []
        for trial in unknown[-_MAX_RECALLED:]:
            if trial.failure and trial.failure.phase == "apply":
                continue
            try:
                candidates.append(self._replay(trial))
                trials.append(trial)
            except Exception as error:
                reason = f"its trace no longer applies: {type(error).__name__}"
                self._trials.quarantine([trial.id], reason)
        if candidates:
            self.learn(candidates, trials)
        self._learned.update(trial.id for trial in unknown)


def make_space(rules: str) -> Any:
    """Return MetaSchedule's space generator with a backend's rules; TVM's default if `rules` is empty."""
    from tvm.s_tir import meta_schedule as ms

    if not rules:
        return "post-order-apply"
    return ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=rules, mutator_probs=rules)


def _has_choices(trace: Json) -> bool:
    """Return whether a trace has a decision that evolution can change."""
    instructions, _ = trace
    return any(str(instruction[0]).startswith("Sample") for instruction in instructions)


def _derive_seed(seed: int, key: str, trials: int) -> int:
    """Return a seed (1 to 2³¹-1, as TVM requires) for one workload; each resumption has its own."""
    digest = hashlib.sha256(f"{seed}:{key}:{trials}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (2**31 - 2) + 1
