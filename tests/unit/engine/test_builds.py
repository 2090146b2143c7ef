"""Builds: what a run says of each recipe for each target."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.facts import VERDICT, speedup
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import RecipeOrigin
from tvmflow.engine.builds import (
    Build,
    KernelShare,
    Peer,
    SizeResult,
    Speedup,
    Tolerance,
    list_builds,
)
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.summary import summary


def stage(stage_id: str, outcome: str = "ran", message: str = "", **facts: Any) -> StageReport:
    return StageReport(stage_id, outcome, "", 1.0, facts, message)


def report(*stages: StageReport, **more: Any) -> RunReport:
    return RunReport(stages, more.pop("delivered", ()), (), 2.0, **more)


def test_a_quantized_build_says_what_that_cost_and_won() -> None:
    """In one line of the summary, whether or not details are asked for."""
    layers = [
        {"name": "conv", "operator": "conv2d", "weight_bits": 8, "data_bits": 8, "gain": 0.6},
        {"name": "fc", "operator": "matmul", "weight_bits": 32, "data_bits": 32, "reason": "skip"},
    ]
    facts: dict[str, Any] = {
        "layers": layers,
        "weight_bytes": 30,
        "float_bytes": 100,
        "error": 0.02,
    }
    facts |= {"float_accuracy": 0.95, "accuracy": 0.945}
    run = report(stage("net:quantize/host", **facts), stage("net:export/host", library_bytes=7))
    assert summary(run).splitlines()[-3] == (
        "net/host: quantized: 1 of 2 layers with integers (float: 1 skip), weights 30% of their size, "
        "an estimated 60% of the layers' time saved, accuracy drop 0.50 points, error of outputs 2.00%"
    )
    assert list_builds(run)[0].quantization_error == 0.02
    table = summary(run).splitlines()
    assert "error vs float" in table[0] and "2.00%" in table[1]


def test_a_build_has_what_its_stages_say() -> None:
    """A runtime that was timed interleaved is not listed again as the reference."""
    rules = {"tuned": ["conv"], "elementwise": ["relu", "add"]}
    nodes = ["/first/Conv", "/first/Relu"]
    places = {"conv": [[0, 1], [1]]}
    (build,) = list_builds(
        report(
            stage("net:import", weight_bytes=400, nodes=nodes),
            stage("net:build/host", kernels=3, schedule_rules=rules, kernel_nodes=places),
            stage("net:export/host", library_bytes=700),
            stage("net:verify/host", **VERDICT),
            delivered=("dist/net/host/net.tvmflow", "dist/net/host/lib/net.h"),
        )
    )
    assert build == Build(
        recipe="net",
        target="host",
        verdict="verified",
        reference="ONNX Runtime 1.30.1",
        error=2e-6,
        tolerance=Tolerance(1e-3, 1e-4),
        accuracy=0.75,
        reference_accuracy=0.76,
        latency_s=1e-3,
        latency_std_s=2e-5,
        untuned_latency_s=3e-3,
        tuning_speedup=Speedup(3.0, 2.9, 3.1, 20),
        peers=(Peer("ONNX Runtime 1.30.1", 1e-3 * 2.1, Speedup(2.1, 2.0, 2.2, 20)),),
        size_bytes=700,
        weight_bytes=400,
        kernels=3,
        tuned_kernels=1,
        slowest_kernels=(
            KernelShare("conv", 0.7, ("/first/Conv", "/first/Relu")),
            KernelShare("relu", 0.2),
            KernelShare("add", 0.1),
        ),
        folder="dist/net/host",
    )
    assert from_json(Build, json.loads(json.dumps(to_json(build)))) == build
    assert from_json(Build, {**to_json(build), "of_a_later_version": 1}) == build


def test_a_build_has_what_was_found_at_all_sizes() -> None:
    """The smallest first; its largest error is that of all sizes."""

    def at(seq: int, error: float, *, passed: bool = True) -> Any:
        outputs = {"y": {"passed": passed, "max_abs_error": error}}
        return {"sizes": {"seq": seq}, "passed": passed, "outputs": outputs, "latency_s": 1e-3}

    sizes = [at(512, 1e-3), at(37, 2.0, passed=False), {"sizes": {"seq": 1}, "passed": False}]
    verdict = {**VERDICT, "at": {"seq": 128}, "sizes": sizes}
    (build,) = list_builds(report(stage("net:verify/host", **verdict)))
    assert build.measured_at == "seq=128"
    assert build.sizes == (
        SizeResult("seq=1", False),
        SizeResult("seq=37", False, 2.0, 1e-3),
        SizeResult("seq=512", True, 1e-3, 1e-3),
    )
    assert build.error == 2.0


def test_what_a_run_does_not_know_is_none() -> None:
    """A run that ends with `tune` has measured no library; a failed stage has no facts."""
    builds = list_builds(
        report(
            stage("net:import", "hit"),
            stage("net:tune/host", "failed", message="no trial worked"),
            stage("net:tune/edge", "hit"),
        )
    )
    assert builds == (
        Build("net", "host", problems=("no trial worked",)),
        Build("net", "edge", reused=True),
    )


def test_a_rejected_library_keeps_its_errors() -> None:
    """And one that was compared with nothing is not verified."""
    rejected, unchecked = list_builds(
        report(
            stage("net:verify/a", "rejected", message="y differs", **VERDICT),
            stage("net:verify/b", "hit", against="none", passed=True, not_run="no such machine"),
        )
    )
    assert (rejected.verdict, rejected.error) == ("rejected", 2e-6)
    assert (unchecked.verdict, unchecked.error, unchecked.latency_s) == ("not verified", None, None)


def test_a_runtime_that_differs_from_the_reference_is_marked() -> None:
    """Also in what a run's record says of it."""
    openvino = {**VERDICT["compared"]["onnxruntime"], "name": "OpenVINO"}
    openvino["outputs"] = {"y": {"passed": True}, "z": {"passed": False}}
    verdict = {**VERDICT, "compared": {**VERDICT["compared"], "openvino": openvino}}
    (build,) = list_builds(report(stage("net:verify/host", **verdict)))
    assert [(peer.name, peer.differs) for peer in build.peers] == [
        ("ONNX Runtime 1.30.1", False),
        ("OpenVINO", True),
    ]
    assert from_json(Build, json.loads(json.dumps(to_json(build)))) == build


