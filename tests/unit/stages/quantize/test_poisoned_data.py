"""`quantize` on data and networks that are made to fail: it names what is wrong, or repairs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.onnx_models import model, save, value
from tvmflow.core.errors import StageError
from tvmflow.recipe import ModelSource, Recipe
from tvmflow.recipe.sections import Quantize, Verify
from tvmflow.stages import import_model, quantize
from tvmflow.stages.base import StageContext, parse_settings
from tvmflow.stages.quantize import QuantizeFacts
from tvmflow.stages.quantize.control import TOO_HARMFUL
from tvmflow.targets.resolve import ResolvedTarget

pytestmark = pytest.mark.slow

_Array = np.ndarray[Any, Any]
_VNNI = ResolvedTarget(
    name="host",
    tvm={
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "icelake-server",
        "num-cores": 4,
    },
    threads=1,
    features=("avx512_vnni", "avx512vl"),
    device={},
    unrunnable_reason="",
)
_ROWS, _COLUMNS, _CLASSES = 4, 32, 8


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A network of three products whose second one reads a channel a thousand times as large as the others.

    The channel means nothing: the weights that it meets are tiny. It comes from an absolute value, which is also an
    output, so that nothing can be moved into weights.
    """
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("network")
    weights = {
        name: random.normal(0, 0.25, shape).astype(np.float32)
        for name, shape in {
            "w0": (_COLUMNS, _COLUMNS),
            "w1": (_COLUMNS, _COLUMNS),
            "w2": (_COLUMNS, _CLASSES),
        }.items()
    }
    weights["w0"][:, 5] *= 2000
    weights["w1"][5] *= 1e-6
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], "first"),
        helper.make_node("Abs", ["a"], ["b"], "abs"),
        helper.make_node("MatMul", ["b", "w1"], ["c"], "poisoned"),
        helper.make_node("Relu", ["c"], ["d"], "relu"),
        helper.make_node("MatMul", ["d", "w2"], ["y"], "last"),
    ]
    outputs = [value("y", [_ROWS, _CLASSES]), value("b", [_ROWS, _COLUMNS])]
    path = save(model(nodes, [value("x", [_ROWS, _COLUMNS])], outputs, weights), folder)
    context = StageContext(path, folder, folder, folder, folder, lambda _: None)
    settings = {"model": {"kind": "onnx"}, "inputs": {}}
    import_model.run(parse_settings(import_model.run, settings), context)
    names = (import_model.MODEL, import_model.PARAMS, import_model.SIGNATURE, import_model.NODES)
    x = random.normal(size=(64, _COLUMNS)).astype(np.float32)
    hidden = np.maximum(np.abs(x @ weights["w0"]) @ weights["w1"], 0)
    np.savez(folder / "good.npz", x=x, label=(hidden @ weights["w2"]).argmax(axis=1))
    return {**{f"import/{name}": folder / name for name in names}, "data": folder / "good.npz"}


def _quantize(
    imported: dict[str, Path], folder: Path, data: _Array | None = None, **fields: Any
) -> QuantizeFacts:
    """Quantize by calibration data, or by those of `verify.data`."""
    files = dict(imported)
    if data is not None:
        np.savez(folder / "own.npz", x=data)
        files["calibration"] = folder / "own.npz"
        fields["data"] = "own.npz"
    recipe = Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        verify=Verify(data="good.npz"),
        quantize=Quantize(**fields),
    )
    settings = parse_settings(quantize.run, quantize.settings(recipe, _VNNI).to_json())
    context = StageContext(files, folder, folder, folder, folder, lambda _: None)
    return quantize.run(settings, context)


def _read(imported: dict[str, Path]) -> _Array:
    with np.load(imported["data"]) as arrays:
        samples: _Array = arrays["x"]
    return samples


def test_a_layer_that_loses_the_accuracy_is_put_back_and_named(
    imported: dict[str, Path], tmp_path: Path
) -> None:
    """Steps that hold one huge channel leave nothing of the others; that layer, and no other, stays float."""
    everything = _quantize(imported, tmp_path, method="minmax")
    assert (everything.float_accuracy, len(everything.layers)) == (1.0, 3)
    assert everything.accuracy is not None and everything.accuracy < 0.8
    # without limits nothing is measured alone
    assert all(layer.damage is None for layer in everything.layers)
    facts = _quantize(imported, tmp_path, method="minmax", max_accuracy_drop=5)
    found = [(layer.name, layer.weight_bits, layer.reason) for layer in facts.layers]
    assert found == [
        ("first", 8, ""),
        ("poisoned", 32, TOO_HARMFUL),
        ("last", 8, ""),
    ]
    assert facts.accuracy is not None and facts.accuracy >= 0.95
    assert None not in [layer.damage for layer in facts.layers]
    worst = max(facts.layers, key=lambda layer: layer.damage or 0)
    assert worst.name == "poisoned" and (worst.damage or 0) > 0.1
    text = "\n".join(quantize.describe(facts, None))  # type: ignore[arg-type]
    assert "float: poisoned (costs too much accuracy)" in text


def test_limits_that_cannot_be_held_are_refused_with_layers(
    imported: dict[str, Path], tmp_path: Path
) -> None:
    """It says how much all layers cost, and which of them cost most."""
    with pytest.raises(StageError, match="poisoned") as caught:
        _quantize(imported, tmp_path, max_error=1e-5)
    assert "max_error 0.00%" in caught.value.message


def test_data_that_are_no_numbers_are_refused(imported: dict[str, Path], tmp_path: Path) -> None:
    """NaN is named with the batch that has it."""
    samples = _read(imported)
    samples[6, 3] = np.nan
    with pytest.raises(StageError, match="NaN or infinity in batch 1"):
        _quantize(imported, tmp_path, samples)


@pytest.mark.parametrize("case", ["constant", "one batch", "other range"])
def test_poor_data_are_repaired_by_putting_layers_back_or_refused(
    imported: dict[str, Path], tmp_path: Path, case: str
) -> None:
    """Whatever the data are, the limit holds on the data to verify with, or there is no library."""
    samples = _read(imported)
    poor = {
        "constant": np.zeros_like(samples),
        "one batch": samples[:_ROWS],
        "other range": samples * np.float32(0.01),
    }[case]
    try:
        facts = _quantize(imported, tmp_path, poor, max_accuracy_drop=5)
    except StageError as error:
        assert case != "one batch" and "max_accuracy_drop 5" in error.message
        return
    assert facts.accuracy is not None and facts.accuracy >= 0.95
    assert TOO_HARMFUL in [layer.reason for layer in facts.layers]
