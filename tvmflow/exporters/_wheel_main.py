"""`python -m MODEL input.npz output.npz`: runs the model on the arrays of a file."""

# The wheel's own __main__.py is made from this module, with the imports turned to its neighbours.

from __future__ import annotations

import sys
from pathlib import Path

from tvmflow.errors import BundleError, TvmflowError
from tvmflow.exporters._wheel_package import Model, load
from tvmflow.samples import outputs_of, recorded, write_arrays


def main(words: list[str]) -> int:
    """The exit code: 0, or 1 after a sentence, or 2 for words that make no sense."""
    try:
        model = load()
        if len(words) != 2:
            sys.stderr.write(f"usage: python -m {__package__} input.npz output.npz\n{model!r}\n")
            return 2
        _run(model, *map(Path, words))
    except (TvmflowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(model: Model, source: Path, target: Path) -> None:
    if not source.is_file():
        raise BundleError(f"there is no file {source}")
    write_arrays(target, outputs_of(model.run, recorded(model.inputs, source, what=str(source))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
