"""Compare whole libraries that differ in some members: tuned kernels, or alternatives of operators.

A schedule that is faster in isolation, with its data in the cache, may be slower between other kernels, and an
alternative of an operator may change its neighbors' layouts. So each member is timed again inside the library, slower
ones are dropped, and both libraries are called interleaved. Weights are random: times do not depend on them, so a
model with new weights has the same choices. A library with dynamic shapes is measured at each tuning size.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from tvmflow.compiler import LoweringOptions
from tvmflow.core.choices import Choice, Choices, Operator, choice_key, choice_text
from tvmflow.core.codec import from_json
from tvmflow.core.dimensions import evaluate_shape, list_tuning_sizes, specs_at
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, Outcome
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

if TYPE_CHECKING:
    import tvm

    from tvmflow.compiler import LoweredModel
    from tvmflow.graph.marks import KernelNodes
    from tvmflow.runtime.module import Module
    from tvmflow.runtime.programs import Program

TIMEOUT_S: Final = 1800.0
"""The timeout for compiling both libraries and calling them."""

_SEED: Final = 0

# An alternative must save this share of the operator's time, and this much more for each MiB by which it enlarges the
# weights: if other processes also use caches and memory, reading weights takes longer than in this measurement.
_MIN_GAIN: Final = 0.02
_MIN_GAIN_PER_BYTE: Final = 0.02 / (1 << 20)

_T = TypeVar("_T")

Profile = Callable[[], Mapping[str, float]]
"""Runs a library once and returns the seconds of each kernel."""

Shares = Mapping[str, float]
"""The kernels of a member in a library -> the share of the kernel's calls for this member."""

Members = Mapping[str, Sequence[Shares]]
"""The members in which two libraries differ, each with its kernels in both libraries."""


class Turns(NamedTuple):
    """How two libraries are measured interleaved.

    Attributes:
        rounds: The maximum number of profiles of each library; no further round begins after `seconds`, except the
            first `min_rounds`.
        calls: The minimum number of calls in a turn. The shortest call counts: other processes disturb it least.
        profile_s: The shortest duration of a turn of profiled calls; `call_s` is that of a turn of plain calls.
        repeat_s: The shortest duration of the repeat whose mean counts as a plain call; 0 for a single call.
        whole_s: No further pair of plain turns begins after these seconds, except the first `min_pairs`.
        drops_unclear: Whether a member is dropped if its shortest time is longer; otherwise only if it is slower
            beyond the noise.
    """

    rounds: int
    min_rounds: int
    seconds: float
    calls: int
    profile_s: float
    call_s: float
    repeat_s: float
    whole_s: float
    min_pairs: int
    drops_unclear: bool


TUNED: Final = Turns(
    rounds=MIN_PAIRS + 1,
    min_rounds=3,
    seconds=20.0,
    calls=1,
    profile_s=0.0,
    call_s=0.0,
    repeat_s=0.02,
    whole_s=20.0,
    min_pairs=3,
    drops_unclear=False,
)
"""For a tuned library and the untuned one."""

CHOICES: Final = Turns(
    rounds=2 * MIN_PAIRS,
    min_rounds=MIN_PAIRS,
    seconds=30.0,
    calls=3,
    profile_s=0.1,
    call_s=0.3,
    repeat_s=0.0,
    # until it is clear which library is faster: the choice is made only once
    whole_s=120.0,
    min_pairs=MIN_PAIRS,
    drops_unclear=True,
)
"""For a library with alternatives of operators and the one by rule."""


