"""Build and time single kernels, in child processes.

A kernel may crash or hang, so these functions run in freshly forked children: a crash costs only one trial.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.statistics import geometric_means
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.threads import count_usable_cpus, thread_variables
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning import traces, workloads
from tvmflow.tuning.workloads import normalize, workload_key

if TYPE_CHECKING:
    import numpy as np
    import tvm


# A candidate is first measured for this part of a repeat. If it is this many times slower than the best known, it is
# not measured further.
_HOPELESS_RATIO: Final = 1.5
_FIRST_LOOK_PART: Final = 4
# A candidate that may be the best gets more repeats while their relative spread exceeds this.
_NOISY_SPREAD: Final = 0.1
_MAX_ROUNDS: Final = 3

_FLOATS: Final = ("float16", "float32", "float64")
_INTEGERS: Final = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()

_Request = TypeVar("_Request", bound="KernelRequest")


class Timing(NamedTuple):
    """The options for timing a kernel, whose first call is a warm-up.

    Attributes:
        number: The number of calls per repeat; more if these take less than `min_repeat_ms`. 0 means 1.
        min_repeat_ms: The shortest duration of a repeat in milliseconds.
        flush_cache: Whether to flush the CPU's caches before each repeat.
    """

    number: int
    repeat: int
    min_repeat_ms: int
    flush_cache: bool = False


# ---------------------------------------------------------------- building


def load_compiler(
    target: Mapping[str, Json], *, runs: bool = True, by_driver: bool = False
) -> None:
    """Load the modules needed to build kernels for `target`, and with `runs` to run them.

    The process may be forked until the first kernel has run on a GPU.

    Args:
        target: TVM's mapping of the target.
        runs: Whether kernels run in this process.
        by_driver: Whether kernels are in C libraries, which load the device's driver themselves.

    Raises:
        EnvironmentProblem: The GPU or its tools cannot be used.
    """
    from tvmflow.compiler import load_intrinsics

    load_intrinsics(target)
    if not by_driver:
        backend_for(target).load_compiler(runs=runs)


def trace_json(trace: Any) -> Json:
    """Return a trace of TVM as plain JSON, the form for the ledger and for `apply_trace`."""
    return _plain_json(trace.as_json(remove_postproc=False))


def _plain_json(value: Any) -> Json:
    import tvm

    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_json(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [_plain_json(entry) for entry in value]
    return value


def apply_trace(mod: tvm.IRModule, trace: Json) -> Any:
    """Apply a recorded trace to a workload `mod`; return TVM's schedule, whose `mod` is the result.

    Raises:
        ValueError: No search can have made the trace. RuntimeError: The trace does not apply.
    """
    from tvm.s_tir.schedule import Schedule, Trace

    if problem := traces.find_problem(trace):
        raise ValueError(problem)
    schedule = Schedule(mod, seed=1)
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule


def build(mod: tvm.IRModule, target: Mapping[str, Json]) -> Any:
    """Compile a scheduled kernel for the target; return TVM's runtime module."""
    import tvm

    from tvmflow.compiler import build_kernels

    return build_kernels(mod, tvm.target.Target(dict(target)))


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """A request to a child process to build and time kernels of one workload; is sent as JSON.

    Attributes:
        mod: The saved module of the workload.
        rules_version: The version of the schedule rules for untuned kernels; 0 for none.
        by_driver: Whether kernels are in C libraries, which launch them with a device's driver; otherwise TVM's
            runtime calls them.
        libraries: For a remote device, the paths of the built kernels; a path is None if its schedule does not apply.
    """

    mod: str
    target: Mapping[str, Json]
    rules_version: int
    timing: Timing
    by_driver: bool = False
    libraries: Sequence[str | None] = ()

    @classmethod
    def from_json(cls: type[_Request], value: Mapping[str, Json]) -> _Request:
        """Read the request from a payload, which may have further fields."""
        fields = {name: value[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "timing": Timing(*value["timing"])})

    def to_json(self) -> dict[str, Json]:
        """Return the payload for the child."""
        return dict(vars(self))

    def schedule(self, trace: Json | None) -> tuple[tvm.IRModule, str]:
        """Return the scheduled workload, and `tuned`; without a trace, the name of its schedule rule."""
        import tvm

        from tvmflow.compiler import schedule_untuned

        mod = tvm.ir.load_json(self.mod)
        if trace is not None:
            return apply_trace(mod, trace).mod, "tuned"
        scheduled, rules = schedule_untuned(mod, self.target, self.rules_version)
        return scheduled, rules["main"]

    def load_compiler(self) -> None:
        """Load the modules needed to build and run the kernels."""
        load_compiler(self.target, by_driver=self.by_driver)

    def build(self, scheduled: tvm.IRModule) -> Any:
        """Build a scheduled kernel for `time_kernel`."""
        make = LibraryKernel if self.by_driver else build
        return make(scheduled, self.target)

    def make_arguments(self) -> list[list[Any]]:
        """Return the arguments of each measurement; empty ones for a library, which has its own."""
        import tvm

        return [[]] if self.by_driver else make_measured_arguments(tvm.ir.load_json(self.mod))

    def place_arguments(self, argument_lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Copy the arguments to the target's device; EnvironmentProblem if the device is broken."""
        backend = backend_for(self.target)
        if not self.by_driver:
            return [backend.place_arguments(arguments) for arguments in argument_lists]
        if reason := backend.unrunnable_reason(self.target, in_this_process=True):
            raise EnvironmentProblem(reason)
        return list(map(list, argument_lists))


class LibraryKernel:
    """A kernel in its own C library, timed by events of the device that it runs on."""

    def __init__(self, mod: tvm.IRModule, target: Mapping[str, Json]) -> None:
        """Compile a scheduled kernel and its arguments for a target; no device is used yet."""
        from tvmflow.compiler import link_kernel
        from tvmflow.targets.tvm_target import make_target

        arguments = [argument.numpy() for argument in make_arguments(mod)]
        self._folder = tempfile.TemporaryDirectory(prefix="tvmflow-")
        folder = Path(self._folder.name)
        self._library = link_kernel(mod["main"], arguments, make_target(target), folder)
        self._seconds: list[float] = []

    @functools.cached_property
    def _call(self) -> Callable[[], list[np.ndarray[Any, Any]]]:
        """The function that calls the kernel; the driver builds the kernel before the first call."""
        program = self._library.load()
        self._folder.cleanup()
        return program.profiled_main(lambda _, seconds: self._seconds.append(seconds))

    def compute(self) -> list[np.ndarray[Any, Any]]:
        """Call the kernel on its own arguments, and return the outputs."""
        return self._call()

    def time(self, timing: Timing) -> list[float]:
        """Return the seconds per call on the device, one value for each repeat."""
        self._call()
        return [self._time_repeat(timing) for _ in range(timing.repeat)]

    def _time_repeat(self, timing: Timing) -> float:
        self._seconds.clear()
        calls, deadline = 0, time.monotonic() + timing.min_repeat_ms / 1e3
        # the duration of a repeat includes the overhead of calls, the kernel's seconds do not
        while calls < timing.number or time.monotonic() < deadline or not calls:
            self._call()
            calls += 1
        seconds = sum(self._seconds) / calls
        if not seconds:
            raise StageError("the driver of the device reports no times of kernels")
        return seconds


# ---------------------------------------------------------------- arguments


def make_arguments(mod: tvm.IRModule, sizes: Mapping[Any, int] = MappingProxyType({})) -> list[Any]:
    """Return an array for each parameter: floats in [0, 1), and integers valid as small indices.

    `sizes` holds the value of each size variable; sizes that are parameters become arguments, too.
    """
    import numpy as np
    import tvm

    random = np.random.default_rng(0)
    return [
        argument
        if isinstance(argument, int)
        else tvm.runtime.tensor(random_array(random, *argument))
        for argument in workloads.argument_shapes(mod, sizes)
    ]


def make_measured_arguments(mod: tvm.IRModule) -> list[list[Any]]:
    """Return the arguments of each measurement: one list, or one for each tuning size."""
    return [make_arguments(mod, sizes) for sizes in workloads.list_measured_sizes(mod)]


def random_array(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a random array: floats in [0, 1), integers 0 or 1.

    Raises:
        ValueError: The dtype is neither a float nor an integer type that can be drawn.
    """
    if dtype in _FLOATS:
        drawn: Any = "float64" if dtype == "float64" else "float32"
        return random.random(shape, dtype=drawn).astype(dtype)
    if dtype in _INTEGERS:
        return random.integers(0, 2, shape).astype(dtype)
    raise ValueError(f"arguments of type {dtype} cannot be generated")


# ---------------------------------------------------------------- timing


def use_threads(target: Mapping[str, Json]) -> None:
    """Set the thread count that kernels are tuned for; call this before TVM's thread pool starts."""
    os.environ.update(thread_variables(split_threads(target)[1] or count_usable_cpus()))


def time_kernel(kernel: Any, arguments: list[Any], timing: Timing) -> list[float]:
    """Return the seconds per call on the arguments' device, one value for each repeat."""
    if isinstance(kernel, LibraryKernel):
        return kernel.time(timing)
    import tvm
    from tvm.rpc.base import RPC_SESS_MASK

    device = arguments[0].device
    on_cpu = device.dlpack_device_type() % RPC_SESS_MASK == tvm.cpu().dlpack_device_type()
    evaluate = kernel.time_evaluator(
        "main",
        device,
        number=max(timing.number, 1),
        repeat=timing.repeat,
        min_repeat_ms=timing.min_repeat_ms,
        f_preproc="cache_flush_cpu_non_first_arg" if timing.flush_cache and on_cpu else "",
    )
    return [float(seconds) for seconds in evaluate(*arguments).results]


def time_candidate(
    kernel: Any, argument_lists: Sequence[list[Any]], timing: Timing, best_s: float | None
) -> list[list[float]]:
    """Return the seconds of each repeat, for each list of arguments; a slow candidate has fewer repeats.

    A candidate that a short first measurement shows to be much slower than `best_s` is not measured further. A
    candidate that may be the best gets more repeats than `timing` says while they differ. With several lists, for
    several sizes, the geometric mean counts.
    """
    first_look = timing._replace(repeat=1, min_repeat_ms=timing.min_repeat_ms // _FIRST_LOOK_PART)
    looks = [time_kernel(kernel, arguments, first_look) for arguments in argument_lists]
    if best_s is not None and geometric_means(looks)[0] > _HOPELESS_RATIO * best_s:
        return looks
    steady = [timing] * len(looks)
    if not isinstance(kernel, LibraryKernel):
        # The first look shows how many calls fill a repeat, so TVM does not need to find it again.
        call_counts = [math.ceil(timing.min_repeat_ms / 1e3 / look[0]) for look in looks]
        steady = [
            timing._replace(number=max(timing.number, count), min_repeat_ms=0)
            for count in call_counts
        ]
    rows: list[list[float]] = [[] for _ in looks]
    for _ in range(_MAX_ROUNDS):
        for row, arguments, own_timing in zip(rows, argument_lists, steady, strict=True):
            row += time_kernel(kernel, arguments, own_timing)
        seconds = geometric_means(rows)
        may_be_best = best_s is None or min(seconds) < best_s
        is_noisy = max(seconds) - min(seconds) > _NOISY_SPREAD * min(seconds)
        if not may_be_best or not is_noisy:
            break
    return rows


_log = logging.getLogger(__name__)


def apply_chosen(
    lowered: tvm.IRModule,
    chosen: Mapping[str, Json],
    workloads: Mapping[str, str],
    target: tvm.target.Target,
    *,
    must_fit: bool = True,
) -> tuple[tvm.IRModule, list[str]]:
    """Schedule every kernel of a module for which a schedule was chosen.

    TVM's own pass uses the first database record with a fitting structure, and does not report if none fits. Here, a
    choice that no longer applies is an error. A choice that fits no kernel is an error, too, if `must_fit`.

    Args:
        lowered: The lowered module.
        chosen: Traces by workload key.
        workloads: Saved modules by workload key.
        target: TVM's target.
        must_fit: Whether each choice must fit a kernel.

    Returns:
        The module, and the sorted names of the scheduled kernels.

    Raises:
        StageError: A schedule does not apply, or fits no kernel.
    """
    import tvm

    from tvmflow.compiler import load_intrinsics
    from tvmflow.graph import ir

    load_intrinsics(target.export())
    scheduled = {key: _schedule(key, workloads[key], chosen[key]) for key in sorted(chosen)}
    keys: dict[str, str] = {}
    module = ir.copy_module(lowered)
    for var, function in lowered.functions_items():
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        key = workload_key(normalize(function))
        if key in scheduled:
            module[var] = ir.replace_kernel(function, scheduled[key])
            keys[str(var.name_hint)] = key
    unused = sorted(set(chosen) - set(keys.values()))
    if unused and must_fit:
        raise StageError(
            f"{len(unused)} of {len(chosen)} chosen schedules fit no kernel of this model "
            f"(the first: workload {unused[0][:12]})",
            fix="they were chosen for another model; please report this with the recipe",
        )
    _log.debug("%d kernels have a chosen schedule", len(keys))
    return module, sorted(keys)


def _schedule(key: str, workload: str, trace: Json) -> tvm.tirx.PrimFunc:
    import tvm

    try:
        return apply_trace(tvm.ir.load_json(workload), trace).mod["main"]
    except (RuntimeError, ValueError, TypeError) as error:
        raise StageError(
            f"the schedule chosen for workload {key[:12]} does not apply to it",
            fix="run with another tune.seed, or remove the workload's file from the ledger",
        ) from error
