"""A model of images without a library, and images for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tvmflow.core.types import TensorSpec
from tvmflow.runtime.module import Module

Array = np.ndarray[Any, Any]

LABELS = ("dark", "gray", "light")


class Brightness:
    """A program whose scores are logits: how near the mean of an image is to 0, 1/2 and 1."""

    threads = 1

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        means = inputs[0].reshape(len(inputs[0]), -1).mean(axis=1)
        return [-np.abs(means[:, None] - np.array([0, 0.5, 1])).astype(np.float32) * 20]

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Callable[[], object]]:
        yield lambda: self.run(inputs, [])

    @contextlib.contextmanager
    def profiled(
        self, inputs: Sequence[Array], record: Callable[[str, float], None]
    ) -> Iterator[Callable[[], object]]:
        yield lambda: self.run(inputs, [])

    def wait(self) -> None:
        return


def brightness_module(**manifest: Any) -> Module:
    """A module with batches of two gray images of 4×4 pixels."""
    labels = {"names": list(LABELS), "activation": "", "sha256": "0" * 64}
    fields = {"name": "brightness", "images": {"data": {}}, "labels": labels, **manifest}
    signature = {
        "inputs": [{"name": "data", "shape": [2, 1, 4, 4], "dtype": "float32"}],
        "outputs": [{"name": "scores", "shape": [2, 3], "dtype": "float32"}],
    }
    return Module(Brightness(), signature, {"target": {"name": "host"}, **fields})


def write_images(folder: Path) -> list[Path]:
    """A light, a dark and a gray image of several sizes."""
    paths = []
    for name, level, size in (("light", 250, (4, 4)), ("dark", 9, (9, 5)), ("gray", 120, (3, 8))):
        paths.append(folder / f"{name}.png")
        Image.new("RGB", size, (level,) * 3).save(paths[-1])
    return paths


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


INPUTS: Final[dict[str, tuple[TensorSpec, dict[str, Any]]]] = {
    "bgr": (TensorSpec("data", (1, 20, 33, 3), "int8"), {"colour": "BGR", "mean": 128}),
    "classifier": (
        TensorSpec("data", (2, 3, 28, 28), "float32"),
        {"resize": 32, "crop": 28, "mean": MEAN, "std": STD},
    ),
    "cropped": (TensorSpec("data", (1, 1, 40, 25), "float64"), {"crop": [40, 25]}),
    "half": (
        TensorSpec("data", (1, 3, 17, 90), "float16"),
        {"interpolation": "bicubic", "mean": 0.5, "std": 0.5},
    ),
    "letterbox": (TensorSpec("data", (1, 3, 64, 48), "float32"), {"pad": 114, "scale": 1}),
}
