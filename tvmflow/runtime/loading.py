"""Loading a bundle: the interface for users' programs.

The C runtime needs only numpy; TVM's virtual machine also needs tvm_ffi and TVM's runtime library. The compiler
(`import tvm`) is never loaded. As much as possible is checked before a library is loaded: a library for another CPU
would crash the process with an illegal instruction, without a message.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.documents import quote
from tvmflow.core.errors import BundleError, EnvironmentProblem, TvmflowError
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.runtime import bundles
from tvmflow.runtime.arrays import check_dynamic_shapes
from tvmflow.runtime.c_loader import LOWER_LEVEL, NativeProgram
from tvmflow.runtime.images import read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.runtime.module import Module
from tvmflow.runtime.programs import Call, Main, PartProgram, Record, ThreadPool
from tvmflow.runtime.statements import TrustedKeys, open_trusted_file
from tvmflow.runtime.weights import read_weights_for, weights_included_error
from tvmflow.targets.host import find_system_mismatch, read_host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, gpu_arch, target_kind

if TYPE_CHECKING:
    Weights = str | Path | Mapping[str, Array]


def load(
    path: str | Path,
    params: Weights | None = None,
    *,
    trusted_keys: TrustedKeys | None = None,
    max_bytes: int = bundles.DEFAULT_MAX_BYTES,
    threads: int | None = None,
) -> Module:
    """Load the model in a `.tvmflow` bundle, ready to run on this machine.

    A bundle contains native code, which runs with all rights of this process. Load only bundles from people that you
    trust, and pass their keys in `trusted_keys` if somebody else could have replaced the file.

    Args:
        path: The bundle.
        params: The weights of a bundle without weights (`.lean.tvmflow`): a `.safetensors` or
            `.params` file, or arrays by name.
        trusted_keys: Files of public keys, or folders of them. One of these keys must have signed a statement of
            provenance, in the folder or above, that has the digests of the bundle and of the file of weights.
        max_bytes: The size of the largest file that is read, and of all inputs and outputs.
        threads: How many threads kernels use. Default: `TVM_NUM_THREADS`, else one for each core that
            this process may use.

    Raises:
        BundleError: when a file is damaged, too large or not signed, when it was built for another CPU, GPU or
            version of TVM's runtime, or when weights do not fit. Nothing of the library has run then.
        EnvironmentProblem: when something that code for a GPU needs is not installed.
        UsageError: when a file in `trusted_keys` holds no public key.
    """
    pool = ThreadPool.of(threads)
    with _temporary_folder(path) as folder:
        with open_trusted_file(path, trusted_keys, max_bytes) as stream:
            bundle = bundles.read_open_bundle(path, stream, folder)
        if not bundle.parts:
            _check_library_bundle(str(path), bundle, max_bytes)
            with _damaged_documents(path):
                weights = read_weights_for(path, bundle.manifest, params, trusted_keys, max_bytes)
            program = _load_program(str(path), bundle, weights, pool)
            return Module(program, bundle.signature, bundle.manifest)
        if params is not None:
            raise weights_included_error(path)
        return _load_parts(path, bundle, max_bytes, pool)


@contextlib.contextmanager
def _temporary_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to load libraries from; loaded libraries are mapped and need no files."""
    # Windows cannot remove files that are mapped
    keeps_mapped = sys.platform == "win32"
    try:
        folder = tempfile.TemporaryDirectory("", "tvmflow-", ignore_cleanup_errors=keeps_mapped)
    except OSError as error:
        raise BundleError(
            f"there is no place for the library of {path} while it is loaded: {error}",
            fix="check the temporary folder ($TMPDIR)",
        ) from error
    with folder as name:
        yield Path(name)


