"""`import`: inputs that it takes from the recipe and from the model, and models that do not fit them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.support.kernels import host_level
from tests.support.onnx_models import draw, model, save, value
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import Dimension, Json
from tvmflow.frontends.base import DYNAMIC_FIX
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import read_dimensions
from tvmflow.recipe import DimensionSpec, InputSpec, ModelSource, Recipe, StateSpec
from tvmflow.stages import import_model, lower
from tvmflow.stages.base import StageContext, parse_settings


def settings_of(**inputs: InputSpec) -> Json:
    """Return the settings of a recipe with these inputs, as they are in the key."""
    recipe = Recipe(recipe=1, name="net", model=ModelSource(onnx="m.onnx"), inputs=inputs)
    return import_model.settings(recipe, None).to_json()


def run(settings: Json, files: dict[str, Path], folder: Path) -> Json:
    """Import a model, and return its signature."""
    context = StageContext(files, folder, folder, folder, folder, lambda _: None)
    import_model.run(parse_settings(import_model.run, settings), context)
    return json.loads((folder / import_model.SIGNATURE).read_text())


def shifted() -> Any:
    """Return the sum of two integer inputs of dynamic size."""
    inputs = [value("x", ["time"], "int64"), value("shift", [], "int64")]
    return model([helper.make_node("Add", ["x", "shift"], ["y"])], inputs, [value("y", None)])


def test_only_new_fields_change_the_key() -> None:
    """A recipe with shapes alone has the key that it has always had."""
    assert settings_of()["inputs"] == {}
    assert settings_of(
        x=InputSpec(shape=(1, 3)), y=InputSpec(shape=(2,), dtype="int64", range=(0, 9))
    )["inputs"] == {
        "x": {"shape": [1, 3], "dtype": "float32"},
        "y": {"shape": [2], "dtype": "int64"},
    }
    states = {"past.*": StateSpec(output="present.*"), "h": StateSpec(output="hn", dtype="float16")}
    stored = Recipe(recipe=1, name="net", model=ModelSource(onnx="m.onnx"), state=states)
    settings = import_model.settings(stored, None).to_json()
    assert settings["state"] == {"past.*": "present.*", "h": "hn"}
    assert settings["state_dtype"] == {"h": "float16"}
    assert not {"state", "state_dtype"} & set(settings_of())
    new = settings_of(a=InputSpec(), b=InputSpec(value=16000), c=InputSpec(value=((1, 2),)))
    assert new["inputs"] == {"a": {}, "b": {"value": 16000}, "c": {"value": [[1, 2]]}}


def open_recipe(**fields: Any) -> Recipe:
    """A recipe with a dynamic size."""
    return Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        inputs={"x": InputSpec(shape=("time",)), "shift": InputSpec(value=2)},
        dimensions={"time": DimensionSpec(**{"max": 8, **fields})},
    )


def test_ranges_of_dimensions_change_the_key_and_sizes_to_tune_at_do_not() -> None:
    """What is imported is the same wherever it is tuned."""
    of = {
        **settings_of(),
        "inputs": {"x": {"shape": ["time"], "dtype": "float32"}, "shift": {"value": 2}},
    }
    assert import_model.settings(open_recipe(), None).to_json() == {
        **of,
        "dimensions": {"time": {"min": 1, "max": 8}},
    }
    tuned = import_model.settings(open_recipe(tune_at=(4,)), None).to_json()
    assert tuned == import_model.settings(open_recipe(), None).to_json()
    multiple = import_model.settings(open_recipe(multiple_of=4), None).to_json()
    assert multiple["dimensions"] == {"time": {"min": 4, "max": 8, "multiple_of": 4}}


def test_a_dynamic_size_is_in_signature_facts_and_ir(tmp_path: Path) -> None:
    """Shapes have the largest sizes, so that code without dimensions sees an upper bound."""
    settings = import_model.settings(open_recipe(), None).to_json()
    files = save(shifted(), tmp_path)
    assert run(settings, files, tmp_path) == {
        "inputs": [{"name": "x", "shape": [8], "dtype": "int64", "sizes": ["time"]}],
        "outputs": [{"name": "y", "shape": [8], "dtype": "int64", "sizes": ["time"]}],
        "bound": [{"name": "shift", "shape": [], "dtype": "int64", "value": 2}],
        "dimensions": [{"name": "time", "min": 1, "max": 8, "multiple_of": 1}],
    }
    context = StageContext(files, tmp_path, tmp_path, tmp_path, tmp_path, lambda _: None)
    facts = import_model.run(parse_settings(import_model.run, settings), context)
    assert facts.dimensions == (Dimension("time", 1, 8),)
    assert from_json(import_model.ImportFacts, to_json(facts)) == facts
    mod = ir.load_module(tmp_path / import_model.MODEL)
    assert read_dimensions(mod["main"]) == facts.dimensions


def test_the_sizes_to_tune_at_reach_what_is_lowered(tmp_path: Path) -> None:
    """The stage that lowers the model has them in its key, and adds them to the dimensions."""
    settings = import_model.settings(open_recipe(), None).to_json()
    run(settings, save(shifted(), tmp_path), tmp_path)
    options: dict[str, Any] = {"target": host_level(), "lowering": LoweringOptions()}
    plain = lower.LowerSettings(**options)
    assert "tune_at" not in plain.to_json()
    tuned = lower.LowerSettings(**options, tune_at={"time": (2, 4)})
    assert tuned.to_json() == {**plain.to_json(), "tune_at": {"time": [2, 4]}}
    model = {"import/model.json": tmp_path / import_model.MODEL}
    mod = lower._lower(parse_settings(lower.run, tuned.to_json()), model).mod
    assert read_dimensions(mod["main"]) == (Dimension("time", 1, 8)._replace(tune_at=(2, 4)),)


def test_a_window_that_is_too_large_for_the_smallest_size_is_named(tmp_path: Path) -> None:
    """At the largest one there would be room."""
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], name="last", kernel_shape=[4])]
    made = model(nodes, [value("x", [1, 2, "time"])], [value("y", None)])
    text = r"too small .* max_pool1d \(node last\) would have the shape \[1, 2, 0\] at time = 3"
    for least in (3, 4):
        recipe = Recipe(
            recipe=1,
            name="net",
            model=ModelSource(onnx="m.onnx"),
            inputs={"x": InputSpec(shape=(1, 2, "time"))},
            dimensions={"time": DimensionSpec(min=least, max=8)},
        )
        settings = import_model.settings(recipe, None).to_json()
        with pytest.raises(ImportFailed, match=text) if least < 4 else nullcontext():
            run(settings, save(made, tmp_path), tmp_path)


def test_a_dtype_and_an_input_with_a_value_come_from_the_model(tmp_path: Path) -> None:
    """The signature has what the reference needs besides the inputs of the library."""
    settings = settings_of(x=InputSpec(shape=(3,)), shift=InputSpec(value=2))
    assert run(settings, save(shifted(), tmp_path), tmp_path) == {
        "inputs": [{"name": "x", "shape": [3], "dtype": "int64"}],
        "outputs": [{"name": "y", "shape": [3], "dtype": "int64"}],
        "bound": [{"name": "shift", "shape": [], "dtype": "int64", "value": 2}],
    }


def test_a_model_that_planning_could_not_read_is_checked(tmp_path: Path) -> None:
    """One that had to be downloaded: the message is that of planning."""
    for inputs, text in (
        ({}, "inputs: the model has dynamic dimensions; write this in the recipe, with a number for each SIZE:"),
        ({"x": InputSpec(shape=(3, 3))}, r"inputs.x.shape: input 'x' has shape \['time'\], which \[3, 3\] does not fit"),
        ({"x": InputSpec(shape=(3,), dtype="int8")}, "inputs.x.dtype: input 'x' has dtype int64, not int8"),
        ({"x": InputSpec(value=(0.5,))}, "inputs.x.value: input 'x' has dtype int64, whose values are whole numbers, not 0.5"),
    ):  # fmt: skip
        with pytest.raises(ImportFailed, match=text) as caught:
            run(settings_of(**inputs), save(shifted(), tmp_path), tmp_path)
        assert caught.value.exit_code == 1
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ImportFailed, match="the file is not an ONNX model"):
        run(settings_of(), {"model": tmp_path / "model.onnx"}, tmp_path)


def convolution(width: int) -> Any:
    """A window of 3 over rows of a width."""
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 2, width), "float32"))
    weight = relax.Var("w", relax.TensorType((4, 2, 3), "float32"))
    with builder.function("main", [x, weight], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.conv1d(x, weight))
        builder.emit_func_output(out)
    return builder.get()


def test_a_window_that_is_larger_than_its_input_is_named() -> None:
    with pytest.raises(
        ImportFailed, match=r"the result of a conv1d would have the shape \[1, 4, -1\]"
    ):
        import_model._check_sizes(convolution(1))
    import_model._check_sizes(convolution(3))


@pytest.mark.parametrize("operator", ["LpPool", "AveragePool", "MaxPool"])
def test_a_window_without_any_place_is_named(operator: str, tmp_path: Path) -> None:
    """Kernels of empty results cannot be compiled; what ONNX Runtime says to them depends on the operator."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["wide"], kernel_shape=[3], dilations=[2]),
        helper.make_node(operator, ["wide"], ["y"], name="last", kernel_shape=[2]),
    ]
    made = model(nodes, [value("x", [1, 2, 5])], [value("y", None)])
    text = r"the result of a \w+_pool1d \(node last\) would have the shape \[1, 2, 0\]"
    with pytest.raises(ImportFailed, match=text):
        run(settings_of(), save(made, tmp_path), tmp_path)


