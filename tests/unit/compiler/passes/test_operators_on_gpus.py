"""Recurrent layers and selections of boxes on GPUs: their kernels have threads, and compute what those of CPUs do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import tirx

from tests.support.detectors import constants
from tests.support.kernels import FAST, LEVELS_HERE, host_level, level, outputs
from tests.support.mxnet_runs import Array, specs, write_checkpoint
from tests.support.onnx_models import load, model, value
from tests.unit.frontends.onnx.models import layer
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program import device_program
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes.nms import NmsRewriter
from tvmflow.compiler.passes.recurrent import RecurrentRewriter
from tvmflow.compiler.schedules import schedule_for_gpu
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.graph.rewriter import rewrite_main
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.tvm_target import make_target

_HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
_LIMITS = {"max_threads_per_block": 256, "max_shared_memory_per_block": 16384}
GPUS: dict[str, dict[str, Any]] = {
    "cuda": BACKENDS["cuda"].complete_target({"kind": "cuda", "arch": "sm_80", "host": _HOST}),
    "opencl": {"kind": "opencl", **_LIMITS, "host": _HOST},
    "webgpu": {"kind": "webgpu", "host": _HOST},
}
ENTRY_POINTS = {"cuda": "__global__", "opencl": "__kernel", "webgpu": "@compute"}

Made = tuple[LoadedModel, dict[str, Array]]


def recurrent(kind: str, **options: Any) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        made, feed = layer(kind, **options)
        return load(made, folder), feed

    return make


def selection(
    *, is_centered: bool = False, threshold: float | None = 0.1
) -> Callable[[Path], Made]:
    """Return ONNX's operator for several images and classes, with equal scores and more boxes than bits of a number."""

    def make(folder: Path) -> Made:
        weights = constants(limit=[30], overlap=[0.4])
        names = ["boxes", "scores", "limit", "overlap"]
        if threshold is not None:
            weights |= constants(threshold=[threshold])
            names.append("threshold")
        node = helper.make_node(
            "NonMaxSuppression", names, ["rows"], center_point_box=int(is_centered)
        )
        inputs = [value("boxes", [2, 70, 4]), value("scores", [2, 3, 70])]
        made = model([node], inputs, [value("rows", [None, 3], "int64")], weights)
        random = np.random.default_rng(0)
        boxes = np.abs(random.normal(size=(2, 70, 4))).astype("float32")
        scores = (np.round(random.normal(size=(2, 3, 70)) * 4) / 4).astype("float32")
        return load(made, folder), {"boxes": boxes, "scores": scores}

    return make


def detections(
    operator: str, *shapes: tuple[int, ...], **attributes: str
) -> Callable[[Path], Made]:
    """Return an operator of MXNet, with inputs between 0 and 1."""

    def make(folder: Path) -> Made:
        random = np.random.default_rng(1)
        feed = {
            f"input{index}": random.uniform(size=shape).astype("float32")
            for index, shape in enumerate(shapes)
        }
        if operator == "_contrib_box_nms":
            (rows,) = feed.values()
            rows[..., 0] = np.floor(rows[..., 0] * 3) - 1
        nodes: list[dict[str, Any]] = [{"op": "null", "name": name} for name in feed]
        inputs = list(range(len(feed)))
        nodes.append({"op": operator, "name": "it", "inputs": inputs, "attrs": attributes})
        files = write_checkpoint(folder, nodes, [[len(feed), 0, 0]], {})
        return FRONTENDS["mxnet"].load(files, specs(feed)), feed

    return make


MULTIBOX = ("_contrib_MultiBoxDetection", (2, 4, 50), (2, 200), (1, 50, 4))
BOXES = ("_contrib_box_nms", (2, 45, 6))
MODELS: dict[str, Callable[[Path], Made]] = {
    "lstm": recurrent("LSTM", hidden=20),
    "lstm_of_two_directions": recurrent(
        "LSTM", direction="bidirectional", hidden=7, batch=3, lengths=[2, 0, 4], peepholes=True
    ),
    "lstm_of_float16": recurrent("LSTM", hidden=5, dtype="float16"),
    "gru": recurrent("GRU", hidden=17, batch=2, layout=1),
    "gru_that_resets_products": recurrent("GRU", linear_before_reset=1, direction="reverse"),
    "rnn_of_two_activations": recurrent(
        "RNN", direction="bidirectional", activations=["Tanh", "Relu"], clip=0.3
    ),
    "non_max_suppression": selection(),
    "non_max_suppression_of_centers": selection(is_centered=True, threshold=None),
    "multibox_detection": detections(*MULTIBOX, nms_threshold="0.3"),
    "multibox_detection_of_a_few": detections(*MULTIBOX, nms_topk="9", force_suppress="True"),
    "multibox_detection_of_all": detections(*MULTIBOX, nms_threshold="-1"),
    "box_nms": detections(*BOXES, id_index="0", overlap_thresh="0.2"),
    "box_nms_of_a_few": detections(*BOXES, topk="12", in_format="center", valid_thresh="0.3"),
}


