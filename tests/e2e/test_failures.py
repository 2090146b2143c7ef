"""Whatever goes wrong is a sentence, costs one stage, and loses nothing that was done."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.project import STAGES, Project

SABOTAGE = Path(__file__).resolve().parents[1] / "support" / "sabotage"
DETERMINISTIC = ("import", "extract_tasks/host", "build/host", "export/host")


def sabotage(project: Project, stage: str, how: str, target: str = "") -> None:
    """Make a stage misbehave in its worker: `segfault`, `hang`, `full-disk`."""
    project.environment["PYTHONPATH"] += f":{SABOTAGE}"
    project.environment["SABOTAGE"] = f"{stage}:{how}:{target}"


def repair(project: Project) -> None:
    project.environment["SABOTAGE"] = ""


def test_a_crash_in_native_code_fails_its_stage_and_names_the_log(project: Project) -> None:
    """A segmentation fault is reported with the log that holds its stack; what was done stays done."""
    sabotage(project, "build", "segfault")
    failed = project.run()
    report = failed.stages["build/host"]
    assert (failed.code, report["outcome"]) == (1, "crashed")
    assert report["message"] == "crashed in native code (SIGSEGV: Segmentation fault)"
    assert "Segmentation fault" in (project.folder / report["log"]).read_text()
    assert failed.outcome("export/host") == "skipped"
    repair(project)
    assert project.run().ran == ["build/host", "export/host", "verify/host"]


@pytest.mark.slow
def test_independent_stages_go_on_when_asked_to(project: Project) -> None:
    """With --keep-going, the target that works is delivered beside the one that does not."""
    project.write_recipe(targets=["host", "x86-64-v2"])
    sabotage(project, "build", "segfault", "x86-64-v2")
    failed = project.run("--keep-going")
    assert failed.code == 1
    assert failed.outcome("build/x86-64-v2") == "crashed"
    assert failed.outcome("verify/host") == "ran"
    assert (project.folder / "dist/tiny/host/tiny.tvmflow").is_file()
    assert not (project.folder / "dist/tiny/x86-64-v2").exists()


def test_a_hang_ends_at_the_time_limit(project: Project) -> None:
    """A stage that takes too long is stopped and said to have been."""
    sabotage(project, "build", "hang")
    failed = project.run("--stage-timeout", "5")
    assert failed.stages["build/host"]["message"] == "took longer than 5 s and was stopped"


def test_a_full_disk_is_a_sentence_and_the_run_can_go_on_later(project: Project) -> None:
    """No space left: the message says where, the finished stages are kept."""
    sabotage(project, "export", "full-disk")
    failed = project.run()
    assert (failed.code, failed.outcome("export/host")) == (4, "blocked")
    assert "no space left on the disk" in failed.stages["export/host"]["message"]
    repair(project)
    assert project.run().ran == ["export/host", "verify/host"]


def test_a_library_that_fails_its_checks_is_not_delivered(project: Project) -> None:
    """Exit code 3, the verdict in dist, the library not; and the failure is not remembered as a result."""
    project.write_recipe(rtol="0")
    project.edit_recipe("atol: 1.0e-4", "atol: 0")
    failed = project.run()
    report = failed.stages["verify/host"]
    assert (failed.code, report["outcome"]) == (3, "rejected")
    assert "elements are out of tolerance" in report["message"]
    verdict = json.loads((project.folder / "dist/tiny/host/verify.json").read_text())
    assert not verdict["passed"]
    assert not (project.folder / "dist/tiny/host/tiny.so").exists()
    assert project.run().outcome("verify/host") == "rejected"


def test_two_runs_at_once_do_each_stage_once(project: Project) -> None:
    """Two commands on one store share the work and both end well."""
    runs = [project.start(), project.start()]
    reports = []
    for process in runs:
        out, err = process.communicate()
        assert process.returncode == 0, err
        reports.append(json.loads(out.splitlines()[-1]))
    outcomes = [stage["outcome"] for report in reports for stage in report["stages"]]
    assert outcomes.count("ran") == len(STAGES)


def test_a_damaged_entry_is_named_and_made_again(project: Project) -> None:
    """A flipped bit in a stored file is found when it is read, and its stage runs again by itself."""
    project.run()
    digests = project.digests(*DETERMINISTIC)
    digest = digests["build/host/lib0.o"]
    blob = project.folder / "cache/cas" / digest[:2] / digest
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    project.edit_recipe("[shared-library, bundle]", "[bundle]")
    healed = project.run()
    assert healed.code == 0, healed.out
    assert healed.ran == ["build/host", "export/host"]
    assert healed.events[-1]["damage"] == [str(blob)]
    assert project.digests("build/host") == {
        name: value for name, value in digests.items() if name.startswith("build/host/")
    }


def test_ctrl_c_stops_in_order_and_the_next_run_goes_on(project: Project) -> None:
    """An interrupt ends the run with its own exit code; nothing finished is lost."""
    sabotage(project, "build", "hang")
    process = project.start()
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage_started" and event["stage_id"] == "tiny:build/host":
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    report = json.loads(rest.splitlines()[-1])
    outcomes = {stage["stage_id"]: stage["outcome"] for stage in report["stages"]}
    assert outcomes["tiny:import"] == "ran"
    assert outcomes["tiny:build/host"] == "cancelled"
    repair(project)
    assert project.run().ran == ["build/host", "export/host", "verify/host"]


def kill_and_finish(project: Project, instants: list[float]) -> None:
    """Kill a cold run at each instant, go on to the end, and compare with an undisturbed run."""
    project.write_recipe(trials=4)
    assert project.run().code == 0
    wanted = project.digests(*DETERMINISTIC[:2])
    for instant in instants:
        project.forget_results()
        project.kill_after(instant)
        finished = project.run()
        assert finished.code == 0, finished.out + finished.err
        assert project.digests(*DETERMINISTIC[:2]) == wanted
        trials = project.trials()
        assert len(trials) == len(set(trials)) == 4
        assert project.debris() == []
        assert project.run().ran == []


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(project: Project) -> None:
    """SIGKILL in the middle: the next run ends with the same results and measures no trial twice."""
    kill_and_finish(project, [1.2, 2.5])


@pytest.mark.faults
def test_twenty_killed_runs_go_on_where_they_were(project: Project) -> None:
    """The same at twenty instants from the first moment to the last stage."""
    kill_and_finish(project, [0.15 + 0.3 * step for step in range(20)])


@pytest.mark.faults
def test_untuned_builds_are_the_same_after_twenty_kills(project: Project) -> None:
    """Without tuning every stage but verify is deterministic: same bytes, whenever the run was killed."""
    assert project.run().code == 0
    wanted = project.digests(*DETERMINISTIC)
    for step in range(20):
        project.forget_results()
        project.kill_after(0.1 + 0.2 * step)
        assert project.run().code == 0
        assert project.digests(*DETERMINISTIC) == wanted
        assert project.debris() == []
