"""Converts Fourier transforms to products with a constant matrix: ONNX's DFT and STFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

_Array = np.ndarray[Any, Any]

_MAX_ELEMENTS: Final = 1 << 25


def convert_dft(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any], opset: int
) -> relax.Expr:
    """Convert a DFT of real or complex numbers (…, n, …, 1 or 2) along one axis.

    Args:
        builder: The builder of the model.
        inputs: The operands of the node; None for missing ones.
        attributes: Its attributes.
        opset: The version of the operator set.
    """
    x, length, axis, *_ = [*inputs, None, None]
    shape = _shape(x)
    default = attributes.get("axis", 1 if opset < 20 else -2)
    along = (_integer(axis) if axis is not None else int(default)) % len(shape)
    is_inverse, is_onesided = (bool(attributes.get(n, 0)) for n in ("inverse", "onesided"))
    count, parts = shape[along], shape[-1]
    whole = 2 * (count - 1) if is_inverse and is_onesided else count
    whole = whole if length is None else _integer(length)
    matrix = _transform(count, parts, whole, is_inverse=is_inverse, is_onesided=is_onesided)
    rank = len(shape)
    order = [*(n for n in range(rank - 1) if n != along), along, rank - 1]
    moved = builder.normalize(relax.op.permute_dims(x, order))
    result = _multiply(builder, moved, matrix)
    return relax.op.permute_dims(result, [order.index(n) for n in range(rank)])


def convert_stft(builder: relax.BlockBuilder, inputs: Sequence[Any], onesided: bool) -> relax.Expr:
    """Convert an STFT of a signal (batch, n, 1 or 2) to (batch, frames, frequencies, 2).

    Args:
        builder: The builder of the model.
        inputs: The operands of the node; None for missing ones.
        onesided: Whether only the frequencies up to half of the sampling rate are computed.
    """
    signal, step, window, size, *_ = [*inputs, None, None]
    shape, hop = _shape(signal), _integer(step)
    length = _integer(size) if size is not None else _shape(window)[0]
    starts = np.arange((shape[1] - length) // hop + 1) * hop
    places = relax.const((starts[:, None] + np.arange(length)).ravel(), "int64")
    frames = builder.normalize(relax.op.take(signal, places, 1))
    split = [shape[0], len(starts), length, shape[2]]
    frames = builder.normalize(relax.op.reshape(frames, split))
    if window is not None:
        weights = relax.op.reshape(window, [length, 1])
        frames = builder.normalize(relax.op.multiply(frames, weights))
    matrix = _transform(length, shape[2], length, is_inverse=False, is_onesided=onesided)
    return _multiply(builder, frames, matrix)


def _transform(
    count: int, parts: int, length: int, *, is_inverse: bool, is_onesided: bool
) -> _Array:
    """Return the matrix (count, parts, frequencies, parts of the result) of a transform of `count` numbers, padded or cut to `length`."""
    is_real = is_inverse and is_onesided
    frequencies = length // 2 + 1 if is_onesided and not is_inverse else length
    if count * parts * frequencies * 2 > _MAX_ELEMENTS:
        raise ValueError(f"a transform of {count:,} numbers is not supported")
    sign = 1 if is_inverse else -1
    product = np.outer(np.arange(count), np.arange(frequencies)) % length
    turn = np.exp(sign * 2j * np.pi * product / length)
    turn[length:] = 0
    if is_real:
        # The other half of the spectrum has the conjugate numbers.
        index = np.arange(count)
        turn *= np.where((index == 0) | (2 * index == length), 1, 2)[:, None]
        turn[length // 2 + 1 :] = 0
    if is_inverse:
        turn /= length
    real = np.stack([turn.real, turn.imag], -1)
    imaginary = np.stack([-turn.imag, turn.real], -1)
    matrix: _Array = np.stack([real, imaginary][:parts], 1)
    return matrix[..., :1] if is_real else matrix


def _multiply(builder: relax.BlockBuilder, x: Any, matrix: _Array) -> relax.Expr:
    """Return the transform of the last two axes of data."""
    dtype = str(x.ty.dtype.dtype)
    count, parts, frequencies, results = matrix.shape
    shape = _shape(x)[:-2]
    flat = builder.normalize(relax.op.reshape(x, [*shape, count * parts]))
    weights = relax.const(matrix.reshape(count * parts, frequencies * results).astype(dtype))
    product = builder.normalize(relax.op.matmul(flat, weights))
    return builder.normalize(relax.op.reshape(product, [*shape, frequencies, results]))


def _shape(expr: Any) -> list[int]:
    return [int(extent) for extent in expr.ty.shape]


def _integer(expr: Any) -> int:
    if not isinstance(expr, tvm.ir.Constant):
        raise ValueError(
            "an axis, a step or a length depends on the inputs, which is not supported"
        )
    return int(expr.value.numpy().reshape(()))
