"""Tables whose rows are looked up become integers with a scale for each row, unless that costs too much."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.onnx_models import load, model, save, value
from tests.unit.stages.quantize.quantizing import VNNI, import_files, list_kernels, run, settings_of
from tvmflow.graph import ir
from tvmflow.graph.ir_operators import BlockQuantizedWeights
from tvmflow.stages.quantize.calibration import Signature
from tvmflow.stages.quantize.control import TOO_HARMFUL
from tvmflow.stages.quantize.insertion import insert_tables, list_tables, round_tables
from tvmflow.stages.quantize.points import FloatModel, fold_model
from tvmflow.stages.quantize.weights import Groups, round_groups
from tvmflow.targets.presets import PRESETS

_ROWS, _DEPTH = 300, 32


def words(**more: Any) -> onnx.ModelProto:
    """Return a network that looks words and places up; words twice, and places with a product, too."""
    random = np.random.default_rng(0)
    weights = {
        # rows of different sizes: a scale for each keeps the small ones
        "words": random.normal(size=(_ROWS, _DEPTH)) * np.exp2(random.integers(-6, 6, (_ROWS, 1))),
        "places": random.normal(size=(_DEPTH, _DEPTH)),
        "dense": random.normal(size=(_DEPTH, 32)),
        **more,
    }
    nodes = [
        helper.make_node("Gather", ["words", "x"], ["a"], "embed"),
        helper.make_node("Gather", ["words", "z"], ["b"], "embed again"),
        helper.make_node("Gather", ["places", "x"], ["p"], "place"),
        helper.make_node("Add", ["a", "b"], ["c"], "sum"),
        helper.make_node("Add", ["c", "p"], ["d"], "with place"),
        helper.make_node("MatMul", ["d", "dense"], ["e"], "head"),
        helper.make_node("MatMul", ["d", "places"], ["y"], "shared"),
    ]
    inputs = [value(name, [1, 7], "int64") for name in "xz"]
    outputs = [value("e", [1, 7, 32]), value("y", [1, 7, _DEPTH])]
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    return model(nodes, inputs, outputs, arrays)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The network, imported, with eight samples."""
    folder = tmp_path_factory.mktemp("words")
    random = np.random.default_rng(1)
    samples = {name: random.integers(0, _DEPTH, (8, 7)) for name in "xz"}
    np.savez(folder / "data.npz", **samples)
    return {**import_files(save(words(), folder), folder / "import"), "data": folder / "data.npz"}


def read_model(folder: Path, **more: Any) -> FloatModel:
    loaded = load(words(**more), folder)
    return fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))


def test_only_lookups_may_read_a_table(tmp_path: Path) -> None:
    """A matrix that a product reads, too, is one of its layer, and stays as it is here."""
    assert [table.name for table in list_tables(read_model(tmp_path))] == ["embed"]


@pytest.mark.parametrize("masked", [-np.inf, np.nan, np.finfo(np.float32).min, -1e9])
def test_a_table_with_a_mask_is_none(masked: float, tmp_path: Path) -> None:
    """No scale stands for infinity, and one for a large number leaves nothing of the others."""
    table = np.random.default_rng(3).normal(size=(_ROWS, _DEPTH))
    table[0, 0] = masked
    assert not list_tables(read_model(tmp_path, words=table))


def test_a_table_of_single_numbers_is_none(tmp_path: Path) -> None:
    """Their scales are as large as they are."""
    node = helper.make_node("Gather", ["words", "x"], ["y"], "embed")
    ends = [value("x", [2], "int64")], [value("y", [2, 1])]
    loaded = load(model([node], *ends, {"words": np.ones((9, 1), np.float32)}), tmp_path)
    assert not list_tables(fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes)))


