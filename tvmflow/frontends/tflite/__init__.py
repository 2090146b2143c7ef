"""TFLite (LiteRT) models, imported by way of ONNX without TensorFlow or LiteRT. Imports tvm and onnx only inside functions."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core import packages
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import InputFile, TensorSpec
from tvmflow.frontends import onnx
from tvmflow.frontends._base import LoadedModel, Reference, ReferenceTraits
from tvmflow.frontends._import_errors import importing
from tvmflow.frontends.tflite._source import (
    MODEL,
    TfliteSource,
    read_importable,
    resolve,
)
from tvmflow.frontends.tflite._source import files as files
from tvmflow.frontends.tflite._source import find_missing_files as find_missing_files
from tvmflow.frontends.tflite._source import read_inputs as read_inputs
from tvmflow.frontends.tflite._source import read_outputs as read_outputs

if TYPE_CHECKING:
    import numpy as np

NAME: Final = "TFLite"
KIND: Final = "tflite"
SOURCE: Final = TfliteSource
TOOLS: Final = onnx.TOOLS
REQUIRES_INPUTS: Final = False
REFERENCE: Final = ReferenceTraits(
    name="LiteRT",
    tools=("ai-edge-litert", "numpy"),
    install="pip install 'tvmflow[tflite]'",
    is_optional=True,
    note="importing TFLite models works without it",
)

_WORKER: Final = "tvmflow.frontends.tflite._reference_worker"


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    tensors: tuple[str, ...] = (),
    bound: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> LoadedModel:
    """Convert a model to ONNX, and import that for these input shapes, with constants in place of some inputs.

    Raises:
        ImportFailed: with operator and tensor, or with the name that is not a tensor of the model.
    """
    from tvmflow.frontends.onnx._importer import import_prepared
    from tvmflow.frontends.onnx._prepare import prepare
    from tvmflow.frontends.tflite._conversion import convert

    with importing():
        model = read_importable(files[MODEL])
        with files[MODEL].open("rb") as stream:
            # Weights are read from it, so that it stays open as long as they are used.
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        specs = resolve(files, inputs)
        converted, inner_outputs = convert(model, data, specs, tensors, bound)
        left = tuple(spec for spec in specs if spec.name not in bound)
        # Operators of TFLite have no names: that of its first result is there.
        labels = {o: node.doc_string for node in converted.graph.node for o in node.output}
        return import_prepared(prepare(converted, left), inner_outputs, labels=labels)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start LiteRT on the unmodified model in an isolated process.

    Raises:
        EnvironmentProblem: when LiteRT is not installed.
    """
    from tvmflow.frontends import _reference_process

    if importlib.util.find_spec("ai_edge_litert") is None:
        raise EnvironmentProblem(
            "LiteRT, the reference for TFLite models, is not installed", fix=REFERENCE.install
        )
    first = {
        "model": str(files[MODEL].resolve()),
        "shapes": {spec.name: spec.shape for spec in inputs},
        "outputs": [spec.name for spec in outputs],
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
    """Return the version of LiteRT.

    Raises:
        EnvironmentProblem: when it is not installed.
    """
    return packages.find_package("ai-edge-litert").version
