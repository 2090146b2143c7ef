"""Small models to tune, and what the tuning tests run in processes of their own."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import relax

from tests.support.trials import DEVICE, TARGET
from tvmflow.compiler import lowering
from tvmflow.compiler.schedules.intrinsics import load_intrinsics
from tvmflow.core.codec import to_json
from tvmflow.recipe import Kernels, Tune, Verify
from tvmflow.stages.base import StageContext, lowering_options, parse_settings
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import make_target, split_threads, with_threads
from tvmflow.tuning.budget import Budget, BudgetRules, Task
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.measurer import MeasureContext
from tvmflow.tuning.tuning_job import SearchOptions, WorkClock
from tvmflow.tuning.workloads import Workload, extract_workloads

Emit = Callable[[dict[str, Any]], None]

TIMING = Timing(number=1, repeat=2, min_repeat_ms=1)


def resolved_target(unrunnable_reason: str = "") -> ResolvedTarget:
    return ResolvedTarget(
        name="cpu",
        tvm=split_threads(TARGET)[0],
        threads=2,
        features=(),
        device=DEVICE,
        unrunnable_reason=unrunnable_reason,
    )


PLAIN = Kernels(layout="plain", weights="plain", math="libm", schedules="none")


def recipe(kernels: Kernels = PLAIN, **tune: Any) -> Any:
    """Return the fields of a recipe that the tuning stages read; its kernels have no schedule before they are tuned."""
    values = {
        "trials": 6,
        "cost_model": "random",
        "number": 1,
        "repeat": 2,
        "min_repeat_ms": 1,
        "trial_timeout_s": 20.0,
        "finalists": 2,
        **tune,
    }
    return SimpleNamespace(
        checks=True,
        list_dimensions=tuple,
        tune=Tune(**values),
        kernels=kernels,
        outputs=("bundle",),
        runtime="c",
        verify=Verify(),
    )


def model(*layers: Callable[[Any, Any], Any], shape: tuple[int, ...] = (16, 16)) -> tvm.IRModule:
    """Return a model that applies the layers one after another; each is called with a value and a function for weights."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType(shape, "float32"))
    weights: list[Any] = []

    def weight(shape: tuple[int, ...]) -> Any:
        weights.append(relax.Var(f"w{len(weights)}", relax.TensorType(shape, "float32")))
        return weights[-1]

    with builder.function("main"):
        with builder.dataflow():
            value: Any = data
            for layer in layers:
                value = builder.emit(layer(value, weight))
            value = builder.emit_output(value)
        builder.emit_func_output(value, [data, *weights])
    return _with_inputs(builder.get())


def _with_inputs(mod: tvm.IRModule) -> tvm.IRModule:
    mod["main"] = mod["main"].with_attr("num_input", 1)
    return mod


def conv(out: int, kernel: int = 3, stride: int = 1) -> Callable[[Any, Any], Any]:
    """Return a layer that convolves its input to `out` channels."""

    def layer(value: Any, weight: Any) -> Any:
        channels = int(value.ty.shape[1])
        return relax.op.nn.conv2d(
            value, weight((out, channels, kernel, kernel)), strides=stride, padding=kernel // 2
        )

    return layer


def dense(out: int) -> Callable[[Any, Any], Any]:
    """Return a layer that multiplies its input by a weight of `out` columns."""
    return lambda value, weight: relax.op.matmul(value, weight((int(value.ty.shape[-1]), out)))


def relu(value: Any, _: Any) -> Any:
    return relax.op.nn.relu(value)


def softmax(value: Any, _: Any) -> Any:
    return relax.op.nn.softmax(value)


def reshape(*shape: int) -> Callable[[Any, Any], Any]:
    return lambda value, _: relax.op.reshape(value, shape)


def lowered(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the model as the stages lower it, for the target of the tests."""
    return lowering.lower(mod, make_target(TARGET), lowering_options(recipe())).mod


def workloads(mod: tvm.IRModule) -> list[Workload]:
    return extract_workloads(lowered(mod))


# ---------------------------------------------------------------- searches


def task_of(mod: tvm.IRModule, index: int = 0) -> Task:
    """Return a tunable workload of a model; 0 is the heaviest."""
    return tasks_of(mod)[index]


def tasks_of(mod: tvm.IRModule) -> list[Task]:
    return [
        Task(workload.key, workload.names[0], workload.weight, workload.flops, workload.mod)
        for workload in workloads(mod)
        if not workload.untunable_reason
    ]


def options(trials: int, trials_per_task: int | None = None, **changes: Any) -> SearchOptions:
    return SearchOptions(
        rules=BudgetRules(trials, trials_per_task),
        seed=0,
        strategy="replay-trace",
        cost_model="random",
    )._replace(**changes)


def measure_context(folder: Path, threads: int = 2) -> MeasureContext:
    return MeasureContext(
        target=with_threads(TARGET, threads),
        rules_version=0,
        device=DEVICE,
        locks=folder / "locks",
        tvm="test",
        host={"model": "any"},
        log=folder / "trials.log",
        clock=WorkClock(),
        timing=TIMING,
        timeout_s=20.0,
    )


def open_ledger(folder: Path, threads: int = 2) -> Ledger:
    return Ledger.open(folder / "ledger", with_threads(TARGET, threads), "test", DEVICE)


# ---------------------------------------------------------------- run in other processes


def _spend_whole_budget() -> None:
    """Leave no workload out: what one may gain is measured, and on a busy machine that is anything."""
    Budget._is_worthwhile = lambda *_: True  # type: ignore[method-assign]


def run_stage(payload: Any, emit: Emit) -> dict[str, Any]:
    """Run a stage as a worker does: `name`, `settings`, `inputs` and `folder` are in the payload."""
    _spend_whole_budget()
    folder = Path(payload["folder"])
    for name in ("out", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    context = StageContext(
        inputs={name: Path(path) for name, path in payload["inputs"].items()},
        out=folder / "out",
        work=folder / "work",
        ledger=Path(payload["ledger"]),
        locks=Path(payload["ledger"]) / "locks",
        emit=emit,
    )
    stage = importlib.import_module(f"tvmflow.stages.{payload['name']}")
    facts: dict[str, Any] = to_json(
        stage.run(parse_settings(stage.run, payload["settings"]), context)
    )
    return facts


def tune_in_worker(payload: Any, emit: Emit) -> list[dict[str, Any]]:
    """Search for the tasks in the payload, on the ledger in its folder."""
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.tuning.search import Tuning

    _spend_whole_budget()
    folder = Path(payload["folder"])
    load_intrinsics(TARGET)
    chosen, threads = payload["options"], payload.get("threads", 2)
    with ForkServer.fork() as fork_server:
        tuning = Tuning(
            [Task(*task) for task in payload["tasks"]],
            SearchOptions(**{**chosen, "rules": BudgetRules(*chosen["rules"])}),
            measure_context(folder, threads)._replace(
                rules_version=payload.get("rules", 0), timeout_s=payload.get("timeout_s", 20.0)
            ),
            open_ledger(folder, threads),
            fork_server,
            emit,
        )
        result = tuning.run()
        near = {"starting_points": result.starting_points, "near_targets": result.near_targets}
        return [
            {**workload._asdict(), **near, "exhausted": workload.name in result.exhausted}
            for workload in result.workloads
        ]


def _main(argv: list[str]) -> None:
    """`python -m tests.support.tuning PAYLOAD`: a tuning that a test may kill."""
    print("ready", flush=True)
    tune_in_worker(json.loads(Path(argv[0]).read_text()), lambda event: print(event, flush=True))


if __name__ == "__main__":
    _main(sys.argv[1:])
