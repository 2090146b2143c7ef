"""Dynamic shapes in a model's IR: the dimensions of `main`, and sizes that are expressions of them.

A dimension is a variable of the same name in the shapes of the inputs. An attribute of `main` holds the dimensions, so
that all passes know their ranges.

Each kernel has its own variables. `with_tuning_sizes` gives it an attribute with tuning sizes for them. Schedule rules use
these for estimates; the generated code is correct for all sizes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmflow.core.dimensions import (
    choose_tuning_size,
    evaluate,
    fold,
    is_prime,
    list_tuning_sizes,
)
from tvmflow.core.types import Dimension, Size

DIMENSIONS: Final = "tvmflow.dimensions"
"""The attribute of `main`: name of a dimension -> minimum, maximum, multiple, and the tuning sizes."""

DYNAMIC_SHAPES: Final = "tvmflow.open_sizes"
"""The attribute of a kernel with dynamic shapes: variable in its shapes -> tuning size."""

TUNED_SIZES: Final = "tvmflow.tuned_sizes"
"""A second attribute: variable -> the sizes at which schedules are measured, then one size at which
only their results are compared."""

MULTIPLES: Final = "tvmflow.multiples"
"""The attribute of a kernel: variable in its shapes -> a known divisor above 1."""

IrSize = Any
"""An int, or a TIR expression of the dimensions."""

_OPERATORS: Final[Mapping[type, str]] = {
    tirx.Add: "({} + {})",
    tirx.Sub: "({} - {})",
    tirx.Mul: "({} * {})",
    tirx.FloorDiv: "({} // {})",
    tirx.FloorMod: "({} % {})",
    tirx.Min: "min({}, {})",
    tirx.Max: "max({}, {})",
}

_COMPUTED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": tirx.floordiv,
    "%": tirx.floormod,
    "min": tirx.min,
    "max": tirx.max,
}


class NoSize(ValueError):
    """A TIR expression is not a size: it depends on more than dimensions."""


def with_dimensions(function: relax.Function, dimensions: Iterable[Dimension]) -> relax.Function:
    """Return `main` with an attribute for its dimensions; unchanged if there are none."""
    entries = {entry.name: [*entry[1:4], *entry.tune_at] for entry in dimensions}
    return function.with_attr(DIMENSIONS, entries) if entries else function


def read_dimensions(function: relax.Function) -> tuple[Dimension, ...]:
    """Return the dimensions of `main`, sorted by name; empty for a model of fixed sizes."""
    entries = (function.attrs or {}).get(DIMENSIONS, {})
    values = {str(name): tuple(map(int, sizes)) for name, sizes in entries.items()}
    return tuple(
        Dimension(
            name=name,
            min=values[name][0],
            max=values[name][1],
            multiple_of=values[name][2],
            tune_at=values[name][3:],
        )
        for name in sorted(values)
    )


def at_sizes(mod: tvm.IRModule, sizes: Mapping[str, int]) -> tvm.IRModule:
    """Return an imported model with constants in place of all its dimensions."""
    main = mod["main"].bind_symbolic_vars(dict(sizes)).without_attr(DIMENSIONS)
    return tvm.IRModule({**dict(mod.functions_items()), mod.get_global_var("main"): main})


def sizes_of(expr: Any) -> tuple[IrSize, ...] | None:
    """Return the sizes of a tensor, ints where they are fixed; None if its rank is unknown."""
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    return tuple(map(plain, shape.values)) if isinstance(shape, relax.ShapeExpr) else None


def known_sizes(expr: Any) -> tuple[IrSize, ...]:
    """Return the sizes of a tensor, whose rank must be known."""
    sizes = sizes_of(expr)
    assert sizes is not None, f"{expr} has no known rank"
    return sizes


def plain(size: Any) -> IrSize:
    """Return a fixed size as an int; a dynamic size unchanged."""
    return int(size) if isinstance(size, int | tirx.IntImm) else size


def is_dynamic(size: IrSize) -> bool:
    """Return whether a size depends on a dimension."""
    return not isinstance(plain(size), int)


def size_text(size: IrSize) -> Size:
    """Return a size as text for `core.dimensions`; an int if it is fixed.

    Raises:
        NoSize: It has terms besides names, integers, + - * // % min max.
    """
    size = plain(size)
    if isinstance(size, int | tvm.ir.Var):
        return size if isinstance(size, int) else _text(size)
    # removes redundant parentheses
    return ast.unparse(ast.parse(_text(size), mode="eval"))


def read_size(size: Size, symbols: Mapping[str, Any]) -> IrSize:
    """Parse a size that `size_text` wrote; `symbols` maps names of dimensions to variables."""
    if isinstance(size, int):
        return size
    number = functools.partial(tirx.IntImm, "int64")
    return fold(size, symbols.__getitem__, number, lambda word, *pair: _COMPUTED[word](*pair))


def _text(size: Any) -> str:
    if isinstance(size, tirx.IntImm):
        return str(int(size)) if int(size) >= 0 else f"(0 - {-int(size)})"
    if isinstance(size, tvm.ir.Var):
        return str(size.name)
    if isinstance(size, tirx.Cast):
        return _text(size.value)
    divisor = size.b if isinstance(size, tirx.FloorDiv | tirx.FloorMod) else None
    if isinstance(divisor, tirx.IntImm) and int(divisor) < 0:
        # TVM expresses sizes that are rounded up by the quotient or remainder of a negative divisor
        negated = f"((0 - {_text(size.a)}) {{}} {-int(divisor)})"
        is_quotient = isinstance(size, tirx.FloorDiv)
        return negated.format("//") if is_quotient else f"(0 - {negated.format('%')})"
    form = _OPERATORS.get(type(size))
    if form is None:
        names = ", ".join(sorted({str(var.name) for var in list_symbols(size)}))
        is_conditional = isinstance(size, tvm.ir.Call | tirx.Select)
        how = "by a condition, as a window that may begin in the padding (`ceil_mode`)"
        raise NoSize(
            f"it depends on {names} {how if is_conditional else 'in no form that is known'}"
        )
    return form.format(_text(size.a), _text(size.b))


class TuningSizes:
    """Tuning sizes in place of dynamic sizes, for estimates; `sizes` replaces the default tuning sizes."""

    def __init__(self, function: relax.Function, sizes: Mapping[str, int] | None = None) -> None:
        self._values = sizes or {
            dimension.name: choose_tuning_size(dimension) for dimension in read_dimensions(function)
        }

    def size(self, size: IrSize) -> int:
        """Return a size as an int, with tuning sizes in place of the dimensions.

        Raises:
            NoSize: It depends on more than the dimensions.
        """
        size = plain(size)
        return size if isinstance(size, int) else evaluate(_text(size), self._values)

    def shape(self, expr: Any) -> tuple[int, ...] | None:
        """Return the shape of a tensor with tuning sizes in place of dynamic sizes.

        None if the rank is unknown or a size depends on data.
        """
        sizes = sizes_of(expr)
        try:
            return None if sizes is None else tuple(map(self.size, sizes))
        except ValueError:
            return None


def same_size(size: IrSize, other: IrSize) -> bool:
    """Return whether two sizes are equal for all values of the dimensions."""
    if not is_dynamic(size) and not is_dynamic(other):
        return int(size) == int(other)
    return bool(tvm.sym.Analyzer().can_prove_equal(size, other))


def same_sizes(sizes: Sequence[IrSize], others: Sequence[IrSize]) -> bool:
    """Return whether two shapes are equal for all values of the dimensions."""
    return len(sizes) == len(others) and all(map(same_size, sizes, others))


def same_in_ranges(
    sizes: Sequence[IrSize], others: Sequence[IrSize], dimensions: Iterable[Dimension]
) -> bool:
    """Return whether two shapes are equal for all values in the ranges of the dimensions."""
    analyzer, _ = make_analyzer((*sizes, *others), dimensions)
    pairs = zip(sizes, others, strict=False)
    return len(sizes) == len(others) and all(
        analyzer.can_prove_equal(one, other) for one, other in pairs
    )


def make_analyzer(sizes: Iterable[IrSize], dimensions: Iterable[Dimension]) -> tuple[Any, bool]:
    """Return an analyzer with the ranges of dimensions, and whether `sizes` have no other variables."""
    analyzer, named = tvm.sym.Analyzer(), {entry.name: entry for entry in dimensions}
    symbols = dict.fromkeys(var for size in sizes for var in list_symbols(size))
    for var in symbols:
        if (entry := named.get(str(var.name))) is not None:
            limit_to_dimension(analyzer, var, entry)
    return analyzer, all(str(var.name) in named for var in symbols)


def limit_to_dimension(analyzer: Any, var: Any, dimension: Dimension) -> None:
    """Tell an analyzer that a variable has the range of a dimension, and is a multiple of its step."""
    step, dtype = dimension.multiple_of, str(var.ty)
    count = tirx.Var(f"{var.name}_count", dtype)
    analyzer.bind(count, range_of(dimension.min // step, dimension.max // step, dtype))
    analyzer.bind(var, count * step)


def range_of(least: int, largest: int, dtype: str) -> Any:
    """Return the range of a variable from its smallest to its largest value."""
    extent = tirx.IntImm(dtype, largest - least + 1)
    return tvm.ir.Range.from_min_extent(tirx.IntImm(dtype, least), extent)


def simplify(size: IrSize) -> IrSize:
    """Return a size in TVM's simplest form, as an int where it is fixed."""
    return plain(tvm.sym.Analyzer().simplify(size)) if is_dynamic(size) else plain(size)


