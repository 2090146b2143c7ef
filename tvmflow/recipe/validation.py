"""Validates a document against a model, and turns pydantic's errors into messages with positions."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tvmflow.core.formatting import quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Json
from tvmflow.recipe.yaml_files import UNREADABLE, Document, Loc, Problem, dotted, inline_yaml

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)


def validate(document: Document, model: type[_AnyModel]) -> tuple[_AnyModel | None, list[Problem]]:
    """Return the document as a model, or None and all that is wrong with it."""
    problems = list(document.problems)
    if not isinstance(document.value, dict):
        if document.value is not UNREADABLE:
            kind = "a list" if isinstance(document.value, list) else "a single value"
            text = f"must be a mapping, such as `name: …`, not {kind}"
            problems.append(document.problem(text))
        return None, problems
    try:
        value = model.model_validate(document.value)
    except ValidationError as error:
        for detail in error.errors():
            problems += _list_problems(document, model, detail)
        return None, problems
    return None if problems else value, problems


class FieldType(NamedTuple):
    """The type of a model's field without `Optional`, and an example of a value."""

    kind: Any
    example: Any


_UNKNOWN: Final = FieldType(None, None)
# What pydantic adds to the path of a mapping's field when its name is wrong.
_KEY: Final = "[key]"


def field_type(model: type[BaseModel], loc: Loc) -> FieldType:
    """Return what belongs at a path of a document; `kind` is None where nothing does."""
    kind: Any = model
    example: Any = None
    for step in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(step))
            if field is None:
                return _UNKNOWN
            kind, example = strip_annotation(field.annotation), (field.examples or [None])[0]
        else:
            args = get_args(kind)
            if not args:
                return _UNKNOWN
            kind = strip_annotation(args[1] if get_origin(kind) is dict else args[0])
            parts = list(example.values()) if isinstance(example, dict) else example
            example = parts[-1] if isinstance(parts, list) and parts else None
    return FieldType(kind, example)


def strip_annotation(kind: Any) -> Any:
    """Return `X` for `Annotated[X | None, …]`."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


# ---------------------------------------------------------------- pydantic's errors


def _list_problems(
    document: Document, model: type[BaseModel], detail: ErrorDetails
) -> Iterator[Problem]:
    """Give the problem of one error; none when it only follows from a value that could not be read."""
    place = [step for step in detail["loc"] if step != _KEY]
    loc: Loc = (*place, *detail.get("ctx", {}).get("path", ()))
    if _follows_from_unreadable(document, loc, detail):
        return
    if detail["type"] == "extra_forbidden":
        text = f"{dotted(loc)}: {_unknown_field_text(model, loc)}"
        yield Problem(*document.name_position(*loc), text)
    else:
        yield document.problem(_error_text(document, model, loc, detail), *loc)


def _follows_from_unreadable(document: Document, loc: Loc, detail: ErrorDetails) -> bool:
    if detail["type"] == "too_short" and detail["input"]:
        # pydantic counts only valid items. The others have been reported themselves.
        return True
    if detail["type"] == "missing" and loc[:-1] in document.unreadable:
        return True
    return any(unreadable[: len(loc)] == loc for unreadable in document.unreadable)


def _unknown_field_text(model: type[BaseModel], loc: Loc) -> str:
    """Return at which level a field of this name belongs, or the nearest field of this level."""
    name = str(loc[-1])
    owners: dict[type[BaseModel], str] = {}
    # The section itself is named, not an override of it further inside.
    for path, kind in sorted(_nested_models(model), key=lambda level: level[0].count(".")):
        if name in kind.model_fields:
            owners.setdefault(kind, path)
    # Overrides of a target have the fields of the section itself, which is named instead.
    levels = [
        path
        for kind, path in owners.items()
        if not any(kind is not other and issubclass(kind, other) for other in owners)
    ]
    # A level inside another one that has the field is not named either.
    levels = [p for p in levels if not any(q and p.startswith(f"{q}.") for q in levels)]
    if levels:
        places = (f"under {path}" if path else "at the top level" for path in levels)
        return f"belongs {' or '.join(places)}"
    fields = list(field_type(model, loc[:-1]).kind.model_fields)
    hint = did_you_mean(name, fields) or f" (valid: {', '.join(fields)})"
    return f"unknown field{hint}"


def _nested_models(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Give the path of every level with its model, the outer ones first."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = strip_annotation(field.annotation)
        while get_args(inner):
            inner = strip_annotation(get_args(inner)[1 if get_origin(inner) is dict else 0])
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _nested_models(inner, f"{path}.{name}" if path else name)


_EXPECTED: Final = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "a list with at least one item",
}
_LIMITS: Final = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}
_NAME_RULE: Final = "must start with a lowercase letter or digit and contain only lowercase letters, digits and . _ -"


def _error_text(document: Document, model: type[BaseModel], loc: Loc, detail: ErrorDetails) -> str:
    """Return the message for one of pydantic's errors."""
    kind, context = detail["type"], detail.get("ctx", {})
    expected = field_type(model, loc)
    example = "" if expected.example is None else f", such as {inline_yaml(expected.example)}"
    actual = _actual_text(document, loc, detail["input"])
    if kind == "missing":
        write = f"; write `{loc[-1]}: {inline_yaml(expected.example)}`" if example else ""
        return f"is missing{write}"
    # that of an integer with more digits than pydantic compares
    if kind in ("literal_error", "int_parsing_size"):
        choices = [str(choice) for choice in get_args(expected.kind)]
        hint = did_you_mean(detail["input"], choices) if isinstance(detail["input"], str) else ""
        return f"must be one of {', '.join(choices)}, {actual}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{_NAME_RULE}, {actual}"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}{example}, {actual}"
    if kind in _LIMITS:
        plain = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        return _LIMITS[kind].format_map(plain)
    return detail["msg"]


def _actual_text(document: Document, loc: Loc, value: Json) -> str:
    if value is None:
        return "but is empty"
    if isinstance(value, dict):
        return "not a mapping"
    if isinstance(value, list | tuple):
        return "not a list" if value else "not an empty list"
    if isinstance(value, str):
        return f"not the string {quoted(value)}"
    kind = "" if isinstance(value, bool) else "the number "
    return f"not {kind}{document.scalars.get(loc, value)}"
