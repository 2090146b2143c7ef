"""Fuses attention into one kernel: queries times keys, softmax, and the product with values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.contraction.gpu_tiles import Device
from tvmflow.compiler.passes.strided_views import MatrixView, find_view, is_scalar
from tvmflow.compiler.passes.vector_math import exp_of_negative
from tvmflow.compiler.tir_kernels import attention
from tvmflow.compiler.tir_kernels.strides import Operand, StridedMatrices, contiguous
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    count_elements,
    is_dynamic,
    same_size,
    same_sizes,
    sizes_of,
)
from tvmflow.graph.rewriter import rewrite_main

_log = logging.getLogger(__name__)

_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    "relax.add": tirx.Add,
    "relax.subtract": tirx.Sub,
    "relax.multiply": tirx.Mul,
    "relax.divide": tirx.Div,
    "relax.where": tirx.Select,
}
"""Operator on scores -> the operation on their elements."""


def fuse_attention(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace softmax(q·kᵀ)·v, with masks and scales, by one kernel that keeps the scores in a cache."""
    return mod if context.is_plain("attention") else rewrite_main(mod, _AttentionFuser, context)


class _Step(NamedTuple):
    """An operation on the scores: its operands (None is the scores), and the shape of its result."""

    name: str
    operands: tuple[Any, ...]
    shape: tuple[IrSize, ...]


_Scores = tuple[Any, list[_Step]]
"""The matmul of queries and keys, and the operations on its result (the scores), in order."""


class _AttentionFuser(TargetRewriter):
    """Fuses attention, at its second matmul (probabilities × values) or at the transpose after it."""

    OPERATORS = ir.operators("matmul permute_dims")

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod, context)
        self._transposed = [
            self.flow.find_call_used_once(value.args[0], "relax.matmul")
            for value in self.flow.values.values()
            if ir.operator_name(value) == "relax.permute_dims"
        ]

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        if ir.operator_name(call) == "relax.matmul":
            is_transposed = any(p is not None and call.same_as(p) for p in self._transposed)
            return None if is_transposed else self._fuse(call, range(len(sizes_of(call) or ())))
        product = self.flow.find_call_used_once(call.args[0], "relax.matmul")
        if product is None or call.attrs.axes is None:
            return None
        return self._fuse(product, [int(axis) for axis in call.attrs.axes])

    def _fuse(self, call: Any, order: Sequence[int]) -> Any:
        """Return the call of an attention kernel, its result's axes in `order`; None for other matmuls."""
        scores, replacement = _match(self.flow, call) or (None, None)
        fused = None if scores is None else self._describe(scores, replacement, call, order)
        if fused is None:
            return None
        kernel, views = fused
        cpu, function = self._context.cpu, None
        if cpu is not None:
            exponential = exp_of_negative if self._context.has_vector_math() else tirx.exp
            function = attention.make_cpu_kernel(kernel, cpu, exponential)
        else:
            function = attention.make_gpu_kernel(kernel, Device.from_target(self._context.target))
        if function is None:
            return None
        _log.debug("attention of %s with %d operands", sizes_of(call), len(views))
        arguments = [self.visit_expr(view.tensor) for view in views]
        return self.call_function(function, "attention", arguments, kernel.out_shape)

    def _describe(
        self, scores: _Scores, replacement: Any, result: Any, order: Sequence[int]
    ) -> tuple[attention.Attention, list[MatrixView]] | None:
        """Return the computation of a kernel, and views of its operands; None if one has no strided view."""
        product, steps = scores
        *batch, queries, keys = sizes_of(product) or ()
        shape = sizes_of(result) or ()
        depth = (sizes_of(product.args[0]) or ())[-1]
        if is_dynamic(depth) or is_dynamic(shape[-1]):
            return None
        views = [
            find_view(self.flow, product.args[0], batch, with_factors=True),
            find_view(self.flow, product.args[1], batch, with_factors=True, with_casts=True),
            find_view(self.flow, result.args[1], shape[:-2], with_casts=True),
        ]
        factors = [factor for view in views[:2] if view is not None for factor in view.factors]
        while steps and (factor := _as_factor(steps[0])) is not None:
            factors.append(factor)
            steps = steps[1:]
        scalar = StridedMatrices(0, (), 0, 0)
        views += [MatrixView(tensor, scalar) for tensor, _ in factors]
        position = None if replacement is None else len(views)
        if replacement is not None:
            views.append(MatrixView(replacement, scalar))
        score_steps = []
        for step in steps:
            positions: list[int | None] = []
            for operand in step.operands:
                positions.append(None if operand is None else len(views))
                if operand is not None:
                    views.append(self._find_mask(operand, step.shape, (queries, keys)))
            score_steps.append(attention.ScoreStep(_STEPS[step.name], tuple(positions)))
        known = [view for view in views if view is not None]
        if len(known) < len(views):
            return None
        sizes = count_elements(batch), queries, keys
        operands = (
            Operand(sizes_of(view.tensor) or (), ir.dtype_of(view.tensor), view.matrices)
            for view in known
        )
        kernel = attention.Attention(
            batch=sizes[0],
            queries=queries,
            keys=keys,
            typical=attention.Typical(*map(self.tuning_sizes.size, sizes)),
            depth=depth,
            values=shape[-1],
            operands=tuple(operands),
            factors=tuple((3 + index, divides) for index, (_, divides) in enumerate(factors)),
            steps=tuple(score_steps),
            replacement=position,
            out_shape=tuple(shape[axis] for axis in order),
            out=contiguous(shape, order),
        )
        return kernel, known

    def _find_mask(
        self, operand: Any, shape: Sequence[IrSize], matrix: tuple[IrSize, IrSize]
    ) -> MatrixView | None:
        """Return the view of an operand broadcast to scores; None if `shape` does not end in `matrix`."""
        extents = sizes_of(operand)
        is_matrix = same_sizes(shape[-2:], matrix)
        if extents is None or not is_matrix or len(extents) > len(shape):
            return None
        if len(extents) >= 2:
            return find_view(self.flow, operand, shape[:-2])
        column = 1 if extents and not same_size(extents[0], 1) else 0
        return MatrixView(operand, StridedMatrices(0, (), 0, column))


