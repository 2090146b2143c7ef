"""A step of a decoder with a KV cache: attention of new tokens over those before, as exporters write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS: Final = 2
DEPTH: Final = 16
WIDTH: Final = HEADS * DEPTH
LENGTH: Final = 40
"""The most tokens of a language model."""

Array = np.ndarray[Any, Any]

RECIPE: Final = """\
recipe: 1
name: cached
model: {onnx: cached.onnx}
dimensions:
  seq: {max: 12}
  past: {min: 0, max: 40}
inputs:
  x: {shape: [1, seq, 32]}
  mask: {shape: [1, past + seq], range: [0, 1]}
  past_key: {shape: [1, 2, past, 16]}
  past_value: {shape: [1, 2, past, 16]}
targets: [host]
tune: {trials: 0}
verify: {repeat: 2}
outputs: [c-library, bundle]
"""


LANGUAGE: Final = """\
recipe: 1
name: words
model: {onnx: words.onnx}
dimensions:
  seq: {max: 12}
  past: {min: 0, max: 39}
inputs:
  input_ids: {shape: [1, seq], range: [0, 19]}
  position_ids: {shape: [1, seq], range: [0, 39]}
  mask: {shape: [1, past + seq], range: [0, 1]}
  past_key: {shape: [1, 2, past, 16]}
  past_value: {shape: [1, 2, past, 16]}
state: {past_*: present_*}
targets: [host]
tune: {trials: 0}
verify: {repeat: 2}
outputs: [bundle]
"""


def write_cached_attention(path: Path, *, words: int = 0) -> dict[str, Array]:
    """Write the model: `x` (1, seq, 32), `mask` (1, past + seq) and the cache to `y` and the larger cache.

    A mask of 0 hides a token. With `words`, it takes `input_ids` (1, seq) and `position_ids` of so many tokens in
    place of `x`, and returns their `logits`. Returns the weights.
    """
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.normal(size=(WIDTH, WIDTH)) / 4).astype(np.float32)
        for name in ("query", "key", "value")
    }
    constants = {
        "split": np.array([1, -1, HEADS, DEPTH]),
        "joined": np.array([1, -1, WIDTH]),
        "scale": np.array(DEPTH**-0.5, np.float32),
        "one": np.array(1, np.float32),
        "hidden": np.array(-10000, np.float32),
        "axes": np.array([1, 2]),
    }
    nodes = []
    for name in weights:
        nodes += [
            helper.make_node("MatMul", ["x", name], [f"{name}_rows"]),
            helper.make_node("Reshape", [f"{name}_rows", "split"], [f"{name}_split"]),
            helper.make_node("Transpose", [f"{name}_split"], [f"new_{name}"], perm=[0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("Concat", ["past_key", "new_key"], ["present_key"], axis=2),
        helper.make_node("Concat", ["past_value", "new_value"], ["present_value"], axis=2),
        helper.make_node("Transpose", ["present_key"], ["columns"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["new_query", "columns"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scaled"]),
        helper.make_node("Sub", ["one", "mask"], ["outside"]),
        helper.make_node("Mul", ["outside", "hidden"], ["bias_rows"]),
        helper.make_node("Unsqueeze", ["bias_rows", "axes"], ["bias"]),
        helper.make_node("Add", ["scaled", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "present_value"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["mixed_rows"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["mixed_rows", "joined"], ["y"]),
    ]
    tables = {}
    if words:
        tables = {
            name: rng.normal(size=shape).astype(np.float32)
            for name, shape in (
                ("tokens", (words, WIDTH)),
                ("positions", (LENGTH, WIDTH)),
                ("head", (WIDTH, words)),
            )
        }
        nodes = [
            helper.make_node("Gather", ["tokens", "input_ids"], ["token_rows"]),
            helper.make_node("Gather", ["positions", "position_ids"], ["position_rows"]),
            helper.make_node("Add", ["token_rows", "position_rows"], ["x"]),
            *nodes,
            helper.make_node("MatMul", ["y", "head"], ["logits"]),
        ]
    first = ("input_ids", "position_ids") if words else ("x",)
    sides: dict[str, list[int | str]] = {
        **({name: [1, "seq"] for name in first} if words else {"x": [1, "seq", WIDTH]}),
        "mask": [1, "past + seq"],
        "past_key": [1, HEADS, "past", DEPTH],
        "past_value": [1, HEADS, "past", DEPTH],
        **({"logits": [1, "seq", words]} if words else {"y": [1, "seq", WIDTH]}),
        "present_key": [1, HEADS, "past + seq", DEPTH],
        "present_value": [1, HEADS, "past + seq", DEPTH],
    }
    infos = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name.endswith("_ids") else TensorProto.FLOAT, shape
        )
        for name, shape in sides.items()
    ]
    arrays = {**weights, **constants, **tables}
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    count = len(first) + 3
    graph = helper.make_graph(nodes, "cached", infos[:count], infos[count:], tensors)
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path
    )
    return {**weights, **tables}


def attend(
    weights: dict[str, Array], x: Array, mask: Array, past: tuple[Array, Array]
) -> list[Array]:
    """Return `y` and the larger cache, computed by NumPy."""
    heads = {
        name: (x @ weights[name]).reshape(1, -1, HEADS, DEPTH).transpose(0, 2, 1, 3)
        for name in ("query", "key", "value")
    }
    keys = np.concatenate([past[0], heads["key"]], axis=2)
    values = np.concatenate([past[1], heads["value"]], axis=2)
    scores = heads["query"] @ keys.transpose(0, 1, 3, 2) * DEPTH**-0.5
    scores = scores - (1 - mask[:, None, None, :]) * 10000
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = exponentials / exponentials.sum(-1, keepdims=True) @ values
    return [mixed.transpose(0, 2, 1, 3).reshape(1, -1, WIDTH), keys, values]


RECURRENT: Final = """\
recipe: 1
name: recurrent
model: {onnx: recurrent.onnx}
state: {h: hn, c: cn}
targets: [host]
tune: {trials: 0}
verify: {repeat: 2}
outputs: [bundle]
"""


def write_lstm(path: Path) -> None:
    """Write an LSTM of one step: `x` (1, 1, 6), `h` and `c` (1, 1, 8) to `y` (1, 1, 8), `hn` and `cn`."""
    rng = np.random.default_rng(1)
    shapes = {"w": (1, 32, 6), "r": (1, 32, 8), "b": (1, 64)}
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node(
            "LSTM", ["x", "w", "r", "b", "", "h", "c"], ["steps", "hn", "cn"], hidden_size=8
        ),
        helper.make_node("Squeeze", ["steps", "first"], ["y"]),
    ]
    weights.append(numpy_helper.from_array(np.array([1]), "first"))
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, size])
        for name, size in (("x", 6), ("h", 8), ("c", 8), ("y", 8), ("hn", 8), ("cn", 8))
    ]
    graph = helper.make_graph(nodes, "recurrent", infos[:3], infos[3:], weights)
    onnx.save(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path
    )
