"""`inputs.NAME.image`: how an image becomes an input."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from tvmflow.core.schema import ClosedModel, field_error, one_of, schema_enum
from tvmflow.core.types import Json
from tvmflow.runtime.images import COLOURS, LAYOUTS, MAX_SIZE
from tvmflow.runtime.resampling import INTERPOLATIONS

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
    """The preprocessing of images for an input: resized as Pillow does it, then cropped or padded, then scaled."""

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
