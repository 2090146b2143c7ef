"""The search: deals the budget, measures what the ledger lacks, and keeps every trial.

The loop is ours, so that the ledger is the only memory. What the ledger holds is fed back into
the search and its cost model, is counted in the budget, and is never measured again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.executors.nursery import Nursery
from tvmflow.tuning.bench import Bench, Job, Site
from tvmflow.tuning.budget import Budget, Rules, Share
from tvmflow.tuning.ledger import Ledger, Trial, WorkloadLedger
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.proposals import Candidate, Proposals, Relative, make_cost_model
from tvmflow.tuning.replay import set_aside

Emit = Callable[[dict[str, Any]], None]

# How many workloads of the same family a new one looks at, and how much of each.
_RELATIVES: Final = 3
_RELATIVE_TRIALS: Final = 64


class Task(NamedTuple):
    """A workload to be tuned: `calls` in one inference, `flops` of each; `mod` is the saved workload."""

    key: str
    name: str
    calls: int
    flops: float
    mod: str


class Options(NamedTuple):
    """The recipe's choices; `seconds` are what is left of the time that tuning may take."""

    rules: Rules
    seed: int
    strategy: str
    cost_model: str
    timing: Timing
    trial_timeout_s: float
    seconds: float | None = None

    @property
    def search(self) -> str:
        """What a search is called in the ledger when it has come to its end."""
        return f"{self.strategy}/{self.seed}"


class Tuned(NamedTuple):
    """What became of one workload: `trials` that it has had, `measured` of them now, the others known before.

    `untuned_s` is what it takes with the schedule that it has without tuning, if that was measured,
    `known` how many trials the ledger has of it.
    """

    key: str
    name: str
    calls: int
    flops: float
    trials: int
    measured: int
    failed: int
    best_s: float | None
    spread: float
    exhausted: bool
    first_failure: str
    seconds: float
    untuned_s: float | None = None
    known: int = 0


class Result(NamedTuple):
    """A whole tuning. `stopped` says what ended it: `budget`, `time`, or `end` (no workload has anything left to try)."""

    tuned: list[Tuned]
    stopped: str
    drift: float
    repairs: list[str]


def tune(
    tasks: Sequence[Task],
    options: Options,
    site: Site,
    ledger: Ledger,
    nursery: Nursery,
    emit: Emit,
    bench: Bench | None = None,
) -> Result:
    """Spend what the budget asks for and the ledger lacks, measured on this machine or on `bench`.

    Killed at any moment and called again, it goes on where it stopped, and the only trials
    that are lost are those that were being measured.
    """
    bench = bench or Bench(site, options.timing, options.trial_timeout_s, nursery)
    return _Run(tasks, options, site, ledger, nursery, emit, bench).run()


