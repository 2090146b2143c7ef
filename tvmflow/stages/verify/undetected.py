"""Undetected faults: whether a comparison can tell a wrong library, by the reference alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tvmflow.stages.verify.comparison import compare
from tvmflow.stages.verify.tolerances import Tolerance

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ZEROS: Final = "zeros"
"""Zeros would pass for an output."""
INPUTS: Final = "inputs"
"""The output of one batch would pass for that of every other: a library may ignore its inputs."""
ANYTHING: Final = "anything"
"""An output is empty in every batch."""


def find_undetected(
    outputs: Sequence[Mapping[str, Array]], names: Iterable[str], tolerance: Tolerance
) -> dict[str, str]:
    """Return the outputs of which a wrong library would pass, with what it could do.

    Args:
        outputs: The reference's outputs by name, for each batch.
        names: The outputs to look at.
        tolerance: How closely outputs must agree.
    """
    named = ((name, _find([batch[name] for batch in outputs], tolerance)) for name in names)
    return {name: what for name, what in named if what}


def _find(batches: Sequence[Array], tolerance: Tolerance) -> str:
    import numpy as np

    if not any(batch.size for batch in batches):
        return ANYTHING
    if all(_passes(np.zeros_like(batch), batch, tolerance) for batch in batches):
        return ZEROS
    first, *others = batches
    is_constant = others and all(_passes(first, other, tolerance) for other in others)
    return INPUTS if is_constant else ""


def _passes(actual: Array, expected: Array, tolerance: Tolerance) -> bool:
    return compare(actual, expected, tolerance)["passed"]
