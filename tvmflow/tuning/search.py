"""The search: spends the budget on trials that the ledger lacks, and records each of them.

The ledger is the only memory. Its trials are fed back into the search and its cost model, are
counted in the budget, and are never measured again.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from tvmflow.core import spans
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning.budget import Budget, Task, end_name, find_time_shares, workload_shares
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.measurer import DriftMonitor, MeasureContext, MeasureJob, Measurer
from tvmflow.tuning.proposals import (
    Candidate,
    OpenProposals,
    Proposals,
    RelatedTrials,
    StartingPoints,
    make_cost_model,
)
from tvmflow.tuning.roofline import Roofline
from tvmflow.tuning.trials import Failure, SearchEnd, SearchTime, Trial, timestamp
from tvmflow.tuning.tuning_job import SearchOptions, StopReason, TuningResult, WorkloadResult

_log = logging.getLogger(__name__)

# Before so many trials, the first of which start slowly, nothing is said of the time that is left.
_FEWEST_TRIALS: Final = 8
# An untuned kernel that takes longer is timed once.
_SLOW_S: Final = 0.1


class Tuning:
    """A tuning: spends the part of the budget that the ledger lacks.

    Killed at any moment and run again, it resumes, and only the trials are lost that were being
    measured.
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
        """Prepare a tuning.

        Args:
            tasks: The workloads.
            options: How to search.
            context: Where trials are made.
            ledger: The trials on the target.
            fork_server: Where children are forked.
            emit: Takes an event after each trial.
            measurer: What measures; by default this machine.
            measure_roofline: Measures what the machine can do; None where that is not known.
        """
        self._tasks = {task.key: task for task in tasks}
        self._options = options
        self._context = context
        self._emit = emit
        self._measurer = measurer or Measurer(
            context, options.timing, options.trial_timeout_s, fork_server
        )
        self._measure_roofline = measure_roofline
        self._clock = context.clock
        self._started = self._clock.now()
        self._trials = {key: ledger.workload(key) for key in self._tasks}
        self._ledger_repairs = ledger.repairs
        self._related = RelatedTrials(ledger, self._trials, fork_server, context.target)
        self._starting_points = StartingPoints(ledger, self._related.quarantine_inapplicable)
        self._measured = dict.fromkeys(self._tasks, 0)
        self._seconds = dict.fromkeys(self._tasks, 0.0)
        self._noted_s = dict.fromkeys(self._tasks, 0.0)
        self._reused_s = 0.0
        # With no time at all, the trials that the ledger has are counted.
        self._measures = options.rules.minutes != 0
        self._proposals: dict[str, Proposals | OpenProposals] = {}
        self._cost_model: Any = None
        self._spent_in_round = 0
        self._untuned: dict[str, float] = {}
        self._best = {
            key: trials.valid()[0].seconds for key, trials in self._trials.items() if trials.valid()
        }
        self._first_trial_s: float | None = None
        self._drift = DriftMonitor(self._measurer, options.seed)

    def run(self) -> TuningResult:
        """Search until the budget or the time is spent, or all search spaces are exhausted."""
        self._untuned = self._measure_untuned()
        self._budget = Budget(
            workload_shares(
                list(self._tasks.values()),
                self._trials,
                self._options.rules,
                self._context.rules_version,
                self._options.name,
            ),
            self._options.rules,
        )
        stopped: StopReason = "budget"
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
        workloads = [self._result(task) for task in ordered]
        return TuningResult(
            workloads=workloads,
            stopped=stopped,
            drift=self._drift.drift,
            repairs=self._repairs(),
            starting_points=self._starting_points.measured,
            near_targets=tuple(self._starting_points.targets),
            spent_s=round(self._spent_s(), 3),
        )

    def _measure_untuned(self) -> dict[str, float]:
        """Return the seconds of each untuned kernel that can be run: the times that tuning has to beat."""
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

        # Beside that time a kernel that takes seconds gets the first look alone.
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
        """Return the seconds of the budget that are spent, by earlier searches on what is reused of them too."""
        return self._reused_s + self._clock.now() - self._started

    def _note_time(self, keys: Iterable[str]) -> None:
        """Have the ledger know the time that was spent on workloads since it was last noted."""
        for key in keys:
            trials, new_s = self._trials[key], self._seconds[key] - self._noted_s[key]
            if new_s > 0 and len(trials):
                earlier_s = trials.search_time.seconds if trials.search_time else 0.0
                self._noted_s[key] = self._seconds[key]
                trials.add([SearchTime(round(earlier_s + new_s, 3), len(trials), timestamp())])

    def _note_end(self) -> None:
        """Have the ledger know that each workload has had its share of this budget."""
        rules, tasks = self._options.rules, list(self._tasks.values())
        name = end_name(self._options.name, rules)
        shares = find_time_shares(tasks, self._trials, self._context.rules_version)
        for key, trials in self._trials.items():
            share = round(shares[key], 6)
            end = SearchEnd(
                search=name,
                limit=rules.trials,
                minutes=rules.minutes,
                share=share,
                trials=len(trials),
                when=timestamp(),
            )
            trials.add([end])

    # ---------------------------------------------------------------- one round of the budget

    def _run_round(self, planned: Mapping[str, int]) -> None:
        """Give each workload its trials: those of the ledger first, measured ones beyond that."""
        goals = {key: self._budget.spent_on(key) + count for key, count in planned.items()}
        measured_before = dict(self._measured)
        self._spent_in_round = sum(
            min(len(self._trials[key]), goal) - self._budget.spent_on(key)
            for key, goal in goals.items()
        )
        with contextlib.ExitStack() as locks:
            # Always in one order, so that two runs never wait for each other.
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
            # Without time left, the next round ends the run.
            is_exhausted = len(trials) < count and (is_time_left or not self._measures)
            reused = max(len(trials) - (self._measured[key] - measured_before[key]), 0)
            times = [trial.seconds for trial in trials]
            self._budget.record(key, times, reused=reused, exhausted=is_exhausted)
        self._reused_s = self._budget.reused_s
        self._spent_in_round = 0

    def _missing_trials(self, goals: Mapping[str, int]) -> dict[str, int]:
        """Return how many trials have to be measured by workload, without exhausted ones."""
        missing = {key: goal - len(self._trials[key]) for key, goal in goals.items()}
        return {
            key: count
            for key, count in missing.items()
            if count > 0 and not self._trials[key].is_exhausted(self._options.name)
        }

    def _measure_candidates(self, missing: Mapping[str, int]) -> bool:
        """Measure new candidates of workloads; return whether there were any."""
        if self._first_trial_s is None:
            self._first_trial_s = self._clock.now()
        chosen = self._propose(missing)
        learned: dict[str, list[tuple[Candidate, Trial]]] = {}
        start = self._clock.now()

        def record(index: int, trial: Trial) -> None:
            nonlocal start
            key, candidate = chosen[index]
            self._trials[key].append(trial)
            self._best[key] = min(self._best.get(key, math.inf), trial.seconds)
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
            start = self._clock.now()
            with spans.span(f"cost model of {self._tasks[key].name}"):
                self._proposals[key].learn(candidates, trials)
            self._seconds[key] += self._clock.now() - start
        self._note_time(learned)
        return bool(chosen)

    def _propose(self, missing: Mapping[str, int]) -> list[tuple[str, Candidate]]:
        """Return up to so many new candidates of each workload, and mark exhausted searches."""
        chosen: list[tuple[str, Candidate]] = []
        for key, count in missing.items():
            start = self._clock.now()
            with spans.span(f"candidates of {self._tasks[key].name}"):
                candidates = self._proposals_for(key).propose(count)
            self._seconds[key] += self._clock.now() - start
            if not candidates:
                _log.debug("the search space of workload %s is exhausted", key[:12])
                self._trials[key].mark_exhausted(self._options.name)
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

    def _proposals_for(self, key: str) -> Proposals | OpenProposals:
        if key not in self._proposals:
            self._related.quarantine_inapplicable(self._tasks[key].mod, self._trials[key])
            self._proposals[key] = (
                self._make_open_proposals(key)
                if self._tasks[key].sizes
                else self._make_proposals(key)
            )
        return self._proposals[key]

    def _make_proposals(self, key: str) -> Proposals:
        mod, options = self._tasks[key].mod, self._options
        if self._cost_model is None:
            self._cost_model = make_cost_model(options.cost_model)
        return Proposals(
            mod,
            self._trials[key],
            self._context,
            options,
            self._cost_model,
            find_related=lambda: self._related.find(key),
            starting_points=self._starting_points.find(key, mod),
        )

    def _make_open_proposals(self, key: str) -> OpenProposals:
        mod = self._tasks[key].mod
        return OpenProposals(
            mod,
            self._trials[key],
            self._context,
            find_related=lambda: self._related.find(key),
            starting_points=self._starting_points.find(key, mod),
        )

    # ---------------------------------------------------------------- results

    def _progress_event(self, task: Task) -> dict[str, Any]:
        """Return the event after a trial of a workload."""
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
        """Return the estimated latency (µs) untuned and with the best trials, of the kernels that are timed."""
        timed = [task for key, task in self._tasks.items() if key in self._untuned]
        untuned = sum(task.calls * self._untuned[task.key] for task in timed)
        best = sum(
            task.calls * min(self._untuned[task.key], self._best.get(task.key, math.inf))
            for task in timed
        )
        return {
            "untuned_latency_us": round(untuned * 1e6, 3) if timed else None,
            "best_latency_us": round(best * 1e6, 3) if timed else None,
        }

    def _seconds_left(self, done: int) -> float | None:
        """Return how long the rest of the budget takes; None as long as too few trials say it."""
        now, limit = self._clock.now(), self._options.rules.seconds
        measured = sum(self._measured.values())
        limits = [] if math.isinf(limit) else [max(limit - self._spent_s(), 0.0)]
        is_unlimited = self._options.rules.trials >= UNLIMITED_TRIALS
        if self._first_trial_s is not None and not is_unlimited:
            if measured >= _FEWEST_TRIALS:
                pace = (now - self._first_trial_s) / measured
                limits.append((self._options.rules.trials - done) * pace)
            else:
                limits = []
        return round(min(limits), 1) if limits else None

    def _failures(self, key: str) -> list[Failure]:
        return [trial.failure for trial in self._trials[key].in_order() if trial.failure]

    def _repairs(self) -> list[str]:
        repairs = [text for trials in self._trials.values() for text in trials.repairs]
        return (
            self._ledger_repairs
            + repairs
            + [
                f"{self._tasks[key].name}: {text}"
                for key, proposals in self._proposals.items()
                for text in proposals.problems
            ]
        )

    def _result(self, task: Task) -> WorkloadResult:
        trials = self._trials[task.key]
        best = trials.valid()
        failures = self._failures(task.key)
        baseline = trials.baselines.get(self._context.rules_version)
        return WorkloadResult(
            key=task.key,
            name=task.name,
            calls=task.calls,
            flops=task.flops,
            trials=self._budget.spent_on(task.key),
            measured=self._measured[task.key],
            failed=len(failures),
            best_s=best[0].seconds if best else None,
            spread=best[0].spread if best else 0.0,
            exhausted=trials.is_exhausted(self._options.name),
            first_failure=f"{failures[0].phase}: {failures[0].message}" if failures else "",
            seconds=self._seconds[task.key],
            untuned_s=self._untuned.get(task.key),
            known=len(trials.trials),
            least_s=baseline.least_s if baseline else 0.0,
            at_roofline=self._budget.is_at_roofline(task.key),
            finished=task.key in self._budget.finished,
            sizes=task.sizes,
        )
