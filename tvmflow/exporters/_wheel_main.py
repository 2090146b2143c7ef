"""`python -m MODEL input.npz output.npz`: runs the model on the arrays of a file."""

# The wheel's __main__.py is made from this module.

from __future__ import annotations

import sys
from pathlib import Path

from tvmflow.core.errors import BundleError, TvmflowError
from tvmflow.exporters._wheel_package import Model, load
from tvmflow.runtime.samples import load_samples, run_samples, write_npz


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code: 0, 1 for an error, 2 for wrong arguments."""
    try:
        model = load()
        if len(arguments) != 2:
            sys.stderr.write(f"usage: python -m {__package__} input.npz output.npz\n{model!r}\n")
            return 2
        _run(model, *map(Path, arguments))
    except (TvmflowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(model: Model, inputs: Path, outputs: Path) -> None:
    if not inputs.is_file():
        raise BundleError(f"there is no file {inputs}")
    samples = load_samples(model.inputs, inputs, source=str(inputs))
    write_npz(outputs, run_samples(model.run, samples))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