def max_size(size: IrSize, other: IrSize) -> IrSize:
    """Return the maximum of two sizes: one of them if it is provably larger, else an expression."""
    gap = simplify(size - other)
    if is_dynamic(gap):
        return tirx.max(size, other)
    return size if gap >= 0 else other


def divide_up(size: IrSize, divisor: int) -> IrSize:
    """Return a size divided by an integer, rounded up."""
    return (size + (divisor - 1)) // divisor


def count_elements(sizes: Iterable[IrSize]) -> IrSize:
    """Return the product of sizes."""
    return plain(math.prod(sizes))


def list_symbols(size: IrSize) -> list[Any]:
    """Return the variables in a size, each once."""
    found: list[Any] = []
    if isinstance(size, tvm.ir.Var):
        return [size]
    if is_dynamic(size):
        tvm_ffi.structural_walk(size, ((tvm.ir.Var, found.append),))
    return list(dict.fromkeys(found))


def list_size_variables(kernel: tirx.PrimFunc) -> list[Any]:
    """Return the variables in the shapes of a kernel's parameters, in their order."""
    variables: list[Any] = []
    for param in kernel.params:
        shape = getattr(param.ty, "shape", None)
        sizes = [param] if shape is None else list(shape)
        variables += [var for size in sizes for var in list_symbols(size)]
    return list(dict.fromkeys(variables))


