"""Schedules of rules compute what the unscheduled kernel does, and are deterministic."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from tests.support.kernels import LEVELS, host_level, level
from tvmflow.compiler.c_program.c_kernels import make_assembly
from tvmflow.compiler.code_generation import CPU_PASSES, build_kernels
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.contraction.winograd import Geometry
from tvmflow.compiler.schedules import rules
from tvmflow.compiler.tir_kernels import blocked, winograd
from tvmflow.compiler.tir_kernels.blocked import Groups, Window
from tvmflow.compiler.vector_code import PREFETCH_HINT, prefetch_weights
from tvmflow.graph.ir import find_nodes, operator_name, replace_variables
from tvmflow.tuning.measure import apply_trace, make_arguments, trace_json

SLOWLY = settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def kernel(*tensors: Any) -> tvm.IRModule:
    function = te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def convolution(
    channels: int = 32, out: int = 48, size: int = 13, edge: int = 3, stride: int = 1
) -> tvm.IRModule:
    x = te.placeholder((1, channels // 16, size, size, 16), name="x")
    w = te.placeholder((out // 16, channels // 16, edge, edge, 16, 16), name="w")
    b = te.placeholder((1, out // 16, 1, 1, 16), name="b")
    window = Window((stride,) * 2, (edge // 2,) * 4, (1, 1))
    y = blocked.conv(x, w, window, Groups(channels, out, 16, 16, 1))
    return kernel(x, w, b, topi.nn.relu(topi.add(y, b)))


def depthwise(size: int = 15, stride: int = 2) -> tvm.IRModule:
    x = te.placeholder((2, 3, size, size, 16), name="x")
    w = te.placeholder((3, 3, 3, 16), name="w")
    return kernel(x, w, blocked.depthwise_conv(x, w, Window((stride,) * 2, (1,) * 4, (1, 1))))


def product(rows: int = 30, depth: int = 24, columns: int = 56) -> tvm.IRModule:
    x, y = te.placeholder((2, rows, depth), name="x"), te.placeholder((2, depth, columns), name="y")
    k = te.reduce_axis((0, depth), name="k")
    z = te.compute((2, rows, columns), lambda b, i, j: te.sum(x[b, i, k] * y[b, k, j], axis=[k]))
    return kernel(x, y, z)


def gate() -> tvm.IRModule:
    """Return a product of an image and numbers that a convolution computes for its channels."""
    x, image = (
        te.placeholder((1, 2, 1, 1, 16), name="x"),
        te.placeholder((1, 4, 7, 5, 16), name="i"),
    )
    w = te.placeholder((4, 2, 1, 1, 16, 16), name="w")
    y = blocked.conv(x, w, Window((1, 1), (0,) * 4, (1, 1)), Groups(32, 64, 16, 16, 1))
    return kernel(x, w, image, topi.multiply(image, topi.nn.relu(topi.add(y, te.const(1.0)))))


def rows(kind: str, *shape: int) -> tvm.IRModule:
    x = te.placeholder(shape, name="x")
    last = len(shape) - 1
    results = {
        "softmax": lambda: topi.nn.softmax(x, last),
        "sum": lambda: topi.sum(x, last),
        "max": lambda: topi.max(x, last, keepdims=True),
        "mean": lambda: topi.divide(topi.sum(x, last, keepdims=True), te.const(3.0)),
    }
    return kernel(x, results[kind]())


def columns(*shape: int) -> tvm.IRModule:
    """Return a mean over the second axis."""
    x = te.placeholder(shape, name="x")
    return kernel(x, topi.divide(topi.sum(x, 1), te.const(float(shape[1]))))


def norm() -> tvm.IRModule:
    x, g, b = (
        te.placeholder(s, name=n) for n, s in (("x", (3, 5, 48)), ("g", (48,)), ("b", (48,)))
    )
    return kernel(x, g, b, topi.nn.layer_norm(x, g, b, [2]))


def elementwise(*shape: int) -> tvm.IRModule:
    x, y = te.placeholder(shape, name="x"), te.placeholder(shape[-1:], name="y")
    return kernel(x, y, topi.nn.relu(topi.add(topi.multiply(x, x), y)))


def transposed() -> tvm.IRModule:
    x = te.placeholder((4, 5, 48), name="x")
    return kernel(x, topi.transpose(x, [2, 0, 1]))


def counted() -> tvm.IRModule:
    """Return a kernel of integers that is not read in vectors, and whose blocks differ in shape."""
    x = te.placeholder((7, 9), "int64", name="x")
    return kernel(x, topi.sum(topi.cast(topi.greater(x, te.const(0, "int64")), "int64"), 0))


KERNELS = {
    "convolution": (convolution(), "register_tiles"),
    "1x1 convolution": (convolution(edge=1), "register_tiles"),
    "strided convolution": (convolution(size=17, stride=2), "register_tiles"),
    "depthwise": (depthwise(), "register_tiles"),
    # no kernel of a model: the pass `limit_fusion` begins another one with the product
    "gate": (gate(), "row_reductions"),
    "product": (product(), "register_tiles"),
    "product of one row": (product(rows=1), "register_tiles"),
    "softmax": (rows("softmax", 6, 7, 64), "row_reductions"),
    "softmax of odd rows": (rows("softmax", 6, 7, 5), "row_reductions"),
    "sum": (rows("sum", 9, 64), "row_reductions"),
    "largest": (rows("max", 9, 33), "row_reductions"),
    "mean": (rows("mean", 3, 3, 128), "row_reductions"),
    "mean of columns": (columns(5, 12, 19), "register_tiles"),
    "mean of channels": (columns(3, 12, 7, 7), "register_tiles"),
    "mean of volumes": (columns(3, 12, 5, 3, 3), "register_tiles"),
    "mean of all rows": (columns(1, 12, 6, 5, 3, 3), "register_tiles"),
    "norm": (norm(), "row_reductions"),
    "elementwise": (elementwise(5, 6, 48), "elementwise"),
    "odd elements": (elementwise(5, 7), "elementwise"),
    "transposed": (transposed(), "elementwise"),
}


def cpu_model(target: dict[str, Any]) -> CpuModel:
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    return cpu


def results(mod: tvm.IRModule, target: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the output of a kernel for arguments that are always the same."""
    library = build_kernels(mod, tvm.target.Target(target))
    arguments = make_arguments(mod)
    library["main"](*arguments)
    output: np.ndarray[Any, Any] = arguments[-1].numpy()
    return output


