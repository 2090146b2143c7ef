"""Proposals: the schedules to measure next, from MetaSchedule, rules and related workloads."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.formatting import last_line
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning.budget import BATCH_SIZE
from tvmflow.tuning.ledger import Ledger, TargetDescription, WorkloadLedger
from tvmflow.tuning.ledger_folders import TargetFolder, list_target_folders
from tvmflow.tuning.measure import apply_trace, trace_json
from tvmflow.tuning.measurer import MeasureContext
from tvmflow.tuning.replay import KernelVerdict, quarantine_inapplicable, verify_kernel
from tvmflow.tuning.trials import Trial, trial_id
from tvmflow.tuning.tuning_job import SearchOptions

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir.schedule import Schedule

# ---------------------------------------------------------------- starting points
# Starting points: the best schedules of a workload on near targets, which are measured here before
# others.
#
# A near target has the same code, and was measured with another number of threads or on another
# device. Its times say nothing of this one, but its best schedules are mostly good here.


_MAX_TRIALS: Final = 8
"""How many schedules of a workload are measured first."""


CheckTrials = Callable[[str, WorkloadLedger], None]
"""Takes a saved module and trials, and quarantines those that do not apply to it."""


class StartingPoints:
    """The best trials of workloads on near targets.

    Attributes:
        measured: How many of them were measured here.
        targets: The near targets that they are from, for people.
    """

    def __init__(self, ledger: Ledger, check: CheckTrials) -> None:
        """Look for near targets.

        Args:
            ledger: The ledger of the target to tune for; the others are beside it.
            check: What quarantines trials that do not apply.
        """
        self._near = list_near_targets(ledger)
        self._check = check
        self._origins: dict[str, str] = {}
        self.measured = 0
        self.targets: list[str] = []
        _log.debug("near targets: %s", [folder.text for folder in self._near])

    def find(self, key: str, mod: str) -> list[Trial]:
        """Return the best trials of a workload, those of the nearest target first."""
        best: dict[str, Trial] = {}
        for folder in self._near:
            trials = WorkloadLedger(folder.path / f"{key}.jsonl")
            if len(trials):
                self._check(mod, trials)
            for trial in trials.valid()[: _MAX_TRIALS - len(best)]:
                best.setdefault(trial.id, trial)
                self._origins.setdefault(trial.id, folder.text)
        return list(best.values())

    def record(self, trial_id: str) -> None:
        """Count a trial that was measured here, if it is one of these."""
        if trial_id in self._origins:
            self.measured += 1
            if self._origins[trial_id] not in self.targets:
                self.targets.append(self._origins[trial_id])


def list_near_targets(ledger: Ledger) -> list[TargetFolder]:
    """Return the targets with the same code: of the same device first, then with similar threads."""
    folders = list_target_folders(ledger.folder.parent)
    own = next((folder.description for folder in folders if folder.path == ledger.folder), None)
    if own is None:
        return []

    def distance(other: TargetDescription) -> tuple[bool, float]:
        ratio = (other.threads or 1) / (own.threads or 1)
        return other.device != own.device, abs(math.log2(ratio))

    near = [
        (distance(folder.description), folder.key, folder)
        for folder in folders
        if folder.description is not None and folder.description.is_near(own)
    ]
    return [folder for _, _, folder in sorted(near)]


# Evolution costs what its population costs, whatever the batch: four candidates for each one
# that is measured keep it at about the price of building that one.
_POPULATION: Final = 4 * BATCH_SIZE
# How many trials of a workload the cost model and the population start from.
_MAX_RECALLED: Final = 256
_MAX_DRAWS: Final = 6
# How many schedules of the rules are tried before the search begins.
_MAX_RULE_SCHEDULES: Final = 32
# How many of a related workload's best schedules are tried.
_MAX_RELATED_SCHEDULES: Final = 4
_log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A schedule that was not measured on this target; `proposal` is MetaSchedule's object."""

    id: str
    trace: Json
    proposal: Any


