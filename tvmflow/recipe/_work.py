"""`kernels`, `tune` and `verify`: how the library is made fast, and what it must agree with."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tvmflow.mistakes import one_of, wrong
from tvmflow.passes import OPERATORS
from tvmflow.recipe._closed import Closed, enum, member, tupled

_MAX_TRIALS: Final = 10_000_000
_MAX_SEED: Final = (1 << 31) - 1

STRATEGIES: Final = ("evolutionary", "replay-trace")
# What people write who know AutoTVM, and what it is called here.
_OLD_STRATEGIES: Final = {
    "ga": "evolutionary",
    "genetic": "evolutionary",
    "random": "replay-trace",
    "gridsearch": "replay-trace",
    "xgb": "evolutionary (and cost_model: xgb)",
}

_Operator = Annotated[str, member(OPERATORS, "an operator with a road"), enum(sorted(OPERATORS))]
_Place = Literal["auto", "local", "qemu", "rpc"]


class Kernels(Closed):
    """How operators become kernels. All but `precision` is for CPUs: the defaults are the fast ones, the others are there to compare."""

    precision: Literal["model", "mixed"] = Field(
        default="model",
        description="`model`: as the model has it. `mixed`: weights of convolutions and matrix products, and on a GPU "
        "the data that they meet, are of float16; sums, inputs and outputs are as before: see "
        "[precision.md](precision.md).",
    )
    layout: Literal["blocked", "plain"] = Field(
        default="blocked",
        description="`blocked`: convolutions, and what lies between them, work on `NCHW[x]c` data, "
        "x being a vector of the target. `plain`: on the model's own layout.",
    )
    weights: Literal["packed", "plain"] = Field(
        default="packed",
        description="`packed`: the weights of matrix products are laid out in columns of vectors when the "
        "library is built. `plain`: they stay as they are.",
    )
    plain: list[_Operator] = Field(
        default=[],
        description="Operators that stay on the model's own layout and weights, whatever `layout` and `weights` say.",
    )
    winograd: Literal[0, 2, 4] = Field(
        default=2,
        description="Blocked convolutions of 3×3 with stride 1 are computed in tiles of so many results a side: "
        "with 2 as exactly as without, with 4 faster where images are large and five times less exactly; 0: one by one.",
    )
    math: Literal["vector", "libm"] = Field(
        default="vector",
        description="`vector`: exp, sigmoid, tanh and erf as vector code, within 8 units in the last place. "
        "`libm`: calls of the C library.",
    )
    schedules: Literal["rules", "none"] = Field(
        default="rules",
        description="`rules`: what tuning does not improve has a schedule chosen from its shape and the "
        "target. `none`: it has none, and is slow.",
    )


class Tune(Closed):
    """How much to search for fast kernels, and how to measure."""

    trials: int = Field(
        default=0,
        ge=0,
        le=_MAX_TRIALS,
        description="Measurements in all; 0: no search. With `minutes` alone there is no limit.",
    )
    minutes: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="The most that tuning one target may take; what was found by then is built.",
    )
    trials_per_task: int | None = Field(
        default=None,
        ge=1,
        le=_MAX_TRIALS,
        description="At most so many measurements for one kernel.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=_MAX_TRIALS,
        description="End a kernel's tuning after so many measurements without a gain of `min_gain`.",
    )
    min_gain: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="The least improvement that `patience` counts, relative.",
    )
    only: Annotated[tuple[str, ...], BeforeValidator(tupled)] = Field(
        default=(),
        examples=[["conv2d", "fused_dense*"]],
        description="Tune only these kernels: operators, or patterns of kernels' names.",
    )
    skip: Annotated[tuple[str, ...], BeforeValidator(tupled)] = Field(
        default=(),
        examples=[["softmax"]],
        description="Do not tune these kernels: operators, or patterns of kernels' names.",
    )
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="Seed of the search.")
    strategy: str = Field(
        default="evolutionary",
        json_schema_extra={"enum": list(STRATEGIES)},
        description="`evolutionary`, or `replay-trace` (random search).",
    )
    cost_model: Literal["xgb", "mlp", "random"] = Field(
        default="xgb", description="What predicts which candidates are worth measuring."
    )
    number: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Calls in one repeat; 0: as many as `min_repeat_ms` needs.",
    )
    repeat: int = Field(default=3, ge=1, le=1000, description="Repeats of a measurement.")
    min_repeat_ms: int = Field(
        default=40, ge=0, le=60_000, description="Least length of a repeat, in milliseconds."
    )
    trial_timeout_s: float = Field(
        default=30.0, gt=0, le=86_400, description="Seconds after which a trial counts as failed."
    )
    flush_cache: bool = Field(
        default=False,
        description="Empty the CPU's caches before each repeat, as other kernels do in a real inference.",
    )
    finalists: int = Field(
        default=3, ge=1, le=64, description="How many of a kernel's best are measured again."
    )
    min_coverage: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least share of the time that must be in kernels with a schedule, found or by rule.",
    )
    min_speedup: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="How many times as fast as untuned the whole library must be.",
    )

    @model_validator(mode="before")
    @classmethod
    def _time_alone(cls, value: Any) -> Any:
        """A limit in minutes and none in trials: as many as there is time for."""
        if isinstance(value, dict) and "minutes" in value and "trials" not in value:
            return {**value, "trials": _MAX_TRIALS}
        return value

    @model_validator(mode="after")
    def _check_gates(self) -> Tune:
        for gate in ("min_coverage", "min_speedup"):
            if not self.trials and getattr(self, gate) is not None:
                raise wrong("needs trials; without a search nothing is tuned", gate)
        return self

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        if value in _OLD_STRATEGIES:
            raise wrong(f"'{value}' is called {_OLD_STRATEGIES[value]} here")
        return one_of(value, STRATEGIES, "a strategy")


class Verify(Closed):
    """What the library must agree with, and how closely."""

    against: Literal["reference", "none"] = Field(
        default="reference",
        description="`reference`: the framework that the model came from. `none`: nothing; the bundle then says so.",
    )
    data: str | None = Field(
        default=None,
        min_length=1,
        description="An npz file with an array for each input, samples first, from the recipe's folder; "
        "by default seeded random inputs.",
    )
    label: str = Field(default="label", description="The array of labels in `data`, for accuracy.")
    rtol: float | None = Field(
        default=None,
        ge=0,
        description="Relative tolerance; by default 0.001, and 0.01 for float16 and quantised models.",
    )
    atol: float | None = Field(
        default=None,
        ge=0,
        description="Absolute tolerance; by default 0.0001, and for float16 and quantised models a part of an output's "
        "largest value: see [precision.md](precision.md).",
    )
    min_accuracy: float | None = Field(
        default=None, ge=0, le=1, description="Least top-1 accuracy on `data`."
    )
    samples: int = Field(default=3, ge=1, le=10_000, description="Random batches, without `data`.")
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="Seed of the random inputs.")
    repeat: int = Field(
        default=10, ge=1, le=10_000, description="Repeats of the latency measurement."
    )
    run_on: _Place = Field(
        default="auto",
        description="Where the library runs: `local`: here. `qemu`: here, with its CPU emulated (no latency). "
        "`rpc`: on a device of the target's `remote`. `auto`: here.",
    )

    @model_validator(mode="after")
    def _check_accuracy(self) -> Verify:
        if self.min_accuracy is not None and self.data is None:
            raise wrong("needs data with labels; name it with verify.data", "min_accuracy")
        return self


class TuneChange(Tune):
    """What is otherwise for one target; all else is as the recipe's `tune` says."""

    @model_validator(mode="before")
    @classmethod
    def _time_alone(cls, value: Any) -> Any:
        """A limit in minutes takes nothing away from the trials that the recipe asks for."""
        return value

    @model_validator(mode="after")
    def _check_gates(self) -> TuneChange:
        """What a gate needs may be the recipe's."""
        return self


class VerifyChange(Verify):
    """What is otherwise for one target; all else is as the recipe's `verify` says."""

    @model_validator(mode="after")
    def _check_accuracy(self) -> VerifyChange:
        """The data may be the recipe's."""
        return self
