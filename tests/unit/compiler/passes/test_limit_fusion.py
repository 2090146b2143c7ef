"""Kernels of small tensors take no operators on large ones as epilogues."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tests.support.kernels import check_alike, host_level, kernels_of
from tests.support.tuning import conv, model


def squeezed_and_excited(value: Any, weight: Any) -> Any:
    channels = int(value.ty.shape[1])
    means = relax.op.mean(value, [2, 3], keepdims=True)
    gates = relax.op.nn.conv2d(means, weight((channels, channels, 1, 1)))
    return relax.op.multiply(value, relax.op.sigmoid(gates))


def test_an_image_is_no_epilogue_of_a_convolution_of_one_pixel() -> None:
    """The gates are computed with their sigmoid, and the image is multiplied in a kernel of its own."""
    mod = model(conv(32), squeezed_and_excited, conv(8), shape=(2, 8, 9, 7))
    check_alike(mod, host_level())
    kernels = kernels_of(mod, host_level())
    assert any("conv2d" in name and "sigmoid" in name for name in kernels), kernels
    assert not any("conv2d" in name and "multiply" in name for name in kernels), kernels