def test_the_multiple_with_which_a_model_can_be_imported_is_advised(tmp_path: Path) -> None:
    """Halved, enlarged and joined with what it came from: heights that are even can follow."""
    nodes = [
        helper.make_node("Conv", ["x", "filters"], ["half"], strides=[2, 2]),
        helper.make_node("ConvTranspose", ["half", "filters"], ["whole"], strides=[2, 2]),
        helper.make_node("Concat", ["whole", "x"], ["y"], axis=1),
    ]
    made = model(
        nodes, [value("x", ["n", 2, "h", 8])], [value("y", None)], {"filters": draw(2, 2, 2, 2)}
    )
    recipe = Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        inputs={"x": InputSpec(shape=("n", 2, "h", 8))},
        dimensions={"n": DimensionSpec(max=4), "h": DimensionSpec(min=3, max=9)},
    )
    settings = import_model.settings(recipe, None).to_json()
    with pytest.raises(ImportFailed, match="Concat") as caught:
        run(settings, save(made, tmp_path), tmp_path)
    assert caught.value.fix.startswith("add `multiple_of: 2` to h under `dimensions`")
    settings["dimensions"]["h"] = {"min": 4, "max": 8, "multiple_of": 2}
    run(settings, save(made, tmp_path), tmp_path)


def test_the_least_size_with_which_a_model_can_be_imported_is_advised(tmp_path: Path) -> None:
    """K is the smaller one of n and 5: a multiple would leave one size of all."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"], start=-1),
        helper.make_node("Min", ["sizes", "most"], ["k"]),
        helper.make_node("Cast", ["x"], ["bytes"], to=TensorProto.UINT8),
        helper.make_node("TopK", ["bytes", "k"], ["y", "indices"]),
    ]
    made = model(
        nodes,
        [value("x", [1, "n"])],
        [value("y", None, "uint8")],
        {"most": np.array([5], np.int64)},
    )
    recipe = Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        inputs={"x": InputSpec(shape=(1, "n"))},
        dimensions={"n": DimensionSpec(min=2, max=12)},
    )
    settings = import_model.settings(recipe, None).to_json()
    with pytest.raises(ImportFailed, match="TopK") as caught:
        run(settings, save(made, tmp_path), tmp_path)
    assert caught.value.fix.startswith("set `min: 5` for n under `dimensions`")
    settings["dimensions"]["n"] = {"min": 5, "max": 12}
    run(settings, save(made, tmp_path), tmp_path)


def test_no_multiple_is_advised_where_none_helps(tmp_path: Path) -> None:
    """The places of what is not 0 follow from no size."""
    made = model(
        [helper.make_node("NonZero", ["x"], ["y"])],
        [value("x", ["n", 2])],
        [value("y", None, "int64")],
    )
    recipe = Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        inputs={"x": InputSpec(shape=("n", 2))},
        dimensions={"n": DimensionSpec(max=64)},
    )
    with pytest.raises(ImportFailed, match="NonZero") as caught:
        run(import_model.settings(recipe, None).to_json(), save(made, tmp_path), tmp_path)
    assert caught.value.fix == DYNAMIC_FIX


ENDLESS = """
from types import SimpleNamespace
from tvmflow.core import fork_server_process
from tvmflow.core.errors import ImportFailed
from tvmflow.stages import import_model
fork_server_process.is_child, import_model._MIN_CPU_S = True, 1
import_model._import = lambda *_: any(0 for _ in iter(int, 1))
try:
    import_model.run(None, SimpleNamespace(inputs={}))
except ImportFailed as error:
    print(error.message)
"""


def test_an_import_ends() -> None:
    """A file of a stranger takes no more CPU time than its size allows, whatever its reader does."""
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, check=True
    )
    assert "more than 1 s of CPU time, the limit for its size" in done.stdout
