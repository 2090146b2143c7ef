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

from tvmflow.core.formatting import quoted
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.schema import (
    MAX_PATH_LENGTH,
    ClosedModel,
    YamlList,
    check_choice,
    field_error,
    one_of,
    schema_enum,
    to_tuple,
)
from tvmflow.core.text import parse_latency, parse_size
from tvmflow.core.types import OPTIMIZED_OPERATORS, Precision
from tvmflow.frontends.peers import PEERS

MAX_SEED: Final = (1 << 31) - 1

STRATEGIES: Final = ("evolutionary", "replay-trace")
# AutoTVM's name of a strategy -> tvmflow's.
_AUTOTVM_STRATEGIES: Final = {
    "ga": "evolutionary",
    "genetic": "evolutionary",
    "random": "replay-trace",
    "gridsearch": "replay-trace",
    "xgb": "evolutionary (and cost_model: xgb)",
}


# Smaller budgets would be spent on building the libraries in which choices are measured.
_MIN_TRIALS: Final = 128
_MIN_MINUTES: Final = 2.0


class Tune(ClosedModel):
    """The budget of the search for fast kernels, and how candidates are measured.

    See [tuning.md](tuning.md).
    """

    trials: int = Field(default=0, ge=0, le=UNLIMITED_TRIALS)
    """Maximum number of trials (measured schedules); 0: no search. With `minutes`, unlimited by default."""
    minutes: float | None = Field(default=None, gt=0, le=1e6)
    """Maximum search time per target, including the time that earlier runs spent on its kernels."""
    deliver_every: float | None = Field(default=None, gt=0, le=1e6)
    """Minutes of search between deliveries of the best library so far; the first delivery precedes the search."""
    trials_per_task: int | None = Field(default=None, ge=1, le=UNLIMITED_TRIALS)
    """Maximum number of trials for one kernel."""
    patience: int | None = Field(default=None, ge=1, le=UNLIMITED_TRIALS)
    """Stop tuning a kernel after this many trials without a gain of `min_gain`. Default: when the expected gain is
    negligible."""
    min_gain: float = Field(default=0.01, ge=0, lt=1)
    """Smallest relative gain that counts for `patience`."""
    only: YamlList[str] = Field(default=(), examples=[["conv2d", "fused_dense*"]])
    """Tune only these kernels: operators, or patterns of kernel names."""
    skip: YamlList[str] = Field(default=(), examples=[["softmax"]])
    """Do not tune these kernels: operators, or patterns of kernel names."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of the search."""
    strategy: str = Field(default="evolutionary", json_schema_extra={"enum": list(STRATEGIES)})
    """Search strategy; `replay-trace` is random search."""
    cost_model: Literal["xgb", "mlp", "random"] = "xgb"
    """Model that predicts which candidates to measure."""
    number: int = Field(default=0, ge=0, le=1_000_000)
    """Calls per repeat; 0: as many as needed to fill `min_repeat_ms`."""
    repeat: int = Field(default=3, ge=1, le=1000)
    """Repeats per measurement."""
    min_repeat_ms: int = Field(default=40, ge=0, le=60_000)
    """Minimum duration of a repeat in milliseconds."""
    trial_timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """Time limit of a trial in seconds; a slower trial counts as failed."""
    flush_cache: bool = False
    """Flush the CPU caches before each repeat."""
    finalists: int = Field(default=3, ge=1, le=64)
    """Number of each kernel's best trials to measure again."""
    choices: bool = True
    """Also measure alternative lowerings (direct and Winograd convolution, padding of matrix multiplications), if the
    budget has at least 128 trials or 2 minutes."""
    min_coverage: float | None = Field(default=None, ge=0, le=1)
    """Minimum share of the time spent in kernels with a schedule, tuned or from a rule."""
    min_speedup: float | None = Field(default=None, gt=0, le=1e6)
    """Minimum speedup of the library over the untuned one."""

    @property
    def measures_choices(self) -> bool:
        """True if the budget suffices to measure alternative implementations of operators."""
        is_long = self.minutes is None or self.minutes >= _MIN_MINUTES
        return self.choices and self.trials >= _MIN_TRIALS and is_long

    @model_validator(mode="before")
    @classmethod
    def _drop_trial_limit(cls, value: Any) -> Any:
        """Remove the limit of trials if only minutes are set."""
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
        """Keep the recipe's trials if an override sets only minutes."""
        return value

    @model_validator(mode="after")
    def _check_gates(self) -> TuneOverrides:
        """Skip the base class's check: the recipe's `tune` may set the trials that a gate needs."""
        return self


