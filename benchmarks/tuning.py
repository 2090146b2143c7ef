"""Tuning compared with stock MetaSchedule: trials per minute, and latency after equal time.

    python benchmarks/tuning.py [--model NAME ...] [--trials N] [--json FILE]
    python benchmarks/tuning.py --per-task N [--model NAME ...] [--json FILE]

For each model, the peer (`tune_relax` with its defaults) tunes with the given budget; then tvmflow gets the same time.
Both get the same lowered kernels, target, seed, cost model and search strategy, in separate processes and folders. The
two libraries are then timed interleaved with the untuned library.

With `--per-task`, the peer has N trials for each workload, and tvmflow a tenth of the peer's seconds, with the default
layouts, schedule rules and search spaces of recipes. The peer's candidates are then built and timed in tvmflow's forked
processes: its own builder starts a process for each candidate, which on a slow machine exceeds its time limit for a
build, so that all candidates would fail.

    squeezenet     SqueezeNet 1.1, with random weights
    transformer    one encoder block: 64 tokens, width 256, 4 heads
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

from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions  # noqa: E402 - from this checkout

SEED = 1
# Kernels without schedules of rules, so that only the searches are compared.
PLAIN = LoweringOptions(layout="plain", weights="plain", winograd=0, math="libm")
# With --per-task, tvmflow gets the peer's seconds divided by this.
TIME_RATIO = 10
ROUNDS = 15


# ---------------------------------------------------------------- models


def load(model: str, folder: Path) -> Any:
    from _nets import NETS

    from tvmflow.frontends import FRONTENDS

    make = NETS["squeezenet"] if model == "squeezenet" else transformer
    path = folder / f"{model}.onnx"
    path.write_bytes(make().SerializeToString())
    return FRONTENDS["onnx"].load({"model": path}, ())


def transformer(tokens: int = 64, width: int = 256, heads: int = 4) -> Any:
    """Return a BERT encoder block: attention and feed-forward, each with residual and layer norm."""
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


# ---------------------------------------------------------------- steps, each in a process of its own


def host_target() -> dict[str, Any]:
    from tvmflow.targets.host import read_host
    from tvmflow.targets.llvm_query import TargetFacts, query_targets_in_process
    from tvmflow.targets.resolve import resolve
    from tvmflow.targets.tvm_target import with_threads

    host = read_host()
    (answer,) = query_targets_in_process([None])
    facts = TargetFacts.from_json(answer)
    resolved = resolve("host", None, None, host, facts)
    return with_threads(resolved.tvm, resolved.threads)


def tune_peer(model: str, folder: Path, trials: int, per_task: int) -> dict[str, Any]:
    """Tune with stock MetaSchedule, as in TVM's tutorials."""
    import tvm
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks, tune_relax

    from tvmflow.compiler import lowering
    from tvmflow.core.fork_server import ForkServer

    target = tvm.target.Target(host_target())
    lowered = lowering.lower(load(model, folder).mod, target, PLAIN).mod
    work = str(folder / "peer")
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"max_trials_global": trials}
        if per_task:
            tasks = len(extract_tasks(lowered, target, {}))
            options = {"max_trials_global": per_task * tasks, "max_trials_per_task": per_task}
            fork_server = stack.enter_context(ForkServer.fork())
            options["builder"], options["runner"] = forked_builder_and_runner(fork_server, folder)
        started = time.monotonic()
        database = tune_relax(lowered, {}, target, work, seed=SEED, **options)
        seconds = time.monotonic() - started
    return {"trials": len(database.get_all_tuning_records()), "seconds": round(seconds, 1)}


def forked_builder_and_runner(fork_server: Any, folder: Path) -> tuple[Any, Any]:
    """Return a builder and a runner for `tune_relax` that use tvmflow's forked processes."""
    modules: dict[str, str] = {}
    return make_builder(folder, modules), make_runner(local_measurer(fork_server, folder), modules)


