"""Opens sizes of a random network: some axes of its inputs become dimensions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import onnx

from tests.support.random_networks import Feed
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Size, TensorSpec


class DynamicNetwork(NamedTuple):
    """A network with dynamic shapes.

    Attributes:
        model: The network, with names in place of some sizes.
        dimensions: Its dimensions.
        sizes: The sizes of each input.
        feed: Its inputs before it was opened.
    """

    model: onnx.ModelProto
    dimensions: tuple[Dimension, ...]
    sizes: Mapping[str, tuple[Size, ...]]
    feed: Feed

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return its inputs as a recipe has them."""
        largest = {entry.name: entry.max for entry in self.dimensions}
        return tuple(
            TensorSpec(
                name=name,
                shape=evaluate_shape(sizes, largest),
                dtype=str(self.feed[name].dtype),
                sizes=sizes if any(isinstance(size, str) for size in sizes) else (),
            )
            for name, sizes in self.sizes.items()
        )

    def feeds(self, seed: int, count: int) -> Iterator[Feed]:
        """Yield its own inputs, those of the smallest and of the largest sizes, and some between."""
        draw, rng = random.Random(seed), np.random.default_rng(seed)
        yield self.feed
        chosen = [
            {entry.name: getattr(entry, end) for entry in self.dimensions} for end in ("min", "max")
        ]
        chosen += [
            {entry.name: draw.randint(entry.min, entry.max) for entry in self.dimensions}
            for _ in range(count)
        ]
        for known in chosen:
            feed = {}
            for name, sizes in self.sizes.items():
                shape, values = evaluate_shape(sizes, known), self.feed[name].reshape(-1)
                feed[name] = values[rng.integers(0, values.size, prod(shape))].reshape(shape)
            yield feed


def make_dynamic(made: onnx.ModelProto, feed: Feed, seed: int) -> DynamicNetwork:
    """Open one or two axes of each input: batch, length, height, width, not the channels of images.

    Axes of one length mostly become one dimension.
    """
    draw = random.Random(seed)
    names: dict[int, str] = {}
    dimensions: list[Dimension] = []
    opened = onnx.ModelProto()
    opened.CopyFrom(made)
    sizes: dict[str, tuple[Size, ...]] = {}
    for name, array in feed.items():
        axes = [axis for axis in range(array.ndim) if axis != 1 or array.ndim == 3]
        chosen = draw.sample(axes, min(draw.randint(1, 2), len(axes)))
        row: list[Size] = list(array.shape)
        for axis in sorted(chosen):
            length = array.shape[axis]
            if length not in names or draw.random() < 0.2:
                names[length] = f"d{len(dimensions)}"
                # a norm of one number is noise
                least = 1 if axis == 0 else min(2, length)
                dimensions.append(Dimension(names[length], least, max(2 * length, length + 3)))
            row[axis] = names[length]
        sizes[name] = tuple(row)
    for value in opened.graph.input:
        for dim, size in zip(
            value.type.tensor_type.shape.dim, sizes.get(value.name, ()), strict=False
        ):
            if isinstance(size, str):
                dim.dim_param = size
    del opened.graph.value_info[:]
    for output in opened.graph.output:
        output.type.tensor_type.ClearField("shape")
    return DynamicNetwork(opened, tuple(dimensions), sizes, feed)
