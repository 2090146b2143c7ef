"""The search: MetaSchedule proposes schedules, this module measures the new ones and keeps every one.

The loop is ours, so that the ledger is the only memory. What the ledger holds is fed back into
the search and its cost model, is counted in the budget, and is never measured again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule, Trace

from tvmflow.errors import EnvironmentProblem, StageError
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.targets import devices
from tvmflow.tuning.allocate import allocate
from tvmflow.tuning.ledger import Failure, Ledger, Trial, WorkloadLedger, now, trial_id
from tvmflow.tuning.measure import Timing, trace_json
from tvmflow.values import Json

# Evolution costs what its population costs, whatever the batch: four candidates for each one
# that is measured keeps it at about the price of building that one.
BATCH: Final = 16
_POPULATION: Final = 4 * BATCH
# How many records of a workload the cost model and the population start from.
_RECALL: Final = 256
_DRAWS_BEFORE_GIVING_UP: Final = 6

COST_MODELS: Final = ("xgb", "mlp", "random")
STRATEGIES: Final = ("evolutionary", "replay-trace")

Emit = Callable[[dict[str, Any]], None]


class Task(NamedTuple):
    """A workload to be tuned: `work` is what it contributes to one inference (calls × FLOPs)."""

    key: str
    name: str
    work: float
    mod: str


class Options(NamedTuple):
    """The recipe's choices. `trials` are for all workloads together, `trials_per_task` for one."""

    trials: int
    trials_per_task: int | None
    seed: int
    strategy: str
    cost_model: str
    timing: Timing
    trial_timeout_s: float

    @property
    def search(self) -> str:
        """What a search is called in the ledger when it has come to its end."""
        return f"{self.strategy}/{self.seed}"


class Site(NamedTuple):
    """Where trials are made: the target, who runs them, and what a record says of the place."""

    target: Mapping[str, Json]
    device: Mapping[str, str]
    locks: Path
    tvm: str
    host: Json
    log: Path | None


class Tuned(NamedTuple):
    """What became of one workload. `asked` is its share of the budget after others' remainders."""

    key: str
    name: str
    asked: int
    reused: int
    measured: int
    failed: int
    best_s: float | None
    exhausted: bool
    first_failure: str
    seconds: float


class Candidate(NamedTuple):
    """A schedule that nobody has measured on this target."""

    id: str
    trace: Json
    proposal: Any