def with_kernel_symbols(
    function: tirx.PrimFunc, used: Sequence[Any] = (), results: int = 1
) -> tuple[tirx.PrimFunc, list[Any]]:
    """Return a kernel with its own symbols in place of a model's dimensions, and its size arguments.

    Size arguments are the symbols of the kernel's shapes and of `used` that are not the size of any axis.
    Their parameters follow the inputs and precede the results, which are the last `results` parameters.
    """
    sizes = [plain(size) for param in function.params for size in param.ty.shape]
    symbols = [symbol for size in sizes for symbol in list_symbols(size)]
    symbols = list(dict.fromkeys([*symbols, *used]))
    if not symbols:
        return function, []
    own = {symbol: tirx.Var(symbol.name, symbol.ty.dtype) for symbol in symbols}
    bound = {size for size in sizes if isinstance(size, tvm.ir.Var)}
    taken = [symbol for symbol in symbols if symbol not in bound]
    renamed = tvm_ffi.structural_map(function, (tvm.ir.Var, lambda var: own.get(var, var)))
    inputs, written = renamed.params[:-results], renamed.params[-results:]
    params = [*inputs, *(own[symbol] for symbol in taken), *written]
    return tirx.PrimFunc(params, renamed.body, renamed.ret_type, renamed.attrs), taken


