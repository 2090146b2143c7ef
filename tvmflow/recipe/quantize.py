"""`quantize`: from a float model to one of integers, by calibration data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tvmflow.core.schema import ClosedModel, field_error, to_tuple

Method = Literal["minmax", "percentile", "entropy", "mse"]
"""The ways of choosing the range of a tensor by its histogram."""


class Quantize(ClosedModel):
    """The integers that weights and data become, and what they may cost."""

    data: str | None = Field(
        default=None,
        min_length=1,
        examples=["calibration.npz"],
        description="Calibration data: a path from the recipe's folder to an npz file with one array for each input, or to a "
        "folder of images, as of `verify.data`. Default: `verify.data`.",
    )
    samples: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        examples=[200],
        description="How many samples of the data are used: the first ones, or of images some of each folder. Default: up to 128.",
    )
    weights: Literal["int8", "int4", "none"] = Field(
        default="int8", description="What weights become; `none` leaves them float."
    )
    group_size: Literal[32, 64, 128] = Field(
        default=32,
        description="How many neighboring weights of int4 share a scale: more take less memory (4.5 bits a weight with 32, "
        "4.125 with 128), and lose more.",
    )
    activations: Literal["int8", "dynamic", "none"] = Field(
        default="int8",
        description="What the data of convolutions and matrix products, and the states of recurrent layers, become: "
        "`int8` with ranges of the calibration data; `dynamic` with ranges that each call computes, for matrix products; `none` leaves them float, so that only "
        "weights take less memory.",
    )
    method: Method = Field(
        default="mse",
        description="How the range of a tensor follows from its histogram: the whole range, one that leaves out the "
        "outermost values, or the one with the least divergence or the least squared error.",
    )
    max_accuracy_drop: float | None = Field(
        default=None,
        ge=0,
        le=100,
        examples=[0.5],
        description="Most percentage points of top-1 accuracy on `verify.data` that may be lost: the layers that cost most "
        "stay float until it holds.",
    )
    max_error: float | None = Field(
        default=None,
        gt=0,
        le=1,
        examples=[0.02],
        description="Largest root mean square of the error of an output, relative to that of the output: the layers that "
        "cost most stay float until it holds.",
    )
    skip: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(to_tuple)] = (
        Field(
            default=(),
            examples=[["head/*"]],
            description="Nodes of the model that stay float: patterns of their names, such as `head/*`.",
        )
    )

    @model_validator(mode="after")
    def _check_kinds(self) -> Quantize:
        if self.weights == "none":
            text = (
                "leaves nothing to quantize: leave `quantize` out"
                if self.activations == "none"
                else "needs `activations: none`: instructions multiply integers with integers"
            )
            raise field_error(text, "weights")
        if self.activations == "none" and self.data is not None and self.weights == "int8":
            raise field_error("is not read with `activations: none`; leave it out", "data")
        return self

    @property
    def needs_data(self) -> bool:
        """Return whether something is found out by running the float model."""
        limits = self.max_accuracy_drop is not None or self.max_error is not None
        return self.activations == "int8" or self.weights == "int4" or limits


class QuantizeOverrides(Quantize):
    """Overrides of `quantize` for a variant."""
