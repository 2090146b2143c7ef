"""Whole runs of `tvmflow`, timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def timed_run(folder: Path, *words: str) -> tuple[float, dict[str, str]]:
    """Run `tvmflow run …` in a folder, without the user's TVMFLOW_ variables.

    Returns:
        The seconds that it took, and the outcome of each stage.
    """
    environment = {name: value for name, value in os.environ.items() if "TVMFLOW_" not in name}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow", "run", *words, "--json"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr)
    stages = json.loads(done.stdout.splitlines()[-1])["stages"]
    return seconds, {stage["stage_id"]: stage["outcome"] for stage in stages}
