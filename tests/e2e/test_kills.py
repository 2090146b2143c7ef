"""Runs that are killed in every stage, and runs beside collections, end with what an undisturbed run makes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import tvmflow
from tests.conftest import Count
from tests.e2e.faults import descendants
from tests.support.project import STAGES, Project
from tests.support.seeds import one_of_many
from tvmflow.store.local import LocalStore

pytestmark = pytest.mark.faults

STORIES: Final = 8
KILLS_PER_STAGE: Final = 4
TRIALS: Final = 4
UNTUNED: Final = ("import", "lower/host", "extract_tasks/host")
VICTIMS: Final = ("run", "run", "session", "worker")


def processes_in(folder: Path) -> list[int]:
    """Return the processes that run in a folder."""
    pids = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == folder:
                pids.append(int(link.parent.name))
        except OSError:
            continue
    return pids


def kill(process: subprocess.Popen[str], victim: str) -> None:
    """Kill a run: its own process, all processes of its session, or the newest worker alone."""
    if victim == "session":
        os.killpg(process.pid, signal.SIGKILL)
        return
    workers = list(descendants(process.pid))
    pid = workers[-1] if victim == "worker" and workers else process.pid
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_until_killed(project: Project, draw: random.Random, stages: Counter[str]) -> str:
    """Run, kill in one of these stages, and return the stage that was running; empty if the run ended."""
    process = project.start(start_new_session=True)
    assert process.stdout is not None
    running = ""
    killed = False
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage_started":
            running = event["stage_id"].partition(":")[2].partition("/")[0]
            if stages[running] and not killed:
                time.sleep(draw.choice((0.0, 0.05, 0.3, 0.6)) * draw.random())
                kill(process, draw.choice(VICTIMS))
                killed = True
        elif event["event"] == "stage_finished" and event["outcome"] in ("ran", "hit"):
            running = ""
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 1, -signal.SIGKILL), errors
    assert "Traceback" not in errors
    return running if killed else ""


@pytest.mark.parametrize("seed", [one_of_many(seed, seed < 2) for seed in range(STORIES)])
def test_a_run_killed_in_every_stage_measures_nothing_twice(
    seed: int, project: Project, count: Count
) -> None:
    """Four kills in each stage: the same results, each trial once, no debris and no orphans."""
    project.spend_whole_budget()
    project.write_recipe(trials=TRIALS)
    assert project.run().code == 0
    expected = project.digests(*UNTUNED)
    draw = random.Random(seed)
    remaining = Counter(dict.fromkeys(STAGES, KILLS_PER_STAGE))
    for _ in range(10):
        project.forget_results()
        for _ in range(3 * remaining.total()):
            if not remaining.total():
                break
            stage = run_until_killed(project, draw, remaining)
            if stage:
                count("kills", 1)
                count(f"kills in {stage}", 1)
                remaining[stage] = max(0, remaining[stage] - 1)
            else:
                break
        finished = project.run()
        assert finished.code == 0, finished.out + finished.err
        assert project.digests(*UNTUNED) == expected
        trials = project.trials()
        assert len(trials) == len(set(trials)) == TRIALS
        assert project.debris() == []
        assert processes_in(project.folder) == []
        assert project.run().ran == []
        if not remaining.total():
            return
    raise AssertionError(f"never killed in {+remaining}")


@pytest.mark.parametrize("runs", [2, 8])
def test_runs_beside_collections_deliver_what_each_asked_for(
    runs: int, tmp_path: Path, count: Count
) -> None:
    """Runs of as many models share a store that is collected all the time; ONNX Runtime is the judge."""
    projects = []
    for number in range(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        project = Project(folder)
        project.write_model(seed=number)
        project.environment["TVMFLOW_STORE"] = str(tmp_path / "store")
        project.environment["OMP_NUM_THREADS"] = "1"
        projects.append(project)
    LocalStore(str(tmp_path / "store")).create()
    processes = [project.start() for project in projects]
    collections = 0
    while any(process.poll() is None for process in processes):
        collected = projects[0].tvmflow("cache", "gc", "--max-age", "0")
        assert collected.code == 0, collected.err
        collections += 1
    for process in processes:
        out, errors = process.communicate()
        assert process.returncode == 0, out + errors
    for project in projects:
        check_delivered(project)
    checked = projects[0].tvmflow("cache", "verify")
    assert checked.code == 0, checked.out
    count("collections beside runs", collections)
    count("runs beside collections", runs)


def check_delivered(project: Project) -> None:
    """Compare the delivered bundle with ONNX Runtime on this project's own model."""
    import onnxruntime

    data = np.linspace(-1, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)
    session = onnxruntime.InferenceSession(project.folder / "tiny.onnx")
    expected = session.run(None, {"data": data})[0]
    module = tvmflow.load(project.folder / "dist/tiny/host/tiny.tvmflow")
    np.testing.assert_allclose(module.run({"data": data})["scores"], expected, rtol=1e-3, atol=1e-4)
