"""Matrix multiplications with weights of 4 bits that come from memory, against the memory's bandwidth and ONNX Runtime.

    python benchmarks/quantization/block_quantized.py [--shape DEPTH COLUMNS ...] [--rows N ...] [--rounds N] [--threads N]

Each product is called with several weights in turn, more than caches hold. Per case: the library untuned, a loop that
only reads the same weights, on as many threads, and ONNX Runtime's `MatMulNBits`, called interleaved in one process; the
fastest call of each counts, because another process at work slows all down. `int8` cases may round data
(`accuracy_level` 4). GB/s count the integers without scales; `of reading` is the time of the loop, which
reads integers and scales, in that of the library.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

_parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
_parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("DEPTH", "COLUMNS"))
_parser.add_argument("--rows", type=int, nargs="+", default=[1])
_parser.add_argument("--rounds", type=int, default=30)
_parser.add_argument("--threads", type=int, default=2)
_parser.add_argument("--mcpu", help="an x86-64 level in place of this machine's CPU")
_arguments = _parser.parse_args()
os.environ |= {"TVM_NUM_THREADS": str(_arguments.threads), "TVM_BIND_THREADS": "0"}

import numpy as np  # noqa: E402  TVM reads the environment when it is loaded
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import tvm  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from tvm import relax  # noqa: E402
from tvm.script.ir_builder import tirx as T  # noqa: E402

from tvmflow.compiler import lowering  # noqa: E402
from tvmflow.compiler.code_generation import build_kernels, compile_model  # noqa: E402
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions  # noqa: E402
from tvmflow.compiler.tir_kernels.definitions import declare_buffer, define_kernel  # noqa: E402
from tvmflow.frontends import FRONTENDS  # noqa: E402
from tvmflow.targets.host import read_host  # noqa: E402
from tvmflow.targets.llvm_query import query_target  # noqa: E402
from tvmflow.targets.resolve import resolve  # noqa: E402
from tvmflow.targets.tvm_target import make_target  # noqa: E402

_SHAPES: Final = [[4096, 4096], [4096, 11008]]
_WEIGHT_BYTES: Final = 96 << 20
"""So many bytes of integers no cache holds."""
_LANES: Final = 16


class Case(NamedTuple):
    """A product: its shape, the weights that share a scale, and whether data may be rounded."""

    rows: int
    depth: int
    columns: int
    block: int
    level: int


def make_model(case: Case, seed: int) -> onnx.ModelProto:
    """Return a product with random weights."""
    random = np.random.default_rng(seed)
    groups = case.depth // case.block
    packed = random.integers(0, 256, (case.columns, groups, case.block // 2)).astype(np.uint8)
    scales = random.uniform(0.5, 1.5, case.columns * groups).astype(np.float32) / 100
    attributes = {"K": case.depth, "N": case.columns, "bits": 4, "block_size": case.block}
    attributes["accuracy_level"] = case.level
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes
    )
    data, result = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [case.rows, size])
        for name, size in (("x", case.depth), ("y", case.columns))
    )
    weights = [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(scales, "s")]
    graph = helper.make_graph([node], "g", [data], [result], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets)
    made.ir_version = 10
    return made


def read_target() -> dict[str, Any]:
    """Return the target of this machine, or of a level."""
    if _arguments.mcpu:
        return {"kind": "llvm", "mtriple": read_host().triple, "mcpu": _arguments.mcpu}
    return dict(resolve("host", None, None, read_host(), query_target(None)).tvm)


def build(
    models: Sequence[onnx.ModelProto], target: dict[str, Any]
) -> tuple[Callable[..., Any], list[list[Any]]]:
    """Return the function of a library, and the weights of each model."""
    loaded = []
    for made in models:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(made, str(path))
            model = FRONTENDS["onnx"].load({"model": path}, ())
            loaded.append((model.mod, {n: np.array(a) for n, a in model.params.items()}))
    made_target = make_target(target)
    lowered = lowering.lower(loaded[0][0], made_target, LoweringOptions())
    scheduled = lowered.schedule_untuned(loaded[0][1], target, SCHEDULES_VERSION).mod
    machine = relax.VirtualMachine(compile_model(scheduled, made_target), tvm.cpu())
    weights = [
        [tvm.runtime.tensor(array) for array in lowered.compute_weights(params)]
        for _, params in loaded
    ]
    return machine["main"], weights


def make_reader(words: int) -> tvm.tirx.PrimFunc:
    """Return a kernel that adds up words, one part on each thread."""
    parts, width = 4 * _arguments.threads, 4 * _LANES
    steps = words // (parts * width)
    with define_kernel("read") as builder:
        data = T.buffer_proxy(T.arg("data", declare_buffer((words,), "int32")))
        out = T.buffer_proxy(T.arg("out", declare_buffer((parts, width), "int32")))
        with T.parallel(parts) as part:
            sums = T.buffer_proxy(T.alloc_buffer((width,), "int32", scope="local"))
            for first in range(0, width, _LANES):
                with T.vectorized(_LANES) as lane:
                    sums[first + lane] = T.int32(0)
            with T.serial(steps) as step:
                for first in range(0, width, _LANES):
                    with T.vectorized(_LANES) as lane:
                        word = data[(part * steps + step) * width + first + lane]
                        sums[first + lane] = sums[first + lane] + word
            for first in range(0, width, _LANES):
                with T.vectorized(_LANES) as lane:
                    out[part, first + lane] = sums[first + lane]
    return builder.get().with_attr("global_symbol", "read")


def make_read(weights: Sequence[Any], target: dict[str, Any]) -> Callable[[Sequence[Any]], None]:
    """Return a function that reads weights like these."""
    out = tvm.runtime.tensor(np.zeros((4 * _arguments.threads, 4 * _LANES), np.int32))
    made = tvm.target.Target(target)
    sizes = {math.prod(array.shape) for array in weights}
    readers = {
        n: build_kernels(tvm.IRModule({"read": make_reader(n)}), made)["read"] for n in sizes
    }

    def read(arrays: Sequence[Any]) -> None:
        for array in arrays:
            readers[array.shape[0]](array, out)

    return read


def measure(case: Case) -> None:
    """Build a case, call all interleaved, and print a row."""
    target = read_target()
    count = math.ceil(_WEIGHT_BYTES / (case.depth * case.columns / 2))
    models = [make_model(case, seed) for seed in range(count)]
    function, weights = build(models, target)
    flat = [
        [tvm.runtime.tensor(array.numpy().reshape(-1).view(np.int32)) for array in own]
        for own in weights
    ]
    read = make_read(weights[0], target)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _arguments.threads
    sessions = [
        onnxruntime.InferenceSession(
            made.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for made in models
    ]
    data = np.random.default_rng(1).standard_normal((case.rows, case.depth)).astype(np.float32)
    tensor = tvm.runtime.tensor(data)
    calls: dict[str, Callable[[int], Any]] = {
        "tvmflow": lambda place: function(tensor, *weights[place]),
        "read": lambda place: read(flat[place]),
        "ort": lambda place: sessions[place].run(None, {"x": data})[0],
    }
    own, other = calls["tvmflow"](0).numpy(), calls["ort"](0)
    differs = float(np.abs(own - other).max() / np.abs(other).max())
    best = dict.fromkeys(calls, math.inf)
    for _ in range(_arguments.rounds):
        for name, call in calls.items():
            for place in range(count):
                begin = time.perf_counter()
                call(place)
                best[name] = min(best[name], time.perf_counter() - begin)
    integers = case.depth * case.columns / 2
    kind = "int8" if case.level else "float32"
    print(
        f"| {case.rows} | {case.depth}×{case.columns} | {case.block} | {kind} "
        f"| {1e6 * best['tvmflow']:.0f} | {integers / best['tvmflow'] / 1e9:.1f} "
        f"| {best['read'] / best['tvmflow']:.0%} | {1e6 * best['ort']:.0f} "
        f"| {best['tvmflow'] / best['ort']:.2f} | {differs:.1e} |",
        flush=True,
    )


if __name__ == "__main__":
    print(
        "| rows | product | block | data | µs | GB/s | of reading | ORT, µs | relative | differs |"
    )
    print("|" + "---|" * 10)
    for rows in _arguments.rows:
        for depth, columns in _arguments.shape or _SHAPES:
            for block in (32, 128):
                for level in (0, 4):
                    measure(Case(rows, depth, columns, block, level))