_Operator = Annotated[
    str,
    one_of(OPTIMIZED_OPERATORS, "an operator with a blocked layout"),
    schema_enum(sorted(OPTIMIZED_OPERATORS)),
]


Runtime = Literal["auto", "c", "vm"]
"""The executor of a library: generated C code, TVM's virtual machine, or C if the model allows it."""


class Kernels(ClosedModel):
    """The lowering of operators to kernels.

    All fields except `precision` affect CPUs only. The defaults are the fastest; other values are for comparison.
    """

    precision: Precision = "model"
    """`model`: the model's types. `mixed`: float16 weights of convolutions and matrix multiplications, on GPUs also
    float16 data, with float32 accumulation. `float16`: float16 data, weights and accumulation, on ARM CPUs with float16
    arithmetic. `bfloat16`: bfloat16 data and weights with float32 accumulation, on CPUs with such instructions. See
    [precision.md](precision.md)."""
    layout: Literal["blocked", "plain"] = "blocked"
    """`blocked`: convolutions and the operators between them use `NCHW[x]c`, where x is the target's vector length.
    `plain`: the model's layout."""
    weights: Literal["packed", "plain"] = "packed"
    """`packed`: weights of matrix multiplications are packed into panels of one vector width at build time. `plain`:
    the model's order."""
    plain: list[_Operator] = Field(default=[])
    """Operators that keep the model's layout and weights, whatever `layout` and `weights` say."""
    winograd: Literal["auto", 0, 2, 4] = "auto"
    """Largest Winograd tile for blocked 3×3 convolutions with stride 1 (on 64-bit ARM also 2); an estimate selects the
    tile or direct convolution for each layer. `0`: direct only. `2`: as accurate as direct. `4`: faster for large
    images, with five times the error. `auto`: `4`; but `2` if `precision` is not `model`, except on 64-bit ARM."""
    math: Literal["vector", "libm"] = "vector"
    """`vector`: vectorized exp, log, sigmoid, tanh, erf, sin and cos, accurate to 8 ulp (sin and cos below 2³¹).
    `libm`: calls of the C library."""
    vector_bits: Literal[128, 256, 512] | None = None
    """Vector width in bits, up to the target's widest. Default: the width that needs the fewest operations for the
    model's convolutions and matrix multiplications."""
    schedules: Literal["rules", "none"] = "rules"
    """`rules`: schedule rules choose the schedules of untuned kernels. `none`: untuned kernels have no schedule, and
    are slow."""


AUTO: Final = "auto"
"""In place of a runtime: all installed runtimes that can run the model."""
FIXED: Final = "fixed"
"""In place of a runtime: libraries with a fixed size each, compared with one with dynamic shapes."""


QUANTITIES: Final[Mapping[str, Callable[[str], float]]] = {
    "max_latency": parse_latency,
    "max_memory": parse_size,
    "max_size": parse_size,
}
"""The gates that are quantities with a unit, and their parsers."""


