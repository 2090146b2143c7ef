"""Tuning against stock MetaSchedule: trials per minute, and the latency after equal time.

    python benchmarks/tuning.py [--model NAME ...] [--trials N] [--json FILE]
    python benchmarks/tuning.py --per-task N [--model NAME ...] [--json FILE]

For each model the peer (`tune_relax` with its defaults) tunes with the given budget; then ours has
the same seconds. Both get the same lowered kernels, target, seed, cost model and search strategy,
each in processes and a folder of its own. The two libraries are then timed in turns, beside the
untuned one.

With `--per-task` the peer has so many trials for each workload, and ours a tenth of its seconds, with
the layouts, schedules by rule and search spaces that a recipe has by default. The peer's candidates
are then built and timed in forked processes, as ours are: its own builder starts a process for each,
which on a slow machine takes longer than it allows for a build, so that every one counts as failed.

    squeezenet     SqueezeNet 1.1 from MXNet's Gluon zoo (needs the checkpoint: recipes/models/make_squeezenet.py)
    transformer    one encoder block: 64 tokens of 256 numbers, 4 heads
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SEED = 1
# kernels that start without a schedule, so that what is compared is the search
PLAIN = {"layout": "plain", "weights": "plain", "plain": [], "winograd": 0, "math": "libm"}
SHARE = 10
ROUNDS = 15


# ---------------------------------------------------------------- models


def load(model: str, folder: Path) -> Any:
    from tvmflow.frontends import FRONTENDS
    from tvmflow.values import TensorSpec

    if model == "squeezenet":
        prefix = ROOT / "recipes/models/squeezenet1.1"
        files = {
            "symbol": prefix.with_name(f"{prefix.name}-symbol.json"),
            "params": prefix.with_name(f"{prefix.name}-0000.params"),
        }
        return FRONTENDS["mxnet"].load(
            files, (TensorSpec("data", (1, 3, 224, 224), "float32"),), {}
        )
    path = folder / "transformer.onnx"
    path.write_bytes(transformer().SerializeToString())
    return FRONTENDS["onnx"].load({"model": path}, (), {})


def transformer(tokens: int = 64, width: int = 256, heads: int = 4) -> Any:
    """An encoder block as BERT has it: attention and a feed-forward part, each with a residual and a layer norm."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {}
    nodes: list[Any] = []

    def weight(name: str, *shape: int) -> str:
        weights[name] = (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    def node(operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def dense(x: str, name: str, rows: int, columns: int) -> str:
        product = node("MatMul", [x, weight(f"{name}_w", rows, columns)], f"{name}_p")
        return node("Add", [product, weight(f"{name}_b", columns)], name)

    def split(x: str, name: str, perm: list[int]) -> str:
        weights.setdefault("heads", np.array([1, tokens, heads, width // heads], np.int64))
        return node("Transpose", [node("Reshape", [x, "heads"], f"{name}_r")], name, perm=perm)

    def norm(x: str, name: str) -> str:
        operands = [x, weight(f"{name}_s", width), weight(f"{name}_o", width)]
        return node("LayerNormalization", operands, name, axis=-1)

    query = split(dense("x", "q", width, width), "qh", [0, 2, 1, 3])
    key = split(dense("x", "k", width, width), "kh", [0, 2, 3, 1])
    value = split(dense("x", "v", width, width), "vh", [0, 2, 1, 3])
    weights["scale"] = np.array(1 / np.sqrt(width // heads), np.float32)
    weights["merged"] = np.array([1, tokens, width], np.int64)
    scores = node("Mul", [node("MatMul", [query, key], "qk"), "scale"], "scaled")
    mixed = node("MatMul", [node("Softmax", [scores], "attention", axis=-1), value], "mixed")
    merged = node("Reshape", [node("Transpose", [mixed], "t", perm=[0, 2, 1, 3]), "merged"], "m")
    first = norm(node("Add", [dense(merged, "out", width, width), "x"], "res1"), "norm1")
    hidden = node("Relu", [dense(first, "up", width, 4 * width)], "hidden")
    norm(node("Add", [dense(hidden, "down", 4 * width, width), first], "res2"), "y")
    shape = [1, tokens, width]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---------------------------------------------------------------- in processes of their own


def target_here() -> dict[str, Any]:
    from tvmflow.targets.host import read_host
    from tvmflow.targets.resolve import query_in_worker, resolve

    host = read_host()
    (fact,) = query_in_worker([None])
    return dict(resolve("host", None, None, host, fact).tvm)


def tune_peer(model: str, folder: Path, trials: int, per_task: int) -> dict[str, Any]:
    """Stock MetaSchedule, as TVM's tutorials call it."""
    import tvm
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks, tune_relax

    from tvmflow.executors.nursery import Nursery
    from tvmflow.stages import _lowering

    target = tvm.target.Target(target_here())
    lowered = _lowering.lower(load(model, folder).mod, target, PLAIN)
    work = str(folder / "peer")
    with contextlib.ExitStack() as held:
        options: dict[str, Any] = {"max_trials_global": trials}
        if per_task:
            tasks = len(extract_tasks(lowered, target, {}))
            options = {"max_trials_global": per_task * tasks, "max_trials_per_task": per_task}
            nursery = held.enter_context(Nursery.fork())
            options["builder"], options["runner"] = in_forks(nursery, folder)
        started = time.monotonic()
        database = tune_relax(lowered, {}, target, work, seed=SEED, **options)
        seconds = time.monotonic() - started
    return {"trials": len(database.get_all_tuning_records()), "seconds": round(seconds, 1)}


def in_forks(nursery: Any, folder: Path) -> tuple[Any, Any]:
    """A builder and a runner for `tune_relax` that leave both to forked processes, timed as its own runner does."""
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.schedules.intrinsics import load_intrinsics
    from tvmflow.stages import _kernels
    from tvmflow.targets.host import read_host
    from tvmflow.tuning import bench, measure

    target, host = target_here(), read_host()
    device = {"kind": "cpu", "class": host.model}
    load_intrinsics(target)
    site = bench.Site(
        *(target, _kernels.NO_SCHEDULES, device, folder / "locks", "peer", {"cores": host.cores}),
        None,
    )
    place = bench.Bench(site, measure.Timing(3, 1, 100), 30.0, nursery)
    modules: dict[str, str] = {}

    def keep(mod: Any) -> str:
        # MetaSchedule removes the folder of what was built
        made = tempfile.mkdtemp(dir=folder)
        modules[f"{made}/module"] = tvm.ir.save_json(mod)
        return f"{made}/module"

    @derived_object
    class Builder(ms.builder.PyBuilder):  # type: ignore[misc]
        def build(self, inputs: list[Any]) -> list[Any]:
            return [ms.builder.BuilderResult(keep(each.mod), None) for each in inputs]

    @derived_object
    class Done(ms.runner.PyRunnerFuture):  # type: ignore[misc]
        def __init__(self, trial: Any) -> None:
            super().__init__()
            self.trial = trial

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            failure = self.trial.failure
            return ms.runner.RunnerResult(
                None if failure else list(self.trial.run_secs), failure and failure.message
            )

    @derived_object
    class Runner(ms.runner.PyRunner):  # type: ignore[misc]
        def run(self, inputs: list[Any]) -> list[Any]:
            jobs = [
                bench.Job(path, modules.pop(path), None, None, SEED)
                for path in (str(each.artifact_path) for each in inputs)
            ]
            trials: dict[int, Any] = {}
            place.measure(jobs, trials.__setitem__)
            return [Done(trials[n]) for n in range(len(jobs))]

    return Builder(), Runner()


def ours_here(per_task: int) -> tuple[dict[str, Any], int]:
    """What a recipe says under `kernels`, and the version of the schedules by rule: none where only the search counts."""
    from tvmflow.recipe import Kernels
    from tvmflow.stages import _kernels

    if per_task:
        return Kernels().model_dump(mode="json"), _kernels.SCHEDULES
    return PLAIN, _kernels.NO_SCHEDULES


def tune_ours(model: str, folder: Path, seconds: float, per_task: int) -> dict[str, Any]:
    """Our search on an empty ledger, for as long."""
    from tvmflow import tools
    from tvmflow.executors.nursery import Nursery
    from tvmflow.schedules.intrinsics import load_intrinsics
    from tvmflow.stages import _lowering
    from tvmflow.targets.host import read_host
    from tvmflow.tuning import bench, measure, search
    from tvmflow.tuning.budget import Rules
    from tvmflow.tuning.ledger import Ledger
    from tvmflow.tuning.workloads import workloads_of

    target, host = target_here(), read_host()
    kernels, rules = ours_here(per_task)
    lowered = _lowering.lower(load(model, folder).mod, _lowering.make_target(target), kernels)
    tasks = [
        search.Task(each.key, each.names[0], each.weight, each.flops, each.mod)
        for each in workloads_of(lowered)
        if not each.reason
    ]
    device = {"kind": "cpu", "class": host.model}
    ledger = Ledger.open(folder / "ledger", target, tools.identity("apache-tvm"), device)
    options = search.Options(
        Rules(10**9), SEED, "evolutionary", "xgb", measure.Timing(0, 3, 40), 30.0, seconds
    )
    about = {"arch": host.arch, "model": host.model, "cores": host.cores}
    site = bench.Site(target, rules, device, folder / "locks", "benchmark", about, None)
    load_intrinsics(target)
    started = time.monotonic()
    with Nursery.fork() as nursery:
        result = search.tune(tasks, options, site, ledger, nursery, lambda _: None)
    took = time.monotonic() - started
    best = {
        task.key: ledger.workload(task.key).valid()[0].trace
        for task in tasks
        if ledger.workload(task.key).valid()
    }
    (folder / "ours.json").write_text(json.dumps([best, {task.key: task.mod for task in tasks}]))
    measured = sum(each.measured for each in result.tuned)
    return {"trials": measured, "seconds": round(took, 1), "workloads": len(tasks)}


def compare(model: str, folder: Path, per_task: int) -> dict[str, Any]:
    """Medians of calls of the untuned, the peer's and our library, in turns; also ours by rule alone, where there are rules."""
    import numpy as np
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule as ms

    from tvmflow import schedules
    from tvmflow.stages import _lowering
    from tvmflow.tuning.apply import apply_chosen

    loaded = load(model, folder)
    mapping = target_here()
    target = _lowering.make_target(mapping)
    lowered = _lowering.lower(loaded.mod, target, PLAIN)
    database = ms.database.JSONDatabase(work_dir=str(folder / "peer"))
    with target, database:
        peer = relax.transform.MetaScheduleApplyDatabase()(lowered)
    best, modules = json.loads((folder / "ours.json").read_text())
    kernels, rules = ours_here(per_task)
    machine = schedules.machine_of(mapping, rules)
    fast = _lowering.lower(loaded.mod, target, kernels)
    made = {
        "untuned": (lowered, PLAIN),
        "peer": (peer, PLAIN),
        "ours": (apply_chosen(fast, best, modules, target)[0], kernels),
        **({"by_rule": (fast, kernels)} if rules else {}),
    }
    spec = loaded.inputs[0]
    data = tvm.runtime.tensor(np.random.default_rng(0).random(spec.shape, dtype=np.float32))
    machines = {}
    for name, (mod, used) in made.items():
        whole, _ = schedules.schedule_rest(mod, None if used is PLAIN else machine)
        weights = _lowering.fold_weights(loaded.mod, loaded.params, target, used)
        library = _lowering.compile_with_weights(whole, weights, target)
        machines[name] = relax.VirtualMachine(library.jit(), tvm.cpu())
    times: dict[str, list[float]] = {name: [] for name in machines}
    for _ in range(ROUNDS):
        for name, machine in machines.items():
            machine["main"](data)
            started = time.perf_counter()
            machine["main"](data)
            times[name].append(time.perf_counter() - started)
    return {f"{name}_ms": round(statistics.median(t) * 1e3, 4) for name, t in times.items()}


def child(step: str, model: str, folder: str, amount: str, per_task: str) -> None:
    if step == "peer":
        found = tune_peer(model, Path(folder), int(amount), int(per_task))
    elif step == "ours":
        found = tune_ours(model, Path(folder), float(amount), int(per_task))
    else:
        found = compare(model, Path(folder), int(per_task))
    print(f"\n{json.dumps(found)}", flush=True)


def in_process(step: str, model: str, folder: Path, amount: float, per_task: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--child", step, model, str(folder)]
    words += [str(amount), str(per_task)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=("squeezenet", "transformer"))
    parser.add_argument("--trials", type=int, default=256, help="the peer's budget")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--per-task", type=int, default=0, metavar="N")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    results = {}
    for model in args.model or ("transformer", "squeezenet"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            per_task = args.per_task
            peer = in_process("peer", model, folder, args.trials, per_task)
            seconds = peer["seconds"] / (SHARE if per_task else 1)
            ours = in_process("ours", model, folder, seconds, per_task)
            latencies = in_process("compare", model, folder, 0, per_task)
            found = {"peer": peer, "ours": ours, **latencies}
        rates = [each["trials"] / each["seconds"] * 60 for each in (ours, peer)]
        found["trials_per_minute"] = [round(rate, 1) for rate in rates]
        found["rate_ratio"] = round(rates[0] / rates[1], 2)
        found["latency_ratio"] = round(found["peer_ms"] / found["ours_ms"], 3)
        results[model] = found
        print(model, json.dumps(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
