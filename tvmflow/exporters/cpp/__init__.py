"""`cpp`: a folder with the model and a small C++17 interface to it, which CMake builds as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.bundles import Unpacked, unpack
from tvmflow.exporters._base import Asked, Built, Joined, cpu_only, identifier, json_bytes
from tvmflow.targets.platforms import host_triple, platform_of

FORM: Final = ""

_PROJECT: Final = Path(__file__).with_name("project")
# The project's files. Those that name the model are written for it, the others copied.
_WRITTEN: Final = ("CMakeLists.txt", "README.md")
_COPIED: Final = ("include/tvmflow/model.hpp", "include/tvmflow/npz.hpp", "main.cpp")
SOURCES: Final = tuple(_PROJECT / name for name in (*_WRITTEN, *_COPIED))

# What stands beside a library, and in the folder of a model in parts above those of its parts.
_DESCRIPTION: Final = "model.json"

why_not = cpu_only


def files(asked: Asked) -> tuple[str, ...]:
    """The project in a folder `<name>-cpp`, and the model in one below it, with a folder for each of its parts."""
    library = (_DESCRIPTION, f"library{asked.platform.shared_suffix}")
    model = [f"{_folder(part.name)}/{name}" for part in asked.parts for name in library]
    model = [_DESCRIPTION, *model] if model else [*library]
    names = (*_WRITTEN, *_COPIED, *(f"model/{name}" for name in model))
    return tuple(f"{asked.name}-cpp/{name}" for name in names)


def _folder(part: str) -> str:
    return f"parts/{part}"


def export(built: Built | Joined, folder: Path) -> None:
    """The project's files; each library, with its manifest and signature in one JSON file."""
    below = folder / f"{built.name}-cpp"
    for name in files(built.asked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(_PROJECT / name, below / name)
    found = unpack(built.bundle)
    for name in _WRITTEN:
        (below / name).write_text(_filled((_PROJECT / name).read_text(), built, found))
    _write_model(found, below / "model")


def _write_model(found: Unpacked, folder: Path) -> None:
    """What is in a bundle, as files: a library, or each part in a folder of its own."""
    described = {**found.manifest, **found.signature}
    if found.parts:
        described["parts"] = [{"name": name, "folder": _folder(name)} for name in found.parts]
        for name, part in found.parts.items():
            _write_model(part, folder / _folder(name))
    else:
        described["arch"] = platform_of(host_triple(found.manifest["target"]["tvm"])).arch
        (folder / found.manifest["library"]).write_bytes(found.library)
    (folder / _DESCRIPTION).write_bytes(json_bytes(described))


def _filled(text: str, built: Built | Joined, found: Unpacked) -> str:
    tensors = [
        f"- {verb} `{each['name']}`: {each['dtype']} {each['shape']}"
        for verb, part in (("takes", "inputs"), ("gives", "outputs"))
        for each in built.signature[part]
    ]
    parts = ", ".join(f"`{_folder(name)}`" for name in found.parts)
    libraries = f"the model's parts, each in a folder that `load` takes too ({parts})"
    words = {
        "LIBRARIES": libraries if parts else "the library",
        "NAME": built.name,
        "PROJECT": identifier(built.name),
        "TVM": str(built.manifest["tvm"]),
        "TVM_MINOR": ".".join(str(built.manifest["tvm"]).split(".")[:2]),
        "TRIPLE": built.asked.triple,
        "TENSORS": "\n".join(tensors),
    }
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text
