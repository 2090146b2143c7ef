"""Partitioned libraries: the parts of a model, run one after the other behind one `main`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.native import CPU, Instrument, Main, copy_and_wait, list_tensors

if TYPE_CHECKING:
    from tvmflow.runtime.module import Module


class PartitionedProgram:
    """The parts of a model as one program.

    A tensor that two parts on one device share stays there; one that a part on a GPU and a part
    on the CPU share is copied.
    """

    device = CPU

    def __init__(self, parts: Mapping[str, Module], signature: Mapping[str, Json]) -> None:
        self._parts = parts
        self._inputs = [tensor["name"] for tensor in signature["inputs"]]
        self._outputs = [tensor["name"] for tensor in signature["outputs"]]
        self._copies: dict[tuple[str, str], Any] = {}
        self.main = self._chain({name: part.program.main for name, part in parts.items()})

    def instrumented_main(self, instrument: Instrument) -> Main:
        """Return a `main` that reports every operator, with the name of its part before its own."""

        def with_prefix(part: str) -> Instrument:
            return lambda name, before: instrument(f"{part}: {name}", before)

        parts = self._parts.items()
        return self._chain(
            {name: part.program.instrumented_main(with_prefix(name)) for name, part in parts}
        )

    def wait(self) -> None:
        """Wait until all calls of all parts have ended."""
        for part in self._parts.values():
            part.program.wait()

    def _chain(self, mains: Mapping[str, Main]) -> Main:
        def main(*arguments: Any) -> list[Any]:
            tensors = dict(zip(self._inputs, arguments, strict=True))
            for name, part in self._parts.items():
                inputs = [self._move(tensors[spec.name], name, spec) for spec in part.inputs]
                results = list_tensors(mains[name](*inputs, *part.weights))
                names = (spec.name for spec in part.outputs)
                tensors.update(zip(names, results, strict=True))
            return [tensors[name] for name in self._outputs]

        return main

    def _move(self, tensor: Any, part: str, spec: TensorSpec) -> Any:
        """Return a tensor with the same content on a part's device."""
        device = self._parts[part].program.device
        if device.holds(tensor):
            return tensor
        copied = self._copies.get((part, spec.name))
        if copied is None:
            copied = self._copies[part, spec.name] = device.allocate(spec)
        # the part that made the tensor reuses its memory as soon as it is called again
        copy_and_wait(tensor, copied)
        return copied
