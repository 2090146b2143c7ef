"""Well-known networks with seeded weights, as ONNX: real architectures that need no download.

ResNet-50 v2 (He et al. 2016, arXiv:1603.05027), MobileNet v2 (Sandler et al. 2018,
arXiv:1801.04381), SqueezeNet 1.1 (Iandola et al. 2016, arXiv:1602.07360) and a BERT-like
encoder (Devlin et al. 2018, arXiv:1810.04805) with the sizes of MiniLM-L6; beside them the first
layers of others, as their functions say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET: Final = 17
_CALIBRATION_INPUTS: Final = 2


class _Net:
    """A network under construction; `channels` maps names of values to their number of channels."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self.channels: dict[str, int] = {}

    def weight(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> str:
        array = self._random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return self.constant(array + np.float32(shift))

    def constant(self, array: Any) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        self.channels[name] = self.channels.get(inputs[0], 0)
        return name

    def conv(
        self, x: str, out: int, kernel: int, stride: int = 1, pad: int = 0, *, groups: int = 1
    ) -> str:
        per_group = self.channels[x] // groups
        scale = (2 / (per_group * kernel * kernel)) ** 0.5
        y = self.op(
            "Conv",
            x,
            self.weight(out, per_group, kernel, kernel, scale=scale),
            self.weight(out, scale=0.1),
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[pad] * 4,
            group=groups,
        )
        self.channels[y] = out
        return y

    def norm(self, x: str) -> str:
        size = self.channels[x]
        near_one = [self.weight(size, scale=0.1, shift=1.0) for _ in range(2)]
        about_zero = [self.weight(size, scale=0.1) for _ in range(2)]
        variance = self.constant(np.ones(size, np.float32))
        return self.op("BatchNormalization", x, near_one[0], about_zero[0], about_zero[1], variance)

    def relu(self, x: str) -> str:
        return self.op("Relu", x)

    def pool(self, kind: str, x: str, kernel: int, stride: int, pad: int = 0) -> str:
        return self.op(kind, x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4)

    def dense(self, x: str, columns: int, rows: int) -> str:
        weights = self.weight(columns, rows, scale=columns**-0.5)
        return self.op("Add", self.op("MatMul", x, weights), self.weight(rows, scale=0.1))

    def model(self, inputs: dict[str, tuple[int, ...]], output: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            "net",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, shape in inputs.items()
            ],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self._weights,
        )
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def _image(net: _Net, size: int = 224) -> dict[str, tuple[int, ...]]:
    net.channels["x"] = 3
    return {"x": (1, 3, size, size)}


def resnet50() -> onnx.ModelProto:
    """Return ResNet-50 v2: norms and activations before the convolutions, input 1×3×224×224."""
    net = _Net()
    inputs = _image(net)
    y = net.pool("MaxPool", net.relu(net.norm(net.conv("x", 64, 7, 2, 3))), 3, 2, 1)
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            before = net.relu(net.norm(y))
            skip = y if block else net.conv(before, 4 * width, 1, stride)
            z = net.relu(net.norm(net.conv(before, width, 1)))
            z = net.relu(net.norm(net.conv(z, width, 3, stride, 1)))
            y = net.op("Add", net.conv(z, 4 * width, 1), skip)
            net.channels[y] = 4 * width
    y = net.op("GlobalAveragePool", net.relu(net.norm(y)))
    return net.model(inputs, net.dense(net.op("Flatten", y), 2048, 1000))


def resnet18() -> onnx.ModelProto:
    """Return ResNet-18: two convolutions of 3×3 in each block, input 1×3×224×224."""
    net = _Net()
    inputs = _image(net)
    y = net.pool("MaxPool", net.relu(net.conv("x", 64, 7, 2, 3)), 3, 2, 1)
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            skip = net.conv(y, width, 1, stride) if stride == 2 else y
            z = net.relu(net.conv(y, width, 3, stride, 1))
            y = net.relu(net.op("Add", net.conv(z, width, 3, 1, 1), skip))
            net.channels[y] = width
    y = net.op("GlobalAveragePool", y)
    return net.model(inputs, net.dense(net.op("Flatten", y), 512, 1000))


