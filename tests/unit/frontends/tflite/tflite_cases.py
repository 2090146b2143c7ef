"""Small TFLite models of all operators that are imported, with random sizes and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tests.support.tflite_models import Array, Quantized, TfliteBuilder

SAME, VALID = 0, 1
NO_ACTIVATION, RELU, RELU_N1_TO_1, RELU6, TANH = range(5)


class Case(NamedTuple):
    """A model and values for its inputs.

    Attributes:
        data: The file.
        feed: Values of its inputs by name.
        atol: How far its outputs may be from LiteRT's, which rounds quantized models in other places.
    """

    data: bytes
    feed: dict[str, Array]
    atol: float = 1e-4


class Draw:
    """Random sizes and values from a seed, and the model that they are for."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.model = TfliteBuilder()
        self.feed: dict[str, Array] = {}

    def size(self, low: int = 1, high: int = 9) -> int:
        return int(self.random.integers(low, high + 1))

    def choice(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def normal(self, *shape: int) -> Array:
        return np.asarray(self.random.normal(size=shape), np.float32)

    def positive(self, *shape: int) -> Array:
        return np.abs(self.normal(*shape)) + np.float32(0.1)

    def input(self, array: Array, quantized: Quantized | None = None) -> int:
        """Add an input with these values, whose sizes are free in half of the models."""
        name = f"x{len(self.feed)}"
        self.feed[name] = array
        shape = array.shape
        if array.ndim and self.random.random() < 0.5:
            shape = (-1, *array.shape[1:])
        return self.model.input(name, shape, str(array.dtype), quantized)

    def data(self, *shape: int) -> int:
        return self.input(self.normal(*shape))

    def weights(self, *shape: int) -> int:
        return self.model.constant(self.normal(*shape))

    def case(self, *outputs: int, atol: float = 1e-4) -> Case:
        return Case(self.model.build(*outputs), self.feed, atol)


Maker = Callable[[Draw], Case]


def _unary(operator: str, options: str = "", *, positive: bool = False, **fields: Any) -> Maker:
    def make(draw: Draw) -> Case:
        shape = [draw.size() for _ in range(draw.size(1, 4))]
        x = draw.input(draw.positive(*shape) if positive else draw.normal(*shape))
        return draw.case(draw.model.result(operator, [x], len(shape), options, **fields))

    return make


def _unary_bool(draw: Draw) -> Case:
    x = draw.input(draw.normal(3, 4) > 0)
    return draw.case(draw.model.result("LOGICAL_NOT", [x], 2, dtype="bool"))


def _operands(draw: Draw, dtype: str = "float32", *, positive: bool = False) -> list[int]:
    """Add two operands that broadcast; the second may be a constant of fewer axes."""
    shape = [draw.size() for _ in range(draw.size(1, 4))]
    other = [draw.choice(1, n) for n in shape][draw.size(0, len(shape)) :]
    arrays = []
    for sizes in (shape, other):
        values = draw.positive(*sizes) if positive else draw.normal(*sizes)
        arrays.append(np.asarray(values * 8 if dtype == "int32" else values).astype(dtype))
    if dtype == "int32":
        arrays[1] = np.where(arrays[1] == 0, np.int32(3), arrays[1])
    second = draw.choice(draw.input, draw.model.constant)(arrays[1])
    return [draw.input(arrays[0]), second]


def _binary(
    operator: str,
    options: str = "",
    *,
    dtype: str = "float32",
    result: str = "",
    positive: bool = False,
) -> Maker:
    def make(draw: Draw) -> Case:
        operands = _operands(draw, dtype, positive=positive)
        fields: dict[str, Any] = {}
        if options and dtype == "float32":
            fields["FusedActivationFunction"] = draw.choice(0, RELU, RELU_N1_TO_1, RELU6)
        output = draw.model.result(operator, operands, 4, options, result or dtype, **fields)
        return draw.case(output)

    return make


def _window(draw: Draw, **more: int) -> dict[str, Any]:
    return {
        "Padding": draw.choice(SAME, VALID),
        "StrideH": draw.size(1, 3),
        "StrideW": draw.size(1, 3),
        **more,
    }


def _image(draw: Draw, channels: int = 0, low: int = 7) -> list[int]:
    sizes = [draw.size(low, 15), draw.size(low, 15), channels or draw.size(1, 20)]
    return [draw.size(1, 2), *sizes]


def _conv(draw: Draw) -> Case:
    groups = draw.choice(1, 1, 2)
    inner, outer = draw.size(1, 10), draw.size(1, 10) * groups
    n, h, w, c = _image(draw, inner * groups)
    kernel = [draw.size(1, 3), draw.size(1, 3)]
    operands = [draw.data(n, h, w, c), draw.weights(outer, *kernel, inner)]
    operands.append(draw.weights(outer))
    dilation = draw.choice(1, 1, 2)
    fields = _window(draw, DilationHFactor=dilation, DilationWFactor=dilation)
    fields["FusedActivationFunction"] = draw.choice(0, RELU, RELU_N1_TO_1, RELU6)
    return draw.case(draw.model.result("CONV_2D", operands, 4, "Conv2D", **fields))


def _depthwise(draw: Draw) -> Case:
    n, h, w, c = _image(draw)
    multiplier = draw.choice(1, 1, 2)
    kernel = [draw.size(1, 3), draw.size(1, 3)]
    operands = [
        draw.data(n, h, w, c),
        draw.weights(1, *kernel, c * multiplier),
        draw.weights(c * multiplier),
    ]
    stride, dilation = draw.choice((1, 1), (2, 1), (1, 2))
    fields: dict[str, Any] = {
        "Padding": draw.choice(SAME, VALID),
        "StrideH": stride,
        "StrideW": stride,
        "DepthMultiplier": multiplier,
        "DilationHFactor": dilation,
        "DilationWFactor": dilation,
        "FusedActivationFunction": draw.choice(0, RELU6),
    }
    return draw.case(
        draw.model.result("DEPTHWISE_CONV_2D", operands, 4, "DepthwiseConv2D", **fields)
    )


def _conv_3d(draw: Draw) -> Case:
    n, h, w, c = _image(draw, draw.size(1, 4))
    operands = [draw.data(n, 5, h, w, c), draw.weights(2, 3, 2, c, 6), draw.weights(6)]
    fields = _window(draw, StrideD=draw.size(1, 2))
    fields |= {f"Dilation{axis}Factor": 1 for axis in "DHW"}
    return draw.case(draw.model.result("CONV_3D", operands, 5, "Conv3D", **fields))


def _transposed_conv(draw: Draw) -> Case:
    n, h, w, c = _image(draw, low=3)
    outer, (kh, kw), fields = draw.size(), (draw.size(1, 4), draw.size(1, 4)), _window(draw)
    if fields["Padding"] == SAME:
        sizes = [h * fields["StrideH"], w * fields["StrideW"]]
    else:
        sizes = [
            (h - 1) * fields["StrideH"] + max(kh, fields["StrideH"]),
            (w - 1) * fields["StrideW"] + max(kw, fields["StrideW"]),
        ]
    shape = draw.model.integers([n, *sizes, outer])
    operands = [shape, draw.weights(outer, kh, kw, c), draw.data(n, h, w, c)]
    operands += [draw.weights(outer)] if draw.random.random() < 0.5 else []
    return draw.case(draw.model.result("TRANSPOSE_CONV", operands, 4, "TransposeConv", **fields))


def _pool(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        fields = _window(draw, FilterHeight=draw.size(1, 4), FilterWidth=draw.size(1, 4))
        x = draw.data(*_image(draw))
        return draw.case(draw.model.result(operator, [x], 4, "Pool2D", **fields))

    return make


def _resize(operator: str, options: str) -> Maker:
    def make(draw: Draw) -> Case:
        corners, centers = draw.choice((False, False), (True, False), (False, True))
        fields: dict[str, Any] = {"AlignCorners": corners, "HalfPixelCenters": centers}
        x = draw.data(*_image(draw, low=2))
        size = draw.model.integers([draw.size(2, 20), draw.size(2, 20)])
        return draw.case(draw.model.result(operator, [x, size], 4, options, **fields))

    return make


def _fully_connected(draw: Draw) -> Case:
    keeps = draw.choice(True, False)
    k, n = draw.size(1, 20), draw.size(1, 20)
    operands = [draw.data(3, draw.size(), k), draw.weights(n, k)]
    operands += [draw.choice(draw.weights(n), -1)]
    fields: dict[str, Any] = {"KeepNumDims": keeps, "FusedActivationFunction": draw.choice(0, RELU)}
    rank = 3 if keeps else 2
    return draw.case(
        draw.model.result("FULLY_CONNECTED", operands, rank, "FullyConnected", **fields)
    )


def _batch_matmul(draw: Draw) -> Case:
    m, k, n = draw.size(), draw.size(), draw.size()
    adj_x, adj_y = draw.choice(True, False), draw.choice(True, False)
    x = draw.data(2, *((k, m) if adj_x else (m, k)))
    y = draw.choice(draw.data, draw.weights)(*((2, n, k) if adj_y else (2, k, n)))
    output = draw.model.result("BATCH_MATMUL", [x, y], 3, "BatchMatMul", AdjX=adj_x, AdjY=adj_y)
    return draw.case(output)


def _reduce(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        rank = draw.size(1, 4)
        x = draw.data(*[draw.size() for _ in range(rank)])
        count = draw.size(1, rank)
        axes = [int(axis) for axis in draw.random.permutation(rank)[:count]]
        axes = [axis - rank if draw.random.random() < 0.3 else axis for axis in axes]
        keeps = draw.choice(True, False)
        operands = [x, draw.model.integers(axes)]
        return draw.case(draw.model.result(operator, operands, rank, "Reducer", KeepDims=keeps))

    return make


def _reduce_bool(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        x = draw.input(draw.normal(3, 4, 2) > 0)
        operands = [x, draw.model.integers([draw.choice(0, 1, -1)])]
        return draw.case(
            draw.model.result(operator, operands, 2, "Reducer", "bool", KeepDims=False)
        )

    return make


def _arg(operator: str, options: str) -> Maker:
    def make(draw: Draw) -> Case:
        dtype = draw.choice("int32", "int64")
        x, axis = draw.data(3, 4, 5), draw.model.integers(draw.choice(0, 1, -1))
        kind = {"int32": 2, "int64": 4}[dtype]
        return draw.case(draw.model.result(operator, [x, axis], 2, options, dtype, OutputType=kind))

    return make


def _image_chain(*operators: tuple[Any, ...]) -> Maker:
    """Return a maker of a convolution and operators behind it, whose channels then are first."""

    def make(draw: Draw) -> Case:
        n, h, w, c = _image(draw)
        x = draw.data(n, h, w, c)
        y = draw.model.result(
            "CONV_2D",
            [x, draw.weights(12, 3, 3, c), draw.weights(12)],
            4,
            "Conv2D",
            **_window(draw, Padding=SAME),
        )
        for operator, operands, rank, options, fields in operators:
            numbers = [y, *(operand(draw) for operand in operands)]
            y = draw.model.result(operator, numbers, rank, options, **fields)
        return draw.case(y)

    return make


def _split_image(draw: Draw) -> Case:
    n, h, w, c = _image(draw)
    operands = [draw.data(n, h, w, c), draw.weights(12, 3, 3, c), draw.weights(12)]
    y = draw.model.result("CONV_2D", operands, 4, "Conv2D", **_window(draw))
    return _parts(draw, "SPLIT", [draw.model.integers(-1), y], 2, 4, "Split", NumSplits=2)


def _reshape(draw: Draw) -> Case:
    n = draw.size()
    x = draw.data(n, 3, 4)
    shape = draw.choice([n, 12], [-1, 6], [n * 12], [2, -1, 3])
    fields: dict[str, Any] = {"NewShape": shape}
    operands = [x, draw.model.integers(shape)]
    return draw.case(draw.model.result("RESHAPE", operands, len(shape), "Reshape", **fields))


def _reshape_by_option(draw: Draw) -> Case:
    x = draw.data(2, 3, 4)
    return draw.case(draw.model.result("RESHAPE", [x], 2, "Reshape", NewShape=[2, 12]))


def _reshape_computed(draw: Draw) -> Case:
    """RESHAPE fed by SHAPE, STRIDED_SLICE and PACK, as Keras's converter writes it."""
    x = draw.data(draw.size(), 5, 6)
    model = draw.model
    shape = model.result("SHAPE", [x], 1, "Shape", "int32", OutType=2)
    bounds = [model.integers([n]) for n in (0, 1, 1)]
    n = model.result(
        "STRIDED_SLICE", [shape, *bounds], 0, "StridedSlice", "int32", ShrinkAxisMask=1
    )
    parts = [n, model.integers(-1), model.integers(2)]
    packed = model.result("PACK", parts, 1, "Pack", "int32", ValuesCount=3, Axis=0)
    return draw.case(model.result("RESHAPE", [x, packed], 3, "Reshape"))


def _squeeze(draw: Draw) -> Case:
    axes = draw.choice([1], [-1], [1, 3], [])
    x = draw.input(draw.normal(2, 1, 3, 1))
    output = draw.model.result("SQUEEZE", [x], 4 - (len(axes) or 2), "Squeeze", SqueezeDims=axes)
    return draw.case(output)


def _expand_dims(draw: Draw) -> Case:
    axis = draw.model.integers(draw.choice(0, 1, -1, 3))
    return draw.case(draw.model.result("EXPAND_DIMS", [draw.data(2, 3, 4), axis], 4))


def _transpose(draw: Draw) -> Case:
    rank = draw.size(1, 5)
    x = draw.data(*[draw.size(1, 5) for _ in range(rank)])
    axes = draw.model.integers(draw.random.permutation(rank))
    return draw.case(draw.model.result("TRANSPOSE", [x, axes], rank))


def _concatenation(draw: Draw) -> Case:
    axis = draw.choice(0, 1, -1)
    shapes = [[2, 3, 4] for _ in range(draw.size(2, 4))]
    for shape in shapes:
        shape[axis] = draw.size()
    operands = [draw.choice(draw.data, draw.weights)(*shape) for shape in shapes]
    operands.append(draw.data(*shapes[0]))
    return draw.case(draw.model.result("CONCATENATION", operands, 3, "Concatenation", Axis=axis))


def _pack(draw: Draw) -> Case:
    operands = [draw.data(2, 3) for _ in range(3)]
    fields: dict[str, Any] = {"ValuesCount": 3, "Axis": draw.choice(0, 1, 2, -1)}
    return draw.case(draw.model.result("PACK", operands, 3, "Pack", **fields))


def _parts(
    draw: Draw,
    operator: str,
    operands: Sequence[int],
    count: int,
    rank: int,
    options: str,
    **fields: Any,
) -> Case:
    outputs = [draw.model.tensor([1] * rank) for _ in range(count)]
    draw.model.add(operator, operands, outputs, options, **fields)
    return draw.case(*outputs)


def _unpack(draw: Draw) -> Case:
    x = draw.data(3, 4, 3)
    return _parts(draw, "UNPACK", [x], 3, 2, "Unpack", Num=3, Axis=draw.choice(0, -1))


def _split(draw: Draw) -> Case:
    axis = draw.choice(1, -1)
    operands = [draw.model.integers(axis), draw.data(2, 6, 3, 6)]
    return _parts(draw, "SPLIT", operands, 3, 4, "Split", NumSplits=3)


def _split_v(draw: Draw) -> Case:
    sizes = draw.model.integers(draw.choice([1, 2, 3], [2, -1, 1]))
    operands = [draw.data(2, 6, 3), sizes, draw.model.integers(1)]
    return _parts(draw, "SPLIT_V", operands, 3, 3, "SplitV", NumSplits=3)


def _slice(draw: Draw) -> Case:
    begin, size = draw.choice(([0, 1, 2], [2, -1, 1]), ([1, 0, 0], [1, 4, 5]))
    x = draw.data(2, 4, 5)
    sizes = draw.feed["x0"].shape
    result = [n - b if s == -1 else s for n, b, s in zip(sizes, begin, size, strict=True)]
    operands = [x, draw.model.integers(begin), draw.model.integers(size)]
    # LiteRT's SLICE takes the shapes in the file for true.
    draw.model.set_shape(x, sizes)
    return draw.case(draw.model.result("SLICE", operands, result))


def _strided_slice(draw: Draw) -> Case:
    entries: Any = draw.choice(
        ([0, 1], [0, 3], [1, 1], 3, {"EndMask": 1}),
        ([1, 3, 0], [2, 0, 3], [1, -1, 2], 3, {}),
        (
            [-1, 0, 1],
            [0, 0, 4],
            [1, 1, 2],
            1,
            {"ShrinkAxisMask": 1, "BeginMask": 2, "EndMask": 2, "_": 0},
        ),
        ([0, 2], [0, 3], [1, 1], 3, {"EllipsisMask": 1}),
        ([0, 0, 1], [0, 0, 3], [1, 1, 1], 4, {"NewAxisMask": 1, "EndMask": 2}),
        ([-2, 3], [9, -9], [1, -1], 3, {}),
        ([0, 3, 4], [0, 0, 0], [-1, -1, -1], 3, {"BeginMask": 7, "EndMask": 7}),
    )
    begin, end, step, rank, fields = entries
    x = draw.data(2, 5, 4)
    operands = [x, *(draw.model.integers(values) for values in (begin, end, step))]
    return draw.case(draw.model.result("STRIDED_SLICE", operands, rank, "StridedSlice", **fields))


def _gather(draw: Draw) -> Case:
    axis = draw.choice(0, 1, -1)
    indices = draw.choice(draw.input, draw.model.constant)(np.array([[0, 2], [1, 1]], np.int32))
    output = draw.model.result(
        "GATHER", [draw.data(3, 4, 5), indices], 4, "Gather", Axis=axis, BatchDims=0
    )
    return draw.case(output)


def _gather_nd(draw: Draw) -> Case:
    indices = draw.input(np.array([[0, 1], [2, 0]], np.int32))
    return draw.case(draw.model.result("GATHER_ND", [draw.data(3, 4, 5), indices], 2))


def _embedding(draw: Draw) -> Case:
    ids = draw.input(draw.random.integers(0, 7, 5).astype(np.int32))
    return draw.case(draw.model.result("EMBEDDING_LOOKUP", [ids, draw.weights(7, 6)], 2))


def _one_hot(draw: Draw) -> Case:
    indices = draw.input(np.array([[0, 2, 5], [1, -1, 3]], np.int32))
    values = [
        draw.model.integers(5),
        draw.model.constant(np.float32(2)),
        draw.model.constant(np.float32(-1)),
    ]
    axis = draw.choice(-1, 0, 1)
    return draw.case(draw.model.result("ONE_HOT", [indices, *values], 3, "OneHot", Axis=axis))


def _pad(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        rank = draw.size(1, 4)
        widths = draw.model.integers(draw.random.integers(0, 3, (rank, 2)))
        operands = [draw.data(*[draw.size(3, 6) for _ in range(rank)]), widths]
        if operator == "PADV2":
            operands.append(draw.model.constant(np.float32(1.5)))
        fields: dict[str, Any] = (
            {"options": "MirrorPad", "Mode": 0} if operator == "MIRROR_PAD" else {}
        )
        return draw.case(draw.model.result(operator, operands, rank, **fields))

    return make


def _pad_and_conv(draw: Draw) -> Case:
    """Zeros around an image before a convolution, as in models that come from other frameworks."""
    n, h, w, c = _image(draw)
    x = draw.data(n, h, w, c)
    widths = draw.model.integers([[0, 0], [1, 2], [0, 1], [0, 0]])
    padded = draw.model.result("PAD", [x, widths], 4)
    operands = [padded, draw.weights(8, 3, 3, c), draw.weights(8)]
    y = draw.model.result("CONV_2D", operands, 4, "Conv2D", **_window(draw))
    outputs = draw.choice([y], [y, padded])
    return draw.case(*outputs)


def _tile(draw: Draw) -> Case:
    return draw.case(
        draw.model.result("TILE", [draw.data(2, 3), draw.model.integers([2, draw.size(1, 3)])], 2)
    )


def _broadcast_to(draw: Draw) -> Case:
    shape = draw.model.integers([2, 3, 4])
    return draw.case(draw.model.result("BROADCAST_TO", [draw.data(3, 1), shape], 3))


def _fill(draw: Draw) -> Case:
    x = draw.input(draw.normal().reshape(()))
    return draw.case(draw.model.result("FILL", [draw.model.integers([2, 3]), x], 2))


def _range(draw: Draw) -> Case:
    bounds = [draw.model.constant(np.float32(n)) for n in (1.0, 7.0, 1.5)]
    positions = draw.model.result("RANGE", bounds, 1)
    return draw.case(draw.model.result("ADD", [draw.data(3, 4), positions], 2, "Add"))


def _sizes(draw: Draw) -> Case:
    """SHAPE, RANK and ZEROS_LIKE, which are constants."""
    x = draw.data(2, draw.size(), 3)
    model = draw.model
    shape = model.result("SHAPE", [x], 1, "Shape", "int32", OutType=2)
    rank = model.result("RANK", [x], 0, dtype="int32")
    total = model.result("MUL", [shape, rank], 1, "Mul", "int32")
    return draw.case(total, model.result("ZEROS_LIKE", [x], 3))


def _reverse(draw: Draw) -> Case:
    axes = draw.model.integers(draw.choice([0], [1], [-1]))
    return draw.case(draw.model.result("REVERSE_V2", [draw.data(2, 3, 4), axes], 3))


def _top_k(draw: Draw) -> Case:
    x, k = draw.data(3, 8), draw.model.integers(draw.size(1, 8))
    values, places = draw.model.tensor([1, 1]), draw.model.tensor([1, 1], "int32")
    draw.model.add("TOPK_V2", [x, k], [values, places])
    return draw.case(values, places)


def _cumsum(draw: Draw) -> Case:
    fields: dict[str, Any] = {
        "Exclusive": draw.choice(True, False),
        "Reverse": draw.choice(True, False),
    }
    axis = draw.model.integers(draw.choice(0, 1, -1))
    return draw.case(draw.model.result("CUMSUM", [draw.data(3, 4), axis], 2, "Cumsum", **fields))


def _select(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        x, y = draw.data(3, 4), draw.data(3, 4)
        shapes = [(3, 4), (3,)] if operator == "SELECT" else [(3, 4), (1, 4), (4,)]
        condition = draw.input(draw.normal(*draw.choice(*shapes)) > 0)
        return draw.case(draw.model.result(operator, [condition, x, y], 2))

    return make


def _prelu(draw: Draw) -> Case:
    c = draw.size()
    operands = [draw.data(2, 4, 5, c), draw.weights(1, 1, c)]
    return draw.case(draw.model.result("PRELU", operands, 4))


def _add_n(draw: Draw) -> Case:
    operands = [draw.data(3, 4) for _ in range(draw.size(2, 4))]
    return draw.case(draw.model.result("ADD_N", operands, 2))


def _cast(draw: Draw) -> Case:
    x = draw.input(draw.normal(3, 4) * np.float32(5))
    integers = draw.model.result("CAST", [x], 2, "Cast", "int32", InDataType=0, OutDataType=2)
    floats = draw.model.result("CAST", [integers], 2, "Cast", InDataType=2, OutDataType=0)
    return draw.case(integers, floats)


def _depth(operator: str, options: str) -> Maker:
    def make(draw: Draw) -> Case:
        block = draw.choice(2, 3)
        sizes = (2, 3, block * block * 2) if operator == "DEPTH_TO_SPACE" else (6, 12, 3)
        x = draw.data(1, *sizes)
        return draw.case(draw.model.result(operator, [x], 4, options, BlockSize=block))

    return make


def _space_to_batch(draw: Draw) -> Case:
    widths = draw.choice([[0, 0], [0, 0]], [[1, 1], [2, 0]])
    operands = [draw.data(2, 4, 6, 3), draw.model.integers([2, 2]), draw.model.integers(widths)]
    return draw.case(draw.model.result("SPACE_TO_BATCH_ND", operands, 4))


def _batch_to_space(draw: Draw) -> Case:
    crops = draw.choice([[0, 0], [0, 0]], [[1, 0], [1, 2]])
    operands = [draw.data(8, 3, 4, 3), draw.model.integers([2, 2]), draw.model.integers(crops)]
    return draw.case(draw.model.result("BATCH_TO_SPACE_ND", operands, 4))


def _half_weights(draw: Draw) -> Case:
    """Weights of float16, which DEQUANTIZE converts: what post-training float16 quantization writes."""
    weights = draw.model.constant(draw.normal(6, 3, 3, 4).astype(np.float16))
    real = draw.model.result("DEQUANTIZE", [weights], [6, 3, 3, 4])
    operands = [draw.data(1, 8, 8, 4), real, draw.weights(6)]
    return draw.case(draw.model.result("CONV_2D", operands, 4, "Conv2D", **_window(draw)))


# ---------------------------------------------------------------- quantized models


def _quantized_input(draw: Draw, dtype: str, *shape: int) -> tuple[int, Quantized]:
    info = np.iinfo(dtype)
    zero_point = 0 if dtype == "int16" else draw.size(-20, 20) + (128 if dtype == "uint8" else 0)
    quantized = Quantized(0.0003 if dtype == "int16" else 0.05, zero_point)
    values = draw.random.integers(info.min, info.max + 1, shape).astype(dtype)
    return draw.input(values, quantized), quantized


def _quantized_conv(dtype: str, operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        n, h, w, c = _image(draw)
        depthwise = operator == "DEPTHWISE_CONV_2D"
        outer = c if depthwise else draw.size(1, 12)
        shape = (1, 3, 3, c) if depthwise else (outer, 3, 3, c)
        x, data = _quantized_input(draw, dtype, n, h, w, c)
        axis = 3 if depthwise else 0
        if dtype == "uint8":
            weights = Quantized(0.02, 131)
            scales: Any = [0.02]
            values = draw.random.integers(0, 256, shape)
        else:
            scales = (draw.random.random(outer) * 0.02 + 0.005).astype(np.float32)
            weights = Quantized(scales, [0] * outer, axis)
            values = draw.random.integers(-127, 128, shape)
        w_ = draw.model.constant(values, "uint8" if dtype == "uint8" else "int8", weights)
        bias = draw.model.constant(
            draw.random.integers(-500, 500, outer),
            "int64" if dtype == "int16" else "int32",
            Quantized(np.float32(data.scale) * np.asarray(scales), [0] * len(scales)),
        )
        result = Quantized(
            0.001 if dtype == "int16" else 0.15,
            0 if dtype == "int16" else 120 if dtype == "uint8" else -7,
        )
        fields = _window(draw, FusedActivationFunction=draw.choice(0, RELU, RELU6))
        if depthwise:
            fields |= {"StrideH": 1, "StrideW": 1, "DepthMultiplier": 1}
        options = "DepthwiseConv2D" if depthwise else "Conv2D"
        output = draw.model.result(operator, [x, w_, bias], 4, options, dtype, result, **fields)
        return draw.case(output, atol=1)

    return make


def _quantized_fully_connected(draw: Draw) -> Case:
    k, n = draw.size(4, 30), draw.size(2, 20)
    x, data = _quantized_input(draw, "int8", 3, k)
    weights = draw.model.constant(draw.random.integers(-127, 128, (n, k)), "int8", Quantized(0.01))
    bias = draw.model.constant(
        draw.random.integers(-500, 500, n),
        "int32",
        Quantized(np.float32(0.01) * np.float32(data.scale)),
    )
    output = draw.model.result(
        "FULLY_CONNECTED", [x, weights, bias], 2, "FullyConnected", "int8", Quantized(0.1, 3)
    )
    return draw.case(output, atol=1)


def _quantized_add(operator: str, options: str) -> Maker:
    def make(draw: Draw) -> Case:
        operands = [_quantized_input(draw, "int8", 2, 5, 5, 7)[0] for _ in range(2)]
        scale = Quantized(0.3 if operator == "MUL" else 0.08, 5)
        return draw.case(draw.model.result(operator, operands, 4, options, "int8", scale), atol=1)

    return make


def _quantized_unary(
    operator: str, result: Quantized | None, options: str = "", **fields: Any
) -> Maker:
    def make(draw: Draw) -> Case:
        x, quantized = _quantized_input(draw, "int8", 2, 6, 6, 5)
        output = draw.model.result(operator, [x], 4, options, "int8", result or quantized, **fields)
        return draw.case(output, atol=1)

    return make


def _quantized_net(draw: Draw) -> Case:
    """QUANTIZE, a convolution, pooling, a mean, a layer, SOFTMAX, DEQUANTIZE."""
    model = draw.model
    x = draw.data(2, 12, 12, 3)
    data, inner, last = Quantized(0.04, 2), Quantized(0.06, -128), Quantized(0.05, 11)
    q = model.result("QUANTIZE", [x], 4, dtype="int8", quantized=data)
    scales = (draw.random.random(8) * 0.01 + 0.005).astype(np.float32)
    weights = model.constant(
        draw.random.integers(-127, 128, (8, 3, 3, 3)), "int8", Quantized(scales, [0] * 8)
    )
    bias = model.constant(
        draw.random.integers(-99, 99, 8), "int32", Quantized(scales * np.float32(0.04), [0] * 8)
    )
    fields: dict[str, Any] = {
        "Padding": SAME,
        "StrideH": 1,
        "StrideW": 1,
        "FusedActivationFunction": RELU,
    }
    y = model.result("CONV_2D", [q, weights, bias], 4, "Conv2D", "int8", inner, **fields)
    window = {"Padding": VALID, "StrideH": 2, "StrideW": 2, "FilterHeight": 2, "FilterWidth": 2}
    y = model.result("MAX_POOL_2D", [y], 4, "Pool2D", "int8", inner, **window)
    axes = model.integers([1, 2])
    y = model.result("MEAN", [y, axes], 2, "Reducer", "int8", inner, KeepDims=False)
    matrix = model.constant(draw.random.integers(-127, 128, (5, 8)), "int8", Quantized(0.01))
    y = model.result("FULLY_CONNECTED", [y, matrix, -1], 2, "FullyConnected", "int8", last)
    y = model.result("SOFTMAX", [y], 2, "Softmax", "int8", Quantized(1 / 256, -128), Beta=1.0)
    return draw.case(model.result("DEQUANTIZE", [y], 2), atol=2 / 256)


def _integers(*values: Any) -> Callable[[Draw], int]:
    return lambda draw: draw.model.integers(list(values))


def _vector(draw: Draw) -> int:
    return draw.weights(12)


def _state(draw: Draw, *shape: int) -> int:
    """Add a variable tensor."""
    name = f"state{len(draw.feed)}"
    draw.feed[name] = draw.normal(*shape)
    return draw.model.tensor(shape, name=name, is_variable=True)


def _svdf(draw: Draw) -> Case:
    rank, units, steps, batch, size = (draw.size(1, 5) for _ in range(5))
    filters = rank * units
    operands = [draw.data(batch, size), draw.weights(filters, size), draw.weights(filters, steps)]
    operands.append(draw.choice(-1, draw.weights(units)))
    operands.append(_state(draw, batch, filters * steps))
    fields = {"Rank": rank, "FusedActivationFunction": draw.choice(NO_ACTIVATION, RELU)}
    return draw.case(draw.model.result("SVDF", operands, [batch, units], "SVDF", **fields))


def _rnn(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        batch, size, units = (draw.size(1, 6) for _ in range(3))
        x, result, fields = _sequence(draw, operator, batch, size, units)
        weights = [draw.weights(units, size), draw.weights(units, units), draw.weights(units)]
        operands = [draw.data(*x), *weights, _state(draw, batch, units)]
        fields["FusedActivationFunction"] = TANH
        options = "SequenceRNN" if fields.keys() & {"TimeMajor"} else "RNN"
        return draw.case(draw.model.result(operator, operands, result, options, **fields))

    return make


def _sequence(
    draw: Draw, operator: str, batch: int, size: int, units: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return the shapes of data and result, and which axis is time."""
    if not operator.startswith("UNIDIRECTIONAL"):
        return [batch, size], [batch, units], {}
    steps, is_major = draw.size(1, 5), bool(draw.choice(0, 1))
    first = [steps, batch] if is_major else [batch, steps]
    return [*first, size], [*first, units], {"TimeMajor": is_major}


def _lstm(operator: str) -> Maker:
    def make(draw: Draw) -> Case:
        batch, size, units = (draw.size(1, 6) for _ in range(3))
        is_coupled, is_projected = draw.choice(False, True), draw.choice(False, True)
        results = draw.size(1, 6) if is_projected else units
        x, result, fields = _sequence(draw, operator, batch, size, results)
        data = draw.data(*x)
        first = 1 if is_coupled else 0
        omitted = [-1] * first
        operands = [data, *omitted]
        operands += [draw.weights(units, size) for _ in range(4 - first)]
        operands += [*omitted, *(draw.weights(units, results) for _ in range(4 - first))]
        if draw.choice(False, True):
            operands += [*omitted, *(draw.weights(units) for _ in range(3 - first))]
        else:
            operands += [-1] * 3
        operands += [*omitted, *(draw.weights(units) for _ in range(4 - first))]
        operands += (
            [draw.weights(results, units), draw.weights(results)] if is_projected else [-1] * 2
        )
        operands += [_state(draw, batch, results), _state(draw, batch, units)]
        fields |= {"FusedActivationFunction": TANH, "CellClip": draw.choice(0.0, 0.4)}
        fields["ProjClip"] = draw.choice(0.0, 0.3)
        options = "UnidirectionalSequenceLSTM" if "TimeMajor" in fields else "LSTM"
        return draw.case(draw.model.result(operator, operands, result, options, **fields))

    return make


CASES: Final[dict[str, Maker]] = {
    **{name: _lstm(name) for name in ("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM")},
    **{name: _rnn(name) for name in ("RNN", "UNIDIRECTIONAL_SEQUENCE_RNN")},
    "SVDF": _svdf,
    **{
        name: _unary(name)
        for name in ("ABS", "CEIL", "COS", "EXP", "FLOOR", "NEG", "ROUND", "SIGN", "SIN", "SQUARE")
    },
    **{
        name: _unary(name)
        for name in (
            "ELU",
            "HARD_SWISH",
            "LOGISTIC",
            "RELU",
            "RELU6",
            "RELU_N1_TO_1",
            "RELU_0_TO_1",
            "TANH",
        )
    },
    **{name: _unary(name, positive=True) for name in ("LOG", "RSQRT", "SQRT")},
    "GELU": _unary("GELU", "Gelu", Approximate=False),
    "GELU approximate": _unary("GELU", "Gelu", Approximate=True),
    "LEAKY_RELU": _unary("LEAKY_RELU", "LeakyRelu", Alpha=0.3),
    "LOG_SOFTMAX": _unary("LOG_SOFTMAX"),
    "SOFTMAX": _unary("SOFTMAX", "Softmax", Beta=1.0),
    "SOFTMAX beta": _unary("SOFTMAX", "Softmax", Beta=0.5),
    "L2_NORMALIZATION": _unary("L2_NORMALIZATION", "L2Norm"),
    "LOGICAL_NOT": _unary_bool,
    **{name: _binary(name, name.title()) for name in ("ADD", "DIV", "MUL", "SUB")},
    **{
        name: _binary(name)
        for name in ("FLOOR_DIV", "FLOOR_MOD", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE")
    },
    "POW": _binary("POW", positive=True),
    **{
        f"{name} int32": _binary(
            name, name.title() if name in ("ADD", "MUL") else "", dtype="int32"
        )
        for name in ("ADD", "MUL", "FLOOR_DIV", "FLOOR_MOD", "MAXIMUM")
    },
    **{
        name: _binary(name, result="bool", dtype="int32")
        for name in ("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL", "NOT_EQUAL")
    },
    **{name: _binary(name, dtype="bool") for name in ("LOGICAL_AND", "LOGICAL_OR")},
    "ADD_N": _add_n,
    "ARG_MAX": _arg("ARG_MAX", "ArgMax"),
    "ARG_MIN": _arg("ARG_MIN", "ArgMin"),
    "AVERAGE_POOL_2D": _pool("AVERAGE_POOL_2D"),
    "BATCH_MATMUL": _batch_matmul,
    "BATCH_TO_SPACE_ND": _batch_to_space,
    "BROADCAST_TO": _broadcast_to,
    "CAST": _cast,
    "CONCATENATION": _concatenation,
    "CONV_2D": _conv,
    "CONV_3D": _conv_3d,
    "CUMSUM": _cumsum,
    "DEPTHWISE_CONV_2D": _depthwise,
    "DEPTH_TO_SPACE": _depth("DEPTH_TO_SPACE", "DepthToSpace"),
    "DEQUANTIZE": _half_weights,
    "EMBEDDING_LOOKUP": _embedding,
    "EXPAND_DIMS": _expand_dims,
    "FILL": _fill,
    "FULLY_CONNECTED": _fully_connected,
    "GATHER": _gather,
    "GATHER_ND": _gather_nd,
    "L2_POOL_2D": _pool("L2_POOL_2D"),
    "MAX_POOL_2D": _pool("MAX_POOL_2D"),
    "MIRROR_PAD": _pad("MIRROR_PAD"),
    "ONE_HOT": _one_hot,
    "PACK": _pack,
    "PAD": _pad("PAD"),
    "PAD before a convolution": _pad_and_conv,
    "PADV2": _pad("PADV2"),
    "PRELU": _prelu,
    "RANGE": _range,
    "REDUCE_ALL": _reduce_bool("REDUCE_ALL"),
    "REDUCE_ANY": _reduce_bool("REDUCE_ANY"),
    **{name: _reduce(name) for name in ("MEAN", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "SUM")},
    "RESHAPE": _reshape,
    "RESHAPE by option": _reshape_by_option,
    "RESHAPE computed": _reshape_computed,
    "RESIZE_BILINEAR": _resize("RESIZE_BILINEAR", "ResizeBilinear"),
    "RESIZE_NEAREST_NEIGHBOR": _resize("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighbor"),
    "REVERSE_V2": _reverse,
    "SELECT": _select("SELECT"),
    "SELECT_V2": _select("SELECT_V2"),
    "SHAPE, RANK, ZEROS_LIKE": _sizes,
    "SLICE": _slice,
    "SPACE_TO_BATCH_ND": _space_to_batch,
    "SPACE_TO_DEPTH": _depth("SPACE_TO_DEPTH", "SpaceToDepth"),
    "SPLIT": _split,
    "SPLIT_V": _split_v,
    "SQUEEZE": _squeeze,
    "STRIDED_SLICE": _strided_slice,
    "TILE": _tile,
    "TOPK_V2": _top_k,
    "TRANSPOSE": _transpose,
    "TRANSPOSE_CONV": _transposed_conv,
    "UNPACK": _unpack,
    **{
        f"{operator} {dtype}": _quantized_conv(dtype, operator)
        for operator in ("CONV_2D", "DEPTHWISE_CONV_2D")
        for dtype in ("int8", "uint8", "int16")
    },
    "FULLY_CONNECTED int8": _quantized_fully_connected,
    "ADD int8": _quantized_add("ADD", "Add"),
    "MUL int8": _quantized_add("MUL", "Mul"),
    "LOGISTIC int8": _quantized_unary("LOGISTIC", Quantized(1 / 256, -128)),
    "TANH int8": _quantized_unary("TANH", Quantized(1 / 128, 0)),
    "SOFTMAX int8": _quantized_unary("SOFTMAX", Quantized(1 / 256, -128), "Softmax", Beta=1.0),
    "QUANTIZE int8": _quantized_unary("QUANTIZE", Quantized(0.11, 4)),
    "MAX_POOL_2D int8": _quantized_unary(
        "MAX_POOL_2D", None, "Pool2D", FilterWidth=2, FilterHeight=2, StrideW=2, StrideH=2
    ),
    "AVERAGE_POOL_2D int8": _quantized_unary(
        "AVERAGE_POOL_2D", None, "Pool2D", FilterWidth=3, FilterHeight=3, StrideW=1, StrideH=1
    ),
    "a quantized net": _quantized_net,
    "behind a convolution: MEAN": _image_chain(
        ("MEAN", [_integers(1, 2)], 2, "Reducer", {"KeepDims": False})
    ),
    "behind a convolution: MEAN over the height": _image_chain(
        ("MEAN", [_integers(1)], 3, "Reducer", {"KeepDims": False})
    ),
    "behind a convolution: SUM kept": _image_chain(
        ("SUM", [_integers(1, 2)], 4, "Reducer", {"KeepDims": True}),
        ("MUL", [_vector], 4, "Mul", {}),
    ),
    "behind a convolution: ADD": _image_chain(
        ("ADD", [_vector], 4, "Add", {}),
        ("RELU", [], 4, "", {}),
        ("RESHAPE", [_integers(-1, 12)], 2, "Reshape", {}),
    ),
    "behind a convolution: TRANSPOSE": _image_chain(
        ("TRANSPOSE", [_integers(0, 3, 1, 2)], 4, "", {}),
        ("SOFTMAX", [], 4, "Softmax", {"Beta": 1.0}),
    ),
    "behind a convolution: PAD": _image_chain(
        ("PAD", [_integers([0, 0], [1, 0], [2, 1], [0, 3])], 4, "", {})
    ),
    "behind a convolution: SLICE": _image_chain(
        ("SLICE", [_integers(0, 0, 0, 2), _integers(1, 1, 1, 5)], [1, 1, 1, 5], "", {})
    ),
    "behind a convolution: SPLIT": _split_image,
    "behind a convolution: L2_NORMALIZATION": _image_chain(
        ("L2_NORMALIZATION", [], 4, "L2Norm", {})
    ),
    "behind a convolution: LOCAL_RESPONSE_NORMALIZATION": _image_chain(
        (
            "LOCAL_RESPONSE_NORMALIZATION",
            [],
            4,
            "LocalResponseNormalization",
            {"Radius": 2, "Bias": 1.0, "Alpha": 0.1, "Beta": 0.75},
        )
    ),
    "behind a convolution: SHAPE": _image_chain(
        ("SHAPE", [], 1, "Shape", {"dtype": "int32", "OutType": 2})
    ),
}
"""The maker of models for each operator, and for what is particular to some."""


def make(name: str, seed: int) -> Case:
    """Return a case."""
    return CASES[name](Draw(seed))