@pytest.mark.parametrize("mcpu", LEVELS)
@pytest.mark.parametrize("name", KERNELS)
def test_the_default_schedule_computes_the_same(name: str, mcpu: str) -> None:
    """The expected rule schedules it, for vectors of every length."""
    mod, rule = KERNELS[name]
    target = level(mcpu)
    choice = rules.choose_schedule(mod, cpu_model(target))
    assert choice is not None and choice.rule == rule
    np.testing.assert_allclose(
        results(choice.schedule.mod, target), results(mod, target), rtol=2e-5, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, (_, rule) in KERNELS.items() if rule == "register_tiles"]
)
def test_every_tile_computes_the_same(name: str) -> None:
    """Also tiles that do not divide a row."""
    mod, _ = KERNELS[name]
    target = host_level()
    expected = results(mod, target)
    choices = list(rules.generate_for_cpu(mod, cpu_model(target)))
    traces = {json.dumps(trace_json(choice.schedule.trace)) for choice in choices}
    # one vector of sums has one tile, and some kernels have two on CPUs with vectors of 256 bits
    assert len(traces) == len(choices) >= (1 if name == "mean of all rows" else 2)
    for choice in choices[:: max(1, len(choices) // 25)]:
        np.testing.assert_allclose(
            results(choice.schedule.mod, target), expected, rtol=2e-5, atol=1e-6
        )


@SLOWLY
@given(
    st.sampled_from([16, 32, 80]),
    st.sampled_from([16, 48, 64]),
    st.integers(3, 40),
    st.sampled_from([1, 2, 3, 5]),
    st.integers(1, 3),
)
def test_convolutions_of_any_size(
    channels: int, out: int, size: int, edge: int, stride: int
) -> None:
    """The channels fill vectors."""
    mod, target = convolution(channels, out, size + edge, edge, stride), host_level()
    choice = rules.choose_schedule(mod, cpu_model(target))
    assert choice is not None
    np.testing.assert_allclose(
        results(choice.schedule.mod, target), results(mod, target), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a_schedule_is_deterministic_and_its_trace_reproduces_it(name: str) -> None:
    """Records of such schedules work like those of a search."""
    mod, _ = KERNELS[name]
    cpu = cpu_model(host_level())
    one, two = rules.choose_schedule(mod, cpu), rules.choose_schedule(mod, cpu)
    assert one is not None and two is not None
    trace = trace_json(one.schedule.trace)
    assert trace == trace_json(two.schedule.trace)
    tvm.ir.assert_structural_equal(apply_trace(mod, trace).mod, one.schedule.mod)


def test_the_order_of_schedules_does_not_depend_on_how_many_are_taken() -> None:
    """A resumed tuning continues where it stopped."""
    mod, _ = KERNELS["convolution"]
    cpu = cpu_model(host_level())
    some = [
        trace_json(c.schedule.trace) for c in itertools.islice(rules.generate_for_cpu(mod, cpu), 5)
    ]
    more = [
        trace_json(c.schedule.trace) for c in itertools.islice(rules.generate_for_cpu(mod, cpu), 9)
    ]
    assert more[:5] == some


@pytest.mark.parametrize(
    ("target", "lanes", "multiplication"),
    [
        ("x86_64-linux-gnu x86-64-v4", 16, "vfmadd.*zmm"),
        ("x86_64-linux-gnu x86-64-v3", 8, "vfmadd.*ymm"),
        ("x86_64-linux-gnu x86-64-v2", 4, "mulps.*xmm"),
        ("aarch64-linux-gnu cortex-a72", 4, r"fmla.*\.4s"),
        ("aarch64-linux-gnu neoverse-v1", 4, r"fmla.*\.4s"),
        ("armv7a-linux-gnueabihf cortex-a9 +neon", 4, "vmul.f32.*q"),
        ("riscv64-linux-gnu generic-rv64 +m +a +f +d +v", 4, r"vfmacc\.vf"),
    ],
)
def test_vectors_follow_the_target(target: str, lanes: int, multiplication: str) -> None:
    """The generated code multiplies vectors of the target's width, not of the build machine's."""
    mtriple, mcpu, *features = target.split()
    mapping = {"kind": "llvm", "mtriple": mtriple, "mcpu": mcpu, "mattr": features}
    cpu = cpu_model(mapping)
    assert cpu.lanes == lanes
    choice = rules.choose_schedule(convolution(), cpu)
    assert choice is not None and choice.rule == "register_tiles"
    library = tvm.compile(choice.schedule.mod, tvm.target.Target(mapping))
    assert re.search(multiplication, library.mod.inspect_source("asm"))


@pytest.mark.parametrize("depth", [48, 50])
def test_factors_that_lie_together_are_one_load_on_arm(depth: int) -> None:
    """Of a product whose sums have whole vectors of terms; of others, each factor is a load of its own."""
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    data = te.placeholder((32, depth), "float32", "data")
    weights = te.placeholder((2, depth, 16), "float32", "weights")
    choice = rules.choose_schedule(
        kernel(data, weights, blocked.dense(data, weights, 32)), cpu_model(mapping)
    )
    assert choice is not None and choice.rule == "register_tiles"
    target = tvm.target.Target(mapping)
    code = make_assembly(
        choice.schedule.mod["main"].with_attr("global_symbol", "dense"), target, is_plain_c=True
    )
    is_whole = depth % 4 == 0
    assert bool(re.search(r"fmla.*\.4s.*\.s\[3\]", code)) == is_whole
    assert bool(re.search(r"\bld(p|r|ur|1r)\s+(s\d|\{)", code)) != is_whole


def assembly_of(choice: rules.ScheduleChoice, mapping: dict[str, Any], symbol: str) -> str:
    """Return the code of a kernel that a rule has scheduled."""
    function = choice.schedule.mod["main"].with_attr("global_symbol", symbol)
    return make_assembly(function, tvm.target.Target(mapping), is_plain_c=True)


def test_few_rounds_of_many_products_stay_a_loop_on_arm() -> None:
    """LLVM would unroll the four rounds of 56 products each, and spill what it loads early."""
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
    data = te.placeholder((14, 16), "float32", "data")
    weights = te.placeholder((8, 16, 16), "float32", "weights")
    choice = rules.choose_schedule(
        kernel(data, weights, blocked.dense(data, weights, 128)), cpu_model(mapping)
    )
    assert choice is not None and choice.rule == "register_tiles"
    code = assembly_of(choice, mapping, "dense")
    assert 0 < len(re.findall(r"fmla.*\.s\[3\]", code)) < 30
    assert "[sp" not in "".join(line for line in code.splitlines() if "q" in line)


@pytest.mark.parametrize(("count", "vectors"), [(49, 91), (197, 48), (30, 7), (6, 4), (196, 2)])
def test_tiles_of_products_stay_in_registers_with_avx2(count: int, vectors: int) -> None:
    """With smaller tiles for what is left of rows and vectors; LLVM spilled accumulators where it tested them."""
    mapping = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}
    data = te.placeholder((count, 100), "float32", "data")
    weights = te.placeholder((vectors, 100, 8), "float32", "weights")
    choice = rules.choose_schedule(
        kernel(data, weights, blocked.dense(data, weights, 8 * vectors)), cpu_model(mapping)
    )
    assert choice is not None and choice.rule == "register_tiles"
    code = assembly_of(choice, mapping, "dense")
    assert len(re.findall(r"vfmadd.*ymm", code)) >= 8
    assert not [line for line in code.splitlines() if "ymm" in line and "rsp" in line]


@pytest.mark.parametrize(("size", "is_copied"), [(64, True), (63, False), (32, False)])
def test_data_whose_channels_evict_each_other_are_copied(size: int, is_copied: bool) -> None:
    """A 1x1 convolution of 256 channels: 64 x 64 pixels share a few sets of the cache, others do not."""
    mod = convolution(channels=256, out=256, size=size, edge=1)
    choice = rules.choose_schedule(mod, cpu_model(level("x86-64-v4")))
    assert choice is not None and choice.rule == "register_tiles"
    assert ("CacheRead" in json.dumps(trace_json(choice.schedule.trace))) == is_copied
    np.testing.assert_allclose(
        results(choice.schedule.mod, host_level()),
        results(mod, host_level()),
        rtol=2e-5,
        atol=1e-4,
    )


@pytest.mark.parametrize("columns", [257, 97])
def test_rows_that_end_within_a_vector_stay_in_registers_with_avx512(columns: int) -> None:
    """LLVM kept accumulators in memory where each element of the result was stored with a condition."""
    mapping = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    vectors = -(-columns // 16)
    data = te.placeholder((49, 100), "float32", "data")
    weights = te.placeholder((vectors, 100, 16), "float32", "weights")
    product = blocked.dense(data, weights, 16 * vectors)
    unpadded = te.compute((49, columns), lambda i, j: product[i, j], name="unpadded")
    choice = rules.choose_schedule(kernel(data, weights, unpadded), cpu_model(mapping))
    assert choice is not None and choice.rule == "register_tiles"
    code = assembly_of(choice, mapping, "dense")
    assert len(re.findall(r"vfmadd.*zmm", code)) >= 8
    assert not [line for line in code.splitlines() if "zmm" in line and "rsp" in line]


def list_prefetched(choice: rules.ScheduleChoice, mapping: dict[str, Any]) -> list[int]:
    """Return the indices that all iterations of a kernel prefetch."""
    passes = CPU_PASSES[: CPU_PASSES.index(prefetch_weights) + 1]
    target = tvm.target.Target(mapping)
    with target:
        mod = tvm.tirx.transform.BindTarget(target)(choice.schedule.mod)
        main = tvm.transform.Sequential([make() for make in passes])(mod)["main"]
    calls = find_nodes(main.body, tvm.ir.Call)
    addresses = [call.args[0] for call in calls if operator_name(call) == "tirx.prefetch"]
    serial = (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)
    loops = [loop for loop in find_nodes(main.body, tirx.For) if loop.kind in serial]
    indices = []
    for values in itertools.product(*(range(int(loop.extent)) for loop in reversed(loops))):
        pairs = zip(reversed(loops), values, strict=True)
        known = {loop.loop_var: tirx.const(value, "int32") for loop, value in pairs}
        for address in addresses:
            (index,) = address.args[0].indices
            indices.append(int(tvm.sym.Analyzer().simplify(replace_variables(index, known))))
    return indices


@pytest.mark.parametrize(("count", "vectors"), [(8, 12), (24, 8), (30, 8)])
def test_tiles_prefetch_all_weights_but_those_of_the_first_one(count: int, vectors: int) -> None:
    """The tiles that share some weights prefetch each cache line of the next ones."""
    mapping = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    data = te.placeholder((count, 20), "float32", "data")
    weights = te.placeholder((vectors, 20, 16), "float32", "weights")
    choice = rules.choose_schedule(
        kernel(data, weights, blocked.dense(data, weights, 16 * vectors)), cpu_model(mapping)
    )
    assert choice is not None and choice.rule == "register_tiles"
    prefetched = list_prefetched(choice, mapping)
    first, lines = min(prefetched) // 16, {index // 16 for index in prefetched}
    assert first % 20 == 0 and first <= 8 * 20
    assert lines >= set(range(first, vectors * 20))


@pytest.mark.parametrize(
    ("count", "depth", "vectors", "blocks"),
    [
        (512, 768, 48, 4),
        (128, 768, 48, 1),
        # 43 tiles have no blocks that are worth reading the weights again
        (172, 768, 48, 1),
    ],
)
def test_blocks_of_data_stay_in_the_cache_while_weights_pass(
    count: int, depth: int, vectors: int, blocks: int
) -> None:
    """Each block of data is multiplied with all weights before the next one."""
    mapping = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    data = te.placeholder((count, depth), "float32", "data")
    weights = te.placeholder((vectors, depth, 16), "float32", "weights")
    choice = rules.choose_schedule(
        kernel(data, weights, blocked.dense(data, weights, 16 * vectors)), cpu_model(mapping)
    )
    assert choice is not None and choice.rule == "register_tiles"
    (loop,) = (
        loop
        for loop in find_nodes(choice.schedule.mod["main"].body, tirx.For)
        if loop.kind == tirx.ForKind.PARALLEL
    )
    # tiles have four vectors
    assert int(loop.extent) == int(loop.annotations[PREFETCH_HINT]) * blocks * vectors // 4


@pytest.mark.parametrize("mcpu", ["neoverse-n1", "cortex-a72"])
@pytest.mark.parametrize(("size", "taps", "step"), [(32, 5, 1), (32, 5, 2), (56, 3, 2), (16, 7, 1)])
def test_windows_of_depthwise_convolutions_stay_in_registers_on_arm(
    mcpu: str, size: int, taps: int, step: int
) -> None:
    """The rows of a tile read the data of a row of kernel positions together, beside their accumulators."""
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu}
    data = te.placeholder((1, 4, size, size, 4), "float32", "data")
    weights = te.placeholder((4, taps, taps, 4), "float32", "weights")
    window = Window((step, step), (taps // 2,) * 4, (1, 1))
    result = blocked.depthwise_conv(data, weights, window)
    choice = rules.choose_schedule(kernel(data, weights, result), cpu_model(mapping))
    assert choice is not None and choice.rule == "register_tiles"
    code = assembly_of(choice, mapping, "depthwise")
    assert re.search(r"fmla.*\.4s", code)
    vectors = [line for line in code.splitlines() if re.search(r"\b(ld|st)[pru]+\s+q", line)]
    assert not [line for line in vectors if "[sp" in line]


def winograd_convolution(height: int, width: int, padding: int = 1) -> tvm.IRModule:
    geometry = Geometry(4, (1, 1, height, width), (0, padding, padding))
    size = (height + 2 - 2 * padding, width + 2 - 2 * padding)
    data = te.placeholder((1, 4, *size, 4), name="data")
    weights = te.placeholder((6, 6, 4, 1, 4, 4, 4), name="weights")
    return kernel(data, weights, winograd.conv(data, weights, geometry))


def test_windows_without_padding_have_no_zeros_to_copy_rows_into() -> None:
    """Whole tiles of an image that is not padded are all data."""
    mod = winograd_convolution(16, 20, padding=0)
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
    choice = rules.choose_schedule(mod, cpu_model(mapping))
    assert choice is not None
    assert "DecomposePadding" not in json.dumps(trace_json(choice.schedule.trace))


@pytest.mark.parametrize(
    "mod",
    [
        *(depthwise(size, stride) for size, stride in [(28, 1), (15, 2)]),
        convolution(16, 16, 11),
        winograd_convolution(13, 18),
    ],
)
def test_rows_are_copied_into_zeros_on_arm(mod: tvm.IRModule) -> None:
    """No condition chooses for each vector whether it is padding, and the numbers are those without a schedule."""
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
    choice = rules.choose_schedule(mod, cpu_model(mapping))
    assert choice is not None
    assert "DecomposePadding" in json.dumps(trace_json(choice.schedule.trace))
    np.testing.assert_allclose(
        results(choice.schedule.mod, host_level()),
        results(mod, host_level()),
        rtol=2e-5,
        atol=1e-4,
    )


def test_factors_of_few_channels_are_lanes_on_arm() -> None:
    """All taps of a row of a first layer are unrolled: their factors lie together, in vectors that begin anywhere."""
    mapping = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    data = te.placeholder((1, 1, 24, 24, 4), "float32", "data")
    weights = te.placeholder((4, 1, 7, 7, 3, 4), "float32", "weights")
    groups = Groups(inputs=3, outputs=16, lanes=3, block=4, number=1)
    result = blocked.conv(data, weights, Window((2, 2), (3,) * 4, (1, 1)), groups)
    choice = rules.choose_schedule(kernel(data, weights, result), cpu_model(mapping))
    assert choice is not None and choice.rule == "register_tiles"
    code = assembly_of(choice, mapping, "first")
    from_lanes = re.findall(r"fmla.*\.4s.*\.s\[\d\]", code)
    singles = re.findall(r"\bld(?:p|r|ur|1r)\s+(?:s\d|\{)", code)
    assert len(singles) * 20 < len(from_lanes)


def test_no_vector_has_an_unknown_length() -> None:
    """On RISC-V a padded image is filled lane by lane and by vectors: TVM's own vectorizer fails on it."""
    mapping: dict[str, Any] = {
        "kind": "llvm",
        "mtriple": "riscv64-linux-gnu",
        "mcpu": "generic-rv64",
        "mattr": ["+m", "+a", "+f", "+d", "+c", "+v"],
    }
    data = te.placeholder((1, 2, 14, 14, 4), "float32", "data")
    pooled = topi.nn.pool2d(data, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max", layout="NCHW4c")
    choice = rules.choose_schedule(kernel(data, pooled), cpu_model(mapping))
    assert choice is not None and choice.rule == "register_tiles"
    library = tvm.compile(choice.schedule.mod, tvm.target.Target(mapping))
    assert "vscale" not in library.mod.inspect_source("ll")
    assert "vle32.v" in library.mod.inspect_source("asm")


def test_a_target_without_rules_has_no_cpu_model() -> None:
    """Its kernels stay as they are, and are reported."""
    assert (
        CpuModel.from_target(
            {"kind": "llvm", "mtriple": "riscv64-linux-gnu", "mcpu": "generic-rv64"}
        )
        is None
    )
    mod = convolution()
    same, rule_names = rules.schedule_for_cpu(mod, None)
    assert rule_names == {"main": rules.NO_RULE}
    tvm.ir.assert_structural_equal(same, mod)


def test_integers_and_unusual_reductions() -> None:
    """Kernels that no rule was made for are still right."""
    mod, target = counted(), host_level()
    choice = rules.choose_schedule(mod, cpu_model(target))
    assert choice is not None
    assert (results(choice.schedule.mod, target) == results(mod, target)).all()
