"""A loaded model: its signature, and calling, timing and profiling it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.errors import BundleError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.native import InputBuffer, Program, fetch_array, list_tensors, send_array
from tvmflow.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from tvmflow.runtime.native import Array


class OperatorTime(NamedTuple):
    """The time of one operator in one run of a model: `calls` of it, `seconds` in total."""

    name: str
    calls: int
    seconds: float


class Module:
    """A loaded model. Calls from several threads wait for each other.

    Attributes:
        manifest: The bundle's manifest: name, target, versions, digests.
        inputs: Name, shape and dtype of each input.
        outputs: Name, shape and dtype of each output.
        parts: The parts of a partitioned model by name, in order; empty for any other.
        pool: The threads that kernels run in.
        program: The code.
        weights: The runtime's tensors that `main` takes after the inputs.
    """

    def __init__(
        self,
        program: Program,
        signature: Mapping[str, Json],
        manifest: Mapping[str, Json],
        weights: Mapping[str, Array] | None = None,
        parts: Mapping[str, Module] | None = None,
        pool: ThreadPool | None = None,
    ):
        self.manifest = dict(manifest)
        self.inputs = tuple(TensorSpec.from_json(entry) for entry in signature["inputs"])
        self.outputs = tuple(TensorSpec.from_json(entry) for entry in signature["outputs"])
        self.parts = dict(parts or {})
        self.pool = pool or ThreadPool.of(None)
        self.program = program
        self._main = program.main
        self._lock = threading.Lock()
        self._buffers = {spec.name: InputBuffer(spec, program.device) for spec in self.inputs}
        self.weights = [send_array(array, program.device) for array in (weights or {}).values()]

    def __repr__(self) -> str:
        def show(specs: tuple[TensorSpec, ...]) -> str:
            return ", ".join(f"{spec.name}: {spec.dtype}{list(spec.shape)}" for spec in specs)

        package = __name__.partition(".")[0]
        signature = f"({show(self.inputs)}) -> ({show(self.outputs)})"
        return f"<{package}.{type(self).__name__} {self.manifest['name']} {signature}>"

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model.

        Args:
            feed: An array for each input, with exactly the shape and dtype of the signature.

        Returns:
            An array for each output.

        Raises:
            BundleError: a ValueError that names every input that does not fit.
        """
        with self._lock:
            self.pool.enter()
            arguments = self._fill(feed)
            return self._collect(self._main(*arguments))

    def latency(
        self, feed: Mapping[str, Array], *, repeat: int = 10, min_seconds: float = 0.05
    ) -> list[float]:
        """Time the model after a warm-up.

        Inputs are on the device before the clock starts, and outputs stay where the runtime puts
        them; a repeat ends when its last call has ended.

        Args:
            feed: An array for each input.
            repeat: The number of repeats.
            min_seconds: How long a repeat takes at least.

        Returns:
            Seconds per call, one number for each repeat.
        """
        with self._lock:
            self.pool.enter()
            arguments = self._fill(feed)
            started = time.perf_counter()
            self._main(*arguments)
            self.program.wait()
            once = time.perf_counter() - started
            calls = max(1, int(min_seconds / max(once, 1e-7)))
            seconds = []
            for _ in range(repeat):
                started = time.perf_counter()
                for _ in range(calls):
                    self._main(*arguments)
                self.program.wait()
                seconds.append((time.perf_counter() - started) / calls)
            return seconds

    def profile(self, feed: Mapping[str, Array], *, repeat: int = 10) -> list[OperatorTime]:
        """Time each kernel and each step of the runtime.

        The instrument adds a few microseconds to each call; on a GPU each call is waited for.

        Returns:
            The median of `repeat` runs for each operator, the slowest first.
        """
        from statistics import median

        runs: list[dict[str, list[float]]] = []
        started = 0.0

        def record(name: str, before: bool) -> None:
            nonlocal started
            if before:
                started = time.perf_counter()
            else:
                runs[-1].setdefault(name, []).append(time.perf_counter() - started)

        with self._lock:
            self.pool.enter()
            arguments = self._fill(feed)
            self._main(*arguments)
            main = self.program.instrumented_main(record)
            for _ in range(repeat + 1):
                runs.append({})
                main(*arguments)
        # the first run is the warm-up of the instrumented program
        del runs[0]
        totals = {name: median(sum(run[name]) for run in runs) for name in runs[0]}
        times = [OperatorTime(name, len(runs[0][name]), total) for name, total in totals.items()]
        return sorted(times, key=lambda operator: -operator.seconds)

    def _fill(self, feed: Mapping[str, Array]) -> list[Any]:
        import numpy as np

        problems = self._find_mismatches(feed)
        if problems:
            raise BundleError("; ".join(problems), fix=f"this model takes {self!r}")
        for spec in self.inputs:
            buffer = self._buffers[spec.name]
            np.copyto(buffer.array, feed[spec.name])
            buffer.send()
        return [*(self._buffers[spec.name].tensor for spec in self.inputs), *self.weights]

    def _find_mismatches(self, feed: Mapping[str, Array]) -> list[str]:
        """Return a clause for every input that is missing, unknown, or of another shape or dtype."""
        expected = {spec.name: spec for spec in self.inputs}
        problems = [f"there is no input '{name}'" for name in feed if name not in expected]
        for name, spec in expected.items():
            if name not in feed:
                problems.append(f"input '{name}' is missing")
                continue
            array = feed[name]
            shape, dtype = getattr(array, "shape", None), str(getattr(array, "dtype", type(array)))
            if shape is None or tuple(shape) != spec.shape:
                problems.append(f"input '{name}' has shape {shape}, not {spec.shape}")
            if dtype != spec.dtype:
                problems.append(f"input '{name}' has dtype {dtype}, not {spec.dtype}")
        return problems

    def _collect(self, result: Any) -> dict[str, Array]:
        outputs = zip(self.outputs, list_tensors(result), strict=True)
        # copies: the runtime reuses the memory at the next call
        return {spec.name: fetch_array(tensor) for spec, tensor in outputs}
