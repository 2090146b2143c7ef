"""`model`, `dimensions` and `inputs`: the source of the model, its dynamic shapes, and its inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from tvmflow.core.dimensions import WrongSize, largest_shape, list_names
from tvmflow.core.formatting import quoted
from tvmflow.core.schema import ClosedModel, YamlList, field_error, one_of, schema_enum, to_tuple
from tvmflow.core.types import Dimension, Json, Size, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import MAX_ELEMENTS, InputRequest
from tvmflow.frontends.inputs import (
    MAX_DIMENSION_NAME,
    SIZE,
    is_dimension_name,
    scalars_of,
    shape_of_value,
)
from tvmflow.runtime.images import (
    COLOURS,
    INTERPOLATIONS,
    LAYOUTS,
    MAX_SIZE,
    ImageMismatch,
    Preprocessing,
)

DTYPES: Final = (
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)

# Larger constants belong in the model.
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
    return [kind for kind, entry in FRONTENDS.items() if field in entry.SOURCE.model_fields]


class ModelSource(*_SOURCES):  # type: ignore[misc]  # mypy does not follow computed bases
    """The source of the model: exactly one of `onnx`, `pytorch`, `tflite` and `mxnet`."""

    @property
    def kind(self) -> str:
        """Return the name of the frontend that reads the model."""
        return next(kind for kind in FRONTENDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSource:
        kinds = [kind for kind in FRONTENDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            named = " and ".join(kinds) or "none"
            raise field_error(f"needs exactly one of {', '.join(FRONTENDS)}, not {named}")
        for field in _FIELDS:
            if getattr(self, field) is not None and kinds[0] not in _owners(field):
                raise field_error(f"is only allowed with {' or '.join(_owners(field))}", field)
        return self


_MAX_SIZE: Final = (1 << 31) - 1


def _check_dimension_name(name: str) -> str:
    if not is_dimension_name(name):
        raise field_error(
            "must start with a letter or _, contain only letters, digits and _, have at most "
            f"{MAX_DIMENSION_NAME} characters, and not be a word of Python's, nor `min`, `max` or `{SIZE}`"
        )
    return name


DimensionName = Annotated[str, AfterValidator(_check_dimension_name)]

_Sizes = YamlList[Annotated[int, Field(ge=1)]]


class DimensionSpec(ClosedModel):
    """A dynamic dimension: each call of the library chooses a size in its range."""

    min: int = Field(default=1, ge=0, examples=[1])
    """Smallest size; 0 for tensors that may be empty. Default: `multiple_of`."""
    max: int = Field(ge=1, le=_MAX_SIZE, examples=[512])
    """Largest size."""
    multiple_of: int = Field(default=1, ge=1, examples=[8])
    """Divisor of every size, including `min` and `max`."""
    tune_at: _Sizes = Field(default=(), max_length=16, examples=[[16, 128, 512]])
    """Tuning sizes. The library is tuned and verified at each; rules optimize for the largest. Default: one size in the
    middle of the range."""

    @model_validator(mode="before")
    @classmethod
    def _add_min(cls, value: Any) -> Any:
        """Set the default of `min`: the smallest multiple."""
        if isinstance(value, dict) and "min" not in value:
            multiple = value.get("multiple_of")
            if type(multiple) is int and multiple >= 1:
                return {**value, "min": multiple}
        return value

    @model_validator(mode="after")
    def _check_range(self) -> DimensionSpec:
        multiple = self.multiple_of
        for field in ("min", "max"):
            size = getattr(self, field)
            if size % multiple:
                near = size // multiple * multiple
                choices = " or ".join(str(n) for n in (near, near + multiple) if n)
                raise field_error(
                    f"is {size}, which is not a multiple of {multiple} (`multiple_of`); write {choices}",
                    field,
                )
        if self.min > self.max:
            raise field_error(f"is {self.min}, which is larger than `max`, {self.max}", "min")
        if self.min == self.max:
            text = f"is the same as `min`: write {self.max} in the shapes, in place of a dimension"
            raise field_error(text, "max")
        for index, size in enumerate(self.tune_at):
            if size in self.tune_at[:index]:
                raise field_error(f"{size} is there twice", "tune_at", index)
            if not self.min <= size <= self.max:
                text = f"is {size}, and the sizes are {self.min} to {self.max}"
                raise field_error(text, "tune_at", index)
            if size % multiple:
                text = f"is {size}, which is not a multiple of {multiple} (`multiple_of`)"
                raise field_error(text, "tune_at", index)
        return self

    def named(self, name: str) -> Dimension:
        """Return the dimension under its name."""
        tune_at = tuple(sorted(self.tune_at))
        return Dimension(name, self.min, self.max, self.multiple_of, tune_at=tune_at)


def _read_size(value: Any) -> Any:
    if isinstance(value, str) and _is_size(value):
        return value
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    if value < 1:
        raise PydanticKnownError("greater_than_equal", {"ge": 1})
    return value


def _is_size(text: str) -> bool:
    try:
        names = list_names(text)
    except WrongSize:
        return False
    return bool(names) and all(map(is_dimension_name, names))


_SIZE_SCHEMA: Final = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        # a name, or an expression of names and whole numbers
        {"type": "string", "pattern": r"^[A-Za-z_(0-9][A-Za-z0-9_ +*/%(),-]*$"},
    ]
}
# A union of types would report each mistake once per member.
_InputSize = Annotated[Any, BeforeValidator(_read_size), WithJsonSchema(_SIZE_SCHEMA)]


# Limited digits, as for all numbers in recipes, keep the quotient finite.
_FRACTION: Final = re.compile(r"(\d{1,100})/(\d{1,100})")


def _read_fraction(value: Any) -> Any:
    """Convert a fraction such as `1/255` to a number."""
    match = _FRACTION.fullmatch(value) if isinstance(value, str) else None
    if match and int(match[2]):
        return int(match[1]) / int(match[2])
    if type(value) not in (int, float):
        raise field_error("must be a number or a fraction, such as 1/255")
    return value


def _read_length(value: Any) -> Any:
    """Convert a length, or [height, width], to a tuple."""
    lengths = value if isinstance(value, list | tuple) else [value]
    if len(lengths) not in (1, 2) or not all(
        type(length) is int and 1 <= length <= MAX_SIZE for length in lengths
    ):
        raise field_error(f"must be a number or [height, width], from 1 to {MAX_SIZE}")
    return tuple(lengths)


def _read_numbers(value: Any) -> Any:
    """Convert a number, or one number per channel, to a tuple."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or not all(type(number) in (int, float) for number in numbers):
        raise field_error("must be a number, or a list with one for each channel")
    return tuple(map(float, numbers))