def make_cost_model(kind: str) -> Any:
    """Return MetaSchedule's cost model of a name.

    Raises:
        EnvironmentProblem: A package that it needs is not installed.
    """
    from tvm.s_tir import meta_schedule as ms

    if kind == "xgb":
        # Batches are small: the model may predict after the first one. With several threads,
        # which wait for each other every few microseconds, training took ten times as long.
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

    An unknown workload starts with random schedules. Evolution needs a measured population, and
    without one costs forty times as much for the same.

    Attributes:
        problems: A sentence for each part of the search that failed.
    """

    def __init__(
        self,
        mod: str,
        trials: WorkloadLedger,
        context: MeasureContext,
        options: SearchOptions,
        cost_model: Any,
        find_related: Callable[[], list[RelatedWorkload]],
        starting_points: Sequence[Trial] = (),
    ) -> None:
        """Prepare the search.

        Args:
            mod: The saved module of the workload.
            trials: The trials of the workload.
            context: Its target, and the version of the schedule rules that are tried first.
            options: How to search.
            cost_model: MetaSchedule's cost model, shared by all workloads.
            find_related: Returns related workloads.
            starting_points: Trials of the workload on near targets, which are measured here first.
        """
        import tvm
        from tvm.s_tir import meta_schedule as ms

        target = context.target
        self.problems: list[str] = []
        self._find_related = find_related
        self._mod = tvm.ir.load_json(mod)
        self._target = tvm.target.Target(dict(target))
        backend = backend_for(target)
        cores = 1 if backend.RUNS_ON_HOST_CPU else read_host().cores
        self._threads = split_threads(target)[1] or cores
        self._space = _make_space(backend.SEARCH_RULES)
        self._trials = trials
        self._cost_model = cost_model
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(self._mod)
        self._learned: set[str] = set()
        self._left_over: list[Candidate] = []
        self._starting_points = list(starting_points)
        self._seed = _derive_seed(options.seed, trials.path.stem, len(trials))
        self._random = self._make_context(ms.search_strategy.ReplayTrace())
        self._evolution: Any = None
        self._rule_candidates: Iterator[Candidate] = iter(())
        if options.strategy == "evolutionary":
            self._rule_candidates = self._generate_rule_candidates(context)
            self._evolution = self._make_context(
                ms.search_strategy.EvolutionarySearch(
                    population_size=_POPULATION, init_min_unmeasured=BATCH_SIZE
                )
            )

    def _generate_rule_candidates(self, context: MeasureContext) -> Iterator[Candidate]:
        """Yield new schedules of the schedule rules."""
        candidates = _generate_rule_candidates(self._mod, context)
        for candidate in itertools.islice(candidates, _MAX_RULE_SCHEDULES):
            if self._is_new(candidate):
                yield self._candidate(candidate.proposal)

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
        # The budget ends the search, not MetaSchedule.
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
        """Return up to `size` schedules that the ledger lacks; none when the space seems exhausted."""
        self._recall()
        related = self._related_candidates()[: max(size // 2, 1)]
        candidates = [
            *self._starting_candidates(),
            *related,
            *itertools.islice(self._rule_candidates, size),
        ]
        # Random schedules of an earlier draw are worse than what evolution finds.
        if not self._can_evolve:
            candidates += filter(self._is_new, self._left_over)
        fresh = {candidate.id: candidate for candidate in candidates}
        for draw in range(_MAX_DRAWS):
            if len(fresh) >= size:
                break
            fresh |= {
                candidate.id: candidate for candidate in self._draw(draw) if self._is_new(candidate)
            }
        candidates = list(fresh.values())
        self._left_over = candidates[size:]
        return candidates[:size]

    def _is_new(self, candidate: Candidate) -> bool:
        return candidate.id not in self._trials.trials

    def _candidate(self, schedule: Schedule) -> Candidate:
        from tvm.s_tir import meta_schedule as ms

        return _make_candidate(ms.search_strategy.MeasureCandidate(schedule, self._arguments))

    def _starting_candidates(self) -> list[Candidate]:
        """Return the schedules of near targets that were not measured here."""
        return [
            Candidate(trial.id, trial.trace, _replay(self._mod, trial.trace, self._arguments))
            for trial in self._starting_points
            if trial.id not in self._trials.trials
        ]

    def _related_candidates(self) -> list[Candidate]:
        """Return fitted schedules of related workloads, while this one has few trials."""
        if len(self._trials) >= 2 * BATCH_SIZE:
            return []
        candidates: dict[str, Candidate] = {}
        postprocs = self._random.space_generator.postprocs or []
        for related in self._find_related():
            self._learn_from_related(related)
            traces = [trial.trace for trial in related.trials[:_MAX_RELATED_SCHEDULES]]
            for schedule in fit_schedules(self._mod, traces, postprocs, self._seed):
                candidate = self._candidate(schedule)
                if self._is_new(candidate):
                    candidates.setdefault(candidate.id, candidate)
        return list(candidates.values())

    @property
    def _can_evolve(self) -> bool:
        return self._evolution is not None and len(self._trials) >= BATCH_SIZE

    def _draw(self, draw: int) -> list[Candidate]:
        """Return one batch; the last draws are random, for schedules that evolution never reaches."""
        if self._can_evolve and draw < _MAX_DRAWS // 2:
            proposals = self._evolve()
        else:
            proposals = self._random.generate_measure_candidates() or []
        return [_make_candidate(proposal) for proposal in proposals]

    def _evolve(self) -> Sequence[Any]:
        """Return a batch from evolution. A trial that it cannot mutate must not end the tuning."""
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
        from tvm.s_tir.meta_schedule.database import TuningRecord

        proposals = [candidate.proposal for candidate in candidates]
        results = [_runner_result(trial) for trial in trials]
        self._cost_model.update(self._random, proposals, results)
        for candidate, trial in zip(candidates, trials, strict=True):
            self._learned.add(trial.id)
            if trial.run_secs and _has_choices(trial.trace):
                trace, run_secs = candidate.proposal.sch.trace, list(trial.run_secs)
                self._database.commit_tuning_record(
                    TuningRecord(trace, self._workload, run_secs, self._target, self._arguments)
                )

    def _learn_from_related(self, related: RelatedWorkload) -> None:
        """Add the trials of a related workload to the cost model, once."""
        new = [trial for trial in related.trials if trial.id not in self._learned]
        self._learned.update(trial.id for trial in new)
        if not new:
            return
        import tvm
        from tvm.s_tir import meta_schedule as ms

        mod = tvm.ir.load_json(related.mod)
        arguments = ms.arg_info.ArgInfo.from_entry_func(mod)
        proposals, results = [], []
        for trial in new:
            with contextlib.suppress(Exception):
                proposals.append(_replay(mod, trial.trace, arguments))
                results.append(_runner_result(trial))
        context = ms.TuneContext(mod, target=self._target, num_threads=self._threads)
        self._cost_model.update(context, proposals, results)

    def _recall(self) -> None:
        """Learn the ledger's trials that are new to this search: earlier runs' and other processes'."""
        unknown = [trial for trial in self._trials.in_order() if trial.id not in self._learned]
        candidates, trials = [], []
        for trial in unknown[-_MAX_RECALLED:]:
            if trial.failure and trial.failure.phase == "apply":
                continue
            try:
                proposal = _replay(self._mod, trial.trace, self._arguments)
            except Exception as error:
                reason = f"its trace no longer applies: {type(error).__name__}"
                self._trials.quarantine([trial.id], reason)
            else:
                candidates.append(Candidate(trial.id, trial.trace, proposal))
                trials.append(trial)
        if candidates:
            self.learn(candidates, trials)
        self._learned.update(trial.id for trial in unknown)


