"""Makes `traces.json`: what MetaSchedule and the schedule rules write, for the kernels of small models on each kind of target.

`python -m tests.unit.tuning.make_traces [TARGET …]` replaces the file, or those of some targets. Of traces that differ in nothing but numbers one is kept.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import tvm
from onnx import helper
from tvm import relax, te, topi
from tvm.s_tir import meta_schedule as ms

from tests.support import onnx_models, tuning
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.compiler.schedules.rules import generate_for_cpu
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.measure import trace_json
from tvmflow.tuning.search import make_space
from tvmflow.tuning.workloads import extract_workloads, normalize

FILE: Final = Path(__file__).with_name("traces.json")
_DRAWS: Final = 2
_RULE_SCHEDULES: Final = 12

TARGETS: Final[dict[str, dict[str, Json]]] = {
    "vnni": {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "sapphirerapids",
        "num-cores": 4,
    },
    "sse": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 2},
    "arm": {
        "kind": "llvm",
        "mtriple": "aarch64-linux-gnu",
        "mcpu": "neoverse-n2",
        "num-cores": 4,
    },
    "cuda": {
        "kind": "cuda",
        "arch": "sm_90",
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
        "registers_per_block": 65536,
    },
}


def _cast(dtype: str) -> Callable[[Any, Any], Any]:
    return lambda value, _: relax.op.astype(value, dtype)


def _product(dtype: str, out_dtype: str, columns: int = 64) -> Callable[[Any, Any], Any]:
    def layer(value: Any, weight: Any) -> Any:
        cast = relax.op.astype(weight((int(value.ty.shape[-1]), columns)), dtype)
        return relax.op.matmul(relax.op.astype(value, dtype), cast, out_dtype=out_dtype)

    return layer


def models() -> Iterator[tuple[str, tvm.IRModule, LoweringOptions]]:
    image = {"shape": (1, 16, 14, 14)}
    fast, plain = LoweringOptions(), LoweringOptions(layout="plain", weights="plain", math="libm")
    bfloat16 = LoweringOptions(precision="bfloat16")
    for kind, options in (("fast", fast), ("plain", plain), ("bfloat16", bfloat16)):
        layers = (tuning.conv(32), tuning.relu, tuning.conv(16, 1), tuning.conv(32, 3, 2))
        yield f"convolutions {kind}", tuning.model(*layers, **image), options
        products = (tuning.dense(64), tuning.relu, tuning.dense(32), tuning.softmax)
        yield f"products {kind}", tuning.model(*products, shape=(64, 128)), options
    pools = (
        lambda value, _: relax.op.nn.max_pool2d(value, (3, 3), (2, 2), (1, 1)),
        lambda value, _: relax.op.nn.adaptive_avg_pool2d(value, (1, 1)),
    )
    yield "pools", tuning.model(*pools, **image), plain
    yield "rows", tuning.model(tuning.softmax, shape=(4, 4096)), plain
    for dtype, out_dtype in (("float16", "float32"), ("int8", "int32"), ("float16", "float16")):
        mod = tuning.model(_product(dtype, out_dtype), _cast("float32"), shape=(64, 64))
        yield f"products {dtype} {out_dtype}", mod, plain


def _products_of_bytes(dtype: str) -> tvm.IRModule:
    """Return a product of bytes that the instructions of CPUs for dot products fit."""
    x = te.placeholder((32, 64), dtype, name="x")
    w = te.placeholder((4, 16, 16, 4), "int8", name="w")
    k, k4 = te.reduce_axis((0, 16), name="k"), te.reduce_axis((0, 4), name="k4")

    def product(i: Any, o: Any, j: Any) -> Any:
        terms = x[i, k * 4 + k4].astype("int32") * w[o, k, j, k4].astype("int32")
        return te.sum(terms, axis=[k, k4])

    return _kernel(x, w, te.compute((32, 4, 16), product, name="y"))


def _means() -> tvm.IRModule:
    """Return a mean whose axes are merged."""
    x = te.placeholder((3, 12, 7, 7), name="x")
    return _kernel(x, topi.divide(topi.sum(x, 1), te.const(12.0)))


def _kernel(*tensors: Any) -> tvm.IRModule:
    function = te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def _convolution_of_constants() -> tvm.IRModule:
    """Return a convolution whose weights are known, as `precision: bfloat16` needs it."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    data, result = onnx_models.value("x", (1, 32, 14, 14)), onnx_models.value("y", None)
    weights = {"w": onnx_models.draw(32, 32, 3, 3)}
    made = onnx_models.model([node], [data], [result], weights)
    with tempfile.TemporaryDirectory() as folder:
        feed = {"x": onnx_models.draw(1, 32, 14, 14)}
        return onnx_models.load(made, Path(folder), feed).mod


