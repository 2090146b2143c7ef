"""PyTorch models: archives of `torch.export.save`, imported by way of ONNX. Imports torch only in processes of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core import packages
from tvmflow.core.types import InputFile, TensorSpec
from tvmflow.frontends import onnx
from tvmflow.frontends.base import LoadedModel, Reference, ReferenceTraits
from tvmflow.frontends.pytorch._source import MODEL, PytorchSource
from tvmflow.frontends.pytorch._source import files as files
from tvmflow.frontends.pytorch._source import find_missing_files as find_missing_files
from tvmflow.frontends.pytorch._source import read_inputs as read_inputs
from tvmflow.frontends.pytorch._source import read_outputs as read_outputs

if TYPE_CHECKING:
    import numpy as np

NAME: Final = "PyTorch"
KIND: Final = "pytorch"
SOURCE: Final = PytorchSource
_EXPORTER: Final = ("onnx-ir", "onnxscript", "torch")
TOOLS: Final = (*onnx.TOOLS, *_EXPORTER)
REQUIRES_INPUTS: Final = False
REFERENCE: Final = ReferenceTraits(
    name="PyTorch",
    tools=("numpy", "torch"),
    install="pip install 'tvmflow[pytorch]'",
    is_optional=True,
    note="any PyTorch from 2.6 on; importing PyTorch models needs it, too",
)

_WORKER: Final = "tvmflow.frontends.pytorch._reference_worker"


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    tensors: tuple[str, ...] = (),
    bound: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> LoadedModel:
    """Export an archive to ONNX, and import that for these input shapes, with constants in place of some inputs.

    Raises:
        ImportFailed: with what PyTorch says, or with operator and node.
        EnvironmentProblem: when PyTorch or its exporter cannot be imported.
    """
    from tvmflow.frontends.pytorch._export import export_to_onnx

    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        exported = export_to_onnx(files[MODEL], tensors, Path(folder))
        loaded = onnx.load(exported.files, inputs, bound=bound)
    count = len(loaded.outputs) - exported.inner_outputs
    outputs, inner = loaded.outputs[:count], loaded.outputs[count:]
    return loaded._replace(outputs=outputs, tensors=inner)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start PyTorch on the archive in an isolated process."""
    from tvmflow.frontends import _reference_process

    first = {
        "archive": str(files[MODEL].resolve()),
        "scratch": str(scratch),
        "tensors": [spec.name for spec in tensors],
        "threads": threads,
    }
    return _reference_process.start(
        REFERENCE, _WORKER, first, inputs, (*outputs, *tensors), scratch
    )


def find_unnamed_files(files: Sequence[InputFile]) -> tuple[InputFile, ...]:
    """Return nothing: a recipe names all files of such a model."""
    return ()


def list_tensors(files: Mapping[str, Path]) -> Mapping[str, str]:
    """Return nothing: which of the tensors the import keeps is not known before it."""
    return {}


def reference_version() -> str:
    """Return the version of the installed PyTorch, which also needs its exporter to ONNX.

    Raises:
        EnvironmentProblem: when one of its packages is not installed.
    """
    versions = [packages.find_package(name).version for name in _EXPORTER]
    return versions[-1]
