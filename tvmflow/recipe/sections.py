"""The sections `tune`, `kernels`, `verify`, `quantize` of recipes; `release`, `retune` of pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tvmflow.compiler.options import Precision
from tvmflow.compiler.passes import OPERATORS
from tvmflow.core.formatting import quoted
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.schema import (
    MAX_PATH_LENGTH,
    ClosedModel,
    check_choice,
    field_error,
    one_of,
    schema_enum,
    to_tuple,
)
from tvmflow.core.text import parse_latency, parse_size
from tvmflow.frontends.peers import PEERS

MAX_SEED: Final = (1 << 31) - 1

STRATEGIES: Final = ("evolutionary", "replay-trace")
# Names that users of AutoTVM know, and what they are called here.
_AUTOTVM_STRATEGIES: Final = {
    "ga": "evolutionary",
    "genetic": "evolutionary",
    "random": "replay-trace",
    "gridsearch": "replay-trace",
    "xgb": "evolutionary (and cost_model: xgb)",
}


# The libraries that choices are measured in take as long as such a budget.
_MIN_TRIALS: Final = 128
_MIN_MINUTES: Final = 2.0


class Tune(ClosedModel):
    """The budget of the search for fast kernels, and the way of measuring them."""

    trials: int = Field(
        default=0,
        ge=0,
        le=UNLIMITED_TRIALS,
        description="Total number of measurements; 0: no search. Default with `minutes`: no limit.",
    )
    minutes: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Maximum time to search for one target, including the time that earlier runs spent on its kernels; "
        "then the best schedules so far are used.",
    )
    deliver_every: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Deliver the best library so far when the search begins, and then each time after so many minutes of "
        "searching.",
    )
    trials_per_task: int | None = Field(
        default=None,
        ge=1,
        le=UNLIMITED_TRIALS,
        description="Maximum number of measurements for one kernel.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=UNLIMITED_TRIALS,
        description="Stop tuning a kernel after this many measurements without a gain of `min_gain`. "
        "Default: when what it may still gain is too little to be shown.",
    )
    min_gain: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Smallest relative improvement that counts for `patience`.",
    )
    only: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] = Field(
        default=(),
        examples=[["conv2d", "fused_dense*"]],
        description="Tune only these kernels: operators, or patterns of kernel names.",
    )
    skip: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] = Field(
        default=(),
        examples=[["softmax"]],
        description="Do not tune these kernels: operators, or patterns of kernel names.",
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the search.")
    strategy: str = Field(
        default="evolutionary",
        json_schema_extra={"enum": list(STRATEGIES)},
        description="Search strategy; `replay-trace` is random search.",
    )
    cost_model: Literal["xgb", "mlp", "random"] = Field(
        default="xgb", description="Model that predicts which candidates are worth measuring."
    )
    number: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Calls in one repeat; 0: as many as `min_repeat_ms` takes.",
    )
    repeat: int = Field(default=3, ge=1, le=1000, description="Repeats of one measurement.")
    min_repeat_ms: int = Field(
        default=40, ge=0, le=60_000, description="Minimum duration of a repeat, in milliseconds."
    )
    trial_timeout_s: float = Field(
        default=30.0, gt=0, le=86_400, description="Seconds after which a trial counts as failed."
    )
    flush_cache: bool = Field(
        default=False,
        description="Empty the CPU caches before each repeat, as other kernels do in a real inference.",
    )
    finalists: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Number of a kernel's best trials that are measured again.",
    )
    choices: bool = Field(
        default=True,
        description="Also measure how else operators can be computed (3×3 convolutions directly, or by Winograd's method with tiles of 2×2 or 4×4; matrix products with other padding), if the budget is at "
        "least 128 trials, or two minutes.",
    )
    min_coverage: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Minimum share of the time that is spent in kernels with a schedule, tuned or from a rule.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Minimum speed of the library relative to the untuned one.",
    )

    @property
    def measures_choices(self) -> bool:
        """True if the budget allows for measuring how else operators can be computed."""
        is_long = self.minutes is None or self.minutes >= _MIN_MINUTES
        return self.choices and self.trials >= _MIN_TRIALS and is_long

    @model_validator(mode="before")
    @classmethod
    def _drop_trial_limit(cls, value: Any) -> Any:
        """Set no limit in trials where there is a limit in minutes only."""
        if isinstance(value, dict) and "minutes" in value and "trials" not in value:
            return {**value, "trials": UNLIMITED_TRIALS}
        return value

    @model_validator(mode="after")
    def _check_gates(self) -> Tune:
        for gate in ("min_coverage", "min_speedup"):
            if not self.trials and getattr(self, gate) is not None:
                raise field_error("needs trials; without a search nothing is tuned", gate)
        return self

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        if value in _AUTOTVM_STRATEGIES:
            raise field_error(f"'{value}' is called {_AUTOTVM_STRATEGIES[value]} in tvmflow")
        return check_choice(value, STRATEGIES, "a strategy")


class TuneOverrides(Tune):
    """Per-target overrides of `tune`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_trial_limit(cls, value: Any) -> Any:
        """Keep the trials of the recipe where an override sets minutes only."""
        return value

    @model_validator(mode="after")
    def _check_gates(self) -> TuneOverrides:
        """Accept a gate without trials, which the recipe's `tune` may have."""
        return self


