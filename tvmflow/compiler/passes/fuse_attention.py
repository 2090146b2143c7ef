"""Computes attention in one kernel: the product of queries and keys, softmax, and the product with values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.operators import attention
from tvmflow.compiler.operators.attention import Attention, ScoreStep
from tvmflow.compiler.operators.batches import Operand
from tvmflow.compiler.operators.strided import StridedMatrices, contiguous
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.passes.strided_views import MatrixView, find_view, is_scalar

_log = logging.getLogger(__name__)

_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    "relax.add": tirx.Add,
    "relax.subtract": tirx.Sub,
    "relax.multiply": tirx.Mul,
    "relax.divide": tirx.Div,
    "relax.where": tirx.Select,
}
"""The operators on scores -> the same on their elements."""


def fuse_attention(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace softmax(q·kᵀ)·v, with masks and scales, by a kernel that keeps the scores in the cache."""
    if context.cpu is None or context.is_plain("attention"):
        return mod
    return rewrite_main(mod, _AttentionFuser, context.cpu)


class _Step(NamedTuple):
    """An operation on the scores: its operands, None for the scores, and the shape of its result."""

    name: str
    operands: tuple[Any, ...]
    shape: tuple[int, ...]


class _Scores(NamedTuple):
    """The scores: the product that they begin with, and the operations on them, in order."""

    product: Any
    steps: tuple[_Step, ...]


class _Match(NamedTuple):
    """The parts of attention in a graph; the replacement of weights that are NaN is None if they stay."""

    scores: _Scores
    values: Any
    replacement: Any
    result: Any


class _AttentionFuser(MainRewriter):
    """Rewrites the last product of attention, or the transpose behind it."""

    def __init__(self, mod: tvm.IRModule, cpu: CpuModel) -> None:
        super().__init__(mod)
        self._cpu = cpu
        transposed = (
            self.flow.value_if_used_once(value.args[0])
            for value in self.flow.values.values()
            if ir.operator_name(value) == "relax.permute_dims"
        )
        self._transposed = [v for v in transposed if ir.operator_name(v) == "relax.matmul"]

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten, fused = super().visit_call_(call), None
        if ir.operator_name(call) == "relax.matmul":
            if not any(map(call.same_as, self._transposed)):
                fused = self._fuse(call, None)
        elif ir.operator_name(call) == "relax.permute_dims" and call.attrs.axes is not None:
            product = self.flow.value_if_used_once(call.args[0])
            if ir.operator_name(product) == "relax.matmul":
                fused = self._fuse(product, [int(axis) for axis in call.attrs.axes])
        return rewritten if fused is None else fused

    def _fuse(self, call: Any, axes: Sequence[int] | None) -> Any:
        """Return the call of a kernel for attention, with the axes of its result in another order; None for other products."""
        match = _match(self.flow, call)
        if match is None:
            return None
        shape = ir.known_shape(call)
        order = list(axes) if axes is not None else list(range(len(shape)))
        fused = self._make_kernel(match, order)
        if fused is None:
            return None
        kernel, views = fused
        _log.debug("attention of %s with %d operands", shape, len(views))
        function = attention.make_kernel(kernel, self._cpu)
        arguments = [self.visit_expr(view.tensor) for view in views]
        return self.call_function(function, "attention", arguments, kernel.out_shape)

    def _make_kernel(
        self, match: _Match, order: list[int]
    ) -> tuple[Attention, list[MatrixView]] | None:
        """Return the kernel and what it reads."""
        product = match.scores.product
        *batch, queries, keys = ir.known_shape(product)
        shape = ir.known_shape(match.result)
        views = [
            find_view(self.flow, product.args[0], batch, with_factors=True),
            find_view(self.flow, product.args[1], batch, with_factors=True),
            find_view(self.flow, match.values, shape[:-2]),
        ]
        steps = list(match.scores.steps)
        factors = [factor for view in views[:2] if view is not None for factor in view.factors]
        while steps and (factor := _as_factor(steps[0])) is not None:
            factors.append(factor)
            steps.pop(0)
        scalar = StridedMatrices(0, (), 0, 0)
        views += [MatrixView(tensor, scalar) for tensor, _ in factors]
        replacement = None if match.replacement is None else len(views)
        if match.replacement is not None:
            views.append(MatrixView(match.replacement, scalar))
        score_steps = []
        for step in steps:
            positions: list[int | None] = []
            for operand in step.operands:
                positions.append(None if operand is None else len(views))
                if operand is not None:
                    views.append(self._find_mask(operand, step.shape, (queries, keys)))
            score_steps.append(ScoreStep(_STEPS[step.name], tuple(positions)))
        if any(view is None for view in views):
            return None
        known = [view for view in views if view is not None]
        kernel = Attention(
            math.prod(batch),
            queries,
            keys,
            ir.known_shape(product.args[0])[-1],
            shape[-1],
            tuple(_operand(view) for view in known),
            tuple((3 + index, divides) for index, (_, divides) in enumerate(factors)),
            tuple(score_steps),
            replacement,
            tuple(shape[axis] for axis in order),
            contiguous(shape, order),
        )
        return kernel, known

    def _find_mask(
        self, operand: Any, shape: Sequence[int], matrix: tuple[int, int]
    ) -> MatrixView | None:
        """Return the view of an operand of the scores, which have this shape; None if it is no batch of matrices."""
        extents = ir.shape_of(operand)
        if extents is None or tuple(shape[-2:]) != matrix or len(extents) > len(shape):
            return None
        if len(extents) >= 2:
            return find_view(self.flow, operand, shape[:-2])
        column = 1 if extents and extents[0] > 1 else 0
        return MatrixView(operand, StridedMatrices(0, (), 0, column))


