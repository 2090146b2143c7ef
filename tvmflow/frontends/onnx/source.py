"""The fields of a recipe that name an ONNX file, and the files that it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final

from pydantic import Field

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.core.file_kinds import ONNX
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, obstacle
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends._file_source import (
    NamedFile,
    OneFile,
    check_other_kind,
    find_missing_file,
    further_file,
    named_file,
    shown,
)
from tvmflow.frontends._reading import NotAModel, read_in_worker
from tvmflow.frontends.base import MissingFile, ModelFacts, ModelInput, SourceFields, Where
from tvmflow.frontends.onnx._header import read_header
from tvmflow.store.addresses import HUB, scheme_of
from tvmflow.store.source_files import SourceFiles, UnpinnedFiles

_read_header = read_in_worker(read_header)

MODEL: Final = "model"
"""The role of the ONNX file."""

EXTERNAL: Final = "external/"
"""The prefix of the role of an external data file; its location in the model follows."""


class OnnxSource(OneFile):
    """The fields of an ONNX model."""

    takes_operators: ClassVar[bool] = True

    onnx: NamedFile | None = Field(
        default=None,
        description="An ONNX file: a path from the recipe's folder, or an address: see [sources.md](sources.md).",
    )


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the ONNX file when it is a path that does not exist."""
    return find_missing_file("onnx", model, base)


def files(
    source: SourceFields, base: Path, where: Where, sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Return the ONNX file and its external data files, whose names stand in it.

    A file at an address that is yet to be downloaded is not read: then the recipe names its external
    data. On the Hub it need not, so that the file is downloaded for its names.

    Raises:
        RecipeError: when the file is not an ONNX model, or external data is missing or not beside it.
        DownloadError: when something has to be looked up, and cannot be.
    """
    assert isinstance(source, OnnxSource)
    position = where("onnx")
    try:
        model = sources.resolve(named_file(MODEL, "onnx", source, base, where))
    except UnpinnedFiles as error:
        # it was downloaded for its digest, so that its further files can be named at once
        (model,) = error.files
        names = _read_external_names(model, position)
        try:
            sources.resolve_all(_list_external_files(names, model, source, where))
        except UnpinnedFiles as others:
            raise UnpinnedFiles([model, *others.files]) from None
        raise
    if scheme_of(model.url) == HUB and source.files is None:
        model = sources.fetch(model)
    if not model.path:
        names = tuple(source.files or ())
    else:
        names = _read_external_names(model, position)
        _check_pinned_names(source, names, where)
    return (model, *sources.resolve_all(_list_external_files(names, model, source, where)))


def find_unnamed_files(files: Sequence[InputFile]) -> tuple[InputFile, ...]:
    """Return the external data files of a model that was downloaded after planning, and that the recipe does not name.

    Raises:
        RecipeError: when the file is not an ONNX model, or external data is not beside it.
    """
    model = next(file for file in files if file.role == MODEL)
    names = _read_external_names(model, model.where)
    listed = _list_external_files(names, model, OnnxSource(), lambda *_: model.where)
    known = {file.role for file in files}
    return tuple(file for file in listed if file.role not in known)


def _list_external_files(
    names: Sequence[str], model: InputFile, source: OnnxSource, where: Where
) -> list[InputFile]:
    """Return the external data files of a model, each once, not resolved yet."""
    listed = (_external_file(name, model, source, where) for name in names)
    return list({file.role: file for file in listed}.values())


def _read_external_names(model: InputFile, position: str) -> tuple[str, ...]:
    """Return the names of the external data files in the header of a model."""
    path = Path(model.path)
    try:
        return _read_header(path).data_files
    except NotAModel as error:
        start = f"{position}: model.onnx: {shown(model)}"
        check_other_kind(start, path, ONNX)
        raise RecipeError(f"{start} is not an ONNX model: {error}") from None
    except OSError as error:
        raise unreadable(f"{position}: model.onnx: {path}", error) from error


def _check_pinned_names(source: OnnxSource, names: tuple[str, ...], where: Where) -> None:
    """Check that the model has the files that the recipe pins.

    Raises:
        RecipeError: when it does not name one of them.
    """
    valid = {_normal(name) for name in names}
    for name in source.files or ():
        if _normal(name) not in valid:
            hint = did_you_mean(name, valid)
            text = f"model.files: the model has no external data in {quoted(name)}{hint}"
            raise RecipeError(f"{where('files', name)}: {text}")


def _normal(location: str) -> str:
    return str(PurePosixPath(location))


def read_inputs(files: Mapping[str, Path]) -> Sequence[ModelInput]:
    """Return the inputs of the model.

    Raises:
        ImportFailed: when the file is not an ONNX model.
    """
    return _read_signature(files).inputs


def read_outputs(files: Mapping[str, Path]) -> Sequence[str]:
    """Return the names of the outputs of the model; errors are those of `read_inputs`."""
    return _read_signature(files).outputs


def _read_signature(files: Mapping[str, Path]) -> ModelFacts:
    try:
        return _read_header(files[MODEL])
    except NotAModel as error:
        raise ImportFailed(
            f"the file is not an ONNX model: {error}", fix="export or download it again"
        ) from None


def _external_file(location: str, model: InputFile, source: OnnxSource, where: Where) -> InputFile:
    """Return an external data file, which must be in the model's folder.

    The model may come from somebody else, and must not make its user read or publish other files.

    Raises:
        RecipeError: when it is not, or does not exist.
    """
    inside, name = PurePosixPath(location), quoted(location)
    is_inside = bool(location) and not inside.is_absolute() and ".." not in inside.parts
    start = f"{model.where}: model.onnx: {shown(model)}"
    if not is_inside or not (model.url or _is_in_model_folder(model.path, location)):
        raise RecipeError(
            f"{start} refers to data outside its folder: {name}",
            fix="save the model again with its external data beside it",
        )
    # Without the header, only the names in `files` are known, which need not be written as there.
    role = f"{EXTERNAL}{_normal(location) if model.url else location}"
    file = further_file(role, _normal(location), model, source, where)
    if not file.url and not is_file(Path(file.path)):
        problem = obstacle(Path(file.path)) or "does not exist"
        raise RecipeError(
            f"{start} has weights in {name}, which {problem}",
            fix="copy the external data files of the model together with it",
        )
    return file


def _is_in_model_folder(path: str, location: str) -> bool:
    """Return whether a file is in the folder of the model, when all symbolic links are followed.

    A model that is a symbolic link itself also has its data beside the file that it leads to, as in
    the caches of download tools.
    """
    model = Path(path)
    try:
        folders = (model.parent.resolve(), model.resolve().parent)
        real = (model.parent / location).resolve()
    except (OSError, RuntimeError, ValueError):
        # A name that no file can have, or links in a circle: reported as a file that does not exist.
        return True
    return any(real.is_relative_to(folder) for folder in folders)