# ---------------------------------------------------------------- kernels
# `kernels`: how operators become kernels.


_Operator = Annotated[
    str, one_of(OPERATORS, "an operator with a blocked layout"), schema_enum(sorted(OPERATORS))
]


Runtime = Literal["auto", "c", "vm"]
"""What executes a library: C code that is part of it, TVM's virtual machine, or whatever the model allows."""


class Kernels(ClosedModel):
    """The way from operators to kernels.

    Everything except `precision` is for CPUs; the defaults are the fastest, the other values are
    for comparison.
    """

    precision: Precision = Field(
        default="model",
        description="`model`: the types of the model. `mixed`: the weights of convolutions and matrix multiplications are "
        "float16, and on a GPU also the data that they are multiplied with; accumulation, inputs and outputs keep "
        "their types. `float16`: data, weights and sums of convolutions and matrix multiplications are float16, on ARM "
        "CPUs that compute it. `bfloat16`: weights and data of convolutions and matrix multiplications are rounded to bfloat16, and "
        "accumulated in float32, on CPUs with instructions for that. See [precision.md](precision.md).",
    )
    layout: Literal["blocked", "plain"] = Field(
        default="blocked",
        description="`blocked`: convolutions, and the operators between them, use the layout `NCHW[x]c`, where x is the "
        "vector length of the target. `plain`: they use the layout of the model.",
    )
    weights: Literal["packed", "plain"] = Field(
        default="packed",
        description="`packed`: the weights of matrix multiplications are stored in columns of one vector each when the "
        "library is built. `plain`: they are stored as in the model.",
    )
    plain: list[_Operator] = Field(
        default=[],
        description="Operators that keep the layout and weights of the model, whatever `layout` and `weights` say.",
    )
    winograd: Literal["auto", 0, 2, 4] = Field(
        default="auto",
        description="Largest tile of the Winograd algorithm, for blocked 3×3 convolutions with stride 1 (on 64-bit ARM also "
        "2); each layer has the one that is estimated to be fastest, or is computed directly. `2`: as accurate as the direct computation. "
        "`4`: faster for large images, and five times less accurate. `0`: all are computed directly. "
        "`auto`: `4`, but `2` with another `precision` than that of the model on CPUs other than 64-bit ARM.",
    )
    math: Literal["vector", "libm"] = Field(
        default="vector",
        description="`vector`: exp, log, sigmoid, tanh, erf, sin and cos are computed with vector instructions, accurate to "
        "8 units in the last place; sin and cos of numbers below 2³¹. `libm`: the C library is called.",
    )
    vector_bits: Literal[128, 256, 512] | None = Field(
        default=None,
        description="Width of vectors in bits, at most the widest of the target. Default: the width with which the model's "
        "convolutions and matrix products take the fewest operations, which is narrow for few channels.",
    )
    schedules: Literal["rules", "none"] = Field(
        default="rules",
        description="`rules`: untuned kernels get a schedule that is chosen from their shapes and the target. `none`: "
        "untuned kernels get no schedule, and are slow.",
    )


