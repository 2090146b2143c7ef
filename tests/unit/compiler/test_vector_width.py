"""The vector width follows the channels of a model, and gives the same results as any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support import tuning
from tests.support.kernels import FAST, host_level, run
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.lowering import choose_vector_width
from tvmflow.compiler.options import VectorWidth
from tvmflow.targets.tvm_target import make_target

AVX512 = CpuModel(16, 32, 1 << 20, 4, has_broadcast_loads=True)
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
NEON = CpuModel(4, 32, 1 << 19, 4)


def convolutions(*channels: int) -> Any:
    layers = [layer for count in channels for layer in (tuning.conv(count), tuning.relu)]
    return tuning.model(*layers, shape=(1, channels[0], 12, 12))


@pytest.mark.parametrize(
    ("channels", "lanes"),
    [((8, 8), 8), ((4, 4), 4), ((24, 24), 16), ((16, 16), 16), ((64, 8, 64), 16)],
)
def test_few_channels_have_narrow_vectors(channels: tuple[int, ...], lanes: int) -> None:
    """The width with which padding wastes least; where the gain is small, the widest."""
    assert choose_vector_width(convolutions(*channels), AVX512, None).lanes == lanes


def test_the_estimate_counts_products_of_whole_vectors() -> None:
    """8 channels to 8 in 144 points and 9 taps: each of 8 or 16 inputs meets one vector, or two; the first reads plain data."""
    width = choose_vector_width(convolutions(8, 8), AVX512, None)
    products = {16: 9 * 144 * (8 + 16), 8: 9 * 144 * 16, 4: 9 * 144 * 32}
    assert width == VectorWidth.of_lanes(8, products)
    assert (width.bits, width.lanes) == (256, 8)


def test_matrix_products_count_as_well() -> None:
    """Narrow vectors would halve a product of many columns; with few columns both widths take as many operations."""
    columns = tuning.model(tuning.dense(512), tuning.relu, tuning.dense(8), shape=(64, 256))
    products = {16: 64 * (256 * 32 + 512), 8: 64 * (256 * 64 + 512), 4: 64 * (256 * 128 + 1024)}
    assert choose_vector_width(columns, AVX512, None) == VectorWidth.of_lanes(16, products)


def test_a_product_of_two_vectors_has_no_columns() -> None:
    """It counts as one."""
    data = relax.Var("x", relax.TensorType((40,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data], {"num_input": 1}):
        builder.emit_func_output(builder.emit(relax.op.matmul(data, data)))
    assert choose_vector_width(builder.get(), AVX512, None) == VectorWidth.of_lanes(
        16, {16: 40, 8: 40, 4: 40}
    )


@pytest.mark.parametrize(
    ("cpu", "cost"),
    [("x86-64-v3", 1.0), ("x86-64-v4", 1.25), ("znver4", 1.7), ("znver5", 1.0)],
)
def test_a_cpu_that_slows_down_with_wide_vectors_prefers_narrow_ones(cpu: str, cost: float) -> None:
    """By what LLVM knows of it: 24 channels fill vectors of 16 less well than those of 8."""
    model = CpuModel.from_target({**X86, "mcpu": cpu})
    assert model is not None and model.full_vector_cost == cost
    lanes = choose_vector_width(convolutions(24, 24), model, None).lanes
    assert lanes == (16 if cpu == "znver5" else 8)


def test_a_recipe_may_set_the_width() -> None:
    """At most the target's: a library for NEON has no wider vectors."""
    mod = convolutions(8, 8)
    assert choose_vector_width(mod, AVX512, 512) == VectorWidth.of_lanes(16, {})
    assert choose_vector_width(mod, NEON, 512) == VectorWidth.of_lanes(4, {})
    lowered = lowering.lower(mod, make_target(X86), replace(FAST, vector_bits=128))
    assert lowered.width == VectorWidth.of_lanes(4, {})


def test_a_model_of_few_channels_is_as_exact_with_any_width() -> None:
    """Padding of windows and channels included."""
    mod = tuning.model(tuning.conv(8, 3, 2), tuning.relu, tuning.conv(24), tuning.relu, tuning.conv(6, 1), shape=(1, 3, 17, 13))  # fmt: skip
    data = np.random.default_rng(0).normal(size=(1, 3, 17, 13)).astype(np.float32)
    [expected] = run(mod, host_level(), replace(FAST, layout="plain"), data)
    for bits in (None, 128, 256, 512):
        [actual] = run(mod, host_level(), replace(FAST, vector_bits=bits), data)
        np.testing.assert_allclose(actual, expected, atol=1e-4)
