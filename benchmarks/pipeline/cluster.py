"""Overhead of a cluster: one recipe for eight targets on two workers, against `--jobs 2` on one machine.

    python benchmarks/pipeline/cluster.py [--rounds N] [--json FILE]

The model is that of recipes/digits.yaml, built and exported without tuning. Its stages take a
second or two, so that the overhead for each stage is visible. Scheduler, workers and remote cache
are on this machine, so that both sides have the same cores. Both begin with an empty store in
every round, in turns; the workers are started before the time is taken.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from _runs import ROOT, timed_run

from tests.support.clusters import cluster

TARGETS = (
    *("host", "x86-64-v2", "x86-64-v3", "x86-64-v4", "cortex-a72", "neoverse-n1"),
    *("riscv64-v", "apple-m1"),
)
RECIPE = f"""\
recipe: 1
name: digits
model: {{mxnet: {{prefix: digits, epoch: 10}}}}
inputs: {{data: {{shape: [1, 1, 8, 8]}}}}
targets: [{", ".join(TARGETS)}]
outputs: [shared-library, bundle]
verify: {{against: none}}
pipeline: compile
"""


def project(folder: Path) -> Path:
    """Create a folder with the recipe and its model."""
    folder.mkdir()
    for name in ("digits-symbol.json", "digits-0010.params"):
        shutil.copyfile(ROOT / "recipes/models" / name, folder / name)
    (folder / "digits.yaml").write_text(RECIPE)
    return folder


def run(folder: Path, *arguments: str) -> tuple[float, int]:
    """Run the recipe with an empty store; return the seconds and the number of stages."""
    seconds, outcomes = timed_run(folder, "digits.yaml", *arguments)
    assert set(outcomes.values()) == {"ran"}, outcomes
    return seconds, len(outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    local_times, cluster_times = [], []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(args.rounds):
            seconds, stages = run(project(Path(name, f"local-{turn}")), "--jobs", "2")
            local_times.append(seconds)
            folder = project(Path(name, f"cluster-{turn}"))
            workers = folder / "cluster"
            workers.mkdir()
            with cluster(workers, "one", "two", tiny=False) as started:
                addresses = ("--scheduler", started.address, "--remote", str(workers / "shared"))
                (workers / "shared").mkdir()
                arguments = ("--executor", "dask", *addresses)
                cluster_times.append(run(folder, *arguments)[0])
    result = {
        "stages": stages,
        "cluster_s": round(statistics.median(cluster_times), 1),
        "local_s": round(statistics.median(local_times), 1),
        "ratio": round(
            statistics.median(a / b for a, b in zip(cluster_times, local_times, strict=True)), 2
        ),
        "rounds": args.rounds,
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
