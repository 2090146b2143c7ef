"""Gains: what a layer saves with integers, by the model of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from tests.support.onnx_models import load, model, value
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.graph import ir
from tvmflow.stages.quantize.control import estimate_gains
from tvmflow.stages.quantize.points import FloatModel, fold_model, list_layers


def test_gains_are_parts_of_the_time_of_a_cpu(tmp_path: Path) -> None:
    """Sums of four products save more than those of two; a product of no multiple of four saves nothing."""
    random = np.random.default_rng(0)
    shapes = {"c": (32, 32, 3, 3), "d": (32, 1, 3, 3), "w": (14, 64)}
    weights: dict[str, Any] = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["x", "c"], ["a"], "conv", pads=[1] * 4),
        helper.make_node("Conv", ["a", "d"], ["b"], "depthwise", group=32, pads=[1] * 4),
        helper.make_node("MatMul", ["b", "w"], ["y"], "odd"),
    ]
    loaded = load(
        model(
            nodes,
            [value("x", [1, 32, 14, 14])],
            [value("y", None)],
            {name: array.astype(np.float32) for name, array in weights.items()},
        ),
        tmp_path,
        {"x": np.zeros((1, 32, 14, 14), np.float32)},
    )
    plain = fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))
    layers, flow = list_layers(plain), ir.DataFlow(plain.main)
    cpus = [
        CpuModel(4, 32, 1 << 20, 4, dot_dtype=dtype, has_quads=dtype is not None)
        for dtype in ("int8", None)
    ]
    quads, pairs = (estimate_gains(layers, flow, cpu) for cpu in cpus)
    assert [layer.name for layer in layers] == ["conv", "depthwise", "odd"]
    assert 0 < pairs[0] < quads[0] < 1 and 0 < pairs[1] == quads[1] and pairs[2] == quads[2] == 0


def test_recurrent_weights_are_read_at_each_step(tmp_path: Path) -> None:
    """Weights that become floats save time where they come from memory; a state of bytes saves it everywhere."""
    gains = {}
    for hidden in (32, 512):
        shapes = {"w": (1, 4 * hidden, 16), "r": (1, 4 * hidden, hidden)}
        weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], "cells", hidden_size=hidden)
        made = model([node], [value("x", [6, 1, 16])], [value("y", None)], weights)
        loaded = load(made, tmp_path, {"x": np.zeros((6, 1, 16), np.float32)})
        plain = fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))
        layers, flow = list_layers(plain), ir.DataFlow(plain.main)
        cpu = CpuModel(16, 32, 1 << 20, 1, dot_dtype="uint8")
        for states in ((), (layers[1].var,)):
            gains[hidden, len(states)] = estimate_gains(layers, flow, cpu, states)[1]
        # without an instruction for four products, bytes are multiplied in pairs
        pairs = CpuModel(4, 32, 1 << 20, 1, dot_dtype="int8", has_quads=False)
        quads = pairs._replace(has_quads=True)
        slower, faster = (
            estimate_gains(layers, flow, c, (layers[1].var,))[1] for c in (pairs, quads)
        )
        assert 0 < slower <= faster
    assert gains[32, 0] < 0 < gains[32, 1]
    assert 0 < gains[512, 0] == gains[512, 1] < 1
