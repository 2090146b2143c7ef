"""Importer of TFLite (LiteRT) models through ONNX, without TensorFlow or LiteRT.

Imports tvm and onnx only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from tvmflow.core import packages
from tvmflow.core.errors import ImportFailed
from tvmflow.core.file_kinds import TFLITE
from tvmflow.core.files import map_file
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import State, TensorSpec
from tvmflow.frontends._reading import read_in_worker, read_once
from tvmflow.frontends.base import (
    OPERATOR_FIX,
    LoadedModel,
    ModelFacts,
    ModelInput,
    ModelOutput,
    NotAModel,
    ReferenceTraits,
)
from tvmflow.frontends.frontend import (
    MODEL,
    Files,
    ImportCall,
    NamedFile,
    OneFile,
    OneFileFrontend,
    Specs,
)
from tvmflow.frontends.inputs import check_inputs, request_of, resolve_inputs
from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
from tvmflow.frontends.states import encode_content
from tvmflow.frontends.tflite._model import (
    IMPORTED_DTYPES,
    SUPPORTED,
    Buffer,
    Model,
    Tensor,
    read_model,
)


class TfliteSource(OneFile):
    """The field of a TFLite model."""

    tflite: NamedFile | None = Field(
        default=None,
        examples=["models/detector.tflite"],
        description="A [TFLite](tflite.md) (LiteRT) file: a path or a [URL](sources.md).",
    )


@read_in_worker
def _describe(path: Path) -> ModelFacts:
    model = _read_file(path)
    return ModelFacts(
        tuple(_read_input(name, model.tensors[n]) for n, name in model.inputs.items()),
        unsupported=_unsupported_text(model),
        outputs=tuple(
            ModelOutput(*_read_input(name, model.tensors[n])[:3]) for name, n in model.outputs
        ),
    )


def _read_input(name: str, tensor: Tensor) -> ModelInput:
    dims = tuple("" if size < 0 else size for size in tensor.dims)
    is_known = tensor.dtype in IMPORTED_DTYPES
    problem = "" if is_known else f"has dtype {tensor.dtype}, which is not supported"
    return ModelInput(name, tensor.dtype if is_known else None, dims, problem=problem)


def _unsupported_text(model: Model) -> str:
    names = sorted({op.name for op in model.operators if op.name not in SUPPORTED})
    return f"tvmflow does not support the TFLite operators {names_text(names)}" if names else ""


@read_once
def _read_file(path: Path) -> Model:
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, map_file(stream) as data:
        return read_model(data)


def _list_states(model: Model, data: Buffer, inputs: Sequence[TensorSpec]) -> Iterator[State]:
    """Yield the variables of a model as states, with initial values from the file."""
    specs = {spec.name: spec for spec in inputs}
    for (number, span), (output, _) in zip(model.variables.items(), model.next_values, strict=True):
        # Variables that the recipe binds to constants are not states.
        if spec := specs.get(model.inputs[number]):
            content = bytes(data[slice(*span)]) if span else b""
            if span and len(content) != spec.bytes:
                text = f"the variable {quoted(spec.name)} has {spec.bytes:,} bytes, and begins with {len(content):,}"
                raise ImportFailed(text, fix=TfliteFrontend.FOREIGN_FIX)
            try:
                yield State(spec.name, output, initial=encode_content(spec.name, content))
            except ValueError as error:
                text = f"the variable {error}"
                raise ImportFailed(text, fix="initialize the variable with zeros") from error


class TfliteFrontend(OneFileFrontend):
    """The frontend for TFLite, with LiteRT as the reference."""

    NAME = "TFLite"
    KIND = "tflite"
    MODELS = "TFLite models"
    SOURCE = TfliteSource
    TOOLS = OnnxFrontend.TOOLS
    REFERENCE = ReferenceTraits(
        name="LiteRT",
        tools=("ai-edge-litert", "numpy"),
        install="pip install 'tvmflow[tflite]'",
        is_optional=True,
        note="importing TFLite models works without it",
    )
    WORKER = "tvmflow.frontends.tflite._reference_worker"
    MODULE = "ai_edge_litert"
    FILE = TFLITE
    NOUN = "a TFLite model"
    FOREIGN = "is not a TFLite model"
    FOREIGN_FIX = "convert or download it again"
    UNSUPPORTED_FIX = OPERATOR_FIX
    describe = staticmethod(_describe)

    def _load(self, call: ImportCall) -> LoadedModel:
        from tvmflow.frontends._onnx_graph import import_graph
        from tvmflow.frontends.tflite._conversion import convert

        with self.explained():
            model = _read_file(call.files[MODEL])
        with call.files[MODEL].open("rb") as stream:
            # The mapping stays open while weights are read from it.
            data = map_file(stream)
        requests, known = list(map(request_of, call.inputs)), self.read_facts(call.files).inputs
        check_inputs(known, requests)
        specs = resolve_inputs(known, requests)
        converted, inner_outputs = convert(
            model, data, specs, call.tensors, call.bound, call.dimensions
        )
        left = tuple(spec for spec in specs if spec.name not in call.bound)
        loaded = import_graph(converted, inner_outputs, left, call)
        return loaded._replace(states=tuple(_list_states(model, data, loaded.inputs)))

    def _describe_files(self, files: Files, tensors: Specs, scratch: Path) -> dict[str, Any]:
        return {"model": str(files[MODEL].resolve())}

    def reference_version(self) -> str:
        """Return the version of LiteRT."""
        return packages.find_package("ai-edge-litert").version
