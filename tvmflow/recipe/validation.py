"""Validates a document against a model, and turns pydantic's errors into messages with positions."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tvmflow.core.formatting import quoted
from tvmflow.core.text import did_you_mean, nearest
from tvmflow.core.types import Json
from tvmflow.recipe.yaml_files import UNREADABLE, Document, Loc, Problem, dotted, inline_yaml

_AnyModel = TypeVar("_AnyModel", bound=BaseModel)


class _Kinds(NamedTuple):
    """The model of a document, and that of the other kind that its author may have had in mind."""

    model: type[BaseModel]
    other: type[BaseModel] | None
    other_noun: str


def validate(
    document: Document,
    model: type[_AnyModel],
    other: type[BaseModel] | None = None,
    other_noun: str = "",
) -> tuple[_AnyModel | None, list[Problem]]:
    """Return the document as a model, or None and all that is wrong with it.

    Fields that belong into another kind of document are found in its model, `other`; `other_noun`
    is what messages call it.
    """
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
            problems += _list_problems(document, _Kinds(model, other, other_noun), detail)
        return None, problems
    return None if problems else value, problems


class FieldType(NamedTuple):
    """The type of a model's field without `Optional`, and an example of a value."""

    kind: Any
    example: Any


_UNKNOWN: Final = FieldType(None, None)
# What pydantic adds to the path of a mapping's field when its name is wrong.
_KEY: Final = "[key]"
# How much a field must look like the wrong one to be suggested before fields that look less like it.
_CLEARLY_MEANT: Final = 0.85


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


def _list_problems(document: Document, kinds: _Kinds, detail: ErrorDetails) -> Iterator[Problem]:
    """Give the problem of one error; none when it only follows from a value that could not be read."""
    place = [step for step in detail["loc"] if step != _KEY]
    loc: Loc = (*place, *detail.get("ctx", {}).get("path", ()))
    if _follows_from_unreadable(document, loc, detail):
        return
    if detail["type"] == "extra_forbidden":
        text = f"{dotted(loc)}: {_unknown_field_text(document, kinds, loc)}"
        yield Problem(*document.name_position(*loc), text)
    else:
        yield document.problem(_error_text(document, kinds.model, loc, detail), *loc)


def _follows_from_unreadable(document: Document, loc: Loc, detail: ErrorDetails) -> bool:
    if detail["type"] == "too_short" and detail["input"]:
        # pydantic counts only valid items. The others have been reported themselves.
        return True
    if detail["type"] == "missing" and loc[:-1] in document.unreadable:
        return True
    return any(unreadable[: len(loc)] == loc for unreadable in document.unreadable)


def _unknown_field_text(document: Document, kinds: _Kinds, loc: Loc) -> str:
    """Return where a field of this name belongs, or the field that was probably meant."""
    name = str(loc[-1])
    if places := _find_places(kinds, name):
        return f"belongs {' or '.join(places)}"
    section = field_type(kinds.model, loc[:-1]).kind
    fields = list(section.model_fields)
    if nearest(name, fields, cutoff=_CLEARLY_MEANT):
        return f"unknown field{did_you_mean(name, fields)}"
    inside = document.value_at(*loc)
    for wrong in (name, *(inside if isinstance(inside, dict) else ())):
        for meant in nearest(wrong, _all_fields(kinds), cutoff=_CLEARLY_MEANT):
            hint = f"'{meant}' {_find_places(kinds, meant)[0]}"
            return f"unknown field; did you mean {hint}?"
    hint = did_you_mean(name, fields) or f" (valid: {', '.join(fields)})"
    return f"unknown field{hint}"


def _find_places(kinds: _Kinds, name: str) -> list[str]:
    """Return where a field of this name belongs: `under verify`, or `under verify of a recipe`.

    Overrides have the fields of the section that they override, which is named instead. A section
    inside another one that has the field is not named either.
    """
    own, other = (_sections_with(model, name) for model in (kinds.model, kinds.other))
    for sections, suffix in ((own, ""), (other, f" of {kinds.other_noun}")):
        levels = [
            path
            for section, path in sections.items()
            if not _is_override(section, {**own, **other})
        ]
        levels = [p for p in levels if not any(q and p.startswith(f"{q}.") for q in levels)]
        if levels:
            return [f"{f'under {p}' if p else 'at the top level'}{suffix}" for p in levels]
    return []


def _sections_with(model: type[BaseModel] | None, name: str) -> dict[type[BaseModel], str]:
    """Return the sections that have a field of this name, each with its outermost path."""
    paths: dict[type[BaseModel], str] = {}
    for path, section in sorted(_nested_models(model), key=lambda level: level[0].count(".")):
        if name in section.model_fields:
            paths.setdefault(section, path)
    return paths


def _is_override(section: type[BaseModel], others: Iterable[type[BaseModel]]) -> bool:
    return any(section is not other and issubclass(section, other) for other in others)


def _all_fields(kinds: _Kinds) -> list[str]:
    sections = (*_nested_models(kinds.model), *_nested_models(kinds.other))
    return [name for _, section in sections for name in section.model_fields]


def _nested_models(
    model: type[BaseModel] | None, path: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Give the path of every level with its model, the outer ones first."""
    if model is None:
        return
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
