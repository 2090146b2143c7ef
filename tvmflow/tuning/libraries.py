"""Measure whole libraries interleaved: tuned against untuned, alternatives against the rules' choices.

A schedule that is faster in isolation, with its data in the cache, may be slower between other kernels, and an
alternative of an operator may change its neighbors' layouts. So each kernel is timed again inside the library, slower
ones are dropped, and both libraries are called interleaved. Weights are random: times do not depend on them, so a
model with new weights has the same choices. A library with dynamic shapes is measured at each tuning size.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from tvmflow.compiler import LoweringOptions
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.choices import Choice, Choices, Operator, choice_key, choice_text
from tvmflow.core.dimensions import evaluate_shape, list_tuning_sizes, specs_at
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import (
    MIN_PAIRS,
    PairedTimes,
    geometric_means,
    interleave,
    measure_interleaved,
)
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.bundles import C_RUNTIME
from tvmflow.targets.backends import backend_for
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.trials import ChoiceTimes, LibraryRecord, timestamp
from tvmflow.tuning.tuning_job import call_alone

if TYPE_CHECKING:
    import tvm

    from tvmflow.compiler import LoweredModel
    from tvmflow.graph.marks import KernelNodes
    from tvmflow.runtime.module import Module
    from tvmflow.runtime.programs import Program

# The timeout for compiling the model twice and calling it.
_TIMEOUT_S: Final = 1800.0
_PROFILE_ROUNDS: Final = MIN_PAIRS + 1
_MIN_PROFILE_ROUNDS: Final = 3
_SECONDS: Final = 20.0
_MIN_SECONDS_PER_TURN: Final = 0.02
_SEED: Final = 0

# An alternative must save this share of the operator's time, and this much more for each MiB by which it enlarges the
# weights: if other processes also use caches and memory, reading weights takes longer than in this measurement.
_MIN_GAIN: Final = 0.02
_MIN_GAIN_PER_BYTE: Final = 0.02 / (1 << 20)
_LOG: Final = "choices.log"
_CHOICE_ROUNDS: Final = 2 * MIN_PAIRS
_CHOICE_SECONDS: Final = 30.0
# Whole libraries are called until it is clear which is faster, for up to this time: the choice is made only once.
_WHOLE_SECONDS: Final = 120.0
# In each round, a library is called at least this often and this long.
_MIN_CALLS: Final = 3
_SECONDS_PER_TURN: Final = 0.1
_WHOLE_SECONDS_PER_TURN: Final = 0.3

_T = TypeVar("_T")

Profile = Callable[[], Mapping[str, float]]
"""Runs a library once and returns the seconds of each kernel."""

Kernels = Mapping[str, Mapping[str, float]]
"""An operator -> its kernels in a library -> the share of the kernel's calls for this operator."""


