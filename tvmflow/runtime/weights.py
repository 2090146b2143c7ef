"""Weights in separate files: reading them, and checking them against a library."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.documents import Unreadable, quote, read_json
from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.runtime.arrays import dtype_of
from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES, damaged_file_error
from tvmflow.runtime.statements import TrustedKeys, open_trusted_file

_SAFETENSORS: Final[Mapping[str, str]] = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}


# The format of `save_param_dict` (src/runtime/tensor.cc of TVM): magic numbers, and DLPack's type codes.
_PARAMS_MAGIC: Final = 0xF7E58D4F05049CB7
TENSOR_MAGIC: Final = 0xDD5E40F096B4A13F
"""A serialized tensor begins with this magic number, followed by 8 reserved bytes."""
_DTYPE_CODES: Final[Mapping[int, str]] = {0: "int", 1: "uint", 2: "float"}
_BOOLS: Final = ((1, 1), (6, 8))
_MAX_RANK: Final = 32


def read_weights_for(
    path: str | Path,
    manifest: Mapping[str, Json],
    params: str | Path | Mapping[str, Array] | None,
    trusted_keys: TrustedKeys | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> dict[str, Array]:
    """Return the weights that a library's `main` takes after the inputs, in its order.

    `params` is a file, which one of the keys must have signed, or arrays by name; None for a bundle that has weights.

    Raises:
        BundleError: when weights are missing, unknown, or of another shape or dtype.
    """
    if "params" not in manifest:
        if params is None:
            return {}
        raise weights_included_error(path)
    if params is None:
        raise BundleError(
            f"{path} has no weights of its own",
            fix=f"load it with params=, such as the {manifest['name']}.safetensors that was built with it",
        )
    arrays = params
    if not isinstance(arrays, Mapping):
        arrays = read_params(arrays, trusted_keys, max_bytes)
    specs = {spec.name: spec for spec in map(TensorSpec.from_json, manifest["params"])}
    problems = [f"there is no weight '{name}'" for name in arrays if name not in specs]
    for spec in specs.values():
        array = arrays.get(spec.name)
        if array is None:
            problems.append(f"weight '{spec.name}' is missing")
        elif (tuple(array.shape), str(array.dtype)) != (spec.shape, spec.dtype):
            actual = f"{array.dtype} {tuple(array.shape)}"
            problems.append(f"weight '{spec.name}' is {actual}, not {spec.dtype} {spec.shape}")
    if problems:
        raise BundleError(
            f"the weights do not fit {path}: {'; '.join(problems)}",
            fix="use the weights of a build of the same model for the same target",
        )
    return {name: arrays[name] for name in specs}


def weights_included_error(path: str | Path) -> BundleError:
    """Return the error for weights that are passed although the bundle has weights."""
    return BundleError(
        f"{path} includes its weights and takes no others",
        fix="load the recipe's .lean.tvmflow (`outputs: [params]`) to pass weights",
    )


def read_params(
    path: str | Path, trusted_keys: TrustedKeys | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> dict[str, Array]:
    """Return the arrays of a `.safetensors` file, or of a file that TVM's `save_param_dict` wrote.

    Raises:
        BundleError: when the file is missing, damaged, too large or not signed.
    """
    if not Path(path).is_file():
        fix = "`outputs: [params]` in a recipe delivers it"
        raise BundleError(f"there is no file {path}", fix=fix)
    with open_trusted_file(path, trusted_keys, max_bytes) as stream:
        content = stream.read(max_bytes)
    if Path(path).suffix == ".safetensors":
        return _parse_safetensors(path, content)
    return _parse_tvm_params(path, content)


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """Map the arrays of a `.safetensors` file, which must not change; BundleError if it is damaged."""
    with Path(path).open("rb") as stream:
        is_empty = not os.fstat(stream.fileno()).st_size
        # copy-on-write, because TVM accepts only writable arrays, and changes must not reach the file
        content = b"" if is_empty else mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return _parse_safetensors(path, content)


def _parse_safetensors(path: str | Path, content: bytes | mmap.mmap) -> dict[str, Array]:
    import numpy as np

    try:
        start = 8 + int.from_bytes(content[:8], "little")
        entries = read_json(content[8:start])
        entries.pop("__metadata__", None)
        arrays = {}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(content) - start:
                raise ValueError(f"the values of {quote(name)} are outside of it")
            values = np.frombuffer(
                memoryview(content)[start + begin : start + end],
                dtype_of(_SAFETENSORS[entry["dtype"]]),
            )
            arrays[name] = values.reshape(_checked_shape(entry["shape"]))
    except (Unreadable, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file_error(path, "a complete safetensors file", error) from error
    return arrays


def _checked_shape(shape: Sequence[int]) -> Sequence[int]:
    if any(size < 0 for size in shape):
        raise ValueError("a shape has a negative size")
    return shape


# ---------------------------------------------------------------- TVM's format


class _Cursor:
    """Reads little-endian values from bytes, one after the other."""

    def __init__(self, content: bytes) -> None:
        self._rest = memoryview(content)

    def values(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._rest):
            raise ValueError("its end is missing")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def _parse_tvm_params(path: str | Path, content: bytes) -> dict[str, Array]:
    """Return the arrays in a TVM parameter file; sizes are checked, which TVM's reader does not do."""
    try:
        cursor = _Cursor(content)
        if cursor.values("QQ")[0] != _PARAMS_MAGIC:
            raise ValueError("it does not begin as one")
        (count,) = cursor.values("Q")
        names: list[str] = []
        while len(names) < count:
            names.append(str(cursor.take(*cursor.values("Q")), "utf-8"))
        if cursor.values("Q") != (count,) or len(set(names)) < count:
            raise ValueError("its names do not fit its tensors")
        return {name: _parse_tvm_tensor(cursor) for name in names}
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise damaged_file_error(path, "a file of TVM's parameters", error) from error


def _parse_tvm_tensor(cursor: _Cursor) -> Array:
    import numpy as np

    # the skipped fields: 8 reserved bytes, then type and index of the device
    magic, _, _, _, rank, code, bits, lanes = cursor.values("QQiiiBBH")
    if magic != TENSOR_MAGIC or lanes != 1 or not 0 <= rank <= _MAX_RANK:
        raise ValueError("it has something that is not a tensor")
    shape = _checked_shape(cursor.values(f"{rank}q"))
    dtype = np.dtype("bool" if (code, bits) in _BOOLS else f"{_DTYPE_CODES[code]}{bits}")
    (size,) = cursor.values("q")
    return np.frombuffer(cursor.take(size), dtype).reshape(shape)
