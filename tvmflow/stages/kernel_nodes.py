"""The nodes of the user's model that each kernel of a build came from, by the facts of its stages.

`build` records places in the imported `main`, and `import` the names of these places: models that
differ in names alone share a build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tvmflow.core.formatting import count_text
from tvmflow.stages.base import name_some


class KernelCall(NamedTuple):
    """A call of a kernel in the model, and the names of the nodes that it computes, in their order."""

    nodes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The nodes for people."""
        return name_some(self.nodes)


def find_kernel_nodes(
    places: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str]
) -> dict[str, tuple[KernelCall, ...]]:
    """Return the calls of each kernel, with the nodes of the model that each of them computes.

    Args:
        places: The bindings of the imported `main` behind each call, by kernel.
        names: The node of the model that each of these bindings came from.
    """
    return {
        kernel: tuple(_name_call(call, names) for call in calls) for kernel, calls in places.items()
    }


def _name_call(places: Sequence[int], names: Sequence[str]) -> KernelCall:
    known = (names[place] for place in places if 0 <= place < len(names))
    return KernelCall(tuple(dict.fromkeys(filter(None, known))))


def calls_text(calls: Sequence[KernelCall]) -> str:
    """Return the nodes of a kernel's first call, and how many other calls it has; empty if unknown."""
    named = [call for call in calls if call.nodes]
    if not named:
        return ""
    others = len(calls) - 1
    return f"{named[0].text} and {count_text(others, 'other call')}" if others else named[0].text
