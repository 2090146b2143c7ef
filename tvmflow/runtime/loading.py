"""Loading a bundle: what a user's program calls. Needs numpy, tvm_ffi and TVM's runtime library alone.

The compiler (`import tvm`) is never loaded. Everything that can be known before the library
is loaded is checked before, because a library for another CPU dies of an illegal instruction
without a message.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow.core.documents import quote
from tvmflow.core.errors import BundleError, EnvironmentProblem, TvmflowError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.bundles import (
    DEFAULT_MAX_BYTES,
    Bundle,
    damaged_bundle_error,
    read_open_bundle,
)
from tvmflow.runtime.module import Module
from tvmflow.runtime.native import Executable, ExecutionDevice, load_library
from tvmflow.runtime.partitioned import PartitionedProgram
from tvmflow.runtime.threads import ThreadPool
from tvmflow.runtime.trust import TrustedKeys, open_trusted_file
from tvmflow.runtime.weights import read_weights_for, weights_included_error
from tvmflow.targets.backends import backend_for, is_supported
from tvmflow.targets.host import find_system_mismatch, read_host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, gpu_arch, target_kind

if TYPE_CHECKING:
    from tvmflow.runtime.native import Array

    Weights = str | Path | Mapping[str, Array]


def load(
    path: str | Path,
    params: Weights | None = None,
    *,
    trusted_keys: TrustedKeys | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    threads: int | None = None,
) -> Module:
    """Load the model in a `.tvmflow` bundle, ready to run on this machine.

    A bundle holds native code, which runs in this process: whoever made the bundle can do what
    this process may do. Load only bundles of people that you trust, and name their keys in
    `trusted_keys` where somebody else could have replaced the file.

    Args:
        path: The bundle.
        params: The weights of a bundle without weights (`.lean.tvmflow`): a `.safetensors` or
            `.params` file, or arrays by name.
        trusted_keys: Files of public keys, or folders of them. The bundle, and the file of
            weights, must then be as a statement of provenance says that is beside them or in a
            folder above, and that one of these keys signed.
        max_bytes: The size of the largest file that is read, and of all inputs and outputs.
        threads: How many threads kernels use. Default: `TVM_NUM_THREADS`, else one for each core that
            this process may use.

    Raises:
        BundleError: when a file is damaged, too large or not signed, when it was built for another
            CPU or GPU or for another version of TVM's runtime, or when weights do not fit; the
            message says which. Nothing of the library has run then.
        EnvironmentProblem: when something that code for a GPU needs is not installed.
        UsageError: when a file in `trusted_keys` holds no public key.
    """
    pool = ThreadPool.of(threads)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        with open_trusted_file(path, trusted_keys, max_bytes) as stream:
            # large libraries are in memory only until they are in their files
            bundle, libraries = _unpack(path, read_open_bundle(path, stream), Path(folder))
        if not bundle.parts:
            _check_library_bundle(str(path), bundle, max_bytes)
            with _damaged_documents(path):
                weights = read_weights_for(path, bundle.manifest, params, trusted_keys, max_bytes)
            return _load_library_bundle(str(path), bundle, libraries[""], weights, pool)
        if params is not None:
            raise weights_included_error(path)
        _check_tensors(path, bundle.signature, max_bytes)
        names = {name: f"{path}, part '{name}'," for name in bundle.parts}
        # all are checked before the code of any of them is loaded
        for name, part in bundle.parts.items():
            _check_library_bundle(names[name], part, max_bytes)
        parts = {
            name: _load_library_bundle(names[name], part, libraries[name], {}, pool)
            for name, part in bundle.parts.items()
        }
    program = PartitionedProgram(parts, bundle.signature)
    return Module(program, bundle.signature, bundle.manifest, None, parts, pool)


def _unpack(path: str | Path, bundle: Bundle, folder: Path) -> tuple[Bundle, dict[str, Path]]:
    """Write the libraries of a bundle to files; return the bundle without them, and the file of each part.

    A model in one piece is a part without a name.
    """
    libraries = {}
    for number, (name, part) in enumerate((bundle.parts or {"": bundle}).items()):
        libraries[name] = folder / f"library{number}{Path(part.library_name).suffix}"
        try:
            libraries[name].write_bytes(part.library)
        except OSError as error:
            raise _unloadable_error(path, error) from error
    parts = {name: part._replace(library=b"") for name, part in bundle.parts.items()}
    return bundle._replace(library=b"", parts=parts), libraries


def _check_library_bundle(path: str, bundle: Bundle, max_bytes: int) -> None:
    """Check all that can be known of a library before it is loaded."""
    with _damaged_documents(path):
        manifest = bundle.manifest
        target = manifest["target"]
        tvm, features = target["tvm"], target["features"]
        texts = [manifest["name"], *features, *map(str, (target_kind(tvm), cpu_triple(tvm)))]
        if not all(isinstance(text, str) for text in texts) or isinstance(features, str):
            raise TypeError("a name is no text")
        _check_tensors(path, bundle.signature, max_bytes)
        _check_cpu(path, tvm, features)
        _check_device(path, tvm)
        _check_tvm_version(path, manifest["tvm"])


def _check_tensors(path: str | Path, signature: Mapping[str, Json], max_bytes: int) -> None:
    """Check that inputs and outputs are tensors, and that they fit the limit together."""
    import numpy as np

    with _damaged_documents(path):
        total = 0
        for direction in ("inputs", "outputs"):
            specs = [TensorSpec.from_json(entry) for entry in signature[direction]]
            if len({spec.name for spec in specs}) < len(specs):
                raise ValueError(f"two {direction} have one name")
            for spec in specs:
                is_plain = isinstance(spec.name, str) and np.dtype(spec.dtype).name == spec.dtype
                if not is_plain or not all(type(size) is int and size >= 0 for size in spec.shape):
                    raise ValueError(f"{quote(spec)} is no tensor")
                total += spec.bytes
    if total > max_bytes:
        raise BundleError(
            f"the inputs and outputs of {path} have {total} bytes, more than the limit of {max_bytes}",
            fix="if they are to be that large, load it with a larger max_bytes",
        )


@contextlib.contextmanager
def _damaged_documents(path: str | Path) -> Iterator[None]:
    """Raise BundleError for a manifest or a signature that is not as tvmflow writes it."""
    try:
        yield
    except TvmflowError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"its manifest or signature is damaged ({type(error).__name__}: {error})"
        raise damaged_bundle_error(path, reason) from error


def _load_library_bundle(
    path: str, bundle: Bundle, library: Path, weights: Mapping[str, Array], pool: ThreadPool
) -> Module:
    device = ExecutionDevice(backend_for(bundle.manifest["target"]["tvm"]))
    try:
        executable = Executable(load_library(library, device), device)
        return Module(executable, bundle.signature, bundle.manifest, weights, pool=pool)
    except TvmflowError:
        raise
    except Exception as error:
        # what the system's loader and TVM raise
        raise _unloadable_error(path, error) from error


def _unloadable_error(path: str | Path, error: Exception) -> BundleError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return BundleError(
        f"the library of {path} cannot be loaded: {lines[-1]}",
        fix="check free memory and the temporary folder ($TMPDIR); else build it again",
    )


def _check_cpu(path: str, tvm: TvmTarget, features: list[str]) -> None:
    """Raise BundleError for a library that this machine's CPU or system cannot run."""
    kind, host = target_kind(tvm), read_host()
    if not is_supported(kind):
        raise BundleError(
            f"{path} was built for {kind}, and this runtime runs libraries for CPUs and NVIDIA GPUs",
            fix="load the shared library with TVM itself: relax.VirtualMachine(tvm.runtime.load_module(…), …)",
        )
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
            fix="build the recipe for this machine (`host`) or for a lower CPU level",
        )


def _check_device(path: str, tvm: TvmTarget) -> None:
    """Raise BundleError for a library whose device this machine does not have."""
    reason = backend_for(tvm).unrunnable_reason(tvm, in_this_process=True)
    if reason:
        raise BundleError(
            f"{path} was built for {gpu_arch(tvm) or 'an unknown GPU'}, which does not run here: {reason}",
            fix="run it on a machine with such a GPU, or build the recipe for another target",
        )


def _check_tvm_version(path: str, built_with: Json) -> None:
    """Raise BundleError for a library of another minor version of TVM's runtime."""
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
