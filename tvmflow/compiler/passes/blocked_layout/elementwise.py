"""Operators between convolutions on blocked layouts: elementwise, pools, reductions, resizes."""

from __future__ import annotations

import math
from typing import Any, Final

from tvm import relax, topi

from tvmflow.compiler.passes.blocked_layout.direct_convolutions import append_to_product
from tvmflow.compiler.passes.blocked_layout.rewriter import MOVES, LayoutRewriter
from tvmflow.compiler.passes.plain_images import as_resize, emit_resize
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, known_sizes, same_sizes, sizes_of
from tvmflow.graph.ir_operators import RoundedData

# Operators whose results are finite in empty lanes, which hold zeros or results of such operators.
_SAFE_ON_EMPTY_LANES: Final = {RoundedData.NAME} | ir.operators(
    "add subtract multiply maximum minimum clip negative abs sigmoid tanh erf sin cos floor ceil",
    "round sign nn.relu nn.leakyrelu nn.gelu nn.silu nn.gelu_tanh nn.relu6",
)

ELEMENTWISE: Final = _SAFE_ON_EMPTY_LANES | ir.operators(
    # these are rewritten only if no lane is empty
    "divide exp log sqrt rsqrt power nn.softplus square"
)
"""Elementwise operators that compute blocked data in the same way as plain data."""


def rewrite_elementwise(
    rewriter: LayoutRewriter, call: relax.Call, *arguments: Any
) -> relax.Expr | None:
    """Rewrite an elementwise operator with a blocked operand."""
    shape = known_sizes(call)
    # The limits of `clip` are scalars, not tensors.
    tensors = [argument for argument in arguments if not _is_number(argument)]
    if any(sizes_of(tensor) is None for tensor in tensors):
        return None
    if all(_blocked_form(rewriter, tensor, shape) is None for tensor in tensors):
        product = append_to_product(rewriter, call, *arguments)
        if product is not None:
            return product
        return _rewrite_before_moves(rewriter, call) if len(call.args) == 1 else None
    if not _is_safe_on_empty_lanes(call) and shape[1] % rewriter.block:
        return None
    operands = [
        arg if _is_number(arg) else _to_blocked_operand(rewriter, original, arg, shape)
        for original, arg in zip(call.args, arguments, strict=True)
    ]
    return rewriter.emit(relax.Call(call.op, operands, call.attrs))


