"""Every failure is reported with a message, fails one stage, and loses no finished result."""

from __future__ import annotations

import json
import os
import signal
import time

import onnx
import pytest

from tests.e2e.faults import inject_fault, remove_fault
from tests.support.project import STAGES, Project

DETERMINISTIC = ("import", "lower/host", "extract_tasks/host", "build/host", "export/host")


@pytest.mark.slow
def test_a_crash_in_native_code_fails_its_stage_and_names_the_log(project: Project) -> None:
    """A segmentation fault is reported with the log that has its stack; finished stages are kept."""
    inject_fault(project, "build", "segfault")
    failed = project.run()
    report = failed.stages["build/host"]
    assert (failed.code, report["outcome"]) == (1, "crashed")
    assert report["message"] == "crashed in native code (SIGSEGV: Segmentation fault)"
    assert "Segmentation fault" in (project.folder / report["log"]).read_text()
    assert failed.outcome("export/host") == "skipped"
    remove_fault(project)
    assert project.run().ran == ["build/host", "export/host", "verify/host"]


@pytest.mark.slow
def test_a_model_from_a_stranger_ends_in_a_sentence(project: Project) -> None:
    """What is not a file, what does not fit, and what nobody can import: told with the right exit code, and not in the model's words."""
    os.mkfifo(project.folder / "fifo.yaml")
    done = project.tvmflow("plan", "fifo.yaml")
    assert (done.code, done.err) == (2, "tvmflow: fifo.yaml:1:1: is a named pipe, not a file\n")
    os.mkfifo(project.folder / "fifo.onnx")
    project.edit_recipe("tiny.onnx", "fifo.onnx")
    done = project.tvmflow("run", "tiny.yaml")
    assert done.code == 2
    assert done.err == "tvmflow: tiny.yaml:5:9: model.onnx: fifo.onnx is a named pipe, not a file\n"

    project.edit_recipe("fifo.onnx", "tiny.onnx")
    project.edit_recipe("[1, 3, 8, 8]", "[1, 3, 9, 8]")
    done = project.tvmflow("run", "tiny.yaml")
    assert done.code == 2
    assert done.err == (
        "tvmflow: tiny.yaml:7:17: inputs.data.shape: "
        "input 'data' has shape [1, 3, 8, 8], which [1, 3, 9, 8] does not fit\n"
    )

    project.edit_recipe("[1, 3, 9, 8]", "[1, 3, 8, 8]")
    model = onnx.load(str(project.folder / "tiny.onnx"))
    model.graph.node[1].op_type = "\x1b[2J\rRelu"
    onnx.save(model, str(project.folder / "tiny.onnx"))
    done = project.tvmflow("run", "tiny.yaml")
    assert done.code == 1
    assert "TVM has no operator \\x1b[2J\\rRelu (node with output 'r')" in done.out
    assert "\x1b" not in done.out + done.err
    model.opset_import[0].version = 999
    onnx.save(model, str(project.folder / "tiny.onnx"))
    ran = project.run()
    assert ran.code == 1
    assert ran.stages["import"]["message"].startswith("the model uses opset 999, and onnx ")
    assert ran.outcome("verify/host") == "skipped"


@pytest.mark.slow
def test_independent_stages_continue_with_keep_going(project: Project) -> None:
    """With --keep-going, the target that works is delivered although the other one fails."""
    project.write_recipe(targets=["host", "x86-64-v2"])
    inject_fault(project, "build", "segfault", "x86-64-v2")
    failed = project.run("--keep-going")
    assert failed.code == 1
    assert failed.outcome("build/x86-64-v2") == "crashed"
    assert failed.outcome("verify/host") == "ran"
    assert (project.folder / "dist/tiny/host/tiny.tvmflow").is_file()
    assert not (project.folder / "dist/tiny/x86-64-v2").exists()


