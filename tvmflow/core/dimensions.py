"""Dynamic dimensions of a library, and tensor sizes as expressions of them.

>>> sizes = derive_sizes(
...     (Dimension("batch", 1, 8), Dimension("seq", 1, 512)),
...     {"x": ("batch", "seq", 384)},
...     {"x": (2, 100, 384)},
... )
>>> sizes, evaluate("2 * seq + 1", sizes)
({'batch': 2, 'seq': 100}, 201)
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.types import Dimension, Size, TensorSpec

T = TypeVar("T")

# Expressions of models have tens of characters; those of foreign bundles could be huge.
_MAX_TEXT: Final = 2_000
_MAX_VALUE: Final = 2**62

_OPERATORS: Final[Mapping[type, str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_FUNCTIONS: Final = ("min", "max")
_COMPUTED: Final[Mapping[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}


class WrongSize(ValueError):
    """A size outside a dimension's range, or an invalid expression."""


class Language(NamedTuple):
    """The syntax of a programming language for expressions of sizes.

    `name` returns the code for the size of a dimension. The other fields are templates with operands `{a}` and `{b}`.
    """

    name: Callable[[str], str]
    divide: str
    remainder: str
    least: str
    largest: str


def evaluate(size: Size, sizes: Mapping[str, int]) -> int:
    """Evaluate a size: an integer, or an expression of dimension names, integers, + - * // % min max.

    Raises WrongSize for an invalid expression, a division by 0, or a value beyond 2^62.
    """
    if isinstance(size, int):
        return size

    def join(word: str, left: int, right: int) -> int:
        try:
            value = _COMPUTED[word](left, right)
        except ZeroDivisionError as error:
            raise WrongSize(f"{excerpt(size)} divides by 0") from error
        if abs(value) > _MAX_VALUE:
            raise WrongSize(f"{excerpt(size)} is beyond 2^62")
        return value

    return fold(size, lambda name: _look_up(name, sizes, size), int, join)


