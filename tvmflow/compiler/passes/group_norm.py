"""Group and instance norms of images instead of flattened groups, so that data stay blocked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import is_dynamic, known_sizes, same_size, same_sizes, sizes_of
from tvmflow.graph.ir import OPAQUE
from tvmflow.graph.rewriter import MainRewriter


def group_mean(sums: Any, groups: int, count: Any) -> Any:
    """Return each group's mean, repeated for its channels, from sums (n, c, 1, …) over `count` pixels."""
    size = int(sums.shape[1]) // groups
    member = te.reduce_axis((0, size), "member")

    def element(n: Any, c: Any, *rest: Any) -> Any:
        mean = sums(n, c // size * size + member, *rest) / tirx.Cast(sums.dtype, count)
        return te.sum(mean / tirx.const(size, sums.dtype), axis=[member])

    return te.compute(sums.shape, element, name="group_mean")


def group_factor(squares: Any, groups: int, count: Any, epsilon: Any) -> Any:
    """Return each group's 1 / √(variance + ε), repeated for its channels, see `group_mean`."""
    variance, one = group_mean(squares, groups, count), tirx.const(1, squares.dtype)
    return te.compute(
        variance.shape, lambda *i: one / te.sqrt(variance(*i) + epsilon()), name="group_factor"
    )


class GroupNormRewriter(MainRewriter):
    """Rewrites instance norms and group norms to means over images.

    A group norm is TVM's operator, or ends with a reshape from (n, groups, …); an instance norm ends with a division.
    """

    OPERATORS = ir.operators("divide nn.group_norm reshape")

    def _replace(self, call: Any) -> Any:
        if not ir.is_float32(call):
            return None
        match ir.operator_name(call):
            case "relax.divide":
                # an instance norm: each channel is a group
                data, epsilon = self._match_division(call) or (None, None)
                if data is None or is_dynamic(groups := known_sizes(data)[1]):
                    return None
                return self._emit_norm(data, groups, epsilon)
            case "relax.reshape":
                return self._replace_reshaped_norm(call)
        return self._replace_group_norm(call)

    def _replace_group_norm(self, call: Any) -> Any:
        """Return TVM's group norm as means over images; None if its axes are not the spatial ones."""
        data, scale, shift = call.args
        attrs, shape = call.attrs, sizes_of(data) or ()
        rank = len(shape)
        if rank < 3 or is_dynamic(shape[1]) or int(attrs.channel_axis) % rank != 1:
            return None
        if not _are_spatial(attrs.axes, rank):
            return None
        epsilon = relax.const(float(attrs.epsilon), "float32")
        scale, shift = scale if attrs.scale else None, shift if attrs.center else None
        return self._emit_norm(data, int(attrs.num_groups), epsilon, scale, shift)

    def _replace_reshaped_norm(self, call: Any) -> Any:
        """Return the group norm that ends with this reshape; None for other reshapes."""
        shift, value = self._match_weights("relax.add", call.args[0])
        scale, value = self._match_weights("relax.multiply", value)
        quotient = self.flow.find_call(value, "relax.divide")
        division = None if quotient is None else self._match_division(quotient)
        flattened = None if division is None else self.flow.find_call(division[0], "relax.reshape")
        if division is None or flattened is None:
            return None
        (groups, epsilon), data = division, flattened.args[0]
        shape, image, result = sizes_of(groups), sizes_of(data), sizes_of(call)
        if shape is None or image is None or result is None or not same_sizes(image, result):
            return None
        if len(image) < 3 or len(shape) != 3 or not same_size(shape[0], image[0]):
            return None
        if is_dynamic(image[1]) or is_dynamic(shape[1]) or image[1] % shape[1]:
            return None
        return self._emit_norm(data, shape[1], epsilon, scale, shift)

    def _match_division(self, quotient: relax.Call) -> tuple[Any, Any] | None:
        """Return x and ε of (x − mean) / √(variance + ε) along all spatial axes; None for others."""
        find = self.flow.find_call
        difference = find(quotient.args[0], "relax.subtract")
        root = find(quotient.args[1], "relax.sqrt")
        total = None if root is None else find(root.args[0], "relax.add")
        if difference is None or total is None:
            return None
        data, epsilon = difference.args[0], total.args[1]
        if ir.shape_of(epsilon) != () or not self.flow.is_weight(epsilon):
            return None
        shape = sizes_of(data)
        for mean in find(difference.args[1], "relax.mean"), find(total.args[0], "relax.variance"):
            if mean is None or not mean.args[0].same_as(data) or not mean.attrs.keepdims:
                return None
            if shape is None or len(shape) < 3 or not _are_spatial(mean.attrs.axis, len(shape)):
                return None
        return data, epsilon

    def _match_weights(self, name: str, expr: Any) -> tuple[Any, Any]:
        """Return the weights (groups, 1) and other operand of a call `name`; else None and the expression."""
        call = self.flow.find_call(expr, name)
        if call is not None:
            for weights, other in (tuple(call.args)[::-1], tuple(call.args)):
                shape, result = ir.shape_of(weights), sizes_of(call) or ()
                is_per_group = len(result) > 1 and shape == (result[1], 1)
                if is_per_group and self.flow.is_weight(weights):
                    return weights, other
        return None, expr

    def _emit_norm(
        self, original: Any, groups: int, epsilon: Any, scale: Any = None, shift: Any = None
    ) -> Any:
        """Return a norm of images (n, c, …), with scales and biases per group (groups, 1) or channel (c,)."""
        data, emit = self.visit_expr(original), self.emit
        _, channels, *image = known_sizes(original)
        rank = len(image) + 2

        def reduce(values: Any, function: Callable[..., Any], *args: Any) -> Any:
            # a sum instead of a mean, so that the squares are fused into its kernel
            sums = emit(relax.op.sum(values, list(range(2, rank)), keepdims=True))
            name, options = function.__name__, (groups, math.prod(image), *args)
            # opaque, so that kernels of images do not compute the group of each element
            return self.kernel(function, name, sums, *options, pattern=OPAQUE)

        mean = reduce(data, group_mean)
        # subtracted twice, because a shared difference would be a tensor in memory
        difference = emit(relax.op.subtract(data, mean))
        squares = emit(relax.op.multiply(difference, difference))
        factor = reduce(squares, group_factor, self.visit_expr(epsilon))
        if scale is not None:
            factor = emit(relax.op.multiply(factor, self._expand(scale, channels, rank)))
        result = relax.op.multiply(emit(relax.op.subtract(data, mean)), factor)
        if shift is None:
            return result
        return relax.op.add(emit(result), self._expand(shift, channels, rank))

    def _expand(self, weights: Any, channels: int, rank: int) -> Any:
        """Emit weights of groups (groups, 1), or of channels (c,), as (1, c, 1, …)."""
        weights = self.visit_expr(weights)
        groups, *is_of_groups = ir.known_shape(weights)
        if is_of_groups:
            weights = self.emit(relax.op.broadcast_to(weights, [groups, channels // groups]))
        return self.reshape(weights, [1, channels, *[1] * (rank - 2)])


def _are_spatial(axes: Any, rank: int) -> bool:
    """Return whether axes are all the axes behind the channels."""
    return sorted(int(axis) % rank for axis in axes or ()) == list(range(2, rank))