# ---------------------------------------------------------------- verify


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
        "samples, or where that is something else in the model, an axis before it (named `0/INPUT`, `1/INPUT`, … where they have [several sizes](howto/dynamic-shapes.md)); or images, as a folder or a table `file,label` (see [images.md](images.md)). Default: random inputs "
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
        BeforeValidator(lambda value: (AUTO,) if value == AUTO else to_tuple(value)),
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
        "[dimensions](howto/dynamic-shapes.md) is verified at. See [comparison.md](comparison.md).",
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


# ---------------------------------------------------------------- quantize


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


# ---------------------------------------------------------------- release


_VERSION_PATTERN: Final = (
    r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?$"
)
"""Versions of Python packages in their normalized form (PEP 440)."""

LAST_RELEASE: Final = "last"
NO_RELEASE: Final = "none"


def _check_version(value: str) -> str:
    if not re.match(_VERSION_PATTERN, value):
        raise field_error(f"must be a version such as 1.2.0 or 1.2.0rc1, not {quoted(value)}")
    return value


ReleaseVersion = Annotated[
    str,
    Field(max_length=100, json_schema_extra={"pattern": _VERSION_PATTERN}),
    AfterValidator(_check_version),
]
"""The version of deliveries, or of a release."""


class Gates(ClosedModel):
    """Limits that every recipe must meet on every target; otherwise no release is made."""

    min_accuracy: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.95],
        description="Minimum top-1 accuracy, for recipes that measure it.",
    )
    max_accuracy_drop: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.002],
        description="Maximum loss of accuracy since the last release; 0.002 is 0.2 percentage points.",
    )
    min_coverage: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.9],
        description="Minimum share of the model's time in tuned kernels, for targets that are tuned.",
    )
    max_slowdown: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.05],
        description="Maximum slowdown since the last release; 0.05 is 5 %. Both are measured again, alternating, "
        "if they run on this machine.",
    )
    max_growth: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.1],
        description="Maximum growth of any file since the last release; 0.1 is 10 %.",
    )
    max_bytes: int | None = Field(
        default=None, ge=1, examples=[50000000], description="Maximum size of any file, in bytes."
    )


class Release(ClosedModel):
    """A folder with all files, their lock file, checksums and a report, made when every gate is passed."""

    version: ReleaseVersion = Field(
        examples=["1.2.0"],
        description="Version of the release: digits and dots, in quotes. Its folder is `<name>-<version>`.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PATH_LENGTH,
        examples=["../releases"],
        description="Folder of all releases, from the folder of the pipeline. Default: `releases` in the root of the "
        "project: see [cli.md](cli.md).",
    )
    against: str = Field(
        default=LAST_RELEASE,
        max_length=100,
        examples=["1.1.0"],
        description="Release to compare with: a version, `last` (the previous release) or `none`.",
    )
    drop: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] = Field(
        default=(),
        examples=[["digits/edge"]],
        description="What this release drops on purpose: `RECIPE`, `RECIPE/TARGET`, `RECIPE/TARGET/OUTPUT`, or "
        "`RECIPE/TARGET/verify`. If anything else of the last release is missing, the release fails.",
    )
    gates: Gates = Field(
        default=Gates(), examples=[{"max_slowdown": 0.05}], description="Limits that must be met."
    )

    @field_validator("against")
    @classmethod
    def _check_against(cls, value: str) -> str:
        return value if value in (LAST_RELEASE, NO_RELEASE) else _check_version(value)


class Retune(ClosedModel):
    """A tuning budget for all recipes and targets together, spent in rounds on those that gain most."""

    trials: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        examples=[5000],
        description="Maximum number of trials, in addition to those in the ledger.",
    )
    minutes: float | None = Field(
        default=None,
        gt=0.0,
        le=100_000.0,
        examples=[480],
        description="Maximum minutes of measuring.",
    )
    round: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Trials that one target of a recipe gets in a round.",
    )
    min_gain: float = Field(
        default=0.005,
        ge=0.0,
        le=1.0,
        description="Smallest relative gain of a round: a target of a recipe that gains less gets no further round. "
        "Tuning ends when none gains more.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Retune:
        if self.trials is None and self.minutes is None:
            raise field_error("needs a budget: trials, minutes, or both")
        return self
