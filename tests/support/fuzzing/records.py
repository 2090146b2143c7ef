"""Mutated trial packs: valid trials are imported, the rest is refused, and the ledger stays valid."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.fuzzing import released
from tests.support.fuzzing.cases import Case
from tests.support.fuzzing.mutations import mutate_bytes, mutate_tree
from tvmflow.cli.main import main
from tvmflow.core.errors import EXIT_BUG, EXIT_OK
from tvmflow.tuning.pack import start_digest

prepare = released.prepare


def make_case(draw: random.Random, folder: Path) -> Case:
    content = (folder.parent / released.PACK).read_bytes()
    if draw.random() < 0.5:
        content = mutate_bytes(draw, content)
    else:
        lines = content.splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutate_tree(draw, json.loads(lines[number]))).encode()
        content = _seal(lines)
    (folder / "mutated.jsonl").write_bytes(content)
    return Case(_import_and_check)


def _seal(lines: list[bytes]) -> bytes:
    """Return a pack of these lines with the digest that its header must have: a stranger can do that, too."""
    body = b"".join(line + b"\n" for line in lines[1:])
    try:
        header = json.loads(lines[0])
        digest = start_digest(header)
        digest.update(body)
        header["digest"] = digest.hexdigest()
    except (AttributeError, TypeError, ValueError):
        return lines[0] + b"\n" + body
    return json.dumps(header).encode() + b"\n" + body


def _import_and_check() -> int:
    """Import the pack into an empty store, whose ledger must be good afterwards, whatever was refused."""
    code = main(["records", "import", "mutated.jsonl", "--store", "store"])
    checked = main(["records", "verify", "--store", "store"])
    if checked != EXIT_OK:
        print(f"records verify ends with {checked} after an import that ended with {code}")
        return EXIT_BUG
    return code
