"""Facts that another version or another machine recorded: read, or refused at one place, and nothing fails on them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.facts import (
    build_facts,
    extract_tasks_facts,
    import_facts,
    kernel_facts,
    pick_best_facts,
    profile,
    seconds,
    tune_facts,
    verify_facts,
    workload_facts,
)
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.errors import UsageError
from tvmflow.engine.builds import list_builds
from tvmflow.engine.kernel_details import list_kernel_rows, list_libraries
from tvmflow.engine.report import RunReport, StageReport, can_be_shown
from tvmflow.engine.stage_runs import has_wrong_outputs
from tvmflow.engine.summary import render
from tvmflow.pages.collect import list_kernels
from tvmflow.stages import STAGES
from tvmflow.stages.base import facts_type, find_facts
from tvmflow.stages.verify.verdict import Verdict

TENSOR = {"name": "x", "shape": [1, 3], "dtype": "float32"}
SPEEDUP = {"median": 2.0, "low": 1.9, "high": 2.1, "pairs": 9, "is_slower": False}
OUTPUT = {
    "passed": True,
    "rtol": 1e-3,
    "atol": 1e-4,
    "max_abs_error": 1e-6,
    "max_rel_error": 1e-5,
    "error_of_largest": 1e-6,
    "cosine_similarity": 1.0,
    "classes": 10,
    "reached": 3,
    "seen": True,
}
BANNED = {"name": "conv", "trial": "ab", "reason": "it is wrong", "when": "2024-01-01T00:00:00"}
TRANSFER = {"tensor": "y", "bytes": 12, "from": "a", "to": "b", "devices": ["cpu", "cuda"]}

FACTS: dict[str, dict[str, Any]] = {
    "import": import_facts(nodes=["a", "b"], inputs=[TENSOR], outputs=[TENSOR]),
    "choose": {
        "operators": 2,
        "measured": 4,
        "reused": 0,
        "chosen": [
            {
                "operator": "conv 1×8×8×8",
                "calls": 1,
                "rule": "direct",
                "choice": "Winograd with tiles of 4×4",
                "rule_us": 2.0,
                "us": 1.0,
                "is_kept": True,
            }
        ],
        "is_kept": True,
        "found": 1.2,
        "speedup": 1.2,
        "low": 1.1,
        "high": 1.3,
        "pairs": 8,
        "us": 10.0,
        "rule_us": 12.0,
        "reason": "",
    },
    "cut": import_facts(inputs=[{**TENSOR, "bounded_axis": 1}], outputs=[]),
    "quantize": import_facts(
        inputs=[TENSOR],
        outputs=[TENSOR],
        float_bytes=1600,
        samples=3,
        layers=[
            {"name": "conv", "operator": "conv2d", "weight_bits": 8, "data_bits": 8, "damage": 0.1},
            {
                "name": "fc",
                "operator": "matmul",
                "weight_bits": 32,
                "data_bits": 32,
                "reason": "quantize.skip",
            },
        ],
        error=0.02,
        float_accuracy=0.95,
        accuracy=0.94,
    ),
    "lower": {"kernels": 3, "vectors": {"bits": 256, "costs": {"256": 2.0, "512": 4.0}}},
    "extract_tasks": extract_tasks_facts(
        not_tunable={"sort": "it has a loop"},
        runtime="vm",
        needs_tvm_for="sort",
    ),
    "tune": tune_facts(
        workloads=[workload_facts("conv", seconds=2.0, at_roofline=True), workload_facts("dense")],
        threads=2,
        usable_cpus=1,
        cpus=2,
        starting_points=1,
        near_targets=["llvm"],
        banned=[BANNED],
    ),
    "pick_best": pick_best_facts(
        kernels=[kernel_facts("conv"), kernel_facts("dense", tuned_us=None)],
        errors={"pool": "it crashed"},
        threads=2,
        library={
            "overruled": {"the library is not faster": ["conv"]},
            "error": "",
            **{"pairs": 8, "speedup": 0.9, "low": 0.8, "high": 1.1},
        },
    ),
    "build": build_facts(
        schedule_rules={"tuned": ["conv"], "none": ["sort"]},
        unscheduled_shares={"sort": 0.5},
        kernel_nodes={"conv": [[0, 1]]},
    ),
    "export": {"files": {"net.so": 700}, "library_bytes": 700},
    "join": {"transfers": [TRANSFER]},
    "emulation_libc": {"bytes": 1},
    "emulation_program": {"compiled": "aarch64-linux-gnu", "bytes": 1},
    "verify": verify_facts(
        samples=3,
        reference="ONNX Runtime 1.31.1",
        tolerance={"for": "float32", "rtol": 1e-3, "atol": 1e-4, "rms": 0.1, "of_slice": 0.1},
        outputs={"y": OUTPUT},
        index_inputs={"z": OUTPUT},
        layers={"passed": True, "tensors": 1, "max_steps": 1, "differing": 0.1, "allowed_steps": 2},
        images={"x": {"passed": True, "against": "Pillow", "images": 3, "max_level_error": 1}},
        parts={"head": {"outputs": {"y": OUTPUT}, "latency": seconds(1e-3)}},
        latency={"library": seconds(1e-3), "reference": seconds(2e-3), "untuned": seconds(3e-3)},
        accuracy=0.5,
        reference_accuracy=0.5,
        speedup=SPEEDUP,
        profile={**profile(conv=0.5), "without_rule": {"conv": 0.5}, "rules": {"tuned": 0.5}},
        compared={
            "ort": {
                "name": "ORT",
                "latency": seconds(2e-3),
                "speedup": SPEEDUP,
                "outputs": {"y": OUTPUT},
            },
            "tvm": {"name": "TVM", "not_timed": "it is not installed"},
        },
        warnings=["the output is empty"],
    ),
}


def report(facts: dict[str, Any]) -> RunReport:
    stages = (StageReport(f"net:{name}/host", facts=own) for name, own in facts.items())
    return RunReport(tuple(stages))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in facts."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, child in inner if isinstance(value, (dict, list)) else ():
        yield (*path, name)
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, name))


def test_there_are_facts_of_every_stage() -> None:
    assert FACTS.keys() == STAGES.keys()


@pytest.mark.parametrize("stage", STAGES)
def test_facts_are_written_as_they_were_read(stage: str) -> None:
    """Every field that a stage records is one of its type, and may be shown."""
    kind = facts_type(STAGES[stage].run)
    value = from_json(kind, FACTS[stage])
    written = json.loads(json.dumps(to_json(value)))
    assert written.keys() >= FACTS[stage].keys()
    assert from_json(kind, written) == value
    assert can_be_shown(stage, FACTS[stage])
    (build,) = list_builds(report(FACTS))
    assert not any("INCOMPLETE" in warning for warning in build.warnings)


@pytest.mark.parametrize("path", list(places(FACTS)), ids=lambda path: "/".join(map(str, path)))
def test_nothing_fails_on_facts_that_are_damaged(path: tuple[Any, ...]) -> None:
    """Whatever is missing, of another type, or no number: they are shown, or it is said that they cannot be read."""
    values: tuple[Any, ...] = ("absent", None, [], {}, 0, -3, 3, "\x1b", math.nan, 1e308, 10**400)
    for value in values:
        facts = copy.deepcopy(FACTS)
        at: Any = facts
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
        if value == "absent":
            del at[path[-1]]
        if len(path) == 1 and not isinstance(value, dict):
            continue
        assert can_be_shown(path[0], facts.get(path[0], {})) in (True, False)
        damaged = report(facts)
        (build,) = list_builds(damaged)
        json.dumps(to_json(build))
        render(damaged, as_json=False, verbose=True)
        list_kernels(damaged.stages, None)
        with contextlib.suppress(UsageError):
            for library in list_libraries(damaged.stages, "tvmflow run net.yaml"):
                list_kernel_rows(library.built, library.facts)
        verdict = find_facts(Verdict, facts.get("verify", {}))
        assert verdict is None or has_wrong_outputs(verdict) in (True, False)