class OpenProposals:
    """The search for a workload with open sizes: it proposes the schedules that the rules choose from.

    MetaSchedule's own are for fixed sizes alone: it fails on a loop of an open length (apache-tvm 0.27).

    Attributes:
        problems: A sentence for each part of the search that failed.
    """

    def __init__(
        self,
        mod: str,
        trials: WorkloadLedger,
        context: MeasureContext,
        find_related: Callable[[], list[RelatedWorkload]],
        starting_points: Sequence[Trial] = (),
    ) -> None:
        """Prepare the search.

        Args:
            mod: The saved module of the workload.
            trials: The trials of the workload.
            context: Its target, and the version of the schedule rules.
            find_related: Returns the same workload at other sizes, whose schedules are measured first.
            starting_points: Trials of the workload on near targets, which are measured before these.
        """
        import tvm

        self.problems: list[str] = []
        self._mod = tvm.ir.load_json(mod)
        self._trials = trials
        self._find_related = find_related
        self._starting_points = list(starting_points)
        self._rule_candidates = _generate_rule_candidates(self._mod, context)

    def propose(self, size: int) -> list[Candidate]:
        """Return up to `size` schedules that the ledger lacks; none when all are known."""
        known = [Candidate(trial.id, trial.trace, None) for trial in self._starting_points]
        candidates = itertools.chain(known, self._related_candidates(), self._rule_candidates)
        fresh: dict[str, Candidate] = {}
        for candidate in candidates:
            if candidate.id not in self._trials.trials:
                fresh.setdefault(candidate.id, candidate)
            if len(fresh) == size:
                break
        return list(fresh.values())

    def _related_candidates(self) -> Iterator[Candidate]:
        """Yield the best schedules of the same workload at other sizes."""
        for related in self._find_related():
            for trial in related.trials[:_MAX_RELATED_SCHEDULES]:
                with contextlib.suppress(RuntimeError, ValueError, TypeError):
                    apply_trace(self._mod, trial.trace)
                    yield Candidate(trial.id, trial.trace, None)

    def learn(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        """Keep to the order of the rules, whatever was measured."""


def _generate_rule_candidates(mod: tvm.IRModule, context: MeasureContext) -> Iterator[Candidate]:
    """Yield the schedules of the rules, without that of the untuned kernel, which was measured."""
    from tvmflow.compiler.cpu_model import cpu_model_for
    from tvmflow.compiler.schedules.rules import generate_schedules

    cpu_model = cpu_model_for(context.target, context.rules_version)
    choices = generate_schedules(mod, cpu_model) if cpu_model else iter(())
    for choice in itertools.islice(choices, 1, None):
        trace = trace_json(choice.schedule.trace)
        yield Candidate(trial_id(trace), trace, choice.schedule)


def _make_candidate(proposal: Any) -> Candidate:
    trace = trace_json(proposal.sch.trace)
    return Candidate(trial_id(trace), trace, proposal)


def _make_space(rules: str) -> Any:
    """Return MetaSchedule's space generator with the rules of a backend; TVM's default without any."""
    from tvm.s_tir import meta_schedule as ms

    if not rules:
        return "post-order-apply"
    return ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=rules, mutator_probs=rules)


