"""Background uploads: a run ends although the remote cache is still busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.cache_server import cache_server
from tests.support.small_runs import RunHost, plan_of

PROGRAM = """
import sys
from pathlib import Path
from tests.support.small_runs import RunHost, plan_of
machine = RunHost(Path(sys.argv[1]), sys.argv[2], reads=False, writes=True, wait_s=0.1, patience_s=60)
machine.timeout_s = 60.0
report = machine.run(plan_of())
print(report.remote.waiting, [stage.outcome for stage in report.stages])
"""


def test_pending_uploads_do_not_keep_the_process_alive(tmp_path: Path) -> None:
    """The server is slow with every answer; the process ends, and what it did not upload is in the spool."""
    with cache_server() as cache:
        cache.slow_s = 600.0
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), cache.url],
            capture_output=True,
            text=True,
            check=True,
            # far below one answer of the server
            timeout=300,
        )
    assert done.stdout == "4 ['ran', 'ran', 'ran', 'ran']\n"
    assert done.stderr == ""
    assert len(list(Path(tmp_path, "store", "spool").rglob("?" * 64))) == 4


def test_an_item_of_an_unknown_kind_stays_in_the_spool(tmp_path: Path) -> None:
    """A newer version may have noted it, and will upload it; results that wait are uploaded all the same."""
    with cache_server() as cache:
        cache.die_after = 0
        RunHost(tmp_path, cache.url, reads=False, writes=True).run(plan_of())
        cache.die_after = -1
        client = RunHost(tmp_path, cache.url, writes=True).remote_client()
        assert len(client.uploader.waiting_results()) == 4
        client.uploader.spool.keep("text", "unknown-1")
        client.uploader.start()
        client.finish()
    assert client.uploader.spool.list() == ["unknown-1"]
    assert client.uploader.waiting_results() == []
    assert len(cache.ac) == 4
