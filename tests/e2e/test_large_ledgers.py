"""Ledgers with far more lines than anybody measures, and with far more damage: time and memory stay within limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import Count
from tests.support.project import Project
from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.trials import to_line

pytestmark = pytest.mark.faults

LINES: Final = 200_000
KEY: Final = "ab" * 32
_BYTES_PER_TRIAL: Final = 4096
_SECONDS_PER_TRIAL: Final = 2e-3

# What a search, a choice and a new trial cost: seconds of this process, and its memory. The kernel
# starts `ru_maxrss` of a new program with that of the process that started it, `VmHWM` with nothing.
_OPEN: Final = """
import json, re, sys, time
from pathlib import Path
from tests.support.trials import trial
from tvmflow.tuning.ledger import WorkloadLedger
began = time.process_time()
ledger = WorkloadLedger(Path(sys.argv[1]))
opened = time.process_time()
best = ledger.valid()[0]
chosen = time.process_time()
for number in range(100):
    ledger.append(trial(10_000_000 + number, when="2025-01-01T00:00:00.000+00:00"))
print(json.dumps({
    "trials": len(ledger), "quarantined": ledger.quarantined, "repairs": len(ledger.repairs),
    "best": best.id, "open_s": opened - began, "choose_s": chosen - opened,
    "append_s": (time.process_time() - chosen) / 100,
    "bytes": int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10,
}))
"""


def when(number: int) -> str:
    seconds, milliseconds = divmod(number, 1000)
    return f"2024-01-01T00:{seconds // 60:02d}:{seconds % 60:02d}.{milliseconds:03d}+00:00"


def measure(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def ledger_file(project: Project) -> Path:
    ledger = Ledger.open(project.folder / "cache" / "ledger", TARGET, "0", DEVICE)
    return ledger.workload(KEY).path


@pytest.fixture
def path(project: Project) -> Path:
    assert project.run("--until", "import").code == 0
    return ledger_file(project)


def test_a_ledger_of_very_many_lines(path: Path, project: Project, count: Count) -> None:
    """One of them is torn: the time grows with the lines alone, and no trial is lost."""
    with path.open("wb") as stream:
        for number in range(LINES):
            record = trial(number, seconds=1e-3 + number * 1e-9, when=when(number))
            stream.write(to_line(record))
            if number == LINES // 2:
                stream.write(b'{"failure":null,"host":{"mod\n')
    cost = measure(path)
    assert (cost["trials"], cost["quarantined"]) == (LINES + 100, 1)
    assert cost["open_s"] < LINES * _SECONDS_PER_TRIAL
    assert cost["bytes"] < LINES * _BYTES_PER_TRIAL
    assert cost["append_s"] < 0.1
    listed = project.tvmflow("records", "ls", "--json")
    assert listed.code == 0, listed.err
    assert str(LINES + 100) in listed.out
    count("trials of a large ledger", LINES)
    count("milliseconds to open it", round(1000 * cost["open_s"]))
    count("milliseconds to choose", round(1000 * cost["choose_s"]))
    count("megabytes of memory for it", cost["bytes"] >> 20)


def test_a_ledger_of_very_many_damaged_lines(path: Path, count: Count) -> None:
    """They are quarantined together: one at a time, with the disk to wait for, would take hours."""
    good = [to_line(trial(number)) for number in (1, 2)]
    torn = b"".join(b'{"torn %d\n' % number for number in range(LINES))
    path.write_bytes(good[0] + torn + good[1])
    cost = measure(path)
    assert (cost["trials"], cost["quarantined"], cost["repairs"]) == (102, LINES, 1000)
    assert cost["open_s"] < LINES * _SECONDS_PER_TRIAL
    assert cost["bytes"] < LINES * _BYTES_PER_TRIAL
    count("damaged lines of a ledger", LINES)
    count("milliseconds to quarantine them", round(1000 * cost["open_s"]))