def _load_parts(
    path: str | Path, bundle: bundles.Bundle, max_bytes: int, pool: ThreadPool
) -> Module:
    """Load a partitioned model after checking all its parts."""
    _check_tensors(path, bundle, max_bytes)
    names = {name: f"{path}, part '{name}'," for name in bundle.parts}
    for name, part in bundle.parts.items():
        _check_library_bundle(names[name], part, max_bytes)
    _check_parts(path, bundle)
    parts, modules = {}, {}
    for name, part in bundle.parts.items():
        code = _load_program(names[name], part, {}, pool)
        modules[name] = module = Module(code, part.signature, part.manifest)
        parts[name] = _Part(code, module.inputs, module.outputs)
    inputs, outputs = (
        [tensor["name"] for tensor in bundle.signature[direction]]
        for direction in ("inputs", "outputs")
    )
    program = PartitionedProgram(parts, inputs, outputs)
    return Module(program, bundle.signature, bundle.manifest, modules)


def _check_library_bundle(path: str, bundle: bundles.Bundle, max_bytes: int) -> None:
    """Check everything that can be checked before a library is loaded."""
    with _damaged_documents(path):
        manifest = bundle.manifest
        target = manifest["target"]
        tvm, features = target["tvm"], target["features"]
        texts = [manifest["name"], *features, *map(str, (target_kind(tvm), cpu_triple(tvm)))]
        if not all(isinstance(text, str) for text in texts) or isinstance(features, str):
            raise TypeError("a name is not text")
        _check_tensors(path, bundle, max_bytes)
        needs_tvm = bundles.runtime_of(manifest) != bundles.C_RUNTIME
        if needs_tvm:
            _check_kind(path, tvm)
        elif not isinstance(prefix := manifest["prefix"], str) or not prefix.isidentifier():
            raise ValueError(f"{quote(prefix)} is not a prefix of names in C")
        _check_cpu(path, tvm, features)
        if needs_tvm:
            _check_device(path, tvm)
            _check_tvm_version(path, manifest["tvm"])


def _check_tensors(path: str | Path, bundle: bundles.Bundle, max_bytes: int) -> None:
    """Check that inputs and outputs are tensors within the limit, and fit preprocessing and labels."""
    with _damaged_documents(path):
        total = check_dynamic_shapes(bundle.signature)
        for direction in ("inputs", "outputs"):
            specs = _read_specs(bundle, direction)
            if len({spec.name for spec in specs}) < len(specs):
                raise ValueError(f"two {direction} have one name")
            for spec in specs:
                if not _is_tensor(spec):
                    raise ValueError(f"{quote(spec)} is not a tensor")
                if not spec.sizes:
                    total += spec.bytes
    if total > max_bytes:
        raise BundleError(
            f"the inputs and outputs of {path} have {total} bytes, more than the limit of {max_bytes}",
            fix="if they are to be that large, load it with a larger max_bytes",
        )
    with _damaged_documents(path):
        read_preprocessing(bundle.manifest, _read_specs(bundle, "inputs"))
        if labels := read_labels(bundle.manifest):
            labels.check(_read_specs(bundle, "outputs")[0])


def _is_tensor(spec: TensorSpec) -> bool:
    import numpy as np

    if not isinstance(spec.name, str) or np.dtype(spec.dtype).name != spec.dtype:
        return False
    if not all(type(size) is int and size >= 0 for size in spec.shape):
        return False
    axis = spec.bounded_axis
    is_axis = type(axis) is int and 0 <= axis < len(spec.shape)
    # the valid elements of an output of data-dependent shape come first if all axes before have size 1
    return axis is None or (is_axis and math.prod(spec.shape[:axis]) == 1)


def _check_parts(path: str | Path, bundle: bundles.Bundle) -> None:
    """Check that each input of a part and each output of the model is an earlier tensor."""
    with _damaged_documents(path):
        tensors = {spec.name: spec for spec in _read_specs(bundle, "inputs")}
        for name, part in bundle.parts.items():
            for spec in _read_specs(part, "inputs"):
                if tensors.get(spec.name) != spec:
                    raise ValueError(f"nothing before part '{name}' gives its input {quote(spec)}")
            tensors |= {spec.name: spec for spec in _read_specs(part, "outputs")}
        for spec in _read_specs(bundle, "outputs"):
            if tensors.get(spec.name) != spec:
                raise ValueError(f"no part gives the output {quote(spec)}")