def test_rows_are_rounded_in_bounded_memory() -> None:
    """A group is a whole row here, and many scales are candidates: some rows are compared with one at a time."""
    wide = np.random.default_rng(4).normal(size=(64, 1 << 14)).astype(np.float32)
    tracemalloc.start()
    round_groups(wide, Groups(8, wide.shape[1]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * wide.nbytes


def test_each_row_has_its_own_scale(tmp_path: Path) -> None:
    """The error of a number is at most a step of its row: the scale is a bfloat16."""
    plain = read_model(tmp_path)
    (table,) = list_tables(plain)
    rounded = round_tables(plain, [table])[table.weights]
    exact = plain.params[table.weights]
    assert rounded.scales.shape == (_ROWS, 1)
    error = np.abs(rounded.to_float() - exact).max(axis=1)
    assert (error <= np.abs(exact).max(axis=1) / 127).all()


@pytest.mark.parametrize("depth", [2, 30, 64])
def test_lookups_give_the_numbers_of_the_integers(depth: int, tmp_path: Path) -> None:
    """Also of rows that fill no words, and of indices that count from the end."""
    table = np.random.default_rng(2).normal(size=(9, depth)).astype(np.float32)
    node = helper.make_node("Gather", ["words", "x"], ["y"], "embed")
    ends = [value("x", [2, 3], "int64")], [value("y", [2, 3, depth])]
    made = model([node], *ends, {"words": table})
    imported = import_files(save(made, tmp_path), tmp_path / "import")
    loaded = load(made, tmp_path)
    plain = fold_model(FloatModel(loaded.mod, loaded.params, loaded.nodes))
    rounded = round_tables(plain, list_tables(plain))
    signature = Signature(json.loads(imported["import/signature.json"].read_text()))
    module = signature.compile(insert_tables(plain, rounded))
    indices = np.array([[0, 8, 3], [-1, -9, 4]])
    np.testing.assert_array_equal(
        module.run({"x": indices})["y"], rounded["words"].to_float()[indices]
    )


def test_lookups_read_integers(files: dict[str, Path], tmp_path: Path) -> None:
    """Both lookups of a table read bytes on a CPU that has a kernel, and the weights are a quarter."""
    facts = run(settings_of(VNNI), files, tmp_path / "out")
    layer = next(layer for layer in facts.layers if layer.operator == "take")
    assert (layer.name, layer.weight_bits, layer.data_bits, layer.reason) == ("embed", 8, 32, "")
    kernels = " ".join(list_kernels(tmp_path / "out"))
    assert kernels.count("grouped_take") == 2
    assert facts.weight_bytes is not None
    assert facts.weight_bytes < 0.5 * facts.float_bytes


def test_a_table_is_converted_once_where_rows_are_read_as_floats(tmp_path: Path) -> None:
    """Two lookups of a table had two tables of floats where no kernel reads integers."""
    plain = read_model(tmp_path)
    quantized = insert_tables(plain, round_tables(plain, list_tables(plain)))
    names = [ir.operator_name(binding.value) for binding in ir.list_bindings(quantized.main.body)]
    assert names.count(BlockQuantizedWeights.NAME) == 1


def test_a_gpu_keeps_tables_as_they_are(files: dict[str, Path], tmp_path: Path) -> None:
    """It has no kernel that reads rows of integers."""
    gpu = VNNI._replace(tvm=dict(PRESETS["cuda-sm80"].tvm or {}), features=())
    facts = run(settings_of(gpu, activations="none"), files, tmp_path / "out")
    assert "take" not in {layer.operator for layer in facts.layers}


def test_a_table_stays_float(files: dict[str, Path], tmp_path: Path) -> None:
    """Where the recipe skips it, and where limits do not hold with it, before any layer goes back."""
    both = run(settings_of(), files, tmp_path / "both")
    alone = run(settings_of(skip=["embed"]), files, tmp_path / "alone")
    assert both.error is not None and alone.error is not None
    assert {layer.name: layer.reason for layer in alone.layers}["embed"] == "quantize.skip"
    assert alone.error < both.error
    limit = (both.error + alone.error) / 2
    facts = run(settings_of(max_error=limit), files, tmp_path / "limited")
    reasons = {layer.name: layer.reason for layer in facts.layers}
    assert reasons == {"embed": TOO_HARMFUL, "head": "", "shared": ""}
