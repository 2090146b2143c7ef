"""Interleaved measurement of two libraries in one process, so that other load affects both alike."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.processes import module_command
from tvmflow.core.statistics import interleave
from tvmflow.targets import devices

_log = logging.getLogger(__name__)

_ROUNDS: Final = 9
_MIN_SECONDS: Final = 0.03
_TIMEOUT_S: Final = 600.0


class LatencyPair(NamedTuple):
    """Latencies in seconds of the new and the previous library, from an interleaved measurement."""

    current_s: float
    previous_s: float


def time_alternately(current: Path, previous: Path, locks: Path) -> LatencyPair | str:
    """Measure the latencies of two bundles, or return the reason why this is impossible here.

    The bundles run in another process, which uses this machine's CPU and GPU exclusively.
    """
    command = module_command(__name__, str(current), str(previous))
    _log.debug("timing %s and %s alternately", current, previous)
    with contextlib.ExitStack() as stack:
        # Locks of missing devices are always free.
        for device in devices.ALL_DEVICES:
            stack.enter_context(devices.exclusive(locks, device))
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"timing took longer than {_TIMEOUT_S:.0f} s"
    last_line = process.stdout.strip().rpartition("\n")[2]
    if process.returncode or not last_line.startswith("["):
        error = process.stderr.strip().rpartition("\n")[2]
        return error or f"the timing process ended with exit code {process.returncode}"
    current_s, previous_s = json.loads(last_line)
    return LatencyPair(float(current_s), float(previous_s))


def _main(paths: list[str]) -> int:
    """Print the medians of the latencies of two bundles in seconds, as JSON."""
    from tvmflow.core.errors import TvmflowError
    from tvmflow.runtime import loading, samples

    try:
        modules = [loading.load(path) for path in paths]
    except TvmflowError as error:
        sys.stderr.write(error.message.replace("\n", "; ") + "\n")
        return 1
    if modules[0].inputs != modules[1].inputs:
        sys.stderr.write("their inputs differ\n")
        return 1
    feed = samples.random_samples(modules[0].inputs, {}, batches=1, seed=0).batches[0]
    calls = [
        partial(module.latency, feed, repeat=1, min_seconds=_MIN_SECONDS) for module in modules
    ]
    rounds = [interleave(calls, number) for number in range(_ROUNDS)]
    medians = [statistics.median(row[0] for row in rows) for rows in zip(*rounds, strict=True)]
    sys.stdout.write(json.dumps(medians) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
