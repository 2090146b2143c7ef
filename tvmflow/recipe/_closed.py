"""What all of the language is made of: closed, frozen models, names that must exist, versions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tvmflow.mistakes import one_of, wrong

_VERSION: Final = 1
NAME: Final = r"^[a-z0-9][a-z0-9._-]*$"
"""What recipes, targets and pipelines may be called."""

MAX_PATH: Final = 500
"""Signs of a path, in a recipe and in a message."""


def tupled(value: Any) -> Any:
    """YAML's lists as what a frozen value holds."""
    return tuple(value) if isinstance(value, list) else value


def member(valid: Any, what: str, all_of_them: str = "") -> AfterValidator:
    """A word that is one of these, or else told with the nearest of them."""
    return AfterValidator(lambda value: one_of(value, valid, what, all_of_them))


def enum(valid: Any) -> Any:
    """The same for editors."""
    return Field(json_schema_extra={"enum": list(valid)})


def _check_version(value: Any) -> Any:
    # true and 1.0 are equal to 1, and are mistakes all the same
    if type(value) is not int or value != _VERSION:
        raise wrong(f"this tvmflow reads version {_VERSION} only; write {_VERSION}")
    return value


Version = Annotated[Literal[1], BeforeValidator(_check_version)]
"""The language's version, which every file begins with."""


class Closed(BaseModel):
    """Frozen, strict about types, and closed: an unknown field is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
