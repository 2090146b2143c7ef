"""A compiled model: `load()` returns it, `run(feed)` runs it."""

# The wheel's __init__.py is made from this module.

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.errors import TvmflowError as Error
from tvmflow.runtime import loading
from tvmflow.runtime.module import Module as Model

if TYPE_CHECKING:
    from tvmflow.core.types import Array

__all__ = ["BundleError", "EnvironmentProblem", "Error", "Model", "load", "run"]

_shared: list[Model] = []
_lock = threading.Lock()


def load() -> Model:
    """Load the model: `inputs`, `outputs`, `run(feed)`, `latency(feed)`.

    Raises:
        BundleError: if the model cannot run on this CPU or with this version of TVM's runtime.
    """
    return loading.load(Path(__file__).with_name("model.tvmflow"))


def run(feed: Mapping[str, Array]) -> dict[str, Array]:
    """Run the model on inputs by name, and return outputs by name; the first call loads the model."""
    with _lock:
        if not _shared:
            _shared.append(load())
    return _shared[0].run(feed)
