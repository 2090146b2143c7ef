"""A signed delivery in which one file was changed: `verify` refuses it, `inspect` never fails."""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz.formats import released
from tests.fuzz.formats.cases import Case, Ending
from tvmflow.cli.main import main
from tvmflow.core.errors import EXIT_OK

prepare = released.prepare


def make_case(draw: random.Random, folder: Path) -> Case:
    differs = released.copy_and_mutate(draw, folder.parent / released.DELIVERED, folder / "files")
    key = str(folder.parent / f"{released.KEY}.pub")
    words = [draw.choice(("verify", "verify", "inspect")), "files", "--trusted", key]

    def check(ending: Ending) -> str:
        if ending.code == EXIT_OK and differs and words[0] == "verify":
            return "a changed file was verified"
        return ""

    return Case(lambda: main(words), check)
