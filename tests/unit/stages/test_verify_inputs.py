"""Inputs that reach the outputs of a model, and what a wrong library could do undetected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from tests.support.verification import settings
from tests.unit.frontends.onnx.models import load_dynamic
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.stages.verify import verdict_text
from tvmflow.stages.verify.comparison import find_undetected, tolerance_for
from tvmflow.stages.verify.inputs import (
    Operand,
    draw_inputs,
    find_operands,
    limit_draws,
    load_samples,
    run_reference_on,
)
from tvmflow.stages.verify.verdict import FLOAT32, Verdict
from tvmflow.stages.verify_settings import VerifySettings

DEFAULT = tolerance_for(FLOAT32, rtol=None, atol=None)
NORMAL = "normally distributed with standard deviation 10"


def undetected(*batches: Any, **tolerance: float | None) -> str:
    outputs = [{"y": np.asarray(batch)} for batch in batches]
    limits = {"rtol": None, "atol": None, **tolerance}
    undetected_outputs = find_undetected(outputs, ["y"], tolerance_for(FLOAT32, **limits))
    return undetected_outputs.get("y", "")


def test_what_zeros_would_pass_for() -> None:
    """Zeros, subnormal numbers, and whatever is below the recipe's own tolerance."""
    assert undetected(np.zeros(3), np.zeros(3)) == "zeros"
    assert undetected(np.full(3, 1e-39), np.zeros(3)) == "zeros"
    assert undetected(np.full(3, 1e-30)) == ""
    assert undetected(np.full(3, 1e-5), np.full(3, 2e-5), atol=1e-4) == "zeros"
    assert undetected([0, 0], [0, 0]) == "zeros"
    assert undetected([False], [True]) == ""


def test_an_output_that_is_the_same_for_all_inputs() -> None:
    """One batch cannot tell; two that are alike within the tolerance do not."""
    assert undetected([1.0, 2.0]) == ""
    assert undetected([1.0, 2.0], [1.0, 2.0], [1.00001, 2.0]) == "inputs"
    assert undetected([1.0, 2.0], [1.0, 2.0], [1.1, 2.0]) == ""
    assert undetected([3], [3]) == "inputs"
    assert undetected([3], [4]) == ""


def test_an_empty_output() -> None:
    """In every batch; one with elements is enough to compare."""
    assert undetected(np.zeros((0, 4)), np.zeros((0, 4))) == "anything"
    assert undetected(np.zeros((0, 4)), np.ones((2, 4))) == ""


# ---------------------------------------------------------------- other inputs


def signature(dtype: str = "float32") -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [4], "dtype": dtype}]}


def run_on(function: Any, made: VerifySettings, dtype: str = "float32") -> Any:
    candidates = load_samples(signature(dtype), made, None)
    return run_reference_on(lambda feed: {"y": function(feed["x"])}, candidates, ["y"], DEFAULT)


def test_inputs_have_both_signs() -> None:
    """Unless the reference gives no numbers for negative ones, or the model was quantized for samples."""
    results = run_on(lambda x: x, settings())
    assert (results.random_inputs, results.undetected) == ("", {})
    assert len(results.outputs) == len(results.samples.batches) == 3
    assert min(batch["x"].min() for batch in results.samples.batches) < 0
    with np.errstate(invalid="ignore"):
        positive = run_on(np.sqrt, settings())
    assert positive.random_inputs == "uniform from 0 to 1"
    quantized = run_on(lambda x: x, settings().model_copy(update={"quantized": True}))
    assert min(batch["x"].min() for batch in quantized.samples.batches) >= 0


def test_inputs_are_drawn_again_until_they_reach_the_outputs() -> None:
    """With larger numbers."""
    large = run_on(lambda x: np.maximum(np.abs(x) - 5, 0), settings())
    assert (large.random_inputs, large.undetected) == (NORMAL, {})
    never = run_on(lambda x: x * 0, settings())
    assert (never.random_inputs, never.undetected) == ("", {"y": "zeros"})


def test_inputs_that_make_numbers_overflow_are_not_taken() -> None:
    results = run_on(lambda x: np.where(np.abs(x) > 2, np.inf, 1.0), settings())
    assert (results.random_inputs, results.undetected) == ("", {"y": "inputs"})


def test_a_range_and_integers_are_never_left() -> None:
    """They may be indices, and a range says what the model is made for."""
    for made, dtype in ((settings({"x": (0.0, 1.0)}), "float32"), (settings(), "int64")):
        assert run_on(lambda x: x * 0, made, dtype).undetected == {"y": "zeros"}
        assert len(list(load_samples(signature(dtype), made, None))) == 1


# ---------------------------------------------------------------- sentences


