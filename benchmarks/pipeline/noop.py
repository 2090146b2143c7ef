"""The cost of commands that have nothing to do, compared with an empty Python (`python -I -c pass`).

    python benchmarks/pipeline/noop.py [--rounds N]

Measured are whole processes, one after the other in each round: `tvmflow run` and `tvmflow plan` of
an up-to-date recipe with eight targets, `--version`, `--help` and `help`, and the empty Python. Printed are
the medians, and for each command the median of its ratios to the empty Python of the same round,
and the ratio of the fastest rounds of both.
The recipe is built once, without tuning, in a temporary folder.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from history import record

from tests.support.project import Project

TARGETS = [
    "host",
    "x86-64-v2",
    "{name: generic, tvm: {kind: llvm, mtriple: x86_64-linux-gnu, mcpu: x86-64}}",
]
TARGETS += [f"{{name: threads-{n}, preset: host, threads: {n}}}" for n in range(1, 6)]

COMMANDS = {
    "run": ["run", "tiny.yaml"],
    "plan": ["plan", "tiny.yaml"],
    "version": ["--version"],
    "help": ["--help"],
    "help_command": ["help"],
}
# A cached answer is saved only when no file has changed in the last two seconds.
SETTLE_S = 2.5


def measure_seconds(command: list[str], folder: Path) -> float:
    """Return the wall time of a process."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    program = str(Path(sys.executable).with_name("tvmflow"))
    commands = {name: [program, *words] for name, words in COMMANDS.items()}
    commands["python"] = [sys.executable, "-I", "-c", "pass"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = Project(folder)
        project.write_recipe(targets=TARGETS)
        first = project.run()
        assert first.code == 0, first.out + first.err
        time.sleep(SETTLE_S)
        for command in commands.values():
            measure_seconds(command, folder)
        times = [
            {name: measure_seconds(command, folder) for name, command in commands.items()}
            for _ in range(rounds)
        ]
    result: dict[str, float] = {"stages": len(first.stages), "rounds": rounds}
    for name in commands:
        result[f"{name}_ms"] = round(
            statistics.median(round_times[name] for round_times in times) * 1e3, 1
        )
    for name in COMMANDS:
        ratios = [round_times[name] / round_times["python"] for round_times in times]
        result[f"{name}_ratio"] = round(statistics.median(ratios), 2)
        fastest, python = (min(row[key] for row in times) for key in (name, "python"))
        result[f"{name}_min_ratio"] = round(fastest / python, 2)
    print(json.dumps(result))
    record("noop", {name: result[f"{name}_min_ratio"] for name in COMMANDS})


if __name__ == "__main__":
    main()
