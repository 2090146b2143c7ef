"""Speed-up by a remote cache: `tvmflow run recipes/digits.yaml` with an empty store, with and without one.

    python benchmarks/pipeline/remote.py [--rounds N] [--pipeline NAME]

Processes run alternately, each with a new store. The remote cache is a server on this machine that
has all results. The medians are printed, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from _runs import ROOT, timed_run

from tests.support.cache_server import cache_server


def time_run(folder: Path, pipeline: str, *arguments: str) -> tuple[float, dict[str, str]]:
    """Run the recipe in a new folder; return the seconds and the outcome of each stage."""
    folder.mkdir()
    return timed_run(folder, str(ROOT / "recipes/digits.yaml"), "--pipeline", pipeline, *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pipeline", default="compile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, cache_server() as cache:
        folder, remote = Path(name), ("--remote", cache.url)
        time_run(folder / "first", args.pipeline, *remote, "--remote-mode", "write")
        built, fetched = [], []
        for number in range(args.rounds):
            seconds, outcomes = time_run(folder / f"build-{number}", args.pipeline)
            assert set(outcomes.values()) == {"ran"}, outcomes
            built.append(seconds)
            seconds, outcomes = time_run(folder / f"fetch-{number}", args.pipeline, *remote)
            assert set(outcomes.values()) == {"fetched"}, outcomes
            fetched.append(seconds)
        size = sum(map(len, cache.cas.values()))
    result = {
        "stages": len(outcomes),
        "bytes": size,
        "build_s": round(statistics.median(built), 2),
        "fetch_s": round(statistics.median(fetched), 2),
        "ratio": round(statistics.median(a / b for a, b in zip(built, fetched, strict=True)), 1),
        "rounds": args.rounds,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
