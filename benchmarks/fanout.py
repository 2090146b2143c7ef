"""One recipe with eight targets, against the eight of them built one by one with nothing shared.

    python benchmarks/fanout.py [--rounds N] [--json FILE]

The model is ResNet-50 v2 with seeded weights, untuned, built and exported for eight machines.
The peer is the same command with one target at a time, each with an empty store, as a script for each
target would do it; both begin cold in every round, in turns, on idle caches of their own. Then a ninth
target is added, and the stages that ran for it are printed.
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


def run(folder: Path, store: str, *words: str) -> tuple[float, list[str]]:
    """Seconds of a whole command, and the stages that really ran."""
    seconds, ended = timed_run(folder, "resnet.yaml", "--store", store, *words)
    return seconds, [stage for stage, outcome in ended.items() if outcome == "ran"]


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
        together, apart = [], []
        for turn in range(args.rounds):
            write_recipe(folder, TARGETS)
            seconds, ran = run(folder, f"shared-{turn}", "--jobs", "2")
            assert sum(":import" in stage for stage in ran) == 1, ran
            together.append(seconds)
            apart.append(
                sum(
                    run(folder, f"alone-{turn}-{target}", "--jobs", "2", "--target", target)[0]
                    for target in TARGETS
                )
            )
        again, nothing = run(folder, "shared-0")
        assert not nothing, nothing
        write_recipe(folder, (*TARGETS, NINTH))
        _, added = run(folder, "shared-0")
    result = {
        "together_s": round(statistics.median(together), 1),
        "one_by_one_s": round(statistics.median(apart), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(apart, together, strict=True)), 2),
        "again_s": round(again, 2),
        "ninth": added,
        "rounds": args.rounds,
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