def run_threads_in_turn(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose kernels run the threads of each launch one after the other: none waits for another."""

    def serialize(loop: tirx.For) -> tirx.For:
        if loop.thread_binding is None:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    changed = ir.copy_module(mod)
    for var, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tirx.For, serialize))
            changed[var] = function.with_body(body)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_threads_compute_what_the_kernels_of_cpus_do(name: str, tmp_path: Path) -> None:
    """Without a GPU: a CPU runs the threads of each launch one after the other."""
    loaded, feed = MODELS[name](tmp_path)
    context = LoweringContext(make_target(GPUS["cuda"]), None, FAST)
    mod = rewrite_main(loaded.mod, RecurrentRewriter, context)
    mod = rewrite_main(mod, NmsRewriter, context)
    assert any(map(count_launches, mod.functions.values()))
    on_gpu = outputs(loaded._replace(mod=run_threads_in_turn(mod)), feed)
    tolerance = 2e-3 if "float16" in name else 1e-5
    for actual, expected in zip(on_gpu, outputs(loaded, feed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def count_launches(function: Any) -> int:
    """Return how many loops over the blocks of a GPU a kernel has; 0 for a function of the graph."""
    if not isinstance(function, tirx.PrimFunc):
        return 0
    tags = [
        str(loop.thread_binding.thread_tag)
        for loop in ir.find_nodes(function.body, tirx.For)
        if loop.thread_binding is not None
    ]
    tags += [
        str(node.node.thread_tag)
        for node in ir.find_nodes(function.body, tirx.AttrStmt)
        if node.attr_key == "thread_extent"
    ]
    return tags.count("blockIdx.x")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("lstm", "box_nms") for kind in GPUS),
        # WebGPU has no integers of 64 bits
        *(
            (name, kind)
            for name in ("non_max_suppression", "multibox_detection")
            for kind in ("cuda", "opencl")
        ),
    ],
)
def test_every_kernel_for_a_gpu_has_threads(name: str, kind: str, tmp_path: Path) -> None:
    """TVM generates code for each: that needs no GPU."""
    loaded, _ = MODELS[name](tmp_path)
    target = make_target(GPUS[kind])
    mod = schedule_for_gpu(lowering.lower(loaded.mod, target, FAST).mod, target).mod
    kernels = {
        str(var.name_hint): function
        for var, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc)
    }
    on_host = {key for key, kernel in kernels.items() if not device_program.has_threads(kernel)}
    # what takes one box after the other is faster on the host, which shares the memory of an OpenCL device
    expected = {name, "sort"} - {"lstm"} if kind == "opencl" else set()
    assert on_host == expected & kernels.keys()
    for key in on_host:
        del kernels[key]
    program = device_program.lower_device_kernels(kernels, target)
    assert program.kernels.keys() == kernels.keys()
    launches = [launch for kernel in program.kernels.values() for launch in kernel.launches]
    functions = {launch.function for launch in launches}
    generate = tvm.get_global_func(f"target.build.{kind}")
    source = generate(program.functions, target).inspect_source()
    assert source.count(ENTRY_POINTS[kind]) >= len(functions)
    assert all(f"{function}(" in source for function in functions)


def test_each_step_of_an_lstm_is_a_launch(tmp_path: Path) -> None:
    """It passes its number; the states are scratch memory after the tensors of the kernel."""
    loaded, _ = MODELS["lstm"](tmp_path)
    target = make_target(GPUS["opencl"])
    lowered = lowering.lower(loaded.mod, target, FAST).mod
    program = device_program.lower_device_kernels({"lstm": lowered["lstm"]}, target)
    lstm = program.kernels["lstm"]
    tensors = len(lowered["lstm"].params)
    assert lstm.scratch == (160, 80)
    assert [launch.scalars for launch in lstm.launches] == [
        (),
        *((device_program.Scalar("int32", step),) for step in range(4)),
        (),
    ]
    assert {launch.block for launch in lstm.launches} == {(20, 1, 1)}
    assert all({tensors, tensors + 1} & {*launch.arguments} for launch in lstm.launches)


def test_one_imported_model_is_lowered_for_several_targets(tmp_path: Path) -> None:
    """As `import` stores it: it has no kernels yet, and those of an LSTM get vectors of the lanes of each CPU."""
    loaded, feed = MODELS["lstm"](tmp_path)
    stored = tmp_path / "model.json"
    stored.write_text(tvm.ir.save_json(loaded.mod))
    mod = ir.load_module(stored)
    tvm.ir.assert_structural_equal(mod, loaded.mod)
    assert not [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    lanes = {}
    for mcpu in ("x86-64-v2", "x86-64-v3", "x86-64-v4"):
        target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 2}
        lowered = lowering.lower(mod, make_target(target), FAST).mod
        scheduled = schedules.schedule_untuned(lowered, target, 1).mod
        loops = ir.find_nodes(scheduled["lstm"].body, tirx.For)
        lanes[mcpu] = {int(loop.extent) for loop in loops if loop.kind == tirx.ForKind.VECTORIZED}
    assert lanes == {"x86-64-v2": {4}, "x86-64-v3": {8}, "x86-64-v4": {16}}
    assert np.isfinite(outputs(loaded._replace(mod=mod), feed, host_level())[0]).all()


def test_lanes_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are padded to the same number, and each sum has its terms in the same order."""
    loaded, feed = MODELS["lstm"](tmp_path)
    target = level(LEVELS_HERE[0])
    results = []
    for lanes in (4, 8, 16):
        monkeypatch.setattr(
            "tvmflow.compiler.passes.recurrent.RecurrentRewriter._choose_lanes",
            lambda *_, lanes=lanes: lanes,
        )
        results.append([array.tobytes() for array in outputs(loaded, feed, target)])
    assert results[0] == results[1] == results[2]
