"""Every kernel knows the nodes that it came from, whatever the passes did to them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import tvm
from onnx import helper

from tests.support.kernels import FAST, PLAIN
from tests.support.tuning import conv, dense, model, relu, reshape
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends import FRONTENDS
from tvmflow.graph import ir
from tvmflow.graph.marks import KernelNodes
from tvmflow.stages.build import KernelCall, calls_text, find_kernel_nodes
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.workloads import extract_workloads

frontend = FRONTENDS["onnx"]

CPU = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}


def lower(mod: tvm.IRModule, options: LoweringOptions = FAST) -> lowering.LoweredModel:
    return lowering.lower(mod, make_target(CPU), options)


def operators(mod: tvm.IRModule, kernels: KernelNodes) -> dict[str, list[list[str]]]:
    """Return the operators that each call of each kernel came from."""
    names = [ir.operator_name(b.value).split(".")[-1] for b in ir.list_bindings(mod["main"].body)]
    return {
        kernel: [[names[place] for place in places] for places in calls]
        for kernel, calls in kernels.items()
    }


@pytest.mark.parametrize("options", [PLAIN, FAST], ids=["plain", "fast"])
def test_every_kernel_that_computes_has_nodes(options: LoweringOptions) -> None:
    """Blocked layouts, packed weights and fusion included."""
    mod = model(conv(16), relu, conv(16), relu, reshape(1, 16 * 36), dense(8), shape=(1, 16, 6, 6))
    lowered = lower(mod, options)
    kernels = operators(mod, lowered.kernel_nodes)
    computing = [w for w in extract_workloads(lowered.mod) if w.flops]
    assert computing
    for workload in computing:
        for name in workload.names:
            assert all(kernels[name])
    convolutions = [calls for name, calls in kernels.items() if "conv" in name]
    assert ["conv2d", "relu"] in [call for calls in convolutions for call in calls]


def test_a_kernel_that_several_nodes_share_lists_all_of_them() -> None:
    """Equal layers are one function after fusion: each call keeps its own nodes."""
    mod = model(conv(16), relu, conv(16), relu, conv(16), relu, shape=(1, 16, 6, 6))
    lowered = lower(mod)
    shared = [calls for name, calls in lowered.kernel_nodes.items() if "conv2d" in name]
    places = [place for calls in shared for call in calls for place in call]
    assert sorted(places) == list(range(6))
    assert max(map(len, shared)) > 1


def test_tracking_changes_no_kernel() -> None:
    """The keys of workloads are the same whatever nodes they came from, and however often a model is lowered."""
    mod = model(conv(16), relu, shape=(1, 16, 6, 6))
    first, again = lower(mod), lower(mod)
    longer = lower(model(relu, conv(16), relu, shape=(1, 16, 6, 6)))
    tvm.ir.assert_structural_equal(first.mod, again.mod)
    assert first.kernel_nodes == again.kernel_nodes
    [convolution] = [w.key for w in extract_workloads(first.mod) if "conv" in w.names[0]]
    assert convolution in [w.key for w in extract_workloads(longer.mod)]


# ---------------------------------------------------------------- from the user's model


def write_model(folder: Path) -> Path:
    """Write two matrix products of one shape, the first with transposed weights, and an unnamed activation."""
    nodes = [
        helper.make_node("Gemm", ["x", "weight"], ["first"], "fc1", transB=1),
        helper.make_node("Relu", ["first"], ["activated"]),
        helper.make_node("MatMul", ["activated", "other"], ["y"], "fc2"),
    ]
    weights = [
        helper.make_tensor(name, onnx.TensorProto.FLOAT, (64, 64), [0.5] * 64 * 64)
        for name in ("weight", "other")
    ]
    sides = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (8, 64))] for name in "xy"
    ]
    graph = helper.make_graph(nodes, "two", *sides, weights)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_kernels_have_the_names_of_the_nodes(tmp_path: Path) -> None:
    """What is computed when the library is built, such as transposed weights, belongs to what reads it."""
    loaded = frontend.load({"model": write_model(tmp_path)}, ())
    lowered = lower(loaded.mod)
    calls = find_kernel_nodes(lowered.kernel_nodes, loaded.nodes)
    nodes = {node for kernel in calls.values() for call in kernel for node in call.nodes}
    assert nodes == {"fc1", "Relu (activated)", "fc2"}
    computed = [
        call for kernel in operators(loaded.mod, lowered.kernel_nodes).values() for call in kernel
    ]
    assert any({"permute_dims", "matmul"} <= {*call} for call in computed)


def test_the_imported_module_says_nothing_of_names(tmp_path: Path) -> None:
    """Models that differ in the names of nodes alone share their kernels and their build."""
    path = write_model(tmp_path)
    first = frontend.load({"model": path}, ())
    renamed = onnx.load(path)
    for node in renamed.graph.node:
        node.name = f"renamed_{node.name}"
    onnx.save(renamed, path)
    second = frontend.load({"model": path}, ())
    assert tvm.ir.save_json(first.mod) == tvm.ir.save_json(second.mod)
    assert first.nodes != second.nodes


def test_the_text_of_a_shared_kernel() -> None:
    calls = (KernelCall(("Conv_1", "Relu_2")), KernelCall(("Conv_5", "Relu_6")))
    assert calls_text(calls) == "Conv_1, Relu_2 and 1 other call"
    assert calls_text(calls[:1]) == "Conv_1, Relu_2"
    assert calls_text(()) == ""
