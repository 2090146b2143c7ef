"""Every operator of TFLite that is imported computes what LiteRT computes, on random sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.kernels import outputs
from tests.support.onnx_models import specs
from tests.support.tflite_models import Array, run_litert
from tests.unit.frontends.tflite.tflite_cases import CASES, Case, make
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.tflite._conversion import CONVERTERS, convert
from tvmflow.frontends.tflite._model import SUPPORTED, read_model

frontend = FRONTENDS["tflite"]

pytestmark = pytest.mark.tflite
each_case = pytest.mark.parametrize("name", CASES)


def check_equal(actual: list[Array], case: Case) -> None:
    """Check outputs against LiteRT's: shapes, dtypes, values."""
    for result, expected in zip(actual, run_litert(case.data, case.feed), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(
            result.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=case.atol
        )


@each_case
def test_the_conversion_to_onnx(name: str) -> None:
    """ONNX Runtime computes from the converted model what LiteRT computes from the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Its own arithmetic for 8 bits overflows on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    for seed in range(4):
        case = make(name, seed)
        converted, _ = convert(read_model(case.data), case.data, specs(case.feed))
        converted.ir_version = 10
        session = onnxruntime.InferenceSession(
            converted.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        used = {value.name for value in session.get_inputs()}
        feed = {key: value for key, value in case.feed.items() if key in used}
        check_equal(session.run(None, feed), case)


@pytest.mark.slow
@each_case
def test_the_compiled_model(name: str, tmp_path: Path) -> None:
    """The library computes it too."""
    for seed in range(2):
        case = make(name, seed)
        path = tmp_path / "model.tflite"
        path.write_bytes(case.data)
        loaded = frontend.load({"model": path}, specs(case.feed))
        check_equal(outputs(loaded, case.feed), case)


def test_all_operators_have_cases() -> None:
    """A converter for each name that planning admits, and a model of it."""
    assert set(CONVERTERS) == SUPPORTED
    seen = {
        operator.name for name in CASES for operator in read_model(make(name, 0).data).operators
    }
    assert seen == SUPPORTED
