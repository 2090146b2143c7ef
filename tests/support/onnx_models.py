"""Makes ONNX models by hand, imports and runs them, and compares them with ONNX Runtime."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.mxnet_runs import compute
from tests.support.recipes import ROOT
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.onnx._reference_worker import EXACT_BYTES

frontend = FRONTENDS["onnx"]

Array = np.ndarray[Any, Any]
Shape = Sequence[int | str | None]

_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


def load_benchmark_networks() -> Any:
    """Return the module with the networks of the benchmarks."""
    spec = importlib.util.spec_from_file_location("_nets", ROOT / "benchmarks/_nets.py")
    assert spec is not None and spec.loader is not None
    networks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(networks)
    return networks


def value(name: str, shape: Shape | None, dtype: str = "float32") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _TYPES[dtype], shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    **more: Any,
) -> onnx.ModelProto:
    """Return a model of the standard opset, in an IR version that every runtime reads."""
    initializers = [numpy_helper.from_array(v, name) for name, v in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    more.setdefault("opset_imports", [helper.make_opsetid("", opset)])
    made = helper.make_model(graph, **more)
    made.ir_version = 8
    return made


def draw(*shape: int, seed: int = 0) -> Array:
    """Return normally distributed values from a seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def specs(feed: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, v.shape, str(v.dtype)) for name, v in feed.items())


def save(made: onnx.ModelProto, folder: Path) -> dict[str, Path]:
    """Save a model, and return its files by role."""
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return {"model": path}


def load(
    made: onnx.ModelProto, folder: Path, feed: Mapping[str, Array] | None = None
) -> LoadedModel:
    """Import a model for the shapes of these inputs, by default for its own."""
    return frontend.load(save(made, folder), specs(feed or {}))


def open_session(made: onnx.ModelProto) -> Any:
    """ONNX Runtime on a model, exact with int8 dot products; without its warnings."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(*EXACT_BYTES)
    return onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def agree(
    made: onnx.ModelProto, folder: Path, feed: Mapping[str, Array], rtol: float = 1e-4
) -> LoadedModel:
    """Import, compile and run a model; every output must agree with ONNX Runtime."""
    loaded = load(made, folder, feed)
    actual = compute(loaded, feed)
    expected = open_session(made).run(None, dict(feed))
    assert [spec.name for spec in loaded.outputs] == [output.name for output in made.graph.output]
    for spec, a, b in zip(loaded.outputs, actual, expected, strict=True):
        assert (spec.shape, spec.dtype) == (b.shape, str(b.dtype)), spec.name
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=spec.name)
    return loaded


def quantized(
    made: onnx.ModelProto,
    folder: Path,
    *,
    signed: bool = False,
    per_channel: bool = True,
    symmetric: bool = True,
    qoperators: bool = False,
) -> onnx.ModelProto:
    """A model with QuantizeLinear and DequantizeLinear around its operators, or with QOperators, calibrated on random data around 0."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    [data] = made.graph.input
    shape = [output.dim_value for output in data.type.tensor_type.shape.dim]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = iter([{data.name: draw(*shape, seed=seed)} for seed in range(4)])

        def get_next(self) -> dict[str, Array] | None:
            return next(self._feeds, None)

    path = folder / "quantized.onnx"
    quantize_static(
        made,
        path,
        Reader(),
        quant_format=QuantFormat.QOperator if qoperators else QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        extra_options={"WeightSymmetric": symmetric},
    )
    return onnx.load(path)


def classifier(
    seed: int = 0, *, producer: str = "tests", prefix: str = "", doc: str = "", opset: int = 17
) -> onnx.ModelProto:
    """conv, batch norm, relu, max pool, dense, softmax: `data` (1, 3, 8, 8) to `prob` (1, 4)."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    weights = {
        "w": weight(6, 3, 3, 3),
        "b": weight(6),
        "gamma": weight(6),
        "beta": weight(6),
        "mean": weight(6),
        "var": np.abs(weight(6)) + 1,
        "dense": weight(4, 96),
        "bias": weight(4),
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["data", "w", "b"], ["c"], name=f"{prefix}conv", pads=[1, 1, 1, 1]),
        node(
            "BatchNormalization", ["c", "gamma", "beta", "mean", "var"], ["n"], name=f"{prefix}bn"
        ),
        node("Relu", ["n"], ["r"], name=f"{prefix}relu"),
        node("MaxPool", ["r"], ["p"], name=f"{prefix}pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"], name=f"{prefix}flat"),
        node("Gemm", ["f", "dense", "bias"], ["g"], name=f"{prefix}gemm", transB=1),
        node("Softmax", ["g"], ["prob"], name=f"{prefix}softmax", axis=1),
    ]
    made = model(
        nodes,
        [value("data", [1, 3, 8, 8])],
        [value("prob", [1, 4])],
        weights,
        opset=opset,
        producer_name=producer,
        doc_string=doc,
    )
    made.graph.doc_string = doc
    return made
