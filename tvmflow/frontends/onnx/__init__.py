"""ONNX models: a file, or a URL with its sha256; opset 7 and up, external data, any way of naming weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from tvmflow.errors import RecipeError
from tvmflow.frontends._base import LoadedModel, Reference
from tvmflow.frontends.onnx._protobuf import NotAModel, external_locations
from tvmflow.values import InputFile, TensorSpec

KIND = "onnx"
TOOLS: tuple[str, ...] = ("apache-tvm", "numpy", "onnx")
REFERENCE_TOOLS: tuple[str, ...] = ("numpy", "onnx", "onnxruntime")

MODEL = "model"
EXTERNAL = "external/"


def settings(model: Any) -> dict[str, Any]:
    """Nothing: the files say it all."""
    return {}


def files(model: Any, base: Path, where: Any) -> tuple[InputFile, ...]:
    """The model and its external data files, which are named inside it. Raises RecipeError."""
    place, digest_place = where("onnx"), where("sha256")
    if model.is_url:
        return (InputFile(MODEL, "", place, model.onnx, model.sha256, digest_place),)
    path = base / model.onnx
    first = InputFile(MODEL, str(path), place, "", model.sha256 or "", digest_place)
    try:
        locations = external_locations(path)
    except NotAModel as error:
        raise RecipeError(f"{place}: model.onnx: {path} is not an ONNX model: {error}") from None
    except OSError as error:
        raise RecipeError(f"{place}: model.onnx: {path}: {error.strerror}") from None
    return (first, *_external_files(path, locations, place))


def _external_files(path: Path, locations: tuple[str, ...], place: str) -> Iterator[InputFile]:
    for location in locations:
        inside = PurePosixPath(location)
        if inside.is_absolute() or ".." in inside.parts or not location:
            raise RecipeError(
                f"{place}: model.onnx: {path} wants data from outside its folder: {location!r}",
                fix="save the model again with its external data beside it",
            )
        data = path.parent / inside
        if not data.is_file():
            raise RecipeError(
                f"{place}: model.onnx: {path} keeps weights in {location!r}, which is not there",
                fix="copy the model's external data files along with it",
            )
        yield InputFile(f"{EXTERNAL}{location}", str(data), place)


def load(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    settings: Mapping[str, Any],
    tensors: tuple[str, ...] = (),
) -> LoadedModel:
    """Import a model for these input shapes. Raises ImportFailed with operator and node."""
    from tvmflow.frontends.onnx._importer import import_prepared
    from tvmflow.frontends.onnx._prepare import prepare, read_model
    from tvmflow.frontends.onnx._tensors import show_tensors

    model = read_model(files)
    shown = show_tensors(model, tensors)
    return import_prepared(prepare(model, inputs), shown)


def reference(
    files: Mapping[str, Path],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    settings: Mapping[str, Any],
    *,
    tensors: tuple[TensorSpec, ...] = (),
    threads: int,
    scratch: Path,
) -> AbstractContextManager[Reference]:
    """Start ONNX Runtime in an isolated process, on the model as it came."""
    from tvmflow.frontends import _reference_process
    from tvmflow.frontends.onnx._prepare import lay_out
    from tvmflow.frontends.onnx._tensors import shown_in_file

    path = lay_out(files, scratch)
    if tensors:
        path = shown_in_file(path, tuple(spec.name for spec in tensors))
    first = {"model": str(path), "threads": threads}
    return _reference_process.start(
        "ONNX Runtime",
        "tvmflow.frontends.onnx._reference_worker",
        first,
        {},
        inputs,
        (*outputs, *tensors),
        scratch=scratch,
        install="pip install onnxruntime",
    )
