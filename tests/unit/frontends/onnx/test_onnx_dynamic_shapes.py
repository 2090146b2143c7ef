"""Models whose sizes stay open: graphs as torch.onnx exports them, compared with ONNX Runtime at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper

from tests.support.kernels import host_level
from tests.support.onnx_models import agree, draw, model, open_session, value
from tests.unit.frontends.onnx.models import BATCH, agree_at, compile_dynamic, load_dynamic
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program.c_kernels import lower_kernels
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.dimensions import evaluate, find_bounds
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import Dimension
from tvmflow.frontends._dynamic_shapes import SizeRanges
from tvmflow.frontends.onnx.operators import compute_sizes
from tvmflow.frontends.onnx.sizes import SizeValue
from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES
from tvmflow.targets.tvm_target import make_target

node = helper.make_node
SEQ = Dimension("seq", 1, 64)
H = Dimension(name="h", min=32, max=160, multiple_of=8)
W = Dimension(name="w", min=32, max=160, multiple_of=8)


def integers(*values: int) -> Any:
    return np.array(values, np.int64)


class Graph:
    """The nodes and weights of a graph, with names for what is computed in between."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Any] = {}

    def add(self, kind: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node; an input that is an array becomes a weight."""
        name = f"n{len(self.nodes)}"
        names = [entry if isinstance(entry, str) else self.weight(entry) for entry in inputs]
        self.nodes.append(node(kind, names, [name], name=f"{kind}_{len(self.nodes)}", **attributes))
        return name

    def weight(self, array: Any) -> str:
        """Add a weight."""
        name = f"w{len(self.weights)}"
        self.weights[name] = array
        return name

    def size(self, of: str, axis: int) -> str:
        """Return one size as a scalar, as exporters write it."""
        return self.add("Gather", self.add("Shape", of), np.array(axis, np.int64), axis=0)

    def shape(self, *sizes: Any) -> str:
        """Return sizes as one vector: a name of a scalar, or a number."""
        parts = [
            self.add("Unsqueeze", size, integers(0)) if isinstance(size, str) else integers(size)
            for size in sizes
        ]
        return self.add("Concat", *parts, axis=0)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """Return a dense layer."""
        seed = len(self.weights)
        product = self.add("MatMul", x, draw(inputs, outputs, seed=seed) / np.float32(inputs**0.5))
        return self.add("Add", product, draw(outputs, seed=seed + 1))

    def made(
        self,
        inputs: Mapping[str, tuple[Sequence[int | str], str]],
        outputs: Mapping[str, str],
        opset: int = 17,
    ) -> onnx.ModelProto:
        """Return the model."""
        results = []
        for name, source in outputs.items():
            self.nodes.append(node("Identity", [source], [name]))
            results.append(value(name, None))
        given = [value(name, shape, dtype) for name, (shape, dtype) in inputs.items()]
        return model(self.nodes, given, results, self.weights, opset=opset)


def attention(g: Graph, x: str, batch: str, seq: str, mask: Any, width: int = 32) -> str:
    """Return attention of four heads over tokens, as exporters write it."""
    heads, size = 4, width // 4
    parts = []
    for axes in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        shape = g.shape(batch, seq, heads, size)
        parts.append(
            g.add("Transpose", g.add("Reshape", g.linear(x, width, width), shape), perm=axes)
        )
    query, key, keyed = parts
    scores = g.add("Div", g.add("MatMul", query, key), np.float32(size**0.5))
    weights = g.add("Softmax", g.add("Add", scores, mask), axis=-1)
    mixed = g.add("Transpose", g.add("MatMul", weights, keyed), perm=[0, 2, 1, 3])
    joined = g.add("Reshape", mixed, g.shape(batch, seq, width))
    return g.add("Add", x, g.linear(joined, width, width))


def bert() -> onnx.ModelProto:
    """A BERT with token types and a mask, whose positions are a slice of a constant table."""
    g = Graph()
    batch, seq = g.size("input_ids", 0), g.size("input_ids", 1)
    words = g.add("Gather", draw(50, 32), "input_ids")
    table = np.arange(64).reshape(1, 64).astype(np.int64)
    until = g.add("Unsqueeze", seq, integers(0))
    places = g.add("Slice", table, integers(0), until, integers(1), integers(1))
    positions = g.add("Gather", draw(64, 32, seed=3), places)
    x = g.add("Add", words, positions)
    mask = g.add("Unsqueeze", g.add("Unsqueeze", "attention_mask", integers(1)), integers(2))
    inverse = g.add("Sub", np.float32(1), g.add("Cast", mask, to=1))
    x = attention(g, x, batch, seq, g.add("Mul", inverse, np.float32(-10000)))
    pooled = g.add("Gather", x, np.array(0, np.int64), axis=1)
    inputs = {n: (["batch", "seq"], "int64") for n in ("input_ids", "attention_mask")}
    return g.made(inputs, {"tokens": x, "pooled": pooled})


def expanded_bert() -> onnx.ModelProto:
    """A BERT as newer exports have it: positions by Range, and masks by Expand to a shape with -1 replaced."""
    g = Graph()
    batch, seq = g.size("input_ids", 0), g.size("input_ids", 1)
    zero, one = np.array(0, np.int64), np.array(1, np.int64)
    places = g.add("Unsqueeze", g.add("Range", zero, seq, one), integers(0))
    wanted = g.shape(batch, seq)
    rank = g.add("Shape", wanted)
    ones = g.add(
        "ConstantOfShape", rank, value=helper.make_tensor("v", onnx.TensorProto.INT64, [1], [1])
    )
    unknown = g.add("Mul", ones, np.array(-1, np.int64))
    shape = g.add("Where", g.add("Equal", wanted, unknown), ones, wanted)
    places = g.add("Expand", places, shape)
    x = g.add(
        "Add",
        g.add("Gather", draw(50, 32), "input_ids"),
        g.add("Gather", draw(64, 32, seed=3), places),
    )
    mask = g.add("Unsqueeze", "attention_mask", integers(1, 2))
    wide = g.add("Expand", mask, g.shape(batch, 1, seq, seq))
    inverse = g.add("Sub", np.float32(1), g.add("Cast", wide, to=1))
    hidden = g.add("Cast", inverse, to=9)
    mask = g.add("Where", hidden, np.float32(-3.4e38), inverse)
    x = attention(g, x, batch, seq, mask)
    inputs = {n: (["batch", "seq"], "int64") for n in ("input_ids", "attention_mask")}
    return g.made(inputs, {"tokens": x})


def gpt() -> onnx.ModelProto:
    """A decoder with a causal mask by a comparison of Ranges, and the logits of the last token."""
    g = Graph()
    batch, seq = g.size("input_ids", 0), g.size("input_ids", 1)
    zero, one = np.array(0, np.int64), np.array(1, np.int64)
    places = g.add("Range", zero, seq, one)
    x = g.add(
        "Add",
        g.add("Gather", draw(50, 32), "input_ids"),
        g.add("Gather", draw(64, 32, seed=3), places),
    )
    rows = g.add("Reshape", places, g.shape(seq, 1))
    seen = g.add("LessOrEqual", g.add("Unsqueeze", places, integers(0)), rows)
    mask = g.add("Where", seen, np.float32(0), np.float32(-1e9))
    x = attention(g, x, batch, seq, g.add("Unsqueeze", mask, integers(0, 1)))
    last = g.add("Gather", x, g.add("Sub", seq, one), axis=1)
    tail = g.add("Slice", x, integers(-1), integers(2**63 - 1), integers(1))
    inputs = {"input_ids": (["batch", "seq"], "int64")}
    return g.made(inputs, {"tokens": x, "logits": g.linear(last, 32, 50), "tail": tail})


def triangle() -> onnx.ModelProto:
    """A decoder whose causal mask is a slice of a constant triangle."""
    g = Graph()
    batch, seq = g.size("x", 0), g.size("x", 1)
    table = np.tril(np.ones((1, 1, 64, 64), bool))
    until = g.add("Unsqueeze", seq, integers(0))
    part = g.add("Slice", table, integers(0), until, integers(2), integers(1))
    part = g.add("Slice", part, integers(0), until, integers(3), integers(1))
    mask = g.add("Where", part, np.float32(0), np.float32(-1e9))
    x = attention(g, "x", batch, seq, mask)
    return g.made({"x": (["batch", "seq", 32], "float32")}, {"tokens": x})


def vit() -> onnx.ModelProto:
    """A ViT with a class token that is expanded to the batch, whose patches a convolution makes."""
    g = Graph()
    patches = g.add("Conv", "image", draw(32, 3, 8, 8) / 14, kernel_shape=[8, 8], strides=[8, 8])
    batch = g.size("image", 0)
    flat = g.add("Reshape", patches, g.shape(batch, 32, -1))
    tokens = g.add("Transpose", flat, perm=[0, 2, 1])
    token = g.add("Expand", draw(1, 1, 32), g.shape(batch, 1, 1))
    x = g.add("Concat", token, tokens, axis=1)
    x = g.add("Add", x, draw(1, 17, 32, seed=5))
    x = attention(g, x, batch, g.size(x, 1), np.zeros((1, 1, 1, 1), np.float32))
    cls = g.add("Gather", x, np.array(0, np.int64), axis=1)
    return g.made({"image": (["batch", 3, 32, 32], "float32")}, {"scores": g.linear(cls, 32, 10)})


def convolution(g: Graph, x: str, inputs: int, outputs: int, stride: int = 1) -> str:
    weights = draw(outputs, inputs, 3, 3, seed=outputs) / np.float32((9 * inputs) ** 0.5)
    made = g.add("Conv", x, weights, kernel_shape=[3, 3], strides=[stride] * 2, pads=[1, 1, 1, 1])
    return g.add("Relu", made)


def segmentation() -> onnx.ModelProto:
    """A segmentation head whose result has the size of the image, by Resize to sizes from its Shape."""
    g = Graph()
    x = convolution(g, "image", 3, 8, 2)
    deep = convolution(g, x, 8, 16, 2)
    up = g.add(
        "Resize",
        deep,
        "",
        integers_of_scale(2),
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
    x = g.add("Concat", x, up, axis=1)
    x = g.add("Conv", x, draw(4, 24, 1, 1), kernel_shape=[1, 1])
    size = g.add("Slice", g.add("Shape", "image"), integers(2), integers(4), integers(0))
    front = g.add("Slice", g.add("Shape", x), integers(0), integers(2), integers(0))
    wanted = g.add("Concat", front, size, axis=0)
    y = g.add(
        "Resize", x, "", "", wanted, mode="linear", coordinate_transformation_mode="half_pixel"
    )
    return g.made({"image": (["batch", 3, "h", "w"], "float32")}, {"classes": y})


def integers_of_scale(scale: float) -> Any:
    return np.array([1, 1, scale, scale], np.float32)


def classifier() -> onnx.ModelProto:
    """A convolutional network with a dynamic image, a global average and Flatten."""
    g = Graph()
    x = convolution(g, "image", 3, 8, 2)
    x = g.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = g.add("Flatten", g.add("GlobalAveragePool", convolution(g, x, 8, 16)))
    return g.made({"image": (["batch", 3, "h", "w"], "float32")}, {"scores": g.linear(x, 16, 10)})


def tiled() -> onnx.ModelProto:
    """Tile and ConstantOfShape by the batch, a Reshape with 0 and -1, and arithmetic of sizes in floats."""
    g = Graph()
    batch, seq = g.size("x", 0), g.size("x", 1)
    token = g.add("Tile", draw(1, 1, 4), g.shape(batch, 1, 1))
    zeros = g.add("ConstantOfShape", g.shape(batch, 2, 4))
    x = g.add("Concat", token, "x", zeros, axis=1)
    half = g.add("Mul", g.add("Cast", seq, to=1), np.float32(0.5))
    count = g.add("Cast", g.add("Floor", half), to=7)
    cut = g.add(
        "Slice",
        x,
        integers(1),
        g.add("Unsqueeze", g.add("Add", count, np.array(1, np.int64)), integers(0)),
        integers(1),
    )
    flat = g.add("Reshape", x, integers(0, -1))
    scaled = g.add("Div", "x", g.add("Sqrt", g.add("Cast", seq, to=1)))
    return g.made(
        {"x": (["batch", "seq", 4], "float32")},
        {"x4": x, "cut": cut, "flat": flat, "scaled": scaled},
    )


TEXT_SIZES = [{"batch": b, "seq": s} for b, s in ((1, 1), (2, 17), (8, 64), (3, 5), (1, 64))]
IMAGE_SIZES = [
    {"batch": b, "h": h, "w": w} for b, h, w in ((1, 32, 32), (3, 40, 72), (2, 160, 136))
]


@pytest.mark.parametrize("make", [bert, expanded_bert, gpt, triangle, tiled])
def test_text_models_follow_batch_and_length(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    agree_at(make(), tmp_path, (BATCH, SEQ), TEXT_SIZES)


@pytest.mark.parametrize("make", [segmentation, classifier])
def test_image_models_follow_height_and_width(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    agree_at(make(), tmp_path, (BATCH, H, W), IMAGE_SIZES)


def test_a_vision_transformer_follows_the_batch(tmp_path: Path) -> None:
    loaded = agree_at(vit(), tmp_path, (BATCH,), [{"batch": n} for n in (1, 3, 8)])
    assert [spec.sizes for spec in loaded.outputs] == [("batch", 10)]


Inputs = Mapping[str, tuple[Sequence[int | str], str]]
TEXT: Inputs = {"x": (["batch", "seq", 8], "float32")}
IMAGE: Inputs = {"x": (["batch", 4, "h", "w"], "float32")}


def halved_and_doubled(g: Graph) -> str:
    """A skip connection: both sides have one size because sizes are multiples of 8."""
    half = g.add("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2])
    scales = np.array([1, 1, 2, 2], np.float32)
    up = g.add(
        "Resize", half, "", scales, mode="linear", coordinate_transformation_mode="half_pixel"
    )
    return g.add("Concat", "x", up, axis=1)


def group_norm(g: Graph) -> str:
    grouped = g.add("Reshape", "x", integers(0, 2, -1))
    return g.add(
        "Reshape", g.add("InstanceNormalization", grouped, draw(2), draw(2)), g.add("Shape", "x")
    )


def grown(g: Graph) -> str:
    """A size as an expression of thousands of terms."""
    size = g.add("Add", g.size("x", 0), g.size("x", 1))
    for _ in range(12):
        halves = g.add("Add", g.add("Div", size, np.array(3, np.int64)), np.array(1, np.int64))
        size = g.add("Mul", g.add("Add", size, halves), halves)
    return size


def position_scores(g: Graph) -> str:
    """Relative positions, from one Range less another."""
    zero, one = np.array(0, np.int64), np.array(1, np.int64)
    places = g.add("Range", one, g.add("Add", g.size("x", 1), one), one)
    others = g.add(
        "Range", zero, g.add("Mul", g.size("x", 1), np.array(2, np.int64)), np.array(2, np.int64)
    )
    distance = g.add(
        "Sub", g.add("Unsqueeze", places, integers(1)), g.add("Unsqueeze", others, integers(0))
    )
    return g.add(
        "Add",
        g.add("MatMul", "x", g.add("Transpose", "x", perm=[0, 2, 1])),
        g.add("Cast", distance, to=1),
    )


def padded_to_multiple(g: Graph) -> str:
    """A length that is filled up to a multiple of 8."""
    rest = g.add("Mod", g.size("x", 1), np.array(8, np.int64))
    missing = g.add("Mod", g.add("Sub", np.array(8, np.int64), rest), np.array(8, np.int64))
    return g.add("Pad", "x", g.shape(0, 0, 0, 0, missing, 0), np.array(0.5, np.float32))


def parts_of_computed_sizes(g: Graph) -> str:
    """Two parts of twice the length, as long as the input each."""
    twice, length = g.add("Concat", "x", "x", axis=1), g.size("x", 1)
    g.nodes.append(node("Split", [twice, g.shape(length, length)], ["one", "other"], axis=1))
    return g.add("Sub", "one", "other")


def focused(g: Graph) -> str:
    """Every other pixel of four beginnings, which have one size because sizes are multiples."""
    ends, axes, steps = integers(2**60, 2**60), integers(2, 3), integers(2, 2)
    parts = [g.add("Slice", "x", integers(y, x), ends, axes, steps) for y in (0, 1) for x in (0, 1)]
    return g.add("Concat", *parts, axis=1)


def joined_with_what_it_came_from(g: Graph) -> str:
    """Half the size and back by a transposed convolution."""
    half = g.add(
        "Conv", "x", draw(6, 4, 3, 3), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]
    )
    back = g.add("ConvTranspose", half, draw(6, 4, 2, 2), kernel_shape=[2, 2], strides=[2, 2])
    return g.add("Concat", back, "x", axis=1)


def sorted_steps(g: Graph) -> str:
    """All steps in order, and the places of at most five."""
    count = g.add("Unsqueeze", g.size("x", 1), integers(0))
    rounded = g.add("Round", "x")
    g.nodes.append(node("TopK", [rounded, count], ["values", "all"], axis=1, largest=0))
    few = g.add("Min", count, integers(5))
    g.nodes.append(node("TopK", [rounded, few], ["most", "places"], axis=1))
    places = g.add("ReduceSum", "places", integers(1), keepdims=1)
    return g.add("Add", "values", g.add("Cast", places, to=1))


OPERATORS: Mapping[str, tuple[Any, Callable[[Graph], str]]] = {
    "einsum": (TEXT, lambda g: g.add("Einsum", "x", "x", equation="bsh,bth->bst")),
    "first axis by -1": (
        TEXT,
        lambda g: g.add("Gemm", g.add("Reshape", "x", integers(-1, 8)), draw(8, 5), draw(5)),
    ),
    "flat by a product": (
        TEXT,
        lambda g: g.add("Reshape", "x", g.shape(g.add("Mul", g.size("x", 0), g.size("x", 1)), 8)),
    ),
    "reversed": (
        TEXT,
        lambda g: g.add("Slice", "x", integers(-1), integers(-(2**62)), integers(1), integers(-1)),
    ),
    "every other": (
        TEXT,
        lambda g: g.add("Slice", "x", integers(0), integers(2**62), integers(1), integers(2)),
    ),
    "one hot": (
        TEXT,
        lambda g: g.add(
            "OneHot",
            g.add("ArgMax", "x", axis=2, keepdims=0),
            np.array(8, np.int64),
            np.array([0, 1], np.float32),
        ),
    ),
    "filled": (TEXT, padded_to_multiple),
    "parts": (TEXT, parts_of_computed_sizes),
    "focused": (IMAGE, focused),
    "joined": (IMAGE, joined_with_what_it_came_from),
    "slopes": (TEXT, lambda g: g.add("PRelu", "x", draw(8))),
    "size as data": (
        TEXT,
        lambda g: g.add(
            "Div", g.add("CumSum", "x", np.array(1, np.int64)), g.add("Cast", g.size("x", 1), to=1)
        ),
    ),
    "positions": (TEXT, position_scores),
    "sorted": (TEXT, sorted_steps),
    "an LSTM": (
        TEXT,
        lambda g: g.add(
            "LSTM",
            g.add("Transpose", "x", perm=[1, 0, 2]),
            draw(2, 16, 8),
            draw(2, 16, 4),
            hidden_size=4,
            direction="bidirectional",
        ),
    ),
    "a GRU": (TEXT, lambda g: g.add("GRU", "x", draw(1, 12, 8), draw(1, 12, 4), hidden_size=4)),
    "a shape": (TEXT, lambda g: g.add("Cast", g.add("Shape", "x"), to=1)),
    "a half": (TEXT, lambda g: g.add("Mul", g.add("Cast", g.size("x", 1), to=1), np.float32(0.5))),
    "skip": (IMAGE, halved_and_doubled),
    "groups": (IMAGE, group_norm),
    "padding by size": (
        IMAGE,
        lambda g: g.add(
            "Conv",
            "x",
            draw(3, 4, 3, 3),
            kernel_shape=[3, 3],
            strides=[2, 2],
            auto_pad="SAME_UPPER",
        ),
    ),
    "padding before": (
        IMAGE,
        lambda g: g.add("MaxPool", "x", kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    ),
    "transposed": (
        IMAGE,
        lambda g: g.add(
            "ConvTranspose", "x", draw(4, 3, 2, 2), kernel_shape=[2, 2], strides=[2, 2]
        ),
    ),
    "half": (
        IMAGE,
        lambda g: g.add("Resize", "x", "", np.array([1, 1, 0.5, 0.5], np.float32), mode="linear"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "image"])
def test_operators_follow_the_dimensions(kind: str, tmp_path: Path) -> None:
    """All in one model, each with an output of its own."""
    inputs = TEXT if kind == "text" else IMAGE
    g = Graph()
    outputs = {
        name.replace(" ", "_"): make(g) for name, (own, make) in OPERATORS.items() if own is inputs
    }
    dimensions = (BATCH, SEQ) if kind == "text" else (BATCH, H, W)
    sizes = TEXT_SIZES[:3] if kind == "text" else IMAGE_SIZES[:2]
    agree_at(g.made(inputs, outputs), tmp_path, dimensions, sizes)


def branches(g: Graph) -> str:
    """A layer or another one, by the length."""
    bodies = [
        helper.make_graph(
            [node("MatMul", ["x", g.weight(draw(8, 8, seed=seed))], [name])],
            name,
            [],
            [value(name, None)],
        )
        for seed, name in enumerate(("long", "short"))
    ]
    condition = g.add("Greater", g.size("x", 1), np.array(10, np.int64))
    g.nodes.append(
        node("If", [condition], ["branch"], then_branch=bodies[0], else_branch=bodies[1])
    )
    return "branch"


def test_kernels_of_branches_have_numbers_for_their_sizes(tmp_path: Path) -> None:
    """By which rules choose their schedules; the branches compute what ONNX Runtime computes."""
    g = Graph()
    made = g.made(TEXT, {"y": branches(g)})
    loaded = agree_at(made, tmp_path, (BATCH, SEQ), TEXT_SIZES[:3])
    target = make_target(host_level())
    mod = lowering.lower(loaded.mod, target, LoweringOptions()).mod
    kernels = {
        str(variable.name_hint): function.attrs
        for variable, function in mod.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    layers = [attrs for name, attrs in kernels.items() if "dense" in name]
    assert layers
    assert all(set(attrs[DYNAMIC_SHAPES]) == {"size0", "size1"} for attrs in layers)


REFUSED: Mapping[str, tuple[Any, Callable[[Graph], str], str]] = {
    "sizes by values": (
        TEXT,
        lambda g: g.add("NonZero", "x"),
        r"NonZero \(node 'NonZero_0'\) cannot be imported: its sizes do not follow from batch, seq; its operands have the "
        r"shapes \[batch, seq, 8\]",
    ),
    "operands of two sizes": (
        TEXT,
        lambda g: g.add("Add", "x", g.add("Concat", "x", "x", axis=1)),
        r"Add \(node 'Add_1'\) cannot be imported: its sizes do not follow from batch, seq; its operands have the shapes "
        r"\[batch, seq, 8\], \[batch, seq \* 2, 8\]",
    ),
    "a range by values": (
        TEXT,
        lambda g: g.add("Range", np.float32(0), g.add("ReduceMax", "x", keepdims=0), np.float32(1)),
        "Range .* its bounds depend on values, not only on dimensions",
    ),
    "another number of elements": (
        TEXT,
        lambda g: g.add("Reshape", "x", integers(8, 8)),
        r"Reshape .* elements of its operand and result differ: batch \* seq \* 8 and 64 \(\d+ and 64 at batch=",
    ),
    "a layer for one size": (
        TEXT,
        lambda g: g.add("MatMul", g.add("Flatten", "x", axis=1), np.ones((64, 3), np.float32)),
        r"MatMul .* the terms of its operands differ: seq \* 8 and 64 \(\d+ and 64 at seq=\d+\)",
    ),
    "a tensor that is too large": (
        TEXT,
        lambda g: g.add("Expand", "x", integers(10**7, 1, 1, 1)),
        r"Expand .* its result has 40,960,000,000 elements at batch = 8, seq = 64, and the limit is 2,147,483,648; lower `max`",
    ),
    "samples of a volume": (
        TEXT,
        lambda g: g.add(
            "GridSample",
            g.add("Unsqueeze", "x", integers(0, 1)),
            np.zeros((1, 2, 2, 2, 3), np.float32),
            mode="linear",
        ),
        r"GridSample .* it is supported only with fixed sizes; its operands have the shapes \[1, 1, batch, seq, 8\]",
    ),
    "sizes that grow": (
        TEXT,
        lambda g: g.add("Reshape", "x", g.add("Unsqueeze", grown(g), integers(0))),
        "Reshape .* its sizes depend on values, not only on dimensions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_follow_a_dimension_is_named(name: str, tmp_path: Path) -> None:
    """The node, the sizes, and what to do instead."""
    inputs, make, text = REFUSED[name]
    g = Graph()
    made = g.made(inputs, {"y": make(g)})
    with pytest.raises(ImportFailed, match=text) as caught:
        load_dynamic(made, tmp_path, (BATCH, SEQ))
    assert "a library for each under `variants`" in caught.value.fix


@pytest.mark.parametrize(
    ("queries", "keys", "values", "bias"),
    [
        ([2, "seq", 16], ["batch", 4, 16], ["batch", 4, 16], None),
        ([2, 3, 16], [2, 4, "seq"], [2, 4, 16], None),
        ([2, 3, 16], [2, 4, 16], [2, "seq", 16], None),
        ([2, 3, 16], [2, 4, 16], [2, 4, 16], ["batch", 2, 3, 4]),
    ],
    ids=["batches", "widths", "lengths", "biases"],
)
def test_attention_whose_sizes_can_differ_is_refused(
    queries: Any, keys: Any, values: Any, bias: Any, tmp_path: Path
) -> None:
    """It ended in an assertion, or its library read beyond the end of the smaller operand."""
    shapes = {"q": queries, "k": keys, "v": values} | ({"bias": bias} if bias else {})
    names = ["q", "k", "v", *(["", "", "bias"] if bias else [])]
    attention = node("MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=2)
    made = model(
        [attention],
        [value(name, shape) for name, shape in shapes.items()],
        [onnx.ValueInfoProto(name="y")],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )
    text = r"MultiHeadAttention \(node with output 'y'\) cannot be imported: .* can differ"
    with pytest.raises(ImportFailed, match=text):
        load_dynamic(made, tmp_path, (BATCH, SEQ))


def test_multiples_decide_whether_sizes_are_the_same(tmp_path: Path) -> None:
    """Half of an odd size, doubled, is another one."""
    g = Graph()
    made = g.made(IMAGE, {"y": halved_and_doubled(g)})
    odd = [entry._replace(multiple_of=1) for entry in (H, W)]
    with pytest.raises(
        ImportFailed, match=r"Concat .* \[batch, 4, h, w\], \[batch, 4, h // 2 \* 2, w // 2 \* 2\]"
    ):
        load_dynamic(made, tmp_path, (BATCH, *odd))


def test_padding_that_differs_between_sizes_is_named(tmp_path: Path) -> None:
    g = Graph()
    y = g.add(
        "Conv", "x", draw(3, 4, 3, 3), kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"
    )
    odd = [entry._replace(multiple_of=1) for entry in (H, W)]
    with pytest.raises(ImportFailed, match=r"its padding \(SAME\) differs .* multiples of 2"):
        load_dynamic(g.made(IMAGE, {"y": y}), tmp_path, (BATCH, *odd))


def test_a_size_that_is_rounded_up_divides_by_no_negative_number(tmp_path: Path) -> None:
    """TVM's form of it is `seq - seq % -8`, which no bounds could be found for."""
    g = Graph()
    loaded = load_dynamic(g.made(TEXT, {"y": padded_to_multiple(g)}), tmp_path, (BATCH, SEQ))
    (output,) = loaded.outputs
    assert find_bounds(output.sizes[1], {"seq": (1, 64)}) == (1, 71)
    assert [evaluate(output.sizes[1], {"seq": n}) for n in (1, 8, 9, 64)] == [8, 8, 16, 64]


def test_sizes_of_outputs_are_expressions_of_dimensions(tmp_path: Path) -> None:
    """And the shapes are the largest ones."""
    g = Graph()
    wide = g.add("Concat", "x", "x", axis=1)
    loaded = load_dynamic(
        g.made(TEXT, {"wide": wide, "flat": g.add("Flatten", "x")}), tmp_path, (BATCH, SEQ)
    )
    assert [(spec.sizes, spec.shape) for spec in loaded.outputs] == [
        (("batch", "seq * 2", 8), (8, 128, 8)),
        (("batch", "seq * 8"), (8, 512)),
    ]
    assert [spec.sizes for spec in loaded.inputs] == [("batch", "seq", 8)]


def test_a_constant_of_several_elements_may_be_a_fraction() -> None:
    """Each element is the fraction, with which sizes are computed."""
    half = helper.make_tensor("v", onnx.TensorProto.FLOAT, [1], [0.5])
    filled, product = node("ConstantOfShape", ["n"], ["y"], value=half), node("Mul", "xy", "z")
    ranges = SizeRanges([BATCH])
    halves = compute_sizes(ranges, filled, [SizeValue(np.array([2], object), "int64")])
    sixes = SizeValue(np.array([6, 8], object), "float32")
    result = compute_sizes(ranges, product, [sixes, halves])
    assert result is not None and result.values.tolist() == [3, 4]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_negative_divisors_of_dynamic_shapes(tmp_path: Path, dtype: str) -> None:
    """They are data, and no sizes, which are never below 1."""
    nodes = [node("Div", "ab", "q"), node("Mod", "ab", "r"), node("Mod", "ab", "f", fmod=1)]
    inputs = [value(name, ["seq"], dtype) for name in "ab"]
    made = model(nodes, inputs, [value(name, ["seq"], dtype) for name in "qrf"])
    run, session = compile_dynamic(load_dynamic(made, tmp_path, (SEQ,))), open_session(made)
    for length in (1, 7, 64):
        a = np.arange(-length, length, 2).astype(dtype)
        b = np.resize([-3, 2, -1, 5, -7], length).astype(dtype)
        for actual, expected in zip(run(a, b), session.run(None, {"a": a, "b": b}), strict=True):
            np.testing.assert_array_equal(actual.numpy(), expected)


def test_windows_of_float16_follow_channels_and_sizes(tmp_path: Path) -> None:
    """Loops over dynamic rows, in which loops over open columns have been split before."""
    pool = node("AveragePool", ["x"], ["y"], kernel_shape=[5, 3], strides=[2, 2], pads=[0, 0, 0, 1])
    made = model([pool], [value("x", [1, "h", "w", "h"], "float16")], [value("y", None, "float16")])
    dimensions = (Dimension("h", 3, 7), Dimension("w", 5, 12))
    agree_at(made, tmp_path, dimensions, [{"h": 3, "w": 5}, {"h": 7, "w": 12}, {"h": 4, "w": 9}])


def test_reductions_of_no_elements(tmp_path: Path) -> None:
    """They give their first value, also where the loop over the elements runs zero times."""
    g = Graph()
    rows = g.add("Slice", "x", integers(1), integers(1 << 62), integers(1))
    columns = g.add("Transpose", rows, perm=[0, 2, 1])
    cast = g.add("Cast", rows, to=onnx.TensorProto.INT64)
    product = g.add("ReduceProd", cast, axes=[1], keepdims=0)
    outputs = {
        **{
            f"{kind}{axis}": g.add(f"Reduce{kind}", tensor, axes=[axis], keepdims=0)
            for tensor, axis in ((rows, 1), (columns, 2))
            for kind in ("Max", "Min", "Prod", "L2", "LogSumExp", "SumSquare")
        },
        "sum": g.add("ReduceSum", columns, integers(2), keepdims=0),
        "integers": g.add("Cast", product, to=onnx.TensorProto.FLOAT),
        "softmax": g.add("Softmax", columns, axis=2),
    }
    sizes = [{"batch": 2, "seq": n} for n in (1, 2, 33)]
    agree_at(g.made(TEXT, outputs), tmp_path, (BATCH, SEQ), sizes)
    # ONNX Runtime leaves old memory there
    made = g.made(TEXT, {"y": g.add("MatMul", columns, rows)})
    run = compile_dynamic(load_dynamic(made, tmp_path, (BATCH, SEQ)))
    assert not run(draw(2, 1, 8)).numpy().any()


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners"])
def test_pixels_follow_from_a_fractional_scale(mode: str, coordinates: str, tmp_path: Path) -> None:
    """And not from the rounded size, but for align_corners; with fixed sizes alike."""
    how = {"mode": mode, "coordinate_transformation_mode": coordinates}
    scales = np.array([1, 1, 0.6, 1.7], np.float32)
    g = Graph()
    made = g.made(
        {"x": ([1, 2, "h", "w"], "float32")}, {"y": g.add("Resize", "x", "", scales, **how)}
    )
    dimensions = [Dimension("h", 3, 12), Dimension("w", 3, 12)]
    agree_at(made, tmp_path, dimensions, [{"h": 11, "w": 8}, {"h": 3, "w": 12}])
    agree(made, tmp_path, {"x": draw(1, 2, 11, 8)})


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_reflected_samples_of_images_of_one_pixel(mode: str, tmp_path: Path) -> None:
    """The length of an axis less 1 divides nothing: with one pixel, dividing by it ends the process."""
    places = np.random.default_rng(0).uniform(-1, 1, (1, 3, 4, 2)).astype(np.float32)
    how = {"mode": mode, "padding_mode": "reflection", "align_corners": 1}
    fixed = Graph()
    sampled = fixed.add("GridSample", "x", places, **how)
    agree(
        fixed.made({"x": ([1, 2, 1, 7], "float32")}, {"y": sampled}),
        tmp_path,
        {"x": draw(1, 2, 1, 7)},
    )
    g = Graph()
    made = g.made(
        {"x": ([1, 2, "h", "w"], "float32")}, {"y": g.add("GridSample", "x", places, **how)}
    )
    dimensions = [Dimension("h", 1, 12), Dimension("w", 1, 12)]
    if mode == "bicubic":
        with pytest.raises(ImportFailed, match="it is supported only with fixed sizes"):
            load_dynamic(made, tmp_path, dimensions)
        return
    agree_at(made, tmp_path, dimensions, [{"h": 7, "w": 12}, {"h": 1, "w": 5}, {"h": 1, "w": 1}])


def test_pixels_of_a_quotient_become_c_functions(tmp_path: Path) -> None:
    """TVM's analysis of quotients of float32 fails in a kernel of the C runtime alone."""
    g = Graph()
    scales = np.array([1, 1, 1.5, 2], np.float32)
    how = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    inputs: Inputs = {"x": ([1, 2, "h", 1], "float32")}
    made = g.made(inputs, {"y": g.add("Resize", "x", "", scales, **how)})
    loaded = load_dynamic(made, tmp_path, [Dimension("h", 1, 7)])
    target = make_target(host_level())
    lowered = lowering.lower(loaded.mod, target, LoweringOptions()).mod
    scheduled = schedules.schedule_untuned(lowered, host_level(), 1).mod
    kernels = {
        variable: function.with_attr("global_symbol", str(variable.name_hint))
        for variable, function in scheduled.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    assert len(lower_kernels(kernels, target).functions) == len(kernels)


def test_positions_follow_the_length_of_a_cache(tmp_path: Path) -> None:
    """Range(past, past + seq), as decoders number new tokens, and a mask of keys that are not behind these."""
    past = Dimension("past", 0, 40)
    g = Graph()
    length = g.add("Gather", g.add("Shape", "cache"), integers(1).reshape(()), axis=0)
    count = g.add("Gather", g.add("Shape", "x"), integers(1).reshape(()), axis=0)
    end = g.add("Add", length, count)
    one = integers(1).reshape(())
    positions = g.add("Range", length, end, one)
    keys = g.add("Range", integers(0).reshape(()), end, one)
    column = g.add("Unsqueeze", g.add("Unsqueeze", positions, integers(0)), integers(2))
    mask = g.add("LessOrEqual", keys, column)
    g.nodes.append(node("Cast", [mask], ["visible"], to=1))
    g.nodes.append(node("Cast", [column], ["numbers"], to=1))
    inputs = [value("x", [1, "seq"]), value("cache", [1, "past"])]
    outputs = [value("visible", None), value("numbers", None)]
    made = model(g.nodes, inputs, outputs, g.weights)
    sizes = [{"seq": seq, "past": p} for seq, p in ((1, 0), (5, 0), (1, 40), (7, 13))]
    agree_at(made, tmp_path, (past, SEQ), sizes)
