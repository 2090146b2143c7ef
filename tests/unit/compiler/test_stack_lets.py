"""Lets in the values of stores: they become buffers, in the order in which their values depend on each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from tests.support.kernels import check_alike, host_level
from tests.support.tuning import model
from tvmflow.compiler.code_generation import build_kernels, keep_lets_on_stack
from tvmflow.compiler.passes.vector_math import vectorize_math
from tvmflow.graph.ir import find_nodes

SIZE = 24


def let(value: Any, body: Any) -> Any:
    var = tirx.Var("v", "float32")
    return tirx.Let(var, value, body(var))


def make_kernel(function: Any) -> tvm.IRModule:
    """A kernel that applies a function of the index and the number at it."""
    x = te.placeholder((SIZE,), name="x")
    y = te.compute((SIZE,), lambda i: function(x, i))
    kernel = te.create_prim_func([x, y]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": kernel})


def compute(mod: tvm.IRModule, x: np.ndarray[Any, Any]) -> Any:
    library = build_kernels(mod, tvm.target.Target({"kind": "llvm"}))
    y = tvm.runtime.tensor(np.zeros(SIZE, "float32"))
    library["main"](tvm.runtime.tensor(x), y)
    return y.numpy()


# the function in TIR, and with numpy
NESTED = {
    "in a value": (
        lambda v: let(let(v + 1.0, lambda a: a * a), lambda b: b + b * v),
        lambda x: (x + 1) ** 2 * (1 + x),
    ),
    "in a body": (
        lambda v: let(v + 1.0, lambda a: let(a * a, lambda b: b + a * v)),
        lambda x: (x + 1) ** 2 + (x + 1) * x,
    ),
    "in both operands": (
        lambda v: let(v, lambda a: a * a) + let(v * 2.0, lambda b: b * b + 1.0),
        lambda x: x * x + 4 * x * x + 1,
    ),
    "in a select": (
        lambda v: let(v * v, lambda a: tirx.Select(a > 1.0, let(a + 1.0, lambda b: b * b), a)),
        lambda x: np.where(x * x > 1, (x * x + 1) ** 2, x * x),
    ),
}


@pytest.mark.parametrize(("function", "expected"), NESTED.values(), ids=NESTED)
def test_nested_lets_give_their_numbers(function: Any, expected: Any) -> None:
    """Each value is stored after those that it reads."""
    mod = make_kernel(lambda x, i: function(x[i]))
    assert not find_nodes(keep_lets_on_stack()(mod)["main"].body, tirx.Let)
    x = np.random.default_rng(0).normal(size=SIZE).astype("float32")
    assert np.allclose(compute(mod, x), expected(x), rtol=1e-6)


def test_values_under_a_condition_stay_there() -> None:
    """They may read beyond a tensor where it is false; what they read from outside is stored."""

    def function(x: Any, i: Any) -> Any:
        return let(
            x[i] * 2.0,
            lambda a: tirx.if_then_else(
                i < SIZE - 8,
                let(x[i + 8] + a, lambda b: b * b),
                let(x[i - 16] + a, lambda c: c * c),
            ),
        )

    mod = make_kernel(function)
    kept = find_nodes(keep_lets_on_stack()(mod)["main"].body, tirx.Let)
    assert len(kept) == 2
    x = np.random.default_rng(0).normal(size=SIZE).astype("float32")
    read = np.where(np.arange(SIZE) < SIZE - 8, np.roll(x, -8), np.roll(x, 16))
    assert np.allclose(compute(mod, x), (read + 2 * x) ** 2, rtol=1e-6)


def test_statements_grow_with_the_lets_alone() -> None:
    """Each number is computed once, however often it is read: 40 doublings in place would be 10¹² additions."""

    def double(v: Any, times: int) -> Any:
        return let(v + v, lambda a: double(a, times - 1)) if times else v

    mod = keep_lets_on_stack()(make_kernel(lambda x, i: double(x[i], 40)))
    assert len(find_nodes(mod["main"].body, tirx.BufferStore)) == 41
    x = np.arange(SIZE, dtype="float32")
    assert np.array_equal(compute(mod, x), x * 2.0**40)


@pytest.mark.parametrize("is_product", [False, True])
def test_chains_of_functions_are_compiled(is_product: bool) -> None:
    """Mish of Mish of Mish, and logarithms of logarithms: in place, these would take hours."""

    def mish(x: Any) -> Any:
        return x * relax.op.tanh(relax.op.log(relax.const(1.0) + relax.op.exp(x)))

    def chain(x: Any, weight: Any) -> Any:
        x = relax.op.matmul(x, weight((32, 48))) if is_product else x
        x = mish(mish(mish(x)))
        for _ in range(5):
            x = relax.op.log(relax.const(2.0) + relax.op.exp(relax.op.tanh(x)))
        return x

    check_alike(model(chain, shape=(20, 32)), host_level())


def test_functions_are_stored_before_they_are_read() -> None:
    """Also those of `vectorize_math`, whose lets are under selections."""
    mod = vectorize_math(make_kernel(lambda x, i: tirx.log(tirx.exp(x[i]) + 1.0)))
    assert not find_nodes(keep_lets_on_stack()(mod)["main"].body, tirx.Let)
    x = np.linspace(-20, 20, SIZE).astype("float32")
    assert np.allclose(compute(mod, x), np.log(np.exp(x) + np.float32(1)), rtol=1e-6)
