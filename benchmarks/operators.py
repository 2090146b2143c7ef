"""Single operators compared with ONNX Runtime and OpenVINO, in shapes of real models.

    python benchmarks/operators.py [PATTERN ...] [--seconds S] [--above RATIO] [--mcpu LEVEL]

Each operator is a separate ONNX model, built untuned for this machine and called with one thread, interleaved with the
peers in one process. The table shows minimum CPU times in µs, the ratio to the faster peer, and the largest difference
from ONNX Runtime relative to its largest output. A pattern is a part of an operator's name; `--above` prints only
ratios above a number. At the end, median and 95th percentile of all ratios are printed. `operators.py product` has 200
matmuls with sizes from networks and with prime sizes; a quarter of them are quantized.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ |= {"TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}

import numpy as np  # noqa: E402  TVM reads the environment when it is loaded
import onnx  # noqa: E402
import tvm  # noqa: E402
from onnx.helper import make_node  # noqa: E402
from tvm import relax  # noqa: E402

from tests.support import onnx_models as models  # noqa: E402
from tvmflow.compiler import lowering  # noqa: E402
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions  # noqa: E402
from tvmflow.targets.host import read_host  # noqa: E402
from tvmflow.targets.llvm_query import query_target  # noqa: E402
from tvmflow.targets.resolve import resolve  # noqa: E402
from tvmflow.targets.tvm_target import make_target  # noqa: E402

Array = np.ndarray[Any, Any]
_RANDOM: Final = np.random.default_rng(0)
_TURN_S: Final = 0.004


class Case(NamedTuple):
    """A model of a few nodes, and its inputs by name."""

    nodes: list[onnx.NodeProto]
    feed: dict[str, Array]
    weights: dict[str, Array]
    opset: int

    def model(self) -> onnx.ModelProto:
        inputs = [models.value(k, v.shape, str(v.dtype)) for k, v in self.feed.items()]
        names = [name for name in self.nodes[-1].output if name]
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        return models.model(self.nodes, inputs, outputs, self.weights, opset=self.opset)


def normal(*shape: int) -> Array:
    return np.asarray(_RANDOM.standard_normal(shape), "float32")


def integers(*shape: int, high: int, dtype: str = "int64") -> Array:
    return np.asarray(_RANDOM.integers(0, high, shape), dtype)


def one(
    name: str,
    *data: Array,
    weights: Mapping[int, Array] | None = None,
    outputs: int = 1,
    opset: int = 17,
    **attrs: Any,
) -> Case:
    """Return a case of one node; `weights` maps input indices to constants, `data` are the other inputs."""
    constants = weights or {}
    count = max([len(data) + len(constants) - 1, *constants])
    rest = iter(data)
    feed, kept, names = {}, {}, []
    for place in range(count + 1):
        label = f"x{place}"
        if place in constants:
            kept[label] = constants[place]
        else:
            array = next(rest, None)
            if array is None:
                label = ""
            else:
                feed[label] = array
        names.append(label)
    node = make_node(name, names, [f"y{i}" for i in range(outputs)], **attrs)
    return Case([node], feed, kept, opset)


def chain(data: Array, *nodes: tuple[Any, ...], opset: int = 17) -> Case:
    """Return a case of consecutive nodes, each (operator, constants, attributes)."""
    made, weights, last = [], {}, "x"
    for place, (name, constants, attrs) in enumerate(nodes):
        labels = []
        for i, constant in enumerate(constants):
            if isinstance(constant, str):
                labels.append(constant)
                continue
            labels.append(f"c{place}_{i}")
            weights[labels[-1]] = constant
        made.append(make_node(name, [last, *labels], [f"t{place}"], **attrs))
        last = f"t{place}"
    return Case(made, {"x": data}, weights, opset)


def topk(shape: tuple[int, ...], k: int, **attrs: Any) -> Case:
    return one("TopK", normal(*shape), weights={1: np.array([k])}, outputs=2, **attrs)


def conv(
    ci: int,
    co: int,
    *spatial: int,
    kernel: int | Sequence[int] = 1,
    relu: bool = False,
    n: int = 1,
    **attrs: Any,
) -> Case:
    taps = [kernel] * len(spatial) if isinstance(kernel, int) else kernel
    groups = attrs.get("group", 1)
    w, b = normal(co, ci // groups, *taps) * 0.1, normal(co)
    nodes = [("Conv", [w, b], attrs)] + ([("Relu", [], {})] if relu else [])
    return chain(normal(n, ci, *spatial), *nodes)


def same_conv(
    channels: Sequence[int], spatial: Sequence[int], kernel: Sequence[int], **attrs: Any
) -> Case:
    """Return a convolution, padded by half of its kernel; scalar attributes apply to each axis."""
    attrs = {
        name: [value] * len(kernel) if name in ("strides", "dilations") else value
        for name, value in attrs.items()
    }
    gaps = attrs.get("dilations", [1] * len(kernel))
    half = [gap * (taps - 1) // 2 for gap, taps in zip(gaps, kernel, strict=True)]
    return conv(*channels, *spatial, kernel=kernel, **{"pads": half * 2} | attrs)


def reduce(name: str, shape: tuple[int, ...], axes: list[int], keep: int = 0) -> Case:
    return one(name, normal(*shape), axes=axes, keepdims=keep)


def resize(shape: tuple[int, ...], scales: list[float], **attrs: Any) -> Case:
    return one(
        "Resize", normal(*shape), weights={2: np.asarray([1.0, 1.0, *scales], "float32")}, **attrs
    )


def norm(name: str, shape: tuple[int, ...], **attrs: Any) -> Case:
    c = shape[-1] if name == "LayerNormalization" else shape[1]
    opset = 21 if name == "GroupNormalization" else 17
    return one(name, normal(*shape), weights={1: normal(c), 2: normal(c)}, opset=opset, **attrs)


def einsum(equation: str, *shapes: tuple[int, ...]) -> Case:
    return one("Einsum", *(normal(*s) for s in shapes), equation=equation)


def pad(shape: tuple[int, ...], pads: list[int], mode: str) -> Case:
    return one("Pad", normal(*shape), weights={1: np.array(pads)}, mode=mode)


def pool(name: str, shape: tuple[int, ...], kernel: list[int], **attrs: Any) -> Case:
    return one(name, normal(*shape), kernel_shape=kernel, **attrs)


def transpose(shape: tuple[int, ...], perm: list[int], dtype: str = "float32") -> Case:
    return one("Transpose", np.asarray(normal(*shape) * 20, dtype), perm=perm)


def grid_sample(c: int, h: int, w: int, **attrs: Any) -> Case:
    grid = np.asarray(_RANDOM.uniform(-1.1, 1.1, (1, h, w, 2)), "float32")
    return one("GridSample", normal(1, c, h, w), grid, **attrs)


def roi_align(c: int, size: int, rois: int, **attrs: Any) -> Case:
    corner = _RANDOM.uniform(0, size * 8, (rois, 2))
    boxes = np.concatenate([corner, corner + _RANDOM.uniform(8, size * 8, (rois, 2))], 1).astype(
        "float32"
    )
    return one(
        "RoiAlign",
        normal(1, c, size, size),
        boxes,
        np.zeros(rois, "int64"),
        output_height=7,
        output_width=7,
        spatial_scale=0.125,
        sampling_ratio=2,
        **attrs,
    )


def suppression(boxes: int, classes: int, score: float) -> Case:
    corner = _RANDOM.uniform(0, 500, (1, boxes, 2))
    data = np.concatenate([corner, corner + _RANDOM.uniform(5, 100, (1, boxes, 2))], 2).astype(
        "float32"
    )
    scores = np.asarray(_RANDOM.uniform(0, 1, (1, classes, boxes)), "float32")
    w = {2: np.array([100]), 3: np.array([0.5], "float32"), 4: np.array([score], "float32")}
    return one("NonMaxSuppression", data, scores, weights=w)


def conv_transpose(ci: int, co: int, size: int, kernel: int, dims: int = 2, **attrs: Any) -> Case:
    w = normal(ci, co // attrs.get("group", 1), *[kernel] * dims) * 0.1
    data = normal(1, ci, *[size] * dims)
    return one("ConvTranspose", data, weights={1: w, 2: normal(co)}, **attrs)


def gelu_erf(*shape: int) -> Case:
    f = np.float32
    x = normal(*shape)
    nodes = [
        make_node("Mul", ["x", "h"], ["a"]), make_node("Erf", ["a"], ["b"]), make_node("Add", ["b", "o"], ["c"]),
        make_node("Mul", ["x", "c"], ["d"]), make_node("Mul", ["d", "p"], ["y"]),
    ]  # fmt: skip
    return Case(
        nodes,
        {"x": x},
        {"h": np.asarray(f(0.70710678)), "o": np.asarray(f(1)), "p": np.asarray(f(0.5))},
        17,
    )


def matmul(a: tuple[int, ...], b: tuple[int, ...], constant: bool = True) -> Case:
    return (
        one("MatMul", normal(*a), weights={1: normal(*b)})
        if constant
        else one("MatMul", normal(*a), normal(*b))
    )


def quantized(
    name: str, shape: tuple[int, ...], *, kernel: int = 0, co: int = 0, largest: int = 100
) -> Case:
    """Return an operator between DequantizeLinear and QuantizeLinear; weights are at most `largest`."""
    f, u = np.float32, np.uint8
    s, z = np.asarray(f(0.02)), np.asarray(u(128))
    nodes = [make_node("DequantizeLinear", ["x", "s", "z"], ["a"])]
    weights: dict[str, Array] = {"s": s, "z": z}
    if name in ("Conv", "MatMul"):
        w_shape = (co, shape[1], kernel, kernel) if name == "Conv" else (shape[-1], co)
        weights |= {
            "w": (integers(*w_shape, high=2 * largest) - largest).astype("int8"),
            "ws": np.full(co, 0.01, f),
            "wz": np.zeros(co, "int8"),
        }
        nodes += [
            make_node(
                "DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0 if name == "Conv" else 1
            )
        ]
        nodes += [make_node(name, ["a", "wd"], ["b"])]
    elif name == "Add":
        nodes += [make_node("Add", ["a", "a"], ["b"])]
    elif name == "AveragePool":
        nodes += [make_node(name, ["a"], ["b"], kernel_shape=[3, 3], pads=[1] * 4)]
    else:
        nodes += [make_node(name, ["a"], ["b"])]
    nodes += [make_node("QuantizeLinear", ["b", "s", "z"], ["y"])]
    return Case(nodes, {"x": integers(*shape, high=256, dtype="uint8")}, weights, 17)


_ODD_IMAGE: Final = (1, 35, 61, 53)

# Channels, spatial extents, kernel, and attributes.
_CONVOLUTIONS: Final[dict[str, tuple[Any, Any, Any, dict[str, Any]]]] = {
    "3x3 d6 256": ((256, 64), (33, 33), (3, 3), {"dilations": 6}),
    "3x3 d12 256": ((256, 64), (33, 33), (3, 3), {"dilations": 12}),
    "3x3 d18 256": ((256, 64), (33, 33), (3, 3), {"dilations": 18}),
    "3x3 d2 64": ((64, 64), (45, 45), (3, 3), {"dilations": 2}),
    "depthwise 3x3 96": ((96, 96), (56, 56), (3, 3), {"group": 96}),
    "depthwise 3x3/2 96": ((96, 96), (56, 56), (3, 3), {"group": 96, "strides": 2}),
    "depthwise 5x5 240": ((240, 240), (14, 14), (5, 5), {"group": 240}),
    "depthwise 7x7 96": ((96, 96), (56, 56), (7, 7), {"group": 96}),
    "depthwise 9x9 64": ((64, 64), (28, 28), (9, 9), {"group": 64}),
    "depthwise 31x31 64": ((64, 64), (28, 28), (31, 31), {"group": 64}),
    "depthwise 3x3 d2 128": ((128, 128), (28, 28), (3, 3), {"group": 128, "dilations": 2}),
    "depthwise 3x3 d4 128": ((128, 128), (28, 28), (3, 3), {"group": 128, "dilations": 4}),
    "depthwise 3x3 twice": ((64, 128), (28, 28), (3, 3), {"group": 64}),
    "depthwise 1d k31": ((144, 144), (400,), (31,), {"group": 144}),
    "1d k3 512": ((512, 512), (199,), (3,), {}),
    "1d k3/2 512": ((512, 512), (799,), (3,), {"strides": 2}),
    "1d k7 80": ((80, 512), (100,), (7,), {}),
    "1d k3 d1 128": ((128, 128), (800,), (3,), {}),
    "1d k3 d5 128": ((128, 128), (800,), (3,), {"dilations": 5}),
    "1d k7 d3 64": ((64, 64), (1600,), (7,), {"dilations": 3}),
    "1d k11 d5 32": ((32, 32), (6400,), (11,), {"dilations": 5}),
    "1d k10/5 1": ((1, 512), (16000,), (10,), {"strides": 5}),
    "1d k7 32 to 1": ((32, 1), (25600,), (7,), {}),
    "1d k128 groups 16": ((768, 768), (49,), (128,), {"group": 16}),
    "3d 3x3x3 32": ((32, 32), (8, 28, 28), (3, 3, 3), {}),
    "3d 1x3x3 64": ((64, 64), (8, 28, 28), (1, 3, 3), {}),
    "3d 3x1x1 64": ((64, 64), (8, 28, 28), (3, 1, 1), {}),
    "3d 3x3x3 3": ((3, 64), (8, 56, 56), (3, 7, 7), {"strides": 2}),
    "3d depthwise 3x3x3": ((54, 54), (8, 28, 28), (3, 3, 3), {"group": 54}),
    "groups 2 64": ((64, 64), (28, 28), (3, 3), {"group": 2}),
    "groups 8 64": ((64, 64), (28, 28), (3, 3), {"group": 8}),
    "groups 32 128": ((128, 128), (56, 56), (3, 3), {"group": 32}),
    "groups 32 256/2": ((256, 256), (56, 56), (3, 3), {"group": 32, "strides": 2}),
    "groups 32 1024": ((1024, 1024), (7, 7), (3, 3), {"group": 32}),
    "groups 3 1x1 240": ((240, 60), (28, 28), (1, 1), {"group": 3}),
    "groups 8 1x1 384": ((384, 384), (14, 14), (1, 1), {"group": 8}),
    "groups 4 3x3 60": ((60, 60), (28, 28), (3, 3), {"group": 4}),
    "stem 7x7/2": ((3, 64), (224, 224), (7, 7), {"strides": 2}),
    "stem 3x3/2": ((3, 32), (224, 224), (3, 3), {"strides": 2}),
    "stem 6x6/2": ((3, 32), (320, 320), (6, 6), {"strides": 2, "pads": [2] * 4}),
    "stem 4x4/4": ((3, 96), (224, 224), (4, 4), {"strides": 4, "pads": [0] * 4}),
    "stem 16x16/16": ((3, 384), (224, 224), (16, 16), {"strides": 16, "pads": [0] * 4}),
    "stem 14x14/14": ((3, 384), (224, 224), (14, 14), {"strides": 14, "pads": [0] * 4}),
    "stem 7x7/2 gray": ((1, 32), (128, 128), (7, 7), {"strides": 2}),
    "1x1 pixel 480": ((480, 120), (1, 1), (1, 1), {}),
    "1x1 pixel 120": ((120, 480), (1, 1), (1, 1), {}),
    "1x1/2 256": ((256, 512), (56, 56), (1, 1), {"strides": 2}),
    "3x3 3 to 13": ((3, 13), (112, 112), (3, 3), {}),
    "3x3 13 to 29": ((13, 29), (56, 56), (3, 3), {}),
    "3x3 29 to 53": ((29, 53), (56, 56), (3, 3), {}),
    "3x3/2 29 to 53": ((29, 53), (56, 56), (3, 3), {"strides": 2}),
    "5x5 19 37": ((19, 37), (45, 45), (5, 5), {}),
    "3x3 64 to 2": ((64, 2), (128, 128), (3, 3), {}),
    "9x9 64 to 3": ((64, 3), (64, 64), (9, 9), {}),
    "1x1 64 to 1": ((64, 1), (128, 128), (1, 1), {}),
    "1x7 128": ((128, 128), (17, 17), (1, 7), {}),
    "7x1 128": ((128, 128), (17, 17), (7, 1), {}),
    "1x3 384": ((384, 384), (8, 8), (1, 3), {}),
    "1x5 48": ((48, 48), (8, 500), (1, 5), {}),
    "3x3 64 n4": ((64, 64), (28, 28), (3, 3), {"n": 4}),
    "3x3 512 7x7 n8": ((512, 512), (7, 7), (3, 3), {"n": 8}),
    "1x1 256 n8": ((256, 256), (14, 14), (1, 1), {"n": 8}),
    "3x3 64 56": ((64, 64), (56, 56), (3, 3), {}),
    "3x3/2 64": ((64, 128), (56, 56), (3, 3), {"strides": 2}),
}

_UP: Final[dict[str, Any]] = {"strides": [2, 2], "pads": [1] * 4}
_TRANSPOSED: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "2 k2 97": ((97, 49, 28, 2), {"strides": [2, 2]}),
    "2 k4 65": ((65, 33, 28, 4), _UP),
    "2 k3 65": ((65, 33, 28, 3), _UP | {"output_padding": [1, 1]}),
    "1 k3 33": ((33, 17, 45, 3), {"pads": [1] * 4}),
    "2 k2 32": ((32, 32, 64, 2), {"strides": [2, 2]}),
    "2 k2 128": ((128, 64, 28, 2), {"strides": [2, 2]}),
    "2 k2 256": ((256, 256, 14, 2), {"strides": [2, 2]}),
    "2 k4 32": ((32, 32, 64, 4), _UP),
    "2 k4 64": ((64, 3, 64, 4), _UP),
    "2 k4 128": ((128, 64, 28, 4), _UP),
    "2 k4 256": ((256, 256, 14, 4), _UP),
    "2 k3 128": ((128, 64, 28, 3), _UP | {"output_padding": [1, 1]}),
    "2 k3 256": ((256, 128, 14, 3), _UP | {"output_padding": [1, 1]}),
    "2 k3 32": ((32, 32, 64, 3), _UP | {"output_padding": [1, 1]}),
    "2 depthwise k4": ((64, 64, 28, 4), _UP | {"group": 64}),
    "8 1d k16": ((256, 128, 100, 16, 1), {"strides": [8], "pads": [4, 4]}),
    "8 1d k16 128": ((128, 64, 800, 16, 1), {"strides": [8], "pads": [4, 4]}),
    "2 1d k4": ((64, 32, 3200, 4, 1), {"strides": [2], "pads": [1, 1]}),
    "2 1d k4 128": ((128, 64, 1600, 4, 1), {"strides": [2], "pads": [1, 1]}),
    "2 3d k2": ((32, 16, 14, 2, 3), {"strides": [2, 2, 2]}),
}
CASES: Final[dict[str, Callable[[], Case]]] = {
    "topk 1000x40 k1": lambda: topk((1000, 40), 1),
    "topk 1000x40 k5": lambda: topk((1000, 40), 5),
    "topk 1000x63 k5": lambda: topk((1000, 63), 5),
    "topk 1000x63 k20": lambda: topk((1000, 63), 20),
    "topk 1000x64 k8": lambda: topk((1000, 64), 8),
    "topk 1000x32 k32": lambda: topk((1000, 32), 32),
    "topk 1000x20 k3": lambda: topk((1000, 20), 3),
    "topk 1000x8 k2": lambda: topk((1000, 8), 2),
    "topk 1000x40 k40 least": lambda: topk((1000, 40), 40, largest=0),
    "topk 200x200 k50": lambda: topk((200, 200), 50),
    "topk 1x8400 k300": lambda: topk((1, 8400), 300),
    "topk 1x100000 k1000": lambda: topk((1, 100000), 1000),
    "topk 64x40x16 k3 axis 1": lambda: topk((64, 40, 16), 3, axis=1),
    "topk 64x40x16 k20 axis 1": lambda: topk((64, 40, 16), 20, axis=1),
    "softmax 12x77x77": lambda: one("Softmax", normal(12, 77, 77)),
    "softmax 12x197x197": lambda: one("Softmax", normal(12, 197, 197)),
    "softmax 12x50x50": lambda: one("Softmax", normal(12, 50, 50)),
    "softmax 12x257x257": lambda: one("Softmax", normal(12, 257, 257)),
    "softmax 1000x7": lambda: one("Softmax", normal(1000, 7)),
    "softmax 1000x33": lambda: one("Softmax", normal(1000, 33)),
    "softmax 8400x81": lambda: one("Softmax", normal(8400, 81)),
    "softmax axis1 8x21x65x65": lambda: one("Softmax", normal(8, 21, 65, 65), axis=1),
    "logsoftmax 64x1000": lambda: one("LogSoftmax", normal(64, 1000)),
    "logsoftmax 300x29": lambda: one("LogSoftmax", normal(300, 29)),
    "hardmax 300x29": lambda: one("Hardmax", normal(300, 29)),
    "conv1x1 97 97 28": lambda: conv(97, 97, 28, 28),
    "conv1x1 97 97 28 relu": lambda: conv(97, 97, 28, 28, relu=True),
    "conv1x1 97 97 25": lambda: conv(97, 97, 25, 25),
    "conv1x1 97 64 56": lambda: conv(97, 64, 56, 56),
    "conv1x1 64 97 14": lambda: conv(64, 97, 14, 14),
    "conv1x1 3 64 1024": lambda: conv(3, 64, 1024, relu=True),
    "conv1x1 64 64 1024": lambda: conv(64, 64, 1024, relu=True),
    "conv1x1 64 128 1024": lambda: conv(64, 128, 1024, relu=True),
    "conv1x1 128 1024 1024": lambda: conv(128, 1024, 1024, relu=True),
    "conv1x1 1088 512 1024": lambda: conv(1088, 512, 1024, relu=True),
    "conv1x1 50 70 33x21": lambda: conv(50, 70, 33, 21, relu=True),
    "conv1x1 256 17 14": lambda: conv(256, 17, 14, 14),
    "conv1x1 512 16 28": lambda: conv(512, 16, 28, 28),
    "conv1x1 17 256 14 relu": lambda: conv(17, 256, 14, 14, relu=True),
    "conv1x1 8 8 56": lambda: conv(8, 8, 56, 56),
    "conv1x1 5 97 5": lambda: conv(5, 97, 5, 5),
    "conv 3x3 97 97 28": lambda: conv(97, 97, 28, 28, kernel=3, pads=[1] * 4),
    "conv 5x5 19 37 45": lambda: conv(19, 37, 45, 45, kernel=5, pads=[2] * 4, strides=[2, 2]),
    "conv depthwise 97 28": lambda: conv(97, 97, 28, 28, kernel=3, group=97, pads=[1] * 4),
    "conv groups 4 100 100": lambda: conv(100, 100, 28, 28, kernel=3, group=4, pads=[1] * 4),
    "conv1d 80 384 k3 3000": lambda: conv(80, 384, 1500, kernel=3, pads=[1, 1]),
    "conv1d 35 35 k5 999": lambda: conv(35, 35, 999, kernel=5, pads=[2, 2]),
    **{
        f"conv {name}": functools.partial(same_conv, *sizes, **attrs)
        for name, (*sizes, attrs) in _CONVOLUTIONS.items()
    },
    "conv3d 7 13 17": lambda: conv(7, 13, 17, 17, 17, kernel=3, pads=[1] * 6),
    "reduce mean axes 2,3": lambda: reduce("ReduceMean", _ODD_IMAGE, [2, 3]),
    "reduce mean axis 1": lambda: reduce("ReduceMean", _ODD_IMAGE, [1]),
    "reduce sum": lambda: one("ReduceSum", normal(*_ODD_IMAGE), weights={1: np.array([2])}),
    "reduce max axes 1,3": lambda: reduce("ReduceMax", _ODD_IMAGE, [1, 3]),
    "reduce min axis 3": lambda: reduce("ReduceMin", _ODD_IMAGE, [3]),
    "reduce l2 axis 1": lambda: reduce("ReduceL2", _ODD_IMAGE, [1], 1),
    "reduce prod axis 2": lambda: reduce("ReduceProd", _ODD_IMAGE, [2]),
    "reduce logsumexp axis 3": lambda: reduce("ReduceLogSumExp", _ODD_IMAGE, [3]),
    "reduce mean axes 0,2": lambda: reduce("ReduceMean", (17, 33, 65), [0, 2]),
    "reduce l1 all": lambda: reduce("ReduceL1", _ODD_IMAGE, [0, 1, 2, 3]),
    "argmax axis 1": lambda: one("ArgMax", normal(1, 21, 65, 65), axis=1),
    "argmax axis 2 8x33x97x5": lambda: one("ArgMax", normal(8, 33, 97, 5), axis=2),
    "cumsum axis 1": lambda: one("CumSum", normal(16, 1000), weights={1: np.array(1)}),
    "cumsum axis 0": lambda: one("CumSum", normal(1000, 33), weights={1: np.array(0)}),
    "cumsum axis 1 of 3": lambda: one("CumSum", normal(7, 100, 65), weights={1: np.array(1)}),
    "gather rows 300": lambda: one("Gather", normal(3000, 300), integers(2, 77, high=3000)),
    "gather axis 1": lambda: one("Gather", normal(64, 301, 7), integers(100, high=301), axis=1),
    "gather axis last": lambda: one("Gather", normal(640, 301), integers(100, high=301), axis=1),
    "gather elements": lambda: one(
        "GatherElements", normal(64, 301), integers(64, 200, high=301), axis=1
    ),
    "gather elements axis 0": lambda: one(
        "GatherElements", normal(64, 301), integers(60, 301, high=64), axis=0
    ),
    "gathernd": lambda: one("GatherND", normal(30, 40, 65), integers(500, 2, high=30)),
    "scatter elements": lambda: one(
        "ScatterElements",
        normal(64, 301),
        np.stack([_RANDOM.permutation(301)[:200] for _ in range(64)]),
        normal(64, 200),
        axis=1,
    ),
    "scatternd": lambda: one(
        "ScatterND",
        normal(300, 65),
        _RANDOM.permutation(300)[:100].reshape(100, 1),
        normal(100, 65),
    ),
    "scatternd add": lambda: one(
        "ScatterND", normal(300, 65), integers(100, 1, high=300), normal(100, 65), reduction="add"
    ),
    "onehot": lambda: one(
        "OneHot", integers(200, high=97), weights={1: np.array(97), 2: np.array([0, 1], "float32")}
    ),
    "resize linear 2": lambda: resize(_ODD_IMAGE, [2, 2], mode="linear"),
    "resize linear 2 align": lambda: resize(
        _ODD_IMAGE, [2, 2], mode="linear", coordinate_transformation_mode="align_corners"
    ),
    "resize linear 0.5": lambda: resize(_ODD_IMAGE, [0.5, 0.5], mode="linear"),
    "resize linear 1.7": lambda: resize(
        _ODD_IMAGE, [1.7, 1.7], mode="linear", coordinate_transformation_mode="asymmetric"
    ),
    "resize nearest 2": lambda: resize(
        _ODD_IMAGE,
        [2, 2],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    "resize nearest 0.5": lambda: resize(_ODD_IMAGE, [0.5, 0.5], mode="nearest"),
    "resize nearest 1.3": lambda: resize(_ODD_IMAGE, [1.3, 1.3], mode="nearest"),
    "resize cubic 2": lambda: resize(_ODD_IMAGE, [2, 2], mode="cubic"),
    "resize cubic 0.6": lambda: resize(_ODD_IMAGE, [0.6, 0.6], mode="cubic"),
    "resize linear 1d": lambda: resize((1, 35, 999), [2], mode="linear"),
    "resize linear 3d": lambda: resize((1, 9, 15, 17, 19), [2, 2, 2], mode="linear"),
    "grid sample linear": lambda: grid_sample(33, 45, 61),
    "grid sample nearest": lambda: grid_sample(33, 45, 61, mode="nearest"),
    "grid sample border": lambda: grid_sample(3, 145, 161, padding_mode="border", align_corners=1),
    "grid sample reflection": lambda: grid_sample(3, 145, 161, padding_mode="reflection"),
    "grid sample bicubic": lambda: grid_sample(33, 45, 61, mode="bicubic"),
    "layer norm 197x97": lambda: norm("LayerNormalization", (197, 97)),
    "layer norm 77x513": lambda: norm("LayerNormalization", (77, 513)),
    "layer norm 3000x7": lambda: norm("LayerNormalization", (3000, 7)),
    "instance norm": lambda: norm("InstanceNormalization", _ODD_IMAGE),
    "instance norm 1d": lambda: norm("InstanceNormalization", (4, 33, 997)),
    "group norm 5": lambda: norm("GroupNormalization", _ODD_IMAGE, num_groups=5),
    "batch norm": lambda: one(
        "BatchNormalization",
        normal(*_ODD_IMAGE),
        weights={1: normal(35), 2: normal(35), 3: normal(35), 4: abs(normal(35)) + 1},
    ),
    "lp norm axis 1": lambda: one("LpNormalization", normal(*_ODD_IMAGE), axis=1),
    "lp norm last": lambda: one("LpNormalization", normal(500, 129), axis=-1),
    "mean variance norm": lambda: one(
        "MeanVarianceNormalization", normal(*_ODD_IMAGE), axes=[2, 3]
    ),
    "lrn 5": lambda: one("LRN", normal(*_ODD_IMAGE), size=5),
    "lrn 64x27": lambda: one("LRN", normal(1, 64, 27, 27), size=5, alpha=1e-4, beta=0.75),
    "transpose 2d": lambda: transpose((513, 391), [1, 0]),
    "transpose 0231": lambda: transpose(_ODD_IMAGE, [0, 2, 3, 1]),
    "transpose 0312": lambda: transpose((1, 61, 53, 35), [0, 3, 1, 2]),
    "transpose 0213": lambda: transpose((2, 77, 12, 65), [0, 2, 1, 3]),
    "transpose 0132": lambda: transpose((3, 7, 65, 77), [0, 1, 3, 2]),
    "transpose 3 channels": lambda: transpose((1, 223, 225, 3), [0, 3, 1, 2]),
    "transpose to 3 channels": lambda: transpose((1, 3, 223, 225), [0, 2, 3, 1]),
    "transpose bytes": lambda: transpose((1, 223, 225, 3), [0, 3, 1, 2], "uint8"),
    "transpose 210": lambda: transpose((33, 65, 47), [2, 1, 0]),
    "transpose 5d": lambda: transpose((1, 7, 9, 5, 33), [0, 3, 1, 4, 2]),
    "pad constant": lambda: pad(_ODD_IMAGE, [0, 0, 1, 1, 0, 0, 1, 1], "constant"),
    "pad reflect": lambda: pad(_ODD_IMAGE, [0, 0, 3, 3, 0, 0, 3, 3], "reflect"),
    "pad edge": lambda: pad(_ODD_IMAGE, [0, 0, 2, 3, 0, 0, 1, 2], "edge"),
    "pad reflect 1d": lambda: pad((4, 16000), [0, 200, 0, 200], "reflect"),
    "pool max 1d": lambda: pool("MaxPool", (4, 33, 997), [3], strides=[2]),
    "pool average 1d": lambda: pool("AveragePool", (4, 33, 997), [5], pads=[2, 2]),
    "pool max 3d": lambda: pool("MaxPool", (1, 17, 19, 21, 23), [2, 2, 2], strides=[2, 2, 2]),
    "pool average 3d": lambda: pool(
        "AveragePool", (1, 17, 19, 21, 23), [3, 3, 3], strides=[2, 2, 2], pads=[1] * 6
    ),
    "pool average ceil": lambda: pool(
        "AveragePool", (1, 35, 62, 54), [3, 3], strides=[2, 2], ceil_mode=1
    ),
    "pool average ceil count": lambda: pool(
        "AveragePool",
        (1, 35, 62, 54),
        [3, 3],
        strides=[2, 2],
        pads=[1] * 4,
        ceil_mode=1,
        count_include_pad=1,
    ),
    "pool max ceil": lambda: pool("MaxPool", (1, 35, 62, 54), [3, 3], strides=[2, 2], ceil_mode=1),
    "pool max dilated": lambda: pool("MaxPool", _ODD_IMAGE, [3, 3], dilations=[2, 2]),
    "pool max indices": lambda: one(
        "MaxPool", normal(1, 35, 62, 54), outputs=2, kernel_shape=[2, 2], strides=[2, 2]
    ),
    "pool lp": lambda: pool("LpPool", _ODD_IMAGE, [3, 3], strides=[2, 2]),
    "pool global average": lambda: one("GlobalAveragePool", normal(1, 97, 7, 7)),
    "pool global max": lambda: one("GlobalMaxPool", normal(*_ODD_IMAGE)),
    "where": lambda: one("Where", normal(77, 513) > 0, normal(77, 513), normal(77, 513)),
    "where broadcast": lambda: one(
        "Where",
        normal(1, 1, 77, 77) > 0,
        normal(2, 12, 77, 77),
        weights={2: np.asarray(np.float32(-1e9))},
    ),
    "clip": lambda: one(
        "Clip",
        normal(77, 513),
        weights={1: np.asarray(np.float32(0)), 2: np.asarray(np.float32(6))},
    ),
    "erf": lambda: one("Erf", normal(77, 513)),
    "gelu of erf": lambda: gelu_erf(77, 3073),
    "gelu": lambda: one("Gelu", normal(77, 3073), opset=20),
    "gelu tanh": lambda: one("Gelu", normal(77, 3073), opset=20, approximate="tanh"),
    "exp": lambda: one("Exp", normal(77, 513)),
    "log": lambda: one("Log", abs(normal(77, 513)) + 0.1),
    "tanh": lambda: one("Tanh", normal(77, 513)),
    "sigmoid": lambda: one("Sigmoid", normal(77, 513)),
    "softplus": lambda: one("Softplus", normal(77, 513)),
    "mish": lambda: one("Mish", normal(77, 513), opset=18),
    "elu": lambda: one("Elu", normal(77, 513)),
    "selu": lambda: one("Selu", normal(77, 513)),
    "hardswish": lambda: one("HardSwish", normal(77, 513)),
    "prelu": lambda: one("PRelu", normal(*_ODD_IMAGE), weights={1: normal(35, 1, 1)}),
    "sin": lambda: one("Sin", normal(77, 513) * 5),
    "cos": lambda: one("Cos", normal(77, 513) * 5),
    "tan": lambda: one("Tan", normal(77, 513)),
    "atan": lambda: one("Atan", normal(77, 513)),
    "asin": lambda: one("Asin", np.tanh(normal(77, 513))),
    "acos": lambda: one("Acos", np.tanh(normal(77, 513))),
    "sinh": lambda: one("Sinh", normal(77, 513)),
    "pow 2": lambda: one("Pow", normal(77, 513), weights={1: np.asarray(np.float32(2))}),
    "pow 1.7": lambda: one("Pow", abs(normal(77, 513)), weights={1: np.asarray(np.float32(1.7))}),
    "pow data": lambda: one("Pow", abs(normal(77, 513)), normal(77, 513)),
    "mod": lambda: one("Mod", normal(77, 513), abs(normal(77, 513)) + 0.5, fmod=1),
    "mod int": lambda: one("Mod", integers(77, 513, high=1000), integers(77, 513, high=50) + 1),
    "div int64": lambda: one("Div", integers(77, 513, high=1000), integers(77, 513, high=50) + 1),
    "round": lambda: one("Round", normal(77, 513)),
    "sqrt": lambda: one("Sqrt", abs(normal(77, 513))),
    "cast int64": lambda: one("Cast", normal(77, 513) * 10, to=7),
    "cast bool": lambda: one("Cast", normal(77, 513), to=9),
    "cast bytes to float": lambda: one(
        "Cast", integers(3, 223, 225, high=256, dtype="uint8"), to=1
    ),
    "equal int64": lambda: one("Equal", integers(77, 513, high=9), integers(77, 513, high=9)),
    "add rows": lambda: one("Add", normal(8, 77, 513), normal(77, 1)),
    "sub outer": lambda: one("Sub", normal(300, 1, 5), normal(1, 400, 5)),
    "nms 1000x1": lambda: suppression(1000, 1, 0.5),
    "nms 3000x80": lambda: suppression(3000, 80, 0.9),
    "roi align": lambda: roi_align(97, 25, 100),
    "roi align max": lambda: roi_align(97, 25, 100, mode="max"),
    "einsum bhqd,bhkd": lambda: einsum("bhqd,bhkd->bhqk", (2, 12, 77, 65), (2, 12, 77, 65)),
    "einsum bqhd,bkhd": lambda: einsum("bqhd,bkhd->bhqk", (2, 77, 12, 64), (2, 77, 12, 64)),
    "einsum bij,bjk": lambda: einsum("bij,bjk->bik", (7, 33, 65), (7, 65, 47)),
    "einsum bhwc,hkc": lambda: einsum("bhwc,hkc->bhwk", (12, 14, 14, 64), (14, 14, 64)),
    "einsum i,j": lambda: einsum("i,j->ij", (513,), (391,)),
    "einsum bn,anm,bm": lambda: einsum("bi,bi->b", (513, 391), (513, 391)),
    "einsum nkctv,kvw": lambda: einsum("nkctv,kvw->nctw", (1, 3, 64, 50, 25), (3, 25, 25)),
    "einsum bcl,cd": lambda: einsum("ncl,cd->nld", (4, 97, 77), (97, 65)),
    **{
        f"conv transpose {name}": functools.partial(conv_transpose, *sizes, **attrs)
        for name, (sizes, attrs) in _TRANSPOSED.items()
    },
    "depth to space": lambda: one("DepthToSpace", normal(1, 36, 61, 53), blocksize=2),
    "depth to space crd": lambda: one(
        "DepthToSpace", normal(1, 27, 61, 53), blocksize=3, mode="CRD"
    ),
    "space to depth": lambda: one("SpaceToDepth", normal(1, 9, 122, 106), blocksize=2),
    "matmul 77x513x97": lambda: matmul((77, 513), (513, 97)),
    "matmul 1x513x1001": lambda: matmul((1, 513), (513, 1001)),
    "matmul 7x99x301": lambda: matmul((7, 99), (99, 301)),
    "matmul data 12x77x64x77": lambda: matmul((12, 77, 64), (12, 64, 77), constant=False),
    "matmul data 12x77x77x64": lambda: matmul((12, 77, 77), (12, 77, 64), constant=False),
    "matmul data 197x97x97": lambda: matmul((197, 97), (97, 97), constant=False),
    "matmul data vector": lambda: matmul((1, 513), (513, 391), constant=False),
    "matmul data vector column": lambda: matmul((391, 513), (513, 1), constant=False),
    "matmul data vector transposed": lambda: one(
        "Gemm", normal(1, 513), normal(391, 513), transB=1
    ),
    "matmul data vectors": lambda: matmul((12, 1, 77), (12, 77, 65), constant=False),
    "matmul data 1024x4x4": lambda: matmul((1024, 4, 4), (1024, 4, 4), constant=False),
    "matmul data 256x16x16": lambda: matmul((256, 16, 16), (256, 16, 16), constant=False),
    "matmul data 8x32x5x7": lambda: matmul((8, 32, 5, 7), (1, 32, 7, 5), constant=False),
    "matmul data 40x3x3": lambda: matmul((400, 3, 3), (400, 3, 3), constant=False),
    "gemm trans": lambda: one("Gemm", normal(65, 129), normal(97, 129), normal(97), transB=1),
    "gemm trans a": lambda: one("Gemm", normal(129, 65), normal(129, 97), transA=1),
    "concat channels": lambda: one("Concat", normal(1, 33, 45, 45), normal(1, 17, 45, 45), axis=1),
    "concat last": lambda: one("Concat", normal(500, 33), normal(500, 17), normal(500, 3), axis=1),
    "split last": lambda: one(
        "Split", normal(500, 99), weights={1: np.array([33, 33, 33])}, outputs=3, axis=1
    ),
    "slice steps": lambda: one(
        "Slice",
        normal(1, 12, 160, 160),
        weights={
            1: np.array([0, 0]),
            2: np.array([160, 160]),
            3: np.array([2, 3]),
            4: np.array([2, 2]),
        },
    ),
    "slice reverse": lambda: one(
        "Slice",
        normal(33, 97, 65),
        weights={1: np.array([-1]), 2: np.array([-1000]), 3: np.array([1]), 4: np.array([-1])},
    ),
    "tile": lambda: one("Tile", normal(33, 1, 65), weights={1: np.array([1, 40, 3])}),
    "expand": lambda: one("Expand", normal(33, 1, 65), weights={1: np.array([33, 77, 65])}),
    "trilu": lambda: one("Trilu", normal(12, 77, 77), upper=0),
    "max of 3": lambda: one("Max", normal(77, 513), normal(77, 513), normal(77, 513)),
    "reverse sequence": lambda: one("ReverseSequence", normal(50, 8, 65), integers(8, high=50) + 1),
    "bitshift": lambda: one(
        "BitShift",
        integers(77, 513, high=256, dtype="uint8"),
        integers(77, 513, high=4, dtype="uint8"),
        direction="RIGHT",
    ),
    "col2im": lambda: one(
        "Col2Im",
        normal(1, 27 * 3, 400),
        weights={1: np.array([22, 22]), 2: np.array([3, 3])},
        opset=18,
    ),
    "q conv 97 97 28": lambda: quantized("Conv", (1, 97, 28, 28), kernel=1, co=97),
    "q conv 3x3 35 61": lambda: quantized("Conv", (1, 35, 61, 61), kernel=3, co=35),
    "q matmul 77x513x97": lambda: quantized("MatMul", (77, 513), co=97),
    "q add": lambda: quantized("Add", _ODD_IMAGE),
    "q average": lambda: quantized("AveragePool", _ODD_IMAGE),
    "q global average": lambda: quantized("GlobalAveragePool", _ODD_IMAGE),
    "q sigmoid": lambda: quantized("Sigmoid", _ODD_IMAGE),
    "q softmax": lambda: quantized("Softmax", (12, 77, 77)),
    "quantize": lambda: one(
        "QuantizeLinear",
        normal(*_ODD_IMAGE),
        weights={1: np.asarray(np.float32(0.02)), 2: np.asarray(np.uint8(128))},
    ),
    "dequantize": lambda: one(
        "DequantizeLinear",
        integers(*_ODD_IMAGE, high=256, dtype="uint8"),
        weights={1: np.asarray(np.float32(0.02)), 2: np.asarray(np.uint8(128))},
    ),
    "dynamic quantize": lambda: one("DynamicQuantizeLinear", normal(77, 513), outputs=3),
    "matmul integer": lambda: one(
        "MatMulInteger",
        integers(77, 513, high=256, dtype="uint8"),
        weights={1: integers(513, 97, high=256, dtype="uint8"), 2: np.asarray(np.uint8(128))},
    ),
    "dft": lambda: one("DFT", normal(8, 400, 1), axis=1, onesided=1),
    "det": lambda: one("Det", normal(50, 4, 4)),
}
"""Name -> function that returns the case."""

_PRODUCTS: Final = 200
_ROWS: Final = (
    *(1, 2, 4, 7, 8, 14, 16, 25, 31, 49, 50, 64, 77, 97, 100, 128),
    *(196, 197, 256, 257, 384, 512, 577, 1024),
)
_SIZES: Final = (
    *(64, 96, 97, 128, 192, 256, 257, 312, 320, 384, 400, 509, 512, 576, 640, 768),
    *(1000, 1021, 1024, 1152, 1280, 1536, 2048, 2304, 3072, 4096),
)
# Limit of multiplications per product, so that all products take only minutes.
_MAX_PRODUCTS: Final = 1 << 29
_QUANTIZED_EVERY: Final = 4


def list_products() -> dict[str, Callable[[], Case]]:
    """Return random matmuls (rows, depth) x (depth, columns) with constant weights, by name."""
    draw = np.random.default_rng(1)
    products: dict[str, Callable[[], Case]] = {}
    while len(products) < _PRODUCTS:
        rows, depth, columns = (int(draw.choice(sizes)) for sizes in (_ROWS, _SIZES, _SIZES))
        if rows * depth * columns > _MAX_PRODUCTS:
            continue
        name = f"product {rows}x{depth}x{columns}"
        if len(products) % _QUANTIZED_EVERY == 0:
            # 7-bit weights, because ONNX Runtime's results overflow with 8 bits on CPUs without VNNI.
            make = functools.partial(quantized, "MatMul", (rows, depth), co=columns, largest=63)
            products[f"q {name}"] = make
        else:
            products[name] = functools.partial(matmul, (rows, depth), (depth, columns))
    return products


def find_target(mcpu: str | None) -> dict[str, Any]:
    """Return a single-core target for this machine, or for an x86-64 CPU by LLVM's name."""
    target = dict(resolve("host", None, None, read_host(), query_target(None)).tvm)
    if mcpu:
        target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}
    return {**target, "num-cores": 1}