def tune(
    tasks: Sequence[Task],
    options: Options,
    site: Site,
    ledger: Ledger,
    nursery: Nursery,
    emit: Emit,
) -> list[Tuned]:
    """Spend what the budget asks for and the ledger lacks. Gives one result for each task.

    Workloads take turns, a batch each. Killed at any moment and called again, it goes on where
    it stopped, and the only trial that is lost is the one that was being measured.
    """
    run = _Run(tasks, options, site, ledger, nursery, emit)
    while run.round():
        pass
    return run.results()


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
    ) -> None:
        self._tasks = sorted(tasks, key=lambda task: (-task.work, task.key))
        self._options = options
        self._site = site
        self._nursery = nursery
        self._emit = emit
        self._records = {task.key: ledger.workload(task.key) for task in tasks}
        self._measured = dict.fromkeys(self._records, 0)
        self._seconds = dict.fromkeys(self._records, 0.0)
        self._reused = dict.fromkeys(self._records, 0)
        self._searches: dict[str, Search] = {}
        self._cost_model = None
        self._asked = self._share_out()
        for key, asked in self._asked.items():
            self._reused[key] = min(asked, len(self._records[key]))

    def _share_out(self) -> dict[str, int]:
        """Each workload's share of the budget; what an exhausted one leaves goes to the others."""
        caps = {
            key: len(records)
            for key, records in self._records.items()
            if records.is_exhausted(self._options.search)
        }
        if self._options.trials_per_task is not None:
            for key in self._records:
                caps[key] = min(self._options.trials_per_task, caps.get(key, self._options.trials))
        shares = [(task.key, task.work) for task in self._tasks]
        return allocate(shares, self._options.trials, caps)

    def round(self) -> bool:
        """A batch for every workload that lacks trials; False when none does."""
        self._asked = self._share_out()
        lacking = [task for task in self._tasks if self._missing(task) > 0]
        for task in lacking:
            started = time.monotonic()
            with self._records[task.key].searching():
                # another run may have measured some while we waited
                if (missing := self._missing(task)) > 0:
                    self._batch(task, min(missing, BATCH))
            self._seconds[task.key] += time.monotonic() - started
        return bool(lacking)

    def _missing(self, task: Task) -> int:
        return self._asked[task.key] - len(self._records[task.key])

    def _batch(self, task: Task, size: int) -> None:
        search = self._search(task)
        candidates = search.propose(size)
        if not candidates:
            self._records[task.key].mark_exhausted(self._options.search)
            return
        trials = []
        for candidate in candidates:
            trial = self._measure(task, candidate)
            trials.append(trial)
            self._records[task.key].append(trial)
            self._measured[task.key] += 1
            self._report(task)
        search.learn(candidates, trials)

    def _search(self, task: Task) -> Search:
        if task.key not in self._searches:
            if self._cost_model is None:
                self._cost_model = make_cost_model(
                    self._options.cost_model, int(self._site.target.get("num-cores", 1))
                )
            self._searches[task.key] = Search(
                task, self._options, self._site.target, self._records[task.key], self._cost_model
            )
        return self._searches[task.key]

    def _measure(self, task: Task, candidate: Candidate) -> Trial:
        phases: list[str] = []
        payload = {
            "mod": task.mod,
            "trace": candidate.trace,
            "target": dict(self._site.target),
            "timing": self._options.timing._asdict(),
        }
        load = tuple(round(value, 2) for value in os.getloadavg())
        with devices.exclusive(self._site.locks, self._site.device):
            outcome = self._nursery.call(
                "tvmflow.tuning.measure:measure_one",
                payload,
                timeout_s=self._options.trial_timeout_s,
                log=self._site.log,
                emit=lambda event: phases.append(event["phase"]),
            )
        if outcome.kind == "cancelled":
            raise StageError(
                "tuning was cancelled", fix="run it again; it goes on where it stopped"
            )
        if outcome.kind in ("error", "crashed") and not phases:
            # nothing of this candidate has been touched yet: it is not its fault
            raise StageError(
                f"trials cannot be run: {outcome.message}",
                fix="run it again; it goes on where it stopped. `tvmflow doctor` checks the installation",
            )
        run_secs, failure = _read(outcome, phases[-1] if phases else "start")
        return Trial(
            id=candidate.id,
            trace=candidate.trace,
            run_secs=run_secs,
            failure=failure,
            when=now(),
            tvm=self._site.tvm,
            host=self._site.host,
            load=load,
            seed=self._options.seed,
        )

    def _report(self, task: Task) -> None:
        best = self._records[task.key].valid()
        self._emit(
            {
                "event": "progress",
                "unit": "trial",
                "done": sum(min(n, len(self._records[key])) for key, n in self._asked.items()),
                "total": sum(self._asked.values()),
                "workload": task.name,
                "best_us": round(best[0].seconds * 1e6, 3) if best else None,
                "failed": sum(self._failed(key) for key in self._asked),
            }
        )

    def _failed(self, key: str) -> int:
        return sum(1 for trial in self._records[key].trials.values() if trial.failure)

    def results(self) -> list[Tuned]:
        """What became of each workload, the heaviest first."""
        return [self._result(task, self._asked[task.key]) for task in self._tasks]

    def _result(self, task: Task, asked: int) -> Tuned:
        records = self._records[task.key]
        best = records.valid()
        failures = [trial.failure for trial in records.trials.values() if trial.failure]
        return Tuned(
            key=task.key,
            name=task.name,
            asked=asked,
            reused=self._reused[task.key],
            measured=self._measured[task.key],
            failed=len(failures),
            best_s=best[0].seconds if best else None,
            exhausted=records.is_exhausted(self._options.search),
            first_failure=f"{failures[0].phase}: {failures[0].message}" if failures else "",
            seconds=self._seconds[task.key],
        )


def _read(outcome: Outcome, phase: str) -> tuple[tuple[float, ...], Failure | None]:
    """Times or a failure, from what a child said or from how it died."""
    if outcome.kind != "ok":
        return (), Failure(phase, outcome.kind, outcome.message)
    if "failure" in outcome.value:
        return (), Failure(kind="error", **outcome.value["failure"])
    return tuple(outcome.value["run_secs"]), None


def make_cost_model(kind: str, cores: int) -> Any:
    """MetaSchedule's cost model by its name. Raises EnvironmentProblem when its package is missing."""
    if kind == "xgb":
        # our batches are small: it may speak after the first one
        return ms.cost_model.XGBModel(num_warmup_samples=BATCH, num_tuning_cores=cores)
    try:
        return ms.cost_model.CostModel.create(kind)
    except ImportError as missing:
        raise EnvironmentProblem(
            f"the cost model '{kind}' needs a package that is not installed: {missing.name}",
            fix=f"`pip install {missing.name}`, or choose tune.cost_model: xgb",
        ) from missing


