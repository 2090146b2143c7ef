"""Computes group norms and instance norms on images instead of flattened groups.

So their data stay blocked.
"""

from __future__ import annotations

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


def group_mean(x: Any, groups: int) -> Any:
    """Return means of channels (n, c, 1, …) averaged over each group, for all channels of the group."""
    size = int(x.shape[1]) // groups
    member = te.reduce_axis((0, size), "member")

    def element(n: Any, c: Any, *rest: Any) -> Any:
        value = x(n, c // size * size + member, *rest)
        return te.sum(value / tirx.const(size, x.dtype), axis=[member])

    return te.compute(x.shape, element, name="group_mean")


class _GroupNorm(NamedTuple):
    """A norm of images.

    Attributes:
        data: The images, (n, c, …).
        groups: The number of groups.
        epsilon: What is added to the variance.
        scale: Weights with one factor a group; None without.
        shift: Weights with one summand a group; None without.
    """

    data: Any
    groups: int
    epsilon: Any
    scale: Any
    shift: Any


class _GroupNormRewriter(MainRewriter):
    """Rewrites the division that ends an instance norm, or the reshape behind a group norm.

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
        if difference is None or total is None or not self.flow.is_weight(total.args[1]):
            return None
        data = difference.args[0]
        means = (
            self._find("relax.mean", difference.args[1]),
            self._find("relax.variance", total.args[0]),
        )
        is_norm = all(self._reduces_images(mean, data) for mean in means)
        return (data, total.args[1]) if is_norm else None

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
        channels, rank = known_sizes(norm.data)[1], len(known_sizes(norm.data))
        axes = list(range(2, rank))
        mean = self._group_mean(emit(relax.op.mean(data, axes, keepdims=True)), norm.groups)
        # Two subtractions: a shared one would be a tensor in memory.
        difference = emit(relax.op.subtract(data, mean))
        squares = emit(relax.op.multiply(difference, difference))
        deviation = emit(relax.op.mean(squares, axes, keepdims=True))
        variance = self._group_mean(deviation, norm.groups)
        total = emit(relax.op.add(variance, self.visit_expr(norm.epsilon)))
        factor = emit(relax.op.divide(relax.const(1.0, "float32"), emit(relax.op.sqrt(total))))
        if norm.scale is not None:
            factor = emit(relax.op.multiply(factor, self._expand(norm.scale, channels, rank)))
        result = relax.op.multiply(emit(relax.op.subtract(data, mean)), factor)
        if norm.shift is None:
            return result
        return relax.op.add(emit(result), self._expand(norm.shift, channels, rank))

    def _group_mean(self, means: Any, groups: int) -> Any:
        if known_sizes(means)[1] == groups:
            return means
        # Opaque: a kernel of images that reads it would find the group of each number.
        return self.kernel(group_mean, "group_mean", means, groups, pattern=OPAQUE)

    def _expand(self, weights: Any, channels: int, rank: int) -> Any:
        """Emit weights (groups, 1) as (1, c, 1, …), each for all channels of its group."""
        weights = self.visit_expr(weights)
        groups = ir.known_shape(weights)[0]
        spread = self.emit(relax.op.broadcast_to(weights, [groups, channels // groups]))
        return self.reshape(spread, [1, channels, *[1] * (rank - 2)])


_MATCHES: Final[Mapping[str, Callable[[_GroupNormRewriter, relax.Call], _GroupNorm | None]]] = {
    "relax.divide": _GroupNormRewriter.match_instance_norm,
    "relax.reshape": _GroupNormRewriter.match_group_norm,
}
"""The operator that ends a norm -> the method that finds the norm before it."""
