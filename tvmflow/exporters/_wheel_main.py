"""Command line of a wheel's model.

`python -m MODEL input.npz output.npz` runs it on arrays, `python -m MODEL IMAGE …` on images.
"""

# The wheel's __main__.py is made from this module.

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tvmflow.core.errors import BundleError, TvmflowError
from tvmflow.exporters._wheel_package import Model, load
from tvmflow.runtime.image_files import read_files
from tvmflow.runtime.labels import format_predictions, predictions_json
from tvmflow.runtime.npz import read_npz, write_npz
from tvmflow.runtime.samples import image_samples, make_samples, run_samples

_ARRAYS = ".npz"


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code: 0, 1 for an error, 2 for wrong arguments."""
    try:
        model = load()
        has_arrays = bool(arguments) and arguments[0].endswith(_ARRAYS)
        if has_arrays and len(arguments) == 2:
            _run(model, *map(Path, arguments))
        elif model.images and model.classes and arguments and not has_arrays:
            _classify(model, arguments)
        else:
            sys.stderr.write(_usage(model))
            return 2
    except (TvmflowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _usage(model: Model) -> str:
    images = f"\n       python -m {__package__} IMAGE ..." if model.images and model.classes else ""
    return f"usage: python -m {__package__} input.npz output.npz{images}\nmodel: {model}\n"


def _run(model: Model, inputs: Path, outputs: Path) -> None:
    if not inputs.is_file():
        raise BundleError(f"there is no file {inputs}")
    if model.dynamic_tensors is not None:
        # Arrays with dynamic shapes are one call and not split into samples.
        arrays = read_npz(inputs, str(inputs))
        write_npz(
            outputs,
            model.run(
                {spec.name: arrays[spec.name] for spec in model.inputs if spec.name in arrays}
            ),
        )
        return
    samples = make_samples(model.inputs, read_npz(inputs, str(inputs)), source=str(inputs))
    write_npz(outputs, run_samples(model.run, samples))


def _classify(model: Model, files: Sequence[str]) -> None:
    assert model.classes is not None
    preprocessing = model.find_preprocessing()
    samples = image_samples(preprocessing, read_files(files, preprocessing.fit))
    name = model.outputs[0].name
    scores = run_samples(model.run, samples)[name]
    predictions = predictions_json(files, model.classes.rank(scores))
    lines = (model.classes.describe(scores, name), *format_predictions(predictions))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
