"""Merges convolutions of the same data whose results are added.

RepVGG and MobileOne have such before reparametrization.

Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", CVPR 2021, merge them in the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.open_sizes import known_sizes, same_sizes, sizes_of
from tvmflow.compiler.passes.rewriter import TargetRewriter, rewrite_main

_ADD: Final = "relax.add"
_MULTIPLY: Final = "relax.multiply"
_CONVOLUTIONS: Final = frozenset(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))
_CONVERSIONS: Final = frozenset({"relax.astype", "relax.dequantize"})
# What the folding of norms and the importer put between converted weights and a convolution.
_MOVES: Final = frozenset({_MULTIPLY, "relax.permute_dims", "relax.reshape", "relax.expand_dims"})
# Data that are added themselves are a matrix of ones, which the merged weights must not be much larger than.
_MAX_ONES: Final = 1 << 22
# Images and sequences with channels.
_MIN_RANK: Final = 3


def merge_convolutions(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Replace sums of convolutions of the same data by one convolution.

    The data may be scaled for some, or be a term themselves.

    Its kernel is the largest of theirs, so that it takes no longer than that one alone.
    """
    operators = {ir.operator_name(value) for value in ir.DataFlow(mod["main"]).values.values()}
    if _ADD not in operators or operators.isdisjoint(_CONVOLUTIONS):
        return mod
    return rewrite_main(mod, _ConvolutionMerger, context)


class _Term(NamedTuple):
    """A term of a sum that reads some pixels of data around each pixel of the result.

    Attributes:
        conv: The convolution that computes it; None for data that are scaled, or added as they are.
        scale: The factor of each channel, or None.
        data: The tensor that it reads.
        begins: The first pixel along each axis, relative to that of the result.
        sizes: The pixels along each axis.
        gaps: The distance between these pixels; 1 where there is one pixel.
    """

    conv: Any
    scale: Any
    data: Any
    begins: Sequence[int]
    sizes: Sequence[int]
    gaps: Sequence[int]

    def find_place(self, other: _Term) -> list[int] | None:
        """Return the pixel of this term along each axis at which another term begins.

        None if that reads other pixels, or other data.
        """
        if not self.data.same_as(other.data):
            return None
        places = []
        for axis, (begin, size, gap) in enumerate(
            zip(self.begins, self.sizes, self.gaps, strict=True)
        ):
            place, rest = divmod(other.begins[axis] - begin, gap)
            length = other.sizes[axis]
            if (
                rest
                or place < 0
                or place + length > size
                or (length > 1 and other.gaps[axis] != gap)
            ):
                return None
            places.append(place)
        return places