def _read_specs(bundle: bundles.Bundle, direction: str) -> list[TensorSpec]:
    return [TensorSpec.from_json(entry) for entry in bundle.signature[direction]]


@contextlib.contextmanager
def _damaged_documents(path: str | Path) -> Iterator[None]:
    """Turn errors from a malformed manifest or signature into BundleError."""
    try:
        yield
    except TvmflowError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"its manifest or signature is damaged ({type(error).__name__}: {error})"
        raise bundles.damaged_bundle_error(path, reason) from error


def _load_program(
    path: str, bundle: bundles.Bundle, weights: Mapping[str, Array], pool: ThreadPool
) -> PartProgram:
    """Load the library of a bundle from `library_file`."""
    library = bundle.library_file
    assert library is not None
    try:
        if bundles.runtime_of(bundle.manifest) == bundles.C_RUNTIME:
            return _load_c_library(library, bundle, pool)
        return _load_virtual_machine(library, bundle, weights, pool)
    except TvmflowError as error:
        raise type(error)(f"{path}: {error.message}", fix=error.fix) from error
    except Exception as error:
        # the system's loader and TVM raise exceptions of various types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BundleError(
            f"the library of {path} cannot be loaded: {lines[-1]}",
            fix="check free memory and the temporary folder ($TMPDIR), which must not be noexec; else build it again",
        ) from error


def _load_c_library(library: Path, bundle: bundles.Bundle, pool: ThreadPool) -> PartProgram:
    """Load a C library; check its tensors against the signature, because the library checks no arrays."""
    prefix = bundle.manifest["prefix"]
    program = NativeProgram(library, prefix, pool.threads, bundle.signature)
    for direction, described in (("inputs", program.inputs), ("outputs", program.outputs)):
        if list(described) != _read_specs(bundle, direction):
            raise BundleError(
                f"the {direction} in its signature.json are not those of its library",
                fix="copy or build it again",
            )
    return program


def _load_virtual_machine(
    library: Path, bundle: bundles.Bundle, weights: Mapping[str, Array], pool: ThreadPool
) -> PartProgram:
    from tvmflow.runtime.virtual_machine import (
        ExecutionDevice,
        VirtualMachine,
        load_library,
        send_array,
    )
    from tvmflow.targets.backends import backend_for

    device = ExecutionDevice(backend_for(bundle.manifest["target"]["tvm"]))
    loaded = load_library(library, device)
    inputs = _read_specs(bundle, "inputs")
    tensors = [send_array(array, device) for array in weights.values()]
    return VirtualMachine(loaded, inputs, device, tensors, pool)


def _check_cpu(path: str, tvm: TvmTarget, features: list[str]) -> None:
    host = read_host()
    platform = parse_triple(cpu_triple(tvm) or host.arch)
    if platform.arch != host.arch:
        raise BundleError(
            f"{path} was built for {platform.arch}, this machine is {host.arch}",
            fix=f"build the recipe for a target of {host.arch}",
        )
    mismatch = find_system_mismatch(platform, host)
    if mismatch:
        raise BundleError(
            f"{path} was built for {mismatch.library}, this machine runs {mismatch.host}",
            fix=f"build the recipe for a target of {mismatch.host} (its `mtriple` names the system)",
        )
    missing = host.find_missing(features)
    if missing:
        raise BundleError(
            f"{path} uses CPU instructions that this machine lacks: {', '.join(missing)}",
            fix=LOWER_LEVEL,
        )


