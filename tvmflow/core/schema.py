"""The base class of pydantic models for YAML files, and shared field types."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from tvmflow.core.formatting import quoted
from tvmflow.core.named_files import find_invalid_name
from tvmflow.core.text import did_you_mean
from tvmflow.core.version import schema_url

_VERSION: Final = 1

NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]*$"
"""Pattern of the names of recipes, targets, variants and pipelines; FolderName excludes further names."""

SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

MAX_PATH_LENGTH: Final = 500
"""Maximum characters of a path in a recipe."""


def _add_descriptions(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the docstrings of a model and its fields to its JSON Schema, each on one line."""
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for base in reversed(model.__mro__):
        for name, text in _field_docstrings(base) if issubclass(base, ClosedModel) else ():
            # Class variables have docstrings, too, but are not fields.
            if name in model.model_fields:
                schema["properties"][name]["description"] = " ".join(text.split())


def _field_docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    try:
        [tree] = ast.parse(inspect.getsource(model)).body
    except (OSError, TypeError):
        # A class from `python -c` has no source.
        return
    for pair in itertools.pairwise(cast(ast.ClassDef, tree).body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                yield name, text


class ClosedModel(BaseModel):
    """A frozen model that is strict about types and rejects unknown fields.

    The docstring below a field is its description in the JSON Schema.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=_add_descriptions,
    )


def list_set_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields that the file sets explicitly."""
    return {name: getattr(model, name) for name in model.model_fields_set}


def field_error(text: str, *path: str | int) -> PydanticCustomError:
    """Return an error for validators; `path` leads from the validated value to the field."""
    return PydanticCustomError("field", "{text}", {"text": text, "path": path})


def check_folder_name(name: str) -> str:
    """Check that a name is valid for folders on every file system."""
    if find_invalid_name([name]) is not None:
        raise field_error(
            f"no folder can have the name {quoted(name)} on Windows; choose another one"
        )
    return name


FolderName = Annotated[str, AfterValidator(check_folder_name)]
"""A name that is also used for a folder."""


def first_field_error(error: ValidationError) -> tuple[str, tuple[str | int, ...]]:
    """Return text and path of the first `field_error` of a validation."""
    context = error.errors()[0]["ctx"]
    return context["text"], context["path"]


def check_choice(
    value: str,
    choices: Collection[str],
    noun: str,
    listed_by: str = "",
    meant: Callable[[str], Sequence[str] | None] | None = None,
) -> str:
    """Return the value if it is one of the choices; for `meant`, see `did_you_mean`.

    `noun` includes its article: "a dtype". The error lists all choices, or says how to list them (`listed_by`).
    """
    if value in choices:
        return value
    hint = listed_by or f"valid: {', '.join(sorted(choices))}"
    raise field_error(
        f"{quoted(value)} is not {noun}{did_you_mean(value, choices, meant=meant)} ({hint})"
    )


def one_of(
    choices: Collection[str],
    noun: str,
    listed_by: str = "",
    meant: Callable[[str], Sequence[str] | None] | None = None,
) -> AfterValidator:
    """Return a validator for `check_choice`."""
    return AfterValidator(lambda value: check_choice(value, choices, noun, listed_by, meant))


def schema_enum(choices: Collection[str]) -> FieldInfo:
    """Return field information that lists the choices in the JSON Schema, for editors."""
    info: FieldInfo = Field(json_schema_extra={"enum": list(choices)})
    return info


def published_schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    """Return the JSON Schema of a YAML file format, published as docs/NAME.schema.json."""
    return {"$schema": SCHEMA_DIALECT, "$id": schema_url(name), **model.model_json_schema()}


def to_tuple(value: Any) -> Any:
    """Convert a list to a tuple, for frozen models; leave other values to pydantic."""
    return tuple(value) if isinstance(value, list) else value


_T = TypeVar("_T")
YamlList: TypeAlias = Annotated[tuple[_T, ...], BeforeValidator(to_tuple)]
"""A YAML list, read as a tuple."""


def _check_version(value: Any) -> Any:
    # `true` and `1.0` equal 1 in Python, but are mistakes in a file.
    if type(value) is not int or value != _VERSION:
        raise field_error(f"this tvmflow reads only version {_VERSION}; write {_VERSION}")
    return value


FormatVersion = Annotated[Literal[1], BeforeValidator(_check_version)]
"""The version of the file format, the first field of recipes, pipelines and lock files."""