def _replay(mod: tvm.IRModule, trace: Json, arguments: Any) -> Any:
    """Return a recorded schedule as MetaSchedule's candidate. Raises what TVM raises."""
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

    return MeasureCandidate(apply_trace(mod, trace), arguments)


def _has_choices(trace: Json) -> bool:
    """Return whether a trace has a decision that evolution can change."""
    instructions, _ = trace
    return any(str(instruction[0]).startswith("Sample") for instruction in instructions)


def _runner_result(trial: Trial) -> Any:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    message = trial.failure.message if trial.failure else None
    return RunnerResult(list(trial.run_secs) or None, message)


def _derive_seed(seed: int, key: str, trials: int) -> int:
    """Return a seed for one workload, another one after each resumption: TVM takes 1 to 2³¹-1."""
    digest = hashlib.sha256(f"{seed}:{key}:{trials}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % (2**31 - 2) + 1


# ---------------------------------------------------------------- related workloads

# How many related workloads a new one looks at, and how many trials of each.
_MAX_RELATED: Final = 3
_MAX_RELATED_TRIALS: Final = 64

_TILE: Final = "SamplePerfectTile"
_ENTER_POSTPROC: Final = "EnterPostproc"


class RelatedWorkload(NamedTuple):
    """The same operator in another shape: its saved module, and its best trials."""

    mod: str
    trials: list[Trial]


class RelatedTrials:
    """The trials of related workloads on one target."""

    def __init__(
        self,
        ledger: Ledger,
        open_ledgers: Mapping[str, WorkloadLedger],
        fork_server: ForkServer,
        target: Mapping[str, Json],
    ) -> None:
        self._ledger = ledger
        self._open_ledgers = open_ledgers
        self._fork_server = fork_server
        self._target = target
        self._checked: set[Path] = set()
        self._related: dict[str, list[str]] = {}
        self._verdicts: dict[str, KernelVerdict] = {}

    def quarantine_inapplicable(self, mod: str, trials: WorkloadLedger) -> None:
        """Apply all traces of a workload in a child, once, and quarantine those that do not apply.

        A trace that no search wrote can crash the process that applies it.
        """
        if trials.path not in self._checked:
            self._checked.add(trials.path)
            quarantine_inapplicable(self._fork_server, mod, self._target, trials)

    def find(self, key: str) -> list[RelatedWorkload]:
        """Return the nearest workloads of the same family that have working trials."""
        if key not in self._related:
            self._related[key] = self._ledger.related_workloads(key)
        related: list[RelatedWorkload] = []
        for other in self._related[key]:
            trials = self._open_ledgers.get(other) or self._ledger.workload(other)
            mod = self._ledger.kernel(other)
            if len(related) == _MAX_RELATED or not (len(trials) and mod):
                continue
            if not self._is_of_family(other, mod, key):
                continue
            self.quarantine_inapplicable(mod, trials)
            if valid := trials.valid()[:_MAX_RELATED_TRIALS]:
                related.append(RelatedWorkload(mod, valid))
        return related

    def _is_of_family(self, other: str, mod: str, key: str) -> bool:
        """Return whether a kernel is that of its workload and related to `key`: it may be from elsewhere."""
        if other not in self._verdicts:
            self._verdicts[other] = verify_kernel(self._fork_server, other, mod)
        verdict = self._verdicts[other]
        if verdict.problem:
            _log.debug("the kernel of workload %s is removed: %s", other[:12], verdict.problem)
            self._ledger.forget_kernel(other)
        return not verdict.problem and verdict.family == self._ledger.description(key).family


# ---------------------------------------------------------------- fitting


def fit_schedules(
    mod: tvm.IRModule, traces: Sequence[Json], postprocs: Sequence[Any], seed: int
) -> Iterator[Schedule]:
    """Yield the schedules of a related workload that apply to this one, with fitted tile sizes.

    Args:
        mod: The workload.
        traces: Recorded schedules of the related one.
        postprocs: MetaSchedule's postprocessors. What they did for the shape of the related
            workload is left out, and they do it for this one.
        seed: The seed of decisions that are not recorded.
    """
    for trace in traces:
        # Whatever TVM raises here means that the workloads are not so closely related.
        try:
            schedule = _fit(mod, trace, seed)
            if schedule is not None and all(postproc.apply(schedule) for postproc in postprocs):
                yield schedule
        except Exception as error:
            _log.debug("a related schedule does not apply: %s", type(error).__name__)


def _fit(mod: tvm.IRModule, recorded: Json, seed: int) -> Schedule | None:
    """Return the recorded decisions on another workload, ready for postprocessing."""
    from tvm.s_tir.schedule import Schedule, Trace

    instructions, decisions = _without_postprocessing(recorded)
    # Sampled decisions show which extents there are.
    sampled = Schedule(mod, seed=seed)
    Trace.apply_json_to_schedule([instructions, []], sampled)
    trace = sampled.trace
    if len(trace.insts) != len(instructions):
        return None
    for index, decision in decisions:
        instruction = trace.insts[index]
        if str(instruction.kind.name) == _TILE:
            extent = math.prod(int(factor) for factor in trace.decisions[instruction])
            decision = fit_tiles(decision, extent)
        trace = trace.with_decision(instruction, decision, remove_postproc=True)
    schedule = Schedule(mod, seed=seed)
    trace.apply_to_schedule(schedule, remove_postproc=True)
    # Evolution mutates what stands before this mark, and postprocesses anew.
    schedule.enter_postproc()
    return schedule


def _without_postprocessing(recorded: Json) -> tuple[list[Json], list[Json]]:
    instructions, decisions = recorded
    kinds = [instruction[0] for instruction in instructions]
    end = kinds.index(_ENTER_POSTPROC) if _ENTER_POSTPROC in kinds else len(kinds)
    return instructions[:end], [decision for decision in decisions if decision[0] < end]


def fit_tiles(sizes: Sequence[int], extent: int) -> list[int]:
    """Return factors of `extent` near the given tile sizes.

    The inner sizes decide about registers and caches, whatever the shape around them: they are
    kept as far as they divide the extent, and the outermost takes the rest.

    Args:
        sizes: Tile sizes, the outermost first.
        extent: The product of the result.
    """
    tiles: list[int] = []
    rest = extent
    for size in reversed(sizes[1:]):
        tile = max(factor for factor in range(1, min(size, rest) + 1) if rest % factor == 0)
        tiles.append(tile)
        rest //= tile
    return [rest, *reversed(tiles)]
