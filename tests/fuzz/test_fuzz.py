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

CHUNK: Final = 500
CASES: Final = {
    "recipes": 10_000,
    "models": 1_000,
    "archives": 1_000,
    "bundles": 1_000,
    "locks": 1_000,
    "records": 1_000,
    "delivered": 1_000,
    "responses": 1_000,
}
CHUNKS: Final = [
    (suite, first) for suite, cases in CASES.items() for first in range(0, cases, CHUNK)
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("suite", "first"), CHUNKS)
def test_mutated_files_are_refused_or_right(
    suite: str, first: int, tmp_path: Path, count: Count
) -> None:
    """Each case ends with a documented exit code and a message, and never with a wrong file."""
    seed = first + int(os.environ.get("TVMFLOW_FUZZ_SEED", "0"))
    check_cases(suite, seed, CHUNK, tmp_path, count)


@pytest.mark.slow
@pytest.mark.parametrize("suite", CASES)
def test_a_few_mutated_files_are_refused_or_right(suite: str, tmp_path: Path, count: Count) -> None:
    """Enough of each kind to notice that a whole kind of mistake is not caught."""
    check_cases(suite, 1_000_000, 6, tmp_path, count)


def check_cases(suite: str, seed: int, cases: int, folder: Path, count: Count) -> None:
    """Run consecutive cases of a suite; none may be a finding."""
    report, log, work = folder / "report.json", folder / "log.txt", folder / "cases"
    work.mkdir()
    words = [suite, str(work), str(seed), str(cases), str(report)]
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.formats.cases", *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    ended = json.loads(report.read_text())
    count(f"mutated {suite}", cases)
    for code, number in ended["codes"].items():
        count(f"mutated {suite}: exit code {code}", number)
    for what, number in ended["counts"].items():
        count(what, number)
    findings = ended["findings"]
    shown = [f"seed {f['seed']}: {f['problem']}\n{f['text'][-800:]}" for f in findings[:20]]
    assert not findings, f"{len(findings)} of {cases}:\n" + "\n".join(shown)
