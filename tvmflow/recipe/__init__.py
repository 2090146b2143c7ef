"""The public language: what a recipe and a pipeline may say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tvmflow.errors import RecipeError
from tvmflow.mistakes import check, one_of, wrong
from tvmflow.passes import OPERATORS
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.toolchain import FLAGS
from tvmflow.targets.tracker import VARIABLE, split_address
from tvmflow.values import Json
from tvmflow.yaml_positions import (
    Document,
    Loc,
    Problem,
    dotted,
    nearest,
    neighbours,
    quoted,
    read_yaml,
    shown,
)

STAGE_NAMES: Final = ("import", "extract_tasks", "tune", "pick_best", "build", "export", "verify")
OUTPUT_NAMES: Final = (
    "archive",
    "bundle",
    "c-source",
    "cpp",
    "objects",
    "params",
    "shared-library",
    "static-library",
    "system-library",
    "wheel",
)

# Each stage, and those that a pipeline must have before it.
_REQUIRES: Final[Mapping[str, tuple[str, ...]]] = {
    "import": (),
    "extract_tasks": ("import",),
    "tune": ("extract_tasks",),
    "pick_best": ("tune",),
    "build": ("import",),
    "export": ("build",),
    "verify": ("export",),
}

_VERSION: Final = 1
_DTYPES: Final = (
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
_MAX_ELEMENTS: Final = 1 << 31
# of a path in a message
_MAX_PATH: Final = 500
_MAX_EPOCH: Final = 9999
_MAX_VARIANT: Final = 50
_MAX_TRIALS: Final = 10_000_000
_MAX_SEED: Final = (1 << 31) - 1
_NAME: Final = r"^[a-z0-9][a-z0-9._-]*$"
_DIGEST: Final = r"^[0-9a-fA-F]{64}$"
# those of Python's packages (PEP 440) as they are written when nothing has to be put right
_RELEASE: Final = (
    r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?$"
)
# there are too many for one line
_ALL_TARGETS: Final = "`tvmflow targets` lists them"
# those that can be downloaded
_SCHEMES: Final = ("http", "https", "file")

_STRATEGIES: Final = ("evolutionary", "replay-trace")
# What people write who know AutoTVM, and what it is called here.
_OLD_STRATEGIES: Final = {
    "ga": "evolutionary",
    "genetic": "evolutionary",
    "random": "replay-trace",
    "gridsearch": "replay-trace",
    "xgb": "evolutionary (and cost_model: xgb)",
}


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _member(valid: Any, what: str, all_of_them: str = "") -> AfterValidator:
    return AfterValidator(lambda value: one_of(value, valid, what, all_of_them))


def _enum(valid: Any) -> Any:
    return Field(json_schema_extra={"enum": list(valid)})


def _check_version(value: Any) -> Any:
    # true and 1.0 are equal to 1, and are mistakes all the same
    if type(value) is not int or value != _VERSION:
        raise wrong(f"this tvmflow reads version {_VERSION} only; write {_VERSION}")
    return value


_Version = Annotated[Literal[1], BeforeValidator(_check_version)]
_Dtype = Annotated[str, _member(_DTYPES, "a dtype"), _enum(_DTYPES)]
_Operator = Annotated[str, _member(OPERATORS, "an operator with a road"), _enum(sorted(OPERATORS))]
_PresetName = Annotated[str, _member(PRESETS, "a target", _ALL_TARGETS), _enum(sorted(PRESETS))]
_Output = Annotated[str, _member(OUTPUT_NAMES, "an output"), _enum(OUTPUT_NAMES)]
_Place = Literal["auto", "local", "qemu", "rpc"]
_StageName = Annotated[str, _member(STAGE_NAMES, "a stage"), _enum(STAGE_NAMES)]


def _once(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs, none of which may stand twice."""
    for index, name in enumerate(outputs):
        if name in outputs[:index]:
            raise wrong(f"'{name}' stands twice", index)
    if outputs == ("archive",):
        raise wrong("an archive holds the other outputs; name at least one beside it")
    return outputs


