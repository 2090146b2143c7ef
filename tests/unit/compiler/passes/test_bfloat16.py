"""`precision: bfloat16`: products of rounded numbers, accumulated in float32 by an instruction of the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper, numpy_helper
from tvm import relax, te

from tests.support import onnx_models
from tests.support.kernels import FAST, kernels_of, level
from tests.support.seeds import seeds
from tests.unit.compiler.passes import test_integer_products
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.schedules import rules
from tvmflow.graph import bfloat16
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]

NARROW = replace(FAST, precision="bfloat16")
FLAG = "avx512_bf16"
CPU = {"mattr": ["+avx512bf16"]}
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1", "num-cores": 4}
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 4}


LANES = 16


def bfloat16_target() -> dict[str, Any]:
    """Return a target with the instruction; skip the test on a machine that lacks it."""
    if FLAG not in read_host().flags:
        pytest.skip(f"this machine lacks {FLAG}")
    return {**level("x86-64-v4"), **CPU}


def rounded(values: Array) -> Array:
    """Return float32 values rounded to 8 bits."""
    bits = values.astype("float32").view("uint32").astype("uint64")
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return nearest.astype("uint32").view("float32")


def expected(made: onnx.ModelProto, data: Array, *, is_narrow: bool) -> Array:
    """Return what ONNX Runtime computes in float32 with data and weights `w` that are rounded."""
    copy = onnx.ModelProto()
    copy.CopyFrom(made)
    for tensor in copy.graph.initializer:
        if tensor.name == "w" and is_narrow:
            weights = rounded(numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(weights, "w"))
    session = onnxruntime.InferenceSession(copy.SerializeToString())
    (result,) = session.run(None, {"x": rounded(data) if is_narrow else data})
    return np.asarray(result)


def compute(made: onnx.ModelProto, folder: Path, data: Array, **options: Any) -> Array:
    """Return what the library computes."""
    loaded = onnx_models.load(made, folder, {"x": data})
    library = (
        lowering.lower(loaded.mod, make_target(bfloat16_target()), replace(NARROW, **options))
        .schedule_untuned(loaded.params, bfloat16_target(), 1)
        .compile()
    )
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    return np.asarray(result.numpy())


def check(
    made: onnx.ModelProto, folder: Path, *, is_narrow: bool | None = True, **options: Any
) -> None:
    """Check that a model of one product differs from ONNX Runtime, with rounded operands, as float32 does.

    `is_narrow` tells whether the operands are rounded; None if the lowering may choose.
    """
    shape = [axis.dim_value for axis in made.graph.input[0].type.tensor_type.shape.dim]
    data = onnx_models.draw(*shape, seed=9)
    target = bfloat16_target()
    names = kernels_of(
        onnx_models.load(made, folder, {"x": data}).mod, target, replace(NARROW, **options)
    )
    has_bfloat16 = any("bfloat16" in name for name in names)
    assert is_narrow in (None, has_bfloat16), names
    result, reference = (
        compute(made, folder, data, **options),
        expected(made, data, is_narrow=has_bfloat16),
    )
    np.testing.assert_allclose(result, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("seed", seeds(5, 35, 120))
def test_convolutions_of_random_shapes(seed: int, tmp_path: Path) -> None:
    """Odd channels, strides, dilations, asymmetric padding, groups and images; depthwise ones stay float32."""
    random = np.random.default_rng(seed)
    made = test_integer_products.convolution(random)
    check(made, tmp_path, is_narrow=None, vector_bits=[None, 512, 256, 128][seed % 4])


@pytest.mark.parametrize("seed", seeds(4, 19, 60))
def test_matrix_products_of_random_shapes(seed: int, tmp_path: Path) -> None:
    """Those with fewer columns than a vector stay float32, and those whose sums have an odd number of terms."""
    made = test_integer_products.product(np.random.default_rng(seed))
    depth, columns = made.graph.initializer[0].dims
    check(made, tmp_path, is_narrow=columns >= LANES and depth % 2 == 0)


def conv(
    op: str, size: list[int], inputs: int, weights: list[int], **attributes: Any
) -> onnx.ModelProto:
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    data, result = onnx_models.value("x", (1, inputs, *size)), onnx_models.value("y", None)
    return onnx_models.model([node], [data], [result], {"w": onnx_models.draw(*weights)})


@pytest.mark.parametrize(
    "made",
    [
        conv("Conv", [23], 20, [9, 20, 3], pads=[1, 1]),
        conv("Conv", [5, 6, 7], 17, [19, 17, 3, 3, 3], pads=[1] * 6),
        conv("Conv", [20, 20], 32, [24, 32, 3, 3], pads=[12] * 4, dilations=[12, 12]),
        conv("Conv", [30, 30], 3, [16, 3, 7, 7], pads=[3] * 4, strides=[2, 2]),
        conv("ConvTranspose", [7, 5], 18, [18, 7, 4, 4], pads=[1] * 4, strides=[2, 2]),
        conv("ConvTranspose", [6, 6], 3, [3, 5, 3, 3], strides=[2, 2]),
        conv("ConvTranspose", [4, 4, 4], 16, [16, 8, 2, 2, 2], strides=[2, 2, 2], group=2),
    ],
    ids=["sequence", "volume", "dilated", "few", "transposed", "transposed_few", "transposed_volume"],
)  # fmt: skip
def test_other_convolutions(made: onnx.ModelProto, tmp_path: Path) -> None:
    check(made, tmp_path)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (conv("Conv", [9, 9], 16, [16, 1, 3, 3], group=16), {}),
        (conv("MatMul", [33], 5, [33, 16]), {}),
        (conv("Conv", [9, 9], 16, [16, 16, 3, 3]), {"layout": "plain"}),
        (conv("Conv", [9, 9], 16, [16, 16, 3, 3]), {"plain": ("conv2d",)}),
    ],
    ids=["depthwise", "odd_depth", "plain_layout", "plain_operator"],
)
def test_what_stays_float32(made: onnx.ModelProto, options: dict[str, Any], tmp_path: Path) -> None:
    """Operators without pairs of channels to add up, and those that the recipe keeps as the model has them."""
    check(made, tmp_path, is_narrow=False, **options)


def test_only_tiles_of_4_are_worth_a_winograd_convolution(tmp_path: Path) -> None:
    """The instruction computes two products of the direct one; tiles of 2×2 save less than half of them."""
    made = conv("Conv", [56, 56], 64, [64, 64, 3, 3], pads=[1] * 4)
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 64, 56, 56)})
    kinds = {}
    for tile in (2, 4):
        names = kernels_of(loaded.mod, X86, replace(NARROW, winograd=tile))
        kinds[tile] = {name for name in names if "winograd" in name or "bfloat16_conv" in name}
    assert kinds == {2: {"bfloat16_conv2d_NCHWc"}, 4: {"winograd_conv2d_NCHWc"}}


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        (X86, r"vdpbf16ps\t%zmm"),
        ({**X86, "mcpu": "x86-64-v4", "mattr": ["+avx512bf16"]}, "vdpbf16ps"),
        (ARM, "bfdot"),
    ],
    ids=["sapphirerapids", "feature", "neoverse-v1"],
)
def test_the_instruction_is_in_the_code(
    target: dict[str, Any], instruction: str, tmp_path: Path
) -> None:
    """For any machine: LLVM makes the code without running it.."""
    made = conv("Conv", [8, 8], 32, [32, 32, 3, 3], pads=[1] * 4)
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 32, 8, 8)})
    library = (
        lowering.lower(loaded.mod, make_target(target), NARROW)
        .schedule_untuned(loaded.params, target, 1)
        .compile()
    )
    code = library.mod.imports[0].inspect_source("asm")
    assert re.search(instruction, code)
    assert "tvmflow_dot" not in code


def test_a_recorded_schedule_gives_the_same_kernel(tmp_path: Path) -> None:
    """With the instruction, and LLVM's definition of it."""
    made = conv("Conv", [7, 7], 32, [32, 32, 3, 3], pads=[1] * 4)
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 32, 7, 7)})
    lowered = lowering.lower(loaded.mod, make_target(X86), NARROW).mod
    (kernel,) = (f for var, f in lowered.functions_items() if "bfloat16_conv" in var.name_hint)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    cpu = CpuModel.from_target(X86)
    assert cpu is not None
    choice = rules.choose_schedule(mod, cpu)
    assert choice is not None
    replayed = tvm.s_tir.Schedule(mod)
    trace = choice.schedule.trace.as_json()
    tvm.s_tir.schedule.Trace.apply_json_to_schedule(trace, replayed)
    tvm.ir.assert_structural_equal(replayed.mod, choice.schedule.mod)


