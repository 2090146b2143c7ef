"""TFLite (LiteRT) models, imported by way of ONNX without TensorFlow or LiteRT. Imports tvm and onnx only inside functions."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from tvmflow.core import packages
from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import EnvironmentProblem, ImportFailed, RecipeError
from tvmflow.core.file_kinds import TFLITE
from tvmflow.core.formatting import names_text
from tvmflow.core.types import InputFile, Json, TensorSpec
from tvmflow.frontends import onnx
from tvmflow.frontends._file_source import (
    NamedFile,
    OneFile,
    check_other_kind,
    find_missing_file,
    named_file,
    resolve_single_file,
    shown,
)
from tvmflow.frontends._import_errors import importing
from tvmflow.frontends._reading import NotAModel, read_in_worker, read_once
from tvmflow.frontends.base import (
    InputRequest,
    LoadedModel,
    MissingFile,
    ModelFacts,
    ModelInput,
    Reference,
    ReferenceTraits,
    SourceFields,
    Where,
)
from tvmflow.frontends.inputs import find_input_problems, input_error, resolve_inputs
from tvmflow.frontends.tflite._model import IMPORTED_DTYPES, Model, Tensor, read_model
from tvmflow.frontends.tflite._operators import FIX, SUPPORTED
from tvmflow.store.source_files import SourceFiles

if TYPE_CHECKING:
    import numpy as np

# ---------------------------------------------------------------- source
# The field of a recipe that names a TFLite file, and what the file tells without TVM.


MODEL: Final = "model"
"""The role of the TFLite file."""


class TfliteSource(OneFile):
    """The field of a TFLite model."""

    tflite: NamedFile | None = Field(
        default=None,
        examples=["models/detector.tflite"],
        description="A TFLite (LiteRT) file: a path from the recipe's folder, or an address: see "
        "[tflite.md](tflite.md) and [sources.md](sources.md).",
    )


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the TFLite file when it is a path that does not exist."""
    return find_missing_file("tflite", model, base)


def files(
    source: SourceFields, base: Path, where: Where, sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Return the TFLite file; one at an address that is yet to be downloaded is not read.

    Raises:
        RecipeError: when it is not a TFLite model, or has operators that are not imported.
        DownloadError: when something has to be looked up, and cannot be.
    """
    assert isinstance(source, TfliteSource)
    named = named_file(MODEL, "tflite", source, base, where)
    file = resolve_single_file(named, "a TFLite model", source, where, sources)
    start = f"{file.where}: model.tflite"
    try:
        if file.path:
            _check_file(Path(file.path), f"{start}: {shown(file)}")
    except OSError as error:
        raise unreadable(f"{start}: {file.path}", error) from error
    return (file,)


def _check_file(path: Path, start: str) -> None:
    """Check that a file can be imported, as far as that can be seen without TVM.

    Raises:
        RecipeError: with a message that begins with `start`.
    """
    try:
        facts = _read_facts(path)
    except NotAModel as error:
        check_other_kind(start, path, TFLITE)
        raise RecipeError(f"{start} is not a TFLite model: {error}") from None
    if facts.unsupported:
        raise RecipeError(f"{start} cannot be imported: {facts.unsupported}", fix=FIX)


def read_inputs(files: Mapping[str, Path]) -> list[ModelInput]:
    """Return the inputs of the model.

    Raises:
        ImportFailed: when the file is no TFLite model that can be imported.
    """
    return list(_read_supported(files).inputs)


def read_outputs(files: Mapping[str, Path]) -> list[str]:
    """Return the names of the outputs of the model; errors are those of `read_inputs`."""
    return list(_read_supported(files).outputs)


def _read_supported(files: Mapping[str, Path]) -> ModelFacts:
    with _explained():
        facts = _read_facts(files[MODEL])
    _check_supported(facts.unsupported)
    return facts


def resolve(files: Mapping[str, Path], inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return all inputs of the model; those that `inputs` does not have are as in the file.

    Raises:
        ImportFailed: when `inputs` do not fit the model.
    """
    requests = [InputRequest(*spec) for spec in inputs]
    known = read_inputs(files)
    if problems := list(find_input_problems(known, requests)):
        raise input_error(problems)
    return resolve_inputs(known, requests)


def _read_input(name: str, tensor: Tensor) -> ModelInput:
    dims = tuple("" if size < 0 else size for size in tensor.dims)
    is_known = tensor.dtype in IMPORTED_DTYPES
    problem = "" if is_known else f"has dtype {tensor.dtype}, which is not supported"
    return ModelInput(name, tensor.dtype if is_known else None, dims, problem=problem)


def read_facts(path: Path) -> ModelFacts:
    """Return what planning needs of a file.

    Raises:
        NotAModel: when it is not a TFLite model.
    """
    model = read_file(path)
    return ModelFacts(
        tuple(_read_input(name, model.tensors[n]) for n, name in model.inputs.items()),
        unsupported=_unsupported_text(model),
        outputs=tuple(name for name, _ in model.outputs),
    )


_read_facts = read_in_worker(read_facts)


def _unsupported_text(model: Model) -> str:
    """Return which operators of a model are not imported; an empty string if all are."""
    names = sorted({op.name for op in model.operators if op.name not in SUPPORTED})
    return f"tvmflow lacks the TFLite operators {names_text(names)}" if names else ""


@read_once
def read_file(path: Path) -> Model:
    """Return what a file holds.

    Raises:
        NotAModel: when it is not a TFLite model.
    """
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_model(data)


def read_importable(path: Path) -> Model:
    """Return a model that can be converted, as far as can be seen without TVM.

    Raises:
        ImportFailed: when it is none, or has operators that are not imported.
    """
    with _explained():
        model = read_file(path)
    _check_supported(_unsupported_text(model))
    return model


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise ImportFailed where a file is not a TFLite model."""
    try:
        yield
    except NotAModel as error:
        text = f"the file is not a TFLite model: {error}"
        raise ImportFailed(text, fix="convert or download it again") from None


def _check_supported(unsupported: str) -> None:
    if unsupported:
        raise ImportFailed(unsupported, fix=FIX)


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
    from tvmflow.frontends.onnx.importer import import_prepared
    from tvmflow.frontends.onnx.prepare import prepare
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
