"""Mutated trial packs: valid trials are imported, the rest is refused, and the ledger stays valid."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.fuzz.formats import released
from tests.fuzz.formats.cases import Case
from tests.support.mutations import mutate_bytes, mutate_tree
from tests.support.trials import sealed
from tvmflow.cli.main import main
from tvmflow.core.errors import EXIT_BUG, EXIT_OK
from tvmflow.core.types import Json

prepare = released.prepare


def make_case(draw: random.Random, folder: Path) -> Case:
    content = (folder.parent / released.PACK).read_bytes()
    if draw.random() < 0.5:
        content = mutate_bytes(draw, content)
    else:
        lines = content.splitlines()
        number = draw.randrange(len(lines))
        lines[number] = _dump(mutate_tree(draw, json.loads(lines[number])))
        content = _seal(lines)
    (folder / "mutated.jsonl").write_bytes(content)
    return Case(_import_and_check)


def _dump(value: Json) -> bytes:
    """Return JSON as packs have it, also of values that are none of theirs, such as NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _seal(lines: list[bytes]) -> bytes:
    """Return a pack of these lines with the digest and the counts that it must have: a stranger can do that, too."""
    content = b"".join(line + b"\n" for line in lines)
    try:
        return sealed(content)
    except (AttributeError, KeyError, TypeError, ValueError):
        return content


def _import_and_check() -> int:
    """Import the pack into an empty store, whose ledger must be good afterwards, whatever was refused."""
    code = main(["records", "import", "mutated.jsonl", "--store", "store"])
    checked = main(["records", "verify", "--store", "store"])
    if checked != EXIT_OK:
        print(f"records verify ends with {checked} after an import that ended with {code}")
        return EXIT_BUG
    return code