def test_a_cpu_without_the_instruction_computes_in_float32(tmp_path: Path) -> None:
    """Plans refuse such targets; the lowering has no kernels for them."""
    made = conv("Conv", [8, 8], 32, [32, 32, 3, 3])
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 32, 8, 8)})
    target = {**X86, "mcpu": "skylake-avx512"}
    assert kernels_of(loaded.mod, target, NARROW) == kernels_of(loaded.mod, target, FAST)


def test_weights_are_half_as_large(tmp_path: Path) -> None:
    made = conv("MatMul", [64], 5, [64, 256])
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 5, 64)})
    lowered = lowering.lower(loaded.mod, make_target(X86), NARROW)
    (weights,) = lowered.compute_weights(loaded.params)
    assert (weights.dtype, weights.nbytes) == (np.uint16, 2 * 64 * 256)


HARD = np.array(
    [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1.00390625, 1.01171875, -2.5],
    dtype="float32",
)


def test_rounding_to_nearest_even() -> None:
    """Infinities, NaN with any payload, overflow to infinity, subnormal numbers, and halves."""
    payloads = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], "uint32").view("float32")
    random = np.random.default_rng(0).integers(0, 2**32, 5000, "uint32").view("float32")
    values = np.concatenate([HARD, payloads, random])
    data = te.placeholder(values.shape, "float32")
    wide = te.compute(values.shape, lambda i: bfloat16.to_float32(bfloat16.from_float32(data[i])))
    kernel = tvm.tirx.build(te.create_prim_func([data, wide]), target="llvm")
    result = tvm.runtime.tensor(np.zeros_like(values))
    kernel(tvm.runtime.tensor(values), result)
    with np.errstate(invalid="ignore"):
        nearest = np.where(np.isnan(values), np.nan, rounded(values))
    np.testing.assert_array_equal(result.numpy(), nearest.astype("float32"))


def test_weights_are_rounded_as_data_are(tmp_path: Path) -> None:
    """With the operators that numpy evaluates: infinities and NaN stay what they are."""
    weights = np.resize(HARD, (32, 16)).astype("float32")
    made = conv("MatMul", [32], 5, [32, 16])
    loaded = onnx_models.load(made, tmp_path, {"x": onnx_models.draw(1, 5, 32)})
    lowered = lowering.lower(loaded.mod, make_target(X86), NARROW)
    (packed,) = lowered.compute_weights(dict.fromkeys(loaded.params, weights))
    plain = packed.reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16)
    result = (plain.astype("uint32") << 16).view("float32")
    nearest = np.where(np.isnan(weights), np.nan, rounded(weights)).astype("float32")
    np.testing.assert_array_equal(result, nearest)
