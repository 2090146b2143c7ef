"""Loads a bundle and runs it: what a user's program imports. Needs numpy, tvm_ffi and TVM's runtime library alone.

The compiler (`import tvm`) is never loaded. Everything that can be known before the library
is loaded is checked before, because a library for another CPU dies of an illegal instruction
and says nothing.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.errors import BundleError, EnvironmentProblem
from tvmflow.targets.host import read_host
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CPU: Final = 1
_POOLED_ALLOCATOR: Final = 2
_ALIGNMENT: Final = 64


class Module:
    """A loaded model. One call at a time: calls from several threads wait for each other."""

    def __init__(self, library: Any, signature: Mapping[str, Any], manifest: Mapping[str, Any]):
        self.manifest = dict(manifest)
        """What the bundle says of itself: name, target, versions, digests."""
        self.inputs = tuple(TensorSpec.from_json(entry) for entry in signature["inputs"])
        """Name, shape and dtype of each input."""
        self.outputs = tuple(TensorSpec.from_json(entry) for entry in signature["outputs"])
        """Name, shape and dtype of each output."""
        machine = library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, 0, _POOLED_ALLOCATOR)
        self._library = library
        self._main = machine["main"]
        self._lock = threading.Lock()
        self._buffers = {spec.name: _aligned(spec) for spec in self.inputs}

    def __repr__(self) -> str:
        def show(specs: tuple[TensorSpec, ...]) -> str:
            return ", ".join(f"{s.name}: {s.dtype}{list(s.shape)}" for s in specs)

        return f"<tvmflow.Module {self.manifest['name']} ({show(self.inputs)}) -> ({show(self.outputs)})>"

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

        The inputs are in place already and the outputs are left where the runtime put them.
        """
        with self._lock:
            arguments = self._fill(feed)
            started = time.perf_counter()
            self._main(*arguments)
            once = time.perf_counter() - started
            calls = max(1, int(min_seconds / max(once, 1e-7)))
            seconds = []
            for _ in range(repeat):
                started = time.perf_counter()
                for _ in range(calls):
                    self._main(*arguments)
                seconds.append((time.perf_counter() - started) / calls)
            return seconds

    def _fill(self, feed: Mapping[str, Array]) -> list[Any]:
        import numpy as np

        problems = self._misfits(feed)
        if problems:
            raise BundleError("; ".join(problems), fix=f"this model takes {self!r}")
        for spec in self.inputs:
            np.copyto(self._buffers[spec.name][0], feed[spec.name])
        return [self._buffers[spec.name][1] for spec in self.inputs]

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
        import numpy as np
        import tvm_ffi

        tensors = [result] if isinstance(result, tvm_ffi.Tensor) else list(result)
        names = [spec.name for spec in self.outputs]
        # the runtime takes its memory back at the next call
        return {n: np.from_dlpack(t).copy() for n, t in zip(names, tensors, strict=True)}


def load(path: str | Path) -> Module:
    """The model in a `.tvmflow` bundle, ready to run on this machine.

    Raises BundleError when the file is damaged, was built for another CPU or for another
    version of TVM's runtime, and says which.
    """
    manifest, signature, library = unpack(path)
    _check(path, manifest, library)
    return Module(_load_library(library), signature, manifest)


def unpack(path: str | Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Manifest, signature and library of a bundle, for whatever machine it is. Raises BundleError."""
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            signature = json.loads(archive.read("signature.json"))
            return manifest, signature, archive.read("library.so")
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}", fix="`tvmflow run RECIPE` makes it") from None
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise BundleError(
            f"{path} is not a whole tvmflow bundle: {error}", fix="copy or build it again"
        ) from error


def _check(path: str | Path, manifest: Mapping[str, Any], library: bytes) -> None:
    """Everything that would go wrong later, and less clearly."""
    if manifest.get("bundle") != 1:
        raise BundleError(
            f"{path} has bundle format {manifest.get('bundle')}, this tvmflow reads 1",
            fix="load it with the tvmflow that made it",
        )
    if hashlib.sha256(library).hexdigest() != manifest["sha256"]["library.so"]:
        raise BundleError(f"{path} is damaged: its library has another digest", fix="copy it again")
    target, host = manifest["target"], read_host()
    arch = str(target["tvm"].get("mtriple", host.arch)).partition("-")[0]
    if arch != host.arch:
        raise BundleError(
            f"{path} was built for {arch}, this machine is {host.arch}",
            fix=f"build the recipe for a target of {host.arch}",
        )
    missing = [name for name in target["features"] if host.flags and name not in host.flags]
    if missing:
        raise BundleError(
            f"{path} uses CPU instructions that this machine lacks: {', '.join(missing)}",
            fix="build the recipe for this machine (`host`) or for a lower CPU level",
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


def _load_library(content: bytes) -> Any:
    import tvm_ffi

    for name in ("tvm_runtime", "tvm_runtime_extra"):
        tvm_ffi.libinfo.load_lib_ctypes("apache-tvm", name, "RTLD_GLOBAL")
    # the loader maps the file, after which it may go
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        library = Path(folder, "library.so")
        library.write_bytes(content)
        return tvm_ffi.load_module(library)


def _aligned(spec: TensorSpec) -> tuple[Array, Any]:
    """An input buffer with the alignment that kernels count on, and the runtime's view of it."""
    import numpy as np
    import tvm_ffi

    dtype = np.dtype(spec.dtype)
    size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array = raw[start : start + size].view(dtype).reshape(spec.shape)
    return array, tvm_ffi.from_dlpack(array)
