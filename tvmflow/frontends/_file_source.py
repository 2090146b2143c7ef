"""The fields of a recipe that name a model's files, by path or by address, and pin their content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from tvmflow.core.errors import RecipeError
from tvmflow.core.file_kinds import ZIP, FileKind, recognize
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.schema import field_error
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends.base import MissingFile, SourceFields, Where
from tvmflow.store.addresses import (
    InvalidAddress,
    check_address,
    is_address,
    sibling,
    without_secrets,
)
from tvmflow.store.source_files import SourceFiles

_DIGEST_PATTERN: Final = r"^[0-9a-fA-F]{64}$"


def _check_file(value: str) -> str:
    if is_address(value):
        try:
            check_address(value)
        except InvalidAddress as error:
            raise field_error(str(error)) from None
    return value


def _check_digest(value: str) -> str:
    if len(value) != 64 or set(value) - set("0123456789abcdefABCDEF"):
        raise field_error(f"must be 64 hexadecimal digits, not the string {quoted(value)}")
    return value.lower()


NamedFile = Annotated[str, Field(min_length=1), AfterValidator(_check_file)]
"""A file that a recipe names: a path from the recipe's folder, or an address."""

_Digest = Annotated[
    str, AfterValidator(_check_digest), Field(json_schema_extra={"pattern": _DIGEST_PATTERN})
]


class SeveralFiles(SourceFields):
    """The field that pins the further files of a model, or all files of one that has several."""

    files: dict[str, _Digest] | None = Field(
        default=None,
        description="SHA-256 digests of further files of the model, by their paths from its folder. Always checked; "
        "required at an address, except at `hf://`, where the commit pins them.",
    )


class OneFile(SeveralFiles):
    """The fields that pin a model which is one file, and perhaps further ones that it names."""

    sha256: _Digest | None = Field(
        default=None,
        description="SHA-256 digest of the model's file, 64 hexadecimal digits. Always checked; required at an address, "
        "except at `hf://`, where the commit pins it.",
    )


def named_file(role: str, field: str, source: OneFile, base: Path, where: Where) -> InputFile:
    """Return the file that a field of a recipe names, not resolved yet.

    Args:
        role: The name by which stages read it.
        field: The field of `source` with its path or address.
        source: The recipe's `model`.
        base: The recipe's folder.
        where: Returns the position of a field below `model`.
    """
    text = str(getattr(source, field))
    path, url = ("", text) if is_address(text) else (str(base / text), "")
    return InputFile(role, path, where(field), url, source.sha256 or "", where("sha256"))


def find_missing_file(field: str, model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the file that a field names, when it is a path that does not exist.

    Args:
        field: The field below `model`.
        model: The value of `model:` as it was read, not validated.
        base: The recipe's folder.
    """
    path = model.get(field)
    if isinstance(path, str) and path and not is_address(path) and not is_file(base / path):
        yield MissingFile((field,), missing_file_text(base / path))


def resolve_single_file(
    file: InputFile, noun: str, source: OneFile, where: Where, sources: SourceFiles
) -> InputFile:
    """Return the resolved file of a model that has no further ones.

    Args:
        file: What `named_file` returned.
        noun: The model, for messages: `a TFLite model`.
        source: The recipe's `model`.
        where: Returns the position of a field below `model`.
        sources: Resolves it.

    Raises:
        RecipeError: when the recipe pins further files, or does not pin this one.
        DownloadError: when something has to be looked up, and cannot be.
    """
    if source.files is not None:
        text = f"model.files: {noun} is one file; its digest is `sha256`"
        raise RecipeError(f"{where('files')}: {text}")
    return sources.resolve(file)


def check_other_kind(start: str, path: Path, expected: FileKind) -> None:
    """Check that a file is not certainly something else than its field says.

    Args:
        start: The beginning of the message, with the file.
        path: The file.
        expected: What the field names.

    Raises:
        RecipeError: when it is.
    """
    kind = recognize(path)
    if kind not in (expected, ZIP, None):
        fix = f"name it with `{kind.field}:`" if kind.field else kind.fix_for(path)
        raise RecipeError(f"{start} {kind.text}", fix=fix)


def shown(file: InputFile) -> str:
    """Return where a file is, for messages."""
    return without_secrets(file.url) if file.url else file.path


def further_file(
    role: str, name: str, model: InputFile, source: SeveralFiles, where: Where
) -> InputFile:
    """Return a file by its path from the folder of a model's file, not resolved yet.

    Args:
        role: The name by which stages read it.
        name: Its path from the folder of the model's file.
        model: The model's file.
        source: The recipe's `model`.
        where: Returns the position of a field below `model`.
    """
    path, url = (
        ("", sibling(model.url, name)) if model.url else (str(Path(model.path).parent / name), "")
    )
    return pinned_by_name(InputFile(role, path, model.where, url), name, source, where)


def pinned_by_name(file: InputFile, name: str, source: SeveralFiles, where: Where) -> InputFile:
    """Return a file with the digest that `files` has for its name."""
    digest = (source.files or {}).get(name, "")
    position = where("files", name) if digest else ""
    return file._replace(sha256=digest, sha256_where=position, sha256_field=f"files.{name}")
