"""A run that does not wait for its remote ends, whatever the remote is still doing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.support.cache_server import cache_server

PROGRAM = """
import sys
from pathlib import Path
from tests.support.small_runs import Machine, plan_of
machine = Machine(Path(sys.argv[1]), sys.argv[2], reads=False, writes=True, wait_s=0.1, patience_s=60)
machine.timeout_s = 60.0
report = machine.run(plan_of())
print(report.remote.waiting, [stage.outcome for stage in report.stages])
"""


def test_what_is_still_being_sent_does_not_keep_the_process(tmp_path: Path) -> None:
    """The server takes its time for every answer; the process ends, and what it sent not is in the spool."""
    with cache_server() as cache:
        cache.slow_s = 20.0
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), cache.url],
            capture_output=True,
            text=True,
            check=True,
        )
        took = time.monotonic() - started
    assert done.stdout == "4 ['ran', 'ran', 'ran', 'ran']\n"
    assert done.stderr == ""
    assert took < 10
    assert len(list(Path(tmp_path, "store", "spool").rglob("?" * 64))) == 4
