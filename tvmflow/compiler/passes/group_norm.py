"""Computes group norms and instance norms on images instead of flattened groups.

So their data stay blocked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import is_open, known_sizes, same_size, same_sizes, sizes_of
from tvmflow.compiler.passes.rewriter import OPAQUE, MainRewriter, rewrite_main


def rewrite_group_norms(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite norms of channels, and of data reshaped to groups and back, to means of images.

    The shape of groups is (n, groups, …).
    """
    return rewrite_main(mod, _GroupNormRewriter)


def group_mean(sums: Any, groups: int, count: Any) -> Any:
    """Return the mean of each group, for all its channels.

    Args:
        sums: The sums of channels (n, c, 1, …).
        groups: The number of groups.
        count: The number of pixels of a channel.
    """
    size = int(sums.shape[1]) // groups
    member = te.reduce_axis((0, size), "member")

    def element(n: Any, c: Any, *rest: Any) -> Any:
        mean = sums(n, c // size * size + member, *rest) / tirx.Cast(sums.dtype, count)
        return te.sum(mean / tirx.const(size, sums.dtype), axis=[member])

    return te.compute(sums.shape, element, name="group_mean")


def group_factor(squares: Any, groups: int, count: Any, epsilon: Any) -> Any:
    """Return 1 / √(variance + ε) of each group for all its channels, see `group_mean`."""
    variance, one = group_mean(squares, groups, count), tirx.const(1, squares.dtype)
    return te.compute(
        variance.shape, lambda *i: one / te.sqrt(variance(*i) + epsilon()), name="group_factor"
    )


class _GroupNorm(NamedTuple):
    """A norm of images.

    Attributes:
        data: The images, (n, c, …).
        groups: The number of groups.
        epsilon: What is added to the variance.
        scale: Factors, one a group (groups, 1) or one a channel (channels,); None without.
        shift: Summands, as many; None without.
    """

    data: Any
    groups: int
    epsilon: Any
    scale: Any
    shift: Any


class _GroupNormRewriter(MainRewriter):
    """Rewrites group norms, the division that ends an instance norm, or the reshape behind a group norm.

    What these read becomes dead code.
    """

    def visit_call_(self, call: relax.Call) -> Any:
        match = _MATCHES.get(ir.operator_name(call))
        norm = None if match is None else match(self, call)
        return super().visit_call_(call) if norm is None else self._rewrite(norm)

    def match_instance_norm(self, call: relax.Call) -> _GroupNorm | None:
        """Return the norm that a division ends, of each channel by itself; None for others."""
        division = self._match_division(call)
        shape = None if division is None else sizes_of(division[0])
        if division is None or shape is None or is_open(shape[1]) or not ir.is_float32(call):
            return None
        return _GroupNorm(
            data=division[0], groups=shape[1], epsilon=division[1], scale=None, shift=None
        )

    def match_group_norm(self, call: relax.Call) -> _GroupNorm | None:
        """Return the norm of groups that TVM's operator describes; None for other axes and dtypes."""
        data, scale, shift = call.args
        attrs, shape = call.attrs, sizes_of(data)
        rank = 0 if shape is None else len(shape)
        if (
            shape is None
            or rank < 3
            or is_open(shape[1])
            or int(attrs.channel_axis) % rank != 1
            or sorted(int(axis) % rank for axis in attrs.axes) != list(range(2, rank))
            or not ir.is_float32(call)
        ):
            return None
        return _GroupNorm(
            data=data,
            groups=int(attrs.num_groups),
            epsilon=relax.const(float(attrs.epsilon), "float32"),
            scale=scale if attrs.scale else None,
            shift=shift if attrs.center else None,
        )

    def match_reshaped_norm(self, call: relax.Call) -> _GroupNorm | None:
        """Return the norm of groups before a reshape; None for others."""
        shift, value = self._match_weights("relax.add", call.args[0])
        scale, value = self._match_weights("relax.multiply", value)
        quotient = self._find("relax.divide", value)
        division = None if quotient is None else self._match_division(quotient)
        flattened = None if division is None else self._find("relax.reshape", division[0])
        if division is None or flattened is None:
            return None
        groups, epsilon = division
        data, shape = flattened.args[0], sizes_of(groups)
        image, result = sizes_of(data), sizes_of(call)
        if (
            shape is None
            or image is None
            or result is None
            or len(image) < 3
            or not same_sizes(image, result)
            or len(shape) != 3
            or not same_size(shape[0], image[0])
            or is_open(image[1])
            or is_open(shape[1])
            or image[1] % shape[1]
            or not ir.is_float32(call)
        ):
            return None
        return _GroupNorm(data=data, groups=shape[1], epsilon=epsilon, scale=scale, shift=shift)

    def _match_division(self, quotient: relax.Call) -> tuple[Any, Any] | None:
        """Return x and ε of (x − mean) / √(variance + ε) along all axes behind the channels; None for others."""
        difference = self._find("relax.subtract", quotient.args[0])
        root = self._find("relax.sqrt", quotient.args[1])
        total = self._find("relax.add", self._argument(root, 0))
        if difference is None or total is None:
            return None
        data, epsilon = difference.args[0], total.args[1]
        if ir.shape_of(epsilon) != () or not self.flow.is_weight(epsilon):
            return None
        means = (
            self._find("relax.mean", difference.args[1]),
            self._find("relax.variance", total.args[0]),
        )
        is_norm = all(self._reduces_images(mean, data) for mean in means)
        return (data, epsilon) if is_norm else None

    def _match_weights(self, name: str, expr: Any) -> tuple[Any, Any]:
        """Return the weights (groups, 1) and the other operand of a call.

        For an expression that is no such call, return None and the expression.
        """
        call = self._find(name, expr)
        if call is not None:
            for weights, other in (tuple(call.args)[::-1], tuple(call.args)):
                shape, result = ir.shape_of(weights), sizes_of(call) or ()
                is_per_group = len(result) > 1 and shape == (result[1], 1)
                if is_per_group and self.flow.is_weight(weights):
                    return weights, other
        return None, expr

    @staticmethod
    def _argument(call: Any, position: int) -> Any:
        return None if call is None else call.args[position]

    def _find(self, name: str, expr: Any) -> Any:
        return ir.as_call(self.flow.values.get(expr), name)

    @staticmethod
    def _reduces_images(call: Any, data: Any) -> bool:
        shape = sizes_of(data)
        return (
            call is not None
            and call.args[0].same_as(data)
            and shape is not None
            and len(shape) > 2
            and sorted(int(axis) % len(shape) for axis in call.attrs.axis or ())
            == list(range(2, len(shape)))
            and bool(call.attrs.keepdims)
        )

    def _rewrite(self, norm: _GroupNorm) -> Any:
        data, emit = self.visit_expr(norm.data), self.emit
        _, channels, *image = known_sizes(norm.data)
        rank = len(image) + 2

        def reduce(numbers: Any, function: Callable[..., Any], *args: Any) -> Any:
            # a sum, into whose kernel the squares go
            sums = emit(relax.op.sum(numbers, list(range(2, rank)), keepdims=True))
            name, options = function.__name__, (norm.groups, math.prod(image), *args)
            # Opaque: a kernel of images that reads it would find the group of each number.
            return self.kernel(function, name, sums, *options, pattern=OPAQUE)

        mean = reduce(data, group_mean)
        # Two subtractions: a shared one would be a tensor in memory.
        difference = emit(relax.op.subtract(data, mean))
        squares = emit(relax.op.multiply(difference, difference))
        factor = reduce(squares, group_factor, self.visit_expr(norm.epsilon))
        if norm.scale is not None:
            factor = emit(relax.op.multiply(factor, self._expand(norm.scale, channels, rank)))
        result = relax.op.multiply(emit(relax.op.subtract(data, mean)), factor)
        if norm.shift is None:
            return result
        return relax.op.add(emit(result), self._expand(norm.shift, channels, rank))

    def _expand(self, weights: Any, channels: int, rank: int) -> Any:
        """Emit weights of groups (groups, 1), or of channels (c,), as (1, c, 1, …)."""
        weights = self.visit_expr(weights)
        groups, *is_of_groups = ir.known_shape(weights)
        if is_of_groups:
            weights = self.emit(relax.op.broadcast_to(weights, [groups, channels // groups]))
        return self.reshape(weights, [1, channels, *[1] * (rank - 2)])


_MATCHES: Final[Mapping[str, Callable[[_GroupNormRewriter, relax.Call], _GroupNorm | None]]] = {
    "relax.divide": _GroupNormRewriter.match_instance_norm,
    "relax.nn.group_norm": _GroupNormRewriter.match_group_norm,
    "relax.reshape": _GroupNormRewriter.match_reshaped_norm,
}
"""The operator that ends a norm -> the method that finds the norm before it."""
