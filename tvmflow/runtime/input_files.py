"""Inputs for a model from a user's files: NumPy arrays, numbers as text, or images."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from tvmflow.core.dimensions import is_name
from tvmflow.core.errors import BundleError, StageError, UsageError
from tvmflow.core.formatting import count_text, names_text, quoted
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.core.types import Array, Dimension, TensorSpec
from tvmflow.runtime.image_files import SUFFIXES, read_files
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.npz import read_npz
from tvmflow.runtime.samples import Samples, image_samples, make_samples

STDIN: Final = "-"
_NPZ_MAGIC: Final = b"PK"
_NPY_MAGIC: Final = b"\x93NUMPY"


class InputFile(NamedTuple):
    """A file with inputs; `name` is the input that it is for, empty if the user named none."""

    path: str
    name: str = ""

    @property
    def shown(self) -> str:
        """The file's name in messages."""
        return "the standard input" if self.path == STDIN else self.path

    @property
    def is_image(self) -> bool:
        """True if the suffix of its name is that of an image."""
        return PurePath(self.path).suffix.lower() in SUFFIXES


def parse_input(word: str, names: Iterable[str]) -> InputFile:
    """Parse `FILE` or `NAME=FILE`; a file's name may contain `=` if no input is named by what precedes it."""
    name, _, path = word.partition("=")
    return InputFile(path, name) if path and name in names else InputFile(word)


def read_inputs(
    inputs: Sequence[TensorSpec],
    images: Mapping[str, Preprocessing],
    files: Sequence[InputFile],
    dimensions: Sequence[Dimension] = (),
) -> Samples:
    """Return the inputs in files, divided into batches.

    An npz file has an array for each input, by name. Any other file is for one input: an npy file, a text file of
    numbers, or an image, which the model's preprocessing converts. Several images are the samples of one input.

    Raises:
        UsageError: when a file is missing, cannot be read, or does not fit.
        EnvironmentProblem: when Pillow is needed and not installed.
    """
    missing = [file for file in files if file.path != STDIN and not is_file(Path(file.path))]
    if missing:
        raise UsageError("; ".join(missing_file_text(Path(file.path)) for file in missing))
    if sum(file.path == STDIN for file in files) > 1:
        raise UsageError(f"the standard input ({STDIN}) is named more than once")
    pictures: dict[str, list[str]] = {}
    arrays: dict[str, Array] = {}
    for file in files:
        if file.is_image:
            pictures.setdefault(_image_input(file, images), []).append(file.path)
        else:
            _add_arrays(arrays, file, inputs)
    if repeated := pictures.keys() & arrays.keys():
        raise UsageError(f"images and an array are given for the input {quoted(min(repeated))}")
    try:
        if pictures and len(inputs) == 1:
            (preprocessing,) = images.values()
            paths = pictures[preprocessing.input.name]
            return image_samples(preprocessing, read_files(paths, preprocessing.fit))
        for name, paths in pictures.items():
            arrays[name] = images[name].tensor(read_files(paths, images[name].fit))
        source = " and ".join(dict.fromkeys(file.shown for file in files))
        return make_samples(inputs, arrays, source=source, dimensions=dimensions)
    except (BundleError, StageError) as error:
        raise UsageError(error.message, fix=error.fix) from error


def _image_input(file: InputFile, images: Mapping[str, Preprocessing]) -> str:
    if file.name in images:
        return file.name
    if file.name or not images:
        which = f"the input {quoted(file.name)}" if file.name else "no input of this model"
        verb = "does not take images" if file.name else "takes images"
        raise UsageError(
            f"{file.shown} is an image, and {which} {verb}",
            fix="describe its preprocessing in the recipe (`inputs: {NAME: {image: …}}`), or give an npy file",
        )
    if len(images) > 1:
        raise _ambiguous(file, images)
    return next(iter(images))


def _add_arrays(arrays: dict[str, Array], file: InputFile, inputs: Sequence[TensorSpec]) -> None:
    content = _read(file)
    if content.startswith(_NPZ_MAGIC):
        added = _read_npz(content, file)
    else:
        name = file.name or (inputs[0].name if len(inputs) == 1 else "")
        if not name:
            raise _ambiguous(file, [spec.name for spec in inputs])
        spec = next(spec for spec in inputs if spec.name == name)
        is_array = content.startswith(_NPY_MAGIC)
        added = {name: _read_npy(content, file) if is_array else _read_text(content, file, spec)}
    if repeated := arrays.keys() & added.keys():
        raise UsageError(f"the input {quoted(min(repeated))} is given more than once")
    arrays |= added