_INTEGER: Final = {"type": "integer", "minimum": 1, "maximum": MAX_SIZE}
_PAIR: Final = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_NUMBERS: Final = {"type": "array", "items": {"type": "number"}, "minItems": 1}
# A union of types would report each mistake once per member.
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
    """Image preprocessing of an input: resize as in Pillow, crop or pad, then normalize."""

    resize: _Length | None = Field(default=None, examples=[256, [224, 224]])
    """One number: length of the shorter side, used with `crop`. `[height, width]`: exact size. Default without `crop`:
    the size of the input."""
    crop: _Length | None = Field(default=None, examples=[224])
    """Size of the center crop; must be the size of the input."""
    pad: int | None = Field(default=None, ge=0, le=255, examples=[114])
    """Keep the aspect ratio and fill the borders with this value (letterbox)."""
    interpolation: Annotated[
        str, one_of(INTERPOLATIONS, "an interpolation"), schema_enum(INTERPOLATIONS)
    ] = "bilinear"
    """Interpolation when resizing, with antialiasing."""
    colour: Annotated[str, one_of(COLOURS, "a colour"), schema_enum(list(COLOURS))] | None = None
    """Channel order. Default: RGB, or GRAY for one channel."""
    layout: Annotated[str, one_of(LAYOUTS, "a layout"), schema_enum(LAYOUTS)] | None = None
    """Dimension order. Default: the one in which the shape has 1 or 3 channels."""
    scale: _Scale | None = Field(default=None, examples=["1/255"])
    """Factor for pixel values from 0 to 255: a number or a fraction. Default: 1/255; 1 for integer inputs."""
    mean: _PerChannel | None = Field(default=None, examples=[[0.485, 0.456, 0.406]])
    """Subtracted after `scale`: a number, or one per channel. Default: 0."""
    std: _PerChannel | None = Field(default=None, examples=[[0.229, 0.224, 0.225]])
    """Divisor after `mean`: a number, or one per channel. Default: 1."""

    def check_tensor(self, tensor: TensorSpec, *loc: str) -> None:
        """Check that preprocessed images match the input `tensor`; `loc` is its path in the recipe."""
        try:
            Preprocessing.of(self.to_fields(), tensor)
        except ImageMismatch as error:
            path = filter(None, ["image", error.field])
            raise field_error(str(error), *loc, *path) from None

    def to_fields(self) -> dict[str, Json]:
        """Return the settings that differ from the defaults."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in fields.items()
        }


def _to_tuples(value: Any) -> Any:
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


class InputSpec(ClosedModel):
    """One input of the model. Omitted fields keep the model's values."""

    shape: YamlList[_InputSize] | None = Field(default=None, examples=[[1, 3, 224, 224]])
    """Shape, including the batch axis: numbers, names of `dimensions`, or expressions of names (+ - * // % min max).
    Default: the model's shape; required where the model has dynamic dimensions or no shapes."""
    dtype: _Dtype | None = None
    """Element type. Default: the model's, or float32 if the model has none."""
    range: Annotated[tuple[float, float] | None, BeforeValidator(to_tuple)] = Field(
        default=None, examples=[[-1.0, 1.0]]
    )
    """Minimum and maximum of random inputs. Default: normal distribution with standard deviation 1 and other magnitudes
    ([precision.md](precision.md)); integers 0 or 1; indices within their axis; divisors -9 to 9 without 0."""
    value: Annotated[Any, BeforeValidator(_to_tuples), WithJsonSchema(_VALUE_SCHEMA)] = Field(
        default=None, examples=[16000]
    )
    """Constant that replaces the input: a number or nested lists. A number with `shape` fills that shape."""
    image: ImageSpec | None = Field(default=None, examples=[{"resize": 256, "crop": 224}])
    """[Image preprocessing](images.md)."""

    def request(self, name: str, dimensions: Mapping[str, DimensionSpec]) -> InputRequest:
        """Return the request for the input `name`."""
        image = self.image.model_dump(mode="json", exclude_unset=True) if self.image else None
        used = tuple(dimensions[name].named(name) for name in self.dimension_names)
        return InputRequest(
            name=name,
            shape=None if self.shape is None else largest_shape(self.shape, used),
            dtype=self.dtype,
            value=self.value,
            range=self.range,
            image=image,
            sizes=self.shape or () if used else (),
            dimensions=used,
        )

    @property
    def dimension_names(self) -> list[str]:
        """The distinct names of dimensions in the shape."""
        return list(dict.fromkeys(name for size in self.shape or () for name in list_names(size)))

    @field_validator("shape")
    @classmethod
    def _check_size(cls, value: tuple[Size, ...] | None) -> tuple[Size, ...] | None:
        sizes = [size for size in value or () if isinstance(size, int)]
        if math.prod(sizes) > MAX_ELEMENTS:
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
        if value is not None and not value[0] <= value[1]:
            raise field_error("the first number must not be larger than the second")
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
        for axis, size in enumerate(self.shape or ()):
            if isinstance(size, str):
                text = (
                    f"is the dimension {size}, and an input with a value has sizes that are numbers"
                )
                raise field_error(text, "shape", axis)
        shape = shape_of_value(self.value)
        if self.shape is not None and shape not in ((), self.shape):
            text = f"has the shape {list(shape)}, and `shape` is {list(self.shape)}"
            raise field_error(text, "value")
        if math.prod(self.shape or ()) > _MAX_CONSTANT_ELEMENTS:
            raise field_error("has more than 2^24 elements, the most of a constant", "shape")
        return self

    @model_validator(mode="after")
    def _check_image(self) -> InputSpec:
        if self.image and self.shape is not None and self.dtype and not self.dimension_names:
            self.image.check_tensor(TensorSpec("", self.shape, self.dtype))
        return self
