"""A float model whose weights make it compute what one of integers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.kernels import FAST, check_alike, host_level, kernels_of, weights_of
from tests.support.kernels import run as run_model
from tests.support.onnx_models import model, save, value
from tests.support.tuning import conv
from tests.support.tuning import model as model_of
from tests.unit.stages.quantize.quantizing import compare, import_files, run, settings_of
from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.graph.ir_operators import RoundedData
from tvmflow.stages.quantize.calibration import CompiledModel

RNG = np.random.default_rng(0)


def rounding(value: Any, weight: Any) -> Any:
    """Return data whose channels are rounded to steps of their own."""
    channels = (int(value.ty.shape[1]), 1, 1)
    sizes = [(), channels, (), (), (1, *channels)]
    return RoundedData().call(value, *map(weight, sizes))


def test_a_rounding_is_one_operator() -> None:
    """It computes what is said of it, and goes through blocked layouts, of which some lanes are empty."""
    mod, data = model_of(rounding, shape=(1, 5, 3, 4)), RNG.normal(size=(1, 5, 3, 4)) * 3
    kept, inverse, low, high, scale = weights_of(mod).values()
    [result] = run_model(mod, host_level(), FAST, data.astype(np.float32))
    steps = np.rint(np.minimum(np.maximum(data.astype(np.float32) * inverse, low), high))
    np.testing.assert_allclose(result, kept * data + scale * steps, rtol=0, atol=1e-5)
    between = model_of(conv(20), rounding, conv(12, 1), shape=(1, 3, 9, 9))
    check_alike(between, host_level())
    [rounded] = [name for name in kernels_of(between, host_level()) if "round" in name]
    assert rounded.startswith("fused_conv2d_NCHWc_")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"weights": "int4", "activations": "none"}])
def test_convolutions_sums_and_products(files: dict[str, Path], fields: Json) -> None:
    """Layers, what shares tensors with them, and corrections of means are emulated."""
    arrays = np.load(files["data"])["x"]
    compare(files, [{"x": array[None]} for array in arrays], **fields)


@pytest.mark.slow
def test_divided_channels(tmp_path: Path) -> None:
    """The library of the model before channels are divided computes the model after it."""
    weights = {name: RNG.normal(0, 0.3, (16, 16)) for name in ("w0", "w1")}
    weights |= {"gain": np.where(np.arange(16) == 3, 100.0, 1.0), "shift": np.zeros(16)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w0"], ["a"], "query"),
        helper.make_node("MatMul", ["a", "w1"], ["y"], "key"),
    ]
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    made = model(nodes, [value("x", [4, 16])], [value("y", [4, 16])], arrays)
    imported = import_files(save(made, tmp_path), tmp_path / "import")
    batches = [{"x": RNG.normal(size=(4, 16)).astype(np.float32)} for _ in range(4)]
    compare(imported, batches)


@pytest.mark.slow
def test_transposed_convolutions(tmp_path: Path) -> None:
    """Their weights are (in, out, …), and an input channel that is larger than others is divided."""
    shapes = {"w0": (12, 20, 4, 4), "b0": (20,), "w1": (20, 6, 3, 3)}
    arrays = {name: RNG.normal(0, 0.3, own).astype(np.float32) for name, own in shapes.items()}
    arrays["w0"][:, 3] *= 100
    arrays["w1"][3] /= 100
    attributes = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w0", "b0"], ["a"], "up", **attributes),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("ConvTranspose", ["r", "w1"], ["y"], "wide", strides=[3, 2]),
    ]
    made = model(nodes, [value("x", [1, 12, 5, 4])], [value("y", None)], arrays)
    imported = import_files(save(made, tmp_path), tmp_path / "import")
    batches = [{"x": RNG.normal(size=(1, 12, 5, 4)).astype(np.float32)} for _ in range(4)]
    compare(imported, batches)


@pytest.mark.parametrize("limit", [None, 1e-5])
def test_a_model_is_compiled_once(
    limit: float | None, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration, the outputs of the float model, and all choices of layers share a library."""
    compiled: list[Any] = []
    compile_model = CompiledModel.__init__

    def count(self: CompiledModel, *arguments: Any) -> None:
        compiled.append(arguments)
        compile_model(self, *arguments)

    monkeypatch.setattr(CompiledModel, "__init__", count)
    if limit is None:
        run(settings_of(), files, tmp_path / "out")
    else:
        with pytest.raises(StageError, match="within the limits"):
            run(settings_of(max_error=limit), files, tmp_path / "out")
    assert len(compiled) == 1
