"""What a cluster costs: one recipe for eight machines on two workers, against two stages at a time here.

    python benchmarks/cluster.py [--rounds N] [--json FILE]

The model is that of recipes/digits.yaml, built and exported without tuning; its stages take a
second or two, so what the cluster adds to each shows as much as it ever will. Scheduler, workers and
the remote are on this machine's loopback and disk: there is no more to compute with than the
peer has, which is the same command with `--jobs 2`. Both begin with an empty store in every round,
in turns; the workers are started before the clock is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
    """A new folder with the recipe and its model."""
    folder.mkdir()
    for name in ("digits-symbol.json", "digits-0010.params"):
        shutil.copyfile(ROOT / "recipes/models" / name, folder / name)
    (folder / "digits.yaml").write_text(RECIPE)
    return folder


def run(folder: Path, *words: str) -> tuple[float, int]:
    """Seconds of a whole command from an empty store, and how many stages ran."""
    seconds, ended = timed_run(folder, "digits.yaml", *words)
    assert set(ended.values()) == {"ran"}, ended
    return seconds, len(ended)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    here, there = [], []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(args.rounds):
            seconds, stages = run(project(Path(name, f"here-{turn}")), "--jobs", "2")
            here.append(seconds)
            folder = project(Path(name, f"there-{turn}"))
            workers = folder / "cluster"
            workers.mkdir()
            with cluster(workers, "one", "two", tiny=False) as started:
                words = ("--scheduler", started.address, "--remote", str(workers / "shared"))
                (workers / "shared").mkdir()
                there.append(run(folder, "--executor", "dask", *words)[0])
    result = {
        "stages": stages,
        "cluster_s": round(statistics.median(there), 1),
        "here_s": round(statistics.median(here), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(there, here, strict=True)), 2),
        "rounds": args.rounds,
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
