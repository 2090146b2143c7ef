"""Comparison of a recipe's inputs with the model's: names, dtypes, shapes and values."""

from __future__ import annotations

import itertools
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.dimensions import WrongSize, find_bounds, list_names, substitute
from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, names_text, quoted
from tvmflow.core.generated_text import comment, find_name_problem, yaml_key
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Array, Dimension, Json, Size, TensorSpec
from tvmflow.frontends.base import MAX_ELEMENTS, InputProblem, InputRequest, Limits, ModelInput

MAX_SIGNATURE: Final = 10_000
"""Maximum number of inputs and of outputs; exporters make fewer."""

DEFAULT_DTYPE: Final = "float32"
"""The dtype of an input if neither model nor recipe specifies it."""

_MAX_PROBLEMS: Final = 20
SIZE: Final = "SIZE"
"""Placeholder in YAML for a size that the user must fill in."""

MAX_DIMENSION_NAME: Final = 64
"""Maximum characters of a dimension's name."""

_BATCH_NAMES: Final = ("b", "n", "bs", "batch", "batch_size", "batchsize")
_LARGEST_FLOATS: Final = {"float16": 65504.0, "float32": 3.4028234663852886e38}


def find_input_problems(
    inputs: Sequence[ModelInput], requests: Sequence[InputRequest]
) -> Iterator[InputProblem]:
    """Yield the problems of the recipe's inputs; all missing sizes are one problem, with YAML as fix.

    Requests are required only for inputs that the model does not specify completely.
    """
    yield from find_mismatches(inputs, requests)
    pairs = _pair(inputs, requests)
    if len(pairs) <= MAX_SIGNATURE and any(_needs_size(*pair) for pair in pairs):
        lines = suggest_inputs(inputs, requests)
        advice = (
            f", with a number for each {SIZE}" if any(line.needs_size for line in lines) else ""
        )
        text = "\n".join(["inputs:", *(line.text for line in lines)])
        text = f"the model has dynamic dimensions; write this in the recipe{advice}:\n\n{text}"
        if dynamic_lines := suggest_dimensions(inputs, requests):
            section = "\n".join(dynamic_lines)
            advice = f", with the maximum for each {SIZE}" if SIZE in section else ""
            text += f"\n\nor, to let one library serve all sizes, write this{advice}:\n\n{section}"
        yield InputProblem("", "", text)


def find_mismatches(
    inputs: Sequence[ModelInput], requests: Sequence[InputRequest]
) -> Iterator[InputProblem]:
    """Yield the problems of `find_input_problems`, except missing sizes."""
    required = [value.name for value in inputs if value.is_required]
    if len(required) > MAX_SIGNATURE:
        text = (
            f"the model has {len(required):,} inputs, and tvmflow imports at most {MAX_SIGNATURE:,}"
        )
        yield InputProblem("", "", text)
        return
    names = {value.name for value in inputs}
    valid = f"its inputs are {names_text(required)}" if required else "it has no inputs"
    for name in sorted(request.name for request in requests if request.name not in names):
        hint = did_you_mean(name, required or names)
        known = f" ({valid})" if required or not names else ""
        text = f"the model has no input {quoted(name)}{hint}{known}"
        yield InputProblem(name, "", text)
    pairs = _pair(inputs, requests)
    for value, request in pairs:
        yield from _input_problems(value, request)
    yield from _size_problems(pairs)
    if pairs and all(request.value is not None for _, request in pairs):
        yield InputProblem("", "", "all inputs have a value, which leaves nothing to compute")


def _pair(
    inputs: Sequence[ModelInput], requests: Sequence[InputRequest]
) -> list[tuple[ModelInput, InputRequest]]:
    """Return the inputs of the library and inputs bound to constants, each with its request."""
    by_name = {request.name: request for request in requests}
    return [
        (
            value._replace(problem=value.problem or _name_problem(value.name)),
            by_name.get(value.name) or InputRequest(value.name),
        )
        for value in inputs
        if value.is_required or value.name in by_name
    ]


def _name_problem(name: str) -> str:
    problem = find_name_problem(name)
    return f"{problem}: rename it where the model is exported" if problem else ""


