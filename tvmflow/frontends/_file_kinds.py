"""Recognizes the files that people name in place of a model: pickles, TorchScript, weights alone, compiled packages, models of TensorFlow.

Nothing in them is loaded: a pickle is code. Imports no framework.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

PT2_FOLDER: Final = "/models/"
PT2_DOCUMENT: Final = "serialized_exported_program.json"
"""How the graph of a `torch.export` archive is named: `NAME/models/model.json` from PyTorch 2.8 on."""

EXPORT_LINES: Final = (
    "import torch",
    "archive = torch.export.export(model.eval(), (torch.randn(1, 3, 224, 224),))",
    'torch.export.save(archive, "model.pt2")',
)
"""The lines of Python that make an archive of a model."""

_FIX: Final = "\n    ".join(
    (
        "load the model in Python as it was saved, export it, and write `pytorch: model.pt2`:",
        *EXPORT_LINES,
    )
)
_ZIP: Final = b"PK\x03\x04"
# The opcode PROTO of protocol 2 and later, with which torch.save and pickle.dump begin.
_PICKLES: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_HDF5: Final = b"\x89HDF"
_KERAS_WEIGHTS: Final = "model.weights.h5"
_TFLITE: Final = b"TFL3"
_HEAD_BYTES: Final = 16


class FileKind(NamedTuple):
    """A file that is something else than the model it was named as.

    Attributes:
        text: What it is, as the end of a sentence: `is …`.
        fix: The remedy.
    """

    text: str
    fix: str


PT2: Final = FileKind("is an archive of torch.export", "name it with `pytorch:`")
TFLITE: Final = FileKind("is a TFLite model", "name it with `tflite:`")
_KERAS: Final = FileKind(
    "is a Keras model",
    "convert it in Python, and write `tflite: model.tflite`:\n    "
    "converter = tf.lite.TFLiteConverter.from_keras_model(model)\n    "
    'Path("model.tflite").write_bytes(converter.convert())',
)
_PICKLE: Final = FileKind(
    "is a pickle of PyTorch (torch.save), which is code and not a model; it is never loaded", _FIX
)
_TORCHSCRIPT: Final = FileKind(
    "is TorchScript, which has no graph of torch.export",
    _FIX.replace(
        "load the model in Python as it was saved",
        "take the Python model that was traced or scripted",
    ),
)
_WEIGHTS: Final = FileKind(
    "has weights without a network (safetensors)",
    _FIX.replace("as it was saved, export", "with these weights, export"),
)
_COMPILED: Final = FileKind(
    "is a package of AOTInductor: compiled code for one machine, without the graph",
    _FIX.replace(
        "load the model in Python as it was saved", "take the Python model that was compiled"
    ),
)
_DAMAGED: Final = FileKind(
    "is a damaged archive: its list of files, at the end, is missing or wrong",
    "copy or download the file again, and compare its size",
)


def recognize(path: Path) -> FileKind | None:
    """Return what a file is, or None for anything else.

    Raises:
        OSError: when it cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_PICKLES):
        return _PICKLE
    if head[8:10] == b'{"':
        return _WEIGHTS
    if head[4:8] == _TFLITE:
        return TFLITE
    if head.startswith(_HDF5):
        return _KERAS
    return _recognize_zip(path) if head.startswith(_ZIP) else None


def _recognize_zip(path: Path) -> FileKind | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
        return _DAMAGED
    if any(is_graph(name) for name in names):
        return PT2
    if _KERAS_WEIGHTS in names:
        return _KERAS
    if any("data/aotinductor/" in name for name in names):
        return _COMPILED
    if any(name.endswith("/constants.pkl") for name in names):
        return _TORCHSCRIPT
    return _PICKLE if any(name.endswith("/data.pkl") for name in names) else None


def is_graph(name: str) -> bool:
    """Return whether a file of an archive is the graph of a model."""
    return name == PT2_DOCUMENT or (PT2_FOLDER in name and name.endswith(".json"))