def rewrite_conversion(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite a cast of blocked data from one floating-point type to another."""
    tensor = rewriter.blocked_form(data)
    if tensor is None or not all(map(rewriter.is_float, (call, data))):
        return None
    return rewriter.cast(tensor, ir.dtype_of(call))


def _rewrite_before_moves(rewriter: LayoutRewriter, call: relax.Call) -> relax.Expr | None:
    """Move a function before reshapes and transposes, so that a convolution's kernel computes it."""
    moves, source = [], call.args[0]
    while True:
        value = rewriter.flow.value_if_used_once(source)
        if ir.operator_name(value) not in MOVES:
            break
        moves.append(value)
        source = value.args[0]
    moved = rewriter.resolve(rewriter.visit_expr(source))
    tensor = rewriter.blocked_form(moved)
    if not moves or tensor is None:
        return None
    shape = known_sizes(moved)
    if not _is_safe_on_empty_lanes(call) and shape[1] % rewriter.block:
        return None
    result = rewriter.unpack(rewriter.emit(relax.Call(call.op, [tensor], call.attrs)), shape[1])
    for move in reversed(moves):
        result = rewriter.emit(relax.Call(move.op, [result, *move.args[1:]], move.attrs))
    return result


def _is_number(argument: Any) -> bool:
    return not hasattr(argument.ty, "shape")


def _is_safe_on_empty_lanes(call: relax.Call) -> bool:
    if call.op.name == "relax.divide":
        divisor = ir.constant_array(call.args[1])
        return divisor is not None and divisor.size == 1 and bool(divisor != 0)
    return call.op.name in _SAFE_ON_EMPTY_LANES


def _blocked_form(
    rewriter: LayoutRewriter, operand: Any, result: tuple[IrSize, ...]
) -> relax.Expr | None:
    """Return the blocked form of an operand with the rank and channels of the result, or None."""
    tensor = rewriter.blocked_form(operand)
    if tensor is None:
        return None
    shape = known_sizes(operand)
    return tensor if len(shape) == len(result) and same_sizes(shape[1:2], result[1:2]) else None


def _to_blocked_operand(
    rewriter: LayoutRewriter, original: Any, operand: Any, result: tuple[IrSize, ...]
) -> relax.Expr:
    """Return an operand in a shape that broadcasts over the blocked form of a result."""
    tensor = _blocked_form(rewriter, operand, result)
    if tensor is not None:
        return tensor
    shape = known_sizes(operand)
    if not shape:
        return operand
    if all(extent == 1 for extent in shape):
        return rewriter.reshape(operand, [1] * (len(result) + 1))
    full = [1] * (len(result) - len(shape)) + list(shape)
    if full[1] == 1:
        return rewriter.reshape(operand, [*full, 1])
    operand = operand if len(shape) == len(result) else rewriter.reshape(operand, full)
    if not rewriter.flow.is_weight(original):
        return rewriter.to_blocked(operand)
    block = rewriter.block
    operand = rewriter.pad_to_multiples(operand, [1, block])
    n, c, *size = known_sizes(operand)
    last = [*range(3, 3 + len(size)), 2]
    return rewriter.rearrange(operand, [n, c // block, block, *size], [0, 1, *last])


def rewrite_quantize(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, *parameters: Any
) -> relax.Expr | None:
    """Rewrite (de)quantization with one scale for the tensor: empty lanes stay zeros."""
    tensor = rewriter.blocked_form(data)
    shapes = [ir.shape_of(parameter) for parameter in parameters]
    if tensor is None or any(shape is None or math.prod(shape) != 1 for shape in shapes):
        return None
    return rewriter.emit(relax.Call(call.op, [tensor, *parameters], call.attrs))


# ---------------------------------------------------------------- pooling, reductions and resizing

IMAGE_REDUCTIONS: Final = {
    f"relax.{name}": getattr(relax.op, name) for name in ("mean", "sum", "max", "min", "variance")
}
"""Operators that may reduce spatial axes of each channel's sequence, image or volume."""

_POOLS: Final = {1: topi.nn.pool1d, 2: topi.nn.pool2d, 3: topi.nn.pool3d}
_ADAPTIVE_POOLS: Final = {
    1: topi.nn.adaptive_pool1d,
    2: topi.nn.adaptive_pool,
    3: topi.nn.adaptive_pool3d,
}


def rewrite_pool(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite max or average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    attrs = call.attrs
    layout = _default_layout(call)
    if tensor is None or (attrs.layout, attrs.out_layout) != (layout, layout):
        return None
    rank = len(layout) - 2
    kind = "max" if "max" in call.op.name else "avg"
    return rewriter.builder_.emit_te(
        _POOLS[rank],
        tensor,
        kernel=attrs.pool_size,
        stride=attrs.strides,
        dilation=attrs.dilation,
        padding=attrs.padding,
        pool_type=kind,
        ceil_mode=bool(attrs.ceil_mode),
        layout=f"{layout}{rewriter.block}c",
        count_include_pad=bool(attrs.count_include_pad),
        primfunc_name_hint=f"{kind}_pool{rank}d",
    )


def rewrite_adaptive_pool(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite adaptive average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    layout = _default_layout(call)
    if tensor is None or call.attrs.layout != layout:
        return None
    rank, size = len(layout) - 2, list(known_sizes(call)[2:])
    if any(map(is_dynamic, size)):
        return None
    arguments = (tensor, size, "avg", f"{layout}{rewriter.block}c")
    name = f"adaptive_avg_pool{rank}d"
    return rewriter.kernel(_ADAPTIVE_POOLS[rank], name, *arguments, pattern=None)


def rewrite_image_reduction(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite a reduction over spatial axes only, which does not mix lanes; it may drop the axes."""
    tensor = rewriter.blocked_form(data)
    if tensor is None or call.attrs.axis is None:
        return None
    rank = len(known_sizes(data))
    axes = sorted(int(axis) % rank for axis in call.attrs.axis)
    if not axes or axes[0] < 2:
        return None
    reduce = IMAGE_REDUCTIONS[call.op.name]
    return rewriter.emit(reduce(tensor, axes, keepdims=bool(call.attrs.keepdims)))


def _default_layout(call: relax.Call) -> str:
    return "NC" + "DHW"[2 - len(known_sizes(call)) :]


def rewrite_resize(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any
) -> relax.Expr | None:
    """Rewrite a spatial resize if its consumer takes blocked data; None to unpack its input instead."""
    resize = as_resize(call)
    if (
        resize is None
        or rewriter.tuning_sizes.shape(call.args[0]) is None
        or not call.attrs.layout.startswith("NC")
        or min(resize.axes, default=0) < 2
        or not rewriter.is_read_blocked(call)
    ):
        return None
    return emit_resize(rewriter, rewriter.to_blocked(data), resize)
