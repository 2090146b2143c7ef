"""Schedules of untuned kernels on GPUs: their rules, and what kernels compute by OpenCL on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import te

from tests.support import opencl
from tests.support.onnx_models import draw, load, model, open_session, value
from tests.unit.compiler.networks import attention
from tests.unit.compiler.schedules.gpu_kernels import Made, conv, one, product
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program.program import read_program
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.schedules import gpu
from tvmflow.compiler.schedules.rules import NO_RULE, list_unscheduled
from tvmflow.targets.tvm_target import make_target

HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
TARGET = {
    "kind": "cuda",
    "arch": "sm_90",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "host": HOST,
}
OPENCL = make_target(opencl.TARGET)


def test_a_rule_binds_threads_and_does_not_change_its_argument() -> None:
    """TVM's passes change their argument in place; tuned traces fit only the original."""
    data = te.placeholder((64, 64), name="data")
    doubled = te.compute((64, 64), lambda i, j: data[i, j] * 2.0, name="doubled")
    mod = tvm.IRModule({"main": te.create_prim_func([data, doubled])})
    before = mod.script()
    scheduled, rules = schedules.schedule_untuned(mod, TARGET, 1)
    assert rules == {"main": "elementwise"}
    assert "threadIdx.x" in scheduled.script()
    assert mod.script() == before


# ---------------------------------------------------------------- models of one operator


def integers(kind: str, data: Sequence[int], weights: Sequence[int]) -> Made:
    """Return an operator that multiplies int8 with int32 accumulation."""
    random = np.random.default_rng(0)
    drawn = random.integers(-128, 128, weights, dtype="int8")
    nodes = [helper.make_node(kind, ["data", "w"], ["result"])]
    made = model(
        nodes, [value("data", data, "uint8")], [value("result", None, "int32")], {"w": drawn}
    )
    return made, {"data": random.integers(0, 256, data, dtype="uint8")}


