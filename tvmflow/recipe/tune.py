"""`tune`: how much to search for fast kernels, and how to measure them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tvmflow.compiler.options import Precision
from tvmflow.compiler.passes import OPERATORS
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.schema import (
    ClosedModel,
    check_choice,
    field_error,
    one_of,
    schema_enum,
    to_tuple,
)

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
        description="Also measure how else operators can be computed (3×3 convolutions directly, or by Winograd's method with tiles of 2×2 or 4×4), if the budget is at "
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
