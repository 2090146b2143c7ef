"""Sizes as expressions of dimensions: from whoever wrote them, evaluated and written in other languages."""

from __future__ import annotations

from typing import Final

import hypothesis
import pytest
from hypothesis import strategies

from tvmflow.core.dimensions import (
    Language,
    WrongSize,
    choose_tuning_size,
    derive_sizes,
    evaluate,
    find_bounds,
    list_names,
    substitute,
    write_code,
)
from tvmflow.core.types import Dimension, Size, TensorSpec

BATCH: Final = Dimension("batch", 1, 8)
SEQ: Final = Dimension("seq", 8, 512, multiple_of=8)
PYTHON: Final = Language(
    name=lambda name: f"_{name}",
    divide="({a} // {b})",
    remainder="({a} % {b})",
    least="min({a}, {b})",
    largest="max({a}, {b})",
)

_EXPRESSIONS = strategies.recursive(
    strategies.one_of(strategies.integers(0, 100).map(str), strategies.sampled_from(["a", "b"])),
    lambda inner: strategies.one_of(
        strategies.tuples(inner, strategies.sampled_from("+-*"), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        strategies.tuples(inner, strategies.integers(1, 9)).map(lambda p: f"({p[0]} // {p[1]})"),
        strategies.tuples(strategies.sampled_from(["min", "max"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
    ),
    max_leaves=8,
)


@hypothesis.given(_EXPRESSIONS, strategies.integers(1, 99), strategies.integers(1, 99))
def test_an_expression_has_the_value_that_python_gives(text: str, a: int, b: int) -> None:
    """So has what is written of it in another language."""
    expected = eval(text, {"a": a, "b": b})
    assert evaluate(text, {"a": a, "b": b}) == expected
    assert eval(write_code(text, PYTHON), {"_a": a, "_b": b}) == expected


@hypothesis.given(_EXPRESSIONS, strategies.integers(1, 99), strategies.integers(1, 99))
def test_bounds_hold_and_substitution_keeps_the_value(text: str, a: int, b: int) -> None:
    """For a number in place of a name, and for an expression."""
    expected = evaluate(text, {"a": a, "b": b})
    least, largest = find_bounds(text, {"a": (1, 99), "b": (b, b)})
    assert least <= expected <= largest
    assert evaluate(substitute(text, {"a": a}), {"b": b}) == expected
    assert evaluate(substitute(text, {"a": "c + 1"}), {"c": a - 1, "b": b}) == expected


def test_bounds_of_a_remainder_and_of_a_division_by_what_may_be_zero() -> None:
    assert find_bounds("(a + 7) % 8", {"a": (1, 99)}) == (0, 7)
    assert find_bounds("(a - 9) % 8", {"a": (1, 99)}) == (0, 7)
    with pytest.raises(WrongSize, match="may divide by 0"):
        find_bounds("8 // (a - 1)", {"a": (1, 9)})
    with pytest.raises(WrongSize, match="may be beyond"):
        find_bounds("a * a", {"a": (1, 2**40)})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').abort()",
        "a.b",
        "a ** 9",
        "1.5",
        "True",
        "min(a)",
        "min(a, b, key=a)",
        "open(a, b)",
        "(" * 1_000,
        "a +" * 10_000,
        "a\nb",
        "",
        "a if a else b",
        "9" * 1_000,
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """A bundle of a stranger may have any text in place of a size: nothing of it is run."""
    with pytest.raises(WrongSize):
        evaluate(text, {"a": 2**61, "b": 1})


def test_values_are_bounded_and_division_by_zero_is_an_error() -> None:
    """Whatever the sizes are, a size is a number that 64 bits hold."""
    with pytest.raises(WrongSize, match="is beyond"):
        evaluate("a * a", {"a": 2**40})
    with pytest.raises(WrongSize, match="divides by 0"):
        evaluate("8 // a", {"a": 0})
    with pytest.raises(WrongSize, match="unknown dimension"):
        evaluate("c + 1", {"a": 0})
    assert list_names("b + min(a, b)") == ["b", "a"]


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"x": (2, 16, 4), "y": (2, 16)}, None),
        ({"x": (2, 16, 4), "y": (2, 24)}, "the dimension seq has two sizes: size 1 of input 'y' is 24"),
        ({"x": (9, 16, 4), "y": (9, 16)}, "the dimension batch is 9, and its sizes are 1 to 8"),
        ({"x": (2, 12, 4), "y": (2, 12)}, "the dimension seq is 12, and its sizes are 8 to 512, multiples of 8"),
        ({"x": (2, 16, 5), "y": (2, 16)}, "size 2 of input 'x' is 5, and the model's is 4"),
        ({"x": (2, 16), "y": (2, 16)}, "input 'x' has 2 dimensions, and the model's has 3"),
        ({"x": (2, 16, 4), "y": (2, 16), "mask": (2, 33)}, r"size 1 of input 'mask' is 33, and 2 \* seq is 32 \(seq=16\)"),
    ],
)  # fmt: skip
def test_sizes_come_from_the_inputs(
    shapes: dict[str, tuple[int, ...]], problem: str | None
) -> None:
    """What does not fit names the dimension, or the input."""
    inputs: dict[str, tuple[Size, ...]] = {
        # the sizes of a mask follow from those of inputs after it
        "mask": ("batch", "2 * seq"),
        "x": ("batch", "seq", 4),
        "y": ("batch", "seq"),
    }
    shapes = {"mask": (shapes["y"][0], 2 * shapes["y"][1]), **shapes}
    if problem is None:
        assert derive_sizes([BATCH, SEQ], inputs, shapes) == {"batch": 2, "seq": 16}
        return
    with pytest.raises(WrongSize, match=problem):
        derive_sizes([BATCH, SEQ], inputs, shapes)


def test_decisions_are_made_for_a_size_that_the_dimension_can_have() -> None:
    """The largest size to tune at, or about the geometric mean."""
    assert choose_tuning_size(Dimension("seq", 1, 512, tune_at=(16, 128))) == 128
    for low in range(8, 64, 8):
        for high in range(low, 512, 8):
            size = choose_tuning_size(Dimension("h", low, high, multiple_of=8))
            assert Dimension("h", low, high, multiple_of=8).find_problem(size) == ""


def test_a_tensor_with_dynamic_shapes_survives_json() -> None:
    """A fixed one is written as it always was."""
    spec = TensorSpec("y", (8, 512), "float32", sizes=("batch", "2 * seq"))
    assert TensorSpec.from_json(spec.to_json()) == spec
    assert TensorSpec("x", (1, 2), "int8").to_json() == {
        "name": "x",
        "shape": [1, 2],
        "dtype": "int8",
    }
