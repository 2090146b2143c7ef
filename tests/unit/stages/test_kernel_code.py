"""The code of one kernel is that which `build` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.s_tir import Schedule

from tests.support.tuning import dense, model, relu
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.options import SCHEDULES_VERSION, LoweringOptions
from tvmflow.compiler.schedules.rules import generate_for_cpu
from tvmflow.graph import ir
from tvmflow.stages import build
from tvmflow.stages.base import parse_settings
from tvmflow.stages.build import RankedTile, make_code
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.measure import trace_json
from tvmflow.tuning.trials import trial_id
from tvmflow.tuning.workloads import normalize, workload_key

# Its code is made, and runs nowhere.
TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2}
SETTINGS = {
    "target": TARGET,
    "schedules": SCHEDULES_VERSION,
    "runtime": "c",
    "forms": [],
}


class Build:
    """The inputs of `build` for a model, and the code of its kernels."""

    def __init__(self, folder: Path) -> None:
        mod = model(dense(32), relu, shape=(16, 64))
        self.inputs = {LOWERED_ROLE: folder / "lowered.json"}
        self.folder = folder
        model_for_target = lowering.lower(mod, make_target(TARGET), LoweringOptions())
        model_for_target.write(self.inputs[LOWERED_ROLE])
        self.lowered = model_for_target.mod
        self.kernel = next(name for name in ir.list_kernels(self.lowered) if "dense" in name)

    def choose(self, schedule: Schedule, workload: tvm.IRModule, key: str) -> None:
        """Have a search choose a schedule."""
        chosen = {"pick_best/chosen.json": {key: trace_json(schedule.trace)}}
        workloads = {"extract_tasks/workloads.json": {key: tvm.ir.save_json(workload)}}
        for role, value in {**chosen, **workloads}.items():
            self.inputs[role] = self.folder / Path(role).name
            self.inputs[role].write_text(json.dumps(value))

    def make(self, *, with_assembly: bool = False, with_candidates: bool = False) -> dict[str, Any]:
        """Return the code of the kernel of the dense layer."""
        payload = {
            "settings": SETTINGS,
            "inputs": {role: str(path) for role, path in self.inputs.items()},
            "kernel": self.kernel,
            "is_plain_c": True,
            "with_assembly": with_assembly,
            "with_candidates": with_candidates,
        }
        return dict(make_code(payload, lambda _: None))

    def built(self) -> str:
        """Return the kernel as `build` schedules it."""
        settings = parse_settings(build.run, SETTINGS)
        scheduled, _ = build.schedule_kernels(self.lowered, settings, self.inputs)
        return str(scheduled[self.kernel].with_attr("global_symbol", self.kernel).script())


@pytest.fixture
def library(tmp_path: Path) -> Build:
    return Build(tmp_path)


def apply(text: str, mod: tvm.IRModule) -> tvm.IRModule:
    """Return a kernel with the instructions of a schedule applied, as a reader of them would do it."""
    names: dict[str, Any] = {}
    exec(text, {"s_tir": tvm.s_tir}, names)
    schedule = Schedule(mod)
    names["apply_trace"](schedule)
    return schedule.mod


def test_the_schedule_of_a_rule_is_python(library: Build) -> None:
    """Its instructions give the kernel that is in the library."""
    code = library.make()
    assert code["tir"] == library.built() and code["assembly"] == ""
    mod = tvm.IRModule({"main": library.lowered[library.kernel].with_attr("global_symbol", "main")})
    body = apply(code["schedule"], mod)["main"].body
    settings = parse_settings(build.run, SETTINGS)
    scheduled, _ = build.schedule_kernels(library.lowered, settings, library.inputs)
    tvm.ir.assert_structural_equal(body, scheduled[library.kernel].body, map_free_vars=True)


def test_the_first_candidate_is_the_tile_of_the_rule(library: Build) -> None:
    """Its trial would be that of the schedule of the rule; others follow by their estimated speeds."""
    workload = normalize(library.lowered[library.kernel])
    cpu = CpuModel.from_target(TARGET)
    assert cpu is not None
    first = next(iter(generate_for_cpu(workload, cpu)))
    library.choose(first.schedule, workload, workload_key(workload))
    ranked = [RankedTile(*fields) for fields in library.make(with_candidates=True)["candidates"]]
    assert ranked[0].trial == trial_id(trace_json(first.schedule.trace))
    assert 1 < len(ranked) <= 5 and len({tile.trial for tile in ranked}) == len(ranked)
    assert all(0 < tile.speed <= 1 and "×" in tile.tile for tile in ranked)


def test_the_schedule_of_a_search_is_python(library: Build) -> None:
    """What was chosen is shown, not what the rule would have given."""
    by_rule = library.make()
    workload = normalize(library.lowered[library.kernel])
    key = workload_key(workload)
    cpu = CpuModel.from_target(TARGET)
    assert cpu is not None
    *_, last = generate_for_cpu(workload, cpu)
    library.choose(last.schedule, workload, key)
    code = library.make(with_assembly=True)
    assert code["tir"] == library.built() != by_rule["tir"]
    assert code["schedule"] != by_rule["schedule"]
    tvm.ir.assert_structural_equal(apply(code["schedule"], workload), last.schedule.mod)
    assert f"{library.kernel}:" in code["assembly"].splitlines() and "vfmadd" in code["assembly"]
