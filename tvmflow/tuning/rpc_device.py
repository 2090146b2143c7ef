"""One session on a remote device, and the functions that children run with it.

The children build kernels on this machine, or send built ones to the device and time them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.linking import export_library
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning import measure
from tvmflow.tuning.finalists import FinalistsRequest, time_in_turns
from tvmflow.tuning.phases import PhaseReporter, report_failure
from tvmflow.tuning.trial_process import TrialRequest, time_trial

BUILD_TRIAL: Final = f"{__name__}:build_trial"
RUN_TRIAL: Final = f"{__name__}:run_trial"
BUILD_FINALISTS: Final = f"{__name__}:build_finalists"
RUN_FINALISTS: Final = f"{__name__}:run_finalists"
"""The functions for the fork server."""

# Larger arguments are filled on the device: the network is slow.
_LARGE_BYTES: Final = 1 << 16
_FILL_FUNCTION: Final = "tvm.contrib.random.random_fill_for_measure"


class RpcDevice:
    """A session on a remote device that was leased for it; its server ends the session in time."""

    def __init__(self, payload: Mapping[str, Json]) -> None:
        """Connect to the device.

        Args:
            payload: That of `DevicePool.call`: `target`, and `session` with host, port, the key
                that the server expects, and the time limit in seconds.

        Raises:
            StageError: The device does not run what the target is for.
        """
        from tvm import rpc

        host, port, match_key, timeout_s = payload["session"]
        target = payload["target"]
        self._address = f"{host}:{port}"
        self._session = rpc.connect(host, port, match_key, session_timeout=timeout_s)
        self.device = self._session.device(backend_for(target).DEVICE, 0)
        self._check_device(target)
        if threads := split_threads(target)[1]:
            self._use_threads(threads)

    def load_library(self, library: Path) -> Any:
        """Send a shared library to the device and return it, loaded there."""
        self._session.upload(str(library), library.name)
        return self._session.load_module(library.name)

    def make_arguments(self, mod: str) -> list[Any]:
        """Return arguments on the device for a saved workload."""
        import tvm

        fill = self._find_function(_FILL_FUNCTION)
        arrays = measure.make_arguments(tvm.ir.load_json(mod))
        return [self._copy_or_fill(array, fill) for array in arrays]

    def _copy_or_fill(self, array: Any, fill: Any) -> Any:
        import numpy as np
        import tvm

        dtype = np.dtype(str(array.dtype))
        size = int(np.prod(array.shape)) * dtype.itemsize
        if fill is None or dtype.kind != "f" or size < _LARGE_BYTES:
            return array.copyto(self.device)
        filled = tvm.runtime.empty(array.shape, str(array.dtype), self.device)
        fill(filled)
        return filled

    def _check_device(self, target: Mapping[str, Json]) -> None:
        """Check that the device runs the target's code.

        Raises:
            StageError: It does not.
        """
        mismatch = backend_for(target).remote_device_mismatch(target, self.device)
        if not mismatch:
            return
        raise StageError(
            f"the target is for {target['arch']}, but the device at {self._address} has {mismatch}",
            fix="give devices with other GPUs a key of their own; "
            "run `tvmflow doctor` on the device to see its GPU",
        )

    def _use_threads(self, count: int) -> None:
        """Run kernels with as many threads as they are tuned for.

        Raises:
            StageError: The device has fewer.
        """
        configure = self._find_function("runtime.config_threadpool")
        read_count = self._find_function("runtime.NumThreads")
        if configure is None or read_count is None:
            return
        configure(1, count)
        if read_count() != count:
            raise StageError(
                f"the device at {self._address} runs kernels with {read_count()} threads, "
                f"but the target is for {count} threads",
                fix=f"correct the target's threads in the recipe, or start its server with TVM_NUM_THREADS={count}",
            )

    def _find_function(self, name: str) -> Any:
        """Return a function of the device's runtime; None where a small runtime lacks it."""
        try:
            return self._session.get_function(name)
        except Exception:
            return None


# ---------------------------------------------------------------- entry points of children


def build_trial(payload: Json, emit: Emit) -> Json:
    """Build the kernel of a `TrialRequest` as the shared library that it names."""
    request = TrialRequest.from_json(payload)

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("apply"):
            measure.load_compiler(request.target, runs=False)
            mod, _ = request.schedule(request.trace)
        with phases.phase("build"):
            kernel = measure.build(mod, request.target)
            export_library(kernel, Path(request.library), request.target)
        return {}

    return report_failure(emit, work)


def run_trial(payload: Json, emit: Emit) -> Json:
    """Time the library of a `TrialRequest` on the device; see `time_trial`."""

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            device = RpcDevice(payload)
            request = TrialRequest.from_json(payload)
            kernel = device.load_library(Path(request.library))
            arguments = device.make_arguments(request.mod)
        with phases.phase("run"):
            return time_trial(request, kernel, arguments)

    return report_failure(emit, work)


def build_finalists(payload: Json, emit: Emit) -> Json:
    """Build the finalists of a `FinalistsRequest` as libraries in the payload's `folder`.

    Returns:
        `libraries`, the untuned one first, None for a schedule that does not apply; and `rule`.
    """
    request = FinalistsRequest.from_json(payload)
    folder = Path(payload["folder"])

    def export(trace: Json | None, name: str) -> tuple[str, str]:
        mod, rule = request.schedule(trace)
        library = folder / f"{name}.so"
        export_library(measure.build(mod, request.target), library, request.target)
        return str(library), rule

    def export_or_none(trace: Json, name: str) -> str | None:
        try:
            return export(trace, name)[0]
        except TvmflowError:
            raise
        # TVM raises anything for a trace that does not apply; the other finalists go on.
        except Exception:
            return None

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("build"):
            measure.load_compiler(request.target, runs=False)
            untuned, rule = export(None, "untuned")
            finalists = [
                export_or_none(trace, str(index)) for index, trace in enumerate(request.traces)
            ]
        return {"libraries": [untuned, *finalists], "rule": rule}

    return report_failure(emit, work)


def run_finalists(payload: Json, emit: Emit) -> Json:
    """Time the libraries of a `FinalistsRequest` on the device in turns; see `time_in_turns`."""
    request = FinalistsRequest.from_json(payload)

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            device = RpcDevice(payload)
            untuned, *kernels = [
                library and device.load_library(Path(library)) for library in request.libraries
            ]
            arguments = device.make_arguments(request.mod)
        with phases.phase("run"):
            return time_in_turns(untuned, kernels, arguments, request.timing, request.rounds)

    return report_failure(emit, work)
