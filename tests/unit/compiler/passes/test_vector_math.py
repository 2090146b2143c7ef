"""Vectorized functions: their errors, and their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from tests.support.kernels import LEVELS, host_level, level
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.passes.vector_math import exp_of_negative, vectorize_math
from tvmflow.compiler.schedules import rules

SMALLEST = np.float32(1.2e-38)
FUNCTIONS: dict[str, Any] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
    "sin": np.sin,
    "cos": np.cos,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
}
PERIODIC = ("sin", "cos")
INVERSE = ("asin", "acos", "atan")


def points(function: str) -> np.ndarray[Any, Any]:
    """Return values of the whole range where a function is not constant, its ends, and tiny numbers of both signs."""
    tiny = np.logspace(-44, 2, 4000)
    parts = [np.linspace(-110, 95, 60_000), np.linspace(-6, 6, 60_000), tiny, -tiny]
    if function in PERIODIC:
        roots = np.arange(-50_000, 50_000, dtype=np.float64) * (np.pi / 2)
        parts += [roots, np.linspace(-(2.0**31) + 256, 2.0**31 - 256, 60_000)]
    ends = [
        0.0,
        -0.0,
        88.72,
        88.722832,
        88.72284,
        88.73,
        -87.34,
        -87.33654,
        -103.0,
        -103.97,
        -104.1,
        1e30,
        -1e30,
    ]
    values = np.concatenate([*parts, ends]).astype(np.float32)
    if function in PERIODIC:
        values = values[np.abs(values) < 2.0**31]
    return np.concatenate([values, np.zeros(-len(values) % 16, np.float32)])


SLOW = ("has_few_units", "divides_slowly")


def kernel(function: str, size: int) -> tvm.IRModule:
    x = te.placeholder((size,), name="x")
    call = exp_of_negative if function == "exp_of_negative" else getattr(tirx, function)
    y = te.compute((size,), lambda i: call(x[i]))
    return tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})


def compute(
    function: str,
    values: np.ndarray[Any, Any],
    target: dict[str, Any],
    *,
    has_few_units: bool = False,
    divides_slowly: bool = False,
) -> Any:
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    mod = vectorize_math(
        kernel(function, len(values)), has_few_units=has_few_units, divides_slowly=divides_slowly
    )
    choice = rules.choose_schedule(mod, cpu)
    assert choice is not None
    library = tvm.compile(choice.schedule.mod, tvm.target.Target(target))
    out = tvm.runtime.tensor(np.zeros_like(values))
    library["main"](tvm.runtime.tensor(values), out)
    return out.numpy()


@pytest.mark.parametrize(
    ("function", "mcpu", "slow"),
    [
        *((function, mcpu, ()) for function in FUNCTIONS for mcpu in LEVELS),
        *((function, LEVELS[-1], SLOW) for function in ("erf", "sigmoid", "tanh")),
    ],
)
def test_every_value_is_within_a_few_units_in_the_last_place(
    function: str, mcpu: str, slow: tuple[str, ...]
) -> None:
    """At most eight units, three for inverse functions, two for exp, log, sin and cos; denormals count as the smallest normal number.

    It holds for quotients as a Cortex-A72 computes them, too.
    """
    values = points(function)
    actual = compute(function, values, level(mcpu), **dict.fromkeys(slow, True))
    actual = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[function](values.astype(np.float64))
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    unit = np.spacing(np.maximum(np.abs(rounded), SMALLEST)).astype(np.float64)
    # 1 / (1 + inf) is 0, as with a C library.
    most = 2 if function in ("exp", "log", *PERIODIC) else 3 if function in INVERSE else 8
    allowed = np.where(np.abs(exact) < SMALLEST, float(SMALLEST), most * unit)
    assert (np.abs(actual[finite] - exact[finite]) <= allowed[finite]).all()
    np.testing.assert_array_equal(actual[~finite], rounded[~finite])


@pytest.mark.parametrize("mcpu", LEVELS)
def test_exponentials_of_negative_numbers_are_within_two_units_in_the_last_place(mcpu: str) -> None:
    """They are 1 at 0, 0 where `exp` gives denormals, and NaN of NaN."""
    values = points("exp")
    values = -np.abs(np.concatenate([values, [np.inf, np.nan] * 8]).astype(np.float32))
    actual = compute("exp_of_negative", values, level(mcpu)).astype(np.float64)
    exact = np.exp(values.astype(np.float64))
    unit = np.spacing(np.maximum(exact, SMALLEST).astype(np.float32)).astype(np.float64)
    allowed = np.where(exact < SMALLEST, float(SMALLEST), 1.5 * unit)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(values))
    is_number = ~np.isnan(values)
    assert (np.abs(actual[is_number] - exact[is_number]) <= allowed[is_number]).all()
    assert (actual[values == 0] == 1).all()
    assert (actual[values < -88] == 0).all()


@pytest.mark.parametrize("slow", [(), ("has_few_units",), SLOW])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_infinities_and_nan_have_their_limits(function: str, slow: tuple[str, ...]) -> None:
    """NaN stays NaN."""
    values = np.array([np.inf, -np.inf, np.nan, -np.nan] * 4, np.float32)
    actual = compute(function, values, host_level(), **dict.fromkeys(slow, True))[:4]
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[function](values[:4].astype(np.float64))
    np.testing.assert_allclose(actual, exact, rtol=1e-6)


@pytest.mark.parametrize("function", ["sin", "asin", "atan"])
def test_odd_functions_of_zero_have_its_sign(function: str) -> None:
    actual = compute(function, np.array([0.0, -0.0] * 8, np.float32), host_level())
    np.testing.assert_array_equal(np.signbit(actual), [False, True] * 8)


def test_arcs_end_at_one() -> None:
    """A sine is at most 1: beyond, nothing has it. The ends are exact, and so are their neighbours."""
    below, above = (np.nextafter(np.float32(1), np.float32(end)) for end in (0, 2))
    values = np.array([1, -1, below, -below, above, -above, 0.5, -0.5] * 2, np.float32)
    for function, exact in (("asin", np.arcsin), ("acos", np.arccos)):
        with np.errstate(invalid="ignore"):
            expected = exact(values.astype(np.float64)).astype(np.float32)
        actual = compute(function, values, host_level())
        np.testing.assert_allclose(actual, expected, rtol=3e-7)
        np.testing.assert_array_equal(actual[:2], expected[:2])


@pytest.mark.parametrize("function", PERIODIC)
def test_sines_of_huge_numbers_are_sines(function: str) -> None:
    """Their neighbours are periods apart."""
    values = np.array([*np.logspace(9.4, 38, 126), 2.0**31, -(2.0**31)], np.float32)
    assert (np.abs(compute(function, values, host_level())) <= 1).all()


@pytest.mark.parametrize("exponent", [1, 2, 3, 7, 8, -1, -2, -3, 0.5, -0.5, 0.75, -0.75, 2.5, 9, 0])
def test_constant_powers(exponent: float) -> None:
    """Small integers, halves and ¾ become products and roots; other powers stay calls."""
    x = te.placeholder((64,), name="x")
    y = te.compute(
        (64,),
        lambda i: tirx.call_intrin(
            "float32", "tirx.pow", x[i], tirx.const(float(exponent), "float32")
        ),
    )
    mod = tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})
    expanded = vectorize_math(mod)
    assert ("T.pow" in expanded.script()) is (exponent in (2.5, 9, 0))
    values = np.concatenate([np.linspace(-9, 9, 60), [0.0, np.inf, np.nan, 1e-30]]).astype(
        np.float32
    )
    values = np.abs(values) if exponent % 1 else values
    out = tvm.runtime.tensor(np.zeros_like(values))
    library = tvm.compile(expanded, tvm.target.Target(host_level()))
    library["main"](tvm.runtime.tensor(values), out)
    with np.errstate(all="ignore"):
        expected = (values.astype(np.float64) ** exponent).astype(np.float32)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)


def test_other_dtypes_and_functions_are_not_replaced() -> None:
    """Only functions of float32 with known errors are replaced."""
    x = te.placeholder((16,), "float64", name="x")
    mod = tvm.IRModule(
        {"main": te.create_prim_func([x, te.compute((16,), lambda i: tirx.exp(x[i]))])}
    )
    tvm.ir.assert_structural_equal(vectorize_math(mod), mod)
    mod = kernel("tan", 16)
    tvm.ir.assert_structural_equal(vectorize_math(mod), mod)


def test_functions_divide_by_multiplications_where_divisions_are_slow() -> None:
    """Of 64-bit ARM, a Cortex-A72; other CPUs divide."""
    for mcpu, is_slow in (("cortex-a72", True), ("cortex-a55", False), ("neoverse-n1", False)):
        target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu}
        cpu = CpuModel.from_target(target)
        assert cpu is not None and cpu.divides_slowly == is_slow
        mod = vectorize_math(kernel("tanh", 16), divides_slowly=cpu.divides_slowly)
        divisions: list[Any] = []
        tvm_ffi.structural_walk(mod["main"].body, (tirx.Div, divisions.append))
        assert bool(divisions) != is_slow


def test_quotients_of_constants_are_products_where_divisions_are_slow() -> None:
    """Unless they are rounded: 41 · (1 / 41) is less than 1 in float32."""
    values = np.arange(1, 65, dtype=np.float32)
    x = te.placeholder((len(values),), name="x")

    def compute(function: Any) -> Any:
        y = te.compute(x.shape, lambda i: function(x[i] / tirx.const(41.0, "float32")))
        kernel = te.create_prim_func([x, y]).with_attr("global_symbol", "main")
        mod = vectorize_math(tvm.IRModule({"main": kernel}), has_few_units=True)
        out = tvm.runtime.tensor(np.zeros_like(values))
        tvm.compile(mod, "llvm")["main"](tvm.runtime.tensor(values), out)
        return out.numpy()

    np.testing.assert_array_equal(compute(lambda q: q), values * np.float32(1 / 41))
    np.testing.assert_array_equal(compute(tirx.floor), np.floor(values / 41))