def build(case: Case, folder: Path, mcpu: str | None) -> Callable[[], Any]:
    """Compile an operator untuned, and return a function that calls it."""
    loaded = models.load(case.model(), folder)
    target = find_target(mcpu)
    options = LoweringOptions()
    library = (
        lowering.lower(loaded.mod, make_target(target), options)
        .schedule_untuned(loaded.params, target, SCHEDULES_VERSION)
        .compile()
    )
    function = relax.VirtualMachine(library.jit(), tvm.cpu())["main"]
    data = [tvm.runtime.tensor(case.feed[spec.name]) for spec in loaded.inputs]
    return lambda: function(*data)


def open_ort(case: Case) -> Callable[[], Any]:
    """Return a function that calls ONNX Runtime; it returns an IO binding with the outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        case.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, array in case.feed.items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return binding

    return call


def open_openvino(path: Path, feed: Mapping[str, Array]) -> Callable[[], Any]:
    """Return a function that calls OpenVINO."""
    import openvino

    core = openvino.Core()
    options = {
        "INFERENCE_NUM_THREADS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = core.compile_model(core.read_model(path), "CPU", options).create_infer_request()
    for name, array in feed.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    return request.infer


def find_minima(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the minimum CPU seconds of each call; calls are interleaved, for `seconds` each."""
    minima = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()
            started = before = time.process_time()
            while before - started < _TURN_S:
                call()
                now = time.process_time()
                # The CPU clock of a virtual machine may stand still for a moment.
                if now > before:
                    minima[name] = min(minima[name], now - before)
                before = now
    return minima


