"""The field of a recipe that names a TFLite file, and what the file tells without TVM."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.core.formatting import names_text
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.types import InputFile, Json, TensorSpec
from tvmflow.frontends._base import InputProblem, MissingFile, Where
from tvmflow.frontends._file_source import NamedFile, OneFile, named_file
from tvmflow.frontends.onnx._inputs import ELEMENT_TYPES, ModelInput
from tvmflow.frontends.onnx._inputs import find_input_problems as compare_inputs
from tvmflow.frontends.tflite._flatbuffer import NotAModel
from tvmflow.frontends.tflite._model import Model, read_model
from tvmflow.frontends.tflite._operators import SUPPORTED
from tvmflow.store.addresses import is_address
from tvmflow.store.source_files import SourceFiles

MODEL: Final = "model"
"""The role of the TFLite file."""

FIX: Final = "replace the operator in the model, or end the model before it"


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
    path = model.get("tflite")
    if isinstance(path, str) and path and not is_address(path) and not is_file(base / path):
        yield MissingFile(("tflite",), missing_file_text(base / path))


def list_files(
    source: TfliteSource, base: Path, where: Where, sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Return the TFLite file; one at an address that is yet to be downloaded is not read.

    Raises:
        RecipeError: when it is not a TFLite model, or has operators that are not imported.
        DownloadError: when something has to be looked up, and cannot be.
    """
    position = where("tflite")
    file = sources.resolve(named_file(MODEL, "tflite", source, base, where))
    if not file.path:
        return (file,)
    start = f"{position}: model.tflite: {file.path}"
    try:
        model = read_file(Path(file.path))
    except NotAModel as error:
        raise RecipeError(f"{start} is not a TFLite model: {error}") from None
    except OSError as error:
        raise RecipeError(f"{start}: {error.strerror}") from None
    if text := unsupported_text(model):
        raise RecipeError(f"{start} cannot be imported: {text}", fix=FIX)
    return (file,)


def find_input_problems(
    files: Sequence[InputFile], inputs: Sequence[TensorSpec]
) -> Iterator[InputProblem]:
    """Give the inputs that do not fit the model; none for a model that has yet to be downloaded."""
    for file in files:
        if file.role == MODEL and file.path:
            yield from compare_inputs(list_inputs(read_file(Path(file.path))), inputs)


def list_inputs(model: Model) -> list[ModelInput]:
    """Return names, dtypes and sizes of the inputs of a model."""
    known = frozenset(ELEMENT_TYPES.values())
    inputs = []
    for number, name in model.inputs.items():
        tensor = model.tensors[number]
        dtype = tensor.dtype if tensor.dtype in known else ""
        inputs.append(ModelInput(name, dtype, tensor.dims))
    return inputs


def unsupported_text(model: Model) -> str:
    """Return which operators of a model are not imported; an empty string if all are."""
    names = sorted({op.name for op in model.operators if op.name not in SUPPORTED})
    return f"tvmflow lacks the TFLite operators {names_text(names)}" if names else ""


def read_file(path: Path) -> Model:
    """Return what a file holds, which planning needs several times.

    Raises:
        NotAModel: when it is not a TFLite model.
    """
    status = path.stat()
    return _cached_model(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=16)
def _cached_model(path: Path, stamp: tuple[int, ...]) -> Model:
    if stamp[0] == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_model(data)


def checked_model(path: Path, inputs: Sequence[TensorSpec]) -> Model:
    """Return a model that can be converted for these inputs.

    Raises:
        ImportFailed: when it is none, has operators that are not imported, or other inputs.
    """
    try:
        model = read_file(path)
    except NotAModel as error:
        raise ImportFailed(f"the file is not a TFLite model: {error}") from error
    if text := unsupported_text(model):
        raise ImportFailed(text, fix=FIX)
    problems = [problem.text for problem in compare_inputs(list_inputs(model), inputs)]
    if problems:
        raise ImportFailed("; ".join(problems), fix="correct `inputs` in the recipe")
    return model
