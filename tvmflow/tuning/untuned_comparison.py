"""The whole library with the chosen schedules, measured in turns with the same library untuned.

A schedule that wins alone, with its data in the cache, may lose between other kernels. So each
tuned kernel is timed once more where it will run, and those that lose there stay untuned. Then
both libraries are called in turns. Their weights are random: no time depends on them, so that a
model with new weights has the same choice. A library with open sizes is measured at each size to tune at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.dimensions import evaluate_shape, list_sizes_to_tune_at, specs_at
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit
from tvmflow.core.statistics import MIN_PAIRS, PairedTimes, geometric_means, measure_in_turns
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.bundles import C_RUNTIME
from tvmflow.targets.backends import backend_for
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.trials import LibraryRecord, timestamp

if TYPE_CHECKING:
    import tvm

    from tvmflow.runtime.module import Module
    from tvmflow.runtime.programs import Program

_PROFILE_ROUNDS: Final = MIN_PAIRS + 1
_MIN_PROFILE_ROUNDS: Final = 3
_SECONDS: Final = 20.0
_MIN_SECONDS_PER_TURN: Final = 0.02
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True)
class LibraryRequest:
    """A model and the schedules that were chosen for its kernels, each by itself.

    Attributes:
        lowered: The path of the lowered model.
        workloads: The path of the saved modules by workload key.
        calls: How often the model calls each of its workloads.
        names: The kernels of each chosen workload.
        chosen: Their traces.
        target: TVM's mapping of the target.
        threads: The threads that kernels run with.
        runtime: The setting of the runtime that executes the library.
        rules_version: The version of the schedule rules.
    """

    lowered: str
    workloads: str
    calls: Mapping[str, int]
    names: Mapping[str, Sequence[str]]
    chosen: Mapping[str, Json]
    target: Mapping[str, Json]
    threads: int
    runtime: str
    rules_version: int

    @property
    def library_key(self) -> str:
        """The key under which a ledger keeps the records: that of all kernels and their calls."""
        return digest_of({"library": self.calls})

    @property
    def digest(self) -> str:
        """The digest of what is compared and how, for one library on one target."""
        return digest_of([self.chosen, self.rules_version, self.runtime, _PROFILE_ROUNDS])


class LibraryTimes(NamedTuple):
    """The comparison of a tuned library with the untuned one.

    Attributes:
        slower: The workloads whose tuned kernels are slower in the library than untuned, by key.
        tuned: Seconds of a call of the library with all other chosen schedules; none if there are none.
        untuned: Seconds of the untuned library in the same turns.
        error: The reason why nothing was compared; otherwise empty.
        sizes: For a library that is measured at several sizes, the seconds at each: tuned, then untuned.
            The others are geometric means.
    """

    slower: tuple[str, ...] = ()
    tuned: tuple[float, ...] = ()
    untuned: tuple[float, ...] = ()
    error: str = ""
    sizes: tuple[tuple[tuple[float, ...], ...], ...] = ()

    @property
    def pairs(self) -> PairedTimes:
        """Both libraries, the tuned one first."""
        return PairedTimes(self.tuned, self.untuned)

    @property
    def keeps_tuned(self) -> bool:
        """True if the tuned library is faster, and slower at no size; an unmeasured one is not judged."""
        if self.error:
            return True
        is_slower = any(PairedTimes(*pair).is_slower for pair in zip(*self.sizes, strict=True))
        return bool(self.tuned) and self.pairs.ratio < 1 and not is_slower


def read_or_compare(
    request: LibraryRequest, ledger: WorkloadLedger, compare: Callable[[], LibraryTimes]
) -> LibraryTimes:
    """Return the comparison that the ledger has of these libraries, or compare and record it.

    Args:
        request: The libraries.
        ledger: The records of the library.
        compare: Compares them.

    Raises:
        StoreError: The times cannot be recorded.
    """
    known = ledger.libraries.get(request.digest)
    if known is not None:
        return LibraryTimes(known.slower, known.tuned, known.untuned, sizes=known.sizes)
    times = compare()
    if not times.error:
        fields = (times.slower, times.tuned, times.untuned)
        ledger.add([LibraryRecord(request.digest, *fields, timestamp(), times.sizes)])
    return times


# ---------------------------------------------------------------- in the child


def compare_libraries(payload: Json, emit: Emit) -> Json:
    """Build and compare both libraries: the entry point of the child.

    Args:
        payload: A `LibraryRequest` as JSON.
        emit: Not used.

    Returns:
        `slower`, `tuned`, `untuned` and, with several sizes, `sizes` of `LibraryTimes`.
    """
    del emit
    request = LibraryRequest(**payload)
    libraries = Libraries(request)
    untuned, tuned = libraries.load({}), libraries.load(request.chosen)
    slower = {
        key for feed in libraries.feeds for key in libraries.find_slower(tuned, untuned, feed)
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

    times = measure_in_turns(
        lambda: measure_library(tuned, rows[0]),
        lambda: measure_library(untuned, rows[1]),
        seconds=_SECONDS,
    )
    answer = {"slower": sorted(slower), "tuned": times.first, "untuned": times.second}
    if len(libraries.feeds) == 1:
        return answer
    return {**answer, "sizes": [list(zip(*own_rows, strict=True)) for own_rows in rows]}


Profile = Callable[[], Mapping[str, float]]
"""Runs a library once and returns the seconds of each kernel."""


def find_slower(
    names: Mapping[str, Iterable[str]],
    profile_tuned: Profile,
    profile_untuned: Profile,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Return the workloads whose tuned kernels are slower than the untuned ones beyond the noise.

    Args:
        names: The kernels of each tuned workload, by its key.
        profile_tuned: Profiles the tuned library.
        profile_untuned: Profiles the untuned library.
        clock: Returns the current time in seconds.
    """
    started = clock()
    rounds: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    while len(rounds) < _PROFILE_ROUNDS:
        if len(rounds) >= _MIN_PROFILE_ROUNDS and clock() - started > _SECONDS:
            break
        rounds.append((profile_tuned(), profile_untuned()))

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
        from tvmflow.compiler import ir, lowering
        from tvmflow.compiler.c_program.program import find_runtime
        from tvmflow.compiler.open_sizes import read_dimensions
        from tvmflow.tuning import measure

        self._request = request
        self._target = lowering.make_target(request.target)
        self._lowered = lowering.LoweredModel.read(Path(request.lowered)).mod
        self._runtime, reason = find_runtime(self._lowered, request.runtime)
        by_driver = not backend_for(request.target).RUNS_ON_HOST_CPU
        if by_driver and self._runtime != C_RUNTIME:
            raise StageError(f"it needs TVM's virtual machine for {reason}")
        measure.load_compiler(request.target, by_driver=by_driver)
        measure.use_threads({**request.target, "num-cores": request.threads})
        self._workloads = json.loads(Path(request.workloads).read_text())
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
            for sizes in list_sizes_to_tune_at(self._dimensions)
        ]
        arrays = [_draw_weight(_spec("", variable.ty)) for variable in weights]
        self._weights = arrays if self._runtime == C_RUNTIME else _send_to_vm(arrays)

    def load(self, chosen: Mapping[str, Json]) -> Module:
        """Return the model with the schedules of some workloads, in this process."""
        from tvmflow.compiler import schedules
        from tvmflow.runtime.module import Module
        from tvmflow.tuning.measure import apply_chosen

        request, scheduled = self._request, self._lowered
        if chosen:
            scheduled, _ = apply_chosen(scheduled, chosen, self._workloads, self._target)
        scheduled, _ = schedules.schedule_untuned(scheduled, request.target, request.rules_version)
        signature = {
            "inputs": [spec.to_json() for spec in self._inputs],
            "outputs": [spec.to_json() for spec in self._outputs],
            "dimensions": [dimension.to_json() for dimension in self._dimensions],
        }
        program = self._load_program(scheduled, signature)
        return Module(program, signature, {"name": "library"})

    def _load_program(self, scheduled: tvm.IRModule, signature: Json) -> Program:
        """Compile and load a scheduled model for the runtime that will execute it."""
        from tvmflow.compiler.c_program import load_c_library
        from tvmflow.compiler.code_generation import compile_model
        from tvmflow.compiler.lowering import ScheduledModel
        from tvmflow.runtime.threads import ThreadPool
        from tvmflow.runtime.virtual_machine import VirtualMachine

        threads = self._request.threads
        if self._runtime == C_RUNTIME:
            model = ScheduledModel(scheduled, self._weights, self._target)
            return load_c_library(model, signature, threads)
        library = compile_model(scheduled, self._target).jit()
        # the weights are shared, as they may take gigabytes
        pool = ThreadPool.of(threads)
        return VirtualMachine(library, self._inputs, weights=self._weights, pool=pool)

    def latencies(self, module: Module) -> list[float]:
        """Return the seconds of a call with each feed."""
        return [
            module.latency(feed, repeat=1, min_seconds=_MIN_SECONDS_PER_TURN)[0]
            for feed in self.feeds
        ]

    def find_slower(self, tuned: Module, untuned: Module, feed: Mapping[str, Any]) -> list[str]:
        """Return the workloads that are slower in the tuned library, for some inputs."""
        return find_slower(
            self._request.names,
            lambda: self._profile(tuned, feed),
            lambda: self._profile(untuned, feed),
        )

    def _profile(self, module: Module, feed: Mapping[str, Any]) -> dict[str, float]:
        """Return the seconds of each kernel in one call."""
        return {entry.name: entry.seconds for entry in module.profile(feed, repeat=1)}