def difference(mine: Any, theirs: Any) -> float:
    """Return the largest difference of outputs, relative to each output's largest value."""
    tensors = [mine] if hasattr(mine, "numpy") else list(mine)
    largest = 0.0
    for a, b in zip(tensors, theirs.copy_outputs_to_cpu(), strict=True):
        scale = float(np.abs(b.astype("float64")).max(initial=0)) or 1.0
        apart = np.abs(a.numpy().astype("float64") - b.astype("float64")).max(initial=0)
        largest = max(largest, float(apart) / scale)
    return largest


def main() -> None:
    """Print a line for each operator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", default=[""])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--above", type=float, default=0.0)
    parser.add_argument("--mcpu")
    options = parser.parse_args()
    ratios = []
    for name, make in {**CASES, **list_products()}.items():
        if not any(pattern in name for pattern in options.patterns):
            continue
        case = make()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            try:
                calls = {"tvmflow": build(case, path, options.mcpu)}
            except Exception as error:  # an operator that cannot be built is a line of the result
                print(f"{name:28} tvmflow: {str(error).splitlines()[-1][:150]}", flush=True)
                continue
            apart = float("nan")
            try:
                calls["ort"] = open_ort(case)
                apart = difference(calls["tvmflow"](), calls["ort"]())
            except Exception as error:
                print(f"{name:28} ort: {str(error).splitlines()[-1][:150]}", flush=True)
            try:
                calls["openvino"] = open_openvino(path / "model.onnx", case.feed)
                calls["openvino"]()
            except Exception as error:
                calls.pop("openvino", None)
                print(f"{name:28} openvino: {str(error).splitlines()[-1][:100]}", flush=True)
            minima = find_minima(calls, options.seconds)
        peer = min((v for k, v in minima.items() if k != "tvmflow"), default=float("nan"))
        ratio = minima["tvmflow"] / peer
        ratios.append(ratio)
        if ratio > options.above:
            times = "".join(f"{k} {v * 1e6:9.1f}  " for k, v in minima.items())
            print(f"{name:28} {times} ratio {ratio:5.2f}  difference {apart:.0e}", flush=True)
    if ratios:
        median, high = np.nanpercentile(ratios, [50, 95])
        print(f"{len(ratios)} operators: median {median:.2f}, 95th percentile {high:.2f}")


if __name__ == "__main__":
    main()
