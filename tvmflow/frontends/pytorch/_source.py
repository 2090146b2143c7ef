"""The field of a recipe that names a `torch.export` archive, and what its archive tells of the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.types import InputFile, Json, TensorSpec
from tvmflow.frontends._base import InputProblem, MissingFile, SourceFields, Where
from tvmflow.frontends._file_kinds import PT2, recognize
from tvmflow.frontends.onnx._inputs import find_input_problems as compare_inputs
from tvmflow.frontends.pytorch._archive import (
    Archive,
    NotAnArchive,
    find_size_problem,
    read_archive,
)

MODEL: Final = "model"
"""The role of the archive."""


class PytorchSource(SourceFields):
    """The field of a PyTorch model."""

    pytorch: str | None = Field(
        default=None,
        min_length=1,
        examples=["models/resnet18.pt2"],
        description="An archive of `torch.export.save` (`.pt2`): a path from the recipe's folder.",
    )


def find_missing_files(model: Mapping[str, Json], base: Path) -> Iterator[MissingFile]:
    """Give the archive when it does not exist."""
    path = model.get("pytorch")
    if isinstance(path, str) and path and not is_file(base / path):
        yield MissingFile(("pytorch",), missing_file_text(base / path))


def list_files(source: PytorchSource, base: Path, where: Where) -> tuple[InputFile, ...]:
    """Return the archive.

    Raises:
        RecipeError: when the file is something else, or holds what cannot be imported.
    """
    assert source.pytorch is not None
    path, position = base / source.pytorch, where("pytorch")
    try:
        kind = recognize(path)
        if kind not in (PT2, None):
            text = f"{position}: model.pytorch: {path} {kind.text}"
            raise RecipeError(text, fix=kind.fix)
        read_archive(path)
    except NotAnArchive as error:
        text = f"{position}: model.pytorch: {path} cannot be imported: {error}"
        raise RecipeError(text) from None
    except OSError as error:
        raise RecipeError(f"{position}: model.pytorch: {path}: {error.strerror}") from None
    return (InputFile(MODEL, str(path), position),)


def find_input_problems(
    files: Sequence[InputFile], inputs: Sequence[TensorSpec]
) -> Iterator[InputProblem]:
    """Give the inputs that do not fit the archive: names, dtypes, ranks, sizes."""
    for file in files:
        if file.role == MODEL and file.path:
            archive = read_archive(Path(file.path))
            problems = list(compare_inputs(archive.inputs, inputs))
            yield from problems or _find_size_problems(archive, inputs)


def _find_size_problems(archive: Archive, inputs: Sequence[TensorSpec]) -> Iterator[InputProblem]:
    """Give the free dimensions whose sizes the model was not exported for, or that differ between inputs."""
    sizes: dict[str, tuple[str, int]] = {}
    shapes = {spec.name: spec.shape for spec in inputs}
    for value in archive.inputs:
        for axis, size in enumerate(shapes.get(value.name, ())):
            dim = (value.dims or ())[axis]
            if not isinstance(dim, str):
                continue
            name = f"dimension {axis} ({quoted(dim)}) of input {quoted(value.name)}"
            other, same = sizes.setdefault(dim, (value.name, size))
            if same != size:
                text = f"{name} is {size}, and that of input {quoted(other)} is {same}: they are one dimension"
                yield InputProblem(value.name, "shape", text)
            elif limit := find_size_problem(archive, dim, size):
                text = f"{name} is {size}, and the model was exported for a size that {limit}"
                yield InputProblem(value.name, "shape", text)
