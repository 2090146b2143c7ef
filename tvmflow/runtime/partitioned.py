"""Models in parts: the libraries of the parts, run one after the other as one program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.core.types import TensorSpec
from tvmflow.runtime.programs import Call, Main, PartProgram, Record

if TYPE_CHECKING:
    from tvmflow.runtime.arrays import Array


class Part(NamedTuple):
    """A part of a model: its program, its inputs and its outputs."""

    program: PartProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class PartitionedProgram:
    """The parts of a model as one program: one call at a time.

    A tensor that two parts on one device share stays there; one that a part on a GPU and a part
    on the CPU share is copied.

    Args:
        parts: The parts by name, in order.
        inputs: The names of the model's inputs.
        outputs: The names of its outputs.
    """

    def __init__(
        self, parts: Mapping[str, Part], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._parts = parts
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._lock = threading.Lock()

    @property
    def threads(self) -> int:
        """The threads that a call uses at most, the calling one included."""
        return max(part.program.threads for part in self._parts.values())

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Return the outputs for inputs; in place of None there is an array that takes an output."""
        import numpy as np

        with self._lock:
            arrays = self._fetch(self._call({}, inputs))
            results = []
            for array, output in zip(arrays, outputs, strict=True):
                if output is not None:
                    np.copyto(output, array)
                results.append(np.array(array) if output is None else output)
            return results

    @contextlib.contextmanager
    def bound(self, inputs: Sequence[Array]) -> Iterator[Call]:
        """Give a call with inputs that are in place."""
        with self._lock:
            yield partial(self._call, {}, inputs)

    @contextlib.contextmanager
    def profiled(self, inputs: Sequence[Array], record: Record) -> Iterator[Call]:
        """Give such a call, which reports each operator with the name of its part before its own."""

        def with_prefix(part: str) -> Record:
            return lambda name, seconds: record(f"{part}: {name}", seconds)

        mains = {
            name: part.program.profiled_main(with_prefix(name))
            for name, part in self._parts.items()
        }
        with self._lock:
            yield partial(self._call, mains, inputs)

    def wait(self) -> None:
        """Wait until all calls of all parts have ended."""
        for part in self._parts.values():
            part.program.wait()

    def _call(
        self, mains: Mapping[str, Main], inputs: Sequence[Array]
    ) -> dict[str, tuple[PartProgram | None, Any]]:
        """Run all parts, those in `mains` by these functions.

        Returns:
            All tensors by name, each with the program that computed it.
        """
        tensors: dict[str, tuple[PartProgram | None, Any]] = {
            name: (None, array) for name, array in zip(self._inputs, inputs, strict=True)
        }
        for name, part in self._parts.items():
            placed = [part.program.place(tensors[spec.name][1], spec) for spec in part.inputs]
            main: Main = mains.get(name, part.program.main)
            results = main(*placed)
            for spec, result in zip(part.outputs, results, strict=True):
                tensors[spec.name] = (part.program, result)
        return tensors

    def _fetch(self, tensors: Mapping[str, tuple[PartProgram | None, Any]]) -> list[Array]:
        outputs = [tensors[name] for name in self._outputs]
        return [program.fetch(tensor) if program else tensor for program, tensor in outputs]
