"""The first steps of a new user: what takes long says what it does, on a terminal alone."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.project import Project

NO_PATIENCE = Path(__file__).parents[1] / "support" / "no_patience"


def run_on_terminal(project: Project, *words: str) -> tuple[str, str]:
    """Return what a command writes to a pipe, and to the terminal that its standard error is."""
    terminal, end = pty.openpty()
    environment = {**project.environment, "HOME": str(project.folder), "XDG_CACHE_HOME": ""}
    environment["PYTHONPATH"] += f":{NO_PATIENCE}"
    done = subprocess.run(
        project.command(*words),
        cwd=project.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        check=False,
    )
    os.close(end)
    written = b""
    while True:
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:
            break
    os.close(terminal)
    assert done.returncode == 0, (done.stdout, written)
    return done.stdout, written.decode()


def waits(written: str) -> list[str]:
    """Return what was explained, each wait once."""
    return list(dict.fromkeys(re.findall(r"\r\x1b\[K([^\r\x1b]+) …", written)))


@pytest.mark.slow
def test_slow_first_steps_say_what_they_do(finished_project: Project) -> None:
    """Loading, reading the model and the packages, trying the installation, starting other runtimes."""
    project = finished_project
    expected = {
        "plan tiny.yaml": [
            "loading tvmflow: a few seconds the first time",
            "reading tiny.onnx: up to a minute",
            "reading the files of apache-tvm: a few seconds, once for each version",
        ],
        "doctor": ["trying TVM compiles, links and runs: up to a minute the first time"],
        "run-model dist/tiny/host/tiny.tvmflow --compare onnxruntime --model tiny.onnx": [
            "starting ONNX Runtime: a few seconds, more the first time",
            "running ONNX Runtime",
        ],
        "verify dist/tiny/host": ["reading the delivered files: as long as your disk takes"],
    }
    for command, texts in expected.items():
        _, written = run_on_terminal(project, *command.split())
        for text in texts:
            assert any(wait.startswith(text) for wait in waits(written)), (command, waits(written))
        # each line is gone at its end
        assert written.count("\r\x1b[K") == 2 * written.count(" …")
    out, _ = run_on_terminal(project, "plan", "tiny.yaml", "--json")
    assert json.loads(out.splitlines()[-1])
    _, written = run_on_terminal(project, "plan", "tiny.yaml", "-q")
    assert written == ""
