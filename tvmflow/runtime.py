"""Loads a bundle and runs it: what a user's program imports. Needs numpy, tvm_ffi and TVM's runtime library alone.

The compiler (`import tvm`) is never loaded. Everything that can be known before the library
is loaded is checked before, because a library for another CPU dies of an illegal instruction
and says nothing.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.bundles import Unpacked, unpack
from tvmflow.errors import BundleError, EnvironmentProblem
from tvmflow.native import (
    CPU,
    GPU,
    Buffer,
    Executable,
    Main,
    Place,
    Program,
    Watch,
    array_of,
    copy,
    load_library,
    sent,
    tensors_of,
)
from tvmflow.targets.gpu import CUDA, start_gpu, why_not_run
from tvmflow.targets.host import foreign_system, read_host
from tvmflow.targets.platforms import host_triple, platform_of
from tvmflow.values import TensorSpec
from tvmflow.weights import fitting, takes_no_weights

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class OperatorTime(NamedTuple):
    """What one operator of a model took in one run: `calls` of them, `seconds` in all."""

    name: str
    calls: int
    seconds: float


class Module:
    """A loaded model. One call at a time: calls from several threads wait for each other."""

    def __init__(
        self,
        program: Program,
        signature: Mapping[str, Any],
        manifest: Mapping[str, Any],
        weights: Mapping[str, Array] | None = None,
        parts: Mapping[str, Module] | None = None,
    ):
        self.manifest = dict(manifest)
        """What the bundle says of itself: name, target, versions, digests."""
        self.inputs = tuple(TensorSpec.from_json(entry) for entry in signature["inputs"])
        """Name, shape and dtype of each input."""
        self.outputs = tuple(TensorSpec.from_json(entry) for entry in signature["outputs"])
        """Name, shape and dtype of each output."""
        self.parts = dict(parts or {})
        """The parts that the model was built in, by name, in order; none of one that was built as a whole."""
        self.program = program
        self._main = program.main
        self._lock = threading.Lock()
        self._buffers = {spec.name: Buffer(spec, program.place) for spec in self.inputs}
        self.weights = [sent(array, program.place) for array in (weights or {}).values()]
        """The runtime's tensors that `main` takes after the inputs."""

    def __repr__(self) -> str:
        def show(specs: tuple[TensorSpec, ...]) -> str:
            return ", ".join(f"{s.name}: {s.dtype}{list(s.shape)}" for s in specs)

        return f"<{__package__}.{type(self).__name__} {self.manifest['name']} ({show(self.inputs)}) -> ({show(self.outputs)})>"

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name for the inputs in `feed`, which must have exactly the signature's shapes and dtypes.

        Raises BundleError (a ValueError) that names every input that does not fit.
        """
        with self._lock:
            arguments = self._fill(feed)
            return self._collect(self._main(*arguments))

    def latency(
        self, feed: Mapping[str, Array], *, repeat: int = 10, min_seconds: float = 0.05
    ) -> list[float]:
        """Seconds per call, for each of `repeat` repeats of at least `min_seconds`, after a warm-up.

        The inputs are in place already (on a GPU: in its memory) and the outputs are left where the
        runtime put them; a repeat ends when its last call has.
        """
        with self._lock:
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
        """What each kernel and each step of the runtime took, the slowest first: of `repeat` runs, the median.

        Watching adds a few microseconds to each of their calls; on a GPU each is waited for.
        """
        from statistics import median

        runs: list[dict[str, list[float]]] = []
        started = 0.0

        def watch(name: str, before: bool) -> None:
            nonlocal started
            if before:
                started = time.perf_counter()
            else:
                runs[-1].setdefault(name, []).append(time.perf_counter() - started)

        with self._lock:
            arguments = self._fill(feed)
            self._main(*arguments)
            main = self.program.watched(watch)
            for _ in range(repeat + 1):
                runs.append({})
                main(*arguments)
        del runs[0]
        times = {name: median(sum(run[name]) for run in runs) for name in runs[0]}
        found = [OperatorTime(name, len(runs[0][name]), took) for name, took in times.items()]
        return sorted(found, key=lambda each: -each.seconds)

    def _fill(self, feed: Mapping[str, Array]) -> list[Any]:
        import numpy as np

        problems = self._misfits(feed)
        if problems:
            raise BundleError("; ".join(problems), fix=f"this model takes {self!r}")
        for spec in self.inputs:
            buffer = self._buffers[spec.name]
            np.copyto(buffer.array, feed[spec.name])
            buffer.send()
        return [*(self._buffers[spec.name].tensor for spec in self.inputs), *self.weights]

    def _misfits(self, feed: Mapping[str, Array]) -> list[str]:
        """A sentence for every input that is missing, unknown, or of another shape or dtype."""
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
        names = [spec.name for spec in self.outputs]
        # the runtime takes its memory back at the next call
        return {n: array_of(tensor) for n, tensor in zip(names, tensors_of(result), strict=True)}


class Chain:
    """Parts of a model, one after the other; what one gives to another stays where it is, if both run there.

    What a part on a GPU and one on the CPU hand to each other is copied.
    """

    place = CPU

    def __init__(
        self, parts: Mapping[str, Module], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._parts = parts
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._landings: dict[tuple[str, str], Any] = {}
        self.main = self._linked({name: part.program.main for name, part in parts.items()})

    def watched(self, watch: Watch) -> Main:
        """Operators' names begin with their part's."""

        def named(part: str) -> Watch:
            return lambda name, before: watch(f"{part}: {name}", before)

        mains = {name: part.program.watched(named(name)) for name, part in self._parts.items()}
        return self._linked(mains)

    def wait(self) -> None:
        for part in self._parts.values():
            part.program.wait()

    def _linked(self, mains: Mapping[str, Main]) -> Main:
        steps = [
            (name, mains[name], part.inputs, part.weights, [spec.name for spec in part.outputs])
            for name, part in self._parts.items()
        ]

        def main(*arguments: Any) -> list[Any]:
            there = dict(zip(self._inputs, arguments, strict=True))
            for part, call, takes, weights, gives in steps:
                given = [self._brought(there[spec.name], part, spec) for spec in takes]
                results = tensors_of(call(*given, *weights))
                there.update(zip(gives, results, strict=True))
            return [there[name] for name in self._outputs]

        return main

    def _brought(self, tensor: Any, part: str, spec: TensorSpec) -> Any:
        """A tensor where a part runs."""
        place = self._parts[part].program.place
        if place.holds(tensor):
            return tensor
        landing = self._landings.get((part, spec.name))
        if landing is None:
            landing = self._landings[part, spec.name] = place.empty(spec)
        copy(tensor, landing)
        # who made it may use its memory for something else as soon as it is called again
        GPU.wait()
        return landing


def load(path: str | Path, params: str | Path | Mapping[str, Array] | None = None) -> Module:
    """The model in a `.tvmflow` bundle, ready to run on this machine.

    A bundle without weights (`.lean.tvmflow`) takes them as `params`: a `.safetensors` or
    `.params` file, or arrays by name.

    Raises BundleError when a file is damaged, when it was built for another CPU or GPU or for another
    version of TVM's runtime, or when weights do not fit, and says which; EnvironmentProblem when what
    code for a GPU is loaded with is not installed.
    """
    found = unpack(path)
    if not found.parts:
        return _loaded(str(path), found, params)
    if params is not None:
        raise takes_no_weights(path)
    parts = {
        name: _loaded(f"{path}, part '{name}',", part, None) for name, part in found.parts.items()
    }
    names = [[spec["name"] for spec in found.signature[way]] for way in ("inputs", "outputs")]
    return Module(Chain(parts, *names), found.signature, found.manifest, None, parts)


def _loaded(path: str, found: Unpacked, params: str | Path | Mapping[str, Array] | None) -> Module:
    name = found.manifest.get("library", "library.so")
    digest = hashlib.sha256(found.library).hexdigest()
    _check(path, found.manifest, digest == found.manifest["sha256"][name])
    weights = fitting(path, found.manifest, params)
    place = _place_of(found.manifest["target"]["tvm"])
    library = load_library(found.library, Path(name).suffix, place)
    return Module(Executable(library, place), found.signature, found.manifest, weights)


def _place_of(tvm: Mapping[str, Any]) -> Place:
    """Where code for a target, as TVM describes it, runs."""
    return GPU if tvm.get("kind") == CUDA else CPU


def _check(path: str | Path, manifest: Mapping[str, Any], whole: bool) -> None:
    """Everything that would go wrong later, and less clearly."""
    if not whole:
        raise BundleError(f"{path} is damaged: its library has another digest", fix="copy it again")
    target, host = manifest["target"], read_host()
    kind = target["tvm"].get("kind", "llvm")
    if kind not in ("llvm", CUDA):
        raise BundleError(
            f"{path} was built for {kind}, and this runtime runs libraries for CPUs and NVIDIA GPUs",
            fix="load the shared library with TVM itself: relax.VirtualMachine(tvm.runtime.load_module(…), …)",
        )
    platform = platform_of(host_triple(target["tvm"]) or host.arch)
    if platform.arch != host.arch:
        raise BundleError(
            f"{path} was built for {platform.arch}, this machine is {host.arch}",
            fix=f"build the recipe for a target of {host.arch}",
        )
    foreign = foreign_system(platform, host)
    if foreign:
        raise BundleError(
            f"{path} was built for {foreign[0]}, this machine runs {foreign[1]}",
            fix=f"build the recipe for a target of {foreign[1]} (its `mtriple` says which it is)",
        )
    missing = host.lacks(target["features"])
    if missing:
        raise BundleError(
            f"{path} uses CPU instructions that this machine lacks: {', '.join(missing)}",
            fix="build the recipe for this machine (`host`) or for a lower CPU level",
        )
    arch = str(target["tvm"].get("arch", "an unknown GPU"))
    why_not = why_not_run(arch, start_gpu()) if kind == CUDA else ""
    if why_not:
        raise BundleError(
            f"{path} was built for {arch}, which does not run here: {why_not}",
            fix="run it on a machine with such a GPU, or build the recipe for another target",
        )
    built_with, here = manifest["tvm"], _installed("apache-tvm")
    if built_with.split(".")[:2] != here.split(".")[:2]:
        raise BundleError(
            f"{path} was built with TVM {built_with}, the runtime here is {here}",
            fix=f"install apache-tvm {built_with}, or build again with {here}",
        )


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise EnvironmentProblem(
            f"{distribution} is not installed", fix=f"pip install {distribution}"
        ) from None