class _Run:
    """The state of one call of `tune`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        options: Options,
        site: Site,
        ledger: Ledger,
        nursery: Nursery,
        emit: Emit,
        bench: Bench,
    ) -> None:
        self._tasks = {task.key: task for task in tasks}
        self._options = options
        self._site = site
        self._emit = emit
        self._started = time.monotonic()
        self._bench = bench
        self._ledger = ledger
        self._records = {key: ledger.workload(key) for key in self._tasks}
        self._measured = dict.fromkeys(self._tasks, 0)
        self._seconds = dict.fromkeys(self._tasks, 0.0)
        self._proposals: dict[str, Proposals] = {}
        self._nursery = nursery
        self._vouched: set[Path] = set()
        self._kin: dict[str, list[str]] = {}
        self._cost_model: Any = None
        self._in_step = 0
        self._untuned: dict[str, float] = {}
        self._baseline = _Baseline(self._bench, options.seed)

    def run(self) -> Result:
        stopped = "budget"
        self._untuned = self._measure_untuned()
        shares = [
            Share(task.key, task.calls, task.flops, self._untuned.get(task.key, math.inf))
            for task in self._tasks.values()
        ]
        self._budget = Budget(shares, self._options.rules)
        while step := self._budget.next():
            if not self._has_time():
                stopped = "time"
                break
            self._take(step)
            self._baseline.check(sum(self._measured.values()))
        if stopped == "budget" and self._budget.spent < self._options.rules.trials:
            stopped = "end"
        ordered = sorted(
            self._tasks.values(), key=lambda task: (-task.calls * task.flops, task.key)
        )
        repairs = [text for records in self._records.values() for text in records.repairs]
        repairs += [
            f"{self._tasks[key].name}: {text}"
            for key, search in self._proposals.items()
            for text in search.troubles
        ]
        tuned = [self._result(task) for task in ordered]
        return Result(tuned, stopped, self._baseline.drift, repairs)

    def _measure_untuned(self) -> dict[str, float]:
        """Seconds of each kernel as it is without tuning, those that can be run: what tuning has to beat."""
        missing = [task for task in self._tasks.values() if self._known_untuned(task.key) is None]

        def keep(index: int, trial: Trial) -> None:
            if trial.run_secs:
                self._ledger.note_untuned(missing[index].key, self._site.schedules, trial.seconds)

        # a single repeat: some take seconds
        jobs = [Job(task.key, task.mod, None, 0.0, self._options.seed) for task in missing]
        self._bench.measure(jobs, keep, self._has_time)
        known = {key: self._known_untuned(key) for key in self._tasks}
        return {key: seconds for key, seconds in known.items() if seconds is not None}

    def _known_untuned(self, key: str) -> float | None:
        return self._ledger.untuned(key, self._site.schedules)

    def _has_time(self) -> bool:
        limit = self._options.seconds
        return limit is None or time.monotonic() - self._started < limit

    # ---- one round of the budget

    def _take(self, step: Mapping[str, int]) -> None:
        """Give each workload its share: out of the ledger as far as it goes, measured beyond that."""
        wanted = {key: self._budget.of(key) + number for key, number in step.items()}
        ended: set[str] = set()
        self._in_step = sum(
            min(len(self._records[key]), number) - self._budget.of(key)
            for key, number in wanted.items()
        )
        with contextlib.ExitStack() as alone:
            # always in one order, so that two runs never wait for each other
            for key in sorted(key for key in step if len(self._records[key]) < wanted[key]):
                alone.enter_context(self._records[key].searching())
            while lacking := self._lacking(wanted, ended):
                if not self._has_time() or not self._measure(lacking, ended):
                    break
        for key, number in step.items():
            first = self._budget.of(key)
            trials = list(self._records[key].trials.values())[first : first + number]
            # out of time, the next round ends the run
            end = len(trials) < number and self._has_time()
            self._budget.spend(key, [trial.seconds for trial in trials], end=end)
        self._in_step = 0

    def _lacking(self, wanted: Mapping[str, int], ended: set[str]) -> dict[str, int]:
        """How many trials have to be measured, by workload."""
        missing = {key: number - len(self._records[key]) for key, number in wanted.items()}
        ended |= {
            key
            for key in missing
            if missing[key] > 0 and self._records[key].is_exhausted(self._options.search)
        }
        return {key: number for key, number in missing.items() if number > 0 and key not in ended}

    def _measure(self, lacking: Mapping[str, int], ended: set[str]) -> bool:
        """Measure new candidates for the workloads that lack trials; whether there were any."""
        chosen: list[tuple[str, Candidate]] = []
        for key, number in lacking.items():
            began = time.monotonic()
            candidates = self._search(key).propose(number)
            self._seconds[key] += time.monotonic() - began
            if not candidates:
                self._records[key].mark_exhausted(self._options.search)
            chosen += [(key, candidate) for candidate in candidates]
        kept: dict[str, list[tuple[Candidate, Trial]]] = {}
        began = time.monotonic()

        def keep(index: int, trial: Trial) -> None:
            nonlocal began
            key, candidate = chosen[index]
            self._records[key].append(trial)
            kept.setdefault(key, []).append((candidate, trial))
            self._measured[key] += 1
            self._in_step += 1
            self._seconds[key] += time.monotonic() - began
            began = time.monotonic()
            self._baseline.offer(self._tasks[key].mod, trial, key)
            self._report(self._tasks[key])

        jobs = [self._job(key, candidate) for key, candidate in chosen]
        self._bench.measure(jobs, keep, self._has_time)
        for key, pairs in kept.items():
            self._search(key).learn([each for each, _ in pairs], [trial for _, trial in pairs])
        return bool(chosen)

    def _job(self, key: str, candidate: Candidate) -> Job:
        best = self._records[key].valid()
        known = [best[0].seconds] if best else []
        known += [self._untuned[key]] if key in self._untuned else []
        best_s = min(known, default=None)
        return Job(candidate.id, self._tasks[key].mod, candidate.trace, best_s, self._options.seed)

    def _search(self, key: str) -> Proposals:
        if key not in self._proposals:
            self._vouch(self._tasks[key].mod, self._records[key])
            target, options = self._site.target, self._options
            if self._cost_model is None:
                self._cost_model = make_cost_model(options.cost_model)
            self._proposals[key] = Proposals(
                self._tasks[key].mod,
                target,
                self._site.schedules,
                options.strategy,
                options.seed,
                self._records[key],
                self._cost_model,
                lambda: self._relatives(key),
            )
        return self._proposals[key]

    def _vouch(self, mod: str, records: WorkloadLedger) -> None:
        """Let a child apply what the ledger holds first: a trace that no search wrote can crash the process."""
        if records.path not in self._vouched:
            self._vouched.add(records.path)
            set_aside(self._nursery, mod, self._site.target, records)

    def _relatives(self, key: str) -> list[Relative]:
        """The nearest workloads of the same family that were measured on this target."""
        if key not in self._kin:
            self._kin[key] = self._ledger.relatives(key)
        found: list[Relative] = []
        for other in self._kin[key]:
            records = self._records.get(other) or self._ledger.workload(other)
            mod = self._ledger.kernel(other)
            if len(found) == _RELATIVES or not (len(records) and mod):
                continue
            self._vouch(mod, records)
            if trials := records.valid()[:_RELATIVE_TRIALS]:
                found.append(Relative(mod, trials))
        return found

    # ---- what is told of it

    def _report(self, task: Task) -> None:
        records = self._records[task.key]
        best = records.valid()
        untuned = self._untuned.get(task.key)
        measured = sum(self._measured.values())
        done = self._budget.spent + self._in_step
        elapsed = time.monotonic() - self._started
        self._emit(
            {
                "event": "progress",
                "unit": "trial",
                "done": done,
                "total": self._options.rules.trials,
                "workload": task.name,
                "calls": task.calls,
                "trials": len(records),
                "best_us": round(best[0].seconds * 1e6, 3) if best else None,
                "untuned_us": round(untuned * 1e6, 3) if untuned else None,
                "gflops": round(task.flops / best[0].seconds / 1e9, 3) if best else None,
                "spread": round(best[0].spread, 4) if best else None,
                "failed": sum(self._failed(key) for key in self._tasks),
                "seconds_left": round(self._seconds_left(done, measured, elapsed), 1),
            }
        )

    def _seconds_left(self, done: int, measured: int, elapsed: float) -> float:
        left = (self._options.rules.trials - done) * elapsed / max(measured, 1)
        limit = self._options.seconds
        return left if limit is None else max(min(left, limit - elapsed), 0.0)

    def _failed(self, key: str) -> int:
        return sum(1 for trial in self._records[key].trials.values() if trial.failure)

    def _result(self, task: Task) -> Tuned:
        records = self._records[task.key]
        best = records.valid()
        failures = [trial.failure for trial in records.trials.values() if trial.failure]
        return Tuned(
            key=task.key,
            name=task.name,
            calls=task.calls,
            flops=task.flops,
            trials=self._budget.of(task.key),
            measured=self._measured[task.key],
            failed=len(failures),
            best_s=best[0].seconds if best else None,
            spread=best[0].spread if best else 0.0,
            exhausted=records.is_exhausted(self._options.search),
            first_failure=f"{failures[0].phase}: {failures[0].message}" if failures else "",
            seconds=self._seconds[task.key],
            untuned_s=self._untuned.get(task.key),
            known=len(records.trials),
        )


class _Baseline:
    """One good schedule that is measured again now and then, to see whether the machine has changed."""

    EVERY = 64

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._seed = seed
        self._chosen: tuple[str, Trial] | None = None
        self._key = ""
        self._last = 0
        self.drift = 0.0
        """The largest change of its time so far, relative: 0.1 when it became a tenth slower or faster."""

    def offer(self, mod: str, trial: Trial, key: str) -> None:
        """Take the first trial that worked in this run."""
        if self._chosen is None and trial.run_secs:
            self._chosen, self._key = (mod, trial), key

    def check(self, measured: int) -> None:
        """Measure it again when enough trials went by since the last time."""
        if self._chosen is None or measured - self._last < self.EVERY:
            return
        self._last = measured
        mod, trial = self._chosen
        again: list[Trial] = []
        job = Job(trial.id, mod, trial.trace, None, self._seed)
        self._bench.measure([job], lambda _, found: again.append(found))
        if again and again[0].run_secs:
            change = abs(again[0].seconds / trial.seconds - 1)
            self.drift = max(self.drift, change)
