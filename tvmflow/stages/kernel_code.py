"""The code of one kernel of a library, made once more as `build` made it, for `tvmflow show kernel`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json
from tvmflow.stages import build
from tvmflow.stages.base import parse_settings
from tvmflow.stages.extract_tasks import WORKLOADS
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.pick_best import CHOSEN
from tvmflow.targets.backends import backend_for

if TYPE_CHECKING:
    import tvm

CHOSEN_ROLE: Final = f"pick_best/{CHOSEN}"
"""The role of the chosen schedules for `build`."""


class KernelCode(NamedTuple):
    """The code of a kernel.

    Attributes:
        tir: The scheduled kernel as TVMScript.
        schedule: The instructions of its schedule as Python; empty where TVM keeps none.
        assembly: What the code generator made of it for the target; empty where it was not requested.
    """

    tir: str
    schedule: str
    assembly: str


def make_code(payload: dict[str, Json], _: Emit) -> Json:
    """Schedule a model once more, and return the code of a kernel: the entry point of a child.

    Args:
        payload: `settings` and `inputs` (paths) of `build`, `kernel`, `is_plain_c`, and
            `with_assembly`.

    Returns:
        The fields of a `KernelCode`.
    """
    builder = backend_for(payload["settings"]["target"]).call_builder
    return builder(_make_code_here, payload)


def _make_code_here(payload: Json) -> Json:
    """Return the fields of a `KernelCode`, in the process that the backend chose."""
    from tvmflow.compiler import assembly, lowering

    settings = parse_settings(build.run, payload["settings"])
    inputs = {name: Path(path) for name, path in payload["inputs"].items()}
    target = lowering.make_target(settings.target)
    lowered = lowering.LoweredModel.read(inputs[LOWERED_ROLE]).mod
    scheduled, _ = build.schedule_kernels(lowered, settings, inputs)
    name = payload["kernel"]
    kernel = scheduled[name].with_attr("global_symbol", name)
    is_plain_c = payload["is_plain_c"]
    code = KernelCode(
        tir=str(kernel.script()),
        schedule=_describe_schedule(lowered[name], settings, inputs),
        assembly=assembly.make_assembly(kernel, target, is_plain_c=is_plain_c)
        if payload["with_assembly"]
        else "",
    )
    return cast(Json, code._asdict())


def _describe_schedule(
    kernel: tvm.tirx.PrimFunc, settings: build.BuildSettings, inputs: Mapping[str, Path]
) -> str:
    """Return the instructions of the schedule that `build` gives a kernel, tuned or by a rule."""
    import tvm

    from tvmflow.compiler.cpu_model import cpu_model_for
    from tvmflow.compiler.schedules.rules import choose_schedule
    from tvmflow.tuning.measure import apply_trace
    from tvmflow.tuning.workloads import normalize, workload_key

    chosen = json.loads(inputs[CHOSEN_ROLE].read_text()) if CHOSEN_ROLE in inputs else {}
    key = workload_key(normalize(kernel)) if chosen else ""
    if key in chosen:
        workload = json.loads(inputs[f"extract_tasks/{WORKLOADS}"].read_text())[key]
        return _instructions(apply_trace(tvm.ir.load_json(workload), chosen[key]))
    cpu = cpu_model_for(settings.target, settings.schedules)
    if cpu is None or kernel.attrs.get("tirx.is_scheduled", False):
        return ""
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    choice = choose_schedule(mod, cpu)
    return _instructions(choice.schedule) if choice else ""


def _instructions(schedule: tvm.s_tir.Schedule) -> str:
    """Return what a schedule did, without the loops and blocks that it looked up for nothing."""
    return str(schedule.trace.simplified(remove_postproc=False))
