"""Lowers operators to kernels: TVM's, or faster ones for CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes.quantization import read_broadcast
from tvmflow.compiler.passes.vector_math import exp_of_negative
from tvmflow.compiler.tir_kernels.packed_rows import pack_rows, unpack_rows
from tvmflow.graph import ir
from tvmflow.graph.ir_operators import PackRows, RoundedData, UnpackRows


def make_operator_kernels(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Make kernels of all operators."""
    own: dict[str, Any] = {
        RoundedData.NAME: lambda builder, call: builder.call_te(round_data, *call.args),
        PackRows.NAME: lambda builder, call: builder.call_te(pack_rows, *call.args),
        UnpackRows.NAME: lambda builder, call: builder.call_te(unpack_rows, *call.args),
    }
    if context.has_vector_math():
        own |= _LEGALIZATIONS
    return relax.transform.LegalizeOps(own)(mod)


def round_data(x: Any, *operands: Any) -> Any:
    """Return the rounded data, see `RoundedData`."""

    def element(*position: Any) -> Any:
        kept, inverse, low, high, scale = (read_broadcast(own, position) for own in operands)
        steps = tirx.round(tirx.Min(tirx.Max(x(*position) * inverse, low), high))
        return x(*position) * kept + steps * scale

    return te.compute(x.shape, element, name="rounding")


def _legalize_softmax(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """Return the kernel of a softmax or log-softmax; TVM's for types other than float32."""
    is_logarithm = ir.operator_name(call) == "relax.nn.log_softmax"
    theirs = relax.transform.legalize_ops.nn
    if not ir.is_float32(call):
        legalize = theirs._nn_log_softmax if is_logarithm else theirs._nn_softmax
        return legalize(builder, call)
    axis = int(call.attrs.axis)
    function = log_softmax if is_logarithm else softmax
    return builder.call_te(function, call.args[0], axis)


def softmax(x: Any, axis: int) -> Any:
    """Return the softmax of float32 data along an axis, with an error of at most 4 ULP."""
    row, _, exponentials, total = _exponentiate(x, axis, "softmax")
    one = tirx.const(1.0, "float32")
    inverse = te.compute(total.shape, lambda *i: one / total(*i), name="softmax_inverse")
    return te.compute(x.shape, lambda *i: exponentials(*i) * inverse(*row(i)), name="softmax")


def log_softmax(x: Any, axis: int) -> Any:
    """Return the logarithm of the softmax of float32 data along an axis.

    The maximum and the logarithm of the total are subtracted one after the other, because their sum would lose digits.
    """
    row, largest, _, total = _exponentiate(x, axis, "log_softmax")
    logarithm = te.compute(total.shape, lambda *i: te.log(total(*i)), name="log_softmax_logarithm")
    return te.compute(
        x.shape, lambda *i: x(*i) - largest(*row(i)) - logarithm(*row(i)), name="log_softmax"
    )


def _exponentiate(x: Any, axis: int, name: str) -> tuple[Callable[[Any], Any], Any, Any, Any]:
    """Return a function that drops the axis from an index, and three values of each row.

    These are the maxima, the exponentials exp(x − maximum), and the sums of the exponentials.
    """
    axis %= len(x.shape)

    def row(position: Sequence[Any]) -> list[Any]:
        return [*position[:axis], *position[axis + 1 :]]

    def reduce(data: Any, combine: Callable[..., Any], what: str) -> Any:
        along = te.reduce_axis((0, x.shape[axis]), name="k")

        def element(*position: Any) -> Any:
            return combine(data(*position[:axis], along, *position[axis:]), axis=along)

        return te.compute(row(list(x.shape)), element, name=f"{name}_{what}")

    largest = reduce(x, te.max, "largest")
    exponentials = te.compute(
        list(x.shape), lambda *i: exp_of_negative(x(*i) - largest(*row(i))), name=f"{name}_exp"
    )
    return row, largest, exponentials, reduce(exponentials, te.sum, "total")


# ---------------------------------------------------------------- samples of images
# TVM computes the position of a sample again for each channel, and reflects elements one by one. Here, tables have the
# positions and weights of the four pixels around each sample.


def _legalize_grid_sample(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """Return the kernel of bilinear samples within float32 images; TVM's for others."""
    attrs, is_static = call.attrs, all(map(ir.shape_of, call.args))
    is_own = is_static and all(map(ir.is_float32, call.args)) and str(attrs.layout) == "NCHW"
    mode = str(attrs.padding_mode)
    if not is_own or str(attrs.method) != "bilinear" or mode not in ("border", "reflection"):
        return relax.transform.legalize_ops.image._image_grid_sample(builder, call)
    reflects, aligns = mode == "reflection", bool(attrs.align_corners)
    return builder.call_te(sample_grid, *call.args, reflects=reflects, aligns_corners=aligns)


def sample_grid(data: Any, grid: Any, *, reflects: bool, aligns_corners: bool) -> Any:
    """Return bilinear samples (N, C, H', W') of images (N, C, H, W).

    The positions of the samples (N, 2, H', W') are x and y, from -1 to 1 within an image. Positions beyond an image are
    reflected into it, or else clamped to it. With `aligns_corners`, -1 and 1 are the centers of the outermost pixels,
    not their edges.
    """
    count, channels, height, width = (int(n) for n in data.shape)
    shape = [count, *grid.shape[2:]]

    def find(coordinate: int, size: int) -> tuple[Any, Any, Any]:
        """Return tables of the two pixels along an axis, and of the weight of the second one."""
        last, edge = float(size - 1), 0.0 if aligns_corners else -0.5
        length = last - 2 * edge

        def position(n: Any, h: Any, w: Any) -> Any:
            at = (grid(n, coordinate, h, w) + 1.0) * (length / 2) + edge
            if reflects and length > 0:
                away = te.abs(at - edge)
                away = away - te.floor(away / (2 * length)) * (2 * length)
                is_within = tirx.all(at >= edge, at <= length + edge)
                back = tirx.Select(away > length, 2 * length - away, away) + edge
                at = tirx.Select(is_within, at, back)
            # with the operands in this order, NaN becomes 0
            return tirx.Min(tirx.Max(at, tirx.const(0.0, "float32")), tirx.const(last, "float32"))

        positions = te.compute(shape, position, name="place")
        first = te.compute(shape, lambda *i: te.floor(positions(*i)).astype("int32"), name="first")
        second = te.compute(shape, lambda *i: tirx.Min(first(*i) + 1, size - 1), name="second")

        def fraction(*i: Any) -> Any:
            return positions(*i) - first(*i).astype("float32")

        return first, second, te.compute(shape, fraction, name="weight")

    top, bottom, down = find(1, height)
    left, right, across = find(0, width)

    def sample(n: Any, c: Any, h: Any, w: Any) -> Any:
        here = (n, h, w)

        def mix(row: Any) -> Any:
            a, b = data(n, c, row, left(*here)), data(n, c, row, right(*here))
            return a * (1.0 - across(*here)) + b * across(*here)

        above, below = mix(top(*here)), mix(bottom(*here))
        return above * (1.0 - down(*here)) + below * down(*here)

    return te.compute([count, channels, *grid.shape[2:]], sample, name="grid_sample")


_LEGALIZATIONS: Final = {
    "relax.nn.softmax": _legalize_softmax,
    "relax.nn.log_softmax": _legalize_softmax,
    "relax.image.grid_sample": _legalize_grid_sample,
}
