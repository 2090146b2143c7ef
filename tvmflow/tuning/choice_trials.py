"""Choices measured: operators computed otherwise than by rule, each timed in a whole library.

A kernel takes another time alone than between others, whose results are in the caches or not, and whose
layouts it shares. So one library has an alternative for each operator that has one, the other is that of
the rules, and both are profiled in turns: what a choice gains here is what a library gains by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from tvmflow.compiler import lowering
from tvmflow.compiler.choices import Choice, Choices, Operator, choice_key, choice_text
from tvmflow.compiler.ir import list_weights
from tvmflow.compiler.open_sizes import read_dimensions
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import MIN_PAIRS, PairedTimes, measure_in_turns
from tvmflow.core.types import Json
from tvmflow.targets import devices
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.trials import ChoiceTimes, LibraryRecord, timestamp
from tvmflow.tuning.untuned_comparison import Libraries, LibraryRequest, LibraryTimes

if TYPE_CHECKING:
    from tvmflow.compiler.node_tracking import KernelNodes

_MIN_GAIN: Final = 0.02
# And this much more for each MiB that its weights become larger: where other processes use the caches
# and the memory, too, reading them takes longer than here.
_MIN_GAIN_PER_BYTE: Final = 0.02 / (1 << 20)

_LOG: Final = "choices.log"
# Two compilations of the model, and its calls.
_TIMEOUT_S: Final = 1800.0
_ROUNDS: Final = 2 * MIN_PAIRS
_SECONDS: Final = 30.0
# Whole libraries are called until it is decided which is faster: the choice is made once.
_WHOLE_SECONDS: Final = 120.0
# In each turn a library is called so often, and for so long.
_MIN_CALLS: Final = 3
_SECONDS_PER_TURN: Final = 0.1
_WHOLE_SECONDS_PER_TURN: Final = 0.3

_T = TypeVar("_T")

Kernels = Mapping[str, Mapping[str, float]]
"""An operator -> its kernels in a library, each with the share of its calls that are the operator's."""