def evaluate_shape(shape: Sequence[Size], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluate each size of a shape (see `evaluate`)."""
    return tuple(evaluate(size, sizes) for size in shape)


def largest_shape(shape: Sequence[Size], dimensions: Iterable[Dimension]) -> tuple[int, ...]:
    """Return an upper bound of a shape.

    >>> largest_shape((2, "seq + past"), [Dimension("seq", 1, 64), Dimension("past", 0, 512)])
    (2, 576)
    """
    bounds = {dimension.name: (dimension.min, dimension.max) for dimension in dimensions}
    return tuple(find_bounds(size, bounds)[1] for size in shape)


def list_names(size: Size) -> list[str]:
    """Return the names of the dimensions in a size, in order of first occurrence.

    >>> list_names("seq + past - 1"), list_names(7)
    (['seq', 'past'], [])
    """
    if isinstance(size, int):
        return []
    nodes = ast.walk(_parse(size))
    names = (n.id for n in nodes if isinstance(n, ast.Name) and n.id not in _FUNCTIONS)
    return list(dict.fromkeys(names))


def is_name(size: Size) -> TypeGuard[str]:
    """Return whether a size is the name of a dimension, and not an expression.

    >>> is_name("seq"), is_name("past + seq"), is_name(7)
    (True, False, False)
    """
    return isinstance(size, str) and isinstance(_parse(size), ast.Name)


def find_axes(sizes: Sequence[Size], names: Sequence[str]) -> list[int]:
    """Return the index in `names` of each axis: -1 for fixed sizes, -2 for expressions.

    >>> find_axes(["batch", 3, "past + seq"], ["batch", "past", "seq"])
    [0, -1, -2]
    """
    indices = {name: index for index, name in enumerate(names)}
    return [-1 if isinstance(size, int) else indices.get(size, -2) for size in sizes]


def fold(
    size: str, name: Callable[[str], T], number: Callable[[int], T], join: Callable[[str, T, T], T]
) -> T:
    """Fold an expression bottom-up.

    `name` converts dimensions, `number` integers, and `join` an operator (+ - * // % min max) with its two operands.
    """

    def convert(node: Any) -> T:
        if isinstance(node, ast.Constant):
            return number(_number(node))
        if isinstance(node, ast.Name):
            return name(node.id)
        word, left, right = _parts(node)
        return join(word, convert(left), convert(right))

    return convert(_parse(size))


def write_code(size: Size, language: Language) -> str:
    """Return a size as an expression of another language; operations are in parentheses."""
    if isinstance(size, int):
        return str(size)
    codes = {
        "//": language.divide,
        "%": language.remainder,
        "min": language.least,
        "max": language.largest,
    }

    def join(word: str, left: str, right: str) -> str:
        return codes.get(word, f"({{a}} {word} {{b}})").format(a=left, b=right)

    return fold(size, language.name, str, join)


def find_bounds(size: Size, bounds: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return a lower and an upper bound of a size, from the smallest and largest size of each dimension.

    >>> find_bounds("2 * seq - 1", {"seq": (1, 512)})
    (1, 1023)
    """
    if isinstance(size, int):
        return size, size

    def join(word: str, first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
        if word in ("//", "%") and second[0] <= 0:
            raise WrongSize(f"{excerpt(size)} may divide by 0")
        if word == "%":
            return (0, second[1] - 1) if first[0] < 0 else (0, min(first[1], second[1] - 1))
        # The operators are monotonic in each operand, so extremes are at corners of the ranges.
        corners = [_COMPUTED[word](a, b) for a in first for b in second]
        if max(map(abs, corners)) > _MAX_VALUE:
            raise WrongSize(f"{excerpt(size)} may be beyond 2^62")
        return min(corners), max(corners)

    return fold(
        size, lambda name: _look_up(name, bounds, size), lambda number: (number, number), join
    )


def substitute(size: Size, sizes: Mapping[str, Size]) -> Size:
    """Return a size with dimension names replaced by other sizes.

    >>> substitute("rows * 4 + 2", {"rows": "2 * seq"}), substitute("rows * 4 + 2", {"rows": 3})
    ('2 * seq * 4 + 2', 14)
    """
    if isinstance(size, int):
        return size
    tree = _replace(_parse(size), sizes, size)
    return _number(tree) if isinstance(tree, ast.Constant) else ast.unparse(tree)


def derive_sizes(
    dimensions: Iterable[Dimension],
    inputs: Mapping[str, Sequence[Size]],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, int]:
    """Infer the size of each dimension from the actual input shapes.

    Each dimension in `inputs` must be the complete size of some axis. Raises WrongSize if a size is out of its range,
    differs between inputs, or contradicts the model's.
    """
    expressions: list[tuple[str, int, str]] = []
    ranges = {dimension.name: dimension for dimension in dimensions}
    found: dict[str, tuple[int, str]] = {}
    for name, sizes in inputs.items():
        shape = shapes[name]
        if len(shape) != len(sizes):
            raise WrongSize(
                f"input {quoted(name)} has {len(shape)} dimensions, and the model's has {len(sizes)}: "
                f"[{', '.join(map(str, sizes))}]"
            )
        for axis, (size, actual) in enumerate(zip(sizes, shape, strict=True)):
            place = f"size {axis} of input {quoted(name)}"
            if isinstance(size, int):
                if actual != size:
                    raise WrongSize(f"{place} is {actual}, and the model's is {size}")
                continue
            if not is_name(size):
                expressions.append((size, int(actual), place))
                continue
            before, where = found.setdefault(size, (int(actual), place))
            if actual != before:
                raise WrongSize(
                    f"the dimension {size} has two sizes: {place} is {actual}, and {where} is {before}"
                )
            if problem := ranges[size].find_problem(int(actual)):
                raise WrongSize(f"{problem} ({place})")
    derived = {name: size for name, (size, _) in found.items()}
    for size, actual, place in expressions:
        if (expected := evaluate(size, derived)) != actual:
            used = sizes_text({name: derived[name] for name in list_names(size)})
            raise WrongSize(f"{place} is {actual}, and {size} is {expected} ({used})")
    return derived


def choose_tuning_size(dimension: Dimension) -> int:
    """Return the tuning size: the largest of `tune_at`, or the geometric mean of the range.

    >>> choose_tuning_size(Dimension("seq", 1, 512)), choose_tuning_size(Dimension("h", 32, 512, 32))
    (23, 128)
    """
    if dimension.tune_at:
        return max(dimension.tune_at)
    middle = math.isqrt(dimension.least_nonempty * dimension.max) + 1
    rounded = middle // dimension.multiple_of * dimension.multiple_of
    return min(max(rounded, dimension.min), dimension.max)


def list_tuning_sizes(dimensions: Sequence[Dimension]) -> list[dict[str, int]]:
    """Return combinations of sizes: together they cover each size of `tune_at` and the tuning sizes.

    >>> list_tuning_sizes([Dimension("batch", 1, 8), Dimension("seq", 1, 512, 1, (16, 128))])
    [{'batch': 3, 'seq': 16}, {'batch': 3, 'seq': 128}]
    """
    middle = {dimension.name: choose_tuning_size(dimension) for dimension in dimensions}
    chosen = [
        {
            d.name: d.tune_at[index % len(d.tune_at)] if d.tune_at else middle[d.name]
            for d in dimensions
        }
        for index in range(max((len(d.tune_at) for d in dimensions), default=0))
    ]
    return chosen if middle in chosen else [*chosen, middle]


def is_prime(number: int) -> bool:
    """Return whether a number is prime: no tile divides an extent of this size.

    >>> [number for number in range(12) if is_prime(number)]
    [2, 3, 5, 7, 11]
    """
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def specs_at(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Return tensors with their shapes evaluated for `sizes` of the dimensions."""
    return tuple(
        spec._replace(shape=evaluate_shape(spec.sizes, sizes), sizes=()) if spec.sizes else spec
        for spec in specs
    )


def ranges_text(dimensions: Iterable[Dimension]) -> str:
    """Return the range of each dimension, for messages.

    >>> ranges_text([Dimension("batch", 1, 8), Dimension("seq", 8, 512, 8)])
    'batch is 1 to 8; seq is 8 to 512, multiples of 8'
    """
    return "; ".join(f"{entry.name} is {entry.range_text}" for entry in dimensions)


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as text for reports.

    >>> sizes_text({"batch": 3, "seq": 37})
    'batch=3, seq=37'
    """
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_TEXT:
        raise WrongSize(f"a size has {len(text):,} characters, and the limit is {_MAX_TEXT:,}")
    try:
        tree = ast.parse(text, mode="eval").body
        _check(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WrongSize(f"{excerpt(text)} is not an expression of sizes") from error
    return tree


def _check(node: ast.AST) -> None:
    """Raise ValueError unless a tree is an expression of sizes."""
    match node:
        case ast.Name():
            return
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value <= _MAX_VALUE:
            return
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            parts = [left, right]
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if (
            name in _FUNCTIONS
        ):
            parts = [left, right]
        case _:
            raise ValueError(ast.dump(node))
    for part in parts:
        _check(part)


def _look_up(name: str, known: Mapping[str, T], text: str) -> T:
    if name not in known:
        raise WrongSize(f"{excerpt(text)} is about an unknown dimension, {excerpt(name)}")
    return known[name]


def _replace(node: Any, sizes: Mapping[str, Size], text: str) -> ast.expr:
    """Return a tree with names replaced by sizes and constants folded."""
    if isinstance(node, ast.Constant):
        return node
    if isinstance(node, ast.Name):
        size = sizes.get(node.id, node.id)
        return _constant(size) if isinstance(size, int) else _parse(size)
    word, left, right = _parts(node)
    parts = [_replace(part, sizes, text) for part in (left, right)]
    if all(isinstance(part, ast.Constant) for part in parts):
        left, right = map(_number, parts)
        if right == 0 and word in ("//", "%"):
            raise WrongSize(f"{excerpt(text)} divides by 0")
        return _constant(_COMPUTED[word](left, right))
    if isinstance(node, ast.Call):
        return ast.Call(node.func, parts, [])
    return ast.BinOp(parts[0], node.op, parts[1])


def _constant(value: int) -> ast.expr:
    """Return the tree of an integer, with -n as `0 - n`, because expressions have no unary minus."""
    if value >= 0:
        return ast.Constant(value)
    return ast.BinOp(ast.Constant(0), ast.Sub(), ast.Constant(-value))


def _number(node: Any) -> int:
    return int(node.value)


def _parts(node: Any) -> tuple[str, Any, Any]:
    if isinstance(node, ast.Call):
        function: Any = node.func
        left, right = node.args
        return str(function.id), left, right
    return _OPERATORS[type(node.op)], node.left, node.right
