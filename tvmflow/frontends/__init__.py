"""Frontends: each imports the models of one framework, and runs that framework as the reference.

Each brings the fields that name its models under `model:` in a recipe. Imports operators and what
is below it.
"""

from __future__ import annotations

from typing import Final

from tvmflow.frontends.frontend import Frontend
from tvmflow.frontends.mxnet import MxnetFrontend
from tvmflow.frontends.onnx import OnnxFrontend
from tvmflow.frontends.pytorch import PytorchFrontend
from tvmflow.frontends.tflite import TfliteFrontend

FRONTENDS: Final[dict[str, Frontend]] = {
    frontend.KIND: frontend
    for frontend in (MxnetFrontend(), OnnxFrontend(), PytorchFrontend(), TfliteFrontend())
}
