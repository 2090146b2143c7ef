"""What a second machine gains: `tvmflow run recipes/digits.yaml` from an empty store, with a remote and without.

    python benchmarks/remote.py [--rounds N] [--pipeline NAME]

Whole processes, run in turn, each with a new store in a new folder; the remote is a server on
this machine that has all of the results. Printed are the medians, and how many times as fast
fetching is as building.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _runs import ROOT, timed_run

from tests.support.cache_server import cache_server


def seconds(folder: Path, pipeline: str, *words: str) -> tuple[float, dict[str, str]]:
    """How long a run took in a new folder, and how its stages ended."""
    folder.mkdir()
    return timed_run(folder, str(ROOT / "recipes/digits.yaml"), "--pipeline", pipeline, *words)


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
