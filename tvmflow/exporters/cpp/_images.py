"""Images in a C++ project: the header of preprocessing and labels, and the text about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tvmflow.core.generated_text import c_string
from tvmflow.core.types import Json, TensorSpec
from tvmflow.exporters.cpp import _header
from tvmflow.runtime.images import LEVELS, Preprocessing, read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.targets.c_runtime import DescribedModel

TEMPLATES: Final = ("image.cpp",)
COPIED: Final = ("image_file.hpp",)
HEADER: Final = "images.hpp"

_README: Final = """
## Images

`include/{title}-images.hpp` makes inputs of pixels of 8 bits, with the sizes, colours and numbers that the recipe describes: the bits are those of `tvmflow.load`. It also has the names of the classes.

```cpp
#include <{title}-images.hpp>

{namespace}::Model model;
{namespace}::preprocess({{pixels, height, width, 3}}, {name}, model.input<{kind}>({name}));
model.run();
```

`{namespace}::rank(scores)` returns the best classes with their probabilities, `{namespace}::labels()` their names. `build/{prefix}_image IMAGE` prints them for a file; with `output.npz` it writes the outputs. `image_file.hpp` reads PNG, PGM and PPM with 8 bits for a channel, and no EXIF data.
"""
_CMAKE: Final = """
  add_executable({prefix}_image image.cpp)
  target_link_libraries({prefix}_image PRIVATE {title}::{title})"""


def write_header(model: DescribedModel, manifest: Mapping[str, Json]) -> str:
    """Return the header of the images of a model, by the manifest of its bundle."""
    labels = read_labels(manifest)
    names = labels.names if labels else ()
    entries = _read(model, manifest)
    values = {
        "TITLE": model.name,
        "NAME": model.prefix.upper(),
        "NAMESPACE": _header.namespace(model.prefix),
        "TABLES": "\n".join(_write_table(i, entry) for i, entry in enumerate(entries)),
        "COUNT": str(len(entries)),
        "PREPROCESSINGS": ", ".join(_write_entry(i, entry) for i, entry in enumerate(entries)),
        "LABEL_COUNT": str(len(names)),
        "LABELS": "{" + ", ".join(map(c_string, names)) + "}",
        "ARE_PROBABILITIES": "true" if labels and labels.activation else "false",
    }
    return _header.render_template(HEADER, values, has_dimensions=bool(model.dimensions))


def describe(model: DescribedModel, manifest: Mapping[str, Json]) -> dict[str, str]:
    """Return the values of a project's templates that are about images; empty texts where there are none."""
    entries = _read(model, manifest)
    if not entries:
        return {"IMAGES_README": "", "IMAGES_CMAKE": ""}
    spec = entries[0].input
    fields = {
        "title": model.name,
        "prefix": model.prefix,
        "namespace": _header.namespace(model.prefix),
        "name": c_string(spec.name),
        "kind": _header.type_of(spec.dtype),
    }
    return {"IMAGES_README": _README.format(**fields), "IMAGES_CMAKE": _CMAKE.format(**fields)}


def _read(model: DescribedModel, manifest: Mapping[str, Json]) -> list[Preprocessing]:
    inputs = [TensorSpec.from_json(tensor) for tensor in model.signature["inputs"]]
    return list(read_preprocessing(manifest, inputs).values())


def _write_table(place: int, entry: Preprocessing) -> str:
    table = entry.table()
    kind = _header.type_of(entry.input.dtype)
    values = table.view("uint16") if entry.input.dtype == "float16" else table
    rows = ",\n".join("  {" + ", ".join(map(_literal, row)) + "}" for row in values)
    return f"inline constexpr {kind} levels{place}[{len(values)}][{LEVELS}] = {{\n{rows}}};"


def _literal(value: Any) -> str:
    """Return a number of NumPy as one of C++ with exactly this value."""
    kind = value.dtype.kind
    if kind == "f":
        return float(value).hex() + ("f" if value.dtype.itemsize == 4 else "")
    return f"{value}{'u' if kind == 'u' else ''}"


def _write_entry(place: int, entry: Preprocessing) -> str:
    height, width = entry.resize if isinstance(entry.resize, tuple) else (entry.resize or 0, 0)
    flags = (
        entry.interpolation == "bicubic",
        entry.colour == "BGR",
        entry.layout == "NHWC",
    )
    fields = [
        c_string(entry.input.name),
        *map(str, (*entry.size, entry.channels, height, width)),
        str(-1 if entry.pad is None else entry.pad),
        *("true" if flag else "false" for flag in flags),
        f"levels{place}",
    ]
    return "{" + ", ".join(fields) + "}"
