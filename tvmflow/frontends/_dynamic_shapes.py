"""Symbolic sizes for frontends: simplification, comparison, and slices of dynamic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import tvm
from tvm import tirx

from tvmflow.core.dimensions import WrongSize, evaluate_shape, sizes_text
from tvmflow.core.formatting import names_text
from tvmflow.core.types import Dimension
from tvmflow.frontends.base import MAX_ELEMENTS
from tvmflow.graph.dynamic_shapes import (
    NoSize,
    divide_up,
    limit_to_dimension,
    list_symbols,
    plain,
    range_of,
    size_text,
)

NO_END: Final = 1 << 31
"""The bound of a slice that means the end of an axis; negated, the beginning."""


class DynamicShapeProblem(ValueError):
    """An operator does not support dynamic dimensions; the message is a predicate."""


class SizeRanges:
    """Simplification and comparison of symbolic sizes by the ranges of dimensions, the `symbols`."""

    def __init__(
        self, dimensions: Sequence[Dimension], symbols: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._dimensions = {entry.name: entry for entry in dimensions}
        self.symbols = symbols or {name: tirx.Var(name, "int64") for name in self._dimensions}
        self._analyzer = tvm.sym.Analyzer()
        # This analyzer represents each dimension as a multiple of its `multiple_of`.
        self._by_multiples = tvm.sym.Analyzer()
        for name, entry in self._dimensions.items():
            var = self.symbols[name]
            self._analyzer.bind(var, range_of(entry.min, entry.max, "int64"))
            limit_to_dimension(self._by_multiples, var, entry)
        self._seen: list[Any] = []

    def simplify(self, size: Any) -> Any:
        """Simplify a size; return an int if it is constant."""
        if isinstance(size, int | np.integer):
            return int(size)
        simple = self._analyzer.simplify(size)
        return int(simple) if isinstance(simple, tirx.IntImm) else simple

    def simplify_multiple(self, size: Any) -> Any:
        """Simplify a size, using that dimensions are multiples of `multiple_of`."""
        size = self.simplify(size)
        return size if isinstance(size, int) else plain(self._by_multiples.simplify(size))

    def is_certain(self, condition: Any) -> bool:
        """Return whether a condition provably holds for all sizes."""
        if isinstance(condition, bool | np.bool_):
            return bool(condition)
        return bool(self._analyzer.can_prove(condition))

    def is_equal(self, one: Any, other: Any) -> bool:
        difference = self.simplify_multiple(one - other)
        return isinstance(difference, int) and difference == 0

    def are_equal(self, sizes: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(sizes) == len(others) and all(map(self.is_equal, sizes, others))

    def check_equal(self, one: Any, other: Any, what: str) -> None:
        """Raise DynamicShapeProblem about `what` if two sizes differ at samples of the ranges."""
        if self.is_equal(one, other):
            return
        used = {str(var.name) for size in (one, other) for var in list_symbols(size)}
        for sizes in self._list_samples():
            try:
                texts = [size_text(one), size_text(other)]
                first, second = evaluate_shape(texts, sizes)
            except (NoSize, WrongSize):
                continue
            if first != second:
                where = sizes_text({name: n for name, n in sizes.items() if name in used})
                text = f"{what} differ: {texts[0]} and {texts[1]} ({first} and {second} at {where})"
                raise DynamicShapeProblem(text)

    def _list_samples(self) -> Iterator[dict[str, int]]:
        """Yield the three smallest and largest sizes of all dimensions."""
        entries = self._dimensions.values()
        for steps in range(3):
            yield {e.name: min(e.min + steps * e.multiple_of, e.max) for e in entries}
            yield {e.name: max(e.max - steps * e.multiple_of, e.min) for e in entries}

    def as_seen(self, size: Any) -> Any:
        """Return an equal size of an earlier tensor, so that TVM sees them as equal, or the size itself."""
        size = self.simplify(size)
        if isinstance(size, int):
            return size
        return next((seen for seen in self._seen if self.is_equal(seen, size)), size)

    def see(self, sizes: Sequence[Any]) -> list[Any]:
        """Simplify the sizes of a tensor, and remember them for `as_seen`."""
        simple = [self.simplify(size) for size in sizes]
        for size in simple:
            if not isinstance(size, int) and not any(map(size.same_as, self._seen)):
                self._seen.append(size)
        return simple

    def clamp(self, position: Any, extent: Any) -> Any:
        """Clamp a position to an axis of size `extent`; a negative position counts from the end."""
        if isinstance(position, int) and abs(position) >= NO_END:
            return extent if position > 0 else 0
        if self.is_certain(position < 0):
            return self.at_least(self.simplify(extent + position), 0)
        if not self.is_certain(position >= 0):
            raise DynamicShapeProblem(
                f"the position {position} is on neither side of 0 for all sizes"
            )
        if self.is_certain(position <= extent):
            return position
        if self.is_certain(position >= extent):
            return extent
        return self.simplify(tirx.min(tirx.convert(position), tirx.convert(extent)))

    def at_least(self, position: Any, least: Any) -> Any:
        if self.is_certain(position >= least):
            return position
        return self.simplify(tirx.max(tirx.convert(position), tirx.convert(least)))

    def divide_up(self, size: Any, divisor: int) -> Any:
        return self.simplify(divide_up(size, divisor))

    def same_padding(
        self,
        sizes: Sequence[Any],
        kernel: Sequence[int],
        strides: Sequence[int],
        dilations: Sequence[int],
        *,
        is_lower: bool = False,
    ) -> list[int]:
        """Return `SAME` padding for ⌈size / stride⌉ windows: for each axis before the data, then after.

        Odd padding is larger after the data, or before the data if `is_lower`.
        """
        totals = []
        for size, extent, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            windows = self.divide_up(size, stride)
            total = self.simplify_multiple(
                (windows - 1) * stride + (extent - 1) * dilation + 1 - size
            )
            if not isinstance(total, int):
                raise DynamicShapeProblem(
                    f"its padding (SAME) differs between sizes; let them be multiples of {stride} (`multiple_of`)"
                )
            totals.append(max(total, 0))
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return [*large, *small] if is_lower else [*small, *large]

    def check_result(self, sizes: Sequence[Any]) -> bool:
        """Return whether the sizes of a tensor depend only on dimensions.

        Raises:
            DynamicShapeProblem: if the tensor is too large at the maximum of the dimensions.
        """
        if not all(var.name in self._dimensions for size in sizes for var in list_symbols(size)):
            return False
        largest = {name: entry.max for name, entry in self._dimensions.items()}
        try:
            elements = math.prod(evaluate_shape(list(map(size_text, sizes)), largest))
        except (NoSize, WrongSize) as error:
            raise DynamicShapeProblem(
                f"one of its sizes is not an expression of dimensions: {error}"
            ) from error
        if elements > MAX_ELEMENTS:
            names = ", ".join(f"{name} = {size}" for name, size in largest.items())
            text = f"its result has {elements:,} elements at {names}, and the limit is {MAX_ELEMENTS:,}"
            raise DynamicShapeProblem(f"{text}; lower `max` under `dimensions`")
        return True


def shape_text(sizes: Sequence[Any]) -> str:
    """Return the sizes of a tensor for messages; NoSize if one does not follow from dimensions."""
    return f"[{', '.join(str(size_text(size)) for size in sizes)}]"


def unfixed_text(sizes: Sequence[Any]) -> str:
    """Return the message about dynamic sizes that an operator needs as constants."""
    names = {str(var.name) for size in sizes for var in list_symbols(size)}
    have = "has" if len(names) == 1 else "have"
    return f"{names_text(sorted(names))} {have} no fixed size, and it needs one"
