"""Reading `.params` files of every version, and refusing what is none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.mxnet_runs import array_v0, array_v1, array_v2, array_v3, params_bytes
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.mxnet._checkpoint import read_params

Array = np.ndarray[Any, Any]
WEIGHT = np.arange(6, dtype="float32").reshape(2, 3)


def write(folder: Path, content: bytes) -> Path:
    path = folder / "net-0000.params"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("encode", [array_v0, array_v1, array_v2, array_v3])
def test_every_format_gives_the_same_array(
    tmp_path: Path, encode: Callable[[Array, int], bytes]
) -> None:
    """The formats of MXNet 0.8 to 1.9 all read the same; prefixes are taken off names."""
    path = write(
        tmp_path,
        params_bytes({"arg:w": encode(WEIGHT, 0), "aux:m": encode(WEIGHT[0], 0)}),
    )
    params = read_params(path)
    assert list(params) == ["w", "m"]
    np.testing.assert_array_equal(params["w"].array, WEIGHT)
    np.testing.assert_array_equal(params["m"].array, WEIGHT[0])


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [(0, "float32"), (1, "float64"), (2, "float16"), (3, "uint8"), (4, "int32"), (6, "int64")],
)
def test_dtypes_are_kept(tmp_path: Path, flag: int, dtype: str) -> None:
    """An array comes back in the dtype in which it was saved, writable."""
    value = np.array([1, 2, 3], dtype)
    params = read_params(write(tmp_path, params_bytes({"v": array_v2(value, flag)})))
    assert params["v"].array.dtype == dtype
    np.testing.assert_array_equal(params["v"].array, value)


def test_numpy_shapes_have_scalars(tmp_path: Path) -> None:
    """With NumPy shapes rank 0 is a scalar, not a missing value."""
    params = read_params(
        write(tmp_path, params_bytes({"s": array_v3(np.array(2.5, "float32"), 0)}))
    )
    assert params["s"].array.shape == ()
    assert params["s"].array == 2.5


def test_sparse_arrays_are_named(tmp_path: Path) -> None:
    """A row-sparse array is rejected with its name, which comes last in the file."""
    shape = struct.pack("<I2q", 2, 1, 3), struct.pack("<I2q", 2, 4, 3)
    sparse = (
        struct.pack("<Ii", 0xF993FAC9, 1)
        + b"".join(shape)
        + struct.pack("<iii", 1, 0, 0)
        + struct.pack("<iIq", 6, 1, 1)
        + np.ones((1, 3), "float32").tobytes()
        + np.zeros(1, "int64").tobytes()
    )
    path = write(tmp_path, params_bytes({"arg:dense": array_v2(WEIGHT, 0), "arg:emb": sparse}))
    with pytest.raises(ImportFailed, match=r"'emb' cannot be imported: its storage is row-sparse"):
        read_params(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x08\x07onnx-model", "not a .params file"),
        (b"PK\x03\x04 archive of numpy", "NumPy archive, the format of MXNet 2"),
        (params_bytes({"w": array_v2(WEIGHT, 0)}) + b"!", "bytes follow the last name"),
        (params_bytes({"w": array_v2(WEIGHT, 77)}), "unknown type 77"),
        (params_bytes({"w": struct.pack("<I", 0x7FFFFFFF)}), "cannot have 2147483647 dimensions"),
        (struct.pack("<QQQ", 0x112, 0, 1) + array_v2(WEIGHT, 0) + struct.pack("<Q", 0), "no names"),
        (params_bytes({"arg:w": array_v2(WEIGHT, 0), "w": array_v2(WEIGHT, 0)}), "two arrays"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    """What is not a parameter file, or not a whole one, is said to be so."""
    with pytest.raises(ImportFailed, match=message):
        read_params(write(tmp_path, content))


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
    """A truncated file is never read as a shorter one."""
    whole = params_bytes({"arg:w": array_v2(WEIGHT, 0), "aux:m": array_v1(WEIGHT, 0)})
    for size in range(len(whole)):
        with pytest.raises(ImportFailed):
            read_params(write(tmp_path, whole[:size]))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_changed_byte_raises_no_other_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    """Whatever one byte becomes, the file reads or is refused with a sentence."""
    whole = bytearray(params_bytes({"arg:w": array_v2(WEIGHT, 0), "b": array_v0(WEIGHT, 0)}))
    whole[position % len(whole)] = value
    path = write(tmp_path_factory.mktemp("changed"), bytes(whole))
    try:
        params = read_params(path)
    except ImportFailed:
        return
    assert len(params) == 2