@pytest.mark.slow
def test_a_stage_that_takes_too_much_memory_is_stopped(project: Project) -> None:
    """The message names the limit and what the stage did last; the limit is not part of a key."""
    inject_fault(project, "build", "memory")
    failed = project.run("--stage-memory", "600MB")
    report = failed.stages["build/host"]
    assert (failed.code, report["outcome"]) == (1, "failed")
    assert "of memory, more than the limit of 600.0 MB, and was stopped" in report["message"]
    assert report["message"].endswith("the last line of its log: taking memory")
    assert "--stage-memory" in report["fix"]
    remove_fault(project)
    again = project.run("--stage-memory", "4GiB", "--until", "build")
    assert again.ran == ["build/host"]


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit(project: Project) -> None:
    """A stage that takes too long is stopped, and the message says so."""
    # The limit is that of each stage, and loading TVM counts: the one that hangs is the first that runs.
    assert project.run("--until", "pick_best").code == 0
    inject_fault(project, "build", "hang")
    failed = project.run("--stage-timeout", "5")
    assert failed.stages["build/host"]["message"] == "took longer than 5 s and was stopped"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_run_can_be_repeated(project: Project) -> None:
    """The message names the disk, and finished stages are kept."""
    inject_fault(project, "export", "full-disk")
    failed = project.run()
    assert (failed.code, failed.outcome("export/host")) == (4, "blocked")
    assert "no space left on the disk" in failed.stages["export/host"]["message"]
    remove_fault(project)
    assert project.run().ran == ["export/host", "verify/host"]


@pytest.mark.slow
def test_a_library_that_fails_its_checks_is_not_delivered(project: Project) -> None:
    """Exit code 3, the verdict in dist, the library not; and the failure is not stored as a result."""
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


@pytest.mark.slow
def test_two_concurrent_runs_run_each_stage_once(project: Project) -> None:
    """Two commands on one store share the work, and both succeed."""
    runs = [project.start(), project.start()]
    reports = []
    for process in runs:
        out, err = process.communicate()
        assert process.returncode == 0, err
        reports.append(json.loads(out.splitlines()[-1]))
    outcomes = [stage["outcome"] for report in reports for stage in report["stages"]]
    assert outcomes.count("ran") == len(STAGES)


def test_a_damaged_blob_is_named_and_made_again(finished_project: Project) -> None:
    """A flipped bit is found when the blob is read, and its stage runs again in the same run."""
    project = finished_project
    digests = project.digests(*DETERMINISTIC)
    digest = digests["build/host/vm/lib0.o"]
    blob = project.folder / "cache/cas" / digest[:2] / digest
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(content)
    project.edit_recipe("[shared-library, bundle]", "[shared-library, objects, bundle]")
    healed = project.run_here()
    assert healed.code == 0, healed.out
    # what is verified is each output
    assert healed.ran == ["build/host", "export/host", "verify/host"]
    assert healed.events[-1]["damage"] == [str(blob)]
    assert project.digests("build/host") == {
        name: value for name, value in digests.items() if name.startswith("build/host/")
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_an_interrupted_run_is_resumed_by_the_next(project: Project) -> None:
    """An interrupt has its own exit code, and no finished stage is lost."""
    inject_fault(project, "build", "hang")
    process = project.start()
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage_started" and event["stage_id"] == "tiny:build/host":
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    report = json.loads(rest.splitlines()[-1])
    outcomes = {stage["stage_id"]: stage["outcome"] for stage in report["stages"]}
    assert outcomes["tiny:import"] == "ran"
    assert outcomes["tiny:build/host"] == "cancelled"
    remove_fault(project)
    assert project.run().ran == ["build/host", "export/host", "verify/host"]


def kill_and_finish(project: Project, instants: list[float]) -> None:
    """Kill a cold run at each instant, finish it, and compare with an undisturbed run."""
    project.spend_whole_budget()
    project.write_recipe(trials=4)
    assert project.run().code == 0
    expected = project.digests(*DETERMINISTIC[:2])
    for instant in instants:
        project.forget_results()
        project.kill_after(instant)
        finished = project.run()
        assert finished.code == 0, finished.out + finished.err
        assert project.digests(*DETERMINISTIC[:2]) == expected
        trials = project.trials()
        assert len(trials) == len(set(trials)) == 4
        assert project.debris() == []
        assert project.run().ran == []


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_is_resumed(project: Project) -> None:
    """After a SIGKILL, the next run has the same results and measures no trial twice."""
    kill_and_finish(project, [1.2, 2.5])
