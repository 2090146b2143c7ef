"""`tvmflow run --dump-ir`: the IR after each pass, for people who debug a lowering."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import Project


def passes_in(folder: Path) -> list[str]:
    """Return the names of the passes in the order of their files."""
    return [path.stem.partition("-")[2] for path in sorted(folder.glob("*.py"))]


@pytest.mark.slow
def test_each_pass_leaves_its_ir_also_when_everything_is_up_to_date(
    finished_project: Project,
) -> None:
    """The dump lowers and schedules again, runs no stage, and can be repeated; without it everything is up to date."""
    project = finished_project
    project.write_recipe()
    assert project.run().code == 0
    ran = project.tvmflow("run", "tiny.yaml", "--dump-ir", "ir", "--json")
    assert ran.code == 0 and ran.ran == []
    dumps = [event for event in ran.events if event["event"] == "ir_dumped"]
    assert [(dump["stage_id"], dump["problem"]) for dump in dumps] == [
        ("tiny:lower/host", ""),
        ("tiny:build/host", ""),
    ]
    lowered, built = (project.folder / "ir/tiny" / name for name in ("lower+host", "build+host"))
    names = passes_in(lowered)
    assert names[0] == "operand_checks"
    assert "blocked_layout" in names and "fuse_tir" in names
    assert passes_in(built) == ["untuned_schedules"]
    place = names.index("blocked_layout")
    before, after = (
        next(lowered.glob(f"{number:02d}-*.py")).read_text() for number in (place - 1, place)
    )
    assert "R.nn.conv2d(" in before and "R.nn.conv2d(" not in after
    timings = (lowered / "timings.txt").read_text().splitlines()
    assert [line.split()[2].partition("-")[2] for line in timings] == names
    assert all(float(line.split()[0]) >= 0 and line.split()[1] == "ms" for line in timings)
    again = project.tvmflow("run", "tiny.yaml", "--dump-ir", "ir")
    assert again.code == 0 and passes_in(built) == ["untuned_schedules"]
    assert "tiny:build/host: the IR after each pass is in ir/tiny/build+host" in again.out


@pytest.mark.slow
def test_a_run_that_lowers_nothing_says_so(project: Project) -> None:
    """It stops before the stages that lower a model."""
    ran = project.tvmflow("run", "tiny.yaml", "--until", "import", "--dump-ir", "ir")
    assert ran.code != 0
    assert "--dump-ir: no stage of this run lowers a model" in ran.err
    assert "run lower and build" in ran.err
