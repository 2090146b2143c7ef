"""Frontends: each imports the models of one framework, and runs that framework as the reference.

A frontend also declares its fields under `model:` in a recipe. Imports only `custom_operators` and lower layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tvmflow.frontends.frontend import Frontend

    FRONTENDS: Final[dict[str, Frontend]] = {}
    """The frontends by their field under `model:`."""


def __getattr__(name: str) -> object:
    """Create the registry on first access, because reference processes do not need it."""
    if name != "FRONTENDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tvmflow.frontends.mxnet import MxnetFrontend
    from tvmflow.frontends.onnx.onnx_frontend import OnnxFrontend
    from tvmflow.frontends.pytorch import PytorchFrontend
    from tvmflow.frontends.tflite import TfliteFrontend

    frontends = (MxnetFrontend(), OnnxFrontend(), PytorchFrontend(), TfliteFrontend())
    registry = {frontend.KIND: frontend for frontend in frontends}
    # Another thread may have created it meanwhile.
    return globals().setdefault(name, registry)
