"""What a second machine gains: `tvmflow run recipes/digits.yaml` from an empty store, with a remote and without.

    python benchmarks/remote.py [--rounds N] [--pipeline NAME]

Whole processes, run in turn, each with a new store in a new folder; the remote is a server on
this machine that has all of the results. Printed are the medians, and how many times as fast
fetching is as building.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.cache_server import cache_server

ROOT = Path(__file__).resolve().parent.parent


def seconds(folder: Path, pipeline: str, *words: str) -> tuple[float, dict[str, str]]:
    """How long a run took in a new folder, and how its stages ended."""
    folder.mkdir()
    environment = {name: each for name, each in os.environ.items() if "TVMFLOW_" not in name}
    command = [sys.executable, "-m", "tvmflow", "run", str(ROOT / "recipes/digits.yaml")]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--pipeline", pipeline, "--json", *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    took = time.perf_counter() - started
    stages = json.loads(done.stdout.splitlines()[-1])["stages"]
    return took, {stage["stage_id"]: stage["outcome"] for stage in stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pipeline", default="compile")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, cache_server() as cache:
        folder, remote = Path(name), ("--remote", cache.url)
        seconds(folder / "first", words.pipeline, *remote, "--remote-mode", "write")
        built, fetched = [], []
        for number in range(words.rounds):
            took, ended = seconds(folder / f"build-{number}", words.pipeline)
            assert set(ended.values()) == {"ran"}, ended
            built.append(took)
            took, ended = seconds(folder / f"fetch-{number}", words.pipeline, *remote)
            assert set(ended.values()) == {"fetched"}, ended
            fetched.append(took)
        size = sum(map(len, cache.cas.values()))
    result = {
        "stages": len(ended),
        "bytes": size,
        "build_s": round(statistics.median(built), 2),
        "fetch_s": round(statistics.median(fetched), 2),
        "times_as_fast": round(
            statistics.median(a / b for a, b in zip(built, fetched, strict=True)), 1
        ),
        "rounds": words.rounds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
