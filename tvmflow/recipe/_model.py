"""`model` and `inputs`: where the model comes from, and its inputs."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from tvmflow.core.formatting import quoted
from tvmflow.core.schema import ClosedModel, field_error, one_of, schema_enum, to_tuple
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._base import MAX_ELEMENTS, InputRequest
from tvmflow.frontends._inputs import scalars_of, shape_of_value
from tvmflow.recipe._image import ImageSpec
from tvmflow.runtime.images import ImageMismatch, Preprocessing

DTYPES: Final = (
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)

# A larger constant belongs in the model.
_MAX_CONSTANT_ELEMENTS: Final = 1 << 24
_VALUE_SCHEMA: Final = {
    "anyOf": [{"type": kind} for kind in ("number", "boolean", "array", "null")]
}

_Dtype = Annotated[str, one_of(DTYPES, "a dtype"), schema_enum(DTYPES)]

# pydantic lists the fields of the last base first.
_SOURCES: Final = tuple(frontend.SOURCE for frontend in reversed(FRONTENDS.values()))
_FIELDS: Final = dict.fromkeys(
    field for frontend in FRONTENDS.values() for field in frontend.SOURCE.model_fields
)


def _owners(field: str) -> list[str]:
    """Return the frontends that have a field; several may share one."""
    return [kind for kind, entry in FRONTENDS.items() if field in entry.SOURCE.model_fields]


class ModelSource(*_SOURCES):  # type: ignore[misc]  # mypy does not follow computed bases
    """The source of the model. Each frontend brings its own fields; a recipe uses exactly one frontend."""

    @property
    def kind(self) -> str:
        """Return the name of the frontend that reads the model."""
        return next(kind for kind in FRONTENDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSource:
        kinds = [kind for kind in FRONTENDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            text = (
                f"needs exactly one of {', '.join(FRONTENDS)}, not {' and '.join(kinds) or 'none'}"
            )
            raise field_error(text)
        for field in _FIELDS:
            if getattr(self, field) is not None and kinds[0] not in _owners(field):
                raise field_error(f"is only allowed with {' or '.join(_owners(field))}", field)
        return self


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


class InputSpec(ClosedModel):
    """One input of the model. Fields that are left out stay as in the model."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(to_tuple)] = (
        Field(
            default=None,
            examples=[[1, 3, 224, 224]],
            description="Size of each dimension, including the batch. Default: as in the model, which may leave sizes open.",
        )
    )
    dtype: _Dtype | None = Field(
        default=None,
        description="Element type. Default: as in the model, or float32 if the model does not say.",
    )
    range: Annotated[tuple[float, float] | None, BeforeValidator(to_tuple)] = Field(
        default=None,
        examples=[[-1.0, 1.0]],
        description="Minimum and maximum of random inputs. Default: 0 to 1; integers are 0 or 1.",
    )
    value: Annotated[Any, BeforeValidator(_to_tuples), WithJsonSchema(_VALUE_SCHEMA)] = Field(
        default=None,
        examples=[16000],
        description="Binds the input to a constant, a number or nested lists of them, which removes it from the library. "
        "A number with `shape` fills that shape.",
    )
    image: ImageSpec | None = Field(
        default=None,
        examples=[{"resize": 256, "crop": 224}],
        description="How an image becomes this input: see [images.md](images.md).",
    )

    def request(self, name: str) -> InputRequest:
        """Return what the recipe says of the input of this name."""
        image = self.image.model_dump(mode="json", exclude_unset=True) if self.image else None
        return InputRequest(name, self.shape, self.dtype, self.value, self.range, image)

    @field_validator("shape")
    @classmethod
    def _check_size(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and math.prod(value) > MAX_ELEMENTS:
            raise field_error("has more than 2^31 elements")
        return value

    @field_validator("range", mode="before")
    @classmethod
    def _check_length(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) != 2:
            raise field_error(f"must be two numbers, such as [-1.0, 1.0], not {len(value)}")
        return value

    @field_validator("range")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise field_error("the first number must be less than the second")
        return value

    @field_validator("value")
    @classmethod
    def _check_value(cls, value: Any) -> Any:
        if value is None:
            return value
        for scalar in scalars_of(value):
            if not isinstance(scalar, bool | int | float) or not math.isfinite(scalar):
                text = quoted(str(scalar))
                raise field_error(f"must be a number, or lists of numbers, not {text}")
        try:
            shape = shape_of_value(value)
        except ValueError as error:
            raise field_error(str(error)) from None
        if 0 in shape:
            raise field_error("is empty")
        return value

    @model_validator(mode="after")
    def _check_binding(self) -> InputSpec:
        if self.value is None:
            return self
        for field, noun in (("range", "random inputs"), ("image", "images")):
            if getattr(self, field) is not None:
                raise field_error(f"is for {noun}, and the input has a value", field)
        shape = shape_of_value(self.value)
        if self.shape is not None and shape not in ((), self.shape):
            text = f"has the shape {list(shape)}, and `shape` is {list(self.shape)}"
            raise field_error(text, "value")
        if math.prod(self.shape or ()) > _MAX_CONSTANT_ELEMENTS:
            raise field_error("has more than 2^24 elements, the most of a constant", "shape")
        return self

    @model_validator(mode="after")
    def _check_image(self) -> InputSpec:
        if self.image is not None and self.shape is not None and self.dtype is not None:
            spec = TensorSpec("", self.shape, self.dtype)
            try:
                Preprocessing.of(self.image.to_fields(), spec)
            except ImageMismatch as error:
                path = filter(None, ["image", error.field])
                raise field_error(str(error), *path) from None
        return self
