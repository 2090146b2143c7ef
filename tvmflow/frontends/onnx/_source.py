"""The fields of a recipe that name an ONNX file, and the files that it consists of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from pydantic import Field, field_validator, model_validator

from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, missing_file_text, obstacle
from tvmflow.core.schema import field_error
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends._base import MissingFile, ModelInput, SourceFields, Where
from tvmflow.frontends.onnx._header import Header, read_header
from tvmflow.frontends.onnx._protobuf import NotAModel

MODEL: Final = "model"
"""The role of the ONNX file."""

EXTERNAL: Final = "external/"
"""The prefix of the role of an external data file; its location in the model follows."""

_DIGEST_PATTERN: Final = r"^[0-9a-fA-F]{64}$"
_URL_SCHEMES: Final = ("http", "https", "file")


class OnnxSource(SourceFields):
    """The fields of an ONNX model."""

    onnx: str | None = Field(
        default=None,
        min_length=1,
        description="An ONNX file: a path from the recipe's folder, or a URL (which needs `sha256`).",
    )
    sha256: str | None = Field(
        default=None,
        json_schema_extra={"pattern": _DIGEST_PATTERN},
        description="SHA-256 digest of the ONNX file, 64 hexadecimal digits. Always checked; required for a URL.",
    )

    @property
    def is_url(self) -> bool:
        """Return whether the ONNX file must be downloaded."""
        return self.onnx is not None and "://" in self.onnx

    @field_validator("sha256")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if len(value) != 64 or set(value) - set("0123456789abcdefABCDEF"):
            raise field_error(f"must be 64 hexadecimal digits, not the string {quoted(value)}")
        return value.lower()

    @model_validator(mode="after")
    def _check_url(self) -> OnnxSource:
        if self.onnx is None or not self.is_url:
            return self
        scheme = self.onnx.partition("://")[0]
        if scheme.lower() not in _URL_SCHEMES:
            valid = ", ".join(_URL_SCHEMES)
            raise field_error(
                f"{quoted(scheme)} is not a supported URL scheme (valid: {valid})", "onnx"
            )
        if self.sha256 is None:
            raise field_error("a URL needs sha256, so that the model cannot change", "onnx")
        return self


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the ONNX file when it is a path that does not exist."""
    path = model.get("onnx")
    if isinstance(path, str) and path and "://" not in path and not is_file(base / path):
        yield MissingFile(("onnx",), missing_file_text(base / path))


def list_files(source: OnnxSource, base: Path, where: Where) -> tuple[InputFile, ...]:
    """Return the ONNX file and its external data files, whose names stand in it.

    Raises:
        RecipeError: when the file is not an ONNX model, or external data is missing or not beside it.
    """
    assert source.onnx is not None
    position, digest_position = where("onnx"), where("sha256")
    if source.is_url:
        digest = source.sha256 or ""
        return (InputFile(MODEL, "", position, source.onnx, digest, digest_position),)
    path = base / source.onnx
    model = InputFile(MODEL, str(path), position, "", source.sha256 or "", digest_position)
    try:
        header = _read_header(path)
    except NotAModel as error:
        raise RecipeError(f"{position}: model.onnx: {path} is not an ONNX model: {error}") from None
    except OSError as error:
        raise RecipeError(f"{position}: model.onnx: {path}: {error.strerror}") from None
    return (model, *_external_files(path, header.data_files, position))


def read_inputs(files: Mapping[str, Path]) -> Sequence[ModelInput]:
    """Return the inputs of the model.

    Raises:
        ImportFailed: when the file is not an ONNX model.
    """
    try:
        return _read_header(files[MODEL]).inputs
    except NotAModel as error:
        raise ImportFailed(
            f"the file is not an ONNX model: {error}", fix="export or download it again"
        ) from None


def _read_header(path: Path) -> Header:
    """Return the header of a file, which planning needs several times."""
    status = path.stat()
    return _cached_header(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=16)
def _cached_header(path: Path, stamp: tuple[int, ...]) -> Header:
    return read_header(path)


def _external_files(path: Path, locations: tuple[str, ...], position: str) -> Iterator[InputFile]:
    """Give the external data files, which must be in the model's folder.

    The model may come from somebody else, and must not make its user read or publish other files.
    """
    for location in locations:
        inside, name = PurePosixPath(location), quoted(location)
        is_inside = bool(location) and not inside.is_absolute() and ".." not in inside.parts
        data = path.parent / inside
        if not is_inside or not _is_in_model_folder(data, path):
            raise RecipeError(
                f"{position}: model.onnx: {path} refers to data outside its folder: {name}",
                fix="save the model again with its external data beside it",
            )
        if not is_file(data):
            problem = obstacle(data) or "does not exist"
            raise RecipeError(
                f"{position}: model.onnx: {path} has weights in {name}, which {problem}",
                fix="copy the external data files of the model together with it",
            )
        yield InputFile(f"{EXTERNAL}{location}", str(data), position)


def _is_in_model_folder(data: Path, model: Path) -> bool:
    """Return whether a file is in the folder of the model, when all symbolic links are followed.

    A model that is a symbolic link itself also has its data beside the file that it leads to, as in
    the caches of download tools.
    """
    try:
        folders = (model.parent.resolve(), model.resolve().parent)
        real = data.resolve()
    except (OSError, RuntimeError, ValueError):
        # A name that no file can have, or links in a circle: reported as a file that does not exist.
        return True
    return any(real.is_relative_to(folder) for folder in folders)
