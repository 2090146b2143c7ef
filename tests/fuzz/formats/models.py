"""Mutated ONNX models and MXNet checkpoints: each is imported, or refused with a message."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import tvm  # noqa: F401 - loaded once, not in every child
from onnx import helper

from tests.fuzz.formats.cases import Case, expecting_refusals
from tests.support.mutations import mutate_bytes, mutate_message, mutate_tree
from tests.support.onnx_models import Array, model, value
from tests.support.onnx_models import draw as normal
from tests.support.recipes import ROOT
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS

onnx_frontend = FRONTENDS["onnx"]
mxnet = FRONTENDS["mxnet"]

MODELS: Final = ROOT / "recipes" / "models"
DIGITS: Final = (TensorSpec("data", (1, 1, 8, 8), "float32"),)


def _node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def _shapes() -> onnx.ModelProto:
    """Shape arithmetic: what an importer evaluates, and what may ask for much memory."""
    weights = {
        "two": np.array([2, 2], np.int64),
        "start": np.array(0, np.int64),
        "limit": np.array(6, np.int64),
        "step": np.array(1, np.int64),
        "axes": np.array([0], np.int64),
        "shape": np.array([2, 6], np.int64),
        "repeats": np.array([1, 2], np.int64),
        "pads": np.array([0, 1, 0, 1], np.int64),
    }
    nodes = [
        _node("Range", "start limit step", "range"),
        _node("Cast", "range", "floats", to=1),
        _node("Expand", "floats shape", "wide"),
        _node("Add", "x wide", "sum"),
        _node("Tile", "sum repeats", "tiled"),
        _node("Pad", "tiled pads", "padded"),
        _node("Shape", "padded", "sides"),
        _node("Gather", "sides axes", "rows"),
        _node("ConstantOfShape", "rows", "zeros"),
        _node("ReduceMean", "padded", "mean", axes=[1], keepdims=0),
        _node("Add", "mean zeros", "y"),
    ]
    return model(nodes, [value("x", [2, 6])], [value("y", [2])], weights, opset=13)


def _convolutions() -> onnx.ModelProto:
    weights = {
        "w": normal(4, 3, 3, 3),
        "scale": np.ones(4, np.float32),
        "bias": normal(4),
        "mean": normal(4),
        "var": np.ones(4, np.float32),
        "dense": normal(64, 5),
        "sides": np.array([1, -1], np.int64),
    }
    nodes = [
        _node("Conv", "x w", "c", pads=[1, 1, 1, 1], strides=[1, 1], group=1),
        _node("BatchNormalization", "c scale bias mean var", "n"),
        _node("Relu", "n", "r"),
        _node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
        _node("Reshape", "p sides", "f"),
        _node("Gemm", "f dense", "g", alpha=1.0),
        _node("Softmax", "g", "y", axis=-1),
    ]
    return model(nodes, [value("x", [1, 3, 8, 8])], [value("y", [1, 5])], weights)


def _branches() -> onnx.ModelProto:
    """If, Split, Slice, Concat, Transpose, Resize."""
    then = helper.make_graph([_node("Relu", "x", "t")], "then", [], [value("t", [1, 2, 4, 4])])
    other = helper.make_graph([_node("Neg", "x", "e")], "else", [], [value("e", [1, 2, 4, 4])])
    weights: dict[str, Array] = {
        "yes": np.array(True),
        "starts": np.array([1], np.int64),
        "ends": np.array([3], np.int64),
        "axes": np.array([2], np.int64),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    nodes = [
        helper.make_node("If", ["yes"], ["i"], then_branch=then, else_branch=other),
        _node("Split", "i", "a b", axis=1),
        _node("Concat", "b a", "c", axis=1),
        _node("Slice", "c starts ends axes", "s"),
        _node("Resize", "s  scales", "z", mode="nearest"),
        _node("Transpose", "z", "y", perm=[0, 2, 3, 1]),
    ]
    nodes[4].input[:] = ["s", "", "scales"]
    return model(nodes, [value("x", [1, 2, 4, 4])], [value("y", [1, 4, 8, 2])], weights, opset=13)


def _quantized() -> onnx.ModelProto:
    weights: dict[str, Array] = {
        "s": np.array(0.1, np.float32),
        "z": np.array(3, np.uint8),
        "w": np.arange(12, dtype=np.uint8).reshape(4, 3),
    }
    nodes = [
        _node("QuantizeLinear", "x s z", "q"),
        _node("DequantizeLinear", "q s z", "d"),
        _node("DequantizeLinear", "w s z", "v"),
        _node("MatMul", "d v", "m"),
        _node("LayerNormalization", "m ln", "y", axis=-1),
    ]
    weights["ln"] = np.ones(3, np.float32)
    return model(nodes, [value("x", [2, 4])], [value("y", [2, 3])], weights)


_CORPUS: list[onnx.ModelProto] = []


def prepare(folder: Path) -> None:
    """Make the models that are mutated."""
    _CORPUS.extend((_shapes(), _convolutions(), _branches(), _quantized()))
    _CORPUS.append(onnx.load(MODELS / "digits.onnx"))
    for number, made in enumerate(_CORPUS):
        path = folder / f"{number}.onnx"
        path.write_bytes(made.SerializeToString())
        onnx.checker.check_model(made)


def make_case(draw: random.Random, folder: Path) -> Case:
    make = _mxnet_case if draw.random() < 0.3 else _onnx_case
    action = make(draw, folder)
    return Case(lambda: expecting_refusals(action))


def _onnx_case(draw: random.Random, folder: Path) -> Callable[[], object]:
    made = draw.choice(_CORPUS)
    path = folder / "model.onnx"
    if draw.random() < 0.25:
        path.write_bytes(mutate_bytes(draw, made.SerializeToString()))
    else:
        path.write_bytes(mutate_message(draw, made))
    return lambda: onnx_frontend.load({"model": path}, ())


def _mxnet_case(draw: random.Random, folder: Path) -> Callable[[], object]:
    symbol = (MODELS / "digits-symbol.json").read_bytes()
    params = (MODELS / "digits-0010.params").read_bytes()
    kind = draw.randrange(3)
    if kind == 0:
        symbol = json.dumps(mutate_tree(draw, json.loads(symbol))).encode()
    elif kind == 1:
        symbol = mutate_bytes(draw, symbol)
    else:
        # most of a checkpoint is numbers; its structure is at its ends
        ends = draw.choice((200, 2000, len(params)))
        head = mutate_bytes(draw, params[:ends])
        tail = mutate_bytes(draw, params[-ends:])
        params = head + params[ends:] if draw.random() < 0.5 else params[:-ends] + tail
    files = {"symbol": folder / "net-symbol.json", "params": folder / "net-0010.params"}
    files["symbol"].write_bytes(symbol)
    files["params"].write_bytes(params)
    return lambda: mxnet.load(files, DIGITS)
