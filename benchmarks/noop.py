"""What an up-to-date run costs: `tvmflow run` of one recipe with eight targets, against a bare `python -I -c pass`.

    python benchmarks/noop.py [--pairs N]

Both commands are whole processes, run in turn; printed are the medians and the median of the
pairwise ratios. The recipe is built once, without tuning, in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.project import Project

TARGETS = [
    "host",
    "x86-64-v2",
    "{name: generic, tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: x86-64}}",
]
TARGETS += [f"{{name: cores-{n}, preset: host, num_cores: {n}}}" for n in range(1, 6)]


def seconds(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = Project(folder)
        project.write_recipe(targets=TARGETS)
        first = project.run()
        assert first.code == 0, first.out + first.err
        tvmflow = [str(Path(sys.executable).with_name("tvmflow")), "run", "tiny.yaml"]
        bare = [sys.executable, "-I", "-c", "pass"]
        # the first run of these very words plans and remembers the plan
        for _ in range(3):
            seconds(tvmflow, folder)
        times = [(seconds(tvmflow, folder), seconds(bare, folder)) for _ in range(pairs)]
    ours, theirs = zip(*times, strict=True)
    result = {
        "stages": len(first.stages),
        "tvmflow_ms": round(statistics.median(ours) * 1e3, 1),
        "python_ms": round(statistics.median(theirs) * 1e3, 1),
        "ratio": round(statistics.median(a / b for a, b in times), 2),
        "pairs": pairs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