def local_measurer(fork_server: Any, folder: Path) -> Any:
    from tvmflow.compiler.schedules.intrinsics import load_intrinsics
    from tvmflow.targets.host import read_host
    from tvmflow.tuning import measure, measurer
    from tvmflow.tuning.tuning_job import WorkClock

    target, host = host_target(), read_host()
    load_intrinsics(target)
    context = measurer.MeasureContext(
        target=target,
        rules_version=0,
        device={"kind": "cpu", "class": host.model},
        locks=folder / "locks",
        tvm="peer",
        host={"cores": host.cores},
        log=None,
        clock=WorkClock(),
        timing=measure.Timing(3, 1, 100),
        timeout_s=30.0,
    )
    return measurer.Measurer(context, fork_server)


def make_builder(folder: Path, modules: dict[str, str]) -> Any:
    """Return a builder that only saves modules; MetaSchedule passes their paths to the runner."""
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    def save(mod: Any) -> str:
        # A separate folder, because MetaSchedule removes the folder of a built kernel.
        path = f"{tempfile.mkdtemp(dir=folder)}/module"
        modules[path] = tvm.ir.save_json(mod)
        return path

    @derived_object
    class Builder(ms.builder.PyBuilder):  # type: ignore[misc]
        def build(self, inputs: list[Any]) -> list[Any]:
            return [ms.builder.BuilderResult(save(entry.mod), None) for entry in inputs]

    return Builder()


