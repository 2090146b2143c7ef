"""`verify`: what the library is compared with, and how closely it must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tvmflow.core.schema import ClosedModel, field_error, one_of, to_tuple
from tvmflow.core.text import parse_latency, parse_size
from tvmflow.frontends.peers import PEERS
from tvmflow.recipe.tune import MAX_SEED

AUTO: Final = "auto"
"""All runtimes that can run a model and are installed."""
FIXED: Final = "fixed"
"""In the place of a runtime: libraries of one size each, beside one whose sizes each call chooses."""


QUANTITIES: Final[Mapping[str, Callable[[str], float]]] = {
    "max_latency": parse_latency,
    "max_memory": parse_size,
    "max_size": parse_size,
}
"""The gates that are quantities with a unit, and what reads them."""


def _to_list(value: Any) -> Any:
    return (AUTO,) if value == AUTO else to_tuple(value)


class Verify(ClosedModel):
    """The checks of a library: what it is compared with, and how closely it must agree."""

    against: Literal["reference", "none"] = Field(
        default="reference",
        description="`reference`: the framework that the model came from. `none`: nothing; the bundle then says that it "
        "was not verified.",
    )
    data: str | None = Field(
        default=None,
        min_length=1,
        description="A path from the recipe's folder: an npz file with one array for each input, whose first axis is the "
        "samples, or where that is something else in the model, an axis before it (named `0/INPUT`, `1/INPUT`, … where they have [several sizes](howto/sizes.md)); or images, as a folder or a table `file,label` (see [images.md](images.md)). Default: random inputs "
        "from `seed`.",
    )
    label: str = Field(
        default="label", description="Name of the array of labels in `data`, for accuracy."
    )
    rtol: float | None = Field(
        default=None,
        ge=0,
        description="Relative tolerance of an element. Default: 0.001; 0.01 for float16, bfloat16 and quantized models.",
    )
    atol: float | None = Field(
        default=None,
        ge=0,
        description="Absolute tolerance of an element, whatever the size of the output. Default: a fraction of the "
        "output's largest value: see [precision.md](precision.md).",
    )
    min_accuracy: float | None = Field(
        default=None, ge=0, le=1, description="Minimum top-1 accuracy on `data`."
    )
    max_latency: str | None = Field(
        default=None,
        examples=["8 ms"],
        description="Maximum latency of one call, such as `8 ms`. See [gates](howto/gates.md).",
    )
    max_memory: str | None = Field(
        default=None,
        examples=["60 MB"],
        description="Maximum memory of a program that runs the model, such as `60 MB`: the library with its weights, and "
        "what a context allocates.",
    )
    max_size: str | None = Field(
        default=None,
        examples=["5 MB"],
        description="Maximum size of the library's file, such as `5 MB`.",
    )
    max_vs: dict[Annotated[str, one_of(PEERS, "a runtime")], Annotated[float, Field(gt=0)]] = Field(
        default={},
        examples=[{"onnxruntime": 1.0}],
        description="Maximum latency relative to other runtimes, by their names in `compare`, which they are added to; "
        "`{onnxruntime: 1.0}`: not slower than ONNX Runtime. Both are measured in turns.",
    )
    samples: int = Field(
        default=3, ge=1, le=10_000, description="Number of random batches, without `data`."
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the random inputs.")
    repeat: int = Field(default=10, ge=1, le=10_000, description="Number of latency measurements.")
    compare: Annotated[
        tuple[Annotated[str, one_of((*PEERS, FIXED, AUTO), "a runtime")], ...],
        BeforeValidator(_to_list),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "const": AUTO},
                    {"type": "array", "items": {"type": "string", "enum": [*PEERS, FIXED]}},
                ]
            }
        ),
    ] = Field(
        default=(),
        examples=[["onnxruntime", "openvino"]],
        description="Other runtimes to compare with the reference and to time in turns with the library, with the same "
        "inputs and threads: a list of `onnxruntime`, `openvino`, `tensorrt` and `pytorch`, which must be installed, or "
        "`auto` for all that are installed. `fixed` builds a library for each of the sizes that one with "
        "[dimensions](howto/sizes.md) is verified at. See [comparison.md](comparison.md).",
    )
    run_on: Literal["auto", "local", "qemu", "rpc", "chromium"] = Field(
        default="auto",
        description="Where the library runs. `local`: on this machine. `qemu`: on this machine under emulation, without a "
        "latency. `rpc`: on a device of the target's `remote`. `chromium`: a package for browsers (output `web`) in headless "
        "Chromium, without a latency. `auto`: same as `local`.",
    )

    @field_validator("compare")
    @classmethod
    def _check_compare(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise field_error(f"duplicate runtime '{name}'", index)
            if name == AUTO and len(value) > 1:
                raise field_error("stands alone: it means all runtimes that are installed", index)
        return value

    @field_validator(*QUANTITIES, mode="before")
    @classmethod
    def _check_quantity(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return None
        try:
            quantity = QUANTITIES[str(info.field_name)](str(value))
        except ValueError as error:
            raise field_error(str(error)) from None
        if quantity <= 0:
            raise field_error("must be above 0; leave it out for no limit")
        return value

    @model_validator(mode="after")
    def _check_accuracy(self) -> Verify:
        if self.min_accuracy is not None and self.data is None:
            raise field_error("needs labelled data; set verify.data", "min_accuracy")
        return self


class VerifyOverrides(Verify):
    """Overrides of `verify` for a target or a variant."""

    @model_validator(mode="after")
    def _check_accuracy(self) -> VerifyOverrides:
        """Accept a gate without data, which the recipe's `verify` may have."""
        return self
