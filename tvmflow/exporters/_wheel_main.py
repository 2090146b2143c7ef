"""`python -m MODEL input.npz output.npz`: runs the model on the arrays of a file."""

# The wheel's own __main__.py is made from this module, with the imports turned to its neighbours.

from __future__ import annotations

import sys
import zipfile
from typing import TYPE_CHECKING, Any

from tvmflow.errors import BundleError, TvmflowError
from tvmflow.exporters._wheel_package import Model, load

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def main(words: list[str]) -> int:
    """The exit code: 0, or 1 after a sentence, or 2 for words that make no sense."""
    try:
        model = load()
        if len(words) != 2:
            sys.stderr.write(f"usage: python -m {__package__} input.npz output.npz\n{model!r}\n")
            return 2
        _run(model, *words)
    except (TvmflowError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(model: Model, source: str, target: str) -> None:
    import numpy as np

    try:
        with np.load(source, allow_pickle=False) as archive:
            feed = {s.name: archive[s.name] for s in model.inputs if s.name in archive}
    except (ValueError, zipfile.BadZipFile) as error:
        raise BundleError(f"{source} is not an npz file of plain arrays: {error}") from error
    results = [model.run(part) for part in _calls(model, feed)]
    if len(results) == 1:
        joined = results[0]
    else:
        joined = {
            name: np.concatenate([np.atleast_1d(each[name]) for each in results])
            for name in results[0]
        }
    np.savez(target, **joined)


def _calls(model: Model, feed: dict[str, Array]) -> list[dict[str, Array]]:
    """The inputs of each call: arrays that are several times as long as the model's hold several calls."""
    times = 1
    for spec in model.inputs:
        array = feed.get(spec.name)
        if spec.shape and array is not None and array.shape[1:] == spec.shape[1:]:
            times = max(times, len(array) // spec.shape[0])
    cut = {
        spec.name: feed[spec.name].reshape(times, *spec.shape)
        for spec in model.inputs
        if spec.name in feed and feed[spec.name].shape == (times * spec.shape[0], *spec.shape[1:])
    }
    if times == 1 or len(cut) < len(model.inputs):
        return [feed]
    return [{name: array[index] for name, array in cut.items()} for index in range(times)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
