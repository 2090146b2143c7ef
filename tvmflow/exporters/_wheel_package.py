"""A compiled model: `load()` gives it, `run(feed)` runs it."""

# The wheel's own __init__.py is made from this module, with the imports turned to its neighbours.

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.errors import BundleError, EnvironmentProblem
from tvmflow.runtime import Module
from tvmflow.runtime import load as _load

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["BundleError", "EnvironmentProblem", "Model", "load", "run"]

Model = Module

_shared: list[Model] = []
_lock = threading.Lock()


def load() -> Model:
    """The model, ready to run on this machine: `inputs`, `outputs`, `run(feed)`, `latency(feed)`.

    Raises BundleError when this machine's CPU or TVM's runtime here is not what it was built
    for, and says which.
    """
    return _load(Path(__file__).with_name("model.tvmflow"))


def run(feed: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name for inputs by name, with a model that is loaded at the first call and kept."""
    with _lock:
        if not _shared:
            _shared.append(load())
    return _shared[0].run(feed)
