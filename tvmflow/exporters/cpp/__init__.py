"""`cpp`: a folder with the model and a small C++17 interface to it, which CMake builds as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.core.identifiers import identifier
from tvmflow.exporters import _base
from tvmflow.exporters._base import BuiltModel, ExportRequest, PartitionedModel
from tvmflow.runtime.bundles import Bundle, read_bundle
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import cpu_triple

FORM: Final = ""

_PROJECT: Final = Path(__file__).with_name("project")
# The project's files: templates, which name the model, and files that are copied.
_TEMPLATES: Final = ("CMakeLists.txt", "README.md")
_COPIED: Final = ("include/tvmflow/model.hpp", "include/tvmflow/npz.hpp", "main.cpp")
SOURCES: Final = tuple(_PROJECT / name for name in (*_TEMPLATES, *_COPIED))

# The description beside a library, and of a partitioned model in the folder above those of its parts.
_DESCRIPTION: Final = "model.json"
# Its `bundle`, as the header reads it.
_LIBRARY, _PARTITIONED = 1, 2

unsupported_reason = _base.cpu_only_reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the files of the project, in a folder `<name>-cpp`, and of the model in `model/`, a folder for each part."""
    library = (_DESCRIPTION, request.library_name)
    parts = [f"parts/{part.name}/{name}" for part in request.parts for name in library]
    model = (_DESCRIPTION, *parts) if parts else library
    names = (*_TEMPLATES, *_COPIED, *(f"model/{name}" for name in model))
    return tuple(f"{request.name}-cpp/{name}" for name in names)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Write the project; each library, with its manifest and signature in one JSON file."""
    project = folder / f"{built.name}-cpp"
    for name in files(built.request):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(_PROJECT / name, project / name)
    bundle = read_bundle(built.bundle)
    for name in _TEMPLATES:
        (project / name).write_text(_fill_template((_PROJECT / name).read_text(), built, bundle))
    _write_model(bundle, project / "model")


def _write_model(bundle: Bundle, folder: Path) -> None:
    """Write the content of a bundle as files: a library, or each part in a folder of its own."""
    kind = _PARTITIONED if bundle.parts else _LIBRARY
    description = {**bundle.manifest, **bundle.signature, "bundle": kind}
    # sizes and digests of the files in the bundle, which are not those in the folder
    description.pop("files", None)
    if bundle.parts:
        description["parts"] = [{"name": name, "folder": f"parts/{name}"} for name in bundle.parts]
        for name, part in bundle.parts.items():
            _write_model(part, folder / "parts" / name)
    else:
        description["arch"] = parse_triple(cpu_triple(bundle.manifest["target"]["tvm"])).arch
        (folder / bundle.library_name).write_bytes(bundle.library)
    (folder / _DESCRIPTION).write_bytes(_base.json_bytes(description))


def _fill_template(text: str, built: BuiltModel | PartitionedModel, bundle: Bundle) -> str:
    tensors = [
        f"- {verb} `{tensor['name']}`: {tensor['dtype']} {tensor['shape']}"
        for verb, direction in (("takes", "inputs"), ("gives", "outputs"))
        for tensor in built.signature[direction]
    ]
    parts = ", ".join(f"`parts/{name}`" for name in bundle.parts)
    libraries = f"the model's parts, each in a folder that `load` accepts too ({parts})"
    values = {
        "LIBRARIES": libraries if parts else "the library",
        "NAME": built.name,
        "PROJECT": identifier(built.name),
        "TVM": str(built.manifest["tvm"]),
        "TVM_MINOR": ".".join(str(built.manifest["tvm"]).split(".")[:2]),
        "TRIPLE": built.request.triple,
        "TENSORS": "\n".join(tensors),
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