def profile_interleaved(
    first: Profile,
    second: Profile,
    *,
    rounds: int,
    min_rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
    """Profile two libraries interleaved; return a pair of profiles for each round."""
    started = clock()
    times: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    while len(times) < rounds and (len(times) < min_rounds or clock() - started <= seconds):
        one, other = interleave([first, second], len(times))
        times.append((one, other))
    return times


# ---------------------------------------------------------------- tuned and untuned


@dataclass(frozen=True, kw_only=True)
class LibraryRequest:
    """A model and the schedules that were chosen for its kernels individually.

    Attributes:
        lowered: The path of the lowered model.
        runtime: The setting of the runtime that executes the library.
        rules_version: The version of the schedule rules.
        workloads: The path of the saved modules by workload key.
        calls: How often the model calls each workload.
        names: The names of the kernels of each chosen workload.
    """

    lowered: str
    target: Mapping[str, Json]
    threads: int
    runtime: str
    rules_version: int
    workloads: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    chosen: Mapping[str, Json] = field(default_factory=dict)

    @property
    def library_key(self) -> str:
        """The key of the records in a ledger: a digest of all workloads and their call counts."""
        return digest_of({"library": self.calls})

    @property
    def digest(self) -> str:
        """The digest of what is compared and how."""
        return digest_of([self.chosen, self.rules_version, self.runtime, _PROFILE_ROUNDS])


class LibraryTimes(NamedTuple):
    """The comparison of a tuned library with the untuned one; for the fields see `LibraryRecord`.

    Attributes:
        error: The reason why nothing was compared; otherwise empty.
    """

    slower: tuple[str, ...] = ()
    tuned: tuple[float, ...] = ()
    untuned: tuple[float, ...] = ()
    error: str = ""
    sizes: tuple[tuple[tuple[float, ...], ...], ...] = ()

    @property
    def pairs(self) -> PairedTimes:
        """The times of both libraries, the tuned one first."""
        return PairedTimes(self.tuned, self.untuned)

    @property
    def keeps_tuned(self) -> bool:
        """True if the tuned library is faster, and slower at no size; or if it could not be measured."""
        if self.error:
            return True
        is_slower = any(PairedTimes(*pair).is_slower for pair in zip(*self.sizes, strict=True))
        return bool(self.tuned) and self.pairs.is_faster and not is_slower

    @classmethod
    def of_record(cls, record: LibraryRecord) -> LibraryTimes:
        """Return the times in a record."""
        return cls(record.slower, record.tuned, record.untuned, sizes=record.sizes)

    def to_record(self, digest: str) -> LibraryRecord:
        """Return the record of a comparison that was just made."""
        times = (self.slower, self.tuned, self.untuned)
        return LibraryRecord(digest, *times, timestamp(), self.sizes)


def read_or_compare(
    request: LibraryRequest, ledger: WorkloadLedger, compare: Callable[[], LibraryTimes]
) -> LibraryTimes:
    """Return the ledger's comparison of these libraries, or make and record one.

    Raises:
        StoreError: The times cannot be recorded.
    """
    known = ledger.libraries.get(request.digest)
    if known is not None:
        return LibraryTimes.of_record(known)
    times = compare()
    if not times.error:
        ledger.add([times.to_record(request.digest)])
    return times


# ---------------------------------------------------------------- in the child


def compare_libraries(payload: Json, emit: Emit) -> Json:
    """Build and compare the libraries of a `LibraryRequest`: the entry point of the child.

    Returns:
        The fields `slower`, `tuned`, `untuned` of `LibraryTimes`, and with several sizes `sizes`.
    """
    del emit
    request = LibraryRequest(**payload)
    libraries = Libraries(request)
    untuned, tuned = libraries.load({}), libraries.load(request.chosen)
    slower = {
        key
        for feed in libraries.feeds
        for key in find_slower(
            request.names, partial(_profile, tuned, feed), partial(_profile, untuned, feed)
        )
    }
    kept = {key: trace for key, trace in request.chosen.items() if key not in slower}
    if not kept:
        return {"slower": sorted(slower), "tuned": [], "untuned": []}
    if slower:
        tuned = libraries.load(kept)
    rows: tuple[list[list[float]], ...] = ([], [])

    def measure_library(library: Module, own_rows: list[list[float]]) -> float:
        times = libraries.latencies(library)
        own_rows.append(times)
        return geometric_means([[seconds] for seconds in times])[0]

    times = measure_interleaved(
        lambda: measure_library(tuned, rows[0]),
        lambda: measure_library(untuned, rows[1]),
        seconds=_SECONDS,
    )
    answer = {"slower": sorted(slower), "tuned": times.first, "untuned": times.second}
    if len(libraries.feeds) == 1:
        return answer
    return {**answer, "sizes": [list(zip(*own_rows, strict=True)) for own_rows in rows]}


def find_slower(
    names: Mapping[str, Iterable[str]],
    profile_tuned: Profile,
    profile_untuned: Profile,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Return the workloads whose tuned kernels are slower than the untuned ones beyond the noise."""
    rounds = profile_interleaved(
        profile_tuned,
        profile_untuned,
        rounds=_PROFILE_ROUNDS,
        min_rounds=_MIN_PROFILE_ROUNDS,
        seconds=_SECONDS,
        clock=clock,
    )

    def pair(key: str) -> PairedTimes:
        tuned, untuned = (
            tuple(sum(times[side].get(name, 0.0) for name in names[key]) for times in rounds)
            for side in (0, 1)
        )
        return PairedTimes(tuned, untuned)

    called = set().union(*(times for times, _ in rounds))
    return [key for key in sorted(names) if called & set(names[key]) and pair(key).is_slower]


class Libraries:
    """Compiles a model with schedules, and times it."""

    def __init__(self, request: LibraryRequest) -> None:
        from tvmflow.compiler import LoweredModel, find_runtime
        from tvmflow.graph import ir
        from tvmflow.graph.dynamic_shapes import read_dimensions
        from tvmflow.targets.tvm_target import make_target
        from tvmflow.tuning import measure

        self._request = request
        self._target = make_target(request.target)
        self._lowered = LoweredModel.read(Path(request.lowered)).mod
        self._runtime, reason = find_runtime(self._lowered, request.runtime)
        by_driver = not backend_for(request.target).RUNS_ON_HOST_CPU
        if by_driver and self._runtime != C_RUNTIME:
            raise StageError(f"it needs TVM's virtual machine for {reason}")
        measure.load_compiler(request.target, by_driver=by_driver)
        measure.use_threads({**request.target, "num-cores": request.threads})
        main = self._lowered["main"]
        weights = ir.list_weights(main)
        inputs = list(main.params)[: len(main.params) - len(weights)]
        self._dimensions = read_dimensions(main)
        largest = {dimension.name: dimension.max for dimension in self._dimensions}
        self._inputs = [_spec(f"x{index}", var.ty, largest) for index, var in enumerate(inputs)]
        outputs = _list_types(main.body.ty)
        self._outputs = [_spec(f"y{index}", ty, largest) for index, ty in enumerate(outputs)]
        self.feeds = [
            {spec.name: _draw(spec) for spec in specs_at(self._inputs, sizes)}
            for sizes in list_tuning_sizes(self._dimensions)
        ]
        self._weights = [_draw_weight(_spec("", variable.ty)) for variable in weights]
        if self._runtime != C_RUNTIME:
            from tvmflow.runtime.virtual_machine import send_array

            self._weights = [send_array(array) for array in self._weights]

    def load(self, chosen: Mapping[str, Json]) -> Module:
        """Build and load the model with the chosen schedules of some workloads."""
        from tvmflow.compiler import schedule_untuned
        from tvmflow.runtime.module import Module
        from tvmflow.tuning.measure import apply_chosen

        request, scheduled = self._request, self._lowered
        if chosen:
            workloads = json.loads(Path(request.workloads).read_text())
            scheduled, _ = apply_chosen(scheduled, chosen, workloads, self._target)
        scheduled, _ = schedule_untuned(scheduled, request.target, request.rules_version)
        signature = {
            "inputs": [spec.to_json() for spec in self._inputs],
            "outputs": [spec.to_json() for spec in self._outputs],
            "dimensions": [dimension.to_json() for dimension in self._dimensions],
        }
        program = self._load_program(scheduled, signature)
        return Module(program, signature, {"name": "library"})

    def _load_program(self, scheduled: tvm.IRModule, signature: Json) -> Program:
        """Compile and load a scheduled model for the runtime that will execute it."""
        from tvmflow.compiler import ScheduledModel, load_c_library
        from tvmflow.runtime.programs import ThreadPool
        from tvmflow.runtime.virtual_machine import VirtualMachine

        threads = self._request.threads
        model = ScheduledModel(scheduled, self._weights, self._target)
        if self._runtime == C_RUNTIME:
            return load_c_library(model, signature, threads)
        library = model.compile_without_weights().jit()
        # both libraries share the weights, which may take gigabytes
        pool = ThreadPool.of(threads)
        return VirtualMachine(library, self._inputs, weights=self._weights, pool=pool)

    def latencies(self, module: Module) -> list[float]:
        """Return the seconds per call for each feed."""
        return [
            module.latency(feed, repeat=1, min_seconds=_MIN_SECONDS_PER_TURN)[0]
            for feed in self.feeds
        ]


def _profile(module: Module, feed: Mapping[str, Any]) -> dict[str, float]:
    return {entry.name: entry.seconds for entry in module.profile(feed, repeat=1)}


def _spec(name: str, ty: Any, largest: Mapping[str, int] = MappingProxyType({})) -> TensorSpec:
    """Return the spec of a tensor of `main`; dynamic dimensions have the sizes in `largest`."""
    from tvmflow.graph.dynamic_shapes import size_text

    sizes = tuple(map(size_text, ty.shape))
    is_dynamic = not all(isinstance(size, int) for size in sizes)
    return TensorSpec(
        name=name,
        shape=evaluate_shape(sizes, largest),
        dtype=str(ty.dtype.dtype),
        sizes=sizes if is_dynamic else (),
    )


def _list_types(ty: Any) -> list[Any]:
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        return [tensor for field in ty.fields for tensor in _list_types(field)]
    return [ty]


def _draw(spec: TensorSpec) -> Any:
    from tvmflow.tuning.measure import random_array

    return random_array(np.random.default_rng(_SEED), spec.shape, spec.dtype)


def _draw_weight(spec: TensorSpec) -> Any:
    """Return a random weight with which values neither grow without bounds nor become slow denormals."""
    array = _draw(spec)
    if np.issubdtype(array.dtype, np.floating):
        array = ((array - array.dtype.type(0.5)) * array.dtype.type(0.1)).astype(array.dtype)
    return array


# ---------------------------------------------------------------- operators computed otherwise


def group_operators(operators: Iterable[Operator]) -> dict[str, list[Operator]]:
    """Group equal operators of a model, without those that have only one choice."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        if len(operator.alternatives) > 1:
            groups.setdefault(operator.text, []).append(operator)
    return groups


def find_kernels(groups: Mapping[str, Sequence[Operator]], nodes: KernelNodes) -> Kernels:
    """Return the kernels that compute each operator, with their shares of calls.

    If different operators share a kernel, its calls are divided among them.
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


def measure_choices(payload: Json, emit: Emit) -> Json:
    """Time operators in two libraries, interleaved: the entry point of the child.

    Args:
        payload: The libraries by `rule` and `other`, two `LibraryRequest`s without tuned schedules; the kernels of
            each operator in them (`rule_kernels`, `kernels`); and whether whole calls are timed, too (`is_whole`).
        emit: Not used.

    Returns:
        `operators` has the seconds of each operator in the two libraries; `rule` and `other` have the seconds of the
        whole libraries, empty if not requested.
    """
    del emit
    libraries = [Libraries(LibraryRequest(**payload[name])) for name in ("rule", "other")]
    rule, other = (library.load({}) for library in libraries)
    feed = libraries[0].feeds[0]

    def profile(module: Module) -> dict[str, float]:
        calls = _repeat(lambda: _profile(module, feed))
        return {name: min(call[name] for call in calls) for name in calls[0]}

    def latency(module: Module) -> float:
        calls: list[float] = _repeat(
            lambda: module.latency(feed, repeat=1, min_seconds=0.0)[0], _WHOLE_SECONDS_PER_TURN
        )
        return min(calls)

    # warm up: the first call reads the weights for the first time
    profile(rule), profile(other)
    rounds = profile_interleaved(
        lambda: profile(rule),
        lambda: profile(other),
        rounds=_CHOICE_ROUNDS,
        min_rounds=MIN_PAIRS,
        seconds=_CHOICE_SECONDS,
    )
    operators = {
        text: [
            [
                sum(share * times[side].get(name, 0.0) for name, share in shares.items())
                for times in rounds
            ]
            for side, shares in enumerate((payload["rule_kernels"][text], kernels))
        ]
        for text, kernels in payload["kernels"].items()
    }
    whole = PairedTimes((), ())
    if payload["is_whole"]:
        whole = measure_interleaved(
            lambda: latency(other),
            lambda: latency(rule),
            seconds=_WHOLE_SECONDS,
            min_pairs=MIN_PAIRS,
        )
    return {"operators": operators, "rule": whole.second, "other": whole.first}


def _repeat(call: Callable[[], _T], seconds: float = _SECONDS_PER_TURN) -> list[_T]:
    """Return the results of several calls in a row: other processes disturb the shortest one least."""
    started, results = time.monotonic(), [call()]
    while len(results) < _MIN_CALLS or time.monotonic() - started < seconds:
        results.append(call())
    return results


def read_times(
    answer: Json, groups: Mapping[str, Sequence[Operator]], choices: Choices
) -> dict[str, ChoiceTimes]:
    """Return the times of choices in a child's answer, by operator; uncalled operators are missing."""
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
    """Return the choices to measure, one mapping (operator -> alternative) for each library.

    The first library has the alternatives that are estimated to be fastest.
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
    """Return the times of each operator's fastest alternative, if it is faster than the rule's choice."""
    chosen = {}
    for text, (operator, *_) in groups.items():
        faster = [
            times
            for times in ledgers[text].choices.values()
            if times.rule == operator.by_rule
            and times.choice in operator.alternatives
            and is_allowed(times.choice)
            and times.ratio
            < 1 - _MIN_GAIN - _MIN_GAIN_PER_BYTE * operator.count_added_bytes(times.choice)
        ]
        if faster:
            chosen[text] = min(faster, key=lambda times: (times.ratio, times.key))
    return chosen


class LoweredChoices(NamedTuple):
    """A model lowered with some choices.

    Attributes:
        has_dimensions: Whether the model has dynamic dimensions.
    """

    model: LoweredModel
    path: Path
    has_dimensions: bool

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes."""
        from tvmflow.graph.ir import list_weights

        types = [weight.ty for weight in list_weights(self.model.mod["main"])]
        return sum(
            math.prod(map(int, ty.shape)) * np.dtype(str(ty.dtype.dtype)).itemsize for ty in types
        )


class Outcome(NamedTuple):
    """The comparison of a library with some choices with the library by rule.

    Attributes:
        choices: The choices, without those that were slower in this library.
        times: The times: `tuned` is the library with the choices; no times if no choice was left.
        found: The speedup estimated from the times of the operators.
    """

    choices: Choices
    times: LibraryTimes
    found: float

    @property
    def speedup(self) -> float:
        """The speedup of the library in an interleaved measurement."""
        return 1 / self.times.pairs.ratio

    @property
    def is_kept(self) -> bool:
        """True if the whole library is faster beyond the noise."""
        return bool(self.choices) and bool(self.times.tuned) and self.times.pairs.is_faster


def find_gain(chosen: Mapping[str, ChoiceTimes], calls: Mapping[str, int], rule_s: float) -> float:
    """Return the speedup of a library, estimated from the times of its operators."""
    saved_s = sum(
        calls[text] * (min(times.rule_seconds) - min(times.seconds)) / times.calls
        for text, times in chosen.items()
    )
    return rule_s / max(rule_s - saved_s, rule_s / 100)


def library_digest(choices: Choices, settings: Sequence[Json]) -> str:
    """Return the digest of what is compared and how."""
    return digest_of([{text: dict(choice) for text, choice in choices.items()}, *settings])


@dataclass(frozen=True, kw_only=True)
class ChoiceLibraries:
    """Builds libraries of a model with some choices, and measures them.

    Attributes:
        library: The request for each library, except for its lowered model.
        locks: The folder of the locks of devices.
    """

    imported: Path
    options: LoweringOptions
    library: LibraryRequest
    device: Mapping[str, str]
    locks: Path
    work: Path

    def lower(self, choices: Choices, name: str) -> LoweredChoices:
        """Lower the model with some choices, and write it to the file `name`."""
        from tvmflow.compiler import lower
        from tvmflow.graph import ir
        from tvmflow.graph.dynamic_shapes import read_dimensions
        from tvmflow.targets.tvm_target import make_target

        mod, target = ir.load_module(self.imported), make_target(self.library.target)
        has_dimensions = bool(read_dimensions(mod["main"]))
        model = lower(mod, target, self.options, choices=choices)
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
        """Time some operators of two libraries in a child process with exclusive use of the device.

        Returns:
            The answer of `measure_choices`.

        Raises:
            StageError: The child failed, or was cancelled.
        """
        payload: dict[str, Json] = {"is_whole": is_whole}
        operators = list(texts)
        for lowered, name, kernels in (
            (rule, "rule", "rule_kernels"),
            (other, "other", "kernels"),
        ):
            groups = group_operators(lowered.model.operators)
            found = find_kernels(groups, lowered.model.kernel_nodes)
            payload[kernels] = {text: dict(found.get(text, {})) for text in operators}
            payload[name] = vars(replace(self.library, lowered=str(lowered.path)))
        outcome = call_alone(
            fork_server,
            measure_choices,
            payload,
            device=self.device,
            locks=self.locks,
            timeout_s=_TIMEOUT_S,
            log=self.work / _LOG,
        )
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
        """Compare the library with all choices with the one by rule, if the ledger lacks the comparison.

        Args:
            fork_server: A fork server with TVM; None to measure nothing.
            rule: The model by rule.
            groups: The operators.
            chosen: The times of the chosen alternatives.
            records: The records of the library.

        Returns:
            The outcome; None if nothing was chosen, or if a measurement is needed without a fork server.

        Raises:
            StageError: The libraries cannot be measured.
            StoreError: The times cannot be recorded.
        """
        choices = {text: times.choice for text, times in chosen.items()}
        digest = library_digest(choices, [self.library.rules_version, self.library.runtime])
        known = records.libraries.get(digest)
        if not choices:
            return None
        if known is not None:
            times = LibraryTimes.of_record(known)
        elif fork_server is None:
            return None
        else:
            times = self._drop_slower(fork_server, rule, choices)
            # a comparison that noise left undecided is not recorded, so that it is repeated another time
            if not times.tuned or times.pairs.is_decided:
                records.add([times.to_record(digest)])
        kept = {text: c for text, c in choices.items() if choice_key(text) not in times.slower}
        found = 1.0
        if times.untuned:
            calls = {text: len(operators) for text, operators in groups.items()}
            kept_times = {text: chosen[text] for text in kept}
            found = find_gain(kept_times, calls, min(times.untuned))
        return Outcome(kept, times, found)

    def _drop_slower(
        self, fork_server: ForkServer, rule: LoweredChoices, choices: Choices
    ) -> LibraryTimes:
        """Time the library with all choices; drop those that make their operator slower, and repeat."""
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
