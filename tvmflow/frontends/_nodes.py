"""The names of a model's nodes, carried to the bindings of the imported `main`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler.marks import mark_new, take_marks


class NodeNames:
    """Marks what a frontend emits for a node, so that passes over the imported module keep its name.

    Args:
        builder: Builds the function `main`.
    """

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self._builder = builder
        self._names: list[str] = []

    def mark(self, name: str, results: Sequence[Any]) -> None:
        """Name all that was emitted for a node, given its results."""
        marks = frozenset((len(self._names),))
        self._names.append(name)
        for result in results:
            mark_new(result, marks, self._builder.lookup_binding)

    def take(self, mod: tvm.IRModule) -> tuple[str, ...]:
        """Return the name of the node that each binding of `main` came from, and remove the marks."""
        return tuple(self._names[min(own)] if own else "" for own in take_marks(mod))
