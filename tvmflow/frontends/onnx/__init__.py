"""ONNX models: opset 7 and up, external data, any naming of weights. Imports tvm and onnx only inside functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.packages import install_command
from tvmflow.core.types import TensorSpec
from tvmflow.frontends._import_errors import importing
from tvmflow.frontends.base import LoadedModel, Reference, ReferenceTraits
from tvmflow.frontends.onnx.source import OnnxSource
from tvmflow.frontends.onnx.source import files as files
from tvmflow.frontends.onnx.source import find_missing_files as find_missing_files
from tvmflow.frontends.onnx.source import find_unnamed_files as find_unnamed_files
from tvmflow.frontends.onnx.source import read_inputs as read_inputs
from tvmflow.frontends.onnx.source import read_outputs as read_outputs

if TYPE_CHECKING:
    import numpy as np

NAME: Final = "ONNX"
KIND: Final = "onnx"
SOURCE: Final = OnnxSource
TOOLS: Final = ("apache-tvm", "numpy", "onnx")
REQUIRES_INPUTS: Final = False
REFERENCE: Final = ReferenceTraits(
    name="ONNX Runtime",
    tools=("numpy", "onnx", "onnxruntime"),
    install=install_command("onnxruntime"),
    is_optional=False,
)

_WORKER: Final = "tvmflow.frontends.onnx._reference_worker"


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    tensors: tuple[str, ...] = (),
    bound: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({}),
) -> LoadedModel:
    """Import a model for these input shapes, with constants in place of some inputs.

    Raises:
        ImportFailed: with operator and node, or with the name that is not a tensor of the model.
    """
    from tvmflow.frontends.onnx._own_operators import OwnNodes
    from tvmflow.frontends.onnx.graph import node_labels
    from tvmflow.frontends.onnx.importer import import_prepared
    from tvmflow.frontends.onnx.model_files import add_outputs, read_model
    from tvmflow.frontends.onnx.prepare import prepare
    from tvmflow.operators.loading import load_operators

    with importing():
        own = OwnNodes(load_operators(files))
        model = read_model(files)
        inner_outputs = add_outputs(model, tensors)
        own.mark(model)
        labels = node_labels(model)
        return import_prepared(prepare(model, inputs, bound, own), inner_outputs, own, labels)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start ONNX Runtime on the unmodified model in an isolated process."""
    from tvmflow.frontends import _reference_process
    from tvmflow.frontends.onnx.model_files import link_files, save_with_outputs
    from tvmflow.operators.loading import operator_paths, prepare_calls

    path = link_files(files, scratch)
    if tensors:
        path = save_with_outputs(path, tuple(spec.name for spec in tensors))
    first = {"model": str(path), "threads": threads, "operators": operator_paths(files)}
    first["calls"] = str(prepare_calls(scratch))
    return _reference_process.start(
        REFERENCE, _WORKER, first, inputs, (*outputs, *tensors), scratch
    )


def list_tensors(files: Mapping[str, Path]) -> Mapping[str, str]:
    """Return the inner tensors of the main graph, with the node that computes each."""
    import onnx

    from tvmflow.frontends.onnx.graph import node_labels

    model = onnx.load(str(files["model"]), load_external_data=False)
    outputs = {value.name for value in model.graph.output}
    labels = node_labels(model)
    inner = [name for node in model.graph.node for name in node.output if name]
    return {name: labels[name] for name in inner if name not in outputs}


def reference_version() -> str:
    """Return the version of ONNX Runtime.

    Raises:
        ImportError: when it is not installed or cannot be loaded.
    """
    import onnxruntime

    return str(onnxruntime.__version__)
