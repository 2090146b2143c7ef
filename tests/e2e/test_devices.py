"""A target with remote devices: from recipe to library, killed in between, and without a tracker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from tests.support import rpc
from tests.support.project import Project
from tests.support.trials import TARGET
from tvmflow.core.errors import EXIT_ENVIRONMENT
from tvmflow.targets.tracker import TRACKER_VARIABLE

NOWHERE = f"{rpc.HOST}:1"
# this machine, reached as a board would be
BOARD = (
    f"{{name: board, tvm: {{kind: llvm, mtriple: {TARGET['mtriple']}}}, threads: 2, "
    f"remote: {{key: {rpc.KEY}, timeout_s: 20}}}}"
)
# of an architecture that this machine is not
NATIVE = str(TARGET["mtriple"])
FOREIGN = "x86_64-linux-gnu" if NATIVE.startswith("aarch64") else "aarch64-linux-gnu"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.DevicePool]:
    with rpc.running_pool(tmp_path_factory.mktemp("pool"), servers=2) as running:
        yield running


@pytest.fixture
def board(project: Project, pool: rpc.DevicePool) -> Project:
    """A project for boards, with the tracker's address in the environment."""
    project.environment[TRACKER_VARIABLE] = pool.address
    project.write_recipe(trials=6, targets=[BOARD])
    return project


@pytest.mark.slow
def test_a_library_is_tuned_on_devices_and_then_needs_none(
    board: Project, pool: rpc.DevicePool
) -> None:
    """Both devices measure, each trial once; the second run does nothing, with or without a tracker."""
    first = board.tvmflow("run", "tiny.yaml", "-v")
    assert first.code == 0, first.out + first.err
    assert "tune/board: 6 of 6 trials (6 measured in " in first.out
    assert "tuned and untuned kernels, measured interleaved" in first.out
    assert "verify/board: scores agrees with ONNX Runtime" in first.out
    assert (board.folder / "dist/tiny/board/tiny.tvmflow").is_file()
    assert len(board.trials()) == len(set(board.trials())) == 6
    assert all(server.sessions for server in pool.servers)
    board.environment[TRACKER_VARIABLE] = NOWHERE
    assert "all 8 stages are up to date, nothing to run" in board.tvmflow("run", "tiny.yaml").out


@pytest.mark.slow
def test_a_library_is_verified_on_a_device(board: Project, pool: rpc.DevicePool) -> None:
    """It is sent to a device and agrees with ONNX Runtime; it is timed there, tuned and untuned."""
    board.write_recipe(trials=2, targets=[BOARD])
    board.edit_recipe("verify: {", "verify: {run_on: rpc, ")
    ran = board.tvmflow("run", "tiny.yaml", "-v")
    assert ran.code == 0, ran.out + ran.err
    assert "verify/board: scores agrees with ONNX Runtime" in ran.out
    verdict = json.loads((board.folder / "dist/tiny/board/measurements.json").read_text())
    assert verdict["passed"] and verdict["outputs"]["scores"]["elements"] > 0
    assert verdict["ran_on"] in [f"{rpc.KEY} at {server.address}" for server in pool.servers]
    assert verdict["latency"].keys() <= {"library", "untuned"}
    assert 0 < verdict["latency"]["library"]["median"] < 1
    assert f"verify/board: ran on {verdict['ran_on']}" in ran.out


@pytest.mark.slow
def test_a_library_that_a_device_cannot_run_is_not_delivered(board: Project) -> None:
    """The device refuses one for another architecture, with a message and no stack trace."""
    board.write_recipe(targets=[BOARD.replace(NATIVE, FOREIGN)])
    board.edit_recipe("verify: {", "verify: {run_on: rpc, ")
    ran = board.tvmflow("run", "tiny.yaml")
    assert ran.code == 1, ran.out + ran.err
    assert "Traceback" not in ran.out + ran.err
    assert f"the key '{rpc.KEY}' cannot be used" in ran.out or "does not run on board" in ran.out
    assert not (board.folder / "dist/tiny/board/tiny.tvmflow").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_resumes_with_the_trials_of_the_devices(
    board: Project, pool: rpc.DevicePool
) -> None:
    """SIGKILL frees the devices; the second run measures what the first had not, and nothing twice."""
    board.write_recipe(trials=16, targets=[BOARD])
    process = board.start("--until", "tune")
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("done", 0) >= 5:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pool.wait_for(2)
    kept = len(board.trials())
    assert 5 <= kept < 16
    again = board.run("--until", "tune")
    assert again.code == 0, again.out
    facts = again.stages["tune/board"]["facts"]
    assert (facts["measured"], facts["reused"]) == (16 - kept, kept)
    assert len(board.trials()) == len(set(board.trials())) == 16


@pytest.mark.slow
def test_a_missing_tracker_is_reported(project: Project) -> None:
    """Exit code 4, the address, and where it was set; stages without a device are run."""
    project.environment[TRACKER_VARIABLE] = NOWHERE
    project.write_recipe(trials=6, targets=[BOARD])
    failed = project.tvmflow("run", "tiny.yaml")
    assert failed.code == EXIT_ENVIRONMENT
    assert "Traceback" not in failed.out + failed.err
    assert f"tune/board: blocked: the RPC tracker at {NOWHERE} cannot be used: " in failed.out
    assert f"remote.tracker of the target in the recipe, or ${TRACKER_VARIABLE}" in failed.out
    assert "3 ran" in failed.out
