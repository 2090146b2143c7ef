"""Writes three small models into models/: a detector, a classifier whose output is an index, and a network."""

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path("models")
random = np.random.default_rng(0)


def node(operator, inputs, outputs, **attributes):
    """Return a node that is named for its outputs."""
    return helper.make_node(operator, inputs.split(), outputs.split(), name=outputs, **attributes)


def weights(**shapes):
    """Return random weights by name."""
    return {name: random.normal(0, 0.3, shape).astype("float32") for name, shape in shapes.items()}


def save(name, nodes, constants, inputs, outputs):
    """Write a model."""
    sides = [
        [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(np.asarray(value), n) for n, value in constants.items()]
    graph = helper.make_graph(nodes, name, *sides, tensors)
    opset = helper.make_opsetid("", 18)
    model = helper.make_model(graph, ir_version=9, opset_imports=[opset])
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, FOLDER / f"{name}.onnx")


def detector():
    """Write a detector with 64 candidate boxes and no limit on the selected ones, as PyTorch exports it."""
    nodes = [
        node("Conv", "image stem", "features", pads=[1, 1, 1, 1], strides=[4, 4]),
        node("Relu", "features", "active"),
        node("Conv", "active head", "raw"),
        node("Reshape", "raw five", "rows"),
        node("Split", "rows parts", "offsets logits", axis=1),
        node("Transpose", "offsets", "columns", perm=[0, 2, 1]),
        node("Add", "columns anchors", "boxes"),
        node("Sigmoid", "logits", "scores"),
        node("NonMaxSuppression", "boxes scores most overlap least", "selected"),
        node("Gather", "selected two", "numbers", axis=1),
        node("Squeeze", "boxes first", "all_boxes"),
        node("Gather", "all_boxes numbers", "detections", axis=0),
    ]
    corners = np.stack(np.meshgrid(np.arange(8), np.arange(8), indexing="ij"), -1).reshape(1, 64, 2)
    constants = {
        **weights(stem=(8, 3, 3, 3), head=(5, 8, 1, 1)),
        "five": np.array([1, 5, 64]),
        "parts": np.array([4, 1]),
        "anchors": np.concatenate([corners, corners + 2], -1).astype("float32"),
        "most": np.array([2**63 - 1]),
        "overlap": np.array([0.5], "float32"),
        "least": np.array([0.3], "float32"),
        "two": np.array(2),
        "first": np.array([0]),
    }
    image = {"image": (TensorProto.FLOAT, [1, 3, 32, 32])}
    save("detector", nodes, constants, image, {"detections": (TensorProto.FLOAT, ["count", 4])})


def classifier():
    """Write a model whose output is a class, not its score."""
    nodes = [
        node("Conv", "image first", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("GlobalAveragePool", "b", "c"),
        node("Flatten", "c", "d"),
        node("Gemm", "d dense", "logits", transB=1),
        node("ArgMax", "logits", "class", axis=1, keepdims=0),
    ]
    image = {"image": (TensorProto.FLOAT, [1, 3, 32, 32])}
    constants = weights(first=(16, 3, 3, 3), dense=(10, 16))
    save("classifier", nodes, constants, image, {"class": (TensorProto.INT64, [1])})


def network(channels):
    """Write a model of four convolutions; the last one has `channels` output channels."""
    nodes = [
        node("Conv", "image first", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b second", "c", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "c", "d"),
        node("Conv", "d third", "e", pads=[1, 1, 1, 1]),
        node("Relu", "e", "f"),
        node("Conv", "f last", "scores", pads=[1, 1, 1, 1], strides=[2, 2]),
    ]
    image = {"image": (TensorProto.FLOAT, [1, 3, 64, 64])}
    shapes = {"first": (16, 3, 3, 3), "second": (32, 16, 3, 3), "third": (32, 32, 3, 3)}
    constants = weights(**shapes, last=(channels, 32, 3, 3))
    scores = {"scores": (TensorProto.FLOAT, [1, channels, 16, 16])}
    save("net", nodes, constants, image, scores)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--channels", type=int, default=16)
FOLDER.mkdir(exist_ok=True)
detector()
classifier()
network(parser.parse_args().channels)