def _operand(view: MatrixView) -> Operand:
    return Operand(ir.known_shape(view.tensor), ir.dtype_of(view.tensor), view.matrices)


def _as_factor(step: _Step) -> tuple[Any, bool] | None:
    """Return the scalar that scores are multiplied with or divided by; None for other operations."""
    if step.name not in ("relax.multiply", "relax.divide"):
        return None
    left, right = step.operands
    factor = left if right is None else right
    is_scalar = math.prod(ir.known_shape(factor)) == 1
    if not is_scalar or (step.name == "relax.divide" and right is None):
        return None
    return factor, step.name == "relax.divide"


def _match(flow: ir.DataFlow, call: Any) -> _Match | None:
    """Return the parts of attention that ends with a product; None for other products."""
    weights, values = call.args
    shape = ir.shape_of(call)
    if shape is None or not all(map(ir.is_float32, (weights, values, call))):
        return None
    value = _skip_reshapes(flow, weights)
    weights, replacement = _match_nan_guard(flow, value)
    if replacement is not None:
        value = flow.value_if_used(weights, 2)
    softmax = ir.as_call(value, "relax.nn.softmax")
    rows = ir.shape_of(call.args[0])
    if softmax is None or rows is None or ir.shape_of(softmax) is None:
        return None
    scored = ir.known_shape(softmax)
    if int(softmax.attrs.axis) % len(scored) != len(scored) - 1:
        return None
    scores = _match_scores(flow, softmax.args[0], scored[-1])
    if scores is None:
        return None
    product = ir.known_shape(scores.product)
    is_plain = product[-2:] == rows[-2:] == (shape[-2], product[-1]) and len(rows) >= 2
    if not is_plain or math.prod(product[:-2]) != math.prod(shape[:-2]) or 0 in shape:
        return None
    if math.prod(rows[:-2]) != math.prod(shape[:-2]):
        return None
    return _Match(scores, values, replacement, call)


def _skip_reshapes(flow: ir.DataFlow, expr: Any) -> Any:
    """Return the value of a variable that is used once, before reshapes that keep its rows."""
    value = flow.value_if_used_once(expr)
    while ir.operator_name(value) == "relax.reshape":
        shapes = [ir.shape_of(tensor) for tensor in (value, value.args[0])]
        if None in shapes or len({shape[-1:] for shape in shapes if shape}) != 1:
            break
        value = flow.value_if_used_once(value.args[0])
    return value


def _match_nan_guard(flow: ir.DataFlow, value: Any) -> tuple[Any, Any]:
    """Return p and the scalar s of `where(isnan(p), s, p)`; None for another value."""
    if ir.operator_name(value) == "relax.where":
        condition, replacement, weights = value.args
        test = flow.value_if_used_once(condition)
        if ir.operator_name(test) == "relax.isnan" and test.args[0].same_as(weights):
            return weights, replacement if is_scalar(replacement) else None
    return None, None


def _match_scores(flow: ir.DataFlow, expr: Any, keys: int) -> _Scores | None:
    """Return the product of matrices and the operations that give the scores; None for others."""
    value = flow.value_if_used_once(expr)
    shape = None if value is None else ir.shape_of(value)
    if shape is None or shape[-1:] != (keys,) or not ir.is_float32(value):
        return None
    name = ir.operator_name(value)
    if name == "relax.matmul":
        known = all(ir.is_float32(arg) and len(ir.shape_of(arg) or ()) >= 2 for arg in value.args)
        return _Scores(value, ()) if known and not any(map(flow.is_weight, value.args)) else None
    if name == "relax.reshape":
        return _match_scores(flow, value.args[0], keys)
    if name not in _STEPS:
        return None
    for position, argument in enumerate(value.args):
        if ir.shape_of(argument) != shape:
            continue
        scores = _match_scores(flow, argument, keys)
        if scores is not None:
            operands = list(value.args)
            operands[position] = None
            return scores._replace(steps=(*scores.steps, _Step(name, tuple(operands), shape)))
    return None
