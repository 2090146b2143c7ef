"""Rewrites convolutions in the imported layout: merges added ones, and reorders weights for GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.tir_kernels.blocked import Window
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes, same_sizes, sizes_of
from tvmflow.graph.norms import has_value_for_each_channel
from tvmflow.graph.rewriter import MainRewriter

_ADD: Final = "relax.add"
_MULTIPLY: Final = "relax.multiply"

# Convolutions of the same data whose results are added, as in RepVGG and MobileOne before reparametrization
# (Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", CVPR 2021).

_CONVERSIONS: Final = ir.operators("astype dequantize")
# Operators that norm folding and the importer insert between converted weights and a convolution.
_MOVES: Final = ir.operators("multiply permute_dims reshape expand_dims")
# The maximum number of elements of an identity kernel, a diagonal of ones, which adds the data themselves.
_MAX_ONES: Final = 1 << 22


class _Term(NamedTuple):
    """A term of a sum that reads some pixels of data around each pixel of the result.

    Attributes:
        conv: The convolution that computes it; None for data that are scaled or added directly.
        scale: The factor of each channel, or None.
        data: The tensor that it reads.
        begins: The first pixel along each axis, relative to the pixel of the result.
        sizes: The pixels along each axis.
        gaps: The distance between these pixels; 1 if there is one pixel.
    """

    conv: Any
    scale: Any
    data: Any
    begins: Sequence[int]
    sizes: Sequence[int]
    gaps: Sequence[int]

    def find_offsets(self, other: _Term) -> list[int] | None:
        """Return the offset of another term's kernel in this one along each axis; None if it does not fit.

        A kernel fits if it reads the same data, and only pixels that this one reads.
        """
        if not self.data.same_as(other.data):
            return None
        offsets = []
        own, others = ((t.begins, t.sizes, t.gaps) for t in (self, other))
        for begin, size, gap, first, length, step in zip(*own, *others, strict=True):
            offset, rest = divmod(first - begin, gap)
            has_other_gaps = length > 1 and step != gap
            if rest or offset < 0 or offset + length > size or has_other_gaps:
                return None
            offsets.append(offset)
        return offsets


class ConvolutionMerger(TargetRewriter):
    """Replaces sums of convolutions of the same data by one convolution.

    A term may also be scaled data, or the data themselves. The merged kernel has the size of the largest one, so it
    takes no longer than that convolution.
    """

    OPERATORS = (_ADD,)

    def _replace(self, call: Any) -> Any:
        """Return a sum with as few convolutions as possible; None if unchanged, or part of a larger sum."""
        readers = self.flow.list_readers(call)
        is_added = len(readers) == 1 and self.flow.is_read_by(call, _ADD)
        if is_added and same_sizes(known_sizes(readers[0]), known_sizes(call)):
            return None
        leaves = dict(enumerate(self._list_leaves(call)))
        terms = {n: term for n, leaf in leaves.items() if (term := self._analyze(leaf, call))}
        bases = [n for n, term in terms.items() if term.conv is not None]
        merged = []
        for n in sorted(bases, key=lambda n: -math.prod(terms[n].sizes)):
            if (base := terms.get(n)) is None:
                continue
            # where the weights of other terms begin within those of the base
            found = {m: self._offsets(base, term) for m, term in terms.items() if m != n}
            parts = {m: offsets for m, offsets in found.items() if offsets is not None}
            if not parts:
                continue
            weights = [self._emit_weights(base, terms[m], offsets) for m, offsets in parts.items()]
            kernel = self._sum([self.visit_expr(base.conv.args[1]), *weights])
            operands = [self.visit_expr(base.data), kernel]
            merged.append(self.emit(relax.Call(base.conv.op, operands, base.conv.attrs)))
            for m in (n, *parts):
                del terms[m], leaves[m]
        if not merged:
            return None
        weights = [leaf for leaf in leaves.values() if self.flow.is_weight(leaf)]
        others = [leaf for leaf in leaves.values() if not self.flow.is_weight(leaf)]
        # weights are added first, so that their sum is computed when the library is built
        shifts = [self._sum(map(self.visit_expr, weights))] if weights else []
        return self._sum([*merged, *shifts, *map(self.visit_expr, others)])

    def _sum(self, values: Iterable[Any]) -> Any:
        return functools.reduce(lambda left, right: self.emit(relax.op.add(left, right)), values)

    def _list_leaves(self, total: Any) -> list[Any]:
        """Return the terms of a sum in order; nested sums that nothing else reads are flattened."""
        leaves, operands = [], list(reversed(total.args))
        while operands:
            operand = operands.pop()
            value = self.flow.find_call_used_once(operand, _ADD)
            if value is None:
                leaves.append(operand)
            else:
                operands += reversed(value.args)
        return leaves

    def _analyze(self, leaf: Any, total: Any) -> _Term | None:
        """Return the description of a term; None for terms that cannot be merged."""
        shape = sizes_of(leaf)
        if shape is None or len(shape) < 3 or not same_sizes(shape, known_sizes(total)):
            return None
        if not ir.is_float32(leaf) or self.flow.is_weight(leaf):
            return None
        value: Any = self.flow.value_if_used_once(leaf)
        if ir.operator_name(value) in ir.CONVOLUTIONS:
            return self._analyze_convolution(value)
        data, scale = leaf, None
        if ir.as_call(value, _MULTIPLY) is not None:
            for factor, other in (value.args, reversed(value.args)):
                if self.flow.is_weight(factor) and has_value_for_each_channel(factor, shape):
                    data, scale = other, factor
        data, ones = self.flow.resolve(data), [1] * (len(shape) - 2)
        return _Term(None, scale, data, begins=[0] * len(ones), sizes=ones, gaps=ones)

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
        window, sizes = Window.of(conv), ir.known_shape(conv.args[1])[2:]
        pairs = zip(window.dilation, sizes, strict=True)
        gaps = [gap if size > 1 else 1 for gap, size in pairs]
        begins = [-width for width in window.padding[: len(sizes)]]
        data = self.flow.resolve(conv.args[0])
        return _Term(conv=conv, scale=None, data=data, begins=begins, sizes=sizes, gaps=gaps)

    def _is_quantized(self, weights: Any) -> bool:
        """Return whether the library stores these weights as int8; merged weights would be float32."""
        value: Any = self.flow.values.get(weights)
        name = ir.operator_name(value)
        return name in _CONVERSIONS or (name in _MOVES and any(map(self._is_quantized, value.args)))

    def _offsets(self, base: _Term, term: _Term) -> list[int] | None:
        """Return where the weights of a term begin within those of a convolution; None if they do not fit."""
        groups, strides = int(base.conv.attrs.groups), Window.of(base.conv).strides
        if term.conv is not None:
            own = int(term.conv.attrs.groups), Window.of(term.conv).strides
            is_alike = own == (groups, strides)
        else:
            results, width = ir.known_shape(base.conv.args[1])[:2]
            is_alike = {*strides} == {1} and width * groups == results
            is_alike = is_alike and results * width <= _MAX_ONES
        return base.find_offsets(term) if is_alike else None

    def _emit_weights(self, base: _Term, term: _Term, start: Sequence[int]) -> Any:
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
        widths = [0] * 4
        for size, begin, length in zip(sizes, start, term.sizes, strict=True):
            widths += [begin, size - begin - length]
        return self.emit(relax.op.nn.pad(weights, widths)) if any(widths) else weights


# ---------------------------------------------------------------- weights for GPUs
# A GPU computes a convolution as an implicit GEMM over kernel positions and channels (`schedules/gpu/products.py`). If
# the channels of a position are contiguous, threads compute the address of a pixel once for many channels, and load
# weights as vectors.

# The depth of a tile, which fewer channels do not fill.
_MIN_CHANNELS: Final = 16
# The attributes that do not name the layout of weights.
_KEPT: Final = "strides padding dilation groups data_layout out_layout out_dtype".split()


class ChannelsLastWeightMover(MainRewriter):
    """Moves the input channels of convolutions' weights, if they are many, behind the kernel axes."""

    OPERATORS = tuple(ir.CONVOLUTIONS)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        rank = ir.CONVOLUTIONS[ir.operator_name(call)]
        attrs, layout = call.attrs, str(call.attrs.kernel_layout)
        shape = ir.shape_of(call.args[1])
        if (
            not layout.startswith("OI")
            or len(layout) != rank + 2
            or shape is None
            or shape[1] < _MIN_CHANNELS
            or math.prod(shape[2:]) == 1
            or not self.flow.is_weight(call.args[1])
        ):
            return None
        data, weights = rewritten.args
        axes = [0, *range(2, rank + 2), 1]
        moved = self.emit(relax.op.permute_dims(weights, axes))
        kept = {name: getattr(attrs, name) for name in _KEPT}
        kernel_layout = "".join(layout[axis] for axis in axes)
        convolve = getattr(relax.op.nn, f"conv{rank}d")
        return convolve(data, moved, kernel_layout=kernel_layout, **kept)
