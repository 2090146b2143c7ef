"""Thousands of mutated files of every kind: no bug, no traceback, no wrong result, within limits.

`TVMFLOW_FUZZ_SEED` shifts the seeds, for campaigns that go on where others ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Count

pytestmark = pytest.mark.fuzz

CHUNK: Final = 500
CASES: Final = {
    "recipes": 10_000,
    "models": 1_000,
    "bundles": 1_000,
    "locks": 1_000,
    "records": 1_000,
    "delivered": 1_000,
}
CHUNKS: Final = [
    (suite, first) for suite, cases in CASES.items() for first in range(0, cases, CHUNK)
]


@pytest.mark.parametrize(("suite", "first"), CHUNKS)
def test_mutated_files_are_refused_or_right(
    suite: str, first: int, tmp_path: Path, count: Count
) -> None:
    """Each case ends with a documented exit code and a message, and never with a wrong file."""
    report = tmp_path / "report.json"
    folder = tmp_path / "cases"
    folder.mkdir()
    seed = first + int(os.environ.get("TVMFLOW_FUZZ_SEED", "0"))
    words = [suite, str(folder), str(seed), str(CHUNK), str(report)]
    log = tmp_path / "log.txt"
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.fuzzing.cases", *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    ended = json.loads(report.read_text())
    count(f"mutated {suite}", CHUNK)
    for code, number in ended["codes"].items():
        count(f"mutated {suite}: exit code {code}", number)
    findings = ended["findings"]
    shown = [f"seed {f['seed']}: {f['problem']}\n{f['text'][-800:]}" for f in findings[:20]]
    assert not findings, f"{len(findings)} of {CHUNK}:\n" + "\n".join(shown)
