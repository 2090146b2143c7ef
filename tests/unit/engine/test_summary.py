"""The end of a run's output: a table of builds that fits the terminal, and what must not be missed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.facts import VERDICT
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.summary import render, summary


def stage(stage_id: str, outcome: str = "ran", **facts: Any) -> StageReport:
    return StageReport(stage_id, outcome, "", 1.0, facts)


STAGES = (
    stage("net:import", weight_bytes=400, nodes=["/first/Conv"]),
    stage(
        "net:build/host",
        kernels=3,
        schedule_rules={"tuned": ["conv"], "elementwise": ["relu", "add"]},
        kernel_nodes={"conv": [[0]]},
    ),
    stage("net:export/host", library_bytes=13_900_000),
    stage("net:verify/host", **VERDICT),
)
DELIVERED = (
    "dist/net/host/roofline.svg",
    "dist/net/host/net.tvmflow",
    "dist/net/host/net-c-library/net.h",
    "dist/net/host/net-c-library/libnet.a",
    "dist/net/host/verify.json",
)
ONE = RunReport(STAGES, DELIVERED, (), 2.0)


def test_one_build_has_one_row_its_slowest_kernels_and_a_headline() -> None:
    """What its stages say line by line is in the verbose summary alone."""
    assert summary(ONE).splitlines() == [
        "build     result      error  accuracy  untuned  latency  ONNX Runtime 1.30.1  library",
        "net/host  verified  2.0e-06    75.00%     3 ms     1 ms               2.1 ms  13.9 MB",
        "slowest kernels, by their share of the time",
        "  70%  conv  /first/Conv",
        "  20%  relu",
        "  10%  add",
        "net/host: 2.1 times as fast as ONNX Runtime 1.30.1, verified, accuracy 75.00%, 13.9 MB",
        "4 ran, 0 up to date  (2.0 s)",
        "  dist/net/host/: net.tvmflow, net-c-library/, 2 metadata files",
    ]
    verbose = summary(ONE, verbose=True)
    assert "net:verify/host: speedup over untuned 3 (2.9 to 3.1, interleaved" in verbose
    assert all(f"  {path}" in verbose.splitlines() for path in DELIVERED)
    assert render(ONE, as_json=False, quiet=True) == "net/host: verified, dist/net/host/\n"


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (88, "build result error accuracy untuned latency ONNX Runtime 1.30.1 library"),
        (80, "build result accuracy untuned latency ONNX Runtime 1.30.1 library"),
        (70, "build result accuracy latency ONNX Runtime 1.30.1 library"),
        (50, "build result accuracy latency library"),
        (40, "build result latency library"),
    ],
)
def test_the_table_fits_the_terminal(width: int, headings: str) -> None:
    """The verdict, the latency and the size are there on a narrow one, too."""
    head, row, *rest = summary(ONE, width=width).splitlines()
    assert " ".join(head.split()) == headings
    kernels = [line for line in rest if "%  " in line]
    assert max(map(len, (head, row, *kernels))) <= width


def test_several_builds_have_a_row_each_and_the_slowest_kernel_of_each() -> None:
    """What is not known of one of them is a dash; what is the same for all is not repeated."""
    edge = stage("net:export/edge", "hit", library_bytes=1000)
    lines = summary(RunReport((*STAGES, edge), (), (), 2.0)).splitlines()
    assert lines[:5] == [
        "build     result      error  accuracy  untuned  latency  ONNX Runtime 1.30.1  library",
        "net/host  verified  2.0e-06    75.00%     3 ms     1 ms               2.1 ms  13.9 MB",
        "net/edge  –               –         –        –        –                    –   1.0 kB",
        "slowest kernels, by their share of the time",
        "  70%  net/host  conv  /first/Conv",
    ]


def test_problems_come_first_and_complete() -> None:
    """A build that failed is in the table."""
    failed = StageReport("net:build/edge", "crashed", "", 1.0, {}, "it crashed", "again", "a.log")
    lines = summary(RunReport((*STAGES, failed), (), ("cas/ab/c",), 2.0)).splitlines()
    assert lines[:4] == [
        "damaged file set aside, and what was in it made again: cas/ab/c",
        "net:build/edge: crashed: it crashed",
        "  fix: again",
        "  log: a.log",
    ]
    assert [line.split()[1] for line in lines if line.startswith("net/edge ")] == ["FAILED"]


def test_long_names_keep_their_targets() -> None:
    """Rows that look the same tell nothing."""
    recipe = "digits-with-a-rather-long-name-of-a-customer"
    stages = [
        StageReport(f"{recipe}-{variant}:verify/{target}", "ran", "", 1.0, VERDICT)
        for variant in ("half", "one")
        for target in ("host", "x86-64-v3")
    ]
    lines = summary(RunReport(tuple(stages), (), (), 2.0)).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == [
        "digits-with-a…me-of-a-customer-half/host",
        "digits-with-a…-a-customer-half/x86-64-v3",
        "digits-with-a…ame-of-a-customer-one/host",
        "digits-with-a…f-a-customer-one/x86-64-v3",
    ]
    # what the ends do not tell apart has the whole names
    names = [f"net-of-a-customer-{letter}-{'x' * 40}" for letter in "ab"]
    stages = [StageReport(f"{name}:verify/host", "ran", "", 1.0, VERDICT) for name in names]
    lines = summary(RunReport(tuple(stages), (), (), 2.0)).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [f"{name}/host" for name in names]


def test_json_has_the_builds() -> None:
    """Beside the stages."""
    event = json.loads(render(ONE, as_json=True))
    assert [build["size_bytes"] for build in event["builds"]] == [13_900_000]


def test_a_stopped_run_says_what_is_kept_and_how_to_go_on() -> None:
    """Nothing failed: neither the stage that was stopped nor its library."""
    stages = (
        StageReport("net:import", "hit", "", 0.0, {}),
        StageReport(
            "net:tune/host", "cancelled", "", 9.0, {}, "the run was cancelled", log="t.log"
        ),
        StageReport("net:build/host", "skipped", "a stage before it did not succeed", 0.0, {}),
    )
    lines = summary(RunReport(stages, (), (), 9.0, signal=2)).splitlines()
    assert lines == [
        "net:tune/host: stopped; its measured trials are kept",
        "build     result",
        "net/host  stopped",
        "1 up to date, 1 stopped, 1 skipped  (9.0 s); the same command continues from here",
    ]
