"""`cpp`: a folder with the model and a small C++17 interface to it, which CMake builds as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.exporters._base import Asked, Built, cpu_only, identifier, json_bytes

FORM: Final = ""

_PROJECT: Final = Path(__file__).with_name("project")
# The project's files. Those that name the model are written for it, the others copied.
_WRITTEN: Final = ("CMakeLists.txt", "README.md")
_COPIED: Final = ("include/tvmflow/model.hpp", "include/tvmflow/npz.hpp", "main.cpp")
SOURCES: Final = tuple(_PROJECT / name for name in (*_WRITTEN, *_COPIED))

why_not = cpu_only


def files(asked: Asked) -> tuple[str, ...]:
    """The project in a folder `<name>-cpp`, and the model in one below it."""
    model = ("model/model.json", f"model/library{asked.platform.shared_suffix}")
    return tuple(f"{asked.name}-cpp/{name}" for name in (*_WRITTEN, *_COPIED, *model))


def export(built: Built, folder: Path) -> None:
    """The project's files, the library, and its manifest and signature in one JSON file."""
    below = folder / f"{built.name}-cpp"
    for name in files(built.asked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(_PROJECT / name, below / name)
    for name in _WRITTEN:
        (below / name).write_text(_filled((_PROJECT / name).read_text(), built))
    library = f"library{built.asked.platform.shared_suffix}"
    shutil.copyfile(built.library, below / "model" / library)
    described = {**built.manifest, "arch": built.asked.platform.arch, **built.signature}
    (below / "model" / "model.json").write_bytes(json_bytes(described))


def _filled(text: str, built: Built) -> str:
    tensors = [
        f"- {verb} `{each['name']}`: {each['dtype']} {each['shape']}"
        for verb, part in (("takes", "inputs"), ("gives", "outputs"))
        for each in built.signature[part]
    ]
    words = {
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
