"""TFLite models whose sizes stay open: at all sizes they compute what LiteRT computes, or an operator is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.support.tflite_models import Array, run_litert
from tests.unit.frontends.tflite.tflite_cases import CASES, Case, Draw, make
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import Dimension, Size, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import DYNAMIC_FIX
from tvmflow.frontends.tflite._conversion import convert
from tvmflow.frontends.tflite._model import read_model

frontend = FRONTENDS["tflite"]

MORE = 8


def open_case(case: Case) -> tuple[list[TensorSpec], dict[str, Dimension]]:
    """Return inputs with a dimension for each size but the last, equal sizes being one."""
    dimensions: dict[str, Dimension] = {}
    specs = []
    for name, array in case.feed.items():
        sizes: list[Size] = [f"d{size}_{axis}" for axis, size in enumerate(array.shape[:-1])]
        for size, text in zip(array.shape, sizes, strict=False):
            dimensions.setdefault(str(text), Dimension(str(text), 1, size + MORE))
        largest = (*(size + MORE for size in array.shape[:-1]), *array.shape[-1:])
        dynamic_shapes = (*sizes, *array.shape[-1:]) if sizes else ()
        specs.append(TensorSpec(name, largest, str(array.dtype), sizes=dynamic_shapes))
    return specs, dimensions


def feed_of(case: Case, specs: list[TensorSpec], sizes: dict[str, int]) -> dict[str, Array]:
    """Return the values of a case, repeated or cut to other sizes."""
    feed = {}
    for spec in specs:
        shape = evaluate_shape(spec.sizes or spec.shape, sizes)
        array = case.feed[spec.name]
        places = [np.arange(new) % old for new, old in zip(shape, array.shape, strict=True)]
        feed[spec.name] = np.ascontiguousarray(array[np.ix_(*places)]) if places else array
    return feed


@pytest.mark.tflite
@pytest.mark.parametrize("name", CASES)
def test_conversions_follow_dynamic_shapes(name: str) -> None:
    """At several sizes ONNX Runtime computes from the converted model what LiteRT computes from the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    case = make(name, 0)
    specs, dimensions = open_case(case)
    try:
        converted, _ = convert(
            read_model(case.data), case.data, specs, dimensions=tuple(dimensions.values())
        )
    except ImportFailed as error:
        assert "(tensor 't" in error.message
        assert error.fix == DYNAMIC_FIX
        return
    converted.ir_version = 10
    session = onnxruntime.InferenceSession(
        converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    used = {value.name for value in session.get_inputs()}
    for change in (0, 1, 3):
        sizes = {text: entry.max - MORE + change for text, entry in dimensions.items()}
        feed = feed_of(case, specs, sizes)
        try:
            wanted = run_litert(case.data, feed)
        except (RuntimeError, ValueError):
            # LiteRT has this model for other sizes alone
            continue
        results = session.run(None, {key: feed[key] for key in used})
        for result, expected in zip(results, wanted, strict=True):
            assert result.shape == expected.shape
            np.testing.assert_allclose(
                result.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=case.atol
            )


def import_dynamic(folder: Path, draw: Draw, result: int, *dimensions: Dimension) -> Any:
    """Import a model whose input `x0` has the dimensions in its first axes."""
    files = {"model": draw.model.save(folder, result)}
    shape = draw.feed["x0"].shape
    names = tuple(entry.name for entry in dimensions)
    largest = (*(entry.max for entry in dimensions), *shape[len(names) :])
    spec = TensorSpec("x0", largest, "float32", sizes=(*names, *shape[len(names) :]))
    return frontend.load(files, (spec,), dimensions=dimensions)


def test_a_shape_that_the_model_computes_stays_open(tmp_path: Path) -> None:
    """SHAPE, STRIDED_SLICE and PACK before RESHAPE, as Keras's converter writes it, without LiteRT."""
    draw = Draw(0)
    model, x = draw.model, draw.model.input("x0", (-1, 5, 6))
    draw.feed["x0"] = np.zeros((1, 5, 6), np.float32)
    shape = model.result("SHAPE", [x], 1, "Shape", "int32", OutType=2)
    bounds = [model.integers([n]) for n in (0, 1, 1)]
    fields: dict[str, Any] = {"ShrinkAxisMask": 1}
    n = model.result("STRIDED_SLICE", [shape, *bounds], 0, "StridedSlice", "int32", **fields)
    parts = [n, model.integers(-1), model.integers(2)]
    packed = model.result("PACK", parts, 1, "Pack", "int32", ValuesCount=3, Axis=0)
    result = model.result("RESHAPE", [x, packed], 3, "Reshape")
    loaded = import_dynamic(tmp_path, draw, result, Dimension("batch", 1, 8))
    assert [entry.sizes for entry in loaded.outputs] == [("batch", 15, 2)]


def test_what_cannot_follow_is_named_with_a_remedy(tmp_path: Path) -> None:
    draw = Draw(0)
    x = draw.input(draw.normal(2, 6, 4))
    result = draw.model.result("RESHAPE", [x, draw.model.integers([2, 24])], 2, "Reshape")
    with pytest.raises(ImportFailed) as refused:
        import_dynamic(tmp_path, draw, result, Dimension("batch", 1, 8))
    assert "RESHAPE of shape [batch, 6, 4] to [2, 24] (tensor 't2')" in refused.value.message
    assert refused.value.fix == DYNAMIC_FIX
