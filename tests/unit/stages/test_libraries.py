"""Partitioned libraries: the outputs of one part are inputs of the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tvmflow.core.types import TensorSpec
from tvmflow.stages.verify.libraries import PartitionedLibrary

X, Y, MIDDLE, OUT = (TensorSpec(name, (2,), "float32") for name in ("x", "y", "middle", "out"))


class Adder:
    """Returns the sum of its inputs, and records their names."""

    parts: Mapping[str, Any] = MappingProxyType({})
    timed = None

    def __init__(self, ran_on: str, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> None:
        self.ran_on = ran_on
        self.inputs = inputs
        self.outputs = (output,)
        self.received: list[list[str]] = []

    def run_all(self, feeds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self.received += [sorted(feed) for feed in feeds]
        name = self.outputs[0].name
        return [{name: np.sum(list(feed.values()), axis=0)} for feed in feeds]


def test_every_part_is_given_what_it_takes_and_no_more() -> None:
    """Of the model's inputs, and of what the parts before it gave, for every batch."""
    parts = {"first": Adder("one", (X,), MIDDLE), "second": Adder("other", (Y, MIDDLE), OUT)}
    whole = PartitionedLibrary((X, Y), (OUT,), parts)
    feeds = [{"x": np.full(2, n, np.float32), "y": np.ones(2, np.float32)} for n in (1, 2)]
    results = whole.run_all(feeds)
    assert [list(outputs) for outputs in results] == [["out"], ["out"]]
    assert [outputs["out"].tolist() for outputs in results] == [[2, 2], [3, 3]]
    assert parts["first"].received == [["x"]] * 2
    assert parts["second"].received == [["middle", "y"]] * 2
    assert [sorted(feed) for feed in feeds] == [["x", "y"]] * 2


def test_what_ran_the_parts_is_named_once() -> None:
    """In the order of the parts."""
    same = {name: Adder("qemu-aarch64", (X,), MIDDLE) for name in "ab"}
    assert PartitionedLibrary((X,), (MIDDLE,), same).ran_on == "qemu-aarch64"
    two = {"a": Adder("one", (X,), MIDDLE), "b": Adder("other", (MIDDLE,), OUT)}
    assert PartitionedLibrary((X,), (OUT,), two).ran_on == "one, then other"