def find_output_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield the outputs of a model whose names generated code cannot contain."""
    for name in names:
        if problem := _name_problem(name):
            yield f"the model's output {quoted(name)} {problem}"


def check_inputs(inputs: Sequence[ModelInput], requests: Sequence[InputRequest]) -> None:
    """Raise ImportFailed for mismatched inputs; planning checks this only if it can read the model."""
    problems = itertools.islice(find_input_problems(inputs, requests), _MAX_PROBLEMS)
    texts = [f"{excerpt('.'.join(problem.loc))}: {problem.text}" for problem in problems]
    if texts:
        raise ImportFailed("; ".join(texts), fix="correct `inputs` in the recipe")


def resolve_inputs(
    inputs: Sequence[ModelInput], requests: Sequence[InputRequest]
) -> tuple[TensorSpec, ...]:
    """Return shapes and dtypes of inputs, including inputs bound to constants; there must be no problems."""
    specs = []
    for value, request in _pair(inputs, requests):
        shape = _requested_shape(request)
        if shape is None:
            shape = tuple(int(size) for size in value.dims or ())
        dtype = _dtype_of(value, request)
        specs.append(TensorSpec(value.name, shape, dtype, sizes=request.sizes))
    return tuple(sorted(specs, key=lambda spec: spec.name))


def request_of(spec: TensorSpec) -> InputRequest:
    """Return the request that specifies a resolved input completely."""
    return InputRequest(name=spec.name, shape=spec.shape, dtype=spec.dtype, sizes=spec.sizes)


def array_of(spec: TensorSpec, value: Json) -> Array:
    """Return the constant that an input is bound to."""
    import numpy as np

    array = np.asarray(value, spec.dtype)
    return array if array.shape == spec.shape else np.full(spec.shape, array)


def shape_of_value(value: Json) -> tuple[int, ...]:
    """Return the shape of nested lists; ValueError if lists at one level differ in length."""
    if not isinstance(value, list | tuple):
        return ()
    shapes = {shape_of_value(part) for part in value}
    if len(shapes) > 1:
        raise ValueError("has lists of different lengths")
    return (len(value), *(shapes.pop() if shapes else ()))


def scalars_of(value: Json) -> Iterator[Json]:
    """Yield the elements of nested lists."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from scalars_of(part)
    else:
        yield value


def _dtype_of(value: ModelInput, request: InputRequest) -> str:
    return value.dtype or request.dtype or DEFAULT_DTYPE


def _requested_shape(request: InputRequest) -> tuple[int, ...] | None:
    if request.value is None or request.shape is not None:
        return request.shape
    return shape_of_value(request.value)


def _input_problems(value: ModelInput, request: InputRequest) -> Iterator[InputProblem]:
    name = quoted(value.name)
    if value.problem:
        yield InputProblem(value.name, "", f"the model's input {name} {value.problem}")
        return
    if value.dtype and request.dtype and request.dtype != value.dtype:
        text = f"input {name} has dtype {value.dtype}, not {request.dtype}"
        yield InputProblem(value.name, "dtype", text)
    elif request.value is not None and (text := _range_problem(_dtype_of(value, request), request)):
        yield InputProblem(value.name, "value", f"input {name} has {text}")
    if text := _shape_problem(value, request):
        field = "shape" if request.value is None or request.shape is not None else "value"
        yield InputProblem(value.name, field, text)


def _range_problem(dtype: str, request: InputRequest) -> str:
    """Return the problem of a constant's element that its dtype cannot represent, or an empty string."""
    for scalar in scalars_of(request.value):
        is_fraction = "int" in dtype and not isinstance(scalar, int)
        if is_fraction or isinstance(scalar, bool) != (dtype == "bool"):
            nouns = {"bool": "true or false", "int": "whole numbers"}
            noun = nouns.get(dtype.lstrip("u").rstrip("0123456789"), "numbers")
            return f"dtype {dtype}, whose values are {noun}, not {json.dumps(scalar)}"
        if dtype != "bool" and not _holds(dtype, scalar):
            return f"dtype {dtype}, which cannot hold {json.dumps(scalar)}"
    return ""


def _holds(dtype: str, number: float) -> bool:
    if "int" not in dtype:
        return abs(number) <= _LARGEST_FLOATS.get(dtype, math.inf)
    is_signed, bits = not dtype.startswith("u"), int(dtype.lstrip("uint"))
    low = -(1 << bits - 1) if is_signed else 0
    return low <= number < low + (1 << bits)


def _shape_problem(value: ModelInput, request: InputRequest) -> str:
    name, dims, shape = quoted(value.name), value.dims, _requested_shape(request)
    if dims is not None and 0 in dims:
        return f"input {name} has shape {dimensions_text(dims)}, which is empty: export the model with another size"
    if shape is not None:
        sizes = request.sizes or shape
        fits = dims is None or (
            len(dims) == len(sizes)
            and all(_is_free(size) or size == new for size, new in zip(dims, sizes, strict=True))
        )
        return "" if fits else _mismatch_text(value, request, sizes)
    known = [size for size in dims or () if isinstance(size, int) and size > 0]
    if math.prod(known) > MAX_ELEMENTS:
        return f"input {name} has shape {dimensions_text(known)}, which has more than 2^31 elements"
    return ""