class LibraryTimes(NamedTuple):
    """The comparison of a changed library with the original one; for the fields see `LibraryRecord`.

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
        """The times of both libraries, the changed one first."""
        return PairedTimes(self.tuned, self.untuned)

    @property
    def keeps_tuned(self) -> bool:
        """True if the changed library is faster, and slower at no size; or if it could not be measured."""
        if self.error:
            return True
        is_slower = any(PairedTimes(*pair).is_slower for pair in zip(*self.sizes, strict=True))
        return bool(self.tuned) and self.pairs.is_faster and not is_slower

    def describe_speedup(self) -> dict[str, Any]:
        """Return the count of `pairs`, and the `speedup` with its confidence limits `low` and `high`."""
        low, high = self.pairs.limits
        speedup = {"speedup": 1 / self.pairs.ratio, "low": 1 / high, "high": 1 / low}
        rounded = {name: round(value, 4) for name, value in speedup.items()}
        return {"pairs": len(self.tuned), **rounded}


def read_or_compare(
    ledger: WorkloadLedger,
    digest: str,
    members: Collection[str],
    measure: Callable[[Collection[str]], Outcome],
    *,
    keeps_undecided: bool = True,
) -> LibraryTimes:
    """Return the ledger's comparison of two libraries that differ in `members`, or make and record one.

    Slower members are dropped, and the library with the others is measured, until no member is slower.

    Args:
        ledger: The records of the library.
        digest: The digest of what is compared and how.
        members: The members in which the libraries differ.
        measure: Returns the outcome of `measure_libraries` for some of the members.
        keeps_undecided: Whether a comparison that is undecided because of noise is recorded.

    Raises:
        StoreError: The times cannot be recorded.
    """
    if known := ledger.libraries.get(digest):
        return LibraryTimes(known.slower, known.tuned, known.untuned, sizes=known.sizes)
    slower: set[str] = set()
    times = LibraryTimes()
    while left := [member for member in members if member not in slower]:
        outcome = measure(left)
        if outcome.kind != "ok":
            return LibraryTimes(error=outcome.message)
        times = from_json(LibraryTimes, outcome.value)
        if not times.slower:
            break
        slower.update(times.slower)
    times = times._replace(slower=tuple(sorted(slower)))
    if keeps_undecided or not times.tuned or times.pairs.is_decided:
        fields = (times.slower, times.tuned, times.untuned)
        ledger.add([LibraryRecord(digest, *fields, timestamp(), times.sizes)])
    return times


@dataclass(frozen=True, kw_only=True)
class LibraryRequest:
    """How to build libraries of a model.

    Attributes:
        runtime: The setting of the runtime that executes the library.
        rules_version: The version of the schedule rules.
        workloads: The path of the saved modules by workload key; empty if no schedule is chosen.
    """

    target: Mapping[str, Json]
    threads: int
    runtime: str
    rules_version: int
    workloads: str = ""

    def make_payload(
        self,
        changed: tuple[Path, Mapping[str, Json]],
        original: Path,
        members: Members,
        turns: Turns,
        *,
        is_whole: bool = True,
    ) -> Json:
        """Return the payload for `measure_libraries`.

        A library has the path of its lowered model; the changed one also has schedules, by workload key. With
        `is_whole`, whole calls are timed, too.
        """
        return {
            "request": asdict(self),
            "libraries": [[str(changed[0]), changed[1]], [str(original), {}]],
            "members": members,
            "turns": turns,
            "is_whole": is_whole,
        }


# ---------------------------------------------------------------- in the child


def measure_libraries(payload: Json, emit: Emit) -> Json:
    """Build two libraries and measure them interleaved: the entry point of the child.

    The payload is from `LibraryRequest.make_payload`. In the result, `members` holds the seconds of each member in both
    libraries, for each feed. The other fields are those of `LibraryTimes`; the times of whole calls are empty if a
    member is slower, or if they were not requested.
    """
    del emit
    turns = Turns(*payload["turns"])
    paths = dict.fromkeys(path for path, _ in payload["libraries"])
    # libraries of one model share the weights, which may take gigabytes
    models = {path: Libraries(LibraryRequest(**payload["request"]), path) for path in paths}
    changed, original = (models[path].load(chosen) for path, chosen in payload["libraries"])
    feeds = next(iter(models.values())).feeds

    def profile(module: Module, feed: Mapping[str, Any]) -> dict[str, float]:
        calls = _repeat(lambda: module.profile(feed, repeat=1), turns.calls, turns.profile_s)
        profiles = [{entry.name: entry.seconds for entry in call} for call in calls]
        return {name: min(times[name] for times in profiles) for name in profiles[0]}

    members: dict[str, list[PairedTimes]] = {name: [] for name in payload["members"]}
    for feed in feeds:
        both = partial(profile, changed, feed), partial(profile, original, feed)
        for name, times in time_members(*both, payload["members"], turns).items():
            members[name].append(times)
    slower = [name for name, feeds_times in members.items() if is_slower(feeds_times, turns)]
    answer: dict[str, Json] = {"members": members, "slower": slower, "tuned": (), "untuned": ()}
    if slower or not payload["is_whole"]:
        return answer
    rows: tuple[list[list[float]], ...] = ([], [])

    def measure_call(module: Module, own_rows: list[list[float]]) -> float:
        def call(feed: Mapping[str, Any]) -> float:
            return module.latency(feed, repeat=1, min_seconds=turns.repeat_s)[0]

        times = [min(_repeat(partial(call, feed), turns.calls, turns.call_s)) for feed in feeds]
        own_rows.append(times)
        return geometric_means([[seconds] for seconds in times])[0]

    whole = measure_interleaved(
        lambda: measure_call(changed, rows[0]),
        lambda: measure_call(original, rows[1]),
        seconds=turns.whole_s,
        min_pairs=turns.min_pairs,
    )
    answer |= {"tuned": whole.first, "untuned": whole.second}
    if len(feeds) > 1:
        answer["sizes"] = [list(zip(*own_rows, strict=True)) for own_rows in rows]
    return answer


def time_members(
    profile_changed: Profile,
    profile_original: Profile,
    members: Members,
    turns: Turns,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, PairedTimes]:
    """Profile two libraries interleaved, and return the seconds of each member in both."""
    # warm up: the first call reads the weights for the first time
    profile_changed(), profile_original()
    started, rounds = clock(), list[list[Mapping[str, float]]]()
    while len(rounds) < turns.min_rounds or (
        len(rounds) < turns.rounds and clock() - started <= turns.seconds
    ):
        rounds.append(interleave([profile_changed, profile_original], len(rounds)))

    def add_up(side: int, shares: Shares) -> tuple[float, ...]:
        return tuple(
            sum(share * times[side].get(name, 0.0) for name, share in shares.items())
            for times in rounds
        )

    return {
        name: PairedTimes(*(add_up(side, shares) for side, shares in enumerate(both)))
        for name, both in members.items()
    }


def is_slower(feeds: Sequence[PairedTimes], turns: Turns) -> bool:
    """Return whether a member is slower in the changed library with any feed."""
    if turns.drops_unclear:
        return any(min(times.first) > min(times.second) for times in feeds)
    # kernels that are not called take no time
    return any(all(times.first + times.second) and times.is_slower for times in feeds)


def _repeat(call: Callable[[], _T], calls: int, seconds: float) -> list[_T]:
    """Return the results of at least this many calls in a row that take at least these seconds."""
    started, results = time.monotonic(), [call()]
    while len(results) < calls or time.monotonic() - started < seconds:
        results.append(call())
    return results


class Libraries:
    """Compiles a model with schedules, and times it."""

    def __init__(self, request: LibraryRequest, lowered: str) -> None:
        from tvmflow.compiler import LoweredModel, find_runtime
        from tvmflow.graph import ir
        from tvmflow.graph.dynamic_shapes import read_dimensions
        from tvmflow.targets.tvm_target import make_target
        from tvmflow.tuning import measure

        self._request = request
        self._target = make_target(request.target)
        self._lowered = LoweredModel.read(Path(lowered)).mod
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


# ---------------------------------------------------------------- alternatives of operators


def group_operators(operators: Iterable[Operator]) -> dict[str, list[Operator]]:
    """Group equal operators of a model; leave out operators with a single choice."""
    groups: dict[str, list[Operator]] = {}
    for operator in operators:
        if len(operator.alternatives) > 1:
            groups.setdefault(operator.text, []).append(operator)
    return groups


def find_members(choices: Choices, *models: LoweredModel) -> dict[str, Sequence[Shares]]:
    """Return the members of the chosen operators, by `choice_key`, with their kernels in each model."""
    kernels = [
        find_kernels(group_operators(model.operators), model.kernel_nodes) for model in models
    ]
    return {choice_key(text): tuple(own.get(text, {}) for own in kernels) for text in choices}


def find_kernels(groups: Mapping[str, Sequence[Operator]], nodes: KernelNodes) -> dict[str, Shares]:
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


def read_times(
    answer: Json, groups: Mapping[str, Sequence[Operator]], choices: Choices
) -> dict[str, ChoiceTimes]:
    """Return the times of choices in a child's answer, by operator; uncalled operators are missing."""
    times = {}
    for text in choices:
        [[seconds, by_rule]] = answer["members"][choice_key(text)]
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
        for index, choice in enumerate(unknown):
            if index == len(rounds):
                rounds.append({})
            rounds[index][text] = choice
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

    @classmethod
    def lower(
        cls,
        imported: Path,
        target: Mapping[str, Json],
        options: LoweringOptions,
        choices: Choices,
        path: Path,
    ) -> LoweredChoices:
        """Lower an imported model for a target, and write it to `path`."""
        from tvmflow.compiler import lower
        from tvmflow.graph import ir
        from tvmflow.graph.dynamic_shapes import read_dimensions
        from tvmflow.targets.tvm_target import make_target

        mod = ir.load_module(imported)
        has_dimensions = bool(read_dimensions(mod["main"]))
        model = lower(mod, make_target(target), options, choices=choices)
        model.write(path)
        return cls(model, path, has_dimensions)

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes."""
        from tvmflow.graph.ir import list_weights

        types = [weight.ty for weight in list_weights(self.model.mod["main"])]
        return sum(
            math.prod(map(int, ty.shape)) * np.dtype(str(ty.dtype.dtype)).itemsize for ty in types
        )


def find_gain(chosen: Mapping[str, ChoiceTimes], calls: Mapping[str, int], rule_s: float) -> float:
    """Return the speedup of a library, estimated from the times of its operators."""
    saved_s = sum(
        calls[text] * (min(times.rule_seconds) - min(times.seconds)) / times.calls
        for text, times in chosen.items()
    )
    return rule_s / max(rule_s - saved_s, rule_s / 100)
