"""Memory of outputs is used again, and never while somebody can see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 with it
import numpy as np
import pytest

from tvmflow.core.types import TensorSpec
from tvmflow.runtime.arrays import ALIGNMENT, OutputArrays, address_of

SPEC = TensorSpec("y", (3, 2000), "float32")


def test_memory_that_nobody_sees_is_used_again() -> None:
    new = OutputArrays().maker(SPEC)
    first = new()
    address = address_of(first)
    second = new()
    assert address_of(second) != address
    del first
    assert address_of(new()) == address


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda array: array[1:, 5:],
    "reshaped": lambda array: array.reshape(-1).view(np.int32),
    "memoryview": memoryview,
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("kept", VIEWS)
def test_memory_behind_a_view_stays(kept: str) -> None:
    new = OutputArrays().maker(SPEC)
    first = new()
    first[:] = 7
    view = VIEWS[kept](first)
    copy = np.array(view)
    del first
    for other in [new() for _ in range(4)]:
        other[:] = -1
    np.testing.assert_array_equal(np.asarray(view), copy)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "int64", "uint8", "bool", "bfloat16"]
)
def test_arrays_are_like_any_others(dtype: str) -> None:
    new = OutputArrays().maker(TensorSpec("y", (50, 700), dtype))
    for array in (new(), new()):
        assert array.shape == (50, 700)
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert address_of(array) % ALIGNMENT == 0
        array[:] = 1


def test_threads_never_share_an_array() -> None:
    new = OutputArrays().maker(SPEC)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            array = new()
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_little_memory_is_kept() -> None:
    """That of two arrays."""
    arrays = OutputArrays()
    new = arrays.maker(SPEC)
    alive = [new() for _ in range(6)]
    addresses = {address_of(array) for array in alive}
    del alive
    again = [new() for _ in range(6)]
    assert sum(address_of(array) in addresses for array in again) >= 2
    assert len({address_of(array) for array in again}) == 6
    del again
    assert len(arrays._spare) == 2
