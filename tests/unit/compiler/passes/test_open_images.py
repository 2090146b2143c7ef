"""Networks of convolutions get the kernels of fixed images whatever batch, height and width are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.kernels import LEVELS_HERE, PLAIN, level
from tests.support.open_networks import Input, OpenNetwork, make_network, make_weights
from tvmflow.core.types import Dimension

BATCH = Dimension("batch", 1, 16)
HEIGHT = Dimension("h", 16, 256)
WIDTH = Dimension("w", 16, 256)
DIMENSIONS = (BATCH, HEIGHT, WIDTH)
IMAGE = ("batch", 16, "h", "w")
ALL_SIZES = [
    {"batch": batch, "h": h, "w": w}
    for batch, h, w in [(1, 16, 16), (3, 37, 53), (7, 17, 24), (2, 64, 31)]
]
op = relax.op


def make_image_network(
    body: Callable[..., Any], image: Sequence[int | str] = IMAGE, **shapes: Sequence[int]
) -> OpenNetwork:
    """Return a network over images with weights of some shapes."""
    dimensions = [entry for entry in DIMENSIONS if entry.name in image]
    return make_network(dimensions, {"x": Input(image)}, make_weights(**shapes), body)


def check(
    network: OpenNetwork,
    kernels: Sequence[str],
    mcpu: str = LEVELS_HERE[-1],
    tolerance: float = 1e-4,
) -> None:
    """Check that a network has kernels of some names, and computes what TVM's own kernels do."""
    target = level(mcpu)
    names = network.list_kernels(target)
    for kernel in kernels:
        assert any(kernel in name for name in names), (kernel, names)
    fast, plain = network.compile(target), network.compile(target, PLAIN)
    names_open = {entry.sizes[axis] for entry in network.inputs.values() for axis in range(4)}
    for sizes in ALL_SIZES:
        feed = network.draw({name: n for name, n in sizes.items() if name in names_open})
        for actual, expected in zip(fast(**feed), plain(**feed), strict=True):
            assert actual.shape == expected.shape, sizes
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(
                actual / largest, expected / largest, rtol=0, atol=tolerance, err_msg=str(sizes)
            )


def bottleneck(emit: Any, x: Any, a: Any, b: Any, c: Any, s: Any) -> Any:
    """A block of ResNet: 1×1, 3×3, 1×1, and the data themselves."""
    y = emit(op.nn.relu(emit(op.nn.conv2d(x, a))))
    y = emit(op.nn.relu(emit(op.nn.conv2d(y, b, padding=1))))
    y = emit(op.add(emit(op.multiply(emit(op.nn.conv2d(y, c)), s)), x))
    return emit(op.nn.relu(y))


@pytest.mark.parametrize("image", [("batch", 16, 17, 24), (1, 16, "h", "w"), IMAGE], ids=str)
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_a_residual_block_stays_blocked(mcpu: str, image: Sequence[int | str]) -> None:
    network = make_image_network(
        bottleneck, image, a=[8, 16, 1, 1], b=[8, 8, 3, 3], c=[16, 8, 1, 1], s=[1, 16, 1, 1]
    )
    check(network, ["conv2d_NCHWc", "_relu"], mcpu)
    assert not any(
        "conv2d" in name and "NCHWc" not in name for name in network.list_kernels(level(mcpu))
    )