def gelu() -> Made:
    """Return a product with weights, bias and a function that reads its argument twice."""
    nodes = [
        helper.make_node("MatMul", ["data", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["g"]),
        helper.make_node("Mul", ["s", "g"], ["m"]),
        helper.make_node("Add", ["m", "data"], ["result"]),
    ]
    weights = {"w": draw(40, 40, seed=1), "b": draw(40, seed=2)}
    made = model(nodes, [value("data", [1, 7, 40])], [value("result", None)], weights)
    return made, {"data": draw(1, 7, 40)}


def norm(*shape: int) -> Made:
    weights = {"scale": draw(shape[-1], seed=1), "shift": draw(shape[-1], seed=2)}
    nodes = [helper.make_node("LayerNormalization", ["data", *weights], ["result"], axis=-1)]
    made = model(nodes, [value("data", shape)], [value("result", None)], weights)
    return made, {"data": draw(*shape)}


def resize(mode: str, *, scale: float = 2.0) -> Made:
    weights = {"scales": np.array([1, 1, scale, scale], np.float32)}
    nodes = [helper.make_node("Resize", ["data", "", "scales"], ["result"], mode=mode)]
    made = model(nodes, [value("data", [1, 6, 7, 9])], [value("result", None)], weights)
    return made, {"data": draw(1, 6, 7, 9)}


def joined() -> Made:
    nodes = [helper.make_node("Concat", ["a", "b"], ["result"], axis=1)]
    inputs = [value("a", [2, 3, 5, 8]), value("b", [2, 17, 5, 8])]
    made = model(nodes, inputs, [value("result", None)])
    return made, {"a": draw(2, 3, 5, 8), "b": draw(2, 17, 5, 8, seed=1)}


QUICK: dict[str, tuple[Made, str]] = {
    "conv": (conv((1, 16, 9, 11), (20, 16, 3, 3), pads=[1, 1, 1, 1]), "tiled_products"),
    "conv_of_few_channels": (conv((2, 3, 17, 13), (17, 3, 3, 3), strides=[2, 2]), "tiled_products"),
    "conv_of_groups": (
        conv((1, 24, 8, 8), (24, 6, 3, 3), group=4, pads=[1, 1, 1, 1]),
        "tiled_products",
    ),
    "conv_1x1": (conv((1, 32, 14, 14), (64, 32, 1, 1)), "tiled_products"),
    "depthwise": (conv((1, 17, 13, 9), (17, 1, 3, 3), group=17, pads=[1, 1, 1, 1]), "windows"),
    "max_pool": (
        one("MaxPool", (1, 5, 13, 12), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        "windows",
    ),
    "product": (one("MatMul", (1, 33, 48), {"w": draw(48, 70)}, then="Relu"), "tiled_products"),
    "product_of_inputs": (product((2, 3, 17, 32), (2, 3, 32, 20)), "tiled_products"),
    "product_with_vector": (one("MatMul", (1, 96), {"w": draw(96, 130)}), "block_reductions"),
    "gelu": (gelu(), "tiled_products"),
    "softmax": (one("Softmax", (1, 3, 17, 45), axis=-1), "block_reductions"),
    "softmax_of_channels": (one("Softmax", (2, 5, 6, 7), axis=1), "block_reductions"),
    "layer_norm": (norm(2, 9, 64), "block_reductions"),
    "mean": (one("GlobalAveragePool", (2, 33, 13, 13)), "block_reductions"),
    "transpose": (one("Transpose", (2, 33, 6, 9), perm=[0, 2, 3, 1]), "transposes"),
    "concat": (joined(), "elementwise"),
    "resize": (resize("linear"), "elementwise"),
}
"""A model -> the rule of its first kernel."""

SLOW: dict[str, Made] = {
    **{
        f"conv_{inner}_{outer}_{size}_{kernel}_{stride}": conv(
            (batch, inner, size, size + 2),
            (outer, inner, kernel, kernel),
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            bias=outer % 2 == 0,
        )
        for batch, inner, outer, size, kernel, stride in (
            (1, 1, 1, 7, 3, 1),
            (1, 1, 17, 9, 5, 1),
            (3, 3, 16, 15, 7, 2),
            (1, 17, 3, 11, 3, 1),
            (2, 17, 17, 8, 3, 2),
            (1, 64, 5, 6, 3, 1),
            (1, 48, 130, 5, 1, 1),
            (4, 20, 40, 4, 1, 2),
            (1, 32, 32, 1, 1, 1),
            (1, 16, 200, 2, 3, 1),
            (1, 96, 96, 14, 3, 1),
        )
    },
    "dilated": conv((1, 16, 15, 15), (8, 16, 3, 3), dilations=[2, 3], pads=[2, 3, 2, 3]),
    "uneven_padding": conv((1, 16, 9, 9), (8, 16, 3, 2), pads=[0, 1, 2, 0]),
    "groups_of_three": conv((2, 9, 7, 7), (12, 3, 3, 3), group=3),
    "groups_of_one_channel": conv((1, 8, 9, 9), (16, 1, 3, 3), group=8, pads=[1, 1, 1, 1]),
    "depthwise_7": conv((1, 12, 17, 18), (12, 1, 7, 7), group=12, pads=[3] * 4),
    "depthwise_stride": conv((2, 7, 19, 10), (7, 1, 5, 5), group=7, strides=[2, 2], pads=[2] * 4),
    "depthwise_dilated": conv((1, 7, 19, 10), (7, 1, 3, 3), group=7, dilations=[2, 2]),
    "conv1d": conv((1, 20, 33), (40, 20, 3), pads=[1, 1]),
    "depthwise_1d": conv((1, 20, 33), (20, 1, 7), group=20, pads=[3, 3]),
    "conv3d": conv((1, 4, 5, 6, 7), (8, 4, 3, 3, 3), pads=[1] * 6),
    "transposed": one(
        "ConvTranspose", (1, 8, 5, 6), {"w": draw(8, 6, 2, 2)}, strides=[2, 2], then="Relu"
    ),
    "transposed_3": one(
        "ConvTranspose", (1, 17, 5, 6), {"w": draw(17, 6, 3, 3)}, strides=[2, 2], pads=[1] * 4
    ),
    "conv_of_float16": conv((1, 16, 9, 9), (24, 16, 3, 3), pads=[1] * 4, dtype="float16"),
    "product_of_float16": one("MatMul", (1, 9, 40), {"w": draw(40, 24)}, dtype="float16"),
    "softmax_of_float16": one("Softmax", (1, 9, 40), axis=-1, dtype="float16"),
    "product_of_bytes": integers("MatMulInteger", (9, 40), (40, 20)),
    "conv_of_bytes": integers("ConvInteger", (1, 16, 9, 9), (8, 16, 3, 3)),
    "average_pool": one("AveragePool", (1, 3, 14, 14), kernel_shape=[3, 3], pads=[1] * 4),
    "average_of_stride": one("AveragePool", (2, 17, 15, 9), kernel_shape=[2, 2], strides=[2, 2]),
    "max_pool_1d": one("MaxPool", (1, 17, 33), kernel_shape=[3], strides=[1]),
    "sum_of_first_axis": one("ReduceSum", (40, 33), {"axes": np.array([0])}, keepdims=0),
    "sum_of_all": one("ReduceSum", (7, 33, 41), keepdims=0),
    "max_of_middle": one("ReduceMax", (7, 33, 41), axes=[1]),
    "long_rows": one("Softmax", (2, 20000), axis=-1),
    "one_row": norm(1, 1, 1000),
    "norm_of_odd_rows": norm(3, 5, 17),
    "vector_of_long_rows": one("Gemm", (1, 777), {"w": draw(10, 777)}, transB=1),
    "few_rows": one("MatMul", (3, 100), {"w": draw(100, 40)}, then="Sigmoid"),
    "many_rows": one("MatMul", (300, 17), {"w": draw(17, 5)}),
    "batched_odd": product((3, 5, 7), (3, 7, 9), then="Relu"),
    "batched_alike": product((4, 64, 64), (4, 64, 64)),
    "nearest": resize("nearest"),
    "cubic": resize("cubic", scale=1.5),
    "swap": one("Transpose", (77, 65), perm=[1, 0]),
    "rotate": one("Transpose", (5, 40, 12), perm=[2, 0, 1]),
    "pad": one("Pad", (1, 3, 6, 6), {"pads": np.array([0, 0, 1, 2, 0, 0, 3, 4])}),
    "slice": one(
        "Slice",
        (9, 20),
        {
            "starts": np.array([1, 3]),
            "ends": np.array([8, 19]),
            "axes": np.array([0, 1]),
            "steps": np.array([2, 1]),
        },
    ),
    "gather": one("Gather", (20, 12), {"rows": np.array([3, 1, 19, 0, 5])}),
    "odd_map": one("Tanh", (3, 5, 7)),
}


def check(made: Made, folder: Path) -> dict[str, str]:
    """Check that a model computes by OpenCL what ONNX Runtime does; return the rule of each kernel."""
    device = opencl.find_device()
    if device is None:
        pytest.skip("this machine has no OpenCL (install PoCL: pocl-opencl-icd)")
    onnx_model, feed = made
    if any(array.dtype == np.float16 for array in feed.values()) and not device.has_float16:
        pytest.skip("this machine's OpenCL has no float16")
    loaded = load(onnx_model, folder)
    lowered = lowering.lower(loaded.mod, OPENCL, LoweringOptions())
    scheduled = gpu.schedule_for_gpu(lowered.mod, OPENCL)
    program = read_program(scheduled.mod, lowered.compute_weights(loaded.params))
    expected = open_session(onnx_model).run(None, dict(feed))
    outputs = [np.empty_like(array) for array in expected]
    ran = opencl.Model(device, scheduled.mod, program, OPENCL)
    ran.run([np.asarray(feed[spec.name]) for spec in loaded.inputs], outputs)
    ran.close()
    for actual, wanted in zip(outputs, expected, strict=True):
        tolerance = 2e-2 if wanted.dtype == np.float16 else 1e-4
        largest = float(np.abs(wanted).max()) or 1.0
        np.testing.assert_allclose(actual / largest, wanted / largest, rtol=0, atol=tolerance)
    return scheduled.rules


@pytest.mark.parametrize("name", QUICK)
def test_kernels_compute_what_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    made, rule = QUICK[name]
    rules = check(made, tmp_path)
    assert rule in rules.values(), rules


@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 5, 6, 10, 12, 13, 18))]
)
def test_attention_is_one_launch(seed: int, tmp_path: Path) -> None:
    """Masks, factors, shared keys and transposed results, with tiles for the limits of several GPUs."""
    device = opencl.find_device()
    if device is None:
        pytest.skip("this machine has no OpenCL (install PoCL: pocl-opencl-icd)")
    threads, shared = ((1024, 32768), (256, 32768), (256, 16384))[seed % 3]
    limits = {"max_threads_per_block": threads, "max_shared_memory_per_block": shared}
    target = make_target({**opencl.TARGET, **limits})
    made, feed = attention(seed)
    loaded = load(made, tmp_path, feed)
    lowered = lowering.lower(loaded.mod, target, LoweringOptions())
    scheduled = gpu.schedule_for_gpu(lowered.mod, target)
    program = read_program(scheduled.mod, lowered.compute_weights(loaded.params))
    (expected,) = open_session(made).run(None, feed)
    actual = np.empty_like(expected)
    ran = opencl.Model(device, scheduled.mod, program, target)
    ran.run([feed[spec.name] for spec in loaded.inputs], [actual])
    ran.close()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
    assert "attention" in {getattr(step, "kernel", "") for step in program.steps}