def kernels(target: dict[str, Json]) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yield the kernels of all models for a target, each with the model's name."""
    is_cpu = target["kind"] == "llvm"
    others = [("constants", _convolution_of_constants(), LoweringOptions(precision="bfloat16"))]
    for name, mod, options in [*models(), *(others if is_cpu else [])]:
        if options.precision == "bfloat16" and "x86-64-v2" in str(target):
            continue
        lowered = lowering.lower(mod, make_target(target), options).mod
        for workload in extract_workloads(lowered):
            if not workload.untunable_reason:
                yield name, tvm.ir.load_json(workload.mod)
    yield "means", normalize(_means()["main"])
    for dtype in ("uint8", "int8") if is_cpu else ():
        yield f"products of {dtype}", normalize(_products_of_bytes(dtype)["main"])


def traces(target: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    """Yield the traces of a target, each with its origin."""
    load_intrinsics(target)
    built = tvm.target.Target(dict(target))
    cpu = cpu_model_for(target, SCHEDULES_VERSION) if target["kind"] == "llvm" else None
    for name, kernel in kernels(target):
        for trace in _searched(kernel, built, backend_for(target).SEARCH_RULES):
            yield f"{name}: search", trace
        choices = generate_for_cpu(kernel, cpu) if cpu is not None else iter(())
        for choice in itertools.islice(choices, _RULE_SCHEDULES):
            yield f"{name}: {choice.rule}", trace_json(choice.schedule.trace)


def _searched(kernel: tvm.IRModule, target: Any, rules: str) -> Iterator[Json]:
    context = ms.TuneContext(
        kernel,
        target=target,
        space_generator=make_space(rules),
        search_strategy=ms.search_strategy.ReplayTrace(),
        rand_state=1,
        num_threads=1,
    )
    context.pre_tuning(
        max_trials=1 << 20,
        num_trials_per_iter=8,
        design_spaces=context.generate_design_space(),
        database=ms.database.MemoryDatabase(),
        cost_model=ms.cost_model.RandomModel(),
    )
    for _ in range(_DRAWS):
        for candidate in context.generate_measure_candidates() or []:
            yield trace_json(candidate.sch.trace)


def _outline(value: Json) -> Json:
    """Return an instruction without numbers and the names of its variables."""
    if isinstance(value, list):
        return [_outline(entry) for entry in value]
    if isinstance(value, str):
        return re.sub("[0-9]+", "0", value)
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def main() -> None:
    kept: dict[str, dict[str, Json]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or TARGETS:
        target = TARGETS[name]
        kept = {key: entry for key, entry in kept.items() if entry["target"] != name}
        seen: set[str] = set()
        for origin, trace in traces(target):
            # what one instruction looks like matters, not in which order they stand
            kinds = {json.dumps(_outline([i[0], i[1][1:], i[2]])) for i in trace[0]}
            if not kinds <= seen:
                seen |= kinds
                kept[f"{name}: {origin} {len(kept)}"] = {"target": name, "trace": trace}
        print(name, len(kept), flush=True)
        FILE.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
