"""A caller's arrays in the form that libraries need: dense, in C order, in the CPU's memory."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core import dimensions
from tvmflow.core.documents import quote
from tvmflow.core.errors import BundleError
from tvmflow.core.formatting import names_text
from tvmflow.core.types import SCALE_BYTES, SCALE_STEPS, Array, Dimension, Json, TensorSpec

if TYPE_CHECKING:
    import numpy as np


ALIGNMENT: Final = 64
"""Kernels need tensors whose address is a multiple of this many bytes."""

# DLPack devices whose memory the CPU can access: kDLCPU, kDLCUDAHost, kDLROCMHost, kDLCUDAManaged.
_HOST_DEVICES: Final = (1, 3, 11, 13)
# For smaller arrays, a copy by the library costs less than allocating aligned memory in Python.
_MIN_ALIGNED_BYTES: Final = 1 << 14
# The number of released buffers kept for reuse: callers often keep one result while they compute the next.
_MAX_SPARE: Final = 2


def allocate_aligned(spec: TensorSpec) -> Array:
    """Return an array of zeros with the alignment that kernels rely on."""
    import numpy as np

    return _place(np.zeros(spec.bytes + ALIGNMENT, np.uint8), spec)


def _place(raw: Array, spec: TensorSpec) -> Array:
    """Return an aligned array in a buffer that has `ALIGNMENT` bytes to spare."""
    start = -address_of(raw) % ALIGNMENT
    array: Array = raw[start : start + spec.bytes].view(dtype_of(spec.dtype)).reshape(spec.shape)
    return array


class OutputArrays:
    """Arrays for one output, whose memory is reused once nothing refers to an array anymore.

    Without reuse, the system would reclaim the memory of a large array and provide zeroed pages for the next one. A page
    fault for each page costs more than filling the pages. Smaller arrays are not aligned.
    """

    def __init__(self) -> None:
        self._spare: list[Array] = []

    def maker(self, spec: TensorSpec) -> Callable[[], Array]:
        """Return a function that returns a new array with undefined content."""
        import numpy as np

        if spec.bytes < _MIN_ALIGNED_BYTES:
            return functools.partial(np.empty, spec.shape, dtype_of(spec.dtype))
        return functools.partial(self._new, spec)

    def _new(self, spec: TensorSpec) -> Array:
        import numpy as np

        try:
            raw = self._spare.pop()
        except IndexError:
            raw = None
        if raw is None or raw.nbytes < spec.bytes + ALIGNMENT:
            raw = np.empty(spec.bytes + ALIGNMENT, np.uint8)
        memory = _place(raw, spec)
        array = np.asarray(_Lease(memory, self._spare, raw))
        # NumPy's array interface does not support bfloat16
        return array if array.dtype == memory.dtype else array.view(memory.dtype)


class _Lease:
    """Memory that an array and all of its views refer to: the object behind NumPy's array interface."""

    def __init__(self, array: Array, spare: list[Array], raw: Array) -> None:
        self.__array_interface__ = array.__array_interface__
        self._raw = raw
        self._spare = spare

    def __del__(self) -> None:
        if len(self._spare) < _MAX_SPARE:
            self._spare.append(self._raw)


def align(array: Array, spec: TensorSpec) -> Array:
    """Return an array in the form that kernels take: itself, or a copy if unaligned or read-only."""
    import numpy as np

    if address_of(array) % ALIGNMENT == 0 and array.flags.writeable:
        return array
    aligned = allocate_aligned(spec._replace(shape=array.shape))
    np.copyto(aligned, array)
    return aligned


def address_of(array: Array) -> int:
    """Return the address of the first element of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


def as_array(value: Any) -> Array | None:
    """Return an array that shares a tensor's memory (DLPack, buffer protocol); None if impossible."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] not in _HOST_DEVICES:
            return None
        # torch refuses DLPack for a tensor that requires gradients
        value = value.detach() if getattr(value, "requires_grad", False) else value
    try:
        if hasattr(value, "__dlpack_device__"):
            return np.from_dlpack(value)
        return np.asarray(memoryview(value))
    except (BufferError, RuntimeError, TypeError, ValueError):
        # for instance, a tensor of a dtype that NumPy lacks, such as bfloat16
        return None