def group_operators(operators: Iterable[Operator]) -> dict[str, list[Operator]]:
    """Return the operators of a model that have alternatives, equal ones together."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        if len(operator.alternatives) > 1:
            groups.setdefault(operator.text, []).append(operator)
    return groups


def find_kernels(groups: Mapping[str, Sequence[Operator]], nodes: KernelNodes) -> Kernels:
    """Return the kernels that compute each operator.

    Different operators may share a kernel: its calls are divided among them.

    Args:
        groups: The operators.
        nodes: The bindings that each call of a kernel came from.
    """
    return {
        text: {
            name: count / len(calls)
            for name, calls in nodes.items()
            if (count := sum(not own.isdisjoint(call) for call in calls))
        }
        for text, operators in groups.items()
        if (own := frozenset().union(*(operator.nodes for operator in operators)))
    }


@dataclass(frozen=True, kw_only=True)
class ChoiceRequest:
    """Two libraries of one model to profile in turns.

    Attributes:
        rule: The one by rule.
        other: The other one; its kernels and those of `rule` have no tuned schedules.
        rule_kernels: The kernels of each operator in `rule`.
        kernels: Those in `other`.
        is_whole: Whether whole calls are timed, too.
    """

    rule: Mapping[str, Json]
    other: Mapping[str, Json]
    rule_kernels: Kernels
    kernels: Kernels
    is_whole: bool


def measure_choices(payload: Json, emit: Emit) -> Json:
    """Time operators in two libraries: the entry point of the child.

    Args:
        payload: A `ChoiceRequest` as JSON.
        emit: Not used.

    Returns:
        For each operator its seconds by rule and otherwise (`operators`), and those of the whole
        libraries (`rule`, `other`), none where they were not asked for.
    """
    del emit
    request = ChoiceRequest(**payload)
    libraries = [Libraries(LibraryRequest(**entry)) for entry in (request.rule, request.other)]
    rule, other = (library.load({}) for library in libraries)
    feed = libraries[0].feeds[0]

    def profile(module: Any) -> dict[str, float]:
        calls = _repeat(
            lambda: {entry.name: entry.seconds for entry in module.profile(feed, repeat=1)}
        )
        return {name: min(call[name] for call in calls) for name in calls[0]}

    def latency(module: Any) -> float:
        calls: list[float] = _repeat(
            lambda: module.latency(feed, repeat=1, min_seconds=0.0)[0], _WHOLE_SECONDS_PER_TURN
        )
        return min(calls)

    rounds = _profile_in_turns(lambda: profile(rule), lambda: profile(other))
    operators = {
        text: [
            [
                sum(share * times[side].get(name, 0.0) for name, share in shares.items())
                for times in rounds
            ]
            for side, shares in enumerate((request.rule_kernels[text], request.kernels[text]))
        ]
        for text in request.kernels
    }
    whole = PairedTimes((), ())
    if request.is_whole:
        whole = measure_in_turns(
            lambda: latency(other),
            lambda: latency(rule),
            seconds=_WHOLE_SECONDS,
            min_pairs=MIN_PAIRS,
        )
    return {"operators": operators, "rule": whole.second, "other": whole.first}


def _repeat(call: Callable[[], _T], seconds: float = _SECONDS_PER_TURN) -> list[_T]:
    """Return the results of some calls in a row; no other process disturbed the shortest one."""
    started, results = time.monotonic(), [call()]
    while len(results) < _MIN_CALLS or time.monotonic() - started < seconds:
        results.append(call())
    return results


_Profile = Callable[[], Mapping[str, float]]


def _profile_in_turns(rule: _Profile, other: _Profile) -> list[list[Mapping[str, float]]]:
    """Return the seconds of each kernel in calls of two libraries, which are called in turns."""
    started = time.monotonic()
    rounds: list[list[Mapping[str, float]]] = []
    # what is called first reads its weights for the first time
    rule(), other()
    while len(rounds) < _ROUNDS and (
        len(rounds) < MIN_PAIRS or time.monotonic() - started < _SECONDS
    ):
        if len(rounds) % 2:
            second, first = other(), rule()
        else:
            first, second = rule(), other()
        rounds.append([first, second])
    return rounds


def read_times(
    answer: Json, groups: Mapping[str, Sequence[Operator]], choices: Choices
) -> dict[str, ChoiceTimes]:
    """Return the times of choices in the answer of a child, by operator; none for what was not called."""
    times = {}
    for text, (by_rule, seconds) in answer["operators"].items():
        if all(by_rule) and all(seconds):
            times[text] = ChoiceTimes(
                choice=dict(choices[text]),
                rule=dict(groups[text][0].by_rule),
                seconds=tuple(seconds),
                rule_seconds=tuple(by_rule),
                calls=len(groups[text]),
                when=timestamp(),
            )
    return times


def list_unknown(
    groups: Mapping[str, Sequence[Operator]],
    ledgers: Mapping[str, WorkloadLedger],
    is_allowed: Callable[[Choice], bool],
) -> list[dict[str, Choice]]:
    """Return the choices to measure: of each library, those of the operators that differ from the rules'.

    The first one has what is estimated to be fastest.

    Args:
        groups: The operators.
        ledgers: The records of each.
        is_allowed: Returns whether a choice may be made.
    """
    rounds: list[dict[str, Choice]] = []
    for text, (operator, *_) in groups.items():
        known = {times.key for times in ledgers[text].choices.values()}
        unknown = [
            choice
            for choice in operator.alternatives
            if choice != operator.by_rule
            and is_allowed(choice)
            and f"{choice_text(choice)} {choice_text(operator.by_rule)}" not in known
        ]
        for place, choice in enumerate(unknown):
            if place == len(rounds):
                rounds.append({})
            rounds[place][text] = choice
    return rounds


def choose(
    groups: Mapping[str, Sequence[Operator]],
    ledgers: Mapping[str, WorkloadLedger],
    is_allowed: Callable[[Choice], bool],
) -> dict[str, ChoiceTimes]:
    """Return the times of what each operator gains most by: the candidates for the whole library.

    Args:
        groups: The operators.
        ledgers: The records of each.
        is_allowed: Returns whether a choice may be made.
    """
    chosen = {}
    for text, (operator, *_) in groups.items():
        faster = [
            times
            for times in ledgers[text].choices.values()
            if times.rule == operator.by_rule
            and times.choice in operator.alternatives
            and is_allowed(times.choice)
            and times.ratio < 1 - _min_gain(operator, times.choice)
        ]
        if faster:
            chosen[text] = min(faster, key=lambda times: (times.ratio, times.key))
    return chosen


def _min_gain(operator: Operator, choice: Choice) -> float:
    """Return the least share of its time that an operator must save."""
    return _MIN_GAIN + _MIN_GAIN_PER_BYTE * operator.count_added_bytes(choice)


class LoweredChoices(NamedTuple):
    """A model lowered with some choices.

    Attributes:
        model: The lowered model.
        path: Its file.
        has_dimensions: Whether a size is known only when a library runs.
    """

    model: lowering.LoweredModel
    path: Path
    has_dimensions: bool

    @property
    def weight_bytes(self) -> int:
        """The size of all weights."""
        return sum(_count_bytes(weight.ty) for weight in list_weights(self.model.mod["main"]))


class Outcome(NamedTuple):
    """A library with some choices beside the one by rule.

    Attributes:
        choices: What was chosen, without what was slower in this library.
        times: Both libraries, the one with the choices tuned; no times where nothing was left.
        found: The speedup that the times of the operators promise.
    """

    choices: Choices
    times: LibraryTimes
    found: float

    @property
    def speedup(self) -> float:
        """The speedup of the library, measured in turns."""
        return 1 / self.times.pairs.ratio

    @property
    def is_kept(self) -> bool:
        """True if the whole library is faster beyond the noise."""
        return bool(self.choices) and bool(self.times.tuned) and self.times.pairs.is_faster


def find_gain(chosen: Mapping[str, ChoiceTimes], calls: Mapping[str, int], rule_s: float) -> float:
    """Return the speedup of a library that the times of its operators promise.

    Args:
        chosen: The times of what was chosen.
        calls: How often the model has each operator.
        rule_s: The seconds of a call of the library by rule.
    """
    saved_s = sum(
        calls[text] * (min(times.rule_seconds) - min(times.seconds)) / times.calls
        for text, times in chosen.items()
    )
    return rule_s / max(rule_s - saved_s, rule_s / 100)


def library_digest(choices: Choices, settings: Sequence[Json]) -> str:
    """Return the digest of what is compared, and how, for one model on one target."""
    return digest_of([{text: dict(choice) for text, choice in choices.items()}, *settings])


@dataclass(frozen=True, kw_only=True)
class ChoiceLibraries:
    """A model, and how libraries of it are made and measured.

    Attributes:
        imported: The path of the imported model.
        options: The options of lowering.
        target: TVM's mapping of the target.
        threads: The threads that kernels run with; None for the default.
        runtime: The setting of the runtime that executes the libraries.
        rules_version: The version of the schedule rules.
        device: The device that is measured on.
        locks: The folder of the locks of devices.
        work: A folder for files.
    """

    imported: Path
    options: LoweringOptions
    target: Mapping[str, Json]
    threads: int | None
    runtime: str
    rules_version: int
    device: Mapping[str, str]
    locks: Path
    work: Path

    def lower(self, choices: Choices, name: str) -> LoweredChoices:
        """Return the model lowered with some choices, written to a file of that name."""
        mod, target = lowering.load_ir(self.imported), lowering.make_target(self.target)
        has_dimensions = bool(read_dimensions(mod["main"]))
        model = lowering.lower(mod, target, self.options, choices=choices)
        model.write(self.work / name)
        return LoweredChoices(model, self.work / name, has_dimensions)

    def measure(
        self,
        fork_server: ForkServer,
        rule: LoweredChoices,
        other: LoweredChoices,
        texts: Iterable[str],
        *,
        is_whole: bool,
    ) -> Json:
        """Time some operators of two libraries in a child that has the device alone.

        Args:
            fork_server: A fork server with TVM.
            rule: The model by rule.
            other: The model with choices.
            texts: The operators.
            is_whole: Whether whole calls are timed, too.

        Returns:
            The answer of `measure_choices`.

        Raises:
            StageError: The child failed, or was cancelled.
        """
        workloads = self.work / "workloads.json"
        workloads.write_text("{}")
        operators, kernels = list(texts), []
        for lowered in (rule, other):
            groups = group_operators(lowered.model.operators)
            found = find_kernels(groups, lowered.model.kernel_nodes)
            kernels.append({text: dict(found.get(text, {})) for text in operators})
        libraries = [
            {
                "lowered": str(lowered.path),
                "workloads": str(workloads),
                "calls": {},
                "names": {},
                "chosen": {},
                "target": self.target,
                "threads": self.threads,
                "runtime": self.runtime,
                "rules_version": self.rules_version,
            }
            for lowered in (rule, other)
        ]
        payload = {
            "rule": libraries[0],
            "other": libraries[1],
            "rule_kernels": kernels[0],
            "kernels": kernels[1],
            "is_whole": is_whole,
        }
        with devices.exclusive(self.locks, self.device):
            outcome = fork_server.call(
                measure_choices,
                payload,
                timeout_s=_TIMEOUT_S,
                log=self.work / _LOG,
                emit=lambda _: None,
            )
        if outcome.kind == "cancelled":
            raise StageError("measuring was cancelled", fix="run it again")
        if outcome.kind != "ok":
            raise StageError(
                f"libraries with other choices could not be measured: {outcome.message}",
                fix="set tune.choices to false to keep those of the rules",
            )
        return outcome.value

    def compare(
        self,
        fork_server: ForkServer | None,
        rule: LoweredChoices,
        groups: Mapping[str, Sequence[Operator]],
        chosen: Mapping[str, ChoiceTimes],
        records: WorkloadLedger,
    ) -> Outcome | None:
        """Compare the library that has all choices with that of the rules, unless its ledger knows.

        Args:
            fork_server: A fork server with TVM; None to measure nothing.
            rule: The model by rule.
            groups: The operators.
            chosen: The times of what was chosen.
            records: The records of the library.

        Returns:
            The outcome; None where nothing was chosen, or would have to be measured.

        Raises:
            StageError: The libraries cannot be measured.
            StoreError: The times cannot be recorded.
        """
        choices = {text: times.choice for text, times in chosen.items()}
        digest = library_digest(choices, [self.rules_version, self.runtime])
        known = records.libraries.get(digest)
        if not choices:
            return None
        if known is None:
            if fork_server is None:
                return None
            times = self._drop_slower(fork_server, rule, choices)
            known = LibraryRecord(digest, *times[:3], timestamp())
            # what was too noisy to decide may be decided another time
            if not known.tuned or times.pairs.is_decided:
                records.add([known])
        kept = {text: c for text, c in choices.items() if choice_key(text) not in known.slower}
        times = LibraryTimes(known.slower, known.tuned, known.untuned)
        found = 1.0
        if known.untuned:
            calls = {text: len(operators) for text, operators in groups.items()}
            kept_times = {text: chosen[text] for text in kept}
            found = find_gain(kept_times, calls, min(known.untuned))
        return Outcome(kept, times, found)

    def _drop_slower(
        self, fork_server: ForkServer, rule: LoweredChoices, choices: Choices
    ) -> LibraryTimes:
        """Time the library with all choices, without those by which an operator is slower in it."""
        slower: set[str] = set()
        while left := {text: choice for text, choice in choices.items() if text not in slower}:
            other = self.lower(left, "chosen.json")
            answer = self.measure(fork_server, rule, other, left, is_whole=True)
            lost = {
                text
                for text, (by_rule, seconds) in answer["operators"].items()
                if min(seconds) > min(by_rule)
            }
            if not lost:
                return LibraryTimes(_keys(slower), tuple(answer["other"]), tuple(answer["rule"]))
            slower |= lost
        return LibraryTimes(_keys(slower))


def _keys(operators: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(map(choice_key, operators)))


def _count_bytes(ty: Any) -> int:
    shape, dtype = ty.shape, str(ty.dtype.dtype)
    return math.prod(map(int, shape)) * np.dtype(dtype).itemsize