def with_tuning_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a lowered module whose kernels with dynamic shapes have their tuning sizes in attributes."""
    main = mod["main"]
    dimensions = read_dimensions(main)
    if not dimensions:
        return mod
    compared = {dimension.name: _choose_indivisible(dimension) for dimension in dimensions}
    points = [
        TuningSizes(main),
        *(TuningSizes(main, sizes) for sizes in list_tuning_sizes(dimensions)),
        TuningSizes(main, compared),
    ]
    sizes_of_calls: dict[Any, list[dict[str, list[int]]]] = {}
    multiples: dict[Any, dict[str, int]] = {}
    find_multiple = _make_multiple_finder(dimensions)

    def visit(call: Any) -> None:
        if str(getattr(getattr(call, "op", None), "name", "")) != "relax.call_tir":
            return
        kernel, arguments, *sizes = call.args
        common = multiples.setdefault(kernel, {})
        params = list(mod[kernel].params)
        tensors: list[Any] = []
        for result in call.ty_args:
            tensors += getattr(result, "fields", [result])
        pairs: list[tuple[Any, Any]] = []
        for param, value in zip(params, [*arguments, *tensors], strict=False):
            kind = getattr(value, "ty", value)
            if isinstance(kind, relax.TensorType):
                values = getattr(kind.shape, "values", ())
                pairs += zip(param.ty.shape, values, strict=False)
            else:
                pairs.append((param, value))
        rest = params[len(arguments) + len(tensors) :]
        pairs += zip(rest, sizes[0].values if sizes else (), strict=False)
        found: dict[str, list[int]] = {}
        for variable, size in pairs:
            # data-dependent sizes have no tuning size
            with contextlib.suppress(ValueError):
                if isinstance(variable, tvm.ir.Var):
                    name = str(variable.name)
                    common[name] = math.gcd(common.get(name, 0), find_multiple(size))
                    found[name] = [point.size(size) for point in points]
        sizes_of_calls.setdefault(kernel, []).append(found)

    # includes the functions of branches, whose variables are named like the dimensions
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    made = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for kernel, calls in sizes_of_calls.items():
        decided: dict[str, int] = {}
        for name, values in (item for call in calls for item in call.items()):
            decided[name] = max(decided.get(name, 1), values[0])
        # the sizes of a single call, so that they are consistent
        largest = max(calls, key=lambda call: math.prod(values[0] for values in call.values()))
        if decided:
            tuned = {name: values[1:] for name, values in largest.items()}
            made[kernel] = with_tuned_sizes(mod[kernel], decided, tuned)
            if common := {name: n for name, n in multiples[kernel].items() if n > 1}:
                made[kernel] = made[kernel].with_attr(MULTIPLES, common)
    return made


def with_tuned_sizes(
    kernel: tirx.PrimFunc, decided: Mapping[str, int], tuned: Mapping[str, Sequence[int]]
) -> tirx.PrimFunc:
    """Return a kernel with the attributes `DYNAMIC_SHAPES` and `TUNED_SIZES`."""
    kernel = kernel.with_attr(DYNAMIC_SHAPES, dict(decided))
    return kernel.with_attr(TUNED_SIZES, {name: list(sizes) for name, sizes in tuned.items()})


def _choose_indivisible(dimension: Dimension) -> int:
    """Return a prime times `multiple_of` below the tuning size, so that no tile divides it."""
    step = dimension.multiple_of
    for factor in range(choose_tuning_size(dimension) // step - 1, dimension.min // step, -1):
        if is_prime(factor):
            return factor * step
    return dimension.min


def _make_multiple_finder(dimensions: Iterable[Dimension]) -> Callable[[IrSize], int]:
    """Return a function from a size to its largest known constant divisor."""
    analyzer = tvm.sym.Analyzer()
    steps = {entry.name: entry.multiple_of for entry in dimensions}
    seen = set[Any]()

    def find_multiple(size: IrSize) -> int:
        if not is_dynamic(size):
            return int(size)
        for var in set(list_symbols(size)) - seen:
            seen.add(var)
            if (step := steps.get(str(var.name), 1)) > 1:
                analyzer.bind(var, tirx.Var("count", str(var.ty)) * step)
        known = analyzer.modular_set(analyzer.simplify(size))
        return math.gcd(int(known.coeff), int(known.base))

    return find_multiple
