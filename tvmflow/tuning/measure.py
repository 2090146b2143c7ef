"""Measuring: builds one scheduled kernel in process, runs it on this machine and gives its seconds.

The functions here run in a freshly forked child, so a crash or a hang of the compiler or of
a kernel costs one trial. What they are told and what they say is JSON.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm.rpc.base import RPC_SESS_MASK
from tvm.s_tir.schedule import Schedule, Trace

from tvmflow import schedules
from tvmflow.schedules.intrinsics import load_intrinsics
from tvmflow.targets import cuda, cuda_process
from tvmflow.targets.gpu import CUDA, load_cuda
from tvmflow.values import Json

Send = Callable[[dict[str, Any]], None]

_SLOW_S: Final = 0.1
# A candidate that is so much slower than the best known in a first look, this part of a repeat long,
# is not measured further.
_HOPELESS: Final = 1.5
_LOOK: Final = 4
# One that may be the best is measured on while its repeats differ by more than this.
_NOISY: Final = 0.1
_MOST_TURNS: Final = 3


DEVICE: Final = "device"
"""The phase in which nothing of the candidate has a part: what goes wrong there is not its fault."""


class Timing(NamedTuple):
    """How a kernel is timed: TVM's `time_evaluator`, whose first call is a warm-up.

    `number` calls are one repeat, more where they take less than `min_repeat_ms`; 0 is 1.
    """

    number: int
    repeat: int
    min_repeat_ms: int
    flush_cache: bool = False


def load_compiler(target: Mapping[str, Json], *, runs: bool = True) -> None:
    """What building kernels for `target` needs, and unless they run elsewhere running them, for all of this process.

    It may be forked until the first kernel has run on a GPU. Raises EnvironmentProblem.
    """
    load_intrinsics(target)
    if target["kind"] != CUDA:
        return
    if runs:
        load_cuda()
        cuda.take_over_compiling(cuda.toolkit(), [])
    else:
        cuda_process.load_without_driver([])


def trace_json(trace: Any) -> Json:
    """A trace as plain JSON: what the ledger keeps, and what `scheduled` applies."""
    return _plain(trace.as_json(remove_postproc=False))


def _plain(value: Any) -> Json:
    if isinstance(value, tvm.tirx.IntImm | tvm.tirx.FloatImm):
        return value.value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [_plain(entry) for entry in value]
    return value


def prepared(
    mod: tvm.IRModule, trace: Json | None, payload: Mapping[str, Json]
) -> tuple[tvm.IRModule, str]:
    """A workload as it is built, and its road: with a recorded trace, or untuned, with the schedule of the rules.

    `payload` has the `target`, and as `schedules` the version of the rules, 0 for none.
    """
    if trace is not None:
        return scheduled(mod, trace), "tuned"
    made, roads = schedules.by_rule(mod, payload["target"], payload["schedules"])
    return made, roads["main"]


def scheduled(mod: tvm.IRModule, trace: Json) -> tvm.IRModule:
    """A workload with a recorded trace applied."""
    schedule = Schedule(mod, seed=1)
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule.mod


def measure_one(payload: Json, send: Send) -> Json:
    """Apply, build and run one trace.

    Takes `mod` (saved), `trace`, `target`, `timing`, `best_s` (of the workload's best trial, or None).
    Gives `{"run_secs": [...], "ran": [start, end], "spent": {phase: s}}` or `{"failure": {"phase", "message"}, "spent": …}`.
    Sends `{"event": "phase", "phase": …}` as it goes, so that whoever waits knows where a crash or a
    hang happened; before it touches the device it asks, and waits until it may.
    """
    load_compiler(payload["target"])
    clock = Phases(send)
    try:
        with clock.phase("apply"):
            mod, _ = prepared(tvm.ir.load_json(payload["mod"]), payload["trace"], payload)
        with clock.phase("build"):
            kernel = build(mod, payload["target"])
            arguments = arguments_for(mod)
        with clock.phase(DEVICE, ask=True):
            use_threads(payload["target"])
            arguments = placed(arguments, payload["target"])
        with clock.phase("run"):
            began = time.time()
            run_secs = race(kernel, arguments, Timing(**payload["timing"]), payload["best_s"])
            ran = [began, time.time()]
    # whatever TVM raises here is this candidate's failure and no one else's
    except Exception as error:
        return {
            "failure": {"phase": clock.now, "message": first_line(error)},
            "spent": clock.spent,
        }
    return {"run_secs": run_secs, "ran": ran, "spent": clock.spent}


def measure_finalists(payload: Json, send: Send) -> Json:
    """Time several traces of one workload in turns, and the untuned kernel in the first and last.

    Takes `mod`, `traces`, `target`, `timing`, `rounds`. Gives `{"road": …, "untuned": [s…], "secs": [[s…], …]}`,
    one sample a round for each trace, and none for one that does not apply any more. Turns make what disturbs the machine disturb all alike.
    """
    load_compiler(payload["target"])
    mod = tvm.ir.load_json(payload["mod"])
    timing = Timing(**payload["timing"])
    plain, road = prepared(mod, None, payload)
    untuned = build(plain, payload["target"])
    kernels = [_build_or_none(mod, trace, payload["target"]) for trace in payload["traces"]]
    use_threads(payload["target"])
    arguments = placed(arguments_for(mod), payload["target"])
    return {"road": road, **take_turns(untuned, kernels, arguments, timing, payload["rounds"])}


def take_turns(
    untuned: Any, kernels: Sequence[Any], arguments: list[Any], timing: Timing, rounds: int
) -> Json:
    """The times that `measure_finalists` gives, of kernels that are built; None stands for one that could not be."""
    # one call of a kernel without a schedule can take seconds, and then one is enough
    untuned_secs = time_kernel(untuned, arguments, Timing(number=1, repeat=1, min_repeat_ms=0))
    is_slow = untuned_secs[0] > _SLOW_S
    baseline = timing._replace(number=1, repeat=3)
    secs: list[list[float]] = [[] for _ in kernels]
    for turn in range(rounds):
        # every second round runs backwards, so that nobody always follows the same neighbour
        order = [(place, kernel) for place, kernel in enumerate(kernels) if kernel is not None]
        for place, kernel in order if turn % 2 == 0 else reversed(order):
            secs[place] += time_kernel(kernel, arguments, timing._replace(repeat=1))
        if not is_slow and turn in (0, rounds - 1):
            untuned_secs += time_kernel(untuned, arguments, baseline)
    return {"untuned": untuned_secs, "secs": secs}


def _build_or_none(mod: tvm.IRModule, trace: Json, target: Mapping[str, Json]) -> Any:
    """A finalist, or None for one whose trace does not apply: the others need not suffer for it."""
    try:
        return build(scheduled(mod, trace), target)
    # whatever TVM raises
    except Exception:
        return None


class Phases:
    """Says which phase has begun, and keeps the seconds of each."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = 0.0
        self.now = ""
        self.spent: dict[str, float] = {}

    def phase(self, name: str, *, ask: bool = False) -> Phases:
        self.now = name
        self._send({"event": "phase", "phase": name, "ask": ask})
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent[self.now] = time.perf_counter() - self._started


def build(mod: tvm.IRModule, target: Mapping[str, Json]) -> Any:
    """A kernel's module, compiled for the target."""
    made = tvm.target.Target(dict(target))
    with made:
        return tvm.tirx.build(mod, target=made)


def placed(arguments: Sequence[Any], target: Mapping[str, Json]) -> list[Any]:
    """Arguments where this machine's kernels for a target take them; whatever is wrong with its GPU is told here."""
    if target["kind"] != CUDA:
        return list(arguments)
    there = [each.copyto(tvm.cuda()) for each in arguments]
    tvm.cuda().sync()
    return there


def use_threads(target: Mapping[str, Json]) -> None:
    """Run kernels with as many threads as they are tuned for.

    TVM reads this when its pool starts, and would otherwise obey OMP_NUM_THREADS or take half of
    the logical CPUs.
    """
    os.environ["TVM_NUM_THREADS"] = str(target.get("num-cores", os.cpu_count() or 1))


def time_kernel(kernel: Any, arguments: list[Any], timing: Timing) -> list[float]:
    """Seconds of a call, one number for each repeat, on the device where its arguments are."""
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


def race(kernel: Any, arguments: list[Any], timing: Timing, best_s: float | None) -> list[float]:
    """Seconds of each repeat: a short look for a hopeless candidate, more than asked for when a good one is noisy."""
    look = timing._replace(repeat=1, min_repeat_ms=timing.min_repeat_ms // _LOOK)
    seconds = time_kernel(kernel, arguments, look)
    if best_s is not None and seconds[0] > _HOPELESS * best_s:
        return seconds
    # how many calls fill a repeat is known now: nothing has to be tried out again
    number = max(timing.number, math.ceil(timing.min_repeat_ms / 1e3 / seconds[0]))
    steady = timing._replace(number=number, min_repeat_ms=0)
    seconds = []
    for _ in range(_MOST_TURNS):
        seconds += time_kernel(kernel, arguments, steady)
        is_good = best_s is None or min(seconds) < best_s
        if not is_good or max(seconds) - min(seconds) <= _NOISY * min(seconds):
            break
    return seconds


def arguments_for(mod: tvm.IRModule) -> list[Any]:
    """An array for every parameter: floats from 0 to 1, and integers that are valid as small indices."""
    random = np.random.default_rng(0)
    arrays = []
    for variable in mod["main"].params:
        shape = tuple(int(extent) for extent in variable.ty.shape)
        dtype = str(variable.ty.dtype.dtype)
        arrays.append(tvm.runtime.tensor(_array(random, shape, dtype)))
    return arrays


def _array(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype in ("float32", "float64"):
        return random.random(shape, dtype=np.dtype(dtype).type)
    if dtype == "float16":
        return random.random(shape, dtype=np.float32).astype(np.float16)
    if dtype in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        return random.integers(0, 2, shape).astype(dtype)
    raise ValueError(f"arguments of type {dtype} cannot be made up")


def first_line(error: Exception) -> str:
    """The sentence of a TVM error, which stands last behind a long trace."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:500]
