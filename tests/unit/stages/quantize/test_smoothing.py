"""Smoothing: channels of very different size are equalized where layers gain by it, and results stay the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import load, model, value
from tvmflow.frontends.base import LoadedModel
from tvmflow.stages.quantize.channels import (
    channel_axis,
    find_factors,
    list_smoothable,
    smooth,
)
from tvmflow.stages.quantize.insertion import read_weights
from tvmflow.stages.quantize.points import FloatModel, fold_model, list_layers


def _load(folder: Path, gain: float) -> LoadedModel:
    """Return a norm with one large channel that two products read, and a convolution that a depthwise one reads."""
    random = np.random.default_rng(0)
    shapes = {"w0": (16, 16), "w1": (16, 16), "c": (8, 3, 1, 1), "d": (8, 1, 3, 3)}
    weights: dict[str, Any] = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    weights |= {"gain": np.ones(16), "shift": np.zeros(16)}
    weights["gain"][3] = gain
    weights["c"][2] *= gain
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w0"], ["y0"], "query"),
        helper.make_node("MatMul", ["n", "w1"], ["y1"], "key"),
        helper.make_node("Conv", ["i", "c"], ["e"], "conv"),
        helper.make_node("Relu", ["e"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "d"], ["y2"], "depthwise", group=8, pads=[1] * 4),
    ]
    return load(
        model(
            nodes,
            [value("x", [4, 16]), value("i", [1, 3, 6, 6])],
            [value(f"y{place}", None) for place in range(3)],
            {name: array.astype(np.float32) for name, array in weights.items()},
        ),
        folder,
        {"x": np.zeros((4, 16), np.float32), "i": np.zeros((1, 3, 6, 6), np.float32)},
    )


def _fold(loaded: LoadedModel) -> FloatModel:
    return fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))


@pytest.mark.parametrize("gain", [1.0, 100.0])
def test_one_large_channel_is_divided_and_its_weights_are_multiplied(
    tmp_path: Path, gain: float
) -> None:
    """Only where it is large; the float model gives the same bits."""
    loaded = _load(tmp_path, gain)
    plain = _fold(loaded)
    layers = list_layers(plain)
    smoothable = list_smoothable(plain, layers)
    assert [[layer.name for layer in own] for own in smoothable.values()] == [
        ["query", "key"],
        ["depthwise"],
    ]
    assert [channel_axis(own[0]) for own in smoothable.values()] == [-1, 1]
    largest = dict(zip(smoothable, (np.full(16, 2.0), np.full(8, 3.0)), strict=True))
    for sizes, place in zip(largest.values(), (3, 2), strict=True):
        sizes[place] *= gain
    factors = find_factors(plain, smoothable, read_weights(plain, layers), largest)
    if gain == 1:
        assert factors == {}
        return
    assert len(factors) == 2
    for own, place in zip(factors.values(), (3, 2), strict=True):
        assert own[place] == 1 and np.delete(own, place).max() <= 1 / 8
        assert (np.frexp(own)[0] == 0.5).all()
    changed = smooth(plain, smoothable, factors)
    assert [layer.name for layer in list_layers(changed)] == [layer.name for layer in layers]
    random = np.random.default_rng(1)
    feed = {
        "x": random.normal(size=(4, 16)).astype(np.float32),
        "i": random.normal(size=(1, 3, 6, 6)).astype(np.float32),
    }
    results = [
        compute(loaded._replace(mod=one.mod, params=dict(one.params), nodes=tuple(one.nodes)), feed)
        for one in (plain, changed)
    ]
    for before, after in zip(*results, strict=True):
        assert np.array_equal(before, after)