def make_runner(local_measurer: Any, modules: dict[str, str]) -> Any:
    """Return a runner that builds and times the saved modules with tvmflow's measurer."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.tuning import measurer

    @derived_object
    class FinishedTrial(ms.runner.PyRunnerFuture):  # type: ignore[misc]
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
                measurer.MeasureJob(path, modules.pop(path), None, None, SEED)
                for path in (str(entry.artifact_path) for entry in inputs)
            ]
            trials: dict[int, Any] = {}
            local_measurer.measure(jobs, trials.__setitem__)
            return [FinishedTrial(trials[index]) for index in range(len(jobs))]

    return Runner()


def tvmflow_lowering(per_task: int) -> tuple[LoweringOptions, int]:
    """Return the lowering options and the version of the schedule rules, or no rules without `per_task`."""
    if per_task:
        return LoweringOptions(), SCHEDULES_VERSION
    return PLAIN, 0


def tune_tvmflow(model: str, folder: Path, seconds: float, per_task: int) -> dict[str, Any]:
    """Tune with tvmflow on an empty ledger, for as long as the peer."""
    from tvmflow.compiler import lowering
    from tvmflow.compiler.schedules.intrinsics import load_intrinsics
    from tvmflow.core import packages
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.targets.host import read_host
    from tvmflow.targets.tvm_target import make_target
    from tvmflow.tuning import measure, measurer, search, tuning_job
    from tvmflow.tuning.budget import BudgetRules
    from tvmflow.tuning.ledger import Ledger
    from tvmflow.tuning.tuning_job import WorkClock
    from tvmflow.tuning.workloads import extract_workloads

    target, host = host_target(), read_host()
    kernels, rules = tvmflow_lowering(per_task)
    lowered = lowering.lower(load(model, folder).mod, make_target(target), kernels).mod
    tasks = [
        tuning_job.Task(entry.key, entry.names[0], entry.weight, entry.flops, entry.mod)
        for entry in extract_workloads(lowered)
        if not entry.untunable_reason
    ]
    device = {"kind": "cpu", "class": host.model}
    ledger = Ledger.open(folder / "ledger", target, packages.identity("apache-tvm"), device)
    options = tuning_job.SearchOptions(
        BudgetRules(10**9, minutes=seconds / 60),
        SEED,
        "evolutionary",
        "xgb",
    )
    context = measurer.MeasureContext(
        target=target,
        rules_version=rules,
        device=device,
        locks=folder / "locks",
        tvm="benchmark",
        host={"arch": host.arch, "model": host.model, "cores": host.cores},
        log=None,
        clock=WorkClock(),
        timing=measure.Timing(0, 3, 40),
        timeout_s=30.0,
    )
    load_intrinsics(target)
    started = time.monotonic()
    with ForkServer.fork() as fork_server:
        result = search.Tuning(tasks, options, context, ledger, fork_server, lambda _: None).run()
    elapsed = time.monotonic() - started
    best = {
        task.key: ledger.workload(task.key).valid()[0].trace
        for task in tasks
        if ledger.workload(task.key).valid()
    }
    (folder / "tvmflow.json").write_text(json.dumps([best, {task.key: task.mod for task in tasks}]))
    measured = sum(entry.measured for entry in result.workloads)
    return {"trials": measured, "seconds": round(elapsed, 1), "workloads": len(tasks)}


def compare(model: str, folder: Path, per_task: int) -> dict[str, Any]:
    """Return interleaved median latencies: untuned, the peer's, tvmflow's, and with only schedule rules."""
    import numpy as np
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule as ms

    from tvmflow.compiler import lowering
    from tvmflow.compiler.contraction.machine import cpu_model_for
    from tvmflow.compiler.schedules.rules import schedule_for_cpu
    from tvmflow.targets.tvm_target import make_target
    from tvmflow.tuning.measure import apply_chosen

    loaded = load(model, folder)
    mapping = host_target()
    target = make_target(mapping)
    plain = lowering.lower(loaded.mod, target, PLAIN)
    database = ms.database.JSONDatabase(work_dir=str(folder / "peer"))
    with target, database:
        peer = relax.transform.MetaScheduleApplyDatabase()(plain.mod)
    best, modules = json.loads((folder / "tvmflow.json").read_text())
    kernels, rules = tvmflow_lowering(per_task)
    cpu_model = cpu_model_for(mapping, rules)
    fast = lowering.lower(loaded.mod, target, kernels)
    libraries = {
        "untuned": (plain.mod, plain),
        "peer": (peer, plain),
        "tvmflow": (apply_chosen(fast.mod, best, modules, target)[0], fast),
        **({"untuned_with_rules": (fast.mod, fast)} if rules else {}),
    }
    spec = loaded.inputs[0]
    data = tvm.runtime.tensor(np.random.default_rng(0).random(spec.shape, dtype=np.float32))
    programs = {}
    for name, (mod, lowered) in libraries.items():
        library, _ = schedule_for_cpu(mod, None if lowered is plain else cpu_model)
        weights = lowered.compute_weights(loaded.params)
        library = lowering.ScheduledModel(library, weights, target).compile()
        programs[name] = relax.VirtualMachine(library.jit(), tvm.cpu())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            program["main"](data)
            started = time.perf_counter()
            program["main"](data)
            times[name].append(time.perf_counter() - started)
    return {f"{name}_ms": round(statistics.median(t) * 1e3, 4) for name, t in times.items()}


def run_child(step: str, model: str, folder: str, amount: str, per_task: str) -> None:
    if step == "peer":
        results = tune_peer(model, Path(folder), int(amount), int(per_task))
    elif step == "tvmflow":
        results = tune_tvmflow(model, Path(folder), float(amount), int(per_task))
    else:
        results = compare(model, Path(folder), int(per_task))
    print(f"\n{json.dumps(results)}", flush=True)


def run_step(step: str, model: str, folder: Path, amount: float, per_task: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", step, model, str(folder)]
    command += [str(amount), str(per_task)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.stderr[-3000:])
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


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
        run_child(*args.child)
        return
    results = {}
    for model in args.model or ("transformer", "squeezenet"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            per_task = args.per_task
            peer = run_step("peer", model, folder, args.trials, per_task)
            seconds = peer["seconds"] / (TIME_RATIO if per_task else 1)
            own = run_step("tvmflow", model, folder, seconds, per_task)
            latencies = run_step("compare", model, folder, 0, per_task)
            figures = {"peer": peer, "tvmflow": own, **latencies}
        rates = [entry["trials"] / entry["seconds"] * 60 for entry in (own, peer)]
        figures["trials_per_minute"] = [round(rate, 1) for rate in rates]
        figures["rate_ratio"] = round(rates[0] / rates[1], 2)
        figures["latency_ratio"] = round(figures["peer_ms"] / figures["tvmflow_ms"], 3)
        results[model] = figures
        print(model, json.dumps(figures), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
