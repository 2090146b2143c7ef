"""Times two libraries side by side: both in one process, in turns, so that what slows the machine slows both."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

from tvmflow.targets import devices

_ROUNDS: Final = 9
_MIN_SECONDS: Final = 0.03
_TIMEOUT_S: Final = 600.0


def side_by_side(now: Path, before: Path, locks: Path) -> tuple[float, float] | str:
    """Seconds a call of two bundles, medians of rounds in turns; or why they cannot be timed here.

    They run in a process of their own, alone on this machine's CPU and GPU.
    """
    command = [sys.executable, "-m", __name__, str(now), str(before)]
    # a GPU's lock is free where there is none
    with devices.exclusive(locks, devices.CPU), devices.exclusive(locks, devices.GPU):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"they took longer than {_TIMEOUT_S:.0f} s"
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("["):
        said = done.stderr.strip().rpartition("\n")[2]
        return said or f"the process that ran them ended with {done.returncode}"
    first, second = json.loads(last)
    return float(first), float(second)


def _main(paths: list[str]) -> int:
    from tvmflow import runtime, samples
    from tvmflow.errors import TvmflowError

    try:
        modules = [runtime.load(path) for path in paths]
    except TvmflowError as error:
        sys.stderr.write(error.message.replace("\n", "; ") + "\n")
        return 1
    if modules[0].inputs != modules[1].inputs:
        sys.stderr.write("they take other inputs\n")
        return 1
    feed = samples.drawn(modules[0].inputs, {}, batches=1, seed=0).batches[0]
    times: list[list[float]] = [[], []]
    for number in range(_ROUNDS):
        # each goes first as often as the other
        for which in (0, 1) if number % 2 else (1, 0):
            times[which] += modules[which].latency(feed, repeat=1, min_seconds=_MIN_SECONDS)
    sys.stdout.write(json.dumps([statistics.median(each) for each in times]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