def _as_factor(step: _Step) -> tuple[Any, bool] | None:
    """Return the scalar that scores are multiplied with or divided by; None for other operations."""
    if step.name not in ("relax.multiply", "relax.divide"):
        return None
    left, right = step.operands
    factor = left if right is None else right
    is_one = same_size(count_elements(sizes_of(factor) or ()), 1)
    if not is_one or (step.name == "relax.divide" and right is None):
        return None
    return factor, step.name == "relax.divide"


def _match(flow: ir.DataFlow, call: Any) -> tuple[_Scores, Any] | None:
    """Return the scores of the attention that ends with `call`, and the scalar that replaces NaN.

    The scalar is None if NaN stays. Returns None for other calls.
    """
    weights, values = call.args
    shape = sizes_of(call)
    if shape is None or not all(map(ir.is_float32, (weights, values, call))):
        return None
    value = _skip_reshapes(flow, weights)
    weights, replacement = _match_nan_guard(flow, value)
    if replacement is not None:
        value = flow.value_if_used(weights, 2)
    softmax = ir.as_call(value, "relax.nn.softmax")
    rows, scored = sizes_of(call.args[0]), sizes_of(softmax)
    if softmax is None or rows is None or scored is None:
        return None
    is_of_rows = int(softmax.attrs.axis) % len(scored) == len(scored) - 1
    scores = _match_scores(flow, softmax.args[0], scored[-1]) if is_of_rows else None
    if scores is None:
        return None
    product = sizes_of(scores[0]) or ()
    matrix = (shape[-2], product[-1])
    is_plain = same_sizes(product[-2:], rows[-2:]) and same_sizes(rows[-2:], matrix)
    if not is_plain or len(rows) < 2 or any(same_size(size, 0) for size in shape):
        return None
    batches = [count_elements(sizes[:-2]) for sizes in (product, rows, shape)]
    is_one_batch = all(same_size(batch, batches[-1]) for batch in batches)
    return (scores, replacement) if is_one_batch else None


def _skip_reshapes(flow: ir.DataFlow, expr: Any) -> Any:
    """Return the value of a variable that is used once, before reshapes that keep its rows."""
    value = flow.value_if_used_once(expr)
    while ir.operator_name(value) == "relax.reshape":
        shapes = [sizes_of(tensor) or () for tensor in (value, value.args[0])]
        if not all(shapes) or not same_size(shapes[0][-1], shapes[1][-1]):
            break
        value = flow.value_if_used_once(value.args[0])
    return value


def _match_nan_guard(flow: ir.DataFlow, value: Any) -> tuple[Any, Any]:
    """Return p and the scalar s of `where(isnan(p), s, p)`; None and None for another value."""
    if ir.operator_name(value) == "relax.where":
        condition, replacement, weights = value.args
        test = flow.value_if_used_once(condition)
        if ir.operator_name(test) == "relax.isnan" and test.args[0].same_as(weights):
            return weights, replacement if is_scalar(replacement) else None
    return None, None


def _match_scores(flow: ir.DataFlow, expr: Any, keys: IrSize) -> _Scores | None:
    """Return the matmul and the operations that compute the scores; None for other expressions."""
    value = flow.value_if_used_once(expr)
    shape = None if value is None else sizes_of(value)
    if not shape or not same_size(shape[-1], keys) or not ir.is_float32(value):
        return None
    name = ir.operator_name(value)
    if name == "relax.matmul":
        known = all(ir.is_float32(arg) and len(sizes_of(arg) or ()) >= 2 for arg in value.args)
        return (value, []) if known and not any(map(flow.is_weight, value.args)) else None
    if name == "relax.reshape":
        return _match_scores(flow, value.args[0], keys)
    if name not in _STEPS:
        return None
    for position, argument in enumerate(value.args):
        sizes = sizes_of(argument)
        if sizes is None or not same_sizes(sizes, shape):
            continue
        scores = _match_scores(flow, argument, keys)
        if scores is not None:
            operands = list(value.args)
            operands[position] = None
            return scores[0], [*scores[1], _Step(name, tuple(operands), shape)]
    return None
