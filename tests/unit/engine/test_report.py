"""Reports of runs, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.facts import (
    build_facts,
    kernel_facts,
    pick_best_facts,
    tune_facts,
    verify_facts,
    workload_facts,
)
from tvmflow.core.formatting import duration_text, latency_text
from tvmflow.core.keys import stage_key
from tvmflow.core.types import Decision, StageSpec
from tvmflow.engine.plan_text import explain_stage
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.summary import render, summary


def stage(label: str, outcome: str = "ran", **more: Any) -> StageReport:
    facts = more.pop("facts", {})
    return StageReport(f"net:{label}", outcome, "never ran", 1.0, facts, **more)


def report(*stages: StageReport, delivered: tuple[str, ...] = ()) -> RunReport:
    return RunReport(stages, delivered, (), 2.0)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ("hit ran", 0),
        ("hit failed skipped", 1),
        ("crashed", 1),
        ("timeout", 1),
        ("rejected", 3),
        ("blocked", 4),
        ("cancelled skipped", 130),
        ("rejected failed", 1),
        ("failed cancelled", 130),
    ],
)
def test_the_exit_code_is_that_of_the_worst(outcomes: str, code: int) -> None:
    """A stage that was skipped because of it does not count."""
    assert (
        report(*(stage(str(i), outcome) for i, outcome in enumerate(outcomes.split()))).exit_code
        == code
    )


def test_nothing_to_do_is_said() -> None:
    """And where the files are."""
    text = summary(report(stage("import", "hit"), delivered=("dist/net/host/net.so",)))
    assert text == "1 stage is up to date, nothing to run  (2.0 s)\n  dist/net/host/net.so"


def test_of_many_builds_the_table_shows_some_and_files_are_counted() -> None:
    """Those that are new before those that were up to date; `--json` has everything."""
    quiet = verify_facts(not_run="no such machine", against="none")
    stages = [stage(f"verify/t{n}", "hit", facts=quiet) for n in range(250)]
    stages.append(stage("verify/new", "ran", facts=quiet))
    paths = [f"dist/net-v{n % 3}/t{n}/net.so" for n in range(250)]
    lines = summary(report(*stages, delivered=tuple(paths))).splitlines()
    assert lines[:2] == [
        "net/t0, net/t1, net/t2 and 248 more: NOT VERIFIED (verify.against: none): no such machine",
        "build    result        stages",
    ]
    assert len(lines) == 2 + 30 + 6
    assert lines[30:] == [
        "net/t28  NOT VERIFIED  up to date",
        "net/new  NOT VERIFIED",
        "… and 221 more; --json has all of them",
        "251 builds: 251 NOT VERIFIED",
        "1 ran, 250 up to date  (2.0 s)",
        "  dist/net-v0/: 84 files",
        "  dist/net-v1/: 83 files",
        "  dist/net-v2/: 83 files",
    ]
    paths = [f"dist/net-v{n}/t/net.so" for n in range(250)]
    text = summary(report(*stages, delivered=tuple(paths)))
    assert text.splitlines()[-1] == "  dist/: 250 files"


def test_a_failure_has_its_message_its_remedy_and_its_log() -> None:
    """And the counts at the end."""
    text = summary(
        report(
            stage("import"),
            stage("build/host", "crashed", message="it crashed", fix="try again", log="a.log"),
            stage("export/host", "skipped"),
        )
    )
    assert "net:build/host: crashed: it crashed\n  fix: try again\n  log: a.log" in text
    assert text.endswith("1 ran, 0 up to date, 1 crashed, 1 skipped  (2.0 s)")


def test_json_is_one_line_with_everything() -> None:
    """The last event of a run."""
    line = render(report(stage("import", facts={"a": 1})), as_json=True)
    event = json.loads(line)
    assert line.count("\n") == 1
    assert (event["event"], event["exit_code"]) == ("run_finished", 0)
    assert event["stages"][0]["facts"] == {"a": 1}


TUNED = tune_facts(failed=2, untunable=["odd"], drift=0.25, repairs=["a torn line"])


def test_a_search_is_described() -> None:
    """Trials, failures, what no candidate worked for, a machine that changed, and repairs."""
    text = summary(report(stage("tune/host", facts=TUNED)), verbose=True)
    assert "64 of 64 trials (60 measured in 30.0 s, 4 from the ledger, 2 failed)" in text
    assert "no candidate worked: odd" in text
    assert "one kernel's time by 25%" in text
    assert "note: a torn line" in text


def test_an_untuned_library_is_said_to_be_one() -> None:
    """An untuned library is slow, so the summary says it."""
    text = summary(report(stage("tune/host", facts=tune_facts(trials=0))), verbose=True)
    assert "not tuned (tune.trials is 0)" in text


BUILT = {
    "kernels": 4,
    "schedule_rules": {"none": ["nms"], "register_tiles": ["conv", "dense"], "tuned": ["pool"]},
    "unscheduled_shares": {"nms": 0.5},
}


def test_how_kernels_got_their_schedules_is_told() -> None:
    """The number of kernels for each rule; kernels without a schedule are named."""
    text = summary(report(stage("build/host", facts=BUILT)), verbose=True)
    assert "4 kernels: 1 tuned, 2 with register tiles" in text
    assert "WITHOUT A SCHEDULE, and an estimated 50 % of the time: nms" in text


def test_a_tuning_that_ended_early_says_why() -> None:
    """The time limit, or exhausted search spaces."""
    by_clock = summary(report(stage("tune/host", facts={**TUNED, "stopped": "time"})), verbose=True)
    assert "64 trials (60" in by_clock and "stopped at tune.minutes" in by_clock
    ended = summary(
        report(stage("tune/host", facts={**TUNED, "stopped": "exhausted"})), verbose=True
    )
    assert "every search space was exhausted" in ended


def test_the_last_lines_say_why_a_search_of_this_run_ended_early() -> None:
    """And what is left to gain; nothing of one that spent its budget, was limited by time, or was up to date."""

    def last_lines(outcome: str = "ran", **changes: object) -> str:
        search = {**TUNED, "gain": {"found": 1.2, "possible": 1.5}, **changes}
        verified = verify_facts(not_run="no such machine", against="none")
        stages = stage("tune/host", outcome, facts=search), stage("verify/host", facts=verified)
        return summary(report(*stages))

    assert (
        "net/host: the search stopped before the budget was spent: nothing worth a trial is left to gain "
        "(with tune.patience it goes on); it took 30.0 s, and kernels reach 80% of the roofline\n"
    ) in last_lines(stopped="converged")
    unknown = last_lines(stopped="exhausted", gain={})
    assert "every search space was exhausted; it took 30.0 s\n" in unknown
    assert "the search" not in last_lines(stopped="budget") + last_lines(stopped="time")
    assert "the search" not in last_lines("hit", stopped="converged")


def test_the_gain_of_tuning_is_described() -> None:
    """Coverage, end to end, and the kernels that take longest."""
    kernels = [
        kernel_facts("conv", calls=2, untuned_us=90.0, tuned_us=15.0),
        kernel_facts("pool", flops=0, untuned_us=20.0, tuned_us=None),
    ]
    facts = pick_best_facts(untried=3, kernels=kernels)
    workloads = [workload_facts("conv", seconds=30.0, roofline_us=None)]
    tuning = {**TUNED, "workloads": workloads, "untunable": ["pool"]}
    text = summary(
        report(stage("tune/host", facts=tuning), stage("pick_best/host", facts=facts)), verbose=True
    )
    assert (
        "accepted tuned schedules for 1 of 3 workloads; 90% of the time is in kernels with a schedule\n"
        in text
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("    ")]
    assert rows[1] == ["conv", "2", "180", "µs", "30", "µs", "6×", "200", "(80%)", "300", "µs"]
    assert rows[2] == ["pool", "1", "20", "µs", "20", "µs", "–", "–", "–"]
    assert "1 workload has no trial that worked: not tuned" in text
    assert "2 workloads have no trial: not tuned" in text


def test_a_library_that_was_not_verified_says_so_loudly() -> None:
    """It could not be run here, or the recipe did not want it."""
    for facts in (
        verify_facts(against="none", not_run="it is aarch64"),
        verify_facts(against="none", latency={}),
    ):
        assert "NOT VERIFIED" in summary(report(stage("verify/host", facts=facts)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (3.44, "3.4 s"), (125, "2 min 05 s"), (11400, "3 h 10 min")],
)
def test_durations(seconds: float, text: str) -> None:
    """In the unit that people would use."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.12e-5, "31.2 µs"), (4.56e-3, "4.56 ms"), (1.234, "1.23 s")]
)
def test_latencies(seconds: float, text: str) -> None:
    """With three digits."""
    assert latency_text(seconds) == text