def test_the_reference_is_a_peer_like_others() -> None:
    """It is measured interleaved with the library, and its latency is the library's times the ratio of these turns."""
    verdict = {**VERDICT, "compared": {}, "reference_speedup": speedup(20.0, 19.0, 21.0)}
    (build,) = list_builds(report(stage("net:verify/host", **verdict)))
    assert build.peers == (Peer("ONNX Runtime 1.30.1", 1e-3 * 20, Speedup(20.0, 19.0, 21.0, 20)),)


def test_an_error_that_is_not_a_number_is_not_known() -> None:
    """And a reference that was timed by itself is not a peer."""
    outputs = {"y": {"max_abs_error": math.inf, "max_rel_error": 0.1, "rtol": 1e-3, "atol": 1e-5}}
    verdict = {**VERDICT, "compared": {}, "outputs": outputs}
    (build,) = list_builds(report(stage("net:verify/host", **verdict)))
    assert (build.peers, build.error) == ((), None)


def test_a_partitioned_target_is_one_build_of_all_its_parts() -> None:
    """Its size is that of all libraries, and is not known while one is missing."""
    stages = [
        stage("net:import/duo", weight_bytes=400),
        stage("net:cut/duo.head"),
        stage("net:cut/duo.tail"),
        stage("net:export/duo.head", library_bytes=100),
        stage("net:join/duo", transfers=[]),
        stage("net:verify/duo", **VERDICT),
    ]
    tail = stage("net:export/duo.tail", library_bytes=200)
    whole, broken = (list_builds(report(*stages, more)) for more in (tail, tail._replace(facts={})))
    assert [(b.name, b.size_bytes, b.weight_bytes) for b in whole] == [("net/duo", 300, 400)]
    assert [b.size_bytes for b in broken] == [None]


