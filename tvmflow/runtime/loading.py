"""Loading a bundle: what a user's program calls. Needs numpy, tvm_ffi and TVM's runtime library alone.

The compiler (`import tvm`) is never loaded. Everything that can be known before the library
is loaded is checked before, because a library for another CPU dies of an illegal instruction
without a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.types import Json
from tvmflow.runtime.bundles import Bundle, read_bundle
from tvmflow.runtime.module import Module
from tvmflow.runtime.native import Executable, ExecutionDevice, load_library
from tvmflow.runtime.partitioned import PartitionedProgram
from tvmflow.runtime.threads import ThreadPool
from tvmflow.runtime.weights import read_weights_for, weights_included_error
from tvmflow.targets.backends import backend_for, is_supported
from tvmflow.targets.host import find_system_mismatch, read_host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, gpu_arch, target_kind

if TYPE_CHECKING:
    from tvmflow.runtime.native import Array

    Weights = str | Path | Mapping[str, Array]


def load(path: str | Path, params: Weights | None = None, *, threads: int | None = None) -> Module:
    """Load the model in a `.tvmflow` bundle, ready to run on this machine.

    Args:
        path: The bundle.
        params: The weights of a bundle without weights (`.lean.tvmflow`): a `.safetensors` or
            `.params` file, or arrays by name.
        threads: How many threads kernels use. Default: `TVM_NUM_THREADS`, else one for each core that
            this process may use.

    Raises:
        BundleError: when a file is damaged, when it was built for another CPU or GPU or for another
            version of TVM's runtime, or when weights do not fit; the message says which.
        EnvironmentProblem: when something that code for a GPU needs is not installed.
    """
    bundle, pool = read_bundle(path), ThreadPool.of(threads)
    if not bundle.parts:
        return _load_library_bundle(str(path), bundle, params, pool)
    if params is not None:
        raise weights_included_error(path)
    parts = {
        name: _load_library_bundle(f"{path}, part '{name}',", part, None, pool)
        for name, part in bundle.parts.items()
    }
    program = PartitionedProgram(parts, bundle.signature)
    return Module(program, bundle.signature, bundle.manifest, None, parts, pool)


def _load_library_bundle(
    path: str, bundle: Bundle, params: Weights | None, pool: ThreadPool
) -> Module:
    manifest, name = bundle.manifest, bundle.library_name
    if hashlib.sha256(bundle.library).hexdigest() != manifest["sha256"][name]:
        raise BundleError(f"{path} is damaged: its library has another digest", fix="copy it again")
    tvm = manifest["target"]["tvm"]
    _check_cpu(path, tvm, manifest["target"]["features"])
    _check_device(path, tvm)
    _check_tvm_version(path, manifest["tvm"])
    weights = read_weights_for(path, manifest, params)
    device = ExecutionDevice(backend_for(tvm))
    library = load_library(bundle.library, Path(name).suffix, device)
    program = Executable(library, device)
    return Module(program, bundle.signature, manifest, weights, pool=pool)


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
