"""The fields of a recipe that name a `torch.export` archive, and what its archive tells of the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import ImportFailed, RecipeError
from tvmflow.core.file_kinds import PT2
from tvmflow.core.types import InputFile, Json
from tvmflow.frontends._file_source import (
    NamedFile,
    OneFile,
    check_other_kind,
    find_missing_file,
    named_file,
    resolve_single_file,
    shown,
)
from tvmflow.frontends._reading import NotAModel, read_in_worker
from tvmflow.frontends.base import MissingFile, ModelFacts, ModelInput, SourceFields, Where
from tvmflow.frontends.pytorch._archive import Archive, read_archive
from tvmflow.store.source_files import SourceFiles

MODEL: Final = "model"
"""The role of the archive."""


class PytorchSource(OneFile):
    """The fields of a PyTorch model."""

    pytorch: NamedFile | None = Field(
        default=None,
        examples=["models/resnet18.pt2"],
        description="An archive of `torch.export.save` (`.pt2`): a path from the recipe's folder, or an address: see "
        "[sources.md](sources.md).",
    )


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the archive when it is a path that does not exist."""
    return find_missing_file("pytorch", model, base)


def files(
    source: SourceFields, base: Path, where: Where, sources: SourceFiles
) -> tuple[InputFile, ...]:
    """Return the archive.

    Raises:
        RecipeError: when the file is something else, or holds what cannot be imported.
        DownloadError: when something has to be looked up, and cannot be.
    """
    assert isinstance(source, PytorchSource)
    named = named_file(MODEL, "pytorch", source, base, where)
    file = resolve_single_file(named, "a PyTorch archive", source, where, sources)
    start = f"{file.where}: model.pytorch"
    try:
        if file.path:
            check_other_kind(f"{start}: {shown(file)}", Path(file.path), PT2)
            _read_facts(Path(file.path))
    except NotAModel as error:
        raise RecipeError(f"{start}: {shown(file)} cannot be imported: {error}") from None
    except OSError as error:
        raise unreadable(f"{start}: {file.path}", error) from error
    return (file,)


def read_inputs(files: Mapping[str, Path]) -> Sequence[ModelInput]:
    """Return the inputs of the archive.

    Raises:
        ImportFailed: when the file is no archive that can be imported.
    """
    with _explained():
        return _read_facts(files[MODEL]).inputs


def read_outputs(files: Mapping[str, Path]) -> Sequence[str]:
    """Return the names of the outputs of the archive; errors are those of `read_inputs`."""
    with _explained():
        return _read_facts(files[MODEL]).outputs


def read_facts(path: Path) -> ModelFacts:
    """Return what planning needs of an archive.

    Raises:
        NotAModel: when it is none that can be imported.
    """
    archive = read_archive(path)
    return ModelFacts(archive.inputs, outputs=archive.outputs)


_read_facts = read_in_worker(read_facts)


def read_importable(path: Path) -> Archive:
    """Return the facts of an archive.

    Raises:
        ImportFailed: when it is none that can be imported.
    """
    with _explained():
        return read_archive(path)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise ImportFailed where a file is no archive that can be imported."""
    try:
        yield
    except NotAModel as error:
        raise ImportFailed(f"the PyTorch archive cannot be imported: {error}") from error