class _ConvolutionMerger(TargetRewriter):
    """Rewrites sums."""

    def visit_call_(self, call: relax.Call) -> Any:
        merged = self._merge(call) if self._is_whole_sum(call) else None
        return super().visit_call_(call) if merged is None else merged

    def _is_whole_sum(self, call: relax.Call) -> bool:
        """Return whether a call is a sum, and no part of another one of the same shape.

        That one has its terms too.
        """
        if ir.as_call(call, _ADD) is None:
            return False
        readers = self.flow.list_readers(call)
        is_part = len(readers) == 1 and self.flow.is_read_by(call, _ADD)
        return not is_part or not same_sizes(known_sizes(readers[0]), known_sizes(call))

    def _merge(self, total: Any) -> Any:
        """Return a sum with as few convolutions as possible; None if it stays as it is."""
        leaves = dict(enumerate(self._list_leaves(total)))
        terms = {n: term for n, leaf in leaves.items() if (term := self._analyze(leaf, total))}
        bases = [n for n, term in terms.items() if term.conv is not None]
        merged = []
        for n in sorted(bases, key=lambda n: -math.prod(terms[n].sizes)):
            parts = self._find_parts(n, terms)
            if parts:
                merged.append(self._emit_merged(n, parts, terms))
                for m in (n, *parts):
                    del terms[m], leaves[m]
        if not merged:
            return None
        weights = [leaf for leaf in leaves.values() if self.flow.is_weight(leaf)]
        others = [leaf for leaf in leaves.values() if not self.flow.is_weight(leaf)]
        # weights are added first, so that the library has their sum
        shifts = [self._sum(map(self.visit_expr, weights))] if weights else []
        return self._sum([*merged, *shifts, *map(self.visit_expr, others)])

    def _find_parts(self, n: int, terms: Mapping[int, _Term]) -> dict[int, list[int]]:
        """Return where the weights of other terms begin within those of term `n`, by their numbers."""
        base = terms.get(n)
        if base is None:
            return {}
        places = {m: self._place(base, term) for m, term in terms.items() if m != n}
        return {m: place for m, place in places.items() if place is not None}

    def _emit_merged(
        self, n: int, parts: Mapping[int, list[int]], terms: Mapping[int, _Term]
    ) -> Any:
        """Emit the convolution of term `n`, with the weights of its parts added to its own."""
        base = terms[n]
        weights = [self._emit_weights(base, terms[m], place) for m, place in parts.items()]
        kernel = self._sum([self.visit_expr(base.conv.args[1]), *weights])
        operands = [self.visit_expr(base.data), kernel]
        return self.emit(relax.Call(base.conv.op, operands, base.conv.attrs))

    def _sum(self, values: Iterable[Any]) -> Any:
        return functools.reduce(self._add, values)

    def _list_leaves(self, total: Any) -> list[Any]:
        """Return what a sum adds, through other sums that nothing else reads, in order."""
        leaves, operands = [], list(reversed(total.args))
        while operands:
            operand = operands.pop()
            value: Any = ir.as_call(self.flow.value_if_used_once(operand), _ADD)
            if value is None:
                leaves.append(operand)
            else:
                operands += reversed(value.args)
        return leaves

    def _analyze(self, leaf: Any, total: Any) -> _Term | None:
        """Return what a term reads; None for terms that cannot be merged."""
        shape = sizes_of(leaf)
        if (
            shape is None
            or len(shape) < _MIN_RANK
            or not same_sizes(shape, known_sizes(total))
            or not ir.is_float32(leaf)
            or self.flow.is_weight(leaf)
        ):
            return None
        value: Any = self.flow.value_if_used_once(leaf)
        axes = range(len(shape) - 2)
        if ir.operator_name(value) in _CONVOLUTIONS:
            return self._analyze_convolution(value)
        data, scale = leaf, None
        if ir.as_call(value, _MULTIPLY) is not None:
            for factor, other in (value.args, reversed(value.args)):
                channels = (shape[1], *(1 for _ in axes))
                if self.flow.is_weight(factor) and ir.shape_of(factor) in (
                    channels,
                    (1, *channels),
                ):
                    data, scale = other, factor
        data = ir.resolve_alias(data, self.flow.values.get)
        return _Term(
            conv=None,
            scale=scale,
            data=data,
            begins=[0 for _ in axes],
            sizes=[1 for _ in axes],
            gaps=[1 for _ in axes],
        )

    def _analyze_convolution(self, conv: Any) -> _Term | None:
        kind = ir.convolution_kind(conv)
        if (
            ir.shape_of(conv.args[1]) is None
            or not ir.has_default_layouts(conv)
            or not self.flow.is_weight(conv.args[1])
            or self._is_quantized(conv.args[1])
            or self._context.is_plain(kind)
        ):
            return None
        attrs = conv.attrs
        sizes = ir.known_shape(conv.args[1])[2:]
        gaps = [
            int(gap) if size > 1 else 1 for gap, size in zip(attrs.dilation, sizes, strict=True)
        ]
        begins = [-int(width) for width in list(attrs.padding)[: len(sizes)]]
        data = ir.resolve_alias(conv.args[0], self.flow.values.get)
        return _Term(conv=conv, scale=None, data=data, begins=begins, sizes=sizes, gaps=gaps)

    def _is_quantized(self, weights: Any) -> bool:
        """Return whether weights are bytes in the library, of which a sum would be float32."""
        value: Any = self.flow.values.get(weights)
        name = ir.operator_name(value)
        return name in _CONVERSIONS or (name in _MOVES and any(map(self._is_quantized, value.args)))

    def _place(self, base: _Term, term: _Term) -> list[int] | None:
        """Return where the weights of a term begin within those of a convolution.

        None if they cannot be part of them.
        """
        attrs = base.conv.attrs
        strides = [int(stride) for stride in attrs.strides]
        if term.conv is not None:
            own = term.conv.attrs
            is_alike = int(own.groups) == int(attrs.groups)
            is_alike = is_alike and [int(stride) for stride in own.strides] == strides
        else:
            results, width = ir.known_shape(base.conv.args[1])[:2]
            is_alike = set(strides) == {1} and width * int(attrs.groups) == results
            is_alike = is_alike and results * width <= _MAX_ONES
        return base.find_place(term) if is_alike else None

    def _emit_weights(self, base: _Term, term: _Term, place: Sequence[int]) -> Any:
        """Emit the weights of a term as part of those of a convolution."""
        kernel = base.conv.args[1]
        results, width, *sizes = ir.known_shape(kernel)
        if term.conv is not None:
            weights = self.visit_expr(term.conv.args[1])
        else:
            ones = np.zeros((results, width, *(1 for _ in sizes)), ir.dtype_of(kernel))
            ones[range(results), np.arange(results) % width] = 1
            weights = relax.const(ones)
            if term.scale is not None:
                scale = self.reshape(self.visit_expr(term.scale), [results, 1, *(1 for _ in sizes)])
                weights = self.emit(relax.op.multiply(weights, scale))
        after = [
            size - begin - length
            for size, begin, length in zip(sizes, place, term.sizes, strict=True)
        ]
        widths = [0, 0, 0, 0, *(width for pair in zip(place, after, strict=True) for width in pair)]
        return self.emit(relax.op.nn.pad(weights, widths)) if any(widths) else weights

    def _add(self, left: Any, right: Any) -> Any:
        return self.emit(relax.op.add(left, right))
