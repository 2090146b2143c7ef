"""Sorts and selections compute what numpy and ONNX Runtime compute, in kernels that call no library."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx.helper import make_node as node
from tvm import relax

from tests.support.dynamic_networks import Input, make_network
from tests.support.kernels import FAST, LEVELS_HERE, host_level, kernels_of, level, outputs, run
from tests.support.onnx_models import agree, draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program.program import find_runtime
from tvmflow.core.types import Dimension
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]

SPECIAL = (0.0, -0.0, 1.0, -1.0, np.nan, -np.nan, np.inf, -np.inf, 1e-7, 3.5)
DTYPES = "float16 float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()


def expected_order(data: Array, axis: int, *, descending: bool) -> Array:
    """Return the stable order of numpy, in which NaN is the greatest; also for falling order."""
    if not descending:
        return np.argsort(data, axis, kind="stable")
    last = data.shape[axis] - 1
    return np.flip(last - np.argsort(np.flip(data, axis), axis, kind="stable"), axis)


def make_topk(data: Array, count: int, axis: int, *, descending: bool) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(data.shape, str(data.dtype)))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            chosen = relax.op.topk(x, count, axis, "both", descending, "int64")
            result = builder.emit_output(chosen)
        builder.emit_func_output(result)
    return builder.get()


def check(
    data: Array, count: int, axis: int, *, descending: bool, mcpu: str = LEVELS_HERE[-1]
) -> None:
    """Check values, bit by bit, and places against numpy."""
    mod = make_topk(data, count, axis, descending=descending)
    values, places = run(mod, level(mcpu), FAST, data)
    order = expected_order(data, axis, descending=descending)
    expected = np.take(order, np.arange(count), axis)
    np.testing.assert_array_equal(places, expected)
    assert values.tobytes() == np.take_along_axis(data, expected, axis).tobytes()


def draw_data(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Return data of a dtype, of its extremes or of many different numbers."""
    if np.dtype(dtype).kind == "f":
        chosen = random.choice(SPECIAL, shape) if random.integers(2) else random.normal(size=shape)
        return np.asarray(chosen).astype(dtype)
    limits = np.iinfo(dtype)
    if random.integers(2):
        extremes = [limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max]
        return random.choice(np.array(extremes, dtype), shape)
    count = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(count), dtype).reshape(shape)


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
@pytest.mark.parametrize("descending", [True, False])
def test_first_element_of_rows_of_which_there_are_any_number(
    descending: bool, dtype: str, mcpu: str
) -> None:
    """Values and places where the number of rows is dynamic, with NaN and zeros of both signs."""

    def body(emit: Any, x: Any, **_: Any) -> list[Any]:
        found = emit(relax.op.topk(x, 1, -1, "both", descending, "int64"))
        return [emit(relax.TupleGetItem(found, place)) for place in (0, 1)]

    inputs = {"x": Input(("N", 3, 31), dtype)}
    compiled = make_network([Dimension("N", 1, 300)], inputs, {}, body).compile(level(mcpu))
    random = np.random.default_rng(0)
    for rows in (1, 2, 5):
        data = draw_data(random, (rows, 3, 31), dtype)
        values, places = compiled(x=data)
        expected = expected_order(data, -1, descending=descending)[..., :1]
        np.testing.assert_array_equal(places, expected)
        assert values.tobytes() == np.take_along_axis(data, expected, -1).tobytes()


@pytest.mark.parametrize(
    ("shape", "dtype", "count", "axis", "descending"),
    [
        ((3, 1000), "float32", 5, -1, True),
        ((2, 37, 3), "float16", 37, 1, False),
        ((300,), "int64", 20, 0, True),
    ],
)
def test_first_elements_in_stable_order(
    shape: tuple[int, ...], dtype: str, count: int, axis: int, descending: bool
) -> None:
    """Rows are selected from or sorted, with any axis, and keys of 64 bits beside their places."""
    data = draw_data(np.random.default_rng(len(shape)), shape, dtype)
    check(data, count, axis, descending=descending)


@pytest.mark.parametrize("descending", [True, False])
def test_ties_zeros_and_nan(descending: bool) -> None:
    """Equal elements keep their order, -0.0 equals 0.0, and NaN of any sign is the greatest."""
    check(np.tile(np.array(SPECIAL, "float32"), 3)[None], 30, 1, descending=descending)


@pytest.mark.parametrize(
    ("length", "count", "dtype"),
    [
        *((n, 1, "float32") for n in (16, 63, 64, 80, 127)),
        *((n, 1, dtype) for n, dtype in ((17, "int32"), (40, "uint8"), (33, "int8"))),
        *((n, 2, "float32") for n in (20, 24, 63)),
        *((40, 3, dtype) for dtype in ("float32", "uint8", "int32", "float16")),
        (65, 4, "float32"),
        (65, 4, "int32"),
        (80, 8, "uint32"),
        *((129, 8, dtype) for dtype in ("float16", "uint8", "int64")),
        *((n, 5, "float32") for n in (40, 1000, 2049)),
        (80, 9, "float32"),
    ],
)
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_few_elements_of_short_rows(length: int, count: int, dtype: str, mcpu: str) -> None:
    """They are found one by one, also among equal ones and those that follow all others."""
    random, descending = np.random.default_rng(length), length % 2 == 0
    for shape, axis in (((5, length), 1), ((length, 3), 0)):
        data = draw_data(random, shape, dtype)
        check(data, count, axis, descending=descending, mcpu=mcpu)
    constant = np.full((2, length), np.nan if dtype.startswith("float") else 0, dtype)
    check(constant, count, 1, descending=not descending, mcpu=mcpu)


