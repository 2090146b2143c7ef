"""Every framework that models come from: the names under `model:` in a recipe."""

from __future__ import annotations

from typing import Final

from tvmflow.frontends import mxnet, onnx
from tvmflow.frontends._base import Frontend

FRONTENDS: Final[dict[str, Frontend]] = {
    "mxnet": mxnet,
    "onnx": onnx,
}
