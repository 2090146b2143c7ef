"""Damaged bundles: `tvmflow.load` refuses them, or the library computes what it computed before."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import numpy as np

import tvmflow
from tests.fuzz.formats import released
from tests.fuzz.formats.cases import Case, expecting_refusals
from tests.support.mutations import mutate_bytes

INPUTS = {"data": np.linspace(-1, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)}
_EXPECTED: list[np.ndarray] = []  # type: ignore[type-arg]


def prepare(folder: Path) -> None:
    """Compute the expected outputs in ONNX Runtime, the framework of the model."""
    import onnxruntime
    import tvm  # noqa: F401 - loaded once, not in every child

    released.prepare(folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "tiny.onnx", options)
    _EXPECTED.extend(session.run(None, INPUTS))


def make_case(draw: random.Random, folder: Path) -> Case:
    content = (folder.parent / released.BUNDLE).read_bytes()
    mutate = _mutate_member if draw.random() < 0.6 else mutate_bytes
    (folder / "net.tvmflow").write_bytes(mutate(draw, content))
    return Case(lambda: expecting_refusals(_load_and_run))


def _load_and_run() -> None:
    outputs = tvmflow.load("net.tvmflow").run(INPUTS)
    for output, expected in zip(outputs.values(), _EXPECTED, strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)


def _mutate_member(draw: random.Random, content: bytes) -> bytes:
    """Change, drop, repeat or rename one file in an archive whose checksums are right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w") as target:
        names = source.namelist()
        chosen = draw.choice(names)
        change = draw.choice(("change", "change", "drop", "rename", "swap"))
        for name in names:
            data = source.read(name)
            if name != chosen:
                target.writestr(name, data)
            elif change == "change":
                target.writestr(name, mutate_bytes(draw, data))
            elif change == "rename":
                target.writestr(draw.choice(("/etc/x", "../x", f"{name}x", f"./{name}")), data)
            elif change == "swap":
                target.writestr(name, source.read(draw.choice(names)))
    return made.getvalue()
