"""Turns a document into a model of the public language, and pydantic's findings into sentences with places."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tvmflow.yaml_positions import UNREAD, Document, Loc, Problem, dotted, nearest, quoted

_AnyPart = TypeVar("_AnyPart", bound=BaseModel)


def wrong(text: str, *at: str | int) -> PydanticCustomError:
    """What a validator raises. `at` leads from the validated value to the part that is wrong."""
    return PydanticCustomError("wrong", "{text}", {"text": text, "at": at})


def one_of(value: str, valid: Any, what: str, all_of_them: str = "") -> str:
    """The value if it is valid, else an error with the nearest name and all of them, or where they are listed."""
    if value in valid:
        return value
    there = all_of_them or f"there are {', '.join(sorted(valid))}"
    raise wrong(f"{quoted(value)} is not {what}{nearest(value, valid)} ({there})")


def check(document: Document, model: type[_AnyPart]) -> tuple[_AnyPart | None, list[Problem]]:
    """The document as a model, or all that is wrong with it."""
    problems = list(document.problems)
    if not isinstance(document.value, dict):
        if document.value is not UNREAD:
            kind = "a list" if isinstance(document.value, list) else "a single value"
            text = f"must hold fields, such as `name: …`; this is {kind}"
            problems.append(Problem(*document.place(), text))
        return None, problems
    try:
        found = model.model_validate(document.value)
    except ValidationError as error:
        details = error.errors()
        problems += [each for detail in details for each in _problem(document, model, detail)]
        return None, problems
    return None if problems else found, problems


def in_yaml(value: Any) -> str:
    """A plain value as one line of YAML."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {in_yaml(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(in_yaml(part) for part in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


class Spot(NamedTuple):
    """What the language has at one path: the type without its optionals, and an example of a value."""

    kind: Any
    example: Any


def spot_at(model: type[BaseModel], loc: Loc) -> Spot:
    """What belongs at this path of a document. The kind is None where nothing does."""
    kind: Any = model
    example: Any = None
    for step in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(step))
            if field is None:
                return Spot(None, None)
            kind, example = bare(field.annotation), (field.examples or [None])[0]
        else:
            args = get_args(kind)
            if not args:
                return Spot(None, None)
            kind = bare(args[1] if get_origin(kind) is dict else args[0])
            parts = list(example.values()) if isinstance(example, dict) else example
            example = parts[-1] if isinstance(parts, list) and parts else None
    return Spot(kind, example)


def bare(kind: Any) -> Any:
    """A type without what surrounds it: `Annotated[X | None, …]` is `X`."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


# ---------------------------------------------------------------- findings


def _problem(document: Document, model: type[BaseModel], detail: ErrorDetails) -> Iterator[Problem]:
    """One of pydantic's findings; none when it only follows from a value that could not be read."""
    loc: Loc = (*detail["loc"], *detail.get("ctx", {}).get("at", ()))
    if _in_doubt(document, loc, detail):
        return
    name = dotted(loc)
    if detail["type"] == "extra_forbidden":
        place, text = document.place_of_name(*loc), _unknown_field(model, loc)
    else:
        place, text = document.place(*loc), _sentence(document, model, loc, detail)
    yield Problem(*place, f"{name}: {text}" if name else text)


def _in_doubt(document: Document, loc: Loc, detail: ErrorDetails) -> bool:
    if detail["type"] == "too_short" and detail["input"]:
        # pydantic counts the items that are valid; those that are not have been reported
        return True
    if detail["type"] == "missing" and loc[:-1] in document.unread:
        return True
    return any(unread[: len(loc)] == loc for unread in document.unread)


def _unknown_field(model: type[BaseModel], loc: Loc) -> str:
    """The level where a field of this name belongs, or the nearest field of this level."""
    name = str(loc[-1])
    kinds: dict[type[BaseModel], str] = {}
    for path, kind in _levels(model):
        if name in kind.model_fields:
            kinds.setdefault(kind, path)
    # what a target changes of a part is told at the part itself
    levels = [
        path
        for kind, path in kinds.items()
        if not any(kind is not other and issubclass(kind, other) for other in kinds)
    ]
    # nor is what parts of a level also have
    levels = [p for p in levels if not any(q and p.startswith(f"{q}.") for q in levels)]
    if levels:
        return (
            f"belongs {' or '.join(f'under {path}' if path else 'at the top' for path in levels)}"
        )
    here = list(spot_at(model, loc[:-1]).kind.model_fields)
    there = f" (there are {', '.join(here)})"
    return f"there is no such field{nearest(name, here) or there}"


def _levels(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        inner = bare(field.annotation)
        while get_args(inner):
            inner = bare(get_args(inner)[1 if get_origin(inner) is dict else 0])
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _levels(inner, f"{path}.{name}" if path else name)


_WANTED: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "fields",
    "model_type": "fields",
    "tuple_type": "a list",
    "too_short": "a list of at least one",
}
_LIMITS: Final = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
}


def _sentence(document: Document, model: type[BaseModel], loc: Loc, detail: ErrorDetails) -> str:
    """pydantic's finding in our words."""
    kind, context = detail["type"], detail.get("ctx", {})
    spot = spot_at(model, loc)
    example = f", such as {in_yaml(spot.example)}" if spot.example is not None else ""
    found = _found(document, loc, detail["input"])
    if kind == "missing":
        write = f"{loc[-1]}: {in_yaml(spot.example)}"
        return f"is missing; write `{write}`" if spot.example is not None else "is missing"
    if kind == "literal_error":
        choices = [str(choice) for choice in get_args(spot.kind)]
        near = nearest(detail["input"], choices) if isinstance(detail["input"], str) else ""
        return f"must be one of {', '.join(choices)}, {found}{near}"
    if kind == "string_pattern_mismatch":
        return f"must begin with a small letter or digit and hold only those and . _ -, {found}"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}{example}, {found}"
    if kind in _LIMITS:
        plain = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
        return _LIMITS[kind].format_map(plain)
    return detail["msg"]


def _found(document: Document, loc: Loc, value: Any) -> str:
    if value is None:
        return "but is empty"
    if isinstance(value, dict):
        return "not fields"
    if isinstance(value, list | tuple):
        return "not a list" if value else "not an empty list"
    if isinstance(value, str):
        return f"not the text {quoted(value)}"
    kind = "" if isinstance(value, bool) else "the number "
    return f"not {kind}{document.raw.get(loc, value)}"
