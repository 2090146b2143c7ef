"""MXNet checkpoints (`PREFIX-symbol.json`, `PREFIX-0000.params`), imported without MXNet. Imports tvm only inside functions."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, RecipeError
from tvmflow.core.processes import code_command
from tvmflow.core.types import InputFile, TensorSpec
from tvmflow.frontends._import_errors import importing
from tvmflow.frontends.base import LoadedModel, Reference, ReferenceTraits, SourceFields, Where
from tvmflow.frontends.mxnet._symbol import read_symbol
from tvmflow.frontends.mxnet.source import (
    PARAMS,
    SYMBOL,
    MxnetSource,
    checkpoint_file,
    checkpoint_files,
    read_variables,
)
from tvmflow.frontends.mxnet.source import find_missing_files as find_missing_files
from tvmflow.frontends.mxnet.source import read_inputs as read_inputs
from tvmflow.frontends.mxnet.source import read_outputs as read_outputs
from tvmflow.store.source_files import SourceFiles

if TYPE_CHECKING:
    import numpy as np

NAME: Final = "MXNet"
KIND: Final = "mxnet"
SOURCE: Final = MxnetSource
TOOLS: Final = ("apache-tvm", "numpy")
REQUIRES_INPUTS: Final = True
REFERENCE: Final = ReferenceTraits(
    name="MXNet",
    tools=("mxnet", "numpy"),
    install="pip install 'tvmflow[mxnet]'",
    is_optional=True,
    note="x86-64 Linux only; importing MXNet models works without it",
)

_WORKER: Final = "tvmflow.frontends.mxnet._reference_worker"
_PRINT_VERSION: Final = f"from {_WORKER} import import_mxnet; print(import_mxnet().__version__)"
_VERSION_TIMEOUT_S: Final = 60.0


def files(
    source: SourceFields, base: Path, where: Where, sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Return the symbol file and the parameter file of the checkpoint.

    Raises:
        RecipeError: when the former is not a symbol, or one at an address is not pinned.
        DownloadError: when something has to be looked up, and cannot be.
    """
    assert isinstance(source, MxnetSource)
    assert source.mxnet is not None
    names = checkpoint_files(source.mxnet, base)
    symbol, params = sources.resolve_all(
        checkpoint_file(role, name, source, where("mxnet", field), where)
        for role, field, name in zip((SYMBOL, PARAMS), ("prefix", "epoch"), names, strict=True)
    )
    _check_symbol(symbol)
    return symbol, params


def _check_symbol(file: InputFile) -> None:
    """Check that a file is a symbol, unless it has yet to be downloaded.

    Raises:
        RecipeError: when it is not.
    """
    start = f"{file.where}: model.mxnet.prefix"
    try:
        if file.path:
            read_variables(Path(file.path))
    except ImportFailed as error:
        raise RecipeError(f"{start}: {error.message}") from None
    except OSError as error:
        raise unreadable(f"{start}: {file.path}", error) from error


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    tensors: tuple[str, ...] = (),
    bound: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> LoadedModel:
    """Import a checkpoint for these input shapes, with constants in place of some inputs.

    Raises:
        ImportFailed: with operator and node, or with the name that is not a tensor of the model.
    """
    from tvmflow.frontends.mxnet._graph import build
    from tvmflow.frontends.mxnet._params import read_params
    from tvmflow.operators.loading import load_operators

    with importing():
        operators = load_operators(files)
        symbol = read_symbol(files[SYMBOL])
        return build(symbol, read_params(files[PARAMS]), inputs, tensors, bound, operators)


def find_unnamed_files(files: Sequence[InputFile]) -> tuple[InputFile, ...]:
    """Return nothing: a recipe names all files of such a model."""
    return ()


def list_tensors(files: Mapping[str, Path]) -> Mapping[str, str]:
    """Return the inner tensors of a checkpoint, with the node that computes each."""
    from tvmflow.frontends.mxnet import _graph

    return _graph.list_tensors(read_symbol(files[SYMBOL]))


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start MXNet in an isolated process.

    Raises:
        EnvironmentProblem: when MXNet is not installed.
    """
    from tvmflow.frontends import _reference_process
    from tvmflow.operators.loading import operator_paths, prepare_calls

    if importlib.util.find_spec("mxnet") is None:
        raise EnvironmentProblem(
            "MXNet, the reference for MXNet checkpoints, is not installed", fix=REFERENCE.install
        )
    first = {
        "symbol": str(files[SYMBOL].resolve()),
        "params": str(files[PARAMS].resolve()),
        "inputs": [spec.to_json() for spec in inputs],
        "tensors": [spec.name for spec in tensors],
        "operators": operator_paths(files),
    }
    prepare_calls(scratch)
    environment = {
        # Fusing for oneDNN would run another graph than the one that was saved.
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "MXNET_CPU_WORKER_NTHREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }
    return _reference_process.start(
        REFERENCE, _WORKER, first, inputs, (*outputs, *tensors), scratch, environment
    )


def reference_version() -> str:
    """Return the version of MXNet, which its own process reports.

    Raises:
        EnvironmentProblem: when it cannot be imported there.
    """
    from tvmflow.frontends._reference_process import worker_environment

    process = subprocess.run(
        code_command(_PRINT_VERSION),
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=_VERSION_TIMEOUT_S,
        check=False,
    )
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise EnvironmentProblem(f"MXNet cannot be imported: {last}", fix=REFERENCE.install)
    return process.stdout.strip()
