"""Labels: the names of a classifier's classes, and the top classes for its scores."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.documents import quote
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Array, Json, TensorSpec

PROBABILITIES: Final = ("softmax", "sigmoid")
"""If one of these operators is a model's last one, its scores are probabilities."""
BEST: Final = 5
"""How many of the best classes are shown by default."""
MAX_NAME: Final = 500
"""The maximum number of characters of a name, a limit of generated code."""

# Scores whose sums are this close to 1 count as probabilities; the tolerance suffices for float16.
_SUM_TOLERANCE: Final = 1e-2


class Prediction(NamedTuple):
    """A class with its probability; `position` is its index among the scores."""

    label: str
    probability: float
    position: int


class Labels(NamedTuple):
    """The names of classes, one for each score of the model's first output, and the digest of their file.

    `activation` is the operator that computes the scores if it is one of `PROBABILITIES`, else empty.
    """

    names: tuple[str, ...]
    activation: str
    sha256: str

    @classmethod
    def from_json(cls, value: Json) -> Labels:
        """Return the labels in a manifest; ValueError when they are damaged."""
        names, activation = value["names"], value["activation"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{quote(names)} are not names of classes")
        if activation not in ("", *PROBABILITIES):
            raise ValueError(f"the activation {quote(activation)} is unknown")
        return cls(tuple(names), activation, str(value["sha256"]))

    def to_json(self) -> dict[str, Json]:
        """Return the manifest's fields."""
        return {**self._asdict(), "names": list(self.names)}

    def check(self, output: TensorSpec, *, is_activation_known: bool = True) -> None:
        """Raise ValueError, with a sentence for the user, if an output does not have one score per name."""
        scores = math.prod(output.shape[1:])
        takes = f"the output '{output.name}' is {output.dtype}{list(output.shape)}"
        if scores != len(self.names):
            raise ValueError(
                f"there are {len(self.names)} names, and {scores} scores for a sample: {takes}"
            )
        may_be_bytes = self.activation or not is_activation_known
        is_byte = output.dtype in ("int8", "uint8") and may_be_bytes
        if not output.dtype.startswith("float") and not is_byte:
            raise ValueError(f"scores are floating-point numbers, and {takes}")

    def rank(self, scores: Array, top: int = BEST) -> list[list[Prediction]]:
        """Return the best classes for each sample, the best first."""
        import numpy as np

        values = self.probabilities(scores)
        order = np.argsort(-values, axis=1, kind="stable")[:, :top]
        return [
            [Prediction(self.names[i], float(row[i]), int(i)) for i in indices]
            for row, indices in zip(values, order, strict=True)
        ]

    def probabilities(self, scores: Array) -> Array:
        """Return the probability of each class, float64 `[samples, classes]`."""
        import numpy as np

        values = scores.reshape(-1, len(self.names)).astype(np.float64)
        if scores.dtype.kind in "iu":
            # quantized probabilities are multiples of 1/256
            return (values - np.iinfo(scores.dtype).min) / 256
        if self.is_probability(scores):
            return values
        # a NaN score would make all probabilities NaN, so it counts as -inf
        values = np.nan_to_num(values, nan=-np.inf, neginf=-np.inf)
        # if no score is finite, all probabilities are NaN
        with np.errstate(invalid="ignore"):
            raised = np.exp(values - values.max(axis=1, keepdims=True))
            normalized: Array = raised / raised.sum(axis=1, keepdims=True)
        return normalized

    def is_probability(self, scores: Array) -> bool:
        """Return whether scores are probabilities: by the last operator, or else because their sums are 1."""
        import numpy as np

        if self.activation:
            return True
        values = scores.reshape(-1, len(self.names)).astype(np.float64)
        sums = values.sum(axis=1)
        return bool((values >= 0).all() and np.isclose(sums, 1.0, 0, _SUM_TOLERANCE).all())

    def describe(self, scores: Array, output: str) -> str:
        """Return a phrase that says where the probabilities come from."""
        if self.is_probability(scores):
            return f"probabilities: the output '{output}'"
        return f"probabilities: softmax of the output '{output}'"


def read_labels(manifest: Mapping[str, Json]) -> Labels | None:
    """Return the labels in the manifest of a bundle, or None."""
    labels = manifest.get("labels")
    return Labels.from_json(labels) if labels is not None else None


def parse_labels(content: bytes, activation: str = "") -> Labels:
    """Return the labels in a file of one name per line, stripped; ValueError if there are none.

    Control characters are errors, including marks that change the direction of text.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    names = [line.strip() for line in re.split(r"\r\n?|\n", text.rstrip())]
    if names == [""]:
        raise ValueError("it has no names")
    if "" in names:
        raise ValueError(f"its line {names.index('') + 1} is empty: write one name per line")
    for number, name in enumerate(names, 1):
        if not name.isprintable():
            raise ValueError(f"its line {number} has a control character: {quoted(name)}")
        if len(name) > MAX_NAME:
            raise ValueError(
                f"its line {number} ({quoted(name)}) has a name of {len(name):,} characters, more than {MAX_NAME}"
            )
    return Labels(tuple(names), activation, hashlib.sha256(content).hexdigest())


def predictions_json(
    files: Sequence[str], predictions: Sequence[Sequence[Prediction]]
) -> list[Mapping[str, Json]]:
    """Return the best classes for each file as JSON."""
    return [
        {"file": file, "classes": [prediction._asdict() for prediction in best]}
        for file, best in zip(files, predictions, strict=True)
    ]


def format_predictions(predictions: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    """Yield the lines that show the result of `predictions_json`."""
    for image in predictions:
        yield f"{image['file']}:"
        for best in image["classes"]:
            yield f"  {best['probability']:7.2%}  {best['label']}"
