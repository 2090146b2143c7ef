"""Recurrent layers: LSTM, GRU and RNN agree with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.kernels import FAST, outputs
from tests.support.onnx_models import agree, load, model, value
from tests.unit.compiler.schedules.test_every_preset import CPUS
from tvmflow.compiler import forms, lowering, schedules
from tvmflow.core.errors import ImportFailed

KINDS = ("LSTM", "GRU", "RNN")
DIRECTIONS = ("forward", "reverse", "bidirectional")
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": ("hidden", "cell"), "GRU": ("hidden",), "RNN": ("hidden",)}


def layer(
    kind: str,
    *,
    steps: int = 4,
    batch: int = 1,
    size: int = 3,
    hidden: int = 7,
    lengths: list[int] | None = None,
    bias: bool = True,
    states: bool = True,
    peepholes: bool = False,
    dtype: str = "float32",
    **attributes: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return a model of one layer, and inputs for it."""
    random = np.random.default_rng(0)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    is_batch_first = attributes.get("layout", 0)

    def draw(*shape: int) -> Any:
        return (random.normal(size=shape) / hidden**0.5).astype(dtype)

    gates, weights, feed = GATES[kind] * hidden, {}, {}
    feed["x"] = draw(*((batch, steps) if is_batch_first else (steps, batch)), size)
    weights["w"] = draw(directions, gates, size)
    weights["r"] = draw(directions, gates, hidden)
    if bias:
        weights["bias"] = draw(directions, 2 * gates)
    if lengths:
        weights["lengths"] = np.array(lengths, np.int32)
    for name in STATES[kind] if states else ():
        outer = (batch, directions) if is_batch_first else (directions, batch)
        feed[name] = draw(*outer, hidden)
    if peepholes:
        weights["peepholes"] = draw(directions, 3 * hidden)
    operands = ("x", "w", "r", "bias", "lengths", "hidden", "cell", "peepholes")
    names = [name if name in weights or name in feed else "" for name in operands]
    while not names[-1]:
        names.pop()
    results = ["y", *(f"last_{name}" for name in STATES[kind])]
    node = helper.make_node(kind, names, results, hidden_size=hidden, **attributes)
    inputs = [value(name, array.shape, dtype) for name, array in feed.items()]
    outputs = [value(name, None, dtype) for name in results]
    return model([node], inputs, outputs, weights, opset=14), feed


