"""Cost of a slow remote cache: `tvmflow run` with one that takes seconds for each request, and without one.

    python benchmarks/pipeline/slow_remote.py [--seconds S] [--rounds N] [--pipeline NAME]

The recipe is `recipes/digits.yaml`. In each round it runs without a remote cache; with one that has
nothing, read only and also written; with one that has everything; and after an edit, in a store
that knows how long its stages take, without and with one that has nothing. The medians are
printed, and their ratios to the run without.
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

from tests.support.cache_server import cache_server


def copy_recipe(folder: Path) -> Path:
    """Return a copy of the recipe in a new folder, beside its model."""
    folder.mkdir()
    shutil.copytree(ROOT / "recipes/models", folder / "models")
    for path in (ROOT / "recipes").glob("digits*"):
        if path.is_file():
            shutil.copy(path, folder)
    return folder / "digits.yaml"


BOTH = ("--remote-mode", "both")
EDIT = "kernels: {precision: mixed}\n"
"""Added to the recipe, which changes the tolerance: the model is compiled and verified again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="what each request takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pipeline", default="compile")
    args = parser.parse_args()
    measured: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        cache_server() as filled,
        cache_server() as empty,
        cache_server() as written,
    ):
        folder = Path(name)

        def measure(kind: str, recipe: Path, *words: str) -> None:
            arguments = (str(recipe), "--pipeline", args.pipeline, *words)
            seconds, _ = timed_run(recipe.parent, *arguments)
            measured.setdefault(kind, []).append(seconds)

        measure("fill", copy_recipe(folder / "fill"), "--remote", filled.url, *BOTH)
        for server in (filled, empty, written):
            server.slow_s = args.seconds
        for number in range(args.rounds):
            recipes = [copy_recipe(folder / f"{number}-{kind}") for kind in range(4)]
            measure("without", recipes[0])
            measure("empty, read", recipes[1], "--remote", empty.url)
            measure("empty, read and written", recipes[2], "--remote", written.url, *BOTH)
            measure("has everything", recipes[3], "--remote", filled.url)
            written.ac.clear()
            written.cas.clear()
            for recipe in recipes[:2]:
                text = recipe.read_text().replace("rtol: 1.0e-3", "rtol: 1.0e-2")
                recipe.write_text(text + EDIT)
            measure("edit, without", recipes[0])
            measure("edit, empty", recipes[1], "--remote", empty.url)
    del measured["fill"]
    medians = {kind: statistics.median(seconds) for kind, seconds in measured.items()}
    result = {
        "request_s": args.seconds,
        "rounds": args.rounds,
        "seconds": {kind: round(seconds, 2) for kind, seconds in medians.items()},
        "ratios": {
            kind: round(
                seconds / medians["edit, without" if kind.startswith("edit") else "without"], 2
            )
            for kind, seconds in medians.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
