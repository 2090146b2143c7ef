"""`model` and `inputs`: where the model comes from, and its inputs."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from tvmflow.core.formatting import quoted
from tvmflow.core.schema import ClosedModel, field_error, one_of, schema_enum, to_tuple
from tvmflow.core.types import Json, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import MAX_ELEMENTS, InputRequest
from tvmflow.frontends.inputs import scalars_of, shape_of_value
from tvmflow.runtime.images import COLOURS, LAYOUTS, MAX_SIZE, ImageMismatch, Preprocessing
from tvmflow.runtime.resampling import INTERPOLATIONS

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
        return InputRequest(
            name=name,
            shape=self.shape,
            dtype=self.dtype,
            value=self.value,
            range=self.range,
            image=image,
        )

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


# ---------------------------------------------------------------- image
# `inputs.NAME.image`: how an image becomes an input.


# As many digits as a number in a recipe may have: any two of these have a quotient.
_FRACTION: Final = re.compile(r"(\d{1,100})/(\d{1,100})")


def _read_fraction(value: Any) -> Any:
    """Return the number that a fraction stands for: `1/255` has no decimal number."""
    match = _FRACTION.fullmatch(value) if isinstance(value, str) else None
    if match and int(match[2]):
        return int(match[1]) / int(match[2])
    if type(value) not in (int, float):
        raise field_error("must be a number or a fraction, such as 1/255")
    return value


def _read_length(value: Any) -> Any:
    """Return a length, or height and width, as a tuple."""
    lengths = value if isinstance(value, list | tuple) else [value]
    if len(lengths) not in (1, 2) or not all(
        type(length) is int and 1 <= length <= MAX_SIZE for length in lengths
    ):
        raise field_error(f"must be a number or [height, width], from 1 to {MAX_SIZE}")
    return tuple(lengths)


def _read_numbers(value: Any) -> Any:
    """Return a number for all channels, or one for each, as a tuple."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(type(number) in (int, float) for number in numbers):
        raise field_error("must be a number, or a list with one for each channel")
    return tuple(map(float, numbers))


_INTEGER: Final = {"type": "integer", "minimum": 1, "maximum": MAX_SIZE}
_PAIR: Final = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_NUMBERS: Final = {"type": "array", "items": {"type": "number"}, "minItems": 1}
# A union of types would report each mistake once for each of them.
_Length = Annotated[
    tuple[int, ...], BeforeValidator(_read_length), WithJsonSchema({"anyOf": [_INTEGER, _PAIR]})
]
_PerChannel = Annotated[
    tuple[float, ...],
    BeforeValidator(_read_numbers),
    WithJsonSchema({"anyOf": [{"type": "number"}, _NUMBERS]}),
]
_Scale = Annotated[
    float,
    BeforeValidator(_read_fraction),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\d+/\d+$"}]}),
]


class ImageSpec(ClosedModel):
    """The preprocessing of images for an input.

    They are resized as Pillow does it, then cropped or padded, then scaled.
    """

    resize: _Length | None = Field(
        default=None,
        examples=[256, [224, 224]],
        description="A number: the length of the shorter side, with `crop`. `[height, width]`: that size exactly. "
        "Default: the size of the input, without `crop`.",
    )
    crop: _Length | None = Field(
        default=None,
        examples=[224],
        description="The size of the middle that is cut out; it must be that of the input.",
    )
    pad: int | None = Field(
        default=None,
        ge=0,
        le=255,
        examples=[114],
        description="Keep the aspect ratio, and fill bars on both sides with this level (letterbox).",
    )
    interpolation: Annotated[
        str, one_of(INTERPOLATIONS, "an interpolation"), schema_enum(INTERPOLATIONS)
    ] = Field(default="bilinear", description="How images are resized, with antialiasing.")
    colour: Annotated[str, one_of(COLOURS, "a colour"), schema_enum(list(COLOURS))] | None = Field(
        default=None, description="The order of channels. Default: RGB, or GRAY for one channel."
    )
    layout: Annotated[str, one_of(LAYOUTS, "a layout"), schema_enum(LAYOUTS)] | None = Field(
        default=None,
        description="The order of dimensions. Default: the one in which the shape has 1 or 3 channels.",
    )
    scale: _Scale | None = Field(
        default=None,
        examples=["1/255"],
        description="The factor for levels from 0 to 255: a number or a fraction. Default: 1/255; 1 for integers.",
    )
    mean: _PerChannel | None = Field(
        default=None,
        examples=[[0.485, 0.456, 0.406]],
        description="Subtracted after `scale`: a number, or one for each channel. Default: 0.",
    )
    std: _PerChannel | None = Field(
        default=None,
        examples=[[0.229, 0.224, 0.225]],
        description="The divisor after that: a number, or one for each channel. Default: 1.",
    )

    def to_fields(self) -> dict[str, Json]:
        """Return the settings that are set."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in fields.items()
        }
