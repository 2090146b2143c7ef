"""Quantized models on CPUs with dot products of bytes: integers are multiplied, and agree with ONNX Runtime."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper
from tvm import relax

from tests.support import onnx_models
from tests.support.kernels import (
    DOT_TARGETS,
    FAST,
    dot_target,
    kernels_of,
    level,
    outputs,
    without_optimization,
)
from tests.support.seeds import seeds
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.schedules import dot_products
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.ir import DataFlow
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]


def run(loaded: LoadedModel, target: dict[str, Any], data: Array) -> Array:
    library = (
        lowering.lower(loaded.mod, make_target(target), FAST)
        .schedule_untuned(loaded.params, target, 1)
        .compile()
    )
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    return np.asarray(result.numpy())


def expected(made: onnx.ModelProto, data: Array) -> Array:
    """Return the output that the nodes define."""
    (result,) = expected_outputs(made, {made.graph.input[0].name: data})
    return result


def expected_outputs(made: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    """Return what the nodes define: ONNX Runtime without integer kernels."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    return list(session.run(None, feed))


def check(made: onnx.ModelProto, folder: Path, target: dict[str, Any]) -> list[str]:
    """Check that at most one value of 500 is off, by one step; return the names of the kernels."""
    shape = [axis.dim_value for axis in made.graph.input[0].type.tensor_type.shape.dim]
    data = onnx_models.draw(*shape, seed=9)
    loaded = onnx_models.load(made, folder, {"x": data})
    result, reference = run(loaded, target, data), expected(made, data)
    values = np.unique(reference)
    step = float(np.diff(values).min()) if values.size > 1 else 1.0
    steps = np.abs(result - reference) / step
    assert steps.max() < 1.01
    assert np.count_nonzero(steps > 0.01) <= max(1, reference.size // 500)
    return kernels_of(loaded.mod, target)


def convolution(random: np.random.Generator) -> onnx.ModelProto:
    """Return a convolution of random shape with an activation or none."""
    groups = int(random.choice([1, 1, 2, 5, 16]))
    inputs = groups * int(random.choice([1, 3, 7, 16, 20]))
    outputs = groups * int(random.choice([1, 2, 9, 16]))
    kernel = [int(n) for n in random.integers(1, 4, 2)]
    weights = {
        "w": onnx_models.draw(outputs, inputs // groups, *kernel, seed=1),
        "b": onnx_models.draw(outputs, seed=2),
    }
    activation = str(random.choice(["", "Relu", "HardSwish", "Sigmoid"]))
    node = helper.make_node(
        "Conv",
        ["x", "w", "b"] if random.integers(2) else ["x", "w"],
        ["y" if not activation else "c"],
        strides=[int(n) for n in random.integers(1, 3, 2)],
        dilations=[int(n) for n in random.integers(1, 3, 2)],
        pads=[int(n) for n in random.integers(0, 3, 4)],
        group=groups,
    )
    nodes = [node, *([helper.make_node(activation, ["c"], ["y"])] if activation else [])]
    size = [int(n) for n in random.choice([5, 7, 10, 13, 17, 29, 37], 2)]
    data = onnx_models.value("x", (int(random.integers(1, 3)), inputs, *size))
    return onnx_models.model(nodes, [data], [onnx_models.value("y", None)], weights)


def transposed_convolution(random: np.random.Generator) -> onnx.ModelProto:
    """Return a transposed convolution of random shape over one, two or three axes."""
    rank, groups = int(random.integers(1, 4)), int(random.choice([1, 1, 1, 3]))
    inputs = groups * int(random.choice([1, 3, 7, 16, 20]))
    outputs = groups * int(random.choice([1, 2, 9, 16]))
    kernel = [int(n) for n in random.integers(1, 5, rank)]
    strides = [int(n) for n in random.integers(1, 4, rank)]
    weights = {"w": onnx_models.draw(inputs, outputs // groups, *kernel, seed=1)}
    # the quantizer fails for a bias of groups
    if groups == 1 and random.integers(2):
        weights["b"] = onnx_models.draw(outputs, seed=2)
    node = helper.make_node(
        "ConvTranspose",
        ["x", *weights],
        ["y"],
        strides=strides,
        dilations=[int(random.integers(1, 3))] * rank if random.integers(4) == 0 else [1] * rank,
        pads=[
            min(int(n), size - 1)
            for n, size in zip(random.integers(0, 3, 2 * rank), kernel * 2, strict=True)
        ],
        output_padding=[int(random.integers(0, stride)) for stride in strides],
        group=groups,
    )
    size = [int(n) for n in random.choice([4, 5, 7, 11], rank)]
    data = onnx_models.value("x", (int(random.integers(1, 3)), inputs, *size))
    return onnx_models.model([node], [data], [onnx_models.value("y", None)], weights)


def product(random: np.random.Generator) -> onnx.ModelProto:
    """Return a matrix product of random shape with a sum."""
    rows = [int(n) for n in random.choice([1, 2, 7, 11, 17, 37], int(random.integers(1, 3)))]
    depth, columns = (
        int(random.choice([3, 4, 12, 33, 40, 64])),
        int(random.choice([1, 7, 16, 24, 100])),
    )
    weights = {"w": onnx_models.draw(depth, columns), "b": onnx_models.draw(columns)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["y"]),
    ]
    data = onnx_models.value("x", (*rows, depth))
    return onnx_models.model(nodes, [data], [onnx_models.value("y", None)], weights)


def residual(random: np.random.Generator) -> onnx.ModelProto:
    """Return convolutions whose results are added to each other and to what they read, in any order."""
    channels = int(random.choice([12, 16, 24]))
    nodes, weights, values = [], {}, ["x"]
    for index in range(int(random.integers(4, 9))):
        name, source = f"v{index}", str(random.choice(values[-3:]))
        kind = str(random.choice(["Conv", "Conv", "Add", "Add", "Relu", "MaxPool", "Norm"]))
        if kind == "Conv":
            weights[f"w{index}"] = onnx_models.draw(channels, channels, 1, 1, seed=index) / 4
            nodes.append(helper.make_node("Conv", [source, f"w{index}"], [name]))
        elif kind == "Add":
            operands = [str(random.choice(values)), source]
            nodes.append(helper.make_node("Add", operands, [name]))
        elif kind == "MaxPool":
            window = {"kernel_shape": [3, 3], "pads": [1] * 4}
            nodes.append(helper.make_node("MaxPool", [source], [name], **window))
        elif kind == "Norm":
            weights[f"w{index}"] = onnx_models.draw(1, channels, 1, 1, seed=index)
            nodes.append(helper.make_node("Mul", [source, f"w{index}"], [name]))
        else:
            nodes.append(helper.make_node("Relu", [source], [name]))
        values.append(name)
    read = {name for node in nodes for name in node.input}
    ends = [name for name in values if name not in read] + [v for v in values[1:3] if v in read]
    results = [onnx_models.value(name, None) for name in ends]
    size = [int(n) for n in random.choice([5, 7, 12], 2)]
    data = onnx_models.value("x", (1, channels, *size))
    return onnx_models.model(nodes, [data], results, weights)


@pytest.mark.parametrize("flag", DOT_TARGETS)
@pytest.mark.parametrize("seed", seeds(2, 12, 40))
def test_random_sums_agree_with_onnxruntime(seed: int, flag: str, tmp_path: Path) -> None:
    """Sums of convolutions, of bytes, of a tensor and itself, which others and outputs read too."""
    random = np.random.default_rng(seed)
    made, signed = residual(random), bool(random.integers(0, 2))
    quantized = onnx_models.quantized(made, tmp_path, signed=signed)
    shape = [axis.dim_value for axis in quantized.graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": onnx_models.draw(*shape, seed=9)}
    loaded = onnx_models.load(quantized, tmp_path, feed)
    results = outputs(loaded, feed, dot_target(flag))
    for result, reference in zip(results, expected_outputs(quantized, feed), strict=True):
        step = float(np.diff(np.unique(reference)).min(initial=1.0))
        # a step that another rounding makes is multiplied by the weights behind it
        off = np.abs(result - reference) > 0.01 * step
        assert np.count_nonzero(off) <= max(2, reference.size // 50)


@pytest.mark.parametrize("flag", DOT_TARGETS)
@pytest.mark.parametrize("kind", [convolution, transposed_convolution, product])
@pytest.mark.parametrize("seed", seeds(3, 18, 60))
def test_random_shapes_agree_with_onnxruntime(
    seed: int, kind: Any, flag: str, tmp_path: Path
) -> None:
    """Odd channels, strides, dilations, groups, zero points, signed and unsigned, one scale or one a channel."""
    random = np.random.default_rng(seed)
    made, (signed, per_channel) = kind(random), map(bool, random.integers(0, 2, 2))
    quantized = onnx_models.quantized(made, tmp_path, signed=signed, per_channel=per_channel)
    check(quantized, tmp_path, dot_target(flag))


def conv(
    inputs: int, outputs: int, kernel: int, groups: int = 1, size: int = 9, stride: int = 1
) -> onnx.ModelProto:
    weights = {"w": onnx_models.draw(outputs, inputs // groups, kernel, kernel)}
    shape = {"strides": [stride] * 2, "pads": [kernel // 2] * 4}
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=groups, **shape)
    data, result = onnx_models.value("x", (1, inputs, size, size)), onnx_models.value("y", None)
    return onnx_models.model([node], [data], [result], weights)


def deconv(inputs: int, outputs: int, kernel: int, stride: int) -> onnx.ModelProto:
    weights = {"w": onnx_models.draw(inputs, outputs, kernel, kernel)}
    shape = {"strides": [stride] * 2, "pads": [kernel // 2 - 1] * 4}
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **shape)
    data = onnx_models.value("x", (1, inputs, 8, 8))
    return onnx_models.model([node], [data], [onnx_models.value("y", None)], weights)


def dense(rows: int, depth: int, columns: int) -> onnx.ModelProto:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    data, result = onnx_models.value("x", (rows, depth)), onnx_models.value("y", None)
    return onnx_models.model([node], [data], [result], {"w": onnx_models.draw(depth, columns)})


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        conv(3, 20, 5),
        conv(20, 24, 3),
        conv(64, 32, 3, groups=2),
        conv(24, 24, 3, groups=24),
        deconv(20, 24, 4, 2),
        product(np.random.default_rng(1)),
        dense(7, 33, 24),
    ],
    ids=["stem", "conv", "groups", "depthwise", "transposed", "dense", "odd depth"],
)
def test_products_of_quantized_data_are_of_integers(
    made: onnx.ModelProto, signed: bool, tmp_path: Path
) -> None:
    """Each becomes one integer kernel; a CPU without the instruction computes as before."""
    # The quantizer changes its argument.
    quantized = onnx_models.quantized(copy.deepcopy(made), tmp_path, signed=signed)
    names = check(quantized, tmp_path, dot_target("avx512_vnni"))
    assert sum("quantized_" in name for name in names) == 1
    # the scales of data and weights are one where the sums are integers
    (kernel,) = (name for name in names if "quantized_" in name)
    assert "depthwise" in kernel or kernel.count("multiply") == 1
    loaded = onnx_models.load(quantized, tmp_path)
    assert not any("quantized_" in name for name in kernels_of(loaded.mod, level("x86-64-v3")))


def test_loops_compute_what_the_instruction_does(tmp_path: Path) -> None:
    """C source has no intrinsics of LLVM."""
    made = onnx_models.quantized(conv(20, 24, 3), tmp_path)
    loaded, target = onnx_models.load(made, tmp_path), dot_target("avx512_vnni")
    lowered = lowering.lower(loaded.mod, make_target(target), FAST)
    scheduled = schedules.schedule_untuned(lowered.mod, target, 1).mod
    weights, data = lowered.compute_weights(loaded.params), onnx_models.draw(1, 20, 9, 9)
    expanded = dot_products.expand_dot_products(scheduled)
    assert "llvm" in scheduled.script() and "llvm" not in expanded.script()
    library = lowering.ScheduledModel(expanded, weights, make_target(target)).compile()
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
    assert np.array_equal(result, run(loaded, target, data))


POINTS = conv(20, 24, 1, size=16)
ARM: dict[str, Any] = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 2}


@pytest.mark.parametrize(
    ("made", "mcpu", "taken", "left_out"),
    [
        (POINTS, "neoverse-n1", r"sdot\s+v\d+\.4s, v\d+\.16b, v\d+\.4b\[3\]", r"sdot\s.*16b\n"),
        (POINTS, "cortex-a72", r"sadalp\s+v\d+\.4s, v\d+\.8h", r"\bsdot\b|\btbl\b"),
        (dense(12, 64, 32), "cortex-a72", r"dup\s+v\d+\.4h, v\d+\.h\[3\]", r"ldr\s+h|ushll"),
        (conv(24, 20, 1, size=16), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (conv(24, 20, 3), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (conv(20, 20, 1), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (conv(16, 20, 1, stride=2), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (deconv(20, 24, 4, 2), "neoverse-n1", r"sdot\s", r"\bfmla\b.*\["),
        (deconv(24, 12, 2, 2), "neoverse-v1", r"smmla\s", r"\bfmla\b.*\[[1-3]"),  # [0] is a scale
        (dense(12, 33, 32), "neoverse-n1", r"sdot\s", r"\bfmla\b.*\["),
        (dense(12, 64, 32), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (dense(37, 20, 27), "neoverse-v1", r"smmla\s", r"\b[su]dot\b"),
        (conv(24, 24, 3, groups=24), "neoverse-n1", r"sdot\s.*16b\n", r"\bfmla\b.*\[|ucvtf"),
        (conv(24, 24, 5, groups=24), "neoverse-n1", r"tbl\s.*\n\s+sdot\s.*16b\n", r"ucvtf"),
    ],
    ids=[
        "quads",
        "pairs",
        "dense pairs",
        "matrices",
        "odd matrices",
        "odd blocks",
        "strides",
        "transposed",
        "transposed matrices",
        "odd depth",
        "rows",
        "odd rows",
        "taps",
        "words of taps",
    ],
)
def test_arm_multiplies_bytes_with_exact_sums(
    made: onnx.ModelProto, mcpu: str, taken: str, left_out: str, tmp_path: Path
) -> None:
    """Four words of data are one load where an instruction takes any of them; others multiply pairs."""
    # The quantizer changes its argument.
    quantized = onnx_models.quantized(copy.deepcopy(made), tmp_path)
    shape = (axis.dim_value for axis in made.graph.input[0].type.tensor_type.shape.dim)
    data = onnx_models.draw(*shape)
    code, result = run_for_arm(onnx_models.load(quantized, tmp_path), mcpu, data)
    assert re.search(taken, code) and not re.search(left_out, code)
    assert np.array_equal(result, expected(quantized, data))


def run_for_arm(loaded: LoadedModel, mcpu: str, data: Array) -> tuple[str, Array]:
    """Return the assembly for an ARM CPU, and the output of the same loops on this machine."""
    target = {**ARM, "mcpu": mcpu}
    lowered = lowering.lower(loaded.mod, make_target(target), FAST)
    scheduled = schedules.schedule_untuned(lowered.mod, target, 1).mod
    weights = lowered.compute_weights(loaded.params)
    library = lowering.ScheduledModel(scheduled, weights, make_target(target)).compile()
    expanded = dot_products.expand_dot_products(scheduled)
    here = make_target(without_optimization(level("x86-64-v3")))
    loops = lowering.ScheduledModel(expanded, weights, here).compile()
    result = relax.VirtualMachine(loops, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
    return library.mod.imports[0].inspect_source("asm"), result


def rounded_function(random: np.random.Generator, signed: bool) -> onnx.ModelProto:
    """Return a function of random operators, one after another or of two of the tensors before.

    Each result is rounded to bytes, one of them is read by a sum, too.
    """
    nodes, weights = [], {"zero": np.zeros((), "int8" if signed else "uint8")}

    def round_to_bytes(name: str, scale: float) -> str:
        weights[f"{name}_s"] = np.array(scale, "float32")
        parameters = [f"{name}_s", "zero"]
        nodes.append(helper.make_node("QuantizeLinear", [name, *parameters], [f"{name}_q"]))
        nodes.append(
            helper.make_node("DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_r"])
        )
        return f"{name}_r"

    values = [round_to_bytes("x", 0.02)]
    kinds = [
        "Erf",
        *(str(kind) for kind in random.choice(["Tanh", "Add", "Mul", "Relu", "Sqrt"], 4)),
    ]
    for index, kind in enumerate(kinds):
        operands, name = [str(random.choice(values[-3:]))], f"v{index}"
        if kind == "Sqrt":
            nodes.append(helper.make_node("Abs", operands, [f"{name}_a"]))
            operands = [f"{name}_a"]
        elif kind in ("Add", "Mul"):
            weights[f"{name}_w"] = np.full((1,) * int(random.integers(0, 4)), 0.7, "float32")
            operands.append(str(random.choice([*values, f"{name}_w"])))
        nodes.append(helper.make_node(kind, operands, [name]))
        values.append(round_to_bytes(name, 0.01))
    nodes.append(helper.make_node("Add", [values[-1], values[1]], ["y"]))
    data, result = onnx_models.value("x", (3, 5, 7)), onnx_models.value("y", None)
    return onnx_models.model(nodes, [data], [result], weights)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 8, 40))
def test_functions_of_bytes_are_looked_up_on_arm(seed: int, signed: bool, tmp_path: Path) -> None:
    """No function of a byte is computed when the library runs; its values are those of the operators."""
    made = rounded_function(np.random.default_rng(seed), signed)
    data = onnx_models.draw(3, 5, 7)
    loaded = onnx_models.load(made, tmp_path, {"x": data})
    code, result = run_for_arm(loaded, "neoverse-n1", data)
    assert "look_up" in code and not re.search(r"fdiv|fsqrt", code)
    off = np.abs(result - expected(made, data))
    # other libraries round other numbers next to a half
    assert off.max() < 0.0401 and np.count_nonzero(off > 1e-6) <= 3


def test_functions_of_two_tensors_of_bytes_are_computed(tmp_path: Path) -> None:
    """A product with another tensor is not a function of a byte, and cheap functions need no table."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Mul", ["t", "m"], ["p"]),
        helper.make_node("Relu", ["p"], ["y"]),
    ]
    data, result = onnx_models.value("x", (8, 16)), onnx_models.value("y", None)
    made = onnx_models.model(nodes, [data], [result], {"w": onnx_models.draw(16, 16)})
    quantized = onnx_models.quantized(made, tmp_path)
    names = kernels_of(onnx_models.load(quantized, tmp_path).mod, {**ARM, "mcpu": "neoverse-n1"})
    assert sum("look_up" in name for name in names) == 1


def test_bytes_go_from_kernel_to_kernel(tmp_path: Path) -> None:
    """Maxima and reshapes read bytes, and a tensor with two readers is converted by each of them."""
    weights = {
        "w": onnx_models.draw(24, 3, 3, 3),
        "v": onnx_models.draw(24, 24, 1, 1, seed=1),
        "u": onnx_models.draw(24 * 16, 10, seed=2),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node(
            "MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4
        ),
        helper.make_node("Conv", ["p", "v"], ["d"]),
        helper.make_node("Add", ["d", "p"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("MatMul", ["f", "u"], ["y"]),
    ]
    data, result = onnx_models.value("x", (1, 3, 8, 8)), onnx_models.value("y", None)
    made = onnx_models.model(nodes, [data], [result], weights)
    for signed in (False, True):
        quantized = onnx_models.quantized(copy.deepcopy(made), tmp_path, signed=signed)
        target = dot_target("avx512_vnni")
        check(quantized, tmp_path, target)
        loaded = onnx_models.load(quantized, tmp_path)
        lowered = lowering.lower(loaded.mod, make_target(target), FAST).mod
        arguments = {
            str(argument.ty.dtype)
            for value in DataFlow(lowered["main"]).values.values()
            if isinstance(value, relax.Call) and value.args
            for argument in value.args[1].fields
            if len(argument.ty.shape) == 5 and int(argument.ty.shape[2]) > 1
        }
        assert arguments == {"uint8"}


def product_of_bytes(weights: Array) -> onnx.ModelProto:
    """Return the product of bytes (1, depth) and int8 weights (depth, columns), in float."""
    one, zero = np.float32(1), np.uint8(0)
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["y"]),
    ]
    constants = {"w": weights, "s": np.asarray(one), "z": np.asarray(zero)}
    data, result = onnx_models.value("x", (1, len(weights)), "uint8"), onnx_models.value("y", None)
    return onnx_models.model(nodes, [data], [result], constants)


@pytest.mark.parametrize(("largest", "is_narrow"), [(64, True), (65, False), (127, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_pairs_are_added_in_16_bits_where_these_hold_them(
    largest: int, is_narrow: bool, sign: int, tmp_path: Path
) -> None:
    """Of weights of 7 bits; the sum of two products of others would saturate."""
    weights = np.full((96, 48), sign * largest, np.int8)
    loaded = onnx_models.load(product_of_bytes(weights), tmp_path)
    assert (ir.SEVEN_BIT_WEIGHTS in dict(loaded.mod["main"].attrs)) == is_narrow
    target = level("x86-64-v3")
    library = (
        lowering.lower(loaded.mod, make_target(target), FAST)
        .schedule_untuned(loaded.params, target, 1)
        .compile()
    )
    assert ("vpmaddubsw" in library.mod.imports[0].inspect_source("asm")) == is_narrow
    data = np.full((1, 96), 255, np.uint8)
    run = relax.VirtualMachine(library, tvm.cpu())["main"]
    assert np.array_equal(run(tvm.runtime.tensor(data)).numpy(), data.astype(int) @ weights)
