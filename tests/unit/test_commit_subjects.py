"""The hook that checks the subject of a commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # noqa: TID251 - pre-commit's file is not a recipe

ROOT = Path(__file__).resolve().parents[2]


def run_hook(folder: Path, message: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a message, as Git does."""
    path = folder / "COMMIT_EDITMSG"
    path.write_text(message, encoding="utf-8")
    command = [sys.executable, "tools/check_subject.py", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "message",
    [
        "onnx: import MaxPool indices\n\nSegNet needs them, and others.\n",
        "# a comment of a template\n\nreadme: describe the install\n",
        "stages, runtime: name errors in summaries\n",
        "fixup! onnx: import MaxPool indices, and MaxUnpool\n",
        "Merge branch 'main' into topic\n",
        f"docs: {'x' * 66}\n",
    ],
)
def test_a_good_subject_passes(tmp_path: Path, message: str) -> None:
    """Comments, bodies and what Git writes by itself are not judged."""
    done = run_hook(tmp_path, message)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Import MaxPool indices\n", ["names no area"]),
        ("onnx:import Det\n", ["names no area"]),
        (f"docs: {'x' * 67}\n", ["has 73 characters: write at most 72"]),
        ("onnx: import Det, and RoiAlign\n", ['has ", and"']),
        (f"{'x' * 70}, and more\n", ["names no area", "has 80 characters", 'has ", and"']),
        ("", ["names no area"]),
    ],
)
def test_a_bad_subject_is_refused(tmp_path: Path, message: str, expected: list[str]) -> None:
    """All problems are printed, one a line."""
    done = run_hook(tmp_path, message)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))


def test_pre_commit_installs_and_runs_it() -> None:
    """`pre-commit install` sets up the hooks of both types."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert "commit-msg" in config["default_install_hook_types"]
    hooks = {hook["id"]: hook for hook in config["repos"][0]["hooks"]}
    assert hooks["subject"]["stages"] == ["commit-msg"]
    assert (ROOT / hooks["subject"]["entry"].split()[-1]).is_file()