def mobilenet() -> onnx.ModelProto:
    """Return MobileNet v2 (width 1.0), input 1×3×224×224."""
    net = _Net()
    inputs = _image(net)

    def relu6(x: str) -> str:
        return net.op("Clip", x, low, high)

    low, high = net.constant(np.float32(0)), net.constant(np.float32(6))
    y = relu6(net.norm(net.conv("x", 32, 3, 2, 1)))
    rows = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)]
    for expand, out, repeats, stride in [*rows, (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]:
        for block in range(repeats):
            wide = net.channels[y] * expand
            z = relu6(net.norm(net.conv(y, wide, 1))) if expand > 1 else y
            step = stride if not block else 1
            z = relu6(net.norm(net.conv(z, wide, 3, step, 1, groups=wide)))
            z = net.norm(net.conv(z, out, 1))
            if block:
                z = net.op("Add", z, y)
                net.channels[z] = out
            y = z
    y = net.op("GlobalAveragePool", relu6(net.norm(net.conv(y, 1280, 1))))
    return net.model(inputs, net.dense(net.op("Flatten", y), 1280, 1000))


def squeezenet() -> onnx.ModelProto:
    """Return SqueezeNet 1.1, input 1×3×224×224."""
    net = _Net()
    inputs = _image(net)

    def fire(x: str, squeeze: int, expand: int) -> str:
        thin = net.relu(net.conv(x, squeeze, 1))
        sides = [net.relu(net.conv(thin, expand, kernel, 1, kernel // 2)) for kernel in (1, 3)]
        y = net.op("Concat", *sides, axis=1)
        net.channels[y] = 2 * expand
        return y

    y = net.pool("MaxPool", net.relu(net.conv("x", 64, 3, 2)), 3, 2)
    y = net.pool("MaxPool", fire(fire(y, 16, 64), 16, 64), 3, 2)
    y = net.pool("MaxPool", fire(fire(y, 32, 128), 32, 128), 3, 2)
    for squeeze, expand in [(48, 192), (48, 192), (64, 256), (64, 256)]:
        y = fire(y, squeeze, expand)
    y = net.op("GlobalAveragePool", net.relu(net.conv(y, 1000, 1)))
    return net.model(inputs, net.op("Flatten", y))


def efficient() -> onnx.ModelProto:
    """Return MobileNet v3 large without its last layers, input 1×3×224×224.

    Howard et al. 2019, arXiv:1905.02244. It has depthwise 3×3 and 5×5 convolutions, and squeeze-and-excitation.
    """
    net = _Net()
    inputs = _image(net)

    def scale(x: str) -> str:
        means = net.op("GlobalAveragePool", x)
        hidden = net.relu(net.conv(means, -(-net.channels[x] // 32) * 8, 1))
        return net.op(
            "Mul", x, net.op("HardSigmoid", net.conv(hidden, net.channels[x], 1), alpha=1 / 6)
        )

    y = net.op("HardSwish", net.conv("x", 16, 3, 2, 1))
    rows = [(3, 16, 16, 0, "Relu", 1), (3, 64, 24, 0, "Relu", 2), (3, 72, 24, 0, "Relu", 1)]
    rows += [(5, 72, 40, 1, "Relu", 2), *[(5, 120, 40, 1, "Relu", 1)] * 2]
    rows += [(3, 240, 80, 0, "HardSwish", 2), *[(3, 184, 80, 0, "HardSwish", 1)] * 3]
    rows += [(3, 480, 112, 1, "HardSwish", 1), (3, 672, 112, 1, "HardSwish", 1)]
    rows += [(5, 672, 160, 1, "HardSwish", 2), *[(5, 960, 160, 1, "HardSwish", 1)] * 2]
    for kernel, wide, out, is_scaled, activation, stride in rows:
        z = net.op(activation, net.conv(y, wide, 1))
        z = net.op(activation, net.conv(z, wide, kernel, stride, kernel // 2, groups=wide))
        z = net.conv(scale(z) if is_scaled else z, out, 1)
        if stride == 1 and net.channels[y] == out:
            z = net.op("Add", z, y)
        net.channels[z], y = out, z
    return net.model(inputs, net.op("HardSwish", net.conv(y, 960, 1)))


def convnext(width: int = 96, blocks: tuple[int, ...] = (2, 2)) -> onnx.ModelProto:
    """Return the first stages of ConvNeXt (Liu et al. 2022, arXiv:2201.03545), input 1×3×224×224."""
    net = _Net()
    inputs = _image(net)
    gelu = _make_gelu(net)

    def norm(x: str, size: int) -> str:
        gain, shift = net.weight(size, scale=0.1, shift=1.0), net.weight(size, scale=0.1)
        return net.op("LayerNormalization", x, gain, shift, axis=-1)

    def move(x: str, *axes: int) -> str:
        return net.op("Transpose", x, perm=list(axes))

    y = net.conv("x", width, 4, 4)
    for stage, count in enumerate(blocks):
        size = width << stage
        if stage:
            y = move(norm(move(y, 0, 2, 3, 1), size // 2), 0, 3, 1, 2)
            net.channels[y] = size // 2
            y = net.conv(y, size, 2, 2)
        for _ in range(count):
            z = norm(move(net.conv(y, size, 7, 1, 3, groups=size), 0, 2, 3, 1), size)
            z = net.dense(gelu(net.dense(z, size, 4 * size)), 4 * size, size)
            y = net.op("Add", y, move(z, 0, 3, 1, 2))
            net.channels[y] = size
    return net.model(inputs, y)


def encoder(
    layers: int = 6, tokens: int = 128, width: int = 384, heads: int = 12
) -> onnx.ModelProto:
    """Return a BERT-like encoder with the sizes of MiniLM-L6, input 1×128×384 (embedded tokens)."""
    net = _Net()
    return net.model({"x": (1, tokens, width)}, _encode(net, "x", layers, width, heads))


def _make_gelu(net: _Net) -> Callable[[str], str]:
    half, one, root2 = (net.constant(np.float32(v)) for v in (0.5, 1.0, 2**0.5))

    def gelu(x: str) -> str:
        erf = net.op("Add", net.op("Erf", net.op("Div", x, root2)), one)
        return net.op("Mul", net.op("Mul", x, erf), half)

    return gelu


def _encode(net: _Net, x: str, layers: int, width: int, heads: int) -> str:
    """Add the layers of an encoder and return the name of its result."""
    depth = width // heads
    split = net.constant(np.array([0, 0, heads, depth], np.int64))
    joined = net.constant(np.array([0, 0, width], np.int64))
    gelu = _make_gelu(net)
    scale = net.constant(np.float32(depth**0.5))

    def norm(x: str) -> str:
        gain, shift = net.weight(width, scale=0.1, shift=1.0), net.weight(width, scale=0.1)
        return net.op("LayerNormalization", x, gain, shift, axis=-1)

    def head(x: str, order: list[int]) -> str:
        cut = net.op("Reshape", net.dense(x, width, width), split)
        return net.op("Transpose", cut, perm=order)

    for _ in range(layers):
        query, value = (head(x, [0, 2, 1, 3]) for _ in range(2))
        scores = net.op("Div", net.op("MatMul", query, head(x, [0, 2, 3, 1])), scale)
        mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), value)
        mixed = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), joined)
        x = norm(net.op("Add", net.dense(mixed, width, width), x))
        wide = gelu(net.dense(x, width, 4 * width))
        x = norm(net.op("Add", net.dense(wide, 4 * width, width), x))
    return x


def wide() -> onnx.ModelProto:
    """Return a small convolutional net followed by a large matmul, limited by memory bandwidth."""
    net = _Net()
    inputs = _image(net)
    y = net.relu(net.conv("x", 32, 3, 2, 1))
    y = net.relu(net.conv(y, 32, 3, 2, 1))
    y = net.op("Flatten", net.pool("AveragePool", y, 2, 2))
    return net.model(inputs, net.dense(net.relu(net.dense(y, 32 * 28 * 28, 2048)), 2048, 1000))


def vision_transformer(
    layers: int = 4, size: int = 224, patch: int = 16, width: int = 384
) -> onnx.ModelProto:
    """Return the first layers of ViT-S/16 (Dosovitskiy et al. 2021, arXiv:2010.11929), input 1×3×224×224."""
    net = _Net()
    inputs = _image(net, size)
    y = net.conv("x", width, patch, patch)
    y = net.op("Reshape", y, net.constant(np.array([0, width, -1], np.int64)))
    y = net.op("Transpose", y, perm=[0, 2, 1])
    y = _encode(net, net.op("Add", y, net.weight((size // patch) ** 2, width)), layers, width, 6)
    return net.model(inputs, net.op("ReduceMean", y, axes=[1], keepdims=0))


def whisper_encoder(
    layers: int = 2, mels: int = 80, frames: int = 3000, width: int = 384
) -> onnx.ModelProto:
    """Return the stem and first layers of Whisper-tiny's encoder, with 1×80×3000 mel features as input.

    Radford et al. 2022, arXiv:2212.04356. Position embeddings are sliced to the length, as in exported models; unlike
    the original, layers have post-norm.
    """
    net = _Net()
    y, channels, gelu = "x", mels, _make_gelu(net)
    for stride in (1, 2):
        weights = net.weight(width, channels, 3, scale=(2 / (3 * channels)) ** 0.5)
        bias = net.weight(width, scale=0.1)
        y = net.op("Conv", y, weights, bias, kernel_shape=[3], strides=[stride], pads=[1, 1])
        y, channels = gelu(y), width
    y = net.op("Transpose", y, perm=[0, 2, 1])
    rates = np.exp(-np.log(10_000) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(frames // 2)[:, None] * rates
    table = net.constant(np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32))
    zero, one = (net.constant(np.array([number], np.int64)) for number in (0, 1))
    length = net.op("Gather", net.op("Shape", y), one, axis=0)
    positions = net.op("Slice", table, zero, length, zero)
    return net.model(
        {"x": (1, mels, frames)}, _encode(net, net.op("Add", y, positions), layers, width, 6)
    )


def lstm(size: int = 80, hidden: int = 256, steps: int = 100) -> onnx.ModelProto:
    """Return two LSTM layers and a dense layer over mel features, input 100×1×80."""
    net = _Net()
    y = "x"
    for columns in (size, hidden):
        weights = net.weight(1, 4 * hidden, columns, scale=columns**-0.5)
        state = net.weight(1, 4 * hidden, hidden, scale=hidden**-0.5)
        y = net.op("LSTM", y, weights, state, net.weight(1, 8 * hidden), hidden_size=hidden)
        y = net.op("Squeeze", y, net.constant(np.array([1], np.int64)))
    return net.model({"x": (steps, 1, size)}, net.dense(y, hidden, 40))


def detector(size: int = 320) -> onnx.ModelProto:
    """Return a fully convolutional detector with a feature pyramid of three levels, input 1×3×320×320."""
    net = _Net()
    inputs = _image(net, size)
    y, levels = net.relu(net.conv("x", 32, 3, 2, 1)), []
    for out in (64, 128, 256, 256):
        y = net.relu(net.conv(y, out, 3, 2, 1))
        y = net.relu(net.conv(net.relu(net.conv(y, out // 2, 1)), out, 3, 1, 1))
        levels.append(y)
    merged, outputs = net.conv(levels[-1], 96, 1), []
    for level in levels[-2:0:-1]:
        outputs.append(merged)
        side = net.conv(level, 96, 1)
        shape = net.op("Shape", side)
        resized = net.op("Resize", merged, "", "", shape, mode="nearest")
        merged = net.op("Add", resized, side)
        net.channels[merged] = 96
    heads = [
        net.op(
            "Reshape", net.conv(level, 18, 3, 1, 1), net.constant(np.array([0, 18, -1], np.int64))
        )
        for level in (*outputs, merged)
    ]
    return net.model(inputs, net.op("Concat", *heads, axis=2))


def landmarks(size: int = 128) -> onnx.ModelProto:
    """Return a network for hand landmarks, input 1×3×128×128.

    It has blocks of BlazeFace (Bazarevsky et al. 2019, arXiv:1907.05047): depthwise 5×5 and 3×3 convolutions, 1×1
    convolutions and PReLU.
    """
    net = _Net()
    inputs = _image(net, size)

    def prelu(x: str) -> str:
        return net.op("PRelu", x, net.weight(net.channels[x], 1, 1, scale=0.1, shift=0.25))

    y = prelu(net.conv("x", 24, 3, 2, 1))
    for out, first, blocks in [(24, 1, 2), (48, 2, 3), (96, 2, 3), (96, 2, 3), (192, 2, 3)]:
        for block in range(blocks):
            channels, stride = net.channels[y], 1 if block else first
            kernel = 5 if channels < 96 else 3
            z = net.conv(y, channels, kernel, stride, kernel // 2, groups=channels)
            z = net.conv(z, out, 1)
            skip = net.pool("MaxPool", y, 2, 2) if stride == 2 else y
            if out > channels:
                zeros = net.constant(np.array([0, 0, 0, 0, 0, out - channels, 0, 0], np.int64))
                skip = net.op("Pad", skip, zeros)
            y = prelu(net.op("Add", z, skip))
            net.channels[y] = out
    return net.model(inputs, net.op("Flatten", net.conv(y, 63, size // 32)))


def unet(width: int = 16, size: int = 96) -> onnx.ModelProto:
    """Return a small U-Net (Ronneberger et al. 2015, arXiv:1505.04597) of four levels, input 1×3×96×96."""
    net = _Net()
    inputs = _image(net, size)

    def twice(x: str, out: int) -> str:
        return net.relu(net.conv(net.relu(net.conv(x, out, 3, 1, 1)), out, 3, 1, 1))

    levels = [twice("x", width)]
    for level in (1, 2, 3):
        levels.append(twice(net.pool("MaxPool", levels[-1], 2, 2), width << level))
    y = levels.pop()
    while levels:
        skip = levels.pop()
        out = net.channels[skip]
        weights = net.weight(2 * out, out, 2, 2, scale=(2 * out) ** -0.5)
        y = net.op(
            "ConvTranspose", y, weights, net.weight(out), kernel_shape=[2, 2], strides=[2, 2]
        )
        y = net.op("Concat", skip, y, axis=1)
        net.channels[y] = 2 * out
        y = twice(y, out)
    return net.model(inputs, net.conv(y, 2, 1))


def keywords(channels: int = 64) -> onnx.ModelProto:
    """Return DS-CNN for keyword spotting (Zhang et al. 2017, arXiv:1711.07128), input 1×1×49×10 (MFCC)."""
    net = _Net()
    net.channels["x"] = 1
    weights = net.weight(channels, 1, 10, 4, scale=0.2)
    bias = net.weight(channels, scale=0.1)
    window = {"kernel_shape": [10, 4], "strides": [2, 2], "pads": [5, 1, 5, 1]}
    y = net.relu(net.op("Conv", "x", weights, bias, **window))
    net.channels[y] = channels
    for _ in range(4):
        y = net.relu(net.conv(y, channels, 3, 1, 1, groups=channels))
        y = net.relu(net.conv(y, channels, 1))
    y = net.op("Flatten", net.op("GlobalAveragePool", y))
    return net.model({"x": (1, 1, 49, 10)}, net.dense(y, channels, 12))


def dynamic_shapes(
    model: onnx.ModelProto, shapes: Mapping[str, tuple[int | str, ...]]
) -> onnx.ModelProto:
    """Set the input shapes of a model; names are dynamic dimensions."""
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def quantize(source: Path, output: Path) -> None:
    """Write an int8 model (QDQ), quantized by ONNX Runtime with two random calibration inputs."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    # It logs a warning for every bias.
    logging.getLogger().setLevel(logging.ERROR)
    (value,) = onnx.load(source).graph.input
    name, shape = value.name, [axis.dim_value for axis in value.type.tensor_type.shape.dim]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            random = np.random.default_rng(0)
            samples = [
                random.standard_normal(shape).astype(np.float32) for _ in range(_CALIBRATION_INPUTS)
            ]
            self._feeds = iter([{name: sample} for sample in samples])

        def get_next(self) -> dict[str, Any] | None:
            return next(self._feeds, None)

    quantize_static(
        source,
        output,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
    )


NETS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "resnet50": resnet50,
    "mobilenet": mobilenet,
    "squeezenet": squeezenet,
    "encoder": encoder,
}
