"""File type detection by content: models, recipes, delivered files, and common mistakes.

Nothing is unpickled, because a pickle runs code. The suffix counts only if the content is ambiguous.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import UsageError
from tvmflow.core.generated_text import shell_word

PT2_FOLDER: Final = "/models/"
PT2_DOCUMENT: Final = "serialized_exported_program.json"
"""Name of the graph in a `torch.export` archive; from PyTorch 2.8 on, it is `NAME/models/model.json`."""

EXPORT_LINES: Final = (
    "import torch",
    "archive = torch.export.export(model.eval(), (torch.randn(1, 3, 224, 224),))",
    'torch.export.save(archive, "model.pt2")',
)
"""Python code that exports a model to an archive."""

MODEL: Final = "a model"
RECIPE: Final = "a recipe"
PIPELINE: Final = "a pipeline"
LOCK: Final = "a lock file"
BUNDLE: Final = "a bundle (.tvmflow)"
DELIVERED: Final = "a delivered file"
TRIALS: Final = "a trial pack"
ARRAYS: Final = "an npz file, numbers as text, or an image"
IMAGES: Final = "an image"
OTHER: Final = "another file"
"""The groups of kinds, as named in messages; each command accepts some of the groups."""


class FileKind(NamedTuple):
    """The kind of a file: a predicate for messages (`is …`) and its group.

    `{path}` in `fix` stands for the path; `field` is the recipe's field below `model` for a model of this kind.
    """

    text: str
    group: str
    fix: str = ""
    field: str = ""

    def fix_for(self, path: object) -> str:
        """Return the remedy for the file at a path."""
        return self.fix.replace("{path}", shell_word(str(path)))


def _export(obtain: str) -> str:
    """Return the fix that exports a Python model as an archive; `obtain` says how to get the model."""
    return "\n    ".join((f"{obtain}, export it, and write `pytorch: model.pt2`:", *EXPORT_LINES))


_BUILD: Final = (
    "build it with `tvmflow build {path}`, or write a recipe for it with `tvmflow init {path}`"
)
_INSPECT: Final = "`tvmflow inspect {path}` shows its provenance"


def _model(text: str, field: str) -> FileKind:
    return FileKind(text, MODEL, _BUILD, field)


def _other(text: str, fix: str) -> FileKind:
    return FileKind(text, OTHER, fix)


ONNX: Final = _model("is an ONNX model", "onnx")
PT2: Final = _model("is an archive of torch.export", "pytorch")
TFLITE: Final = _model("is a TFLite model", "tflite")
MXNET: Final = _model("is the symbol of an MXNet checkpoint", "mxnet")

_RECIPE: Final = FileKind("is a recipe", RECIPE, "`tvmflow run {path}` builds what it describes")
_PIPELINE: Final = FileKind("is a pipeline", PIPELINE, "`tvmflow run {path}` runs it")
_LOCK: Final = FileKind(
    "is a lock file", LOCK, "`tvmflow run RECIPE --locked --lock {path}` builds what it records"
)
_BUNDLE: Final = FileKind("is a bundle", BUNDLE, "`tvmflow run-model {path}` runs it")
_TRIALS: Final = FileKind(
    "is a trial pack", TRIALS, "`tvmflow records import {path}` adds its trials to the store"
)
_STATEMENT: Final = FileKind(
    "is a statement of provenance", DELIVERED, "`tvmflow inspect {path}` shows it"
)
_BOM: Final = FileKind(
    "is a bill of materials", DELIVERED, "`tvmflow inspect {path}` shows what it lists"
)
_WHEEL: Final = FileKind(
    "is a wheel", DELIVERED, "install it with `pip install {path}`, and import the model"
)
_ELF: Final = FileKind("is a shared library or an object file (ELF)", DELIVERED, _INSPECT)
_STATIC: Final = FileKind("is a static library", DELIVERED, _INSPECT)
ZIP: Final = FileKind("is a zip", DELIVERED, _INSPECT)
_GZIP: Final = FileKind(
    "is a compressed archive", DELIVERED, "unpack it, and give the .tvmflow file in it"
)
NPZ: Final = FileKind(
    "has arrays (npz)", ARRAYS, "give it after a bundle: `tvmflow run-model BUNDLE {path}`"
)
_PARAMS: Final = _other(
    "has the weights of an MXNet checkpoint", "name the symbol: PREFIX-symbol.json"
)
_KERAS: Final = _other(
    "is a Keras model",
    "convert it in Python, and write `tflite: model.tflite`:\n    "
    "converter = tf.lite.TFLiteConverter.from_keras_model(model)\n    "
    'Path("model.tflite").write_bytes(converter.convert())',
)
_SAVED_MODEL: Final = _other(
    "is a SavedModel of TensorFlow",
    "convert it, and name the result: `python -m tf2onnx.convert --saved-model FOLDER --output model.onnx`",
)
_PICKLE: Final = _other(
    "is a pickle of PyTorch (torch.save), which is code and not a model; it is never loaded",
    _export("load the model in Python as it was saved"),
)
_TORCHSCRIPT: Final = _other(
    "is TorchScript, which has no graph of torch.export",
    _export("take the Python model that was traced or scripted"),
)
_WEIGHTS: Final = _other(
    "has weights without a network (safetensors)",
    _export("load the model in Python with these weights"),
)
_COMPILED: Final = _other(
    "is a package of AOTInductor: compiled code for one machine, without the graph",
    _export("take the Python model that was compiled"),
)
_DAMAGED: Final = _other(
    "is a damaged archive: its list of files, at the end, is missing or wrong",
    "copy or download the file again, and compare its size",
)
_LFS: Final = _other(
    "is a pointer of Git LFS: the content is not there", "fetch it with `git lfs pull`"
)
_HTML: Final = _other(
    "is a web page", "download the file itself; a page may ask for a login before it"
)
_IMAGE: Final = FileKind(
    "is an image", IMAGES, "give it after a bundle: `tvmflow run-model BUNDLE {path}`"
)

STAND_INS: Final = (_DAMAGED, _LFS, _HTML)
"""Kinds of files that stand in for the real file, which must be downloaded again."""

_HEAD_BYTES: Final = 1 << 16
_ZIP_MAGIC: Final = b"PK\x03\x04"
_BY_START: Final[Mapping[bytes, FileKind]] = {
    # The PROTO opcode of pickle protocols 2 to 5; torch.save and pickle.dump write it first.
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _PICKLE),
    b"\x89HDF": _KERAS,
    b"\x7fELF": _ELF,
    b"MZ": _ELF._replace(text="is a library for Windows"),
    b"\xcf\xfa\xed\xfe": _ELF._replace(text="is a library or an object file for macOS"),
    b"\0asm": _ELF._replace(text="is a library for WebAssembly"),
    b"!<arch>\n": _STATIC,
    b"\x12\x01\0\0\0\0\0\0": _PARAMS,
    b"version https://git-lfs": _LFS,
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff"), _IMAGE),
    # A SavedModel begins with its version, which is 1, and its graph. An ONNX model begins with a higher version.
    b"\x08\x01\x12": _SAVED_MODEL,
}
# Field 1 of an ONNX model is its IR version and is followed by names or the graph.
_ONNX_START: Final = re.compile(rb"\x08[\x02-\x1f][\x12\x1a\x22\x28\x32\x3a\x42\x72]")
_YAML_FIELD: Final = re.compile(rb"^(recipe|pipeline|lock):[ \t]*\d", re.MULTILINE)
_YAML: Final = {b"recipe": _RECIPE, b"pipeline": _PIPELINE, b"lock": _LOCK}
_JSON: Final[Mapping[bytes, FileKind]] = {
    b'"format":"tvmflow records"': _TRIALS,
    b'"payload":': _STATEMENT,
    b'"bomFormat"': _BOM,
}
_SYMBOL_START: Final = re.compile(rb'\{\s*"nodes"\s*:')
_BY_SUFFIX: Final = {".onnx": ONNX, ".pt2": PT2, ".tflite": TFLITE}


def recognize(path: Path) -> FileKind | None:
    """Return the kind of a file, or None for anything else."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_ZIP_MAGIC):
        return _recognize_zip(path)
    if head.startswith(b"\x1f\x8b"):
        return _TRIALS if _recognize_text(_unpack(head)) == _TRIALS else _GZIP
    kind = next((kind for start, kind in _BY_START.items() if head.startswith(start)), None)
    if kind is None and head[8:10] == b'{"':
        return _WEIGHTS
    if head[4:8] == b"TFL3":
        return TFLITE
    if kind is None and _ONNX_START.match(head):
        return ONNX
    return kind or _recognize_text(head) or _BY_SUFFIX.get(path.suffix)


