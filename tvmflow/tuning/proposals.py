"""What to try next: MetaSchedule proposes schedules, from what the ledger has and what was learned of it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule, Trace

from tvmflow import schedules
from tvmflow.errors import EnvironmentProblem
from tvmflow.targets.gpu import CUDA
from tvmflow.targets.host import read_host
from tvmflow.tuning.budget import BATCH
from tvmflow.tuning.inherit import inherited
from tvmflow.tuning.ledger import Trial, WorkloadLedger, trial_id
from tvmflow.tuning.measure import trace_json
from tvmflow.values import Json

# Evolution costs what its population costs, whatever the batch: four candidates for each one
# that is measured keeps it at about the price of building that one.
_POPULATION: Final = 4 * BATCH
# How many records of a workload the cost model and the population start from.
_RECALL: Final = 256
_DRAWS_BEFORE_GIVING_UP: Final = 6
# How many of the rules' schedules are tried before anything is searched for.
_MOST_RULED: Final = 32
# How many of a relative's best schedules are tried.
_INHERITED: Final = 4


class Candidate(NamedTuple):
    """A schedule that nobody has measured on this target."""

    id: str
    trace: Json
    proposal: Any


def make_cost_model(kind: str) -> Any:
    """MetaSchedule's cost model by its name. Raises EnvironmentProblem when its package is missing."""
    if kind == "xgb":
        # our batches are small: it may speak after the first one. And threads that wait for each other
        # in turns of microseconds made its training ten times as long
        return ms.cost_model.XGBModel(num_warmup_samples=BATCH, num_tuning_cores=1)
    try:
        return ms.cost_model.CostModel.create(kind)
    except ImportError as missing:
        raise EnvironmentProblem(
            f"the cost model '{kind}' needs a package that is not installed: {missing.name}",
            fix=f"`pip install {missing.name}`, or choose tune.cost_model: xgb",
        ) from missing


class Relative(NamedTuple):
    """A workload of the same family in another shape: its saved module, and its best trials."""

    mod: str
    trials: list[Trial]


