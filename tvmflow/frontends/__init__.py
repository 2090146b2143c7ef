"""Frontends: each imports the models of one framework, and runs that framework as the reference.

Each brings the fields that name its models under `model:` in a recipe. Imports operators and what
is below it.
"""

from __future__ import annotations

from typing import Final

from tvmflow.frontends import mxnet, onnx, pytorch, tflite
from tvmflow.frontends.base import Frontend

FRONTENDS: Final[dict[str, Frontend]] = {
    "mxnet": mxnet,
    "onnx": onnx,
    "pytorch": pytorch,
    "tflite": tflite,
}
