"""Schedules of kernels whose sizes each call chooses: one library computes what numpy computes at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx, topi

from tests.support.dynamic_networks import Input, make_network, make_weights
from tests.support.kernels import LEVELS_HERE, level
from tvmflow.compiler.code_generation import CPU_PASSES, build_kernels
from tvmflow.compiler.contraction.machine import CpuModel, list_masked_types
from tvmflow.compiler.dynamic_tiles import split_dynamic_tiles
from tvmflow.compiler.lowering import lower
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.schedules import rules, schedule_untuned
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import Window
from tvmflow.core.types import Dimension
from tvmflow.graph.dynamic_shapes import DYNAMIC_SHAPES, MULTIPLES, list_symbols, with_dimensions
from tvmflow.graph.ir import find_nodes, operator_name, replace_variables
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]

SIZES: Final = (1, 2, 3, 7, 8, 16, 31, 37, 128)
IMAGES: Final = ((1, 1), (2, 3), (7, 7), (13, 17), (31, 20))


def check(
    tensors: Sequence[Any], rule: str, sizes: Sequence[dict[str, int]], expected: Any, mcpu: str
) -> None:
    """Check that an open kernel gets its schedule from a rule, and is exact at all sizes."""
    target = level(mcpu)
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    function = te.create_prim_func(list(tensors), index_dtype_override="int64")
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    choice = rules.choose_schedule(mod, cpu)
    assert choice is not None
    assert choice.rule == rule
    run = build_kernels(choice.schedule.mod, tvm.target.Target(target))["main"]
    rng = np.random.default_rng(0)
    for at in sizes:
        *inputs, output = (
            [size_at(size, at) for size in param.ty.shape] for param in function.params
        )
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in inputs]
        dtype = str(function.params[-1].ty.dtype.dtype)
        result = tvm.runtime.tensor(np.full(output, np.nan).astype(dtype))
        run(*map(tvm.runtime.tensor, arrays), result)
        np.testing.assert_allclose(result.numpy(), expected(*arrays), rtol=1e-4, atol=1e-4)


def size_at(size: Any, at: dict[str, int]) -> int:
    values = {var: tirx.IntImm("int64", at[str(var.name)]) for var in list_symbols(size)}
    return int(tvm.sym.Analyzer().simplify(replace_variables(size, values)) if values else size)


def rows() -> list[dict[str, int]]:
    return [{"m": size} for size in SIZES]


def images() -> list[dict[str, int]]:
    return [{"h": height, "w": width} for height, width in IMAGES]


M: Final = tirx.Var("m", "int64")
H: Final = tirx.Var("h", "int64")
W: Final = tirx.Var("w", "int64")


def slide(images: Array, size: int) -> Array:
    """Return all windows (n, c, h, w, …, size, size) of images (n, c, h, w, …)."""
    rows = np.lib.stride_tricks.sliding_window_view(images, size, axis=2)
    result: Array = np.lib.stride_tricks.sliding_window_view(rows, size, axis=3)
    return result


def softmax(x: Array) -> Array:
    exponents = np.exp(x - x.max(-1, keepdims=True))
    result: Array = exponents / exponents.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("columns", [96, 100, 29])
def test_products_with_a_dynamic_number_of_rows(columns: int, mcpu: str) -> None:
    x, w = te.placeholder((M, 24), name="x"), te.placeholder((24, columns), name="w")
    bias = te.placeholder((columns,), name="bias")
    result = topi.nn.relu(topi.add(topi.matmul(x, w), bias))
    tensors = (x, w, bias, result)
    check(tensors, "register_tiles", rows(), lambda x, w, b: np.maximum(x @ w + b, 0), mcpu)


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("shape", [(M, 48), (12, M), (1, 3, M, M), (M, 1000)], ids=str)
def test_elementwise_kernels(shape: tuple[Any, ...], mcpu: str) -> None:
    x, y = te.placeholder(shape, name="x"), te.placeholder(shape[-1:], name="y")
    tensors = (x, y, topi.nn.relu(topi.add(topi.multiply(x, x), y)))
    check(tensors, "elementwise", rows(), lambda x, y: np.maximum(x * x + y, 0), mcpu)


@pytest.mark.parametrize("shape", [(M, 96), (96, M), (M, M)], ids=str)
def test_transpositions(shape: tuple[Any, ...]) -> None:
    x = te.placeholder(shape, name="x")
    tensors = (x, topi.transpose(x, (1, 0)))
    check(tensors, "elementwise", rows(), lambda x: x.T, LEVELS_HERE[-1])


@pytest.mark.parametrize("axis", [1, 2])
def test_concatenations(axis: int) -> None:
    x, y = te.placeholder((M, 3, 40), name="x"), te.placeholder((M, 3, 40), name="y")
    tensors = (x, y, topi.concatenate([x, y], axis=axis))
    expected: Callable[..., Array] = lambda x, y: np.concatenate([x, y], axis)  # noqa: E731
    check(tensors, "elementwise", rows(), expected, LEVELS_HERE[-1])


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("shape", [(9, M), (1, 12, M, M), (M, 50), (M, 384)], ids=str)
def test_softmax(shape: tuple[Any, ...], mcpu: str) -> None:
    """A row that is shorter than one vector, or than the last of several, is its own sum."""
    x = te.placeholder(shape, name="x")
    check((x, topi.nn.softmax(x)), "row_reductions", rows(), softmax, mcpu)


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_masks_of_dynamic_rows(mcpu: str) -> None:
    x, y = te.placeholder((3, M), name="x"), te.placeholder((M,), name="y")
    tensors = (x, y, topi.logical_and(topi.greater(x, y), topi.logical_not(topi.less(x, 0.5))))
    check(tensors, "elementwise", rows(), lambda x, y: (x > y) & ~(x < 0.5), mcpu)


def lower_passes(tensors: Sequence[Any], target: dict[str, Any]) -> Any:
    """Return the body of an open kernel after the passes for CPUs."""
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    function = te.create_prim_func(list(tensors), index_dtype_override="int64")
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    choice = rules.choose_schedule(mod, cpu)
    assert choice is not None
    mod = tirx.transform.BindTarget(tvm.target.Target(target, host=target))(choice.schedule.mod)
    return tvm.transform.Sequential([make() for make in CPU_PASSES])(mod)["main"].body


def calls_masks(body: Any) -> bool:
    return any("masked" in operator_name(call) for call in find_nodes(body, tvm.ir.Call))


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_the_last_numbers_of_a_row_are_one_vector_under_a_mask(mcpu: str) -> None:
    """Rows that are shorter than a vector took as long as so many numbers, one by one."""
    x = te.placeholder((9, M), name="x")
    body = lower_passes((x, topi.nn.softmax(x)), level(mcpu))
    assert calls_masks(body) == (mcpu != "x86-64-v2")
    lanes = {"x86-64-v2": 4, "x86-64-v3": 8, "x86-64-v4": 16}[mcpu]
    # the lanes of sums and maximums are added up without a loop; first values of an empty row are set in one
    branches = find_nodes(body, tirx.IfThenElse)
    fills = [branch for branch in branches if isinstance(branch.condition, tirx.EQ)]
    of_fills = [loop for fill in fills for loop in find_nodes(fill, tirx.For)]
    loops = [
        loop
        for loop in find_nodes(body, tirx.For)
        if not any(loop.same_as(other) for other in of_fills)
    ]
    extents = (loop.extent for loop in loops)
    assert lanes not in [int(extent) for extent in extents if isinstance(extent, tirx.IntImm)]


def test_no_mask_where_what_is_beyond_the_end_does_harm() -> None:
    """A divisor that no number has is 0, and CPUs stop at it."""
    x, y = (te.placeholder((9, M), "int32", name) for name in "xy")
    target = level("x86-64-v3")
    assert calls_masks(lower_passes((x, y, topi.add(x, y)), target))
    assert not calls_masks(lower_passes((x, y, topi.floor_divide(x, y)), target))


def test_masks_of_no_other_cpu_than_x86() -> None:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    assert list_masked_types(tvm.target.Target(target)) == frozenset()


def test_layer_norms_of_dynamic_rows() -> None:
    x, scale = te.placeholder((1, M, 384), name="x"), te.placeholder((384,), name="scale")
    shift = te.placeholder((384,), name="shift")

    def norm(x: Array, scale: Array, shift: Array) -> Array:
        centered = x - x.mean(-1, keepdims=True)
        result: Array = centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift
        return result

    tensors = (x, scale, shift, topi.nn.layer_norm(x, scale, shift, [2], 1e-5))
    check(tensors, "row_reductions", rows(), norm, LEVELS_HERE[-1])


def test_sums_over_a_dynamic_axis_that_is_not_the_last() -> None:
    x = te.placeholder((1, M, 96), name="x")
    check((x, topi.sum(x, axis=1)), "register_tiles", rows(), lambda x: x.sum(1), LEVELS_HERE[-1])


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize(("edge", "stride"), [(3, 1), (3, 2), (1, 1)])
@pytest.mark.parametrize("is_depthwise", [False, True])
def test_convolutions_of_dynamic_images(
    edge: int, stride: int, is_depthwise: bool, mcpu: str
) -> None:
    lanes, inner, out = 16, 2, 1 if not is_depthwise else 2
    margin = edge // 2
    x = te.placeholder((1, inner, H, W, lanes), name="x")
    weights = (out, edge, edge, lanes) if is_depthwise else (out, inner, edge, edge, lanes, lanes)
    w = te.placeholder(weights, name="w")
    padded = topi.nn.pad(x, (0, 0, margin, margin, 0), name="pad") if margin else x
    y, z = te.reduce_axis((0, edge), "y"), te.reduce_axis((0, edge), "z")
    c, i = te.reduce_axis((0, inner), "c"), te.reduce_axis((0, lanes), "i")

    def compute(n: Any, o: Any, r: Any, q: Any, lane: Any) -> Any:
        row, column = r * stride + y, q * stride + z
        if is_depthwise:
            product = padded[n, o, row, column, lane] * w[o, y, z, lane]
            return te.sum(product, axis=[y, z])
        product = padded[n, c, row, column, i] * w[o, c, y, z, i, lane]
        return te.sum(product, axis=[c, y, z, i])

    size = [(length - 1) // stride + 1 if stride > 1 else length for length in (H, W)]
    result = topi.nn.relu(te.compute((1, out, *size, lanes), compute, name="conv"))

    def expected(x: Array, w: Array) -> Array:
        pads = ((0, 0), (0, 0), (margin, margin), (margin, margin), (0, 0))
        windows = slide(np.pad(x, pads), edge)
        names = "nchwlyz,cyzl->nchwl" if is_depthwise else "nchwiyz,ocyzil->nohwl"
        sums = np.einsum(names, windows[:, :, ::stride, ::stride], w, optimize=True)
        result: Array = np.maximum(sums, 0)
        return result

    check((x, w, result), "register_tiles", images(), expected, mcpu)


@pytest.mark.parametrize("side", [7, 13])
@pytest.mark.parametrize("stride", [1, 2])
def test_all_cores_compute_rows_of_small_images(stride: int, side: int) -> None:
    """No core gets more than its share of the rows, of images that are somewhat smaller either."""
    cpu = CpuModel.from_target(level(LEVELS_HERE[-1]))
    assert cpu is not None
    x = te.placeholder((1, 2, H, W, 16), name="x")
    w = te.placeholder((4, 2, 3, 3, 16, 16), name="w")
    groups = blocked.Groups(inputs=32, outputs=64, lanes=16, block=16, number=1)
    result = blocked.conv(x, w, Window([stride] * 2, [1] * 4, [1, 1]), groups)
    function = te.create_prim_func([x, w, result], index_dtype_override="int64")
    kernel = function.with_attrs({"global_symbol": "main", DYNAMIC_SHAPES: {"h": side, "w": side}})
    choice = rules.choose_schedule(tvm.IRModule({"main": kernel}), cpu)
    assert choice is not None
    (parts,) = (
        loop.extent
        for loop in find_nodes(choice.schedule.mod["main"].body, tirx.For)
        if loop.kind == tirx.ForKind.PARALLEL
    )
    for height in (side, side - 2):
        rows = -(-height // stride)
        assert size_at(parts, {"h": height, "w": side}) == rows


def test_open_lengths_divide_no_index_and_registers_have_known_places() -> None:
    """TVM simplifies each index in each pass: compiling took longer by the number of them."""
    x, w = te.placeholder((1, 2, H, W, 16), name="x"), te.placeholder((2, 3, 3, 16), name="w")
    padded = topi.nn.pad(x, (0, 0, 1, 1, 0), name="pad")
    y, z = te.reduce_axis((0, 3), "y"), te.reduce_axis((0, 3), "z")

    def compute(n: Any, o: Any, r: Any, q: Any, lane: Any) -> Any:
        return te.sum(padded[n, o, r + y, q + z, lane] * w[o, y, z, lane], axis=[y, z])

    tensors = (x, w, te.compute((1, 2, H, W, 16), compute, name="conv"))
    body = lower_passes(tensors, level(LEVELS_HERE[-1]))
    stores = find_nodes(body, tirx.BufferStore)
    places = [(store.buffer, store.indices) for store in stores]
    places += [(load.source, load.indices) for load in find_nodes(body, tvm.ir.TensorLoad)]
    assert any(str(buffer.scope()) == "local" for buffer, _ in places)
    for buffer, indices in places:
        assert not find_nodes(list(indices), tirx.FloorDiv, tirx.FloorMod)
        if str(buffer.scope()) == "local":
            assert not find_nodes(list(indices), tirx.Var)


def test_pooling_of_dynamic_images() -> None:
    x = te.placeholder((1, 2, H, W, 16), name="x")
    pooled = topi.nn.pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "max", layout="NCHW16c")

    def expected(x: Array) -> Array:
        pads = ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))
        padded = np.pad(x, pads, constant_values=-np.inf)
        windows = slide(padded, 3)
        result: Array = windows[:, :, ::2, ::2].max((-1, -2))
        return result

    check((x, pooled), "register_tiles", images(), expected, LEVELS_HERE[-1])


def test_means_at_a_border_divide_by_their_own_counts() -> None:
    """A row beyond the end stored the sum of the last one, divided by a count of its own."""
    x = te.placeholder((1, 2, H, W, 16), name="x")
    pooled = topi.nn.pool2d(
        x, [3, 3], [2, 2], [1, 1], [1, 1, 1, 1], "avg", layout="NCHW16c", count_include_pad=False
    )

    def sums(x: Array) -> Array:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
        result: Array = slide(padded, 3)[:, :, ::2, ::2].sum((-1, -2))
        return result

    def expected(x: Array) -> Array:
        return sums(x) / sums(np.ones_like(x))

    check((x, pooled), "register_tiles", images(), expected, LEVELS_HERE[-1])


def test_a_row_that_is_shorter_than_a_vector_writes_nothing_before_it() -> None:
    """A slice without its first entry has less than a vector at a length of 2; nothing else is written."""
    x = te.placeholder((2, M, 8), name="x")
    rest = te.compute((2, M - 1, 8), lambda i, j, k: x[i, j + 1, k], name="rest")
    sizes = [{"m": size} for size in (2, 3, 4, 5, 17)]
    check((x, rest), "elementwise", sizes, lambda x: x[:, 1:], LEVELS_HERE[-1])


@pytest.mark.parametrize("multiple", [1, 120])  # of the tiles of AVX2 and of AVX-512
def test_kernels_of_multiples_of_a_tile_compute_no_rest(multiple: int) -> None:
    """Whole tiles alone: no branch is left of the last one, and each size is exact."""
    rows = Dimension(name="m", min=120, max=360, multiple_of=multiple)
    weights = make_weights(k=(24, 64), b=(64,))

    def layer(emit: Any, x: Any, k: Any, b: Any) -> Any:
        return emit(relax.op.nn.relu(emit(relax.op.add(emit(relax.op.matmul(x, k)), b))))

    network = make_network((rows,), {"x": Input((1, "m", 24))}, weights, layer)
    target = level(LEVELS_HERE[-1])
    kernels = [
        function
        for variable, function in schedule_untuned(
            network.lower(target).mod, target, 1
        ).mod.functions_items()
        if "dense" in str(variable.name_hint)
    ]
    (kernel,) = kernels
    assert dict(kernel.attrs.get(MULTIPLES, {})) == ({"size0": multiple} if multiple > 1 else {})
    own = kernel.with_attr("global_symbol", "main").with_attr("target", tvm.target.Target(target))
    mod = tvm.IRModule({"main": own})
    with tvm.target.Target(target):
        for make in CPU_PASSES[: CPU_PASSES.index(split_dynamic_tiles) + 1]:
            mod = make()(mod)
    branches = find_nodes(mod["main"].body, tirx.IfThenElse)
    assert bool(branches) == (multiple == 1)
    library = (
        lower(network.mod, make_target(target), LoweringOptions())
        .schedule_untuned(network.weights, target, 1)
        .compile()
    )
    run = relax.VirtualMachine(library, tvm.cpu())["main"]
    for size in (120, 240, 360):
        x = network.draw({"m": size})["x"]
        expected = np.maximum(x @ weights["k"] + weights["b"], 0)
        result = run(tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_pixels_of_pointwise_convolutions_are_one_axis(stride: int) -> None:
    """An image has one tail tile, not one in each row; with a stride, a pixel reads another one."""
    weights = make_weights(k=(32, 32, 1, 1))

    def block(emit: Callable[[Any], Any], x: Any, k: Any) -> Any:
        y = emit(relax.op.nn.relu(x))
        z = emit(relax.op.nn.conv2d(y, k, strides=(stride, stride)))
        return emit(relax.op.add(z, y)) if stride == 1 else z

    dimensions = (Dimension("n", 1, 4), Dimension("h", 1, 64), Dimension("w", 1, 64))
    network = make_network(dimensions, {"x": Input(("n", 32, "h", "w"))}, weights, block)
    target = level(LEVELS_HERE[-1])
    (kernel,) = (
        function
        for variable, function in network.lower(target).mod.functions_items()
        if "conv2d" in str(variable.name_hint)
    )
    products = [
        loop for loop in find_nodes(kernel.body, tirx.For) if isinstance(loop.extent, tirx.Mul)
    ]
    assert bool(products) == (stride == 1)
    library = (
        lower(network.mod, make_target(target), LoweringOptions())
        .schedule_untuned(network.weights, target, 1)
        .compile()
    )
    run = relax.VirtualMachine(library, tvm.cpu())["main"]
    for batch, (height, width) in zip((1, 4, 3, 1, 2), IMAGES, strict=True):
        x = network.draw({"n": batch, "h": height, "w": width})["x"]
        y = np.maximum(x, 0)
        expected = np.einsum("nihw,oi->nohw", y[:, :, ::stride, ::stride], weights["k"][..., 0, 0])
        result = run(tvm.runtime.tensor(x)).numpy()
        expected = expected + y if stride == 1 else expected
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_lowered_kernels_have_numbers_for_the_variables_of_their_shapes() -> None:
    builder = relax.BlockBuilder()
    rows = tirx.Var("rows", "int64")
    x = relax.Var("x", relax.TensorType((rows, 48), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(relax.op.nn.softmax(x)))
        builder.emit_func_output(result)
    mod = builder.get()
    dimension = Dimension("rows", 1, 512, tune_at=(16, 300))
    mod["main"] = with_dimensions(mod["main"].with_attr("num_input", 1), [dimension])
    lowered = lower(mod, tvm.target.Target(level(LEVELS_HERE[-1])), LoweringOptions())
    kernels = [f for _, f in lowered.mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert [list(kernel.attrs[DYNAMIC_SHAPES].values()) for kernel in kernels] == [[300]]