def match_inputs(
    specs: tuple[TensorSpec, ...], feed: Mapping[str, Any], takes: object
) -> list[Array]:
    """Return the arrays of a feed in the order of the inputs; arrays that are not dense are copied.

    Raises:
        BundleError: a ValueError that names every input that does not fit.
    """
    import numpy as np

    # a fast path for the usual case: a call of a small model takes only a few microseconds
    dense: list[Any] = [feed.get(spec.name) for spec in specs]
    if len(feed) == len(specs) and all(map(_is_dense, dense, specs)):
        return dense
    arrays, problems = _match("input", specs, feed)
    problems += [f"input '{spec.name}' is missing" for spec in specs if spec.name not in feed]
    if problems:
        raise BundleError("; ".join(problems), fix=f"this model takes {takes}")
    # `ascontiguousarray` would give a scalar a dimension
    return [np.asarray(arrays[spec.name], order="C") for spec in specs]


def _is_dense(value: Any, spec: TensorSpec) -> bool:
    """Return whether a value is an array that kernels can read; dynamic shapes are checked elsewhere."""
    import numpy as np

    return (
        type(value) is np.ndarray
        and value.dtype is dtype_of(spec.dtype)
        and (value.shape == spec.shape or bool(spec.sizes))
        and value.flags.c_contiguous
    )


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype with this name; cached, because NumPy parses the name each time."""
    import numpy as np

    if name == "bfloat16":
        # this package makes the dtype known to NumPy
        import ml_dtypes  # noqa: F401

    return np.dtype(name)


def match_outputs(
    specs: tuple[TensorSpec, ...], out: Mapping[str, Any] | None, gives: object
) -> list[Array | None]:
    """Return the arrays that receive outputs, in the order of the outputs; None if `out` lacks one.

    Raises:
        BundleError: a ValueError that names every array that does not fit.
    """
    if out is None:
        return [None] * len(specs)
    if not isinstance(out, Mapping):
        kind = type(out).__name__
        raise BundleError(f"`out` is a {kind}, not arrays by name", fix=f"this model is {gives}")
    arrays, problems = _match("output", specs, out)
    for name, array in arrays.items():
        if not (array.flags.writeable and array.flags.c_contiguous):
            problems.append(f"the array for output '{name}' is not writable and dense in C order")
    if problems:
        raise BundleError("; ".join(problems), fix=f"this model is {gives}")
    return [arrays.get(spec.name) for spec in specs]


def _match(
    kind: str, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Any]
) -> tuple[dict[str, Array], list[str]]:
    """Return tensors as arrays by name, and a clause for each tensor that is unknown or does not fit."""
    expected = {spec.name: spec for spec in specs}
    problems = [f"there is no {kind} '{name}'" for name in tensors if name not in expected]
    arrays = {}
    for name in expected.keys() & tensors.keys():
        spec, array = expected[name], as_array(tensors[name])
        if array is None:
            kind_of = type(tensors[name]).__name__
            problems.append(
                f"{kind} '{name}' is a {kind_of}, which NumPy cannot read in the CPU's memory"
            )
            continue
        arrays[name] = array
        if array.shape != spec.shape and not spec.sizes:
            problems.append(f"{kind} '{name}' has shape {array.shape}, not {spec.shape}")
        if str(array.dtype) != spec.dtype:
            problems.append(f"{kind} '{name}' has dtype {array.dtype}, not {spec.dtype}")
    return arrays, problems


def pack_rows(values: Array) -> Array:
    """Return float32 rows (…, n) as int8 (…, n + 4): values, and the bytes of their scale."""
    import numpy as np

    scales = np.abs(values).max(-1, keepdims=True, initial=0.0).astype("<f4") / np.float32(
        SCALE_STEPS
    )
    steps = np.rint(values / np.where(scales > 0, scales, 1)).astype(np.int8)
    return np.concatenate([steps, np.ascontiguousarray(scales).view(np.int8)], -1)


def unpack_rows(rows: Array) -> Array:
    """Return the float32 values (…, n) of quantized rows, int8 (…, n + 4)."""
    import numpy as np

    scales = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view("<f4")
    unpacked: Array = rows[..., :-SCALE_BYTES] * scales
    return unpacked


# ---------------------------------------------------------------- tensors of dynamic shape

Shapes = tuple[tuple[int, ...], ...]

# How many combinations of input shapes are cached: programs often repeat some of them.
_MAX_KEPT: Final = 64
_MAX_SIZE: Final = 2**31 - 1
_MAX_DIMENSIONS: Final = 64


class CallTensors(NamedTuple):
    """A call's tensors, the sizes of dimensions by name, and a function for each output's new array."""

    sizes: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    new_outputs: tuple[Callable[[], Array], ...]


class DynamicTensors:
    """The inputs and outputs of a model with dimensions."""

    def __init__(self, signature: Mapping[str, Json]) -> None:
        self.dimensions = Dimension.list_of(signature)
        self.inputs = tuple(map(TensorSpec.from_json, signature["inputs"]))
        self.outputs = tuple(map(TensorSpec.from_json, signature["outputs"]))
        self._sizes = {spec.name: spec.sizes or spec.shape for spec in self.inputs}
        self._kept: OrderedDict[Shapes, CallTensors] = OrderedDict()
        self._lock = threading.Lock()
        self._memory = [OutputArrays() for _ in self.outputs]

    def tensors_of(self, inputs: Sequence[Array]) -> CallTensors:
        """Return the tensors of a call with some inputs; BundleError for a wrong size."""
        shapes = tuple([array.shape for array in inputs])
        found = self._kept.get(shapes)
        return self._derive(shapes) if found is None else found

    def _derive(self, shapes: Shapes) -> CallTensors:
        names = [spec.name for spec in self.inputs]
        try:
            sizes = dimensions.derive_sizes(
                self.dimensions, self._sizes, dict(zip(names, shapes, strict=True))
            )
        except dimensions.WrongSize as error:
            raise BundleError(str(error), fix=f"the model takes {self._describe()}") from error
        outputs = dimensions.specs_at(self.outputs, sizes)
        makers = tuple(
            memory.maker(spec) for memory, spec in zip(self._memory, outputs, strict=True)
        )
        tensors = CallTensors(sizes, dimensions.specs_at(self.inputs, sizes), outputs, makers)
        with self._lock:
            self._kept[shapes] = tensors
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return tensors

    def _describe(self) -> str:
        inputs = (
            f"{name} of shape [{', '.join(map(str, sizes))}]" for name, sizes in self._sizes.items()
        )
        return f"{', '.join(inputs)}, where {dimensions.ranges_text(self.dimensions)}"


def read_dynamic_tensors(signature: Mapping[str, Json]) -> DynamicTensors | None:
    """Return the tensors of a signature with dynamic dimensions; None for one of fixed sizes."""
    return DynamicTensors(signature) if signature.get("dimensions") else None


def check_dynamic_shapes(signature: Mapping[str, Json]) -> int:
    """Check a signature's dynamic dimensions; return the most bytes that tensors of dynamic shape take.

    Raises:
        ValueError: tvmflow does not write such dimensions.
    """
    bounds = {}
    entries = signature.get("dimensions", ())
    if len(entries) > _MAX_DIMENSIONS:
        raise ValueError(f"there are {len(entries)} dimensions")
    for entry in Dimension.list_of(signature):
        numbers = (entry.min, entry.max, entry.multiple_of, *entry.tune_at)
        is_range = (
            all(type(number) is int and 0 <= number <= _MAX_SIZE for number in numbers)
            and min(entry.max, entry.multiple_of) >= 1
            and entry.min <= entry.max
        )
        has_name = isinstance(entry.name, str) and entry.name.isidentifier()
        if not is_range or not has_name or entry.name in bounds:
            raise ValueError(f"{quote(list(entry))} is not a dimension")
        bounds[entry.name] = (entry.min, entry.max)
    inputs = [*map(TensorSpec.from_json, signature["inputs"])]
    if any(
        spec.sizes and dimensions.find_bounds(size, bounds)[0] < 0
        for spec in inputs
        for size in spec.sizes
    ):
        raise ValueError("an input has a size below 0")
    told = {size for spec in inputs for size in spec.sizes if dimensions.is_name(size)}
    if unknown := bounds.keys() - told:
        raise ValueError(f"no input determines the sizes of {names_text(sorted(unknown))}")
    tensors = [*inputs, *map(TensorSpec.from_json, signature["outputs"])]
    return sum(_find_most_bytes(spec, bounds) for spec in tensors if spec.sizes)


def _find_most_bytes(spec: TensorSpec, bounds: Mapping[str, tuple[int, int]]) -> int:
    """Return the maximum number of bytes that a tensor of dynamic shape takes."""
    if len(spec.sizes) != len(spec.shape) or not all(
        type(size) in (int, str) for size in spec.sizes
    ):
        raise ValueError(f"{quote(list(spec.sizes))} are not sizes")
    largest = [dimensions.find_bounds(size, bounds)[1] for size in spec.sizes]
    return spec._replace(shape=tuple(max(size, 0) for size in largest)).bytes