def _size_problems(pairs: Sequence[tuple[ModelInput, InputRequest]]) -> Iterator[InputProblem]:
    """Yield problems of dynamic dimensions: sizes outside of limits, or different sizes in two inputs."""
    first: dict[str, tuple[str, Size]] = {}
    for value, request in pairs:
        shape = _requested_shape(request) or ()
        ranges = {entry.name: entry for entry in request.dimensions}
        for axis, (dim, size) in enumerate(
            zip(value.dims or (), request.sizes or shape, strict=False)
        ):
            if not isinstance(dim, str):
                continue
            # Some exporters use one name for all unknown sizes.
            is_shared = dim.isidentifier() and dim.lower() not in ("none", "unk", "unknown")
            if not is_shared and dim not in value.limits:
                continue
            text = f"dimension {axis} ({quoted(dim)}) of input {quoted(value.name)} is {size}"
            other, same = first.setdefault(dim, (value.name, size))
            if dim not in value.limits and not isinstance(size, str) and not isinstance(same, str):
                # In ONNX, equal names do not guarantee equal sizes.
                continue
            if same != size:
                text += f", and that of input {quoted(other)} is {same}: they are one dimension"
            elif problem := _limits_problem(value.limits.get(dim, (None, None)), size, ranges):
                text += problem
            else:
                continue
            yield InputProblem(value.name, "shape", text)


def _limits_problem(limits: Limits, size: Size, ranges: Mapping[str, Dimension]) -> str:
    """Return the problem of a size or range outside of the model's limits, or an empty string."""
    smallest, largest = limits
    if not ranges.keys() >= set(list_names(size)):
        # Planning has checked the range already.
        return ""
    low, high = find_bounds(size, {name: (entry.min, entry.max) for name, entry in ranges.items()})
    if smallest is not None and low < smallest:
        reason = f"the model was exported for a size of at least {smallest}"
    elif largest is not None and high > largest:
        reason = f"the model was exported for a size of at most {largest}"
    else:
        return ""
    return f" ({low} to {high}), and {reason}" if isinstance(size, str) else f", and {reason}"


def _mismatch_text(value: ModelInput, request: InputRequest, shape: Sequence[Size]) -> str:
    text = f"input {quoted(value.name)} has shape {dimensions_text(value.dims or ())}, "
    if request.value is None or request.shape is not None:
        sizes = f"[{', '.join(map(str, shape))}]"
        fixed = [
            f"`{size}`"
            for dim, size in zip(value.dims or (), shape, strict=False)
            if isinstance(size, str) and not _is_free(dim)
        ]
        advice = f": export it with dynamic dimensions for {names_text(fixed)}" if fixed else ""
        return f"{text}which {sizes} does not fit{advice}"
    advice = "" if shape else "; a number fills the `shape` that stands beside it"
    return f"{text}and the value has shape {list(shape)}{advice}"


def _needs_size(value: ModelInput, request: InputRequest) -> bool:
    """Return whether the recipe must give the shape of an input, but does not."""
    if value.problem or _requested_shape(request) is not None:
        return False
    return value.dims is None or any(map(_is_free, value.dims))


def _is_free(size: int | str) -> bool:
    """Return whether a size is dynamic; as in ONNX Runtime, negative sizes are unknown."""
    return isinstance(size, str) or size < 0


def dimensions_text(dims: Sequence[int | str]) -> str:
    """Return the model's sizes of an input, for messages."""
    sizes = [quoted(size or "?") if isinstance(size, str) else str(size) for size in dims]
    return f"[{names_text(sizes, 32)}]"


class InputLine(NamedTuple):
    """A line below `inputs:` in a recipe, and whether it contains SIZE."""

    text: str
    needs_size: bool


def suggest_inputs(
    inputs: Sequence[ModelInput], requests: Sequence[InputRequest]
) -> list[InputLine]:
    """Return the lines below `inputs:` of a recipe, with SIZE for unknown sizes."""
    return [
        InputLine(
            f"  {_yaml_line(value, request)}",
            _needs_size(value, request) and SIZE in suggest_shape(value),
        )
        for value, request in _pair(inputs, requests)
        if not value.problem
    ]