def check(folder: Path, kind: str, **options: Any) -> None:
    made, feed = layer(kind, **options)
    agree(made, folder, feed, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"direction": "bidirectional", "hidden": 17, "batch": 2, "lengths": [2, 4]}),
        ("LSTM", {"peepholes": True, "clip": 0.2, "input_forget": 1, "bias": False}),
        ("GRU", {"direction": "bidirectional", "hidden": 16, "batch": 3}),
        ("GRU", {"linear_before_reset": 1, "direction": "reverse", "states": False}),
        ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.3], "batch": 6}),
    ],
)
def test_layers_agree_with_onnx_runtime(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Weights are packed for tiles of hidden units, which no number of units need fill."""
    check(tmp_path, kind, **options)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("hidden", [1, 16, 33])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_agrees(
    kind: str, direction: str, hidden: int, batch: int, tmp_path: Path
) -> None:
    """Also without initial states and biases, with a clip, and for sequences of different lengths."""
    lengths = [1 + index % 4 for index in range(batch)]
    for options in (
        {"states": False, "bias": False, "steps": 1},
        {"clip": 0.2, "lengths": lengths},
        {"linear_before_reset": 1, "lengths": lengths} if kind == "GRU" else {"size": 5},
        {"peepholes": True, "lengths": lengths} if kind == "LSTM" else {"steps": 7},
    ):
        check(tmp_path, kind, direction=direction, hidden=hidden, batch=batch, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"direction": "bidirectional", "hidden": 128, "steps": 30}),
        ("LSTM", {"hidden": 520, "steps": 3}),
        ("GRU", {"hidden": 600, "steps": 3}),
        ("GRU", {"hidden": 64, "batch": 8, "steps": 30}),
    ],
)
def test_work_for_several_cores_is_divided(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Between directions and sequences, else between the hidden units of each step."""
    check(tmp_path, kind, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    "Affine Elu HardSigmoid LeakyRelu Relu ScaledTanh Sigmoid Softplus Softsign ThresholdedRelu".split(),
)
def test_every_activation_agrees(name: str, tmp_path: Path) -> None:
    """With parameters of its own, and for one direction alone."""
    parameters = {"activation_alpha": [0.6], "activation_beta": [0.3]}
    check(tmp_path, "RNN", activations=[name], **parameters)
    names = ["Sigmoid", "Tanh", "Tanh", name, "HardSigmoid", "LeakyRelu"]
    check(tmp_path, "LSTM", activations=names, direction="bidirectional", hidden=5)


def test_sequences_may_come_first(tmp_path: Path) -> None:
    """ONNX Runtime lacks that layout: the other one gives the expected numbers."""
    made, feed = layer("LSTM", batch=2, steps=3, direction="bidirectional", layout=1)
    actual = outputs(load(made, tmp_path, feed), feed)
    made, _ = layer("LSTM", batch=2, steps=3, direction="bidirectional")
    feed = {name: np.ascontiguousarray(array.swapaxes(0, 1)) for name, array in feed.items()}
    states, *last = outputs(load(made, tmp_path, feed), feed)
    expected = [states.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in last)]
    for one, other in zip(actual, expected, strict=True):
        assert np.array_equal(one, other)


def test_layers_of_float16_are_summed_in_float32(tmp_path: Path) -> None:
    """As far as float16 shows."""
    made, feed = layer("LSTM", hidden=20, dtype="float16")
    agree(made, tmp_path, feed, rtol=2e-3)


def test_an_unknown_activation_is_refused_by_name(tmp_path: Path) -> None:
    made, feed = layer("RNN", activations=["Swish"])
    with pytest.raises(ImportFailed, match="ONNX has no activation swish"):
        load(made, tmp_path, feed)


def test_an_input_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    """The other branch of a model for several sampling rates may be for other shapes."""
    made, feed = layer("RNN", size=3)
    made.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 5
    feed["x"] = np.zeros((4, 1, 5), np.float32)
    with pytest.raises(ImportFailed, match="5 values a step, and its weights are for 3"):
        load(made, tmp_path, feed)


def test_a_layer_can_be_written_as_c(tmp_path: Path) -> None:
    """Without vectors, which C lacks."""
    made, feed = layer("GRU", hidden=16, batch=2)
    loaded = load(made, tmp_path, feed)
    target = lowering.make_target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    lowered = lowering.lower(loaded.mod, target, FAST)
    weights = lowered.compute_weights(loaded.params)
    inputs = forms.FormInputs(lowered.mod, weights, target, "")
    forms.FORMS["c-source"](inputs, tmp_path)
    assert "gru" in "".join(path.read_text() for path in tmp_path.glob("lib*.c"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", CPUS)
def test_every_preset_compiles_layers(preset: str, tmp_path: Path) -> None:
    """One kernel serves all widths of vectors."""
    for kind in KINDS:
        made, feed = layer(kind, direction="bidirectional", hidden=40, steps=100)
        loaded = load(made, tmp_path, feed)
        target = {**(CPUS[preset] or {}), "num-cores": 2}
        lowered = lowering.lower(loaded.mod, lowering.make_target(target), FAST)
        scheduled = schedules.schedule_untuned(lowered.mod, target, 1)
        weights = lowered.compute_weights(loaded.params)
        assert lowering.compile_with_weights(
            scheduled.mod, weights, lowering.make_target(target)
        ).mod.imports