class _Part(BaseModel):
    """Frozen, strict about types, and closed: an unknown field is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_AnyPart = TypeVar("_AnyPart", bound=_Part)


class MxnetSource(_Part):
    """An MXNet checkpoint, as `mx.model.load_checkpoint(prefix, epoch)` names it."""

    prefix: str = Field(
        min_length=1,
        examples=["models/digits"],
        description="Path of the checkpoint without `-symbol.json` and `-0000.params`, from the recipe's folder.",
    )
    epoch: int = Field(
        ge=0, le=_MAX_EPOCH, examples=[10], description="The number in `prefix-NNNN.params`."
    )

    def paths(self, base: Path) -> tuple[Path, Path]:
        """The checkpoint's symbol and parameters; `base` is the recipe's folder."""
        return _checkpoint(self.prefix, self.epoch, base)


class ModelSource(_Part):
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


class InputSpec(_Part):
    """One input of the model."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_tupled)] = Field(
        examples=[[1, 3, 224, 224]],
        description="The size of each dimension; all are fixed, the batch too.",
    )
    dtype: _Dtype = Field(default="float32", description="The type of its elements.")
    range: Annotated[tuple[float, float] | None, BeforeValidator(_tupled)] = Field(
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


class Remote(_Part):
    """Devices elsewhere that are measured on, found through TVM's RPC tracker."""

    key: str = Field(
        min_length=1,
        max_length=100,
        examples=["pi4"],
        description="What devices of this kind are called at the tracker.",
    )
    tracker: str | None = Field(
        default=None,
        examples=["192.168.1.10:9190"],
        description=f"`HOST:PORT` of the tracker; by default the environment variable `{VARIABLE}`.",
    )
    priority: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Whose request for a device goes first: the higher number's.",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="The most that one measurement may take on a device, in seconds, with sending what is measured.",
    )

    @field_validator("key")
    @classmethod
    def _check_key(cls, value: str) -> str:
        if ":" in value or any(sign.isspace() for sign in value):
            raise wrong("must be one word without a colon")
        return value

    @field_validator("tracker")
    @classmethod
    def _check_tracker(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                split_address(value)
            except ValueError:
                text = f"must be HOST:PORT, such as 192.168.1.10:9190, not {quoted(value)}"
                raise wrong(text) from None
        return value


class Kernels(_Part):
    """How operators become kernels on a CPU. The defaults are the fast ones; the others are there to compare."""

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


class Tune(_Part):
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
    only: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = Field(
        default=(),
        examples=[["conv2d", "fused_dense*"]],
        description="Tune only these kernels: operators, or patterns of kernels' names.",
    )
    skip: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = Field(
        default=(),
        examples=[["softmax"]],
        description="Do not tune these kernels: operators, or patterns of kernels' names.",
    )
    seed: int = Field(default=0, ge=0, le=_MAX_SEED, description="Seed of the search.")
    strategy: str = Field(
        default="evolutionary",
        json_schema_extra={"enum": list(_STRATEGIES)},
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
        return one_of(value, _STRATEGIES, "a strategy")


class Verify(_Part):
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
    rtol: float = Field(default=1e-3, ge=0, description="Relative tolerance.")
    atol: float = Field(default=1e-4, ge=0, description="Absolute tolerance.")
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


class Toolchain(_Part):
    """A linker of your own, in place of the one that comes with tvmflow."""

    linker: str = Field(
        min_length=1,
        max_length=_MAX_PATH,
        examples=["aarch64-linux-gnu-g++"],
        description="A compiler driver or a linker: its name on `PATH`, or an absolute path.",
    )
    flags: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = Field(
        default=FLAGS,
        examples=[["-shared", "-s"]],
        description="Its arguments, one word each; `-o` and the files follow them.",
    )

    @field_validator("linker")
    @classmethod
    def _check_linker(cls, value: str) -> str:
        if any(sign.isspace() or sign == "\0" for sign in value):
            raise wrong("must be one program; its arguments go into flags")
        if "/" in value and not value.startswith("/"):
            raise wrong("must be a name on PATH, or an absolute path")
        return value


class TargetSpec(_Part):
    """A machine to build for: a preset's name, or a mapping with a name of its own.

    `outputs`, `tune` and `verify` are otherwise for it than the recipe says for all targets.
    """

    name: str = Field(
        pattern=_NAME,
        max_length=100,
        examples=["edge"],
        description="Its name: the folder in `dist`.",
    )
    preset: _PresetName | None = Field(default=None, description="A named target.")
    tvm: dict[str, Json] | None = Field(
        default=None,
        examples=[{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}],
        description="A target as TVM takes it: its kind, and attributes such as mtriple and mcpu. "
        "Beside a preset, what is otherwise than there.",
    )
    num_cores: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Threads to tune for; by default those of this machine.",
    )
    remote: Remote | None = Field(
        default=None,
        examples=[{"key": "pi4"}],
        description="Devices of this kind, to tune on them instead of on this machine.",
    )

    toolchain: Toolchain | None = Field(
        default=None,
        examples=[{"linker": "aarch64-linux-gnu-g++"}],
        description="Another linker than the one that comes with tvmflow.",
    )
    outputs: Annotated[tuple[_Output, ...] | None, BeforeValidator(_tupled)] = Field(
        default=None,
        min_length=1,
        examples=[["shared-library", "bundle"]],
        description="Files to deliver for it, in place of the recipe's `outputs`.",
    )
    tune: TuneChange | None = Field(
        default=None,
        examples=[{"trials": 1000}],
        description="Fields of `tune` that are otherwise for it.",
    )
    verify: VerifyChange | None = Field(
        default=None,
        examples=[{"against": "none"}],
        description="Fields of `verify` that are otherwise for it.",
    )

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value and _once(value)

    @model_validator(mode="after")
    def _check_machine(self) -> TargetSpec:
        if self.preset is None and self.tvm is None:
            raise wrong("needs a preset, or tvm; neither is given")
        if self.preset is None and not isinstance((self.tvm or {}).get("kind"), str):
            raise wrong("needs a kind, such as `kind: llvm`", "tvm")
        if self.preset is not None and self.tvm is not None:
            base = PRESETS[self.preset].tvm
            if base is None:
                raise wrong("goes with any preset but host, which is looked up", "tvm")
            if self.tvm.get("kind", base["kind"]) != base["kind"]:
                raise wrong(
                    f"the preset {self.preset} is of the kind {base['kind']}", "tvm", "kind"
                )
        return self

    @model_validator(mode="after")
    def _check_remote(self) -> TargetSpec:
        if self.remote is None:
            return self
        mapping = self.tvm_mapping()
        if mapping is None:
            raise wrong("goes with a target that says what the device is, not with host", "remote")
        if mapping["kind"] != "llvm":
            raise wrong("kernels are measured on CPUs only; the kind must be llvm", "remote")
        if "mtriple" not in mapping:
            raise wrong("needs the device's mtriple, such as aarch64-linux-gnu", "tvm")
        if self.num_cores is None and "num-cores" not in mapping:
            raise wrong("needs num_cores: how many threads the device runs", "remote")
        return self

    def tvm_mapping(self) -> dict[str, Json] | None:
        """The mapping that TVM takes; None for `host`, which is looked up."""
        if self.preset is None:
            return dict(self.tvm or {})
        mapping = PRESETS[self.preset].tvm
        return None if mapping is None else {**mapping, **(self.tvm or {})}


def _named(value: Any) -> Any:
    """A target given by one word is the preset of that name."""
    if not isinstance(value, str):
        return value
    return {"name": value, "preset": one_of(value, PRESETS, "a target", _ALL_TARGETS)}


class Variant(_Part):
    """The same model with other inputs: a build of its own, `<recipe>-<variant>`, for every target."""

    inputs: dict[str, InputSpec] = Field(
        default={},
        examples=[{"data": {"shape": [8, 3, 224, 224]}}],
        description="Inputs that are otherwise than the recipe's; what a field leaves out is as there.",
    )


def _changed(whole: _AnyPart, change: _Part | None) -> _AnyPart:
    """The part with the fields that the change gives. Raises ValidationError when they do not fit together."""
    if change is None:
        return whole
    given = {
        name: getattr(part, name) for part in (whole, change) for name in part.model_fields_set
    }
    return type(whole).model_validate(given)


class Recipe(_Part):
    """One model: its source, inputs, targets, tuning, outputs and checks."""

    recipe: _Version = Field(examples=[1], description="Version of this language: 1.")
    name: str = Field(
        pattern=_NAME,
        max_length=100,
        examples=["resnet50"],
        description="Its name: the folder in `dist` and the files there. Small letters, digits, `.`, `_`, `-`.",
    )
    version: str = Field(
        default="0",
        max_length=100,
        json_schema_extra={"pattern": _RELEASE},
        examples=["1.2.0"],
        description="Version of what is delivered, in the manifest and in the name of the wheel: digits and dots, "
        "as Python's packages have it, in quotes.",
    )
    model: ModelSource = Field(
        examples=[{"onnx": "model.onnx"}], description="Where the model comes from."
    )
    inputs: dict[str, InputSpec] = Field(
        default_factory=dict,
        validate_default=True,
        examples=[{"data": {"shape": [1, 3, 224, 224], "dtype": "float32"}}],
        description="The model's inputs by name; may be left out for an ONNX model whose shapes are fixed.",
    )
    variants: dict[str, Variant] = Field(
        default={},
        examples=[{"b8": {"inputs": {"data": {"shape": [8, 3, 224, 224]}}}}],
        description="The model with other inputs, by name: each is built for every target, as `<name>-<variant>`. "
        "With variants, nothing else is built.",
    )
    targets: Annotated[
        tuple[Annotated[TargetSpec, BeforeValidator(_named)], ...], BeforeValidator(_tupled)
    ] = Field(
        default=(TargetSpec(name="host", preset="host"),),
        min_length=1,
        examples=[["host", {"name": "edge", "preset": "x86-64-v2"}]],
        description="Machines to build for; by default this one.",
    )
    kernels: Kernels = Field(
        default=Kernels(),
        examples=[{"layout": "plain"}],
        description="How operators become kernels on a CPU.",
    )
    tune: Tune = Field(
        default=Tune(),
        examples=[{"trials": 1000}],
        description="How much to search for fast kernels.",
    )
    outputs: Annotated[tuple[_Output, ...], BeforeValidator(_tupled)] = Field(
        default=("bundle",),
        min_length=1,
        examples=[["shared-library", "bundle"]],
        description="Files to deliver: see [exports.md](exports.md).",
    )
    verify: Verify = Field(
        default=Verify(),
        examples=[{"rtol": 0.001}],
        description="Checks that the library must pass.",
    )
    pipeline: str = Field(
        default="tune",
        min_length=1,
        description="`tune`, `compile` (no search), or the path of a pipeline file from the recipe's folder.",
    )

    @field_validator("version")
    @classmethod
    def _check_release(cls, value: str) -> str:
        if not re.match(_RELEASE, value):
            raise wrong(f"must be a version such as 1.2.0 or 1.2.0rc1, not {quoted(value)}")
        return value

    @field_validator("inputs")
    @classmethod
    def _check_inputs(
        cls, value: dict[str, InputSpec], info: ValidationInfo
    ) -> dict[str, InputSpec]:
        model = info.data.get("model")
        if not value and model is not None and model.kind == "mxnet":
            raise wrong("an MXNet model needs its inputs and their shapes")
        return value

    @field_validator("targets")
    @classmethod
    def _check_names(cls, value: tuple[TargetSpec, ...]) -> tuple[TargetSpec, ...]:
        names = [target.name for target in value]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise wrong(f"a second target with the name '{name}'", index)
        return value

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _once(value)

    @field_validator("variants")
    @classmethod
    def _check_variants(cls, value: dict[str, Variant]) -> dict[str, Variant]:
        for name in value:
            if not re.fullmatch(_NAME, name) or len(name) > _MAX_VARIANT:
                raise wrong(
                    f"must begin with a small letter or digit, hold only those and . _ - and have at most "
                    f"{_MAX_VARIANT} characters",
                    name,
                )
        return value

    @model_validator(mode="after")
    def _check_changes(self) -> Recipe:
        for name, variant in self.variants.items():
            for each in variant.inputs if self.inputs else ():
                if each not in self.inputs:
                    near = nearest(each, self.inputs)
                    there = f" (there are {', '.join(self.inputs)})"
                    text = f"the model has no input {quoted(each)}{near}{there}"
                    raise wrong(text, "variants", name, "inputs", each)
        for index, target in enumerate(self.targets):
            for part in ("tune", "verify"):
                try:
                    _changed(getattr(self, part), getattr(target, part))
                except ValidationError as error:
                    context = error.errors()[0]["ctx"]
                    raise wrong(context["text"], "targets", index, part, *context["at"]) from None
        return self

    @model_validator(mode="after")
    def _check_speedup(self) -> Recipe:
        for index, target in enumerate(self.targets):
            effective = self.of(target.name)
            if effective.tune.min_speedup is not None and effective.verify.run_on == "qemu":
                text = f"needs a latency, and none is measured under emulation (run_on: qemu), where '{target.name}' runs"
                above = () if self.tune.min_speedup is not None else ("targets", index)
                raise wrong(text, *above, "tune", "min_speedup")
        return self

    def of(self, target: str) -> Recipe:
        """The recipe as it is for the target of this name: with what is otherwise there."""
        spec = next((each for each in self.targets if each.name == target), None)
        if spec is None:
            return self
        changes = {
            "outputs": spec.outputs or self.outputs,
            "tune": _changed(self.tune, spec.tune),
            "verify": _changed(self.verify, spec.verify),
        }
        return self.model_copy(update=changes)

    def variant(self, name: str) -> Recipe:
        """The recipe of one variant, with a name of its own."""
        inputs = dict(self.inputs)
        for each, change in self.variants[name].inputs.items():
            inputs[each] = _changed(inputs[each], change) if each in inputs else change
        return self.model_copy(update={"name": f"{self.name}-{name}", "inputs": inputs})


# ---------------------------------------------------------------- loading


class Pipeline(NamedTuple):
    """The stages of a run, in order."""

    name: str
    stages: tuple[str, ...]
    path: Path


class LoadedRecipe(NamedTuple):
    """A recipe, its pipeline, and where each part stands: `where("targets", 0)` gives `file:line:column`.

    `read` are the files that this was read from.
    """

    recipe: Recipe
    path: Path
    where: Callable[..., str]
    read: tuple[Path, ...]
    pipeline: Pipeline


def load_recipe(path: Path) -> LoadedRecipe:
    """The recipe in a file. Raises RecipeError with all its mistakes, each `file:line:column: field: what`."""
    document = read_yaml(path)
    recipe, problems = check(document, Recipe)
    problems += _missing_files(document)
    if recipe is None or problems:
        raise document.error(problems)
    pipeline = load_pipeline(recipe.pipeline, path.parent)
    return LoadedRecipe(recipe, path, document.where, (path, pipeline.path), pipeline)


def _missing_files(document: Document) -> Iterator[Problem]:
    """A problem for every file that the recipe names and that is not there.

    Looks at the document, not at a Recipe, so that it can be told along with other mistakes.
    """
    base = document.path.parent
    prefix, epoch = document.at("model", "mxnet", "prefix"), document.at("model", "mxnet", "epoch")
    if isinstance(prefix, str) and prefix and type(epoch) is int and 0 <= epoch <= _MAX_EPOCH:
        yield from _missing_checkpoint(prefix, epoch, document)
    onnx = document.at("model", "onnx")
    if isinstance(onnx, str) and onnx and "://" not in onnx and not _is_file(base / onnx):
        yield Problem(*document.place("model", "onnx"), f"model.onnx: {_no_file(base / onnx)}")
    yield from _missing_data(document)
    pipeline = document.at("pipeline")
    if isinstance(pipeline, str) and pipeline:
        sentence = _no_pipeline(pipeline, base)
        if sentence:
            yield Problem(*document.place("pipeline"), f"pipeline: {sentence}")


def _missing_data(document: Document) -> Iterator[Problem]:
    """The recipe's `verify.data`, and those of targets."""
    targets = document.at("targets")
    count = len(targets) if isinstance(targets, list) else 0
    parts: list[Loc] = [(), *(("targets", index) for index in range(count))]
    for part in parts:
        loc: Loc = (*part, "verify", "data")
        data, base = document.at(*loc), document.path.parent
        if isinstance(data, str) and data and not _is_file(base / data):
            text = "data is not downloaded; name a file" if "://" in data else _no_file(base / data)
            yield Problem(*document.place(*loc), f"{dotted(loc)}: {text}")


def _missing_checkpoint(prefix: str, epoch: int, document: Document) -> Iterator[Problem]:
    symbol, params = _checkpoint(prefix, epoch, document.path.parent)
    if not _is_file(symbol):
        place = document.place("model", "mxnet", "prefix")
        yield Problem(*place, f"model.mxnet.prefix: {_no_file(symbol)}")
    elif not _is_file(params):
        place = document.place("model", "mxnet", "epoch")
        yield Problem(*place, f"model.mxnet.epoch: {_no_file(params, hint=False)}{_epochs(symbol)}")


def _checkpoint(prefix: str, epoch: int, base: Path) -> tuple[Path, Path]:
    return base / f"{prefix}-symbol.json", base / f"{prefix}-{epoch:04d}.params"


def _epochs(symbol: Path) -> str:
    """The epochs that are there instead."""
    stem = symbol.name.removesuffix("symbol.json")
    ends = [name.removeprefix(stem) for name in neighbours(symbol) if name.startswith(stem)]
    numbers = [end.removesuffix(".params") for end in ends if end.endswith(".params")]
    epochs = [str(int(number)) for number in numbers if number.isascii() and number.isdigit()]
    return f" (epochs that are there: {', '.join(epochs) or 'none'})"


def _is_file(path: Path) -> bool:
    return _holds(path, Path.is_file)


def _holds(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError):
        # not a name that a file can have, or in a folder that cannot be entered
        return False


def _no_file(path: Path, *, hint: bool = True) -> str:
    name = shown(str(path), _MAX_PATH)
    if _holds(path, Path.is_dir):
        return f"{name} is a folder, not a file"
    return f"there is no file {name}{nearest(path.name, neighbours(path)) if hint else ''}"


# ---------------------------------------------------------------- pipelines


class PipelineFile(_Part):
    """The stages of a run, in order."""

    pipeline: _Version = Field(examples=[1], description="Version of this language: 1.")
    name: str = Field(
        pattern=_NAME,
        max_length=100,
        examples=["nightly"],
        description="Its name, for those who read it.",
    )
    description: str = Field(default="", description="What it is for.")
    stages: Annotated[tuple[_StageName, ...], BeforeValidator(_tupled)] = Field(
        min_length=1,
        examples=[["import", "build", "export"]],
        description="Stages, each after those that it needs.",
    )

    @field_validator("stages")
    @classmethod
    def _check_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise wrong(f"'{name}' stands twice", index)
            missing = [needed for needed in _REQUIRES[name] if needed not in value[:index]]
            if missing:
                raise wrong(f"'{name}' needs '{missing[0]}' before it", index)
        return value


def load_pipeline(name: str, base: Path = Path()) -> Pipeline:
    """A pipeline by name, or from a file when it ends in `.yaml`, its path from `base`. Raises RecipeError."""
    sentence = _no_pipeline(name, base)
    if sentence:
        raise RecipeError(sentence)
    path = _pipeline_paths(name, base)[0]
    document = read_yaml(path)
    found, problems = check(document, PipelineFile)
    if found is None:
        raise document.error(problems)
    return Pipeline(found.name, found.stages, path)


def pipeline_candidates(name: str, base: Path = Path()) -> list[Path]:
    """The files that this pipeline could be, the first before the others; not all of them are there."""
    if name.endswith((".yaml", ".yml")):
        return [base / name]
    return [folder / f"{name}.yaml" for folder in _pipeline_folders()]


def _pipeline_paths(name: str, base: Path) -> list[Path]:
    """Those of them that are there; a file that was named by its path, whether it is there or not."""
    paths = pipeline_candidates(name, base)
    return paths if paths == [base / name] else [path for path in paths if _is_file(path)]


def _pipeline_folders() -> list[Path]:
    """Where named pipelines are: here, in the installed package, in the checkout."""
    package = Path(__file__).parent
    return [Path("pipelines"), package / "pipelines", package.parent / "pipelines"]


def _no_pipeline(name: str, base: Path) -> str:
    """What to say when there is no such pipeline; nothing when there is."""
    paths = _pipeline_paths(name, base)
    if paths:
        return "" if _is_file(paths[0]) else _no_file(paths[0])
    there = sorted({path.stem for folder in _pipeline_folders() for path in folder.glob("*.yaml")})
    near = nearest(name, there)
    return f"there is no pipeline {quoted(name)}{near} (there are {', '.join(there)})"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors. A target may also be one word."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    fields = schema["properties"]
    word = {"type": "string", "enum": sorted(PRESETS), "description": "A preset."}
    fields["targets"]["items"] = {"anyOf": [word, fields["targets"]["items"]]}
    fields["targets"]["default"] = ["host"]
    fields["inputs"]["default"] = fields["variants"]["default"] = {}
    return schema
