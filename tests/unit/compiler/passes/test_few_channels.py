"""Convolutions with few channels in their result: neighboring pixels share vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.kernels import level
from tests.support.onnx_models import agree, draw, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.passes.blocked_layout.convolutions import choose_phases
from tvmflow.compiler.passes.blocked_layout.direct_convolutions import Image
from tvmflow.compiler.tir_kernels.blocked import Window
from tvmflow.targets.tvm_target import make_target

_UNUSUAL = {
    "a style image": ("Conv", (16, 3, [9, 9], [1, 1], [4, 4, 4, 4], [0, 0]), [17, 23]),
    "one channel of a volume": (
        "Conv",
        (20, 1, [3, 3, 3], [1, 1, 1], [1] * 6, [0] * 3),
        [4, 5, 7],
    ),
    "strides": ("Conv", (8, 2, [5, 3], [2, 3], [2, 0, 1, 1], [0, 0]), [19, 31]),
    "five channels of a sequence": ("Conv", (32, 5, [7], [1], [6, 0], [0]), [53]),
    "an enlarged image": ("ConvTranspose", (20, 1, [9, 9], [3, 3], [4] * 4, [2, 2]), [5, 8]),
    "an image of a generator": ("ConvTranspose", (16, 3, [4, 4], [2, 2], [1] * 4, [0, 0]), [6, 7]),
    "rows of other phases": ("ConvTranspose", (33, 40, [3, 3], [2, 2], [1] * 4, [1, 1]), [4, 3]),
    "fewer taps than strides": (
        "ConvTranspose",
        (16, 33, [2, 3], [3, 2], [0] * 4, [1, 0]),
        [3, 1],
    ),
    "a generator's sequence": ("ConvTranspose", (24, 20, [16], [8], [4, 4], [0]), [3]),
}


def _sizes(kind: str, case: Any, size: list[int]) -> list[int]:
    _, _, kernel, strides, pads, extra = case
    rank = len(size)
    axes = zip(size, kernel, strides, pads[:rank], pads[rank:], extra, strict=True)
    if kind == "Conv":
        return [(n + a + b - k) // s + 1 for n, k, s, a, b, _ in axes]
    return [(n - 1) * s + k - a - b + more for n, k, s, a, b, more in axes]


def _make(kind: str, case: Any, size: list[int], batch: int, after: str) -> onnx.ModelProto:
    """A convolution with a bias, and what follows it: an activation, or another convolution."""
    inputs, outputs, kernel, strides, pads, extra = case
    shape = [inputs, outputs] if kind == "ConvTranspose" else [outputs, inputs]
    more = {"output_padding": extra} if kind == "ConvTranspose" else {}
    terms = np.sqrt(inputs)
    weights = {"w": draw(*shape, *kernel) / terms, "b": draw(outputs, seed=1)}
    nodes = [
        onnx.helper.make_node(kind, ["x", "w", "b"], ["c"], strides=strides, pads=pads, **more)
    ]
    channels = outputs
    if after == "Conv":
        weights["v"] = draw(6, outputs, *([1] * len(size)), seed=2)
        nodes.append(onnx.helper.make_node("Conv", ["c", "v"], ["y"]))
        channels = 6
    else:
        nodes.append(onnx.helper.make_node(after, ["c"], ["y"]))
    result = [batch, channels, *_sizes(kind, case, size)]
    return model(nodes, [value("x", [batch, inputs, *size])], [value("y", result)], weights)


@pytest.mark.parametrize("name", _UNUSUAL)
def test_unusual_shapes(name: str, tmp_path: Path) -> None:
    kind, case, size = _UNUSUAL[name]
    made = _make(kind, case, size, 2, "Tanh")
    agree(made, tmp_path, {"x": draw(2, case[0], *size)})


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("seed", seeds(0, 7, 60))
def test_random_shapes(kind: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    rank = int(random.choice([1, 2, 2, 3]))
    kernel = [int(random.choice([1, 2, 3, 4, 5, 7, 9])) for _ in range(rank)]
    kernel = [min(edge, 4) for edge in kernel] if rank > 2 else kernel
    strides = [int(random.integers(1, 5)) for _ in range(rank)]
    pads = [int(random.integers(edge)) for edge in kernel + kernel]
    extra = [int(random.integers(step)) for step in strides]
    channels = int(random.choice([1, 3, 8, 16, 20, 33])), int(random.choice([1, 2, 3, 5, 8, 17]))
    size = [int(random.integers(9, 20 if rank < 3 else 12)) for _ in range(rank)]
    case = (*channels, kernel, strides, pads, extra)
    batch, after = int(random.integers(1, 3)), str(random.choice(["Relu", "Sigmoid", "Conv"]))
    made = _make(kind, case, size, batch, after)
    agree(made, tmp_path, {"x": draw(batch, channels[0], *size)})


@pytest.mark.parametrize(
    ("kernel", "size", "share", "phases"),
    [
        ((3, 32, 9, 9), (160, 160), 1.0, (1, 5)),
        ((1, 64, 3, 3), (64, 64), 0.5, (4, 4)),
        ((4, 64, 3, 3), (5, 5), 1.0, (2, 2)),
        ((4, 64, 1, 1), (20, 20), 1.0, None),
        ((12, 64, 7, 7), (64, 64), 1.0, None),
        ((8, 64, 3, 3), (64, 64), 0.5, None),
    ],
)
def test_which_pixels_share_vectors(
    kernel: tuple[int, ...], size: tuple[int, int], share: float, phases: tuple[int, ...] | None
) -> None:
    window = Window([1, 1], [edge // 2 for edge in kernel[2:]] * 2, [1, 1])
    assert choose_phases(Image(size, size), kernel, window, 16, share) == phases


def test_pixels_of_an_enlarged_image_share_one_block(tmp_path: Path) -> None:
    """The nine pixels between four pixels of the data have one channel each."""
    kind, case, size = _UNUSUAL["an enlarged image"]
    loaded = agree(_make(kind, case, size, 1, "Relu"), tmp_path, {"x": draw(1, 20, *size)})
    target = make_target(level("x86-64-v4"))
    lowered = lowering.lower(loaded.mod, target, LoweringOptions(vector_bits=512))
    [kernel] = [
        function
        for var, function in lowered.mod.functions_items()
        if "transpose_NCHWc" in str(var.name_hint)
    ]
    assert int(kernel.params[-1].ty.shape[1]) == 1