def _spec(name: str, ty: Any, largest: Mapping[str, int] = MappingProxyType({})) -> TensorSpec:
    """Return a tensor of `main`.

    Args:
        name: Its name.
        ty: Its type.
        largest: The largest size of each dimension by name.
    """
    from tvmflow.compiler.open_sizes import size_text

    sizes = tuple(map(size_text, ty.shape))
    is_open = not all(isinstance(size, int) for size in sizes)
    return TensorSpec(
        name=name,
        shape=evaluate_shape(sizes, largest),
        dtype=str(ty.dtype.dtype),
        sizes=sizes if is_open else (),
    )


def _list_types(ty: Any) -> list[Any]:
    """Return the types of all tensors in a type."""
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        return [tensor for field in ty.fields for tensor in _list_types(field)]
    return [ty]


def _draw(spec: TensorSpec) -> Any:
    import numpy as np

    from tvmflow.tuning.measure import random_array

    return random_array(np.random.default_rng(_SEED), spec.shape, spec.dtype)


def _draw_weight(spec: TensorSpec) -> Any:
    """Return a weight that lets no value grow without bounds or become so small that it slows the CPU."""
    import numpy as np

    array = _draw(spec)
    if np.issubdtype(array.dtype, np.floating):
        array = ((array - array.dtype.type(0.5)) * array.dtype.type(0.1)).astype(array.dtype)
    return array


def _send_to_vm(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays as tensors of TVM's runtime."""
    from tvmflow.runtime.virtual_machine import CPU, send_array

    return [send_array(array, CPU) for array in arrays]
