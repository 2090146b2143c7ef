"""Images and labels of a model in C: one header, which C libraries and C++ projects have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.core.generated_text import c_string
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.images import LEVELS, Preprocessing, read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.targets.c_runtime import DescribedModel, dimensions

SOURCES: Final = (Path(__file__).with_name("images.h"),)
# The types of C for values whose type is not NumPy's with `_t`. Values of float16 are their bits.
_TYPES: Final[Mapping[str, str]] = {
    "float32": "float",
    "float64": "double",
    "float16": "uint16_t",
}


def header_name(name: str) -> str:
    """Return the name of the header of a model.

    >>> header_name("digits")
    'digits-images.h'
    """
    return f"{name}-images.h"


def write_header(model: DescribedModel, manifest: Mapping[str, Json]) -> str:
    """Return the header of the images of a model, by the manifest of its bundle."""
    entries = read_images(model, manifest)
    labels = read_labels(manifest)
    names = labels.names if labels else ()
    place, entry = next(iter(entries.items()))
    name = model.prefix.upper()
    values = {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": name,
        "TYPE": _type_of(entry),
        "COUNT": str(math.prod(entry.input.shape)),
        "PLACE": str(place),
        "TABLES": "\n".join(_write_table(model.prefix, i, entry) for i, entry in entries.items()),
        "PREPROCESSINGS": ",\n".join(_write_entries(model, entries)),
        "LABEL_COUNT": str(len(names)),
        "LABELS": "".join(f"{c_string(name)}, " for name in names),
    }
    template = SOURCES[0].read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def read_images(model: DescribedModel, manifest: Mapping[str, Json]) -> Mapping[int, Preprocessing]:
    """Return the preprocessing of each input that takes images, by its place among the inputs."""
    inputs = [TensorSpec.from_json(tensor) for tensor in model.signature["inputs"]]
    entries = read_preprocessing(manifest, inputs)
    return {i: entries[spec.name] for i, spec in enumerate(inputs) if spec.name in entries}


def _type_of(entry: Preprocessing) -> str:
    return _TYPES.get(entry.input.dtype, f"{entry.input.dtype}_t")


def _write_table(prefix: str, place: int, entry: Preprocessing) -> str:
    table = entry.table()
    values = table.view("uint16") if entry.input.dtype == "float16" else table
    rows = ",\n".join("  {" + ", ".join(map(_literal, row)) + "}" for row in values)
    kind, name = _type_of(entry), f"{prefix}_levels{place}_"
    return f"static const {kind} {name}[{len(values)}][{LEVELS}] = {{\n{rows}}};"


def _literal(value: Any) -> str:
    """Return a number of NumPy as one of C with exactly this value."""
    kind = value.dtype.kind
    if kind == "f":
        return float(value).hex() + ("f" if value.dtype.itemsize == 4 else "")
    return f"{value}{'u' if kind == 'u' else ''}"


def _write_entries(model: DescribedModel, entries: Mapping[int, Preprocessing]) -> Iterator[str]:
    for place, entry in entries.items():
        height, width = entry.resize if isinstance(entry.resize, tuple) else (entry.resize or 0, 0)
        table = f"{model.prefix}_levels{place}_"
        fields = (
            place,
            dimensions.describe_shape(model.signature["inputs"][place])[0],
            *(*entry.size, entry.channels, height, width),
            -1 if entry.pad is None else entry.pad,
            int(entry.interpolation == "bicubic"),
            int(entry.colour == "BGR"),
            int(entry.layout == "NHWC"),
            f"sizeof **{table}",
            table,
        )
        yield f"    {{{', '.join(map(str, fields))}}}"
