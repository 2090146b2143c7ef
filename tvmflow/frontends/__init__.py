"""Frontends: each imports the models of one framework, and runs that framework as the reference.

Each has the fields that name its models under `model:` in a recipe. Imports `custom_operators` and layers below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tvmflow.frontends.frontend import Frontend

    FRONTENDS: Final[dict[str, Frontend]] = {}
    """The frontends by their field under `model:`."""


def __getattr__(name: str) -> object:
    """Make the registry when it is first read: the process of a reference needs none of it."""
    if name != "FRONTENDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tvmflow.frontends.mxnet import MxnetFrontend
    from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
    from tvmflow.frontends.pytorch import PytorchFrontend
    from tvmflow.frontends.tflite import TfliteFrontend

    frontends = (MxnetFrontend(), OnnxFrontend(), PytorchFrontend(), TfliteFrontend())
    registry = {frontend.KIND: frontend for frontend in frontends}
    # another thread may have been first
    return globals().setdefault(name, registry)