class Proposals:
    """The search for one workload: proposes what is new, learns from what was measured.

    `mod` is the saved workload, `rules` the version of the schedules that are tried first (0: none), `strategy` is `evolutionary` or `replay-trace`. A workload
    nobody knows starts with random schedules. Evolution needs a population that was measured,
    and without one costs forty times as much for the same.
    """

    def __init__(
        self,
        mod: str,
        target: Mapping[str, Json],
        rules: int,
        strategy: str,
        seed: int,
        records: WorkloadLedger,
        cost_model: Any,
        relatives: Callable[[], list[Relative]] = list,
    ) -> None:
        self._relatives = relatives
        self._mod = tvm.ir.load_json(mod)
        self._target = tvm.target.Target(dict(target))
        is_gpu = target["kind"] == CUDA
        self._threads = int(target.get("num-cores", read_host().cores if is_gpu else 1))
        # TVM would take the rules for tensor cores, which are for float16
        self._space = (
            ms.space_generator.PostOrderApply(sch_rules=CUDA, postprocs=CUDA, mutator_probs=CUDA)
            if is_gpu
            else "post-order-apply"
        )
        self._records = records
        self._cost_model = cost_model
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(self._mod)
        self._learned: set[str] = set()
        self._left_over: dict[str, Candidate] = {}
        self.troubles: list[str] = []
        # another one after each resumption
        self._seed = _seed(seed, records.path.stem, len(records))
        self._random = self._context(ms.search_strategy.ReplayTrace())
        self._evolution: Any = None
        self._rules: Iterator[schedules.Choice] = iter(())
        if strategy == "evolutionary":
            machine = schedules.machine_of(target, rules)
            if machine is not None:
                ruled = schedules.candidates(self._mod, machine)
                self._rules = itertools.islice(ruled, 1, 1 + _MOST_RULED)
            self._evolution = self._context(
                ms.search_strategy.EvolutionarySearch(
                    population_size=_POPULATION, init_min_unmeasured=BATCH
                )
            )

    def _context(self, strategy: Any) -> Any:
        context = ms.TuneContext(
            self._mod,
            target=self._target,
            space_generator=self._space,
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
        taken_over = [*self._inherit()[: max(size // 2, 1)], *self._ruled(size)]
        # what was drawn at random and not asked for; once evolution has something to breed from, it knows better
        fresh = {} if self._evolves else self._left_over
        self._left_over = {}
        fresh = {name: each for name, each in fresh.items() if name not in self._records.trials}
        fresh = {**{each.id: each for each in taken_over}, **fresh}
        for draw in range(_DRAWS_BEFORE_GIVING_UP):
            if len(fresh) >= size:
                break
            for candidate in self._draw(draw):
                if candidate.id not in self._records.trials:
                    fresh.setdefault(candidate.id, candidate)
        chosen = list(fresh.values())
        self._left_over = {each.id: each for each in chosen[size:]}
        return chosen[:size]

    def _ruled(self, size: int) -> list[Candidate]:
        """What the rules of `tvmflow.schedules` know besides the default, which was measured as the untuned kernel."""
        found: list[Candidate] = []
        while len(found) < size and (choice := next(self._rules, None)) is not None:
            trace = trace_json(choice.schedule.trace)
            proposal = ms.search_strategy.MeasureCandidate(choice.schedule, self._arguments)
            candidate = Candidate(trial_id(trace), trace, proposal)
            if candidate.id not in self._records.trials:
                found.append(candidate)
        return found

    def _inherit(self) -> list[Candidate]:
        """Relatives' best schedules on this workload, while it knows little of its own."""
        if len(self._records) >= 2 * BATCH:
            return []
        found: dict[str, Candidate] = {}
        postprocs = self._random.space_generator.postprocs or []
        for relative in self._relatives():
            self._learn_from(relative)
            traces = [trial.trace for trial in relative.trials[:_INHERITED]]
            for schedule in inherited(self._mod, traces, postprocs, self._seed):
                trace = trace_json(schedule.trace)
                proposal = ms.search_strategy.MeasureCandidate(schedule, self._arguments)
                candidate = Candidate(trial_id(trace), trace, proposal)
                if candidate.id not in self._records.trials:
                    found.setdefault(candidate.id, candidate)
        return list(found.values())

    def _learn_from(self, relative: Relative) -> None:
        """Show a relative's trials to the cost model, once."""
        new = [trial for trial in relative.trials if trial.id not in self._learned]
        self._learned.update(trial.id for trial in new)
        if not new:
            return
        mod = tvm.ir.load_json(relative.mod)
        arguments = ms.arg_info.ArgInfo.from_entry_func(mod)
        pairs = []
        for trial in new:
            with contextlib.suppress(Exception):
                schedule = Schedule(mod, seed=1)
                Trace.apply_json_to_schedule(trial.trace, schedule)
                pairs.append((ms.search_strategy.MeasureCandidate(schedule, arguments), trial))
        context = ms.TuneContext(mod, target=self._target, num_threads=self._threads)
        self._cost_model.update(
            context, [each for each, _ in pairs], [_result(trial) for _, trial in pairs]
        )

    @property
    def _evolves(self) -> bool:
        return self._evolution is not None and len(self._records) >= BATCH

    def _draw(self, draw: int) -> Iterable[Candidate]:
        """One batch from the strategy; the last draws are random, for what evolution never reaches."""
        breeds = self._evolves and draw < _DRAWS_BEFORE_GIVING_UP // 2
        for proposal in (
            self._bred() if breeds else self._random.generate_measure_candidates() or []
        ):
            trace = trace_json(proposal.sch.trace)
            yield Candidate(trial_id(trace), trace, proposal)

    def _bred(self) -> Sequence[Any]:
        """A batch from evolution. A record that it cannot breed from must not end the tuning."""
        try:
            return self._evolution.generate_measure_candidates() or []
        except RuntimeError as error:
            self._evolution = None
            last = str(error).strip().splitlines()[-1]
            self.troubles.append(f"evolution gave up, random search went on: {last}")
            return []

    def learn(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        """Show measured trials to the population and to the cost model."""
        proposals = [candidate.proposal for candidate in candidates]
        self._cost_model.update(self._random, proposals, [_result(trial) for trial in trials])
        for candidate, trial in zip(candidates, trials, strict=True):
            self._learned.add(trial.id)
            if trial.run_secs and _has_choices(trial.trace):
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


def _has_choices(trace: Json) -> bool:
    """Whether a trace has anything that evolution can change."""
    instructions, _ = trace
    return any(str(each[0]).startswith("Sample") for each in instructions)


def _result(trial: Trial) -> Any:
    message = trial.failure.message if trial.failure else None
    return ms.runner.RunnerResult(list(trial.run_secs) or None, message)


def _seed(seed: int, key: str, trials: int) -> int:
    """A seed of its own for each workload, and another one after each resumption: TVM wants 1 to 2³¹-1."""
    digest = hashlib.sha256(f"{seed}:{key}:{trials}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (2**31 - 2) + 1