def verdict(*undetected_outputs: str) -> Verdict:
    outputs: Any = {
        f"y{index}": {"passed": True, "atol": 1e-4, **({"undetected": what} if what else {})}
        for index, what in enumerate(undetected_outputs)
    }
    return {"passed": True, "against": "reference", "outputs": outputs}


@pytest.mark.parametrize(
    ("undetected_outputs", "is_rejected"),
    [
        (("zeros",), True),
        (("zeros", "anything"), True),
        (("zeros", ""), False),
        (("inputs",), False),
        (("zeros", "inputs"), False),
        (("",), False),
    ],
)
def test_a_library_of_which_nothing_is_compared_is_rejected(
    undetected_outputs: tuple[str, ...], is_rejected: bool
) -> None:
    """By tolerances that nobody asked for; the recipe's own ones give a warning."""
    default, own = settings().verify, settings(atol=1e-4).verify
    failures = verdict_text.list_failures(verdict(*undetected_outputs), default)
    assert bool(failures) == is_rejected
    if is_rejected:
        assert failures[0].startswith("output 'y0' is so small that zeros would pass for it (atol")
        assert "; nothing is compared: give inputs that the model is made for" in failures[0]
    assert verdict_text.list_failures(verdict(*undetected_outputs), own) == []
    assert len(verdict_text.list_warnings(verdict(*undetected_outputs), own)) == len(
        [*filter(None, undetected_outputs)]
    )


def test_numbers_that_count_as_0_are_named() -> None:
    """Other inputs may not help where a model's own constants are that small."""
    made = verdict("zeros")
    made["outputs"]["y0"]["atol"] = 2.0**-126
    [failure] = verdict_text.list_failures(made, settings().verify)
    assert failure.startswith(
        "output 'y0' is 0 or below 1.2e-38 everywhere, the smallest normal number of float32, so that zeros "
        "would pass for it (larger weights and constants may help); nothing is compared: give inputs"
    )


def test_a_warning_says_what_would_pass_and_what_to_do() -> None:
    [warning] = verdict_text.list_warnings(verdict("inputs"), settings().verify)
    assert warning == (
        "output 'y0' is the same for all inputs, so that a library that ignores them would pass: "
        "give inputs that the model is made for (inputs.NAME.range, verify.data)"
    )
    [warning] = verdict_text.list_warnings(verdict("zeros"), settings(rtol=0.1).verify)
    assert warning.endswith(
        "or leave verify.atol and verify.rtol to their defaults, which follow the output's size"
    )


# ---------------------------------------------------------------- indices and divisors

OPERANDS = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n,3] x, int64[4] i, float[1] z, int64[n] j, int8[9] a, uint8[9] b, int8[9] c, int32[1,9] d)
=> (y, w, q, r, s)
{
  y = Gather(x, i)
  w = Gather(z, j)
  q = Mod(b, b)
  r = Div(a, c)
  k = Cast<to=1>(d)
  t = ReduceSum(k)
  u = Cast<to=7>(t)
  s = Div(u, u)
}
"""


def test_random_indices_and_divisors_are_ones_that_the_operators_take(tmp_path: Path) -> None:
    """At each size; a range of the recipe stays as it is, and a divisor that is computed is not known."""
    dimension = Dimension("n", 1, 8)
    loaded = load_dynamic(onnx.parser.parse_model(OPERANDS), tmp_path, [dimension])
    operands = find_operands(loaded.mod)
    assert {(operand.input, operand.sizes) for operand in operands} == {
        ("i", ("n",)),
        ("j", (1,)),
        ("b", ()),
        ("c", ()),
        # what they are a part of may be computed
        ("a", (2,)),
        ("d", (2,)),
    }
    made = settings({"x": (2.0, 3.0)})
    for size in (1, 8):
        for feed in draw_inputs(loaded.inputs, {"n": size}, made, operands):
            assert set(feed["i"]) <= set(range(size))
            assert set(feed["j"]) == {0}
            assert feed["b"].all() and feed["c"].all()
            assert feed["c"].min() < 0 < feed["c"].max()
            assert not feed["d"].all()
            if size > 1:
                assert feed["i"].max() > 1
    limited = limit_draws(settings({"i": (0, 1), "c": (-3, 3)}), operands, {"n": 8})
    usual = {"a": (0, 1), "d": (0, 1)}
    assert limited.ranges == {"i": (0, 1), "j": (0, 0), "b": (-9, 9), "c": (-3, 3), **usual}
    assert limited.divisors == {"b", "c"}


def test_indices_of_few_bits_stay_within_their_dtype() -> None:
    operands = [Operand("i", (50_000,))]
    [feed, *_] = draw_inputs([TensorSpec("i", (999,), "int8")], {}, settings(), operands)
    assert feed["i"].min() >= 0
