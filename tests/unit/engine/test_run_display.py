"""The live display of a run, as text of several widths."""

from __future__ import annotations

from typing import Any

import pytest

from tvmflow.engine.progress import (
    RunProgress,
    describe_gain,
    describe_position,
    display_width,
    draw_run,
    fit_line,
    render_line,
)

STAGES = ("import", "extract_tasks", "tune", "pick_best", "build", "export", "verify")


def run_of(
    *targets: str, recipes: tuple[str, ...] = ("net",), seconds: float | None = None
) -> RunProgress:
    """Return a run that has just begun, at the time 100; each stage is expected to take `seconds`."""
    ids = [
        f"{recipe}:{stage}" + (f"/{target}" if stage != "import" else "")
        for recipe in recipes
        for stage in STAGES
        for target in (targets if stage != "import" else targets[:1])
    ]
    progress = RunProgress()
    estimate = None if seconds is None else [seconds, seconds]
    stages = [{"stage_id": id_, "kind": "run", "seconds": estimate} for id_ in ids]
    progress.apply({"event": "run_started", "stages": stages}, 100.0)
    return progress


def start(progress: RunProgress, label: str, now: float, recipe: str = "net") -> None:
    progress.apply({"event": "stage_started", "stage_id": f"{recipe}:{label}", "reason": ""}, now)


def finish(progress: RunProgress, label: str, outcome: str = "ran", seconds: float = 2.0) -> None:
    event = {"event": "stage_finished", "outcome": outcome, "seconds": seconds}
    progress.apply({**event, "stage_id": f"net:{label}"}, 102.0)


def trial(progress: RunProgress, done: int, workload: str = "conv", **more: Any) -> None:
    event = {
        "event": "progress", "stage_id": "net:tune/host", "unit": "trial", "total": 64,
        "done": done, "workload": workload, "calls": 1, "trials": done, "best_us": 10.0,
        "untuned_us": 40.0, "gflops": 3.25, "spread": 0.04, "failed": 0, "limit_s": None,
        "seconds_left": None, "untuned_latency_us": 900.0, "best_latency_us": 300.0,
    }  # fmt: skip
    progress.apply({**event, **more}, 110.0)


def screen(
    progress: RunProgress, columns: int = 79, height: int = 24, now: float = 112.0
) -> list[str]:
    lines = [
        render_line(fit_line(line, columns), color=False).rstrip()
        for line in draw_run(progress, columns, height, now)
    ]
    assert all(display_width(line) <= columns for line in lines) and len(lines) <= height
    return lines


def test_a_run_is_a_table_of_targets_and_stages() -> None:
    """What is done has its time, what runs a spinner; below it is what tuning has gained."""
    progress = run_of("host", "edge")
    finish(progress, "import")
    finish(progress, "extract_tasks/host", "hit")
    finish(progress, "extract_tasks/edge", "fetched")
    start(progress, "tune/host", 102.0)
    trial(progress, 16, seconds_left=41.0, failed=2)
    assert screen(progress) == [
        f"net{'3 of 13 stages, 12 s':>76}",
        "      import   extract_tasks  tune    pick_best  build  export  verify",
        "host  ✓ 2.0 s  ✓              ⠇ 10 s  ·          ·      ·       ·",
        "edge  ✓ 2.0 s  ↓              ·       ·          ·      ·       ·",
        "",
        "tune/host  ━━━━━───────────────  trial 16 of 64, about 41 s left, 2 failed",
        "  estimated latency 900 µs → 300 µs, 3.00× faster",
        "                                              trials      best   gain  GFLOPS",
        "  conv                                            16     10 µs   4.0×     3.2",
    ]


def test_a_narrow_terminal_has_symbols_and_the_name_of_what_runs() -> None:
    """The heads of the columns do not fit into 49 columns; nothing wraps."""
    progress = run_of("host", "edge")
    finish(progress, "import")
    start(progress, "tune/host", 102.0)
    trial(progress, 16)
    lines = screen(progress, columns=49)
    assert lines[1:3] == ["host ✓ · ⠇ · · · ·  tune", "edge ✓ · · · · · ·"]
    assert lines[4] == "tune/host  ━━━━━───────────────  trial 16 of 64"
    assert lines[7] == "  conv              16     10 µs   4.0×     3.2"


def test_of_many_targets_those_that_run_are_shown() -> None:
    """The others are counted, and no frame is higher than the terminal."""
    progress = run_of(*(f"cpu{number}" for number in range(30)))
    start(progress, "build/cpu17", 102.0)
    finish(progress, "build/cpu21", "failed")
    lines = screen(progress, height=10)
    assert len(lines) == 10
    names = [line.split()[0] for line in lines[2:7]]
    assert {"cpu17", "cpu21"} <= set(names) and lines[7] == "… and 25 more"
    assert lines[9] == "build/cpu17  runs for 10 s"
    assert len(screen(progress, height=3)) <= 3


def test_several_recipes_have_their_names() -> None:
    """Targets alone would be the same."""
    progress = run_of("host", recipes=("net", "other"))
    start(progress, "build/host", 102.0, "other")
    lines = screen(progress)
    assert lines[0].startswith("2 recipes")
    assert [line.split()[0] for line in lines[2:4]] == ["net/host", "other/host"]


def test_the_time_left_is_that_of_all_stages_or_nothing() -> None:
    """What the past does not know, or what takes longer than ever, is not estimated."""
    progress = run_of("host", seconds=30.0)
    start(progress, "import", 102.0)
    assert screen(progress)[0].endswith("0 of 7 stages, 12 s, about 3 min 20 s left")
    assert screen(progress, now=140.0)[0].endswith("0 of 7 stages, 40 s")
    unknown = run_of("host")
    start(unknown, "import", 102.0)
    assert screen(unknown)[0].endswith("0 of 7 stages, 12 s")


def test_what_a_search_says_itself_counts_more_than_its_past() -> None:
    """It knows the pace of its trials."""
    progress = run_of("host", seconds=30.0)
    finish(progress, "import")
    finish(progress, "extract_tasks/host")
    start(progress, "tune/host", 102.0)
    trial(progress, 16, seconds_left=60.0)
    assert progress.seconds_left(112.0) == (60.0 + 4 * 30.0, 60.0 + 4 * 30.0)


def test_a_stage_that_waits_says_for_whom() -> None:
    """The message of the lock, cut to the width."""
    progress = run_of("host")
    start(progress, "tune/host", 102.0)
    progress.stages["net:tune/host"].note = "waiting for the device cpu, held by pid 4242 " * 3
    assert screen(progress)[-1].startswith(
        "tune/host  waiting for the device cpu, held by pid 4242"
    )


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"total": 64, "seconds_left": None}, "trial 26 of 64"),
        ({"total": 64, "seconds_left": 118.0}, "trial 26 of 64, about 2 min left"),
        ({"total": None, "limit_s": 240.0, "seconds_left": 60.0}, "trial 26 of as many as fit in 4 min, about 1 min left"),
    ],
)  # fmt: skip
def test_a_limit_in_minutes_is_shown_instead_of_a_number_of_trials(
    event: dict[str, Any], text: str
) -> None:
    """No number stands for "no limit"."""
    assert describe_position({"unit": "trial", "done": 26, **event}) == text


def test_no_gain_is_not_called_one() -> None:
    """Untuned times that are not known give no text at all."""
    same = {"untuned_latency_us": 900.0, "best_latency_us": 900.0}
    assert describe_gain(same) == "estimated latency 900 µs → 900 µs"
    assert describe_gain({"untuned_latency_us": None, "best_latency_us": None}) == ""
    assert describe_gain({}) == ""