def _check_kind(path: str, tvm: TvmTarget) -> None:
    """Raise BundleError for a library of a target kind that this installation cannot run."""
    from tvmflow.targets.backends import backend_for, is_supported

    kind = target_kind(tvm)
    if not is_supported(kind) or backend_for(tvm).no_tvm_runtime_reason(tvm):
        raise BundleError(
            f"{path} was built for {kind}, and this runtime runs libraries for CPUs and NVIDIA GPUs",
            fix="load the shared library with TVM itself: relax.VirtualMachine(tvm.runtime.load_module(…), …)",
        )


def _check_device(path: str, tvm: TvmTarget) -> None:
    """Raise BundleError for a library whose device this machine lacks."""
    from tvmflow.targets.backends import backend_for

    reason = backend_for(tvm).unrunnable_reason(tvm, in_this_process=True)
    if reason:
        raise BundleError(
            f"{path} was built for {gpu_arch(tvm) or 'an unknown GPU'}, which does not run here: {reason}",
            fix="run it on a machine with such a GPU, or build the recipe for another target",
        )


def _check_tvm_version(path: str, built_with: Json) -> None:
    """Raise BundleError for a library that was built for another minor version of TVM's runtime."""
    try:
        installed = metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        message, fix = "apache-tvm is not installed", "pip install apache-tvm"
        raise EnvironmentProblem(message, fix=fix) from None
    if str(built_with).split(".")[:2] != installed.split(".")[:2]:
        raise BundleError(
            f"{path} was built with TVM {built_with}, the runtime here is {installed}",
            fix=f"install apache-tvm {built_with}, or build again with {installed}",
        )


# ---------------------------------------------------------------- models in parts


class _Part(NamedTuple):
    program: PartProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class PartitionedProgram:
    """The parts of a model as one program, which runs them in order, one call at a time.

    A tensor that two parts on one device share stays there; between GPU and CPU, it is copied.
    """

    def __init__(
        self, parts: Mapping[str, _Part], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._parts = parts
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._lock = threading.Lock()

    @property
    def threads(self) -> int:
        """The number of threads that a call uses at most, the calling one included."""
        return max(part.program.threads for part in self._parts.values())

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs, each in the given array, or in a new array for None."""
        import numpy as np

        with self._lock:
            tensors = self._call({}, inputs)
            found = [tensors[name] for name in self._outputs]
            arrays = [program.fetch(tensor) if program else tensor for program, tensor in found]
            results = []
            for array, output in zip(arrays, outputs, strict=True):
                if output is not None:
                    np.copyto(output, array)
                results.append(np.array(array) if output is None else output)
            return results

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Call]:
        """Yield a function that calls the program on these inputs."""
        with self._lock:
            yield partial(self._call, {}, inputs)

    @contextlib.contextmanager
    def profiled(self, inputs: Sequence[Array], record: Record) -> Iterator[Call]:
        """Yield a function that calls the program and reports each operator, prefixed with its part."""

        def with_prefix(part: str) -> Record:
            return lambda name, seconds: record(f"{part}: {name}", seconds)

        mains = {
            name: part.program.profiled_main(with_prefix(name))
            for name, part in self._parts.items()
        }
        with self._lock:
            yield partial(self._call, mains, inputs)

    def wait(self) -> None:
        """Wait until all calls of all parts have ended."""
        for part in self._parts.values():
            part.program.wait()

    def _call(
        self, mains: Mapping[str, Main], inputs: Sequence[Array]
    ) -> dict[str, tuple[PartProgram | None, Any]]:
        """Run all parts; `mains` replaces the functions of some."""
        tensors: dict[str, tuple[PartProgram | None, Any]] = {
            name: (None, array) for name, array in zip(self._inputs, inputs, strict=True)
        }
        for name, part in self._parts.items():
            placed = [part.program.place(tensors[spec.name][1], spec) for spec in part.inputs]
            main: Main = mains.get(name, part.program.main)
            results = main(*placed)
            for spec, result in zip(part.outputs, results, strict=True):
                tensors[spec.name] = (part.program, result)
        return tensors