class Verify(ClosedModel):
    """The comparison with the reference, its tolerances, and limits that the library must satisfy."""

    against: Literal["reference", "none"] = "reference"
    """`reference`: the model's framework, or ONNX's reference evaluator if ONNX Runtime rejects the model. `none`:
    nothing; the bundle is marked as not verified."""
    data: str | None = Field(default=None, min_length=1)
    """Test data: an npz file with one array per input and samples along the first axis; or images, as a folder or a
    table `file,label` ([images.md](images.md)). Inputs without a batch axis need an additional first axis for samples.
    Batches of [different sizes](howto/dynamic-shapes.md) are named `0/INPUT`, `1/INPUT`, … Default: random inputs."""
    label: str = "label"
    """Name of the labels array in `data`, for accuracy."""
    rtol: float | None = Field(default=None, ge=0)
    """Relative tolerance per element. Default: 0.001; 0.01 for float16, bfloat16 and quantized models."""
    atol: float | None = Field(default=None, ge=0)
    """Absolute tolerance per element. Default: a fraction of the output's largest value. See
    [precision.md](precision.md)."""
    min_accuracy: float | None = Field(default=None, ge=0, le=1)
    """Minimum top-1 accuracy on `data`."""
    max_latency: str | None = Field(default=None, examples=["8 ms"])
    """Maximum latency of one call, such as `8 ms`. See [gates](howto/gates.md)."""
    max_memory: str | None = Field(default=None, examples=["60 MB"])
    """Maximum memory of the library with its weights and one context, such as `60 MB`."""
    max_size: str | None = Field(default=None, examples=["5 MB"])
    """Maximum size of the library file, such as `5 MB`."""
    max_vs: dict[Annotated[str, one_of(PEERS, "a runtime")], Annotated[float, Field(gt=0)]] = Field(
        default={}, examples=[{"onnxruntime": 1.0}]
    )
    """Maximum latency relative to other runtimes, in interleaved measurements: `{onnxruntime: 1.0}` means not slower
    than ONNX Runtime. Adds the runtimes to `compare`."""
    samples: int = Field(default=3, ge=1, le=10_000)
    """Number of random batches, without `data`."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of the random inputs."""
    repeat: int = Field(default=10, ge=1, le=10_000)
    """Number of latency measurements."""
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
    ] = Field(default=(), examples=[["onnxruntime", "openvino"]])
    """Runtimes to compare with the reference, and to time in interleaved measurements with the same inputs and threads.
    They must be installed; `auto`: all that are. `fixed`: one library per tuning size of a model with [dynamic
    dimensions](howto/dynamic-shapes.md). See [comparison.md](comparison.md)."""
    run_on: Literal["auto", "local", "qemu", "rpc", "chromium"] = "auto"
    """`local` or `auto`: this machine. `qemu`: emulation, without latency. `rpc`: a device of the target's `remote`.
    `chromium`: headless Chromium, for the output `web`, without latency."""

    @field_validator("compare")
    @classmethod
    def _check_compare(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise field_error(f"duplicate runtime '{name}'", index)
            if name == AUTO and len(value) > 1:
                raise field_error("must be the only entry: it means all installed runtimes", index)
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
        """Accept a gate without data: it may be in the recipe's `verify`."""
        return self


Method = Literal["minmax", "percentile", "entropy", "mse"]
"""Calibration methods, which choose the range of a tensor from its histogram."""


class Quantize(ClosedModel):
    """Post-training quantization of a float model, and limits of its error.

    To satisfy the limits, the layers with the largest error stay float.
    """

    data: str | None = Field(default=None, min_length=1, examples=["calibration.npz"])
    """Calibration data: an npz file with one array per input, or a folder of images. Default: `verify.data`."""
    samples: int | None = Field(default=None, ge=1, le=100_000, examples=[200])
    """Number of calibration samples: the first ones, or some images of each folder. Default: up to 128."""
    weights: Literal["int8", "int4", "none"] = "int8"
    """Type of the weights; `none` keeps them float."""
    group_size: Literal[32, 64, 128] = 32
    """Weights per scale with `int4`. Larger groups take less memory (4.5 bits per weight with 32, 4.125 with 128) and
    are less accurate."""
    activations: Literal["int8", "dynamic", "none"] = "int8"
    """Type of the data of convolutions, matrix multiplications and recurrent states. `int8`: static ranges from the
    calibration data. `dynamic`: each call computes the ranges, for matrix multiplications. `none`: float."""
    method: Method = "mse"
    """How the range of a tensor is chosen: minimum and maximum, a percentile, or the least divergence (`entropy`) or
    squared error (`mse`)."""
    max_accuracy_drop: float | None = Field(default=None, ge=0, le=100, examples=[0.5])
    """Maximum loss of top-1 accuracy on `verify.data`, in percentage points."""
    max_error: float | None = Field(default=None, gt=0, le=1, examples=[0.02])
    """Maximum root mean square error of an output, relative to the output."""
    skip: YamlList[Annotated[str, Field(min_length=1)]] = Field(default=(), examples=[["head/*"]])
    """Nodes that stay float: patterns of names, such as `head/*`."""

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
        """Return whether quantization runs the float model, for calibration or limits."""
        limits = self.max_accuracy_drop is not None or self.max_error is not None
        return self.activations == "int8" or limits


class QuantizeOverrides(Quantize):
    """Overrides of `quantize` for a variant."""


_VERSION_PATTERN: Final = (
    r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?$"
)
"""Normalized versions of Python packages (PEP 440)."""

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
    """Limits that every recipe must satisfy on every target; otherwise no release is made."""

    min_accuracy: float | None = Field(default=None, ge=0.0, le=1.0, examples=[0.95])
    """Minimum top-1 accuracy, for recipes that measure it."""
    max_accuracy_drop: float | None = Field(default=None, ge=0.0, le=1.0, examples=[0.002])
    """Maximum loss of accuracy since the previous release; 0.002 is 0.2 percentage points."""
    min_coverage: float | None = Field(default=None, ge=0.0, le=1.0, examples=[0.9])
    """Minimum share of the time in tuned kernels, for tuned targets."""
    max_slowdown: float | None = Field(default=None, ge=0.0, le=100.0, examples=[0.05])
    """Maximum slowdown since the previous release; 0.05 is 5 %. Both libraries are measured again, interleaved, if they
    run on this machine."""
    max_growth: float | None = Field(default=None, ge=0.0, le=100.0, examples=[0.1])
    """Maximum growth of any file since the previous release; 0.1 is 10 %."""
    max_bytes: int | None = Field(default=None, ge=1, examples=[50000000])
    """Maximum size of any file in bytes."""


class Release(ClosedModel):
    """A folder with all files, their lock file, checksums and a report, made when every gate passes."""

    version: ReleaseVersion = Field(examples=["1.2.0"])
    """Version of the release: digits and dots, in quotes. Its folder is `<name>-<version>`."""
    folder: str | None = Field(
        default=None, min_length=1, max_length=MAX_PATH_LENGTH, examples=["../releases"]
    )
    """Folder of all releases, relative to the pipeline's folder. Default: `releases` in the
    [project root](cli.md#project)."""
    against: str = Field(default=LAST_RELEASE, max_length=100, examples=["1.1.0"])
    """Release to compare with: a version, `last` (the previous release) or `none`."""
    drop: YamlList[str] = Field(default=(), examples=[["digits/edge"]])
    """Intended removals: `RECIPE`, `RECIPE/TARGET`, `RECIPE/TARGET/OUTPUT` or `RECIPE/TARGET/verify`. If anything
    else of the previous release is missing, the release fails."""
    gates: Gates = Field(default=Gates(), examples=[{"max_slowdown": 0.05}])
    """Limits that must be satisfied."""

    @field_validator("against")
    @classmethod
    def _check_against(cls, value: str) -> str:
        return value if value in (LAST_RELEASE, NO_RELEASE) else _check_version(value)


class Retune(ClosedModel):
    """A tuning budget for all recipes and targets together, spent in rounds where it gains most."""

    trials: int | None = Field(default=None, ge=1, le=10_000_000, examples=[5000])
    """Maximum number of trials, in addition to those in the ledger."""
    minutes: float | None = Field(default=None, gt=0.0, le=100_000.0, examples=[480])
    """Maximum measuring time in minutes."""
    round: int = Field(default=64, ge=1, le=100_000)
    """Trials per round for one target of a recipe."""
    min_gain: float = Field(default=0.005, ge=0.0, le=1.0)
    """Smallest relative gain of a round. A target that gains less gets no further round. Tuning ends when every target
    gains less."""

    @model_validator(mode="after")
    def _check_budget(self) -> Retune:
        if self.trials is None and self.minutes is None:
            raise field_error("needs a budget: trials, minutes, or both")
        return self
