"""Runs of the stage quantize on small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper

from tests.support.onnx_models import model, value
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.types import Json
from tvmflow.graph import ir
from tvmflow.recipe import ModelSource, Recipe
from tvmflow.recipe.sections import Quantize, Verify
from tvmflow.stages import import_model, quantize
from tvmflow.stages.base import StageContext, parse_settings
from tvmflow.stages.quantize import QuantizeFacts, conversion
from tvmflow.stages.quantize.calibration import Signature
from tvmflow.stages.quantize.insertion import insert
from tvmflow.targets.resolve import ResolvedTarget

VNNI = ResolvedTarget(
    name="host",
    tvm={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "icelake-server"},
    threads=1,
    features=("avx512_vnni", "avx512vl"),
    device={},
    unrunnable_reason="",
)


AVX2 = VNNI._replace(
    tvm={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"}, features=("avx2",)
)


RNG = np.random.default_rng(0)


def small_network() -> onnx.ModelProto:
    """Two convolutions with a norm and a residual sum, joined parts, and a dense layer."""
    shapes = {"w0": (16, 3, 3, 3), "w1": (16, 16, 3, 3), "w2": (16, 16, 1, 1), "d": (32, 20)}
    weights = {name: RNG.normal(0, 0.2, shape) for name, shape in shapes.items()}
    weights |= {f"n{place}": np.abs(RNG.normal(1, 0.1, 16)) for place in range(4)}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "first", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["a", "n0", "n1", "n2", "n3"], ["b"], "norm"),
        helper.make_node("Relu", ["b"], ["c"], "relu"),
        helper.make_node("Conv", ["c", "w1"], ["e"], "second", pads=[1] * 4),
        helper.make_node("Conv", ["c", "w2"], ["f"], "shortcut"),
        helper.make_node("Add", ["e", "f"], ["g"], "sum"),
        helper.make_node("Concat", ["g", "c"], ["h"], "join", axis=1),
        helper.make_node("GlobalAveragePool", ["h"], ["i"], "pool"),
        helper.make_node("Flatten", ["i"], ["j"], "flat"),
        helper.make_node("MatMul", ["j", "d"], ["y"], "head"),
    ]
    made = model(nodes, [value("x", [1, 3, 8, 8])], [value("y", [1, 20])])
    made.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    return made


def settings_of(target: ResolvedTarget = VNNI, **fields: Any) -> Json:
    """Return the settings of a recipe with this quantization."""
    recipe = Recipe(
        recipe=1,
        name="net",
        model=ModelSource(onnx="m.onnx"),
        verify=Verify(data="test.npz"),
        quantize=Quantize(**fields),
    )
    return quantize.settings(recipe, target).to_json()


def import_files(
    model_files: dict[str, Path],
    folder: Path,
    kind: str = "onnx",
    *,
    dimensions: Json = None,
    **inputs: Any,
) -> dict[str, Path]:
    """Import a model, and return the files that `quantize` reads."""
    folder.mkdir()
    settings = {"model": {"kind": kind}, "inputs": inputs, "dimensions": dimensions or {}}
    context = StageContext(model_files, folder, folder, folder, folder, lambda _: None)
    import_model.run(parse_settings(import_model.run, settings), context)
    names = (import_model.MODEL, import_model.PARAMS, import_model.SIGNATURE, import_model.NODES)
    return {f"import/{name}": folder / name for name in names}


def run(settings: Json, files: dict[str, Path], folder: Path) -> QuantizeFacts:
    """Quantize a model into a folder."""
    folder.mkdir()
    context = StageContext(files, folder, folder, folder, folder, lambda _: None)
    return quantize.run(parse_settings(quantize.run, settings), context)


def list_kernels(folder: Path) -> list[str]:
    """Return the kernels of a quantized model on a CPU with VNNI, in the order of their calls."""
    mod = ir.load_module(folder / "model.json")
    options = LoweringOptions(checks=False)
    lowered = lowering.lower(mod, tvm.target.Target(VNNI.tvm), options).mod
    return [
        f"{call.args[0].name_hint!s} -> {ir.dtype_of(binding.var)}"
        for binding in ir.list_bindings(lowered["main"].body)
        if ir.operator_name(call := binding.value) == "relax.call_tir"
    ]


Array = np.ndarray[Any, Any]


def compare(files: dict[str, Path], batches: list[dict[str, Array]], **fields: Any) -> None:
    """Check that the emulation is the float model with its own weights, and the quantized one with others."""
    settings = parse_settings(quantize.run, settings_of(**fields))
    signature = Signature(json.loads(files["import/signature.json"].read_text()))
    plain = conversion._list_candidates(settings, signature, conversion._load(files))
    exact = signature.compile(plain.model)
    candidates = conversion._smooth(plain, batches)
    possible = conversion._quantize(candidates, batches)
    emulated = conversion._compute(candidates, possible)
    integers = signature.compile(insert(candidates.model, candidates.layers, possible))
    for feed in batches:
        [name] = exact.run(feed)
        expected, rounded = exact.run(feed)[name], integers.run(feed)[name]
        np.testing.assert_allclose(candidates.observer.run(feed)[name], expected, rtol=0, atol=1e-5)
        error = np.abs(rounded - expected).max()
        # a sum of floats that is a bit off may be rounded to another integer
        assert np.abs(emulated(feed)[name] - rounded).max() < 0.4 * error
