"""`model` and `inputs`: where the model comes from and what it takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tvmflow.mistakes import wrong
from tvmflow.recipe._closed import Closed, enum, member, tupled
from tvmflow.yaml_positions import quoted

DTYPES: Final = (
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
MAX_EPOCH: Final = 9999
_MAX_ELEMENTS: Final = 1 << 31
_DIGEST: Final = r"^[0-9a-fA-F]{64}$"
# those that can be downloaded
_SCHEMES: Final = ("http", "https", "file")

_Dtype = Annotated[str, member(DTYPES, "a dtype"), enum(DTYPES)]


class MxnetSource(Closed):
    """An MXNet checkpoint, as `mx.model.load_checkpoint(prefix, epoch)` names it."""

    prefix: str = Field(
        min_length=1,
        examples=["models/digits"],
        description="Path of the checkpoint without `-symbol.json` and `-0000.params`, from the recipe's folder.",
    )
    epoch: int = Field(
        ge=0, le=MAX_EPOCH, examples=[10], description="The number in `prefix-NNNN.params`."
    )

    def paths(self, base: Path) -> tuple[Path, Path]:
        """The checkpoint's symbol and parameters; `base` is the recipe's folder."""
        return checkpoint(self.prefix, self.epoch, base)


class ModelSource(Closed):
    """Where the model comes from: exactly one of `mxnet` and `onnx`."""

    mxnet: MxnetSource | None = Field(
        default=None,
        examples=[{"prefix": "models/digits", "epoch": 10}],
        description="An MXNet checkpoint.",
    )
    onnx: str | None = Field(
        default=None,
        min_length=1,
        description="An ONNX file: a path from the recipe's folder, or a URL (then with `sha256`).",
    )
    sha256: str | None = Field(
        default=None,
        json_schema_extra={"pattern": _DIGEST},
        description="The sha256 of the ONNX file, 64 hexadecimal digits; checked, and required for a URL.",
    )

    @property
    def kind(self) -> str:
        """Which frontend reads it."""
        return "mxnet" if self.mxnet is not None else "onnx"

    @property
    def is_url(self) -> bool:
        """Whether the ONNX file has to be downloaded."""
        return self.onnx is not None and "://" in self.onnx

    @field_validator("sha256")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if len(value) != 64 or set(value) - set("0123456789abcdefABCDEF"):
            raise wrong(f"must be 64 hexadecimal digits, not the text {quoted(value)}")
        return value.lower()

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSource:
        if self.mxnet is not None and self.onnx is not None:
            raise wrong("needs exactly one of mxnet and onnx; both are given")
        if self.mxnet is None and self.onnx is None:
            raise wrong("needs exactly one of mxnet and onnx; neither is given")
        if self.mxnet is not None and self.sha256 is not None:
            raise wrong("goes with onnx, not with mxnet", "sha256")
        if self.onnx is not None and self.is_url:
            scheme = self.onnx.partition("://")[0]
            if scheme.lower() not in _SCHEMES:
                raise wrong(f"{quoted(scheme)} is none of {', '.join(_SCHEMES)}", "onnx")
            if self.sha256 is None:
                raise wrong(
                    "a model from a URL needs its sha256, so that it is always the same", "onnx"
                )
        return self


class InputSpec(Closed):
    """One input of the model."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(tupled)] = Field(
        examples=[[1, 3, 224, 224]],
        description="The size of each dimension; all are fixed, the batch too.",
    )
    dtype: _Dtype = Field(default="float32", description="The type of its elements.")
    range: Annotated[tuple[float, float] | None, BeforeValidator(tupled)] = Field(
        default=None,
        examples=[[-1.0, 1.0]],
        description="Lowest and highest value of seeded random inputs; by default 0 to 1, integers 0 and 1.",
    )

    @field_validator("shape")
    @classmethod
    def _check_size(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(value) > _MAX_ELEMENTS:
            raise wrong("has more than 2^31 elements")
        return value

    @field_validator("range", mode="before")
    @classmethod
    def _check_two(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) != 2:
            raise wrong(f"must be two numbers, such as [-1.0, 1.0], not {len(value)}")
        return value

    @field_validator("range")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise wrong("the first number must be below the second")
        return value


def checkpoint(prefix: str, epoch: int, base: Path) -> tuple[Path, Path]:
    return base / f"{prefix}-symbol.json", base / f"{prefix}-{epoch:04d}.params"
