"""The location of the store. Part of an up-to-date run: it imports next to nothing."""

import os

VARIABLE = "TVMFLOW_STORE"


def store_root(argv: list[str], default: str) -> str:
    """Return the store of a command line: `--store DIR`, $TVMFLOW_STORE, or that of the project."""
    root = os.environ.get(VARIABLE) or default
    for index, word in enumerate(argv):
        if word == "--store" and index + 1 < len(argv):
            root = argv[index + 1]
        elif word.startswith("--store="):
            root = word.partition("=")[2]
    return os.path.abspath(root)