def test_blocks_write_only_results_of_their_own_group(tmp_path: Path) -> None:
    """A group has fewer channels than a tile has rows: those beyond are channels of the next group."""
    device = opencl.find_device()
    if device is None:
        pytest.skip("this machine has no OpenCL (install PoCL: pocl-opencl-icd)")
    loaded = load(conv((2, 9, 7, 7), (12, 3, 3, 3), group=3)[0], tmp_path)
    lowered = lowering.lower(loaded.mod, OPENCL, LoweringOptions())
    ((var, _),) = list_unscheduled(lowered.mod)
    function = gpu.schedule_for_gpu(lowered.mod, OPENCL).mod[var]
    shapes = [tuple(map(int, param.ty.shape)) for param in function.params]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    arrays[-1][:] = np.nan
    opencl.run_kernel(device, function, OPENCL, arrays, rows=1)
    written = np.isfinite(arrays[-1])
    assert written[:, :4].all() and not written[:, 4:].any()


def test_groups_of_threads_divide_the_depth_of_few_results(tmp_path: Path) -> None:
    """A GPU would else wait for each step of the depth; every step is loaded during the one before."""
    device = opencl.find_device()
    if device is None:
        pytest.skip("this machine has no OpenCL (install PoCL: pocl-opencl-icd)")
    made, feed = conv((1, 40, 5, 5), (24, 40, 3, 3), pads=[1, 1, 1, 1])
    loaded = load(made, tmp_path)
    # a GPU with as many threads as NVIDIA's
    target = make_target({**opencl.TARGET, "max_threads_per_block": 1024})
    lowered = lowering.lower(loaded.mod, target, LoweringOptions())
    ((var, _),) = list_unscheduled(lowered.mod)
    scheduled = gpu.schedule_for_gpu(lowered.mod, target)
    assert scheduled.rules == {str(var.name_hint): "tiled_products"}
    generated = opencl.generate(scheduled.mod[var], target, "kernel")
    assert generated.launches[0].block[2] > 1
    program = read_program(scheduled.mod, lowered.compute_weights(loaded.params))
    run = opencl.Model(device, scheduled.mod, program, target)
    (expected,) = open_session(made).run(None, feed)
    # a block that writes what is another one's does so before or after that
    for _ in range(20):
        outputs = [np.full_like(expected, np.nan)]
        run.run(list(feed.values()), outputs)
        np.testing.assert_allclose(outputs[0], expected, rtol=1e-4, atol=1e-4)
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_odd_shapes_compute_what_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    rules = check(SLOW[name], tmp_path)
    assert NO_RULE not in rules.values(), rules
