"""Judging a library: what is within tolerance, what is said of what is not, and accuracy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.tuning import model, relu
from tvmflow.stages import _judging, verify
from tvmflow.stages._tolerances import (
    FLOAT16,
    FLOAT32,
    QUANTISED,
    Tolerance,
    arithmetic_of,
    tolerance_of,
)
from tvmflow.values import TensorSpec

CHECKS = {"rtol": None, "atol": None, "min_accuracy": None, "label": "label"}
F = np.float32


def compare(ours: Any, theirs: Any, arithmetic: str = FLOAT32) -> dict[str, Any]:
    tolerance = tolerance_of(arithmetic, CHECKS)
    return _judging.compare(np.asarray(ours, F), np.asarray(theirs, F), tolerance)


def module(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = ()) -> Any:
    return SimpleNamespace(inputs=inputs, outputs=outputs)


# ---------------------------------------------------------------- numbers


def test_equal_outputs_have_no_error() -> None:
    """NaN is NaN and infinity is infinity."""
    found = compare([1, np.nan, np.inf, -np.inf, 0], [1, np.nan, np.inf, -np.inf, 0])
    assert found["passed"]
    assert (found["max_abs_error"], found["max_rel_error"], found["outside"]) == (0, 0, 0)


def test_the_tolerance_is_that_of_numpy_isclose() -> None:
    """atol for small values, rtol for large ones."""
    assert compare([1000.9], [1000])["passed"]
    assert not compare([1001.2], [1000])["passed"]
    assert compare([0.00009], [0])["passed"]
    assert not compare([0.00011], [0])["passed"]


def test_what_is_rounded_coarsely_is_judged_by_the_largest_of_its_output() -> None:
    """The error of a result near 0 follows those beside it; an infinity is no measure of anything."""
    for arithmetic, allowed in ((FLOAT16, 1000 * 10 / 2**11), (QUANTISED, 1000 * 16 / 2**8)):
        theirs = [1000, 0, np.inf]
        assert compare([1000, 0.99 * allowed, np.inf], theirs, arithmetic)["passed"]
        found = compare([1000, 1.01 * allowed, np.inf], theirs, arithmetic)
        assert (found["outside"], found["rtol"], found["atol"]) == (1, 0.01, allowed)
    assert not compare([1000, 0.1], [1000, 0])["passed"]


def test_a_tolerance_that_the_recipe_gives_is_the_one_that_counts() -> None:
    """Each by itself; an absolute one holds whatever the outputs are."""
    only = {**CHECKS, "rtol": 0.5}
    assert tolerance_of(FLOAT32, CHECKS) == Tolerance(1e-3, 1e-4)
    assert tolerance_of(QUANTISED, only) == Tolerance(0.5, 5e-3, 16 / 2**8)
    assert tolerance_of(QUANTISED, {**only, "atol": 1e-4}) == Tolerance(0.5, 1e-4)


def test_the_tolerance_follows_what_is_computed_in(tmp_path: Path) -> None:
    """By the imported model, and by whether its weights become float16."""
    one = relax.const(np.float32(0.5))
    zero = relax.const(np.int8(0))

    def quantised(value: Any, _: Any) -> Any:
        return relax.op.quantize(value, one, zero, axis=0, out_dtype="int8")

    def half(value: Any, _: Any) -> Any:
        return relax.op.astype(value, "float16")

    found = {}
    for name, layer in {"plain": relu, "half": half, "whole": quantised}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(tvm.ir.save_json(model(layer)))
        found[name] = [arithmetic_of(path, mixed) for mixed in (False, True)]
    assert found == {
        "plain": [FLOAT32, FLOAT16],
        "half": [FLOAT16, FLOAT16],
        "whole": [QUANTISED, QUANTISED],
    }


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 7.0])
def test_the_worst_element_is_told(wrong: float) -> None:
    """Its place, what the library gives and what the reference gives."""
    ours = np.ones((2, 3), F)
    ours[1, 2] = wrong
    ours[0, 0] = 1.5
    found = compare(ours, np.ones((2, 3)))
    assert not found["passed"]
    assert found["outside"] == 2
    assert found["worst"]["index"] == [1, 2]
    assert found["worst"]["reference"] == 1


def test_another_shape_fails_whatever_the_numbers_are() -> None:
    """Broadcasting must not make two shapes one."""
    assert compare(np.ones((2, 1)), np.ones((2, 3))) == {
        "passed": False,
        "shape": "(2, 1) instead of (2, 3)",
    }


def test_an_empty_output_and_a_scalar_can_be_compared() -> None:
    """No elements are no errors."""
    assert compare(np.ones((0, 3)), np.ones((0, 3)))["passed"]
    assert compare(2.0, 2.0)["passed"]
    assert not compare(2.0, 3.0)["passed"]


def test_what_failed_is_a_sentence_for_each_output() -> None:
    """How many, by which tolerance, and the worst."""
    verdict = {
        "reference": "ONNX Runtime 1.31.1",
        "outputs": {
            "good": {"passed": True},
            "bad": compare([1, 5], [1, 2]),
            "odd": compare([1], [1, 2]),
        },
    }
    failures = _judging.failures(verdict, CHECKS)
    assert failures[0] == (
        "output 'bad': 1 of 2 elements are out of tolerance (rtol 0.001, atol 0.0001); "
        "the worst, at [1], is 5.0 where ONNX Runtime 1.31.1 gives 2.0"
    )
    assert failures[1] == "output 'odd' has shape (1,) instead of (2,)"


def test_accuracy_below_the_gate_fails() -> None:
    """Top-1 on the first output, whatever its trailing shape."""
    scores = np.array([[[0], [9], [0]], [[1], [0], [0]]], F)
    labels = np.array([[1], [2]])
    accuracy = _judging.accuracy({"scores": scores}, "scores", labels)
    assert accuracy == 0.5
    failures = _judging.failures({"accuracy": accuracy}, {**CHECKS, "min_accuracy": 0.9})
    assert failures == ["accuracy 0.5000 is below verify.min_accuracy 0.9"]


def test_the_gate_on_speed() -> None:
    """The whole library against the same one untuned; without a tuned kernel it is the same one."""
    latency = {"library": {"median": 1.0}, "untuned": {"median": 3.0}}
    settings = {"tune": {"min_speedup": 3.5}}
    assert verify._too_slow({"latency": latency}, {}) == []
    assert verify._too_slow({"latency": latency}, {"tune": {"min_speedup": 2.5}}) == []
    assert "3 times as fast" in verify._too_slow({"latency": latency}, settings)[0]
    only = {"library": {"median": 1.0}}
    assert "1 times as fast" in verify._too_slow({"latency": only}, settings)[0]