def test_an_explanation_lists_all_that_a_result_depends_on() -> None:
    """Causes first, then settings by their path, files, packages, machine and the key."""
    spec = StageSpec(
        "net:tune/host", "tune", "net", "host", 1, {"tune": {"trials": 4}}, (), (), ("tvm",), 9.0
    )
    key = stage_key(spec, {"import/model.json": "1" * 64}, {"tvm": "0.27"}, "linux-x86_64")
    lines = explain_stage(Decision("net:tune/host", "run", "a; b", ("a", "b")), key).splitlines()
    assert lines[:3] == ["tune/host: must run", "  because a", "  because b"]
    assert "    tvmflow  version 1 of tune" in lines
    assert "    setting  tune.trials        4" in lines
    assert "    file     import/model.json  111111111111" in lines
    assert "    package  tvm                0.27" in lines
    assert lines[-1] == f"  key {key.digest}"
    one_of_many = explain_stage(
        Decision("net:tune/host", "wait", "after import"), None, with_recipe=True
    )
    assert one_of_many == "net:tune/host: not known yet: after import"
    waiting = explain_stage(Decision("net:tune/host", "wait", "after import"), None)
    assert waiting == "tune/host: not known yet: after import"


@pytest.mark.parametrize(
    ("stage_name", "facts", "lines"),
    [
        (
            "build",
            build_facts(schedule_rules={"tuned": ["conv"]}),
            ["  kernels tuned", "    conv"],
        ),
        (
            "build",
            {"kernels": 3},
            ["  INCOMPLETE: the facts of build cannot be read (schedule_rules missing)"],
        ),
        (
            "verify",
            verify_facts(
                tolerance={"for": "float32", "rtol": 0.001, "atol": 0.25, "of_largest": 0.0}
            ),
            ["  outputs may differ by atol 0.25, and rtol 0.001 (the model computes in float32)"],
        ),
    ],
)
def test_an_explanation_has_what_the_stage_says_of_its_result(
    stage_name: str, facts: dict[str, Any], lines: list[str]
) -> None:
    """Between all that the result depends on and the key."""
    spec = StageSpec(f"net:{stage_name}/host", stage_name, "net", "host", 1, {}, (), (), (), 9.0)
    key = stage_key(spec, {}, {}, "linux-x86_64")
    text = explain_stage(Decision(spec.id, "hit", ""), key, facts)
    assert text.splitlines()[-1 - len(lines) :] == [*lines, f"  key {key.digest}"]


def test_text_from_a_model_is_escaped_for_people_and_exact_for_programs() -> None:
    """Messages, remedies and paths cannot write to the terminal; JSON has them as they are."""
    name = "\x1b[2J\r\u202e"
    run = report(stage("import", "failed", message=f"node {name}", fix=f"rename {name}"))
    text = render(run, as_json=False)
    assert "node \\x1b[2J\\r\\u202e\n  fix: rename \\x1b[2J\\r\\u202e\n" in text
    assert text.replace("\n", "").isprintable()
    [shown] = json.loads(render(run, as_json=True))["stages"]
    assert shown["message"] == f"node {name}"