@pytest.mark.parametrize(
    ("length", "count", "sorts"),
    [(80, 1, False), (80, 8, False), (80, 9, True), (40, 1, False), (40, 3, False), (20, 8, True)],
)
def test_few_elements_are_found_without_sorting_the_row(
    length: int, count: int, sorts: bool
) -> None:
    """The kernel has no network of comparisons."""
    mod = make_topk(np.zeros((4, length), "float32"), count, 1, descending=True)
    lowered = lowering.lower(mod, make_target(host_level()), FAST).mod
    [kernel] = [function for var, function in lowered.functions_items() if var.name_hint == "sort"]
    assert (str(kernel).count("T.Select") > 50) == sorts


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if "64" not in name])
def test_few_elements_of_columns(dtype: str, mcpu: str) -> None:
    """They are kept in order in vectors, also among equal ones, and where columns fill no vectors."""
    random = np.random.default_rng(len(dtype))
    cases = [((2, 9, 4), 1, 3), ((40, 97), 0, 8), ((3, 1, 16), 1, 1), ((5, 2, 3, 7), 1, 2)]
    for number, (shape, axis, count) in enumerate([*cases, ((2, 30, 65), 1, 1)]):
        data = draw_data(random, shape, dtype)
        check(data, count, axis, descending=number % 2 == 0, mcpu=mcpu)
        constant = np.full(shape, np.nan if dtype.startswith("float") else 0, dtype)
        check(constant, count, axis, descending=number % 2 == 1, mcpu=mcpu)


def test_few_elements_of_columns_are_found_in_vectors() -> None:
    """No word of an element is in memory."""
    mod = make_topk(np.zeros((4, 80, 32), "float32"), 3, 1, descending=True)
    lowered = lowering.lower(mod, make_target(host_level()), FAST).mod
    [kernel] = [function for var, function in lowered.functions_items() if var.name_hint == "sort"]
    assert "vectorized" in str(kernel)
    assert "uint64" not in str(kernel)


@pytest.mark.parametrize("seed", seeds(0, 15, 120))
def test_random_sorts(seed: int) -> None:
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 4))
    shape = tuple(int(n) for n in random.choice([1, 2, 3, 16, 17, 100, 128, 700], rank))
    axis = int(random.integers(-rank, rank))
    n = shape[axis]
    count = int(random.choice([1, n, random.integers(1, n + 1), max(1, n // 8)]))
    data = draw_data(random, shape, str(random.choice(DTYPES)))
    check(data, count, axis, descending=bool(random.integers(2)))


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 140))
def test_rows_of_every_length(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 50, (2, length)).astype(np.float32)
    check(data, length, 1, descending=False)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 64, 65, 250])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal"])
def test_selections_of_rows_in_any_order(count: int, order: str) -> None:
    data = np.random.default_rng(count).normal(size=(1, 1003)).astype(np.float32)
    data = {
        "random": data,
        "rising": np.sort(data),
        "falling": -np.sort(-data),
        "equal": np.ones_like(data),
    }[order]
    check(data, count, 1, descending=True)


def test_top_k_in_any_order_is_sorted(tmp_path: Path) -> None:
    """TVM's importer rejects `sorted: 0`, which allows any order."""
    made = model(
        [node("TopK", ["x", "k"], ["v", "i"], sorted=0)],
        [value("x", [2, 9])],
        [value("v", [2, 3]), value("i", [2, 3], "int64")],
        {"k": np.array([3], np.int64)},
    )
    data = draw(2, 9)
    values, _ = outputs(load(made, tmp_path), {"x": data})
    np.testing.assert_array_equal(values, -np.sort(-data)[:, :3])


def test_top_k_agrees_with_onnx_runtime(tmp_path: Path) -> None:
    """TopK is one kernel, which neither the tuner nor a schedule rule touches, and the C library can hold it."""
    top = node("TopK", ["x", "k"], ["v", "i"], axis=1, largest=0)
    made = model(
        [top],
        [value("x", [2, 50, 3])],
        [value("v", [2, 7, 3]), value("i", [2, 7, 3], "int64")],
        {"k": np.array([7], np.int64)},
    )
    loaded = agree(made, tmp_path, {"x": draw(2, 50, 3).round(1)})
    assert kernels_of(loaded.mod, host_level()) == ["sort"]
    lowered = lowering.lower(loaded.mod, make_target(host_level()), FAST)
    assert find_runtime(lowered.mod, "auto") == ("c", "")
