"""Every check on a library that is wrong: one weight, one kernel, an output that is permuted, zeroed, scaled, or ignores the input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.support.kernels import host_level, outputs
from tests.support.onnx_models import Array, draw, load, model, quantized, value
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends.base import LoadedModel
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.comparison import compare, find_undetected
from tvmflow.stages.verify.verdict import BFLOAT16, FLOAT16, FLOAT32, QUANTIZED
from tvmflow.targets.host import read_host

SCORES: Final = 300
OPTIONS: Final = {
    FLOAT32: LoweringOptions(),
    FLOAT16: LoweringOptions(precision="mixed"),
    BFLOAT16: LoweringOptions(precision="bfloat16"),
    QUANTIZED: LoweringOptions(),
}
each_arithmetic = pytest.mark.parametrize(
    "arithmetic",
    [
        FLOAT32,
        *(pytest.param(name, marks=pytest.mark.slow) for name in (FLOAT16, BFLOAT16, QUANTIZED)),
    ],
)


def net(activation: str = "Relu", pads: tuple[int, ...] = (1, 1, 1, 1), size: float = 1.0) -> Any:
    """conv, relu, conv, pool, dense: `data` (1, 3, 12, 12) to `scores` (1, 300), as large as `size`."""
    node = helper.make_node
    nodes = [
        node("Conv", ["data", "a"], ["t"], pads=pads),
        node(activation, ["t"], ["u"]),
        node("Conv", ["u", "b"], ["v"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["v"], ["w"]),
        node("Flatten", ["w"], ["x"]),
        node("MatMul", ["x", "c"], ["scores"]),
    ]
    weights = {
        "a": draw(16, 3, 3, 3, seed=1),
        "b": draw(32, 16, 3, 3, seed=2),
        "c": draw(32, SCORES, seed=3) * np.float32(size),
    }
    shapes = [value("data", [1, 3, 12, 12])], [value("scores", [1, SCORES])]
    return model(nodes, *shapes, weights)


class Checked:
    """A model in an arithmetic, with what its reference computes of two batches."""

    def __init__(self, arithmetic: str, folder: Path, size: float = 1.0) -> None:
        if arithmetic == BFLOAT16 and "avx512_bf16" not in read_host().flags:
            pytest.skip("this machine lacks avx512_bf16")
        self._folder, self._arithmetic = folder, arithmetic
        self._target = host_level()
        if arithmetic == BFLOAT16:
            self._target["mattr"] = ["+avx512bf16"]
        self.made = self.convert(net(size=size))
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(
            self.made.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._feeds = [{"data": draw(1, 3, 12, 12, seed=seed)} for seed in (5, 6)]
        self.expected = [session.run(None, feed)[0] for feed in self._feeds]
        self._tolerance = comparison.tolerance_for(arithmetic, rtol=None, atol=None)

    def convert(self, made: onnx.ModelProto) -> onnx.ModelProto:
        is_quantized = self._arithmetic == QUANTIZED
        return quantized(made, self._folder) if is_quantized else made

    def load(self, made: onnx.ModelProto | None = None) -> LoadedModel:
        return load(made or self.made, self._folder)

    def compute(self, loaded: LoadedModel, batch: int = 0) -> Array:
        options = OPTIONS[self._arithmetic]
        [actual] = outputs(loaded, self._feeds[batch], self._target, options)
        return actual

    def passes(self, actual: Array) -> bool:
        return compare(actual, self.expected[0], self._tolerance)["passed"]

    def undetected(self) -> dict[str, str]:
        outputs_by_batch = [{"scores": batch} for batch in self.expected]
        return find_undetected(outputs_by_batch, ["scores"], self._tolerance)


FAULTS: Final[dict[str, Callable[[Array], Array]]] = {
    "permuted": lambda output: np.roll(output, 1, axis=1),
    "two swapped": lambda output: output[:, [1, 0, *range(2, SCORES)]],
    "zeroed": np.zeros_like,
    "constant": lambda output: np.full_like(output, output.mean()),
    "negated": np.negative,
    "scaled": lambda output: output * 1.01,
    "NaN": lambda output: np.where(output == output.max(), np.nan, output),
}


@each_arithmetic
def test_a_wrong_library_is_rejected_and_the_right_one_is_not(
    arithmetic: str, tmp_path: Path
) -> None:
    """One weight (in integers: of one channel all), one kernel, the output, and the input: in every arithmetic."""
    checked = Checked(arithmetic, tmp_path)
    loaded = checked.load()
    right = checked.compute(loaded)
    assert checked.passes(right)
    assert checked.undetected() == {}
    for name, fault in FAULTS.items():
        assert not checked.passes(fault(right)), name
    assert not checked.passes(checked.expected[1]), "the input is ignored"

    key = next(name for name in ("a", "a_quantized") if name in loaded.params)
    weights = loaded.params[key].copy()
    if arithmetic == QUANTIZED:
        # 16 steps of 256 hide one weight of many
        weights[0] = -weights[0]
    else:
        place = int(np.argmax(np.abs(weights)))
        weights.flat[place] = -weights.flat[place]
    wrong = loaded._replace(params={**loaded.params, key: weights})
    assert not checked.passes(checked.compute(wrong)), "weights are wrong"

    shifted = checked.load(checked.convert(net(pads=(2, 2, 0, 0))))
    assert not checked.passes(checked.compute(shifted)), "the first kernel reads another place"


@pytest.mark.parametrize("size", [1e-13, pytest.param(1e13, marks=pytest.mark.slow)])
def test_the_size_of_an_output_makes_no_difference(size: float, tmp_path: Path) -> None:
    """A network whose outputs are tiny is checked as closely as any other, and its zeros are found."""
    checked = Checked(FLOAT32, tmp_path, size)
    right = checked.compute(checked.load())
    assert checked.passes(right)
    for name, fault in FAULTS.items():
        assert not checked.passes(fault(right)), name
    explicit = comparison.tolerance_for(FLOAT32, rtol=1e-3, atol=1e-4)
    zeros = [{"scores": batch} for batch in checked.expected]
    undetected = find_undetected(zeros, ["scores"], explicit)
    assert undetected == ({"scores": "zeros"} if size < 1 else {})