class Search:
    """The search for one workload: proposes what is new, learns from what was measured.

    A workload nobody knows starts with random schedules. Evolution needs a population that was
    measured, and without one costs forty times as much for the same.
    """

    def __init__(
        self,
        task: Task,
        options: Options,
        target: Mapping[str, Json],
        records: WorkloadLedger,
        cost_model: Any,
    ) -> None:
        self._mod = tvm.ir.load_json(task.mod)
        self._target = tvm.target.Target(dict(target))
        self._threads = int(target.get("num-cores", 1))
        self._records = records
        self._cost_model = cost_model
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(self._mod)
        self._learned: set[str] = set()
        self._seed = _seed(options.seed, task.key, len(records))
        self._random = self._context(ms.search_strategy.ReplayTrace())
        self._evolution = None
        if options.strategy == "evolutionary":
            self._evolution = self._context(
                ms.search_strategy.EvolutionarySearch(
                    population_size=_POPULATION, init_min_unmeasured=BATCH
                )
            )

    def _context(self, strategy: Any) -> Any:
        context = ms.TuneContext(
            self._mod,
            target=self._target,
            space_generator="post-order-apply",
            search_strategy=strategy,
            rand_state=self._seed,
            num_threads=self._threads,
        )
        # our loop decides when it is enough
        context.pre_tuning(
            max_trials=1 << 30,
            num_trials_per_iter=BATCH,
            design_spaces=context.generate_design_space(),
            database=self._database,
            cost_model=self._cost_model,
        )
        return context

    def propose(self, size: int) -> list[Candidate]:
        """Up to `size` schedules that the ledger does not hold; none when the space seems exhausted."""
        self._recall()
        fresh: dict[str, Candidate] = {}
        for draw in range(_DRAWS_BEFORE_GIVING_UP):
            for candidate in self._draw(draw):
                if candidate.id not in self._records.trials:
                    fresh.setdefault(candidate.id, candidate)
            if len(fresh) >= size:
                break
        return list(fresh.values())[:size]

    def _draw(self, draw: int) -> Iterable[Candidate]:
        """One batch from the strategy; the last draws are random, for what evolution never reaches."""
        context = self._random
        if (
            self._evolution is not None
            and len(self._records) >= BATCH
            and draw < _DRAWS_BEFORE_GIVING_UP // 2
        ):
            context = self._evolution
        for proposal in context.generate_measure_candidates() or []:
            trace = trace_json(proposal.sch.trace)
            yield Candidate(trial_id(trace), trace, proposal)

    def learn(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        """Show measured trials to the population and to the cost model."""
        proposals = [candidate.proposal for candidate in candidates]
        self._cost_model.update(self._random, proposals, [_result(trial) for trial in trials])
        for candidate, trial in zip(candidates, trials, strict=True):
            self._learned.add(trial.id)
            if trial.run_secs:
                self._commit(candidate.proposal.sch.trace, trial)

    def _recall(self) -> None:
        """Learn the ledger's records that are not known here yet: earlier runs', and other processes'."""
        unknown = [
            trial for trial in self._records.trials.values() if trial.id not in self._learned
        ]
        candidates, trials = [], []
        for trial in unknown[-_RECALL:]:
            if trial.failure and trial.failure.phase == "apply":
                continue
            try:
                candidates.append(Candidate(trial.id, trial.trace, self._replay(trial.trace)))
            except Exception as error:
                reason = f"its trace no longer applies: {type(error).__name__}"
                self._records.quarantine([trial.id], reason)
            else:
                trials.append(trial)
        if candidates:
            self.learn(candidates, trials)
        self._learned.update(trial.id for trial in unknown)

    def _replay(self, trace: Json) -> Any:
        schedule = Schedule(self._mod, seed=1)
        Trace.apply_json_to_schedule(trace, schedule)
        return ms.search_strategy.MeasureCandidate(schedule, self._arguments)

    def _commit(self, trace: Any, trial: Trial) -> None:
        self._database.commit_tuning_record(
            ms.database.TuningRecord(
                trace, self._workload, list(trial.run_secs), self._target, self._arguments
            )
        )


def _result(trial: Trial) -> Any:
    message = trial.failure.message if trial.failure else None
    return ms.runner.RunnerResult(list(trial.run_secs) or None, message)


def _seed(seed: int, key: str, trials: int) -> int:
    """A seed of its own for each workload, and another one after each resumption: TVM wants 1 to 2³¹-1."""
    digest = hashlib.sha256(f"{seed}:{key}:{trials}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (2**31 - 2) + 1
