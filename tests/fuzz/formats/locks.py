"""Mutated lock files: a locked plan or a diff takes what still means the same, and refuses the rest."""

from __future__ import annotations

import random
from pathlib import Path

import yaml  # noqa: TID251 - writes what the reader must refuse

from tests.fuzz.formats import released
from tests.fuzz.formats.cases import Case
from tests.support.mutations import mutate_bytes, mutate_tree
from tvmflow.cli.main import main

prepare = released.prepare


def make_case(draw: random.Random, folder: Path) -> Case:
    lock = folder.parent / released.LOCK
    mutated = folder / "mutated.lock.yaml"
    content = lock.read_bytes()
    if draw.random() < 0.5:
        mutated.write_bytes(mutate_bytes(draw, content))
    else:
        tree = mutate_tree(draw, yaml.safe_load(content))
        mutated.write_text(yaml.dump(tree, allow_unicode=True), errors="surrogatepass")
    recipe = str(folder.parent / released.RECIPE)
    words = draw.choice(
        (
            ["run", recipe, "--locked", "--lock", str(mutated), "--dist", "dist"],
            ["plan", recipe, "--locked", "--lock", str(mutated)],
            ["diff", str(lock), str(mutated)],
        )
    )
    return Case(lambda: main(words))
