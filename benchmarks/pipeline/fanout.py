"""Fan-out: one recipe with eight targets, against eight builds that share nothing.

    python benchmarks/pipeline/fanout.py [--rounds N] [--json FILE]

The model is ResNet-50 v2 with seeded weights, untuned, built and exported for eight targets.
The peer is the same command with one target at a time, each with an empty store. Both begin with
empty stores in every round, interleaved. Then a ninth target is added, and the stages that run for
it are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from _runs import timed_run

TARGETS = (
    *("host", "x86-64-v3", "x86-64-v4", "cortex-a72", "neoverse-n1", "riscv64-v"),
    *("apple-m1", "x86-64-windows"),
)
NINTH = "armv7-neon"
RECIPE = """\
recipe: 1
name: resnet
model: {{onnx: resnet.onnx}}
targets: [{targets}]
verify: {{against: none}}
pipeline: compile
"""


def write_recipe(folder: Path, targets: tuple[str, ...]) -> None:
    (folder / "resnet.yaml").write_text(RECIPE.format(targets=", ".join(targets)))


def run(folder: Path, store: str, *arguments: str) -> tuple[float, list[str]]:
    """Run the recipe; return the seconds and the stages that were executed."""
    seconds, outcomes = timed_run(folder, "resnet.yaml", "--store", store, *arguments)
    return seconds, [stage for stage, outcome in outcomes.items() if outcome == "ran"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    from _nets import NETS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "resnet.onnx").write_bytes(NETS["resnet50"]().SerializeToString())
        shared_times, separate_times = [], []
        for turn in range(args.rounds):
            write_recipe(folder, TARGETS)
            seconds, ran = run(folder, f"shared-{turn}", "--jobs", "2")
            assert sum(":import" in stage for stage in ran) == 1, ran
            shared_times.append(seconds)
            separate_times.append(
                sum(
                    run(folder, f"separate-{turn}-{target}", "--jobs", "2", "--target", target)[0]
                    for target in TARGETS
                )
            )
        again, executed = run(folder, "shared-0")
        assert not executed, executed
        write_recipe(folder, (*TARGETS, NINTH))
        _, added = run(folder, "shared-0")
    result = {
        "shared_s": round(statistics.median(shared_times), 1),
        "separate_s": round(statistics.median(separate_times), 1),
        "ratio": round(
            statistics.median(a / b for a, b in zip(separate_times, shared_times, strict=True)), 2
        ),
        "again_s": round(again, 2),
        "ninth": added,
        "rounds": args.rounds,
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
