"""Converters of convolutions and fully connected layers."""

from __future__ import annotations

import math
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import broadcast_along, per_axis, spatial_rank

R = relax.op

_CONV: Final = {1: R.nn.conv1d, 2: R.nn.conv2d, 3: R.nn.conv3d}
_DECONV: Final = {1: R.nn.conv1d_transpose, 2: R.nn.conv2d_transpose, 3: R.nn.conv3d_transpose}


def _kernel(op: Op) -> tuple[int, ...]:
    """Return the size of the kernel, which has as many dimensions as the data's positions."""
    dims, kernel = spatial_rank(op), op.integers("kernel")
    if len(kernel) != dims:
        op.refuse(f"kernel {kernel} does not fit data of shape {op.shape()}")
    return kernel


def _add_bias(op: Op, out: Expr, filters: int, *, no_bias: bool) -> Expr:
    """Return the result with the bias of each filter, unless `no_bias` (by default as given here) is set."""
    if op.flag("no_bias", no_bias):
        return out
    return out + broadcast_along(op.expect_shape(2, (filters,)), 1, op.rank())


def _convolution(op: Op) -> Expr:
    """`Convolution`: grouped, strided and dilated, in 1 to 3 dimensions."""
    kernel = _kernel(op)
    dims = len(kernel)
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    weight = op.expect_shape(1, (filters, op.shape()[1] // groups, *kernel))
    out = _CONV[dims](
        op[0],
        weight,
        strides=per_axis(op, "stride", dims, 1),
        padding=per_axis(op, "pad", dims, 0) * 2,
        dilation=per_axis(op, "dilate", dims, 1),
        groups=groups,
    )
    return _add_bias(op, out, filters, no_bias=False)


def _fully_connected(op: Op) -> Expr:
    """`FullyConnected`: data · weightᵀ + bias; `flatten` joins all axes but the first."""
    data, width = op[0], op.shape()[-1]
    if op.flag("flatten", True) and op.rank() != 2:
        width = math.prod(op.shape()[1:])
        data = R.reshape(data, (op.shape()[0], width))
    hidden = op.integer("num_hidden")
    weight = op.expect_shape(1, (hidden, width))
    out = R.matmul(data, R.permute_dims(weight, [1, 0]))
    if op.flag("no_bias", False):
        return out
    return out + op.expect_shape(2, (hidden,))


def _deconvolution(op: Op) -> Expr:
    """`Deconvolution`: a transposed convolution; its weight is (input channels, filters / groups, kernel)."""
    kernel = _kernel(op)
    dims = len(kernel)
    filters, groups = op.integer("num_filter"), op.integer("num_group", 1)
    stride, dilate = per_axis(op, "stride", dims, 1), per_axis(op, "dilate", dims, 1)
    weight = op.expect_shape(1, (op.shape()[1], filters // groups, *kernel))
    pad, adj = _deconvolution_padding(op, kernel, stride, dilate)
    if max(stride) > 1 and max(dilate) > 1:
        op.refuse(
            f"stride={stride} with dilate={dilate} is not supported: MXNet itself miscomputes it on CPUs"
        )
    if any(a >= s for a, s in zip(adj, stride, strict=True)):
        op.refuse(f"adj {adj} must be smaller than stride {stride}")
    out = _DECONV[dims](
        op[0],
        weight,
        strides=stride,
        padding=pad * 2,
        output_padding=adj,
        dilation=dilate,
        groups=groups,
    )
    return _add_bias(op, out, filters, no_bias=True)


def _deconvolution_padding(
    op: Op, kernel: tuple[int, ...], stride: tuple[int, ...], dilate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return padding and output padding of each dimension.

    They follow from `target_shape` where it is set (MXNet: DeconvolutionParam::InferPad).
    """
    target, dims = op.integers("target_shape", ()), len(kernel)
    if not any(target):
        return per_axis(op, "pad", dims, 0), per_axis(op, "adj", dims, 0)
    op.ignore("pad", "adj")
    full_size = tuple(
        (n - 1) * s + d * (k - 1) + 1
        for n, s, d, k in zip(op.shape()[2:], stride, dilate, kernel, strict=True)
    )
    excess = [full - t for full, t in zip(full_size, target, strict=True)]
    if min(excess) < 0:
        op.refuse(f"target_shape={target} is larger than its largest output {full_size}")
    return tuple((e + 1) // 2 for e in excess), tuple(e % 2 for e in excess)


CONVERTERS: Final[dict[str, Converter]] = {
    "Convolution": _convolution,
    "Convolution_v1": _convolution,
    "Deconvolution": _deconvolution,
    "FullyConnected": _fully_connected,
}
