"""The reproducibility check: differences of two stores, and builds that end without a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.provenance import World, contents
from tvmflow.core.errors import StageError
from tvmflow.core.types import StageKey, StageSpec
from tvmflow.planning.decisions import PlanState
from tvmflow.release import reproduce
from tvmflow.release.reproduce import (
    ENVIRONMENTS,
    FirstDifference,
    _find_difference,
    _read_build,
)


def compare_export(folder: Path, library: bytes) -> FirstDifference | None:
    """Compare a world with one that exports another library under the same key."""
    reference, built = World(folder / "reference"), World(folder / "built")
    spec: StageSpec = next(spec for spec in reference.plan.stages if spec.stage == "export")
    key = reference.artifacts[spec.id].key
    preimage = reference.store.preimage(key)
    assert preimage is not None
    plan_state = PlanState(reference.store)
    plan_state.artifacts.update(reference.artifacts)
    files = contents()["export"] | {"net.so": library}
    path = Path(built.store.action_path(key))
    path.unlink()
    with built.store.claim(key) as claim:
        for name, content in files.items():
            Path(claim.out, name).write_bytes(content)
        built.store.publish(claim, StageKey(key, preimage), {}, 0.0)
    return _find_difference(spec, plan_state, reference.store, built.store, "build 1 of 2")


def test_equal_files_have_no_difference(tmp_path: Path) -> None:
    assert compare_export(tmp_path, contents()["export"]["net.so"]) is None


def test_the_first_difference_names_stage_file_and_place(tmp_path: Path) -> None:
    library = contents()["export"]["net.so"]
    difference = compare_export(tmp_path, library[:-1] + b"?")
    assert difference is not None
    assert difference[:2] == ("net:export/host", "net.so")
    assert difference.where == "line 1"
    assert difference.build == "build 1 of 2"


def finished(code: int, stdout: str, stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, stdout, stderr)


def report(*stages: tuple[str, str, str]) -> str:
    """Return the output of a build: a line of progress, and the report with these stages."""
    rows = [
        {"stage_id": stage_id, "outcome": outcome, "message": message, "fix": ""}
        for stage_id, outcome, message in stages
    ]
    event = {"event": "run_finished", "seconds": 1.5, "stages": rows}
    return '{"event": "stage_started"}\n' + json.dumps(event) + "\n"


def test_a_build_is_read_from_its_last_event() -> None:
    build = _read_build("one", finished(0, report(("net:import", "ran", ""), ("net:x", "hit", ""))))
    assert build == (1.5, [])


def test_failed_stages_are_read_and_skipped_ones_are_not() -> None:
    output = report(("net:build/host", "rejected", "other bytes"), ("net:export", "skipped", ""))
    _, failures = _read_build("one", finished(3, output))
    assert [(failed["stage_id"], failed["message"], failed["fix"]) for failed in failures] == [
        ("net:build/host", "other bytes", "")
    ]


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (
            finished(-9, ""),
            "one: the build ended with exit code -9 and without a report: no message",
        ),
        (
            finished(2, "words", "tvmflow: wrong"),
            "exit code 2 and without a report: tvmflow: wrong",
        ),
        (finished(4, report(), "disk full"), "one: the build ended with exit code 4: disk full"),
    ],
)
def test_a_build_that_cannot_be_compared_is_an_error(
    process: subprocess.CompletedProcess[str], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        _read_build("one", process)


def test_both_environments_differ_in_everything() -> None:
    first, second = ENVIRONMENTS
    assert first.folder != second.folder and first.jobs != second.jobs
    assert first.variables.keys() == second.variables.keys()
    same = {name for name in first.variables if first.variables[name] == second.variables[name]}
    # below another folder, Python before 3.12 starts in no other locale
    assert same == (set() if f"{sys.prefix}{reproduce.__file__}".isascii() else {"LC_ALL"})
