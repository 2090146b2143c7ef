"""Inputs and outputs of open sizes: those of a call follow from the shapes of its inputs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.dimensions import WrongSize, derive_sizes, find_bounds, ranges_text, specs_at
from tvmflow.core.documents import quote
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Dimension, Json, Size, TensorSpec
from tvmflow.runtime.arrays import OpenArrays

if TYPE_CHECKING:
    from tvmflow.runtime.arrays import Array

Shapes = tuple[tuple[int, ...], ...]

# The shapes whose sizes are kept: a program often comes back to some of them.
_MAX_KEPT: Final = 64
_MAX_SIZE: Final = 2**31 - 1
_MAX_DIMENSIONS: Final = 64


class CallTensors(NamedTuple):
    """The tensors of a call.

    Attributes:
        sizes: The size of each dimension by name.
        inputs: The inputs with the shapes that they have in this call.
        outputs: The outputs with theirs.
        new_outputs: For each output a function that returns an array with any content.
    """

    sizes: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    new_outputs: tuple[Callable[[], Array], ...]


class OpenTensors:
    """The inputs and outputs of a model with dimensions.

    Args:
        signature: The signature, which was checked.

    Attributes:
        dimensions: The dimensions.
        inputs: The inputs, with their largest shapes.
        outputs: The outputs, with theirs.
    """

    def __init__(self, signature: Mapping[str, Json]) -> None:
        self.dimensions = Dimension.list_of(signature)
        self.inputs = tuple(map(TensorSpec.from_json, signature["inputs"]))
        self.outputs = tuple(map(TensorSpec.from_json, signature["outputs"]))
        self._sizes = {spec.name: _sizes_of(spec) for spec in self.inputs}
        self._kept: OrderedDict[Shapes, CallTensors] = OrderedDict()
        self._lock = threading.Lock()
        self._memory = [OpenArrays() for _ in self.outputs]

    def tensors_of(self, inputs: Sequence[Array]) -> CallTensors:
        """Return the tensors of a call with some inputs, in their order.

        Raises:
            BundleError: a ValueError that names the dimension or the input of a size that the model does not take.
        """
        shapes = tuple([array.shape for array in inputs])
        found = self._kept.get(shapes)
        return self._derive(shapes) if found is None else found

    def _derive(self, shapes: Shapes) -> CallTensors:
        names = [spec.name for spec in self.inputs]
        try:
            sizes = derive_sizes(
                self.dimensions, self._sizes, dict(zip(names, shapes, strict=True))
            )
        except WrongSize as error:
            raise BundleError(str(error), fix=f"the model takes {self._describe()}") from error
        outputs = specs_at(self.outputs, sizes)
        tensors = CallTensors(
            sizes=sizes,
            inputs=specs_at(self.inputs, sizes),
            outputs=outputs,
            new_outputs=tuple(
                memory.maker(spec) for memory, spec in zip(self._memory, outputs, strict=True)
            ),
        )
        with self._lock:
            self._kept[shapes] = tensors
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return tensors

    def _describe(self) -> str:
        inputs = (
            f"{name} of shape [{', '.join(map(str, sizes))}]" for name, sizes in self._sizes.items()
        )
        return f"{', '.join(inputs)}, where {ranges_text(self.dimensions)}"


def _sizes_of(spec: TensorSpec) -> tuple[Size, ...]:
    return spec.sizes or spec.shape


def read_open_tensors(signature: Mapping[str, Json]) -> OpenTensors | None:
    """Return the tensors of a signature with dimensions; None for one of fixed sizes."""
    return OpenTensors(signature) if signature.get("dimensions") else None


def check_open_sizes(signature: Mapping[str, Json]) -> int:
    """Check the dimensions of a signature, and the sizes that depend on them.

    Returns:
        The bytes of all inputs and outputs of open sizes, at most.

    Raises:
        ValueError: They are none that tvmflow writes.
    """
    bounds = {}
    entries = signature.get("dimensions", ())
    if len(entries) > _MAX_DIMENSIONS:
        raise ValueError(f"there are {len(entries)} dimensions")
    for entry in Dimension.list_of(signature):
        numbers = (entry.min, entry.max, entry.multiple_of, *entry.tune_at)
        is_range = (
            all(type(number) is int and 1 <= number <= _MAX_SIZE for number in numbers)
            and entry.min <= entry.max
        )
        is_name = isinstance(entry.name, str) and entry.name.isidentifier()
        if not is_range or not is_name or entry.name in bounds:
            raise ValueError(f"{quote(list(entry))} is no dimension")
        bounds[entry.name] = (entry.min, entry.max)
    total = 0
    for direction in ("inputs", "outputs"):
        for spec in map(TensorSpec.from_json, signature[direction]):
            if spec.sizes:
                total += _find_most_bytes(spec, direction, bounds)
    return total


def _find_most_bytes(
    spec: TensorSpec, direction: str, bounds: Mapping[str, tuple[int, int]]
) -> int:
    """Return the bytes of a tensor of open sizes, at most.

    Raises:
        ValueError: Its sizes are none of these dimensions.
    """
    if len(spec.sizes) != len(spec.shape) or not all(
        type(size) in (int, str) for size in spec.sizes
    ):
        raise ValueError(f"{quote(list(spec.sizes))} are no sizes")
    if direction == "inputs" and not all(
        size >= 0 if isinstance(size, int) else size in bounds for size in spec.sizes
    ):
        raise ValueError(f"{quote(list(spec.sizes))} are no sizes of an input")
    largest = [find_bounds(size, bounds)[1] for size in spec.sizes]
    return spec._replace(shape=tuple(max(size, 0) for size in largest)).bytes


def list_codes(dimensions: Sequence[Dimension]) -> list[tuple[Any, ...]]:
    """Return what a C library says of its dimensions, in its order."""
    return sorted((entry.name, entry.min, entry.max, entry.multiple_of) for entry in dimensions)


def describe_in_c(spec: TensorSpec) -> TensorSpec:
    """Return a tensor as a C library describes it: open sizes are -1."""
    shape = tuple(-1 if isinstance(size, str) else size for size in _sizes_of(spec))
    return spec._replace(shape=shape, sizes=())
