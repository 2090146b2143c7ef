"""Corrected means: what rounding shifts a channel by on average is taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import load, model, value
from tvmflow.graph import ir
from tvmflow.stages.quantize.channels import ChannelSums, channel_axis, find_correction
from tvmflow.stages.quantize.insertion import (
    DataScale,
    LayerWeights,
    Quantization,
    insert,
    read_weights,
    round_weights,
)
from tvmflow.stages.quantize.points import FloatModel, Integers, fold_model, list_layers

_INTEGERS = Integers("uint8")
# cuts the largest numbers off
_SCALE = DataScale(1 / 128, 64)


def test_the_mean_error_of_each_channel_is_taken_back(tmp_path: Path) -> None:
    """Of matrix products, of convolutions with groups, strides and padding, and of transposed ones."""
    random = np.random.default_rng(0)
    shapes = {"w": (16, 8), "c": (6, 2, 3, 3), "d": (4, 1, 3, 3), "t": (4, 5, 4, 3)}
    weights = {name: random.normal(0, 1, own).astype(np.float32) for name, own in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y0"], "product"),
        helper.make_node("Conv", ["i", "c"], ["y1"], "two", group=2, pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Conv", ["i", "d"], ["y2"], "depthwise", group=4, pads=[2, 1, 1, 0]),
        helper.make_node(
            *("ConvTranspose", ["i", "t"], ["y3"], "transposed"),
            **{"pads": [1, 0, 2, 1], "strides": [2, 3], "output_padding": [1, 2]},
        ),
    ]
    # a channel of an image is one number, so that its mean is that of every window
    feed = {
        "x": random.normal(0.5, 1, (64, 16)).astype(np.float32),
        "i": np.broadcast_to(random.normal(size=(1, 4, 1, 1)), (1, 4, 7, 6)).astype(np.float32),
    }
    inputs = [value(name, array.shape) for name, array in feed.items()]
    made = model(nodes, inputs, [value(f"y{place}", None) for place in range(4)], weights)
    loaded = load(made, tmp_path, feed)
    plain = fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))
    layers, flow = list_layers(plain), ir.DataFlow(plain.main)
    floats = read_weights(plain, layers)
    rounded: dict[object, LayerWeights] = {}
    corrections = {}
    for layer in layers:
        rounded[layer.var] = round_weights(floats[layer.var], layer.axis)
        sums = ChannelSums(channel_axis(layer), _SCALE, _INTEGERS)
        sums.add(feed[str(layer.data.name)])
        corrections[layer.var] = find_correction(
            *(layer, flow.values[layer.var], floats[layer.var], rounded[layer.var]),
            sums.read_means(),
        )
    data = dict.fromkeys((layer.data for layer in layers), _SCALE)
    uncorrected = Quantization(_INTEGERS, rounded, data)
    exact, shifted, corrected = (
        compute(loaded._replace(mod=one.mod, params=dict(one.params), nodes=tuple(one.nodes)), feed)
        for one in (
            plain,
            insert(plain, layers, uncorrected),
            insert(plain, layers, replace(uncorrected, corrections=corrections)),
        )
    )
    for expected, before, after in zip(exact, shifted, corrected, strict=True):
        axes = tuple(axis for axis in range(expected.ndim) if axis != 1)
        errors = [np.abs((one - expected).mean(axis=axes)).max() for one in (before, after)]
        assert errors[1] < errors[0] / 100


def test_a_part_of_the_positions_tells_the_means() -> None:
    """Of each channel the same number is left out, from another place in each batch."""
    random = np.random.default_rng(0)
    whole, part = (ChannelSums(1, _SCALE, _INTEGERS) for _ in range(2))
    for place in range(8):
        values = random.normal(0.5, 0.2, (1, 3, 40, 50)).astype(np.float32)
        whole.add(values)
        part.add(values, place % 3, 3)
    for expected, found in zip(whole.read_means(), part.read_means(), strict=True):
        np.testing.assert_allclose(found, expected, atol=0.01)
