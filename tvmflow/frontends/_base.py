"""What a frontend offers: the files a source consists of, its import, and a reference to verify against."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tvmflow.values import InputFile, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import tvm


def nearest(name: str, names: Sequence[str]) -> str:
    """What to add to a sentence about a name that a model lacks: those most like it, if there are any."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(close)})" if close else ""


class LoadedModel(NamedTuple):
    """A model in TVM's terms, with its weights apart.

    `mod` holds one public Relax function `main` in dataflow form, not yet legalized, whose
    arguments are the model's inputs in the order of `inputs`, then the weights in the order
    of `params`; its attribute `num_input` counts the former. It returns a tensor or a flat
    tuple of tensors, in the order of `outputs`, then of `tensors`: those of the tensors asked for
    that are not outputs anyway. Shapes are static. Integer tensors that the
    graph needs as constants (shapes, axes) are constants in `mod`; everything else that is
    learned is in `params`, so that new weights for the same architecture give the same `mod`.
    """

    mod: tvm.IRModule
    params: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...] = ()


class Reference(Protocol):
    """The framework that the model came from, running it, in a process of its own."""

    name: str
    """Framework and version as reports show it, e.g. `ONNX Runtime 1.31.1`."""

    def run(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """The reference outputs for one batch, by the names in `LoadedModel.outputs` and `tensors`."""
        ...

    def latency(
        self, feed: Mapping[str, np.ndarray[Any, Any]], *, repeat: int, min_seconds: float
    ) -> list[float]:
        """Seconds per call of `repeat` timed repeats after a warm-up, each of whole calls for at least `min_seconds`."""
        ...


class Frontend(Protocol):
    """One module in this folder. Module-level code imports neither the framework nor tvm."""

    KIND: str
    """The key under `model:` in a recipe."""

    TOOLS: tuple[str, ...]
    """Distributions whose code can change what `load` returns; they enter the key of `import`."""

    REFERENCE_TOOLS: tuple[str, ...]
    """Distributions whose code can change what the reference computes; they enter the key of `verify`."""

    def settings(self, model: Any) -> dict[str, Any]:
        """The slice of the recipe's `model` that `load` needs beside the files (JSON; no paths)."""
        ...

    def files(self, model: Any, base: Path, where: Any) -> tuple[InputFile, ...]:
        """The files that the source consists of; reads as little as it can and imports no framework.

        `model` is the recipe's `ModelSource`, `base` the folder that relative paths start from,
        `where(*path)` gives `file:line:column` of a field below `model`.
        """
        ...

    def load(
        self,
        files: Mapping[str, Path],
        inputs: tuple[TensorSpec, ...],
        settings: Mapping[str, Any],
        tensors: tuple[str, ...] = (),
    ) -> LoadedModel:
        """Import the model for these input shapes, giving also these of its inner tensors.

        Raises ImportFailed with operator and node, or with the name that is none of its tensors.
        """
        ...

    def reference(
        self,
        files: Mapping[str, Path],
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        settings: Mapping[str, Any],
        *,
        tensors: tuple[TensorSpec, ...] = (),
        threads: int,
        scratch: Path,
    ) -> AbstractContextManager[Reference]:
        """Start the reference, which also gives `tensors`, in an isolated process. Raises EnvironmentProblem when it is not installed."""
        ...
