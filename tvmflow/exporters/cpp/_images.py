"""Images in a C++ project: the header of preprocessing and labels, and the text about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.core.generated_text import c_string
from tvmflow.core.types import Json
from tvmflow.exporters import c_images
from tvmflow.exporters.cpp import _header
from tvmflow.runtime.labels import read_labels
from tvmflow.targets.c_runtime import DescribedModel

TEMPLATES: Final = ("image.cpp",)
COPIED: Final = ("image_file.hpp",)
HEADER: Final = "images.hpp"

_README: Final = """
## Images

`include/{title}-images.hpp` makes inputs of pixels of 8 bits, with the sizes, colours and numbers that the recipe describes: the bits are those of `tvmflow.load`. It also has the names of the classes, and calls `{title}-images.h`, which does the same for C.

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
    """Return the header of C++ over that in C, by the manifest of the bundle."""
    labels = read_labels(manifest)
    values = {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": model.prefix.upper(),
        "NAMESPACE": _header.namespace(model.prefix),
        "ARE_PROBABILITIES": "true" if labels and labels.activation else "false",
    }
    return _header.render_template(HEADER, values, has_dimensions=bool(model.dimensions))


def describe(model: DescribedModel, manifest: Mapping[str, Json]) -> dict[str, str]:
    """Return the values of a project's templates that are about images; empty texts where there are none."""
    entries = c_images.read_images(model, manifest)
    if not entries:
        return {"IMAGES_README": "", "IMAGES_CMAKE": ""}
    spec = next(iter(entries.values())).input
    fields = {
        "title": model.name,
        "prefix": model.prefix,
        "namespace": _header.namespace(model.prefix),
        "name": c_string(spec.name),
        "kind": _header.type_of(spec.dtype),
    }
    return {"IMAGES_README": _README.format(**fields), "IMAGES_CMAKE": _CMAKE.format(**fields)}