def test_variants_are_builds_of_their_own() -> None:
    """A target with a dot in its name is not part of another."""
    origins = (RecipeOrigin("net-int8", "net.yaml", "tune.yaml", "int8"),)
    builds = list_builds(report(stage("net-int8:verify/v1.2", **VERDICT), origins=origins))
    assert [(b.recipe, b.target, b.variant) for b in builds] == [("net-int8", "v1.2", "int8")]


def test_lines_in_capitals_are_warnings() -> None:
    """Whatever stage says them."""
    rules = {"none": ["nms"]}
    not_run: dict[str, Any] = {"against": "none", "passed": True, "not_run": "no such machine"}
    (build,) = list_builds(
        report(
            stage(
                "net:build/host", kernels=1, schedule_rules=rules, unscheduled_shares={"nms": None}
            ),
            stage("net:verify/host", **not_run),
        )
    )
    assert build.warnings == (
        "WITHOUT A SCHEDULE, in a time that depends on sizes or data: nms",
        "NOT VERIFIED (verify.against: none): no such machine",
    )


def test_a_level_that_was_not_verified_is_a_warning() -> None:
    """A library with code for several CPUs is not simply verified where one of its levels ran nowhere."""
    levels = {
        "x86-64-v3": {"outputs": {}, "ran_on": "this machine"},
        "x86-64-v4": {"not_verified": "no AVX-512"},
    }
    (build,) = list_builds(report(stage("net:verify/host", **VERDICT, levels=levels)))
    assert (build.verdict, build.warnings) == (
        "verified",
        ("NOT VERIFIED at the level x86-64-v4: no AVX-512",),
    )


FACTS: dict[str, dict[str, Any]] = {
    "net:import": {"weight_bytes": 400, "nodes": ["a", "b"]},
    "net:build/host": {
        "kernels": 3,
        "schedule_rules": {"tuned": ["conv"], "elementwise": ["relu", "add"]},
        "kernel_nodes": {"conv": [[0, 1], [1]]},
    },
    "net:export/host": {"library_bytes": 700, "files": {"net.so": 700}},
    "net:verify/host": VERDICT,
}


FIELDS = {
    "net:import": ["weight_bytes"],
    "net:build/host": ["kernels", "tuned_kernels"],
    "net:export/host": ["size_bytes"],
    "net:verify/host": ["verdict", "latency_s", "error", "accuracy", "tuning_speedup", "peers"],
}


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field in facts."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name)
        yield from places(inner, (*path, name))


@pytest.mark.parametrize("value", ["absent", None, [], 3])
@pytest.mark.parametrize("path", list(places(FACTS)), ids="/".join)
def test_incomplete_facts_are_said_and_end_nothing(path: tuple[str, ...], value: Any) -> None:
    """As of an old or a damaged record: everything else of the build is there, and a warning where it is not."""
    facts = copy.deepcopy(FACTS)
    at: Any = facts
    for name in path[:-1]:
        at = at[name]
    if value == "absent":
        del at[path[-1]]
    elif len(path) > 1:
        at[path[-1]] = value
    stages = [stage(name, **own) for name, own in facts.items()]
    (build,) = list_builds(report(*stages))
    (whole,) = list_builds(report(*(stage(name, **own) for name, own in FACTS.items())))
    for name, fields in FIELDS.items():
        if name != path[0]:
            assert [getattr(build, field) for field in fields] == [
                getattr(whole, field) for field in fields
            ]
    others = [text for text in build.warnings if not text.startswith("INCOMPLETE: the facts of ")]
    assert not others or path[-1] == "is_slower"
    json.dumps(to_json(build))


@pytest.mark.parametrize(
    ("name", "field"), [("net:build/host", "schedule_rules"), ("net:verify/host", "outputs")]
)
def test_facts_that_cannot_be_read_are_named(name: str, field: str) -> None:
    """With what is wrong with them."""
    facts = {**FACTS, name: {**FACTS[name], field: 3}}
    (build,) = list_builds(report(*(stage(own, **value) for own, value in facts.items())))
    label = name.removeprefix("net:")
    assert build.warnings == (
        f"INCOMPLETE: the facts of {label} cannot be read ({field}: an integer instead of an object)",
    )
