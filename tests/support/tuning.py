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
from tvmflow.recipe import Kernels, Tune
from tvmflow.schedules.intrinsics import load_intrinsics
from tvmflow.stages import _lowering
from tvmflow.stages._base import StageContext
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.tuning.bench import Site
from tvmflow.tuning.budget import Rules
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.search import Options, Task
from tvmflow.tuning.workloads import Workload, workloads_of

Emit = Callable[[dict[str, Any]], None]

TIMING = Timing(number=1, repeat=2, min_repeat_ms=1)


def resolved_target(why_not: str = "") -> ResolvedTarget:
    return ResolvedTarget(
        name="cpu", tvm=TARGET, cores=2, features=(), device=DEVICE, why_not=why_not
    )


PLAIN = Kernels(layout="plain", weights="plain", math="libm", schedules="none")


def recipe(kernels: Kernels = PLAIN, **tune: Any) -> Any:
    """As much of a recipe as the tuning stages look at; by default one whose kernels only tuning makes fast."""
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
    return SimpleNamespace(tune=Tune(**values), kernels=kernels)


def model(*layers: Callable[[Any, Any], Any], shape: tuple[int, ...] = (16, 16)) -> tvm.IRModule:
    """A model that applies the layers one after another; each is called with a block builder and a value."""
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
    """A convolution layer that keeps the input's channels apart from their number."""

    def layer(value: Any, weight: Any) -> Any:
        channels = int(value.ty.shape[1])
        return relax.op.nn.conv2d(
            value, weight((out, channels, kernel, kernel)), strides=stride, padding=kernel // 2
        )

    return layer


def dense(out: int) -> Callable[[Any, Any], Any]:
    """A matrix product with a weight of `out` columns."""
    return lambda value, weight: relax.op.matmul(value, weight((int(value.ty.shape[-1]), out)))


def relu(value: Any, _: Any) -> Any:
    return relax.op.nn.relu(value)


def softmax(value: Any, _: Any) -> Any:
    return relax.op.nn.softmax(value)


def reshape(*shape: int) -> Callable[[Any, Any], Any]:
    return lambda value, _: relax.op.reshape(value, shape)


def lowered(mod: tvm.IRModule) -> tvm.IRModule:
    """The model as the stages lower it, for the tests' target."""
    return _lowering.lower(mod, _lowering.make_target(TARGET), PLAIN.model_dump(mode="json"))


def workloads(mod: tvm.IRModule) -> list[Workload]:
    return workloads_of(lowered(mod))


# ---------------------------------------------------------------- searches


def task_of(mod: tvm.IRModule, index: int = 0) -> Task:
    """One tunable workload of a model, the heaviest first."""
    return tasks_of(mod)[index]


def tasks_of(mod: tvm.IRModule) -> list[Task]:
    return [
        Task(each.key, each.names[0], each.weight, each.flops, each.mod)
        for each in workloads(mod)
        if not each.reason
    ]


def options(trials: int, trials_per_task: int | None = None, **changes: Any) -> Options:
    return Options(
        rules=Rules(trials, trials_per_task),
        seed=0,
        strategy="replay-trace",
        cost_model="random",
        timing=TIMING,
        trial_timeout_s=20.0,
    )._replace(**changes)


def site(folder: Path) -> Site:
    return Site(
        target=TARGET,
        schedules=0,
        device=DEVICE,
        locks=folder / "locks",
        tvm="test",
        host={"model": "any"},
        log=folder / "trials.log",
    )


def open_ledger(folder: Path) -> Ledger:
    return Ledger.open(folder / "ledger", TARGET, "test", DEVICE)


# ---------------------------------------------------------------- run in other processes


def run_stage(payload: Any, emit: Emit) -> dict[str, Any]:
    """Run a stage as a worker does: `name`, `settings`, `inputs` and `folder` are in the payload."""
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
    return dict(stage.run(payload["settings"], context))


def tune_in_worker(payload: Any, emit: Emit) -> list[dict[str, Any]]:
    """Search for the tasks in the payload, on the ledger in its folder."""
    from tvmflow.executors.nursery import Nursery
    from tvmflow.tuning.search import tune

    folder = Path(payload["folder"])
    load_intrinsics(TARGET)
    chosen = payload["options"]
    with Nursery.fork() as nursery:
        result = tune(
            [Task(*task) for task in payload["tasks"]],
            Options(
                **{
                    **chosen,
                    "timing": Timing(*chosen["timing"]),
                    "rules": Rules(*chosen["rules"]),
                }
            ),
            site(folder),
            open_ledger(folder),
            nursery,
            emit,
        )
    return [tuned._asdict() for tuned in result.tuned]


def _main(argv: list[str]) -> None:
    """`python -m tests.support.tuning PAYLOAD`: a tuning that a test may kill."""
    print("ready", flush=True)
    tune_in_worker(json.loads(Path(argv[0]).read_text()), lambda event: print(event, flush=True))


if __name__ == "__main__":
    _main(sys.argv[1:])