def suggest_dimensions(inputs: Sequence[ModelInput], requests: Sequence[InputRequest]) -> list[str]:
    """Return `dimensions` and `inputs` that keep all dynamic dimensions; empty if requests fix any."""
    pairs = [pair for pair in _pair(inputs, requests) if not pair[0].problem]
    free = [pair for pair in pairs if pair[0].dims is None or any(map(_is_free, pair[0].dims))]
    if any(_requested_shape(request) is not None for _, request in free):
        return []
    if len({value.dims is None for value, _ in free}) > 1:
        # Equal sizes cannot be recognized between inputs with and without a shape.
        return []
    names = _DimensionNames(size for value, _ in free for size in value.dims or ())
    lines = []
    for value, request in pairs:
        shape = None
        if _needs_size(value, request):
            # For an unknown shape: a batch, and a placeholder for other sizes.
            dims = ("", SIZE) if value.dims is None else value.dims
            shape = [
                yaml_key(names.add(value, axis, size))
                if size != SIZE and _is_free(size)
                else str(size)
                for axis, size in enumerate(dims)
            ]
        lines.append(f"  {_yaml_line(value, request, shape)}")
    ranges = [f"  {yaml_key(name)}: {{{limits}}}" for name, limits in names.ranges.items()]
    return ["dimensions:", *ranges, "inputs:", *lines] if ranges else []


class _DimensionNames:
    """Names for the dynamic dimensions of a model, with their ranges as YAML."""

    def __init__(self, sizes: Iterable[int | str]) -> None:
        self.ranges: dict[str, str] = {}
        self._by_size: dict[str, str] = {}
        self._alone = {size for size in sizes if isinstance(size, str) and size.isidentifier()}

    def add(self, value: ModelInput, axis: int, size: int | str) -> str:
        """Return a dimension name for a dynamic size, or an expression if the size depends on others."""
        own = size if isinstance(size, str) and size else ""
        if own not in self._alone and (parts := self._list_parts(own)):
            return str(substitute(own, {part: self.add(value, -1, part) for part in parts}))
        batch = "batch" if axis == 0 else f"{value.name}_{axis}"
        key = own or batch
        if key not in self._by_size:
            self._by_size[key] = self._choose(key)
            smallest, largest = value.limits.get(own, (None, None))
            low = f"min: {smallest}, " if smallest and smallest > 1 else ""
            self.ranges[self._by_size[key]] = f"{low}max: {largest or SIZE}"
        return self._by_size[key]

    def _list_parts(self, text: str) -> list[str]:
        """Return the dimensions in an expression; empty for other texts."""
        try:
            parts = list_names(text)
        except WrongSize:
            return []
        return parts if self._alone.issuperset(parts) else []

    def _choose(self, text: str) -> str:
        """Return an identifier that is unique, ignoring case."""
        name = re.sub(r"[^A-Za-z0-9_]+", "_", text)[: MAX_DIMENSION_NAME - 4].strip("_") or "size"
        name = f"size_{name}" if name[0].isdigit() else name
        name = name if is_dimension_name(name) else f"{name}_"
        taken = {known.upper() for known in self.ranges}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        return next(n for n in itertools.chain([name], numbered) if n.upper() not in taken)


def is_dimension_name(name: str) -> bool:
    """Return whether a name is valid for a dimension: an identifier that is not reserved in expressions."""
    is_reserved = keyword.iskeyword(name) or name in ("min", "max", SIZE)
    is_identifier = name.isascii() and name.isidentifier()
    return is_identifier and not is_reserved and len(name) <= MAX_DIMENSION_NAME


def suggest_shape(value: ModelInput) -> list[str]:
    """Return the sizes of an input for a recipe: 1 for a batch, SIZE for other dynamic sizes."""
    shape = []
    for axis, size in enumerate((SIZE,) if value.dims is None else value.dims):
        name = size.lower() if isinstance(size, str) else ""
        is_batch = name in _BATCH_NAMES if name else axis == 0
        batch_or_size = "1" if is_batch else SIZE
        shape.append(batch_or_size if _is_free(size) else str(size))
    return shape


def _yaml_line(
    value: ModelInput, request: InputRequest, suggested_shape: Sequence[str] | None = None
) -> str:
    fields: dict[str, str] = {}
    shape = request.sizes or request.shape
    if suggested_shape is None and shape is not None:
        texts = map(str, shape)
        suggested_shape = [yaml_key(text) if is_dimension_name(text) else text for text in texts]
    elif suggested_shape is None and request.value is None:
        suggested_shape = suggest_shape(value)
    if suggested_shape is not None:
        fields["shape"] = f"[{', '.join(suggested_shape)}]"
    for key in ("dtype", "value", "range", "image"):
        setting = getattr(request, key)
        if setting is not None:
            is_text = isinstance(setting, str)
            fields[key] = setting if is_text else excerpt(json.dumps(setting), 1000)
    facts = [value.dtype or request.dtype or DEFAULT_DTYPE]
    if value.dims is None:
        facts.append("the model does not specify the number of dimensions")
    elif any(map(_is_free, value.dims)):
        names = [str(size) or "?" for size in value.dims]
        facts.append(f"[{comment(names_text(names, 32))}]")
    text = ", ".join(f"{key}: {field}" for key, field in fields.items())
    return f"{yaml_key(value.name)}: {{{text}}}  # {', '.join(facts)}"