def _read(file: InputFile) -> bytes:
    if file.path == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(file.path).read_bytes()
    except OSError as error:
        raise UsageError(f"{file.path} cannot be read: {error.strerror}") from error


def _read_npz(content: bytes, file: InputFile) -> dict[str, Array]:
    try:
        arrays = read_npz(io.BytesIO(content), file.shown)
    except StageError as error:
        raise UsageError(error.message, fix=error.fix) from error
    if not file.name:
        return arrays
    if file.name not in arrays and len(arrays) != 1:
        raise UsageError(
            f"{file.shown} has no array '{file.name}' (it has {names_text(sorted(arrays))})"
        )
    return {file.name: arrays.get(file.name, next(iter(arrays.values())))}


def _read_npy(content: bytes, file: InputFile) -> Array:
    import numpy as np

    try:
        array: Array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:
        raise UsageError(
            f"{file.shown} is not an npy file of a plain array: {error}",
            fix="write it with numpy.save(path, array)",
        ) from error
    return array


def _read_text(content: bytes, file: InputFile, spec: TensorSpec) -> Array:
    """Parse numbers separated by spaces, commas, semicolons or newlines; return them in the input's shape."""
    import numpy as np

    try:
        text = content.decode()
        lines = (line.partition("#")[0] for line in text.splitlines())
        words = " ".join(lines).replace(",", " ").replace(";", " ").split()
        kind = float if np.dtype(spec.dtype).kind == "f" else int
        values = np.array([kind(word) for word in words])
    except ValueError as error:
        numbers = "numbers" if np.dtype(spec.dtype).kind == "f" else "whole numbers"
        raise UsageError(
            f"{file.shown} is neither an npz nor an npy file, nor an image, nor {numbers} as text: "
            + str(error).partition("\n")[0],
            fix=f"write an array with numpy.save(path, array); this input is {spec.dtype}{list(spec.shape)}",
        ) from error
    shape = _find_text_shape(spec, values.size, file) if spec.sizes else spec.shape
    if values.size != math.prod(shape) and (
        not shape or not values.size or values.size % max(math.prod(shape[1:]), 1)
    ):
        raise UsageError(
            f"{file.shown} has {count_text(values.size, 'number')}, "
            f"and the input {quoted(spec.name)} takes {list(shape)}"
        )
    if values.size:
        values = _cast(values, spec, file)
    return values.reshape((-1, *shape[1:]) if shape else ())


def _find_text_shape(spec: TensorSpec, count: int, file: InputFile) -> tuple[int, ...]:
    """Return the shape of an input with `count` elements; UsageError if more than one size is dynamic."""
    fixed = math.prod(size for size in spec.sizes if isinstance(size, int))
    names = [size for size in spec.sizes if isinstance(size, str)]
    if len(names) > 1 or not all(map(is_name, names)):
        raise UsageError(
            f"{file.shown} is numbers as text, which do not determine the sizes of {names_text(names)}",
            fix="write an array with numpy.save(path, array)",
        )
    return tuple(size if isinstance(size, int) else count // fixed for size in spec.sizes)


def _cast(values: Array, spec: TensorSpec, file: InputFile) -> Array:
    """Cast values to the dtype of an input; UsageError if it cannot represent them."""
    import numpy as np

    with np.errstate(over="ignore"):
        cast = values.astype(spec.dtype)
    is_float = np.dtype(spec.dtype).kind == "f"
    lost = np.isinf(cast) & ~np.isinf(values) if is_float else cast != values
    if lost.any():
        raise UsageError(f"{file.shown} has {values[lost][0]}, which {spec.dtype} cannot hold")
    return cast


def _ambiguous(file: InputFile, names: Iterable[str]) -> UsageError:
    first, *_ = listed = list(names)
    return UsageError(
        f"{file.shown}: the model has several inputs: {names_text(listed)}",
        fix=f"name the one that it is for: {first}={file.path}",
    )
