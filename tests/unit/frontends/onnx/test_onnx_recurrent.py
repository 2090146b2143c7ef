"""Recurrent layers: LSTM, GRU and RNN agree with ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from tvm import tirx

from tests.support.kernels import FAST, outputs
from tests.support.onnx_models import agree, load, value
from tests.support.seeds import seeds
from tests.unit.compiler.networks import CPUS
from tests.unit.frontends.onnx.models import STATES, layer
from tvmflow.compiler import forms, lowering, schedules
from tvmflow.compiler.c_program.c_kernels import make_assembly
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.core.errors import ImportFailed
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

KINDS = ("LSTM", "GRU", "RNN")
DIRECTIONS = ("forward", "reverse", "bidirectional")
ACTIVATIONS = "Affine Elu HardSigmoid LeakyRelu Relu ScaledTanh Sigmoid Softplus Softsign Tanh ThresholdedRelu".split()


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


def random_layer(seed: int) -> tuple[str, dict[str, Any]]:
    """Return the kind and the options of a layer from everything that ONNX has for it."""
    random = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    kind = one_of(*KINDS)
    steps, batch = int(random.integers(1, 8)), int(random.integers(1, 7))
    results = ["y", *(f"last_{name}" for name in STATES[kind])]
    options = {
        "steps": steps,
        "batch": batch,
        "size": int(random.integers(1, 9)),
        "hidden": int(random.integers(1, 40)),
        "direction": one_of(*DIRECTIONS),
        "bias": one_of(True, False),
        "states": one_of(True, False),
        "used": tuple(name for name in results if random.random() < 0.7) or ("y",),
    }
    if one_of(True, False):
        options["lengths"] = random.integers(0, steps + 1, batch).tolist()
        options["lengths_are_input"] = one_of(True, False)
    if one_of(True, False):
        options["clip"] = float(random.uniform(0.05, 1))
    if kind == "LSTM":
        options |= {"peepholes": one_of(True, False), "input_forget": one_of(0, 1)}
    if kind == "GRU":
        options["linear_before_reset"] = one_of(0, 1)
    if one_of(True, False):
        count = {"LSTM": 3, "GRU": 2, "RNN": 1}[kind] * (
            1 + (options["direction"] == DIRECTIONS[2])
        )
        options["activations"] = [one_of(*ACTIVATIONS) for _ in range(count)]
        # ONNX Runtime reads parameters in order, and has its own defaults where there are too few
        options["activation_alpha"] = random.uniform(0.1, 0.9, count).tolist()
        options["activation_beta"] = random.uniform(0.1, 0.9, count).tolist()
    return kind, options


@pytest.mark.parametrize("seed", seeds(4, 17, 150))
def test_random_layers_agree_with_onnx_runtime(seed: int, tmp_path: Path) -> None:
    """Sizes, directions, lengths, states, outputs, activations: all that ONNX has, but the layout."""
    kind, options = random_layer(seed)
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
        ("LSTM", {"hidden": 192, "batch": 3, "steps": 5}),
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
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "Tanh"])
def test_every_activation_agrees(name: str, tmp_path: Path) -> None:
    """With parameters of its own, and for one direction alone."""
    parameters = {"activation_alpha": [0.6], "activation_beta": [0.3]}
    check(tmp_path, "RNN", activations=[name], **parameters)
    names = ["Sigmoid", "Tanh", "Tanh", name, "HardSigmoid", "LeakyRelu"]
    check(tmp_path, "LSTM", activations=names, direction="bidirectional", hidden=5)


@pytest.mark.parametrize("seed", seeds(1, 9, 30))
def test_sequences_may_come_first(seed: int, tmp_path: Path) -> None:
    """ONNX Runtime lacks that layout: the other one gives the expected numbers."""
    kind, options = random_layer(seed)
    options["used"] = ()
    made, feed = layer(kind, **options, layout=1)
    actual = outputs(load(made, tmp_path, feed), feed)
    made, _ = layer(kind, **options)
    swapped = {
        name: array if name == "lengths" else np.ascontiguousarray(array.swapaxes(0, 1))
        for name, array in feed.items()
    }
    session = onnxruntime.InferenceSession(made.SerializeToString())
    states, *last = session.run(None, swapped)
    expected = [states.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in last)]
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"peepholes": True}),
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"linear_before_reset": 1, "bias": False, "states": False}),
        ("RNN", {"states": False}),
    ],
)
def test_layers_of_float64_agree_with_the_reference_evaluator(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """ONNX Runtime has no such layers."""
    made, feed = layer(kind, dtype="float64", batch=2, hidden=5, **options)
    actual = outputs(load(made, tmp_path, feed), feed)
    for one, other in zip(actual, ReferenceEvaluator(made).run(None, feed), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


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


def test_a_bias_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    """Its kernel would read past its end; a dynamic size is not known to fit."""
    made, feed = layer("LSTM", bias=False)
    made.graph.node[0].input[3] = "bias"
    made.graph.input.append(value("bias", [1, 8]))
    feed["bias"] = np.zeros((1, 8), np.float32)
    with pytest.raises(ImportFailed, match=r"its bias has the shape \[1, 8\], not \[1, 56\]"):
        load(made, tmp_path, feed)


def test_a_layer_can_be_written_as_c(tmp_path: Path) -> None:
    """Without vectors, which C lacks."""
    made, feed = layer("GRU", hidden=16, batch=2)
    loaded = load(made, tmp_path, feed)
    target = make_target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    lowered = lowering.lower(loaded.mod, target, FAST)
    weights = lowered.compute_weights(loaded.params)
    inputs = ScheduledModel(lowered.mod, weights, target)
    forms.compile_form("c-source", inputs, tmp_path)
    assert "gru" in "".join(path.read_text() for path in tmp_path.glob("lib*.c"))


@pytest.mark.parametrize(("batch", "lanes"), [(1, 16), (2, 8), (3, 4), (4, 4)])
def test_an_lstm_on_64_bit_arm_fills_registers_with_sums(
    batch: int, lanes: int, tmp_path: Path
) -> None:
    """Four gates of all sequences side by side have sixteen vectors at most; four numbers of the state are one load."""
    made, feed = layer("LSTM", hidden=32, batch=batch)
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
    loaded = load(made, tmp_path, feed)
    lowered = lowering.lower(loaded.mod, make_target(target), FAST).mod
    function = schedules.schedule_untuned(lowered, target, 1).mod["lstm"]
    loops = ir.find_nodes(function.body, tirx.For)
    assert {int(o.extent) for o in loops if o.kind == tirx.ForKind.VECTORIZED} == {lanes}
    named = function.with_attr("global_symbol", "lstm")
    code = make_assembly(named, make_target(target), is_plain_c=True)
    assert len(re.findall(r"fmla.*\.4s.*\.s\[3\]", code)) >= batch * lanes
    assert not re.search(r"\bld(?:p|r|ur|1r)\s+(?:s\d|\{)", code)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("preset", CPUS)
def test_every_preset_compiles_layers(preset: str, tmp_path: Path) -> None:
    """One kernel serves all widths of vectors."""
    for kind in KINDS:
        made, feed = layer(kind, direction="bidirectional", hidden=40, steps=100)
        loaded = load(made, tmp_path, feed)
        target = {**(CPUS[preset] or {}), "num-cores": 2}
        lowered = lowering.lower(loaded.mod, make_target(target), FAST)
        scheduled = schedules.schedule_untuned(lowered.mod, target, 1)
        weights = lowered.compute_weights(loaded.params)
        assert (
            lowering.ScheduledModel(scheduled.mod, weights, make_target(target))
            .compile()
            .mod.imports
        )