def _unpack(head: bytes) -> bytes:
    """Return the beginning of a gzip file's content; empty for a damaged file."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def _recognize_text(head: bytes) -> FileKind | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"{"):
        if _SYMBOL_START.match(start) and b'"op"' in start:
            return MXNET
        return next((kind for word, kind in _JSON.items() if word in start), None)
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        return _HTML
    field = _YAML_FIELD.search(start)
    return _YAML[field[1]] if field else None


def _recognize_zip(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return _DAMAGED
    return next((kind for kind, holds in _ZIPS.items() if holds(names)), ZIP)


def is_graph(name: str) -> bool:
    """Return whether a file of an archive is the graph of a model."""
    return name == PT2_DOCUMENT or (PT2_FOLDER in name and name.endswith(".json"))


def _has_end(end: str) -> Callable[[list[str]], bool]:
    return lambda names: any(name.endswith(end) for name in names)


_ZIPS: Final[Mapping[FileKind, Callable[[list[str]], bool]]] = {
    PT2: lambda names: any(map(is_graph, names)),
    _KERAS: lambda names: "model.weights.h5" in names,
    _COMPILED: lambda names: any("data/aotinductor/" in name for name in names),
    _TORCHSCRIPT: _has_end("/constants.pkl"),
    _PICKLE: _has_end("/data.pkl"),
    _BUNDLE: lambda names: {"manifest.json", "signature.json"} <= {*names},
    _WHEEL: _has_end(".dist-info/WHEEL"),
    NPZ: lambda names: bool(names) and all(name.endswith(".npy") for name in names),
}


class Mismatch(NamedTuple):
    """The message and the fix for a file whose kind a command does not accept."""

    text: str
    fix: str


def find_mismatch(path: Path, *groups: str) -> Mismatch | None:
    """Return the mismatch if a file's kind is known and in none of `groups`; the file may be missing."""
    try:
        kind = recognize(path) if path.is_file() else None
    except (OSError, ValueError):
        return None
    if kind is None or kind.group in groups:
        return None
    text = f"{path} {kind.text}; {groups[0]} is expected here"
    return Mismatch(text, kind.fix_for(path))


def check_kind(path: Path, *groups: str) -> None:
    """Raise UsageError if a file's kind is known and in none of `groups`."""
    if mismatch := find_mismatch(path, *groups):
        raise UsageError(mismatch.text, fix=mismatch.fix)
