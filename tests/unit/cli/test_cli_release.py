"""The output of releases, reproducibility checks and retuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import engine
from tests.support.facts import tune_facts, workload_facts
from tvmflow.cli.arguments import OutputOptions
from tvmflow.cli.release import _describe, _format_release, _format_report, retune
from tvmflow.core.codec import to_json
from tvmflow.core.types import Plan
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.recipe import Retune
from tvmflow.recipe.lock_file import Measurements
from tvmflow.release.folder import ReleaseResult
from tvmflow.release.gates import CONTENT_GATE, ContentChange, FailedGate, TargetComparison
from tvmflow.release.reproduce import FirstDifference, ReproducibilityReport
from tvmflow.release.timing import LatencyPair

FOLDER = Path("releases/all-1.1")
COMPARISON = TargetComparison("net", "host", Measurements(latency_us=90.0))
TIMED = COMPARISON._replace(latencies=LatencyPair(9e-5, 1e-4))


@pytest.mark.parametrize(
    ("comparison", "line"),
    [
        (TIMED, "net/host: latency 90 µs, 100 µs in all-1.0 (-10.0%, measured interleaved)"),
        (COMPARISON._replace(is_same_library=True), "net/host: the same library as in all-1.0"),
        (
            COMPARISON._replace(not_timed_reason="no GPU"),
            "net/host: latency not compared with all-1.0: no GPU",
        ),
    ],
)
def test_each_comparison_has_a_line(comparison: TargetComparison, line: str) -> None:
    result = ReleaseResult(FOLDER, True, "all-1.0", (comparison,))
    assert list(_format_release(result)) == [line, f"released: {FOLDER}"]


@pytest.mark.parametrize(("count", "noun"), [(1, "1 gate failed"), (2, "2 gates failed")])
def test_failed_gates_are_counted(count: int, noun: str) -> None:
    failed = (FailedGate("net/host", "max_bytes", "net.so has 9 bytes, more than 8"),) * count
    lines = list(_format_release(ReleaseResult(FOLDER, False, "", (COMPARISON,), failed)))
    assert lines[0] == "net/host: max_bytes: net.so has 9 bytes, more than 8"
    assert lines[-1] == f"NOT RELEASED: {noun}; {FOLDER} was not created"


def test_what_is_new_and_what_is_gone_has_a_line() -> None:
    content = ContentChange(("net/new",), ("net/old", "net/lost"))
    lost = FailedGate("net/lost", CONTENT_GATE, "it is in all-1.0, and not in this release")
    result = ReleaseResult(FOLDER, False, "all-1.0", (), (lost,), content)
    assert list(_format_release(result)) == [
        "net/new: new in this release",
        "net/old: no longer in this release, as release.drop says",
        "net/lost: content: it is in all-1.0, and not in this release",
        f"NOT RELEASED: 1 gate failed; {FOLDER} was not created",
    ]
    value = to_json(_describe(result))
    assert (value["added"], value["removed"]) == (["net/new"], ["net/old", "net/lost"])


def test_an_existing_release_is_named() -> None:
    lines = list(_format_release(ReleaseResult(FOLDER, is_new=False)))
    assert lines == [f"already released with the same files: {FOLDER}"]


def test_a_release_as_json() -> None:
    value = to_json(_describe(ReleaseResult(FOLDER, True, "all-1.0", (TIMED,))))
    (comparison,) = value["comparisons"]
    assert (value["folder"], value["is_new"], value["failed_gates"]) == (str(FOLDER), True, [])
    assert comparison["current"]["latency_us"] == 90.0
    assert comparison["latencies"] == {"current_s": 9e-5, "previous_s": 1e-4}


def test_a_reproducible_run_is_reported_with_its_counts() -> None:
    report = ReproducibilityReport((1.0, 2.0), 1, 3, None)
    assert list(_format_report(report)) == [
        "reproducible: two more builds gave the same 3 files of 1 stage (1.0 s and 2.0 s)"
    ]


def test_a_difference_is_reported_with_its_place() -> None:
    difference = FirstDifference(
        "net:build/host", "lib0.o", "byte 7: 0x01 and 0x02", "build 1 of 2"
    )
    lines = list(_format_report(ReproducibilityReport((1.0,), 1, 0, difference)))
    assert lines[0] == ("NOT REPRODUCIBLE: build 1 of 2 gave a different lib0.o for net:build/host")
    assert lines[1] == "  first difference: byte 7: 0x01 and 0x02"


def tuned(**facts: Any) -> RunReport:
    """Return the report of a run whose `tune` stage has these facts."""
    work = [workload_facts("conv", calls=2, untuned_us=50.0, best_us=40.0)]
    base = tune_facts(measured=1, known=1, stopped="exhausted", workloads=work)
    stage = StageReport("net:tune/host", facts={**base, **facts}, outcome="ran")
    return RunReport((stage,))


def run_retune(report: RunReport | None, *, as_json: bool = False, verbosity: int = 0) -> Plan:
    recipe = engine.planned(engine.recipe("net", tune={"trials": 4, "repeat": 1}))
    output = OutputOptions(json=as_json, verbosity=verbosity)
    budget = Retune(trials=10, round=2)
    return retune(engine.plan_of(recipe), budget, lambda _: report, output)


def test_retuning_shows_each_round_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_retune(tuned())
    progress = (
        "  net:tune/host: 1 trial in 1 round, 80 µs in kernels "
        "(estimated speedup over untuned 1.25, last round 20.0%); its search spaces are exhausted"
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [progress, "trials spent:", f"{progress}; 6 in total"]
    (spec,) = (spec for spec in plan.stages if spec.stage == "tune")
    assert spec.settings["tune"]["trials"] == 6


def test_a_quiet_retuning_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_retune(tuned(), verbosity=-1)
    assert capsys.readouterr().out == ""


def test_an_interrupted_retuning_reports_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe without a finished round has no gain, which JSON has as null."""
    run_retune(None, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (event["event"], event["stage_id"]) == ("round", "net:tune/host")
    assert (event["gain"], event["stop_reason"]) == (None, "failed")
