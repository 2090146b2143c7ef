"""`verify.data` as images: a folder of images or with one folder per class, or a table `file,label`."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.formatting import count_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.runtime.image_files import SUFFIXES

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

DATA: Final = "data"
"""The role of `verify.data`; that of an image is `data/<file>`."""

_COLUMNS: Final = ["file", "label"]
# How many classes without an index a message names.
_SHOWN: Final = 10
_MAX_DIGITS: Final = 9


class ImageList(NamedTuple):
    """Images with their classes.

    Attributes:
        files: The path of each image in the folder of the data, with slashes.
        classes: The name of each image's class, or its index; empty where images have no classes.
    """

    files: tuple[str, ...]
    classes: tuple[str, ...]

    def find_indices(self, labels: Sequence[str]) -> Array | None:
        """Return the index of each image's class, or None.

        Args:
            labels: The names of all classes; without them, classes are indices.

        Raises:
            ValueError: with each class that no label names.
        """
        import numpy as np

        if not self.classes:
            return None
        counts = Counter(labels)
        wrong = [name for name in dict.fromkeys(self.classes) if not _has_index(name, counts)]
        if wrong:
            problems = [_mismatch(name, labels) for name in wrong[:_SHOWN]]
            if more := len(wrong) - _SHOWN:
                problems += [f"and {count_text(more, 'class', 'classes')} more"] if more > 0 else []
            raise ValueError("; ".join(problems))
        indices = {name: index for index, name in enumerate(labels)}
        return np.array([indices[name] if labels else int(name) for name in self.classes])


def _has_index(name: str, counts: Counter[str]) -> bool:
    """Return whether a class is the name of one label, or the index of a class where there are no labels."""
    is_index = name.isdecimal() and len(name) <= _MAX_DIGITS
    return counts[name] == 1 if counts else is_index


def _mismatch(name: str, labels: Sequence[str]) -> str:
    """Return why a class has no index."""
    shown = quoted(name)
    if not labels:
        return f"the class {shown} is not an index, and there are no labels"
    count = labels.count(name)
    if count > 1:
        return f"the class {shown} is the name of {count} labels"
    return f"no label names the class {shown}{did_you_mean(name, labels)}"


def is_image_data(data: str, path: Path) -> bool:
    """Return whether `verify.data`, which is at a path, names images."""
    return is_table(data) or path.is_dir()


def is_table(data: str) -> bool:
    """Return whether `verify.data` names a table."""
    return PurePosixPath(data).suffix.lower() == ".csv"


def list_folder(folder: Path) -> tuple[ImageList, list[Path]]:
    """Return the images below a folder, and all folders that were read; skips hidden files and non-images.

    Raises:
        ValueError: when there is none, or when only some are in the folder of a class.
    """
    files, folders = [], []
    seen = {_identity(folder)}
    for parent, names, inner in os.walk(folder, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith("."))
        identities = {name: _identity(Path(parent, name)) for name in names}
        # a link to a folder above would be followed for ever
        names[:] = [name for name in names if identities[name] not in seen]
        seen.update(identities.values())
        folders.append(Path(parent))
        for name in inner:
            if PurePosixPath(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                files.append(Path(parent, name).relative_to(folder).as_posix())
    if not files:
        raise ValueError(f"has no images ({', '.join(sorted(SUFFIXES))})")
    return list_files(files), folders


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def list_files(files: Sequence[str]) -> ImageList:
    """Return images by their paths in a folder, of which the first part is the class.

    Raises:
        ValueError: when only some are in the folder of a class.
    """
    ordered = tuple(sorted(files))
    classes = tuple(file.partition("/")[0] for file in ordered if "/" in file)
    if classes and len(classes) < len(ordered):
        outside = next(file for file in ordered if "/" not in file)
        raise ValueError(f"has folders of classes, and '{outside}' is in none")
    return ImageList(ordered, classes)


def read_table(path: Path) -> ImageList:
    """Return the images in a table with the columns `file` and `label`.

    Raises:
        ValueError: when it is no such table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.reader(stream))
    except UnicodeDecodeError:
        raise ValueError("is not a table: it is not text in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"is not a table: {error}") from None
    if not rows or [name.strip() for name in rows[0]] != _COLUMNS:
        raise ValueError(f"must begin with the line {','.join(_COLUMNS)}")
    images = [[cell.strip() for cell in row] for row in rows[1:] if row]
    wrong = [number for number, row in enumerate(images, 2) if len(row) != 2 or not all(row)]
    if wrong:
        raise ValueError(f"line {wrong[0]} is not file,label")
    if not images:
        raise ValueError("has no images")
    return ImageList(tuple(row[0] for row in images), tuple(row[1] for row in images))
