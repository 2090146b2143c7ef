"""Makes kernels of operators: TVM's, and for CPUs those of our own that take less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.ir_operators import RoundedData
from tvmflow.compiler.passes.vector_math import exp_of_negative


def make_operator_kernels(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Make kernels of all operators."""
    own = {RoundedData.NAME: _legalize_rounding}
    if context.has_vector_math():
        own |= _LEGALIZATIONS
    return relax.transform.LegalizeOps(own)(mod)


def _legalize_rounding(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    return builder.call_te(round_data, *call.args)


def round_data(x: Any, *operands: Any) -> Any:
    """Return the numbers in place of data, see `RoundedData`."""

    def element(*place: Any) -> Any:
        kept, inverse, low, high, scale = (_read_broadcast(own, place) for own in operands)
        steps = tirx.round(tirx.Min(tirx.Max(x(*place) * inverse, low), high))
        return x(*place) * kept + steps * scale

    return te.compute(x.shape, element, name="rounding")


def _read_broadcast(tensor: Any, place: Sequence[Any]) -> Any:
    """Return the element of a tensor that is broadcast to another one, at a place in that."""
    own = place[len(place) - len(tensor.shape) :]
    return tensor(
        *(0 if size == 1 else index for size, index in zip(tensor.shape, own, strict=True))
    )


def _legalize_softmax(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """Return the kernel of a softmax, or of its logarithm; TVM's for other numbers than float32."""
    is_logarithm = ir.operator_name(call) == "relax.nn.log_softmax"
    theirs = relax.transform.legalize_ops.nn
    if not ir.is_float32(call):
        legalize = theirs._nn_log_softmax if is_logarithm else theirs._nn_softmax
        return legalize(builder, call)
    function = log_softmax if is_logarithm else softmax
    return builder.call_te(function, call.args[0], int(call.attrs.axis))


class _Rows:
    """Tensors along an axis of float32 data, of which a softmax or its logarithm is made.

    Args:
        x: The data.
        axis: The axis.
        name: What the names of the tensors begin with.
    """

    def __init__(self, x: Any, axis: int, name: str) -> None:
        self.shape, self._name = list(x.shape), name
        self._axis = axis % len(self.shape)
        self.outer = [*self.shape[: self._axis], *self.shape[self._axis + 1 :]]
        self.largest = self._reduce(x, te.max, "largest")
        self.exponentials = te.compute(
            self.shape,
            lambda *i: exp_of_negative(x(*i) - self.largest(*self.row(i))),
            name=f"{name}_exp",
        )
        self.total = self._reduce(self.exponentials, te.sum, "total")

    def _reduce(self, data: Any, combine: Callable[..., Any], name: str) -> Any:
        axis = self._axis
        along = te.reduce_axis((0, self.shape[axis]), name="k")

        def element(*place: Any) -> Any:
            return combine(data(*place[:axis], along, *place[axis:]), axis=along)

        return te.compute(self.outer, element, name=f"{self._name}_{name}")

    def row(self, place: Sequence[Any]) -> list[Any]:
        """Return the indices of a place but that along the axis."""
        return [*place[: self._axis], *place[self._axis + 1 :]]


def softmax(x: Any, axis: int) -> Any:
    """Return the softmax of float32 data along an axis, at most 4 units in the last place off.

    No exponential is of a positive number, and results are multiplied by the inverse of their sum.
    """
    rows = _Rows(x, axis, "softmax")
    inverse = te.compute(
        rows.outer, lambda *i: tirx.const(1.0, "float32") / rows.total(*i), name="softmax_inverse"
    )
    return te.compute(
        rows.shape, lambda *i: rows.exponentials(*i) * inverse(*rows.row(i)), name="softmax"
    )


def log_softmax(x: Any, axis: int) -> Any:
    """Return the logarithm of the softmax of float32 data along an axis.

    No exponential is of a positive number. The greatest number and the logarithm of the sum are
    subtracted one after the other: their sum would lose digits of the logarithm.
    """
    rows = _Rows(x, axis, "log_softmax")
    logarithm = te.compute(
        rows.outer, lambda *i: te.log(rows.total(*i)), name="log_softmax_logarithm"
    )
    return te.compute(
        rows.shape,
        lambda *i: x(*i) - rows.largest(*rows.row(i)) - logarithm(*rows.row(i)),
        name="log_softmax",
    )


# ---------------------------------------------------------------- samples of images
# TVM computes where a pixel of the result is in the image again for each channel, and reflects
# numbers one by one. Here a table has the places of the four pixels around it, and their weights.


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
    """Return bilinear samples of images, of which there are none beyond their pixels.

    Args:
        data: The images (N, C, H, W), float32.
        grid: The places (N, 2, H', W') of the samples, float32: x and y, from -1 to 1 within an image.
        reflects: Whether places beyond an image are reflected into it; else the nearest pixel counts.
        aligns_corners: Whether -1 and 1 are the centres of the outermost pixels, not their edges.

    Returns:
        The samples (N, C, H', W').
    """
    count, channels, height, width = (int(n) for n in data.shape)
    shape = [count, *grid.shape[2:]]

    def find(coordinate: int, size: int) -> tuple[Any, Any, Any]:
        """Return tables of the two pixels along an axis, and of the weight of the second one."""
        last, edge = float(size - 1), 0.0 if aligns_corners else -0.5
        length = last - 2 * edge

        def place(n: Any, h: Any, w: Any) -> Any:
            at = (grid(n, coordinate, h, w) + 1.0) * (length / 2) + edge
            if reflects and length > 0:
                away = te.abs(at - edge)
                away = away - te.floor(away / (2 * length)) * (2 * length)
                is_within = tirx.all(at >= edge, at <= length + edge)
                back = tirx.Select(away > length, 2 * length - away, away) + edge
                at = tirx.Select(is_within, at, back)
            # this way round, NaN is 0
            return tirx.Min(tirx.Max(at, _float(0)), _float(last))

        places = te.compute(shape, place, name="place")
        first = te.compute(shape, lambda *i: te.floor(places(*i)).astype("int32"), name="first")
        second = te.compute(shape, lambda *i: tirx.Min(first(*i) + 1, size - 1), name="second")
        weight = te.compute(
            shape, lambda *i: places(*i) - first(*i).astype("float32"), name="weight"
        )
        return first, second, weight

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


def _float(number: float) -> Any:
    return tirx.const(number, "float32")


_LEGALIZATIONS: Final = {
    "relax.nn.softmax": _legalize_softmax,
    "relax.nn.log_softmax": _legalize_softmax,
    "relax.image.grid_sample": _legalize_grid_sample,
}
