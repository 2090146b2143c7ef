"""Llama models with random weights, in the formats of all runtimes that `decode.py` compares.

Weights are float32, or block-quantized int4 or int8 (block size 32): `MatMulNBits` in ONNX, Q4_0 and Q8_0 in GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCK: Final = 32
MAX_TOKENS: Final = 8704
"""Number of rows of the rotary embedding tables."""
BITS: Final = {"int4": 4, "int8": 8}
_EPSILON: Final = 1e-6
_GGUF_NAMES: Final = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "norm": "attn_norm",
    "mlp_norm": "ffn_norm",
}

Array = np.ndarray[Any, Any]


class Llama(NamedTuple):
    """The hyperparameters of a model; heads have 64 elements."""

    layers: int
    width: int
    hidden: int
    heads: int
    cached_heads: int
    words: int

    @property
    def depth(self) -> int:
        """The number of elements of a head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(int(np.prod(shape)) for _, shape in self.shapes())

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight; matrices are (outputs, inputs)."""
        cached = self.cached_heads * self.depth
        yield "embedding", (self.words, self.width)
        for layer in range(self.layers):
            yield f"{layer}.norm", (self.width,)
            yield f"{layer}.q", (self.width, self.width)
            yield f"{layer}.k", (cached, self.width)
            yield f"{layer}.v", (cached, self.width)
            yield f"{layer}.o", (self.width, self.width)
            yield f"{layer}.mlp_norm", (self.width,)
            yield f"{layer}.gate", (self.hidden, self.width)
            yield f"{layer}.up", (self.hidden, self.width)
            yield f"{layer}.down", (self.width, self.hidden)
        yield "norm", (self.width,)
        yield "output", (self.words, self.width)

    def weights(self) -> Iterator[tuple[str, Array]]:
        """Yield the name and values of each weight."""
        random = np.random.default_rng(0)
        for name, shape in self.shapes():
            drawn = random.standard_normal(shape, dtype=np.float32)
            yield name, drawn * 0.05 + 1 if len(shape) == 1 else drawn * shape[1] ** -0.5


SIZES: Final = {
    30: Llama(layers=8, width=512, hidden=1408, heads=8, cached_heads=2, words=8000),
    120: Llama(layers=9, width=1024, hidden=2816, heads=16, cached_heads=4, words=8000),
    1000: Llama(layers=20, width=2048, hidden=5632, heads=32, cached_heads=4, words=32000),
}
"""Millions of weights -> model."""


def state_names(model: Llama) -> list[str]:
    """Return the names of the cached tensors without their prefix, such as `0.key`."""
    return [f"{layer}.{kind}" for layer in range(model.layers) for kind in ("key", "value")]


# ---------------------------------------------------------------- ONNX


class _Graph:
    def __init__(self, model: Llama, weights: str) -> None:
        self.model = model
        self.bits = BITS.get(weights)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, values: Any, dtype: Any = np.float32) -> str:
        """Add a constant and return its name."""
        array = np.ascontiguousarray(np.asarray(values, dtype))
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def op(
        self, operator: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> Any:
        """Add a node and return the name of its output, or the names of several outputs."""
        names = [f"{operator.lower()}_{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names if outputs > 1 else names[0]

    def matmul(self, data: str, name: str, weight: Array) -> str:
        """Add the matmul of data and a weight of shape (outputs, inputs)."""
        if self.bits is None:
            return str(self.op("MatMul", data, self.constant(name, weight.T)))
        rows, columns = weight.shape
        values, scales = quantize(weight, self.bits)
        if self.bits == 4:
            values = values[..., ::2] | values[..., 1::2] << 4
        parameters = [
            self.constant(name, values, np.uint8),
            self.constant(f"{name}.scales", scales.ravel()),
        ]
        attributes = {"N": rows, "K": columns, "bits": self.bits, "block_size": BLOCK}
        domain = "com.microsoft"
        return str(
            self.op("MatMulNBits", data, *parameters, domain=domain, accuracy_level=4, **attributes)
        )

    def norm(self, data: str, name: str, weight: Array) -> str:
        """Add the RMS norm of data."""
        mean = self.op("ReduceMean", self.op("Pow", data, "two"), "last_axis", keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, "epsilon"))
        return str(self.op("Mul", self.op("Div", data, root), self.constant(name, weight)))


def quantize(weight: Array, bits: int) -> tuple[Array, Array]:
    """Return the values (1 to 2^bits - 1) of blocks (rows, blocks, 32), and their float16-exact scales."""
    blocks = weight.reshape(len(weight), -1, BLOCK)
    zero = 1 << (bits - 1)
    scales = (np.abs(blocks).max(-1) / (zero - 1)).astype(np.float16).astype(np.float32)
    values = np.rint(blocks / scales[..., None]) + zero
    return np.clip(values, 1, 2 * zero - 1).astype(np.uint8), scales


def make_onnx(model: Llama, weights: str, path: Path, *, fused: bool = False) -> None:
    """Write a model with its KV cache as inputs and outputs, and the logits of the last token.

    With `fused`, attention is ONNX Runtime's operator `GroupQueryAttention`, which appends to its cache in place.
    """
    graph = _Graph(model, weights)
    values = dict(model.weights())
    graph.constant("two", 2.0)
    graph.constant("epsilon", _EPSILON)
    graph.constant("last_axis", [-1], np.int64)
    angles = np.arange(MAX_TOKENS)[:, None] / 10000 ** (np.arange(0, model.depth, 2) / model.depth)
    tables = [graph.constant("cos", np.cos(angles)), graph.constant("sin", np.sin(angles))]
    attend = _attend_fused(graph) if fused else _attend(graph, tables)
    x = graph.op("Gather", graph.constant("embedding", values["embedding"]), "input_ids")
    outputs = []
    for layer in range(model.layers):
        own = {name: values[f"{layer}.{name}"] for name in _GGUF_NAMES}

        def multiply(data: str, name: str, own: Any = own, layer: int = layer) -> str:
            return graph.matmul(data, f"{layer}.{name}", own[name])

        data = graph.norm(x, f"{layer}.norm", own["norm"])
        mixed, *present = attend(layer, *(multiply(data, name) for name in "qkv"))
        outputs += present
        x = graph.op("Add", x, multiply(mixed, "o"))
        data = graph.norm(x, f"{layer}.mlp_norm", own["mlp_norm"])
        gate = multiply(data, "gate")
        gate = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        x = graph.op("Add", x, multiply(graph.op("Mul", gate, multiply(data, "up")), "down"))
    ends = [graph.constant(f"slice_{n}", [n], np.int64) for n in (-1, 1 << 40, 1)]
    last = graph.op("Slice", x, *ends[:2], ends[2])
    logits = graph.matmul(graph.norm(last, "norm", values["norm"]), "output", values["output"])
    names = [f"present.{name}" for name in state_names(model)]
    for made, name in zip([logits, *outputs], ["logits", *names], strict=True):
        graph.nodes.append(helper.make_node("Identity", [made], [name]))
    _write(graph, path, names, fused=fused)


def _write(graph: _Graph, path: Path, names: list[str], *, fused: bool) -> None:
    model = graph.model
    floats, integers = TensorProto.FLOAT, TensorProto.INT64
    inputs = [helper.make_tensor_value_info("input_ids", integers, [1, "seq"])]
    if fused:
        inputs.append(helper.make_tensor_value_info("attention_mask", integers, [1, "total"]))
    else:
        inputs.append(helper.make_tensor_value_info("position_ids", integers, [1, "seq"]))

    def cache(name: str, length: str) -> Any:
        return helper.make_tensor_value_info(
            name, floats, [1, model.cached_heads, length, model.depth]
        )

    inputs += [cache(f"past_key_values.{name}", "past") for name in state_names(model)]
    outputs = [helper.make_tensor_value_info("logits", floats, [1, 1, model.words])]
    outputs += [cache(name, "total") for name in names]
    made = helper.make_graph(graph.nodes, "llama", inputs, outputs, graph.constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(made, opset_imports=imports, ir_version=10)
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")


def _attend(graph: _Graph, tables: list[str]) -> Any:
    """Return a function that adds a layer's attention as exported by frameworks."""
    model = graph.model
    group = model.heads // model.cached_heads

    def integers(name: str, values: list[int]) -> str:
        return graph.constant(name, values, np.int64)

    shapes = {
        heads: integers(f"heads_{heads}", [0, 0, heads, model.depth])
        for heads in {model.heads, model.cached_heads}
    }
    joined, one = integers("joined", [0, 0, model.width]), integers("axis_1", [1])
    zero, two_axis = integers("axis_0", [0]), integers("axis_2", [2])
    last, step = integers("axis_3", [3]), integers("step", [1])
    repeated = integers("repeated", [1, model.heads, -1, model.depth])
    halves = [integers(f"half_{n}", [n * model.depth // 2]) for n in range(3)]
    scale = graph.constant("scale", model.depth**-0.5)
    lowest = graph.constant("lowest", np.float32(-1e30))
    nothing = graph.constant("nothing", 0.0)
    copies = integers("copies", [1, 1, group, 1, 1])
    shared: dict[str, str] = {}

    def split(data: str, heads: int) -> str:
        return str(
            graph.op("Transpose", graph.op("Reshape", data, shapes[heads]), perm=[0, 2, 1, 3])
        )

    def rotate(data: str) -> str:
        if "cos" not in shared:
            for table in tables:
                rows = graph.op("Gather", table, "position_ids")
                both = graph.op("Concat", rows, rows, axis=-1)
                shared[table] = graph.op("Unsqueeze", both, one)
        first = graph.op("Slice", data, halves[0], halves[1], last, step)
        second = graph.op("Slice", data, halves[1], halves[2], last, step)
        turned = graph.op("Concat", graph.op("Neg", second), first, axis=-1)
        parts = [graph.op("Mul", data, shared["cos"]), graph.op("Mul", turned, shared["sin"])]
        return str(graph.op("Add", *parts))

    def mask(present: str) -> str:
        if "mask" not in shared:
            total = graph.op("Gather", graph.op("Shape", present), two_axis, axis=0)
            ends = [graph.op("Squeeze", end, zero) for end in (zero, total, step)]
            keys = graph.op("Range", *ends)
            queries = graph.op("Unsqueeze", graph.op("Unsqueeze", "position_ids", one), last)
            seen = graph.op("LessOrEqual", keys, queries)
            shared["mask"] = graph.op("Where", seen, nothing, lowest)
        return shared["mask"]

    def repeat(data: str) -> str:
        if group == 1:
            return data
        spread = graph.op("Expand", graph.op("Unsqueeze", data, two_axis), copies)
        return str(graph.op("Reshape", spread, repeated))

    def attend(layer: int, q: str, k: str, v: str) -> tuple[str, str, str]:
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        queries = rotate(split(q, model.heads))
        new = [rotate(split(k, model.cached_heads)), split(v, model.cached_heads)]
        keys, values = (graph.op("Concat", *pair, axis=2) for pair in zip(past, new, strict=True))
        turned = graph.op("Transpose", repeat(keys), perm=[0, 1, 3, 2])
        scores = graph.op("Mul", graph.op("MatMul", queries, turned), scale)
        weights = graph.op("Softmax", graph.op("Add", scores, mask(keys)), axis=-1)
        mixed = graph.op("MatMul", weights, repeat(values))
        return (
            graph.op("Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), joined),
            keys,
            values,
        )

    return attend


def _attend_fused(graph: _Graph) -> Any:
    """Return a function that adds a layer's attention as ONNX Runtime's fused operator."""
    model = graph.model
    axis, one = graph.constant("mask_axis", [1], np.int64), graph.constant("one", 1, np.int64)
    counts = graph.op("Sub", graph.op("ReduceSum", "attention_mask", axis), one)
    total = graph.op("Gather", graph.op("Shape", "attention_mask"), one, axis=0)
    lengths = [graph.op("Cast", value, to=TensorProto.INT32) for value in (counts, total)]

    def attend(layer: int, q: str, k: str, v: str) -> Any:
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        inputs = (q, k, v, *past, *lengths, "cos", "sin")
        heads = {"num_heads": model.heads, "kv_num_heads": model.cached_heads}
        domain = "com.microsoft"
        return graph.op(
            "GroupQueryAttention", *inputs, domain=domain, outputs=3, do_rotary=1, **heads
        )

    return attend


# ---------------------------------------------------------------- GGUF


def make_gguf(model: Llama, weights: str, path: Path) -> None:
    """Write a model for llama.cpp, with q and k rows permuted, because it rotates pairs of neighbors."""
    import gguf

    bits = BITS.get(weights)
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "int8": kinds.Q8_0, "int4": kinds.Q4_0}[weights]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(model.layers)
    writer.add_context_length(MAX_TOKENS)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.hidden)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.cached_heads)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_rope_dimension_count(model.depth)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(model.words)
    writer.add_tokenizer_model("none")
    names = {"embedding": "token_embd", "norm": "output_norm", "output": "output"}
    for name, values in model.weights():
        layer, _, part = name.rpartition(".")
        own = f"blk.{layer}.{_GGUF_NAMES[part]}" if layer else names[name]
        if part in ("q", "k") and layer:
            rows = values.reshape(-1, 2, model.depth // 2, values.shape[1])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 2 and bits and name != "embedding":
            writer.add_tensor(f"{own}.weight", _blocks_of_gguf(values, bits), raw_dtype=kind)
        else:
            writer.add_tensor(f"{own}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks_of_gguf(weight: Array, bits: int) -> Array:
    """Return the bytes of quantized blocks: a float16 scale each, then its values."""
    values, scales = quantize(weight, bits)
    heads = scales.astype(np.float16)[..., None].view(np.uint8)
    half = BLOCK // 2
    if bits == 4:
        values = values[..., :half] | values[..., half:] << 4
    else:
        values = (values.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    return np.concatenate([heads, values], axis=-1).reshape(len(weight), -1)
