"""`quantize`: recurrent layers get weights of int8, and where the target has int8 dot products a state of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.onnx_models import model, save, value
from tests.unit.stages.quantize.quantizing import (
    AVX2,
    VNNI,
    compare,
    import_files,
    run,
    settings_of,
)
from tvmflow.core.errors import StageError
from tvmflow.graph.ir_operators import GATES
from tvmflow.targets.resolve import ResolvedTarget

STEPS, BATCH, WIDTH, HIDDEN = 6, 2, 16, 32
RNG = np.random.default_rng(0)


def network(kind: str = "LSTM", **attributes: Any) -> onnx.ModelProto:
    """Return a recurrent layer of two directions, named `cells`, and a product of its last states."""
    rows = GATES[kind] * HIDDEN
    shapes = {"w": (2, rows, WIDTH), "r": (2, rows, HIDDEN), "b": (2, 2 * rows), "m": (HIDDEN, 20)}
    nodes = [
        helper.make_node(
            *(kind, ["x", "w", "r", "b"], ["", "last"], "cells"),
            hidden_size=HIDDEN,
            direction="bidirectional",
            **attributes,
        ),
        helper.make_node("MatMul", ["last", "m"], ["y"], "head"),
    ]
    arrays = {
        name: RNG.uniform(-0.3, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }
    inputs, outputs = [value("x", [STEPS, BATCH, WIDTH])], [value("y", [2, BATCH, 20])]
    return model(nodes, inputs, outputs, arrays)


def draw() -> np.ndarray[Any, Any]:
    return RNG.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)


def import_network(made: onnx.ModelProto, folder: Path) -> dict[str, Path]:
    """Import a network, with four samples."""
    np.savez(folder / "data.npz", x=np.concatenate([draw() for _ in range(4)]))
    return {**import_files(save(made, folder), folder / "import"), "data": folder / "data.npz"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An LSTM."""
    return import_network(network(), tmp_path_factory.mktemp("lstm"))


@pytest.mark.parametrize(
    ("target", "activations", "bits"),
    [(VNNI, "int8", (8, 8)), (VNNI, "none", (8, 32)), (AVX2, "int8", (7, 8))],
)
def test_layers_of_integers(
    target: ResolvedTarget,
    activations: str,
    bits: tuple[int, int],
    files: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The product of the inputs is a layer of its own; both have the name of the node."""
    facts = run(settings_of(target, activations=activations), files, tmp_path / "out")
    layers = {layer.name: layer for layer in facts.layers}
    assert [(name, layer.operator) for name, layer in layers.items()] == [
        ("cells", "matmul"),
        ("cells#2", "lstm"),
        ("head", "matmul"),
    ]
    assert [(own.weight_bits, own.data_bits) for own in layers.values()] == [bits] * 3
    assert facts.weight_bytes is not None and facts.weight_bytes < 0.3 * facts.float_bytes
    assert 0 < (facts.error or 0) < 0.03


def test_skipped_layers(files: dict[str, Path], tmp_path: Path) -> None:
    """A pattern keeps both products of a layer float, a name one of them."""
    for pattern, bits in (("cells*", [32, 32, 8]), ("cells#2", [8, 32, 8])):
        facts = run(settings_of(skip=(pattern,)), files, tmp_path / str(len(pattern)))
        assert [layer.weight_bits for layer in facts.layers] == bits


def test_limits(files: dict[str, Path], tmp_path: Path) -> None:
    """Limits put layers back to float by the damage of each alone."""
    with pytest.raises(StageError, match=r"largest with .*cells#2 \("):
        run(settings_of(max_error=1e-6), files, tmp_path / "none")
    exact = run(settings_of(), files, tmp_path / "all")
    facts = run(settings_of(max_error=0.9 * (exact.error or 0)), files, tmp_path / "some")
    assert all(layer.damage for layer in facts.layers)
    assert 0 < sum(layer.weight_bits == 32 for layer in facts.layers) < 3
    assert (facts.error or 0) <= 0.9 * (exact.error or 0)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"activations": "none"}])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_integers_are_emulated(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """The float library computes what integers would, with other weights."""
    imported = import_network(network(kind), tmp_path)
    compare(imported, [{"x": draw()} for _ in range(4)], **fields)


def test_ranges_of_each_call(files: dict[str, Path], tmp_path: Path) -> None:
    """Choices are computed by a library with switches where each call finds its ranges."""
    settings = settings_of(activations="dynamic", max_error=0.5)
    facts = run(settings, files, tmp_path / "out")
    assert [layer.data_bits for layer in facts.layers] == [8, 8, 8]
    with pytest.raises(StageError, match="within the limits"):
        run(settings_of(activations="dynamic", max_error=1e-6), files, tmp_path / "none")


def test_unbounded_states_stay_float(tmp_path: Path) -> None:
    """A state that may leave -1 to 1 has no scale that is known; its weights are integers all the same."""
    made = network("RNN", activations=["Relu", "Tanh"])
    facts = run(settings_of(), import_network(made, tmp_path), tmp_path / "out")
    (layer,) = (layer for layer in facts.layers if layer.operator == "rnn")
    assert layer.data_bits == 32 and layer.reason == "not faster with integers on the target"


@pytest.mark.parametrize("kind", ["constant", "input", "computed"])
@pytest.mark.parametrize(("largest", "bits"), [(1.0, 8), (4.0, 32)])
def test_states_that_begin_beyond_bytes_stay_float(
    kind: str, largest: float, bits: int, tmp_path: Path
) -> None:
    """Bytes would limit an initial state to -1 and 1; constants and calibration data tell."""
    start = np.linspace(-largest, largest, 2 * BATCH * HIDDEN, dtype=np.float32)
    start = start.reshape(2, BATCH, HIDDEN)
    made = network("GRU")
    made.graph.node[0].input.extend(["", "start" if kind != "computed" else "twice"])
    data = {"x": np.stack([draw() for _ in range(4)])}
    if kind == "constant":
        made.graph.initializer.append(onnx.numpy_helper.from_array(start, "start"))
    else:
        made.graph.input.append(value("start", [2, BATCH, HIDDEN]))
        data["start"] = np.stack([start] * 4)
    if kind == "computed":
        made.graph.node.insert(0, helper.make_node("Add", ["start", "start"], ["twice"]))
        data["start"] /= 2
    np.savez(tmp_path / "data.npz", **data)
    files = {
        **import_files(save(made, tmp_path), tmp_path / "import"),
        "data": tmp_path / "data.npz",
    }
    facts = run(settings_of(), files, tmp_path / "out")
    (layer,) = (layer for layer in facts.layers if layer.operator == "gru")
    assert layer.data_bits == bits
    assert 0 < (facts.error or 0) < 0.03
