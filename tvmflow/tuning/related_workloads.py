"""Related workloads: the same operator in another shape, whose schedules are fitted and tried first."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.fork_server import ForkServer
from tvmflow.core.types import Json
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.replay import KernelVerdict, quarantine_inapplicable, verify_kernel
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.workload_ledger import WorkloadLedger

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir.schedule import Schedule

# How many related workloads a new one looks at, and how many trials of each.
_MAX_WORKLOADS: Final = 3
_MAX_TRIALS: Final = 64

_TILE: Final = "SamplePerfectTile"
_ENTER_POSTPROC: Final = "EnterPostproc"
_log = logging.getLogger(__name__)


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
            if len(related) == _MAX_WORKLOADS or not (len(trials) and mod):
                continue
            if not self._is_of_family(other, mod, key):
                continue
            self.quarantine_inapplicable(mod, trials)
            if valid := trials.valid()[:_MAX_TRIALS]:
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
