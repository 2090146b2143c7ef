"""`targets` and `outputs`: the machines to build for, and the files to deliver for each."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self

from tvmflow.core.formatting import quoted
from tvmflow.core.generated_text import find_name_problem
from tvmflow.core.schema import (
    MAX_PATH_LENGTH,
    NAME_PATTERN,
    ClosedModel,
    FolderName,
    YamlList,
    check_choice,
    field_error,
    one_of,
    schema_enum,
    to_tuple,
)
from tvmflow.core.types import Json
from tvmflow.exporters import EXPORTERS
from tvmflow.recipe.sections import Kernels, Runtime, TuneOverrides, VerifyOverrides
from tvmflow.targets.backends import backend_for, is_supported
from tvmflow.targets.features import LEVELS, find_problem, isa_level_config, sort_isa_levels
from tvmflow.targets.presets import NAMES, PRESETS, find_presets, preset_name
from tvmflow.targets.toolchain import DEFAULT_FLAGS
from tvmflow.targets.tracker import TRACKER_VARIABLE, split_address
from tvmflow.targets.tvm_target import cpu_target, cpu_triple, split_threads

OUTPUT_NAMES: Final = tuple(sorted(EXPORTERS))

MAX_THREADS: Final = 4096

_TRIPLE: Final = re.compile(r"[A-Za-z0-9._+-]*")
_LISTED_BY: Final = "`tvmflow targets` lists them"

_PresetName = Annotated[
    str,
    one_of(NAMES, "a target", _LISTED_BY, find_presets),
    AfterValidator(preset_name),
    schema_enum(NAMES),
]
_IsaLevelName = Annotated[str, one_of(LEVELS, "a level"), schema_enum(sorted(LEVELS))]
Output = Annotated[str, one_of(OUTPUT_NAMES, "an output"), schema_enum(OUTPUT_NAMES)]


def check_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Validate that names are unique."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise field_error(f"'{name}' is listed twice", index)
    return names


def check_outputs(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Validate that outputs are unique, and that `archive` is not the only output."""
    check_unique(outputs)
    if outputs == ("archive",):
        raise field_error("an archive contains the other outputs; list at least one more output")
    return outputs


Outputs = Annotated[YamlList[Output], AfterValidator(check_outputs)]
"""The files to deliver."""


class Remote(ClosedModel):
    """Devices of an RPC tracker to measure on."""

    key: str = Field(min_length=1, max_length=100, examples=["pi4"])
    """Key of the devices at the tracker."""
    tracker: str | None = Field(
        default=None,
        examples=["192.168.1.10:9190"],
        description=f"`HOST:PORT` of the tracker. Default: the environment variable `{TRACKER_VARIABLE}`.",
    )
    priority: int = Field(default=1, ge=0, le=1000)
    """Priority of requests for a device; higher numbers are served first."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Time limit of one measurement in seconds, including the upload."""

    @field_validator("key")
    @classmethod
    def _check_key(cls, value: str) -> str:
        if re.search(r"[:\s]", value):
            raise field_error("must not contain spaces or colons")
        return value

    @field_validator("tracker")
    @classmethod
    def _check_tracker(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                split_address(value)
            except ValueError:
                text = f"must be HOST:PORT, such as 192.168.1.10:9190, not {quoted(value)}"
                raise field_error(text) from None
        return value


class Toolchain(ClosedModel):
    """A linker to use instead of the one installed with tvmflow."""

    linker: str = Field(
        min_length=1, max_length=MAX_PATH_LENGTH, examples=["aarch64-linux-gnu-g++"]
    )
    """Compiler driver or linker: a name on `PATH`, or an absolute path."""
    flags: YamlList[str] = Field(default=DEFAULT_FLAGS, examples=[["-shared", "-s"]])
    """Arguments, one per list item, before `-o` and the files."""

    @field_validator("linker")
    @classmethod
    def _check_linker(cls, value: str) -> str:
        if re.search(r"[\0\s]", value):
            raise field_error("must be a program without arguments; put arguments into flags")
        if "/" in value and not value.startswith("/"):
            raise field_error("must be a name on PATH, or an absolute path")
        return value


class BuildTarget(ClosedModel):
    """The machine that code is built for, linked for and measured on.

    It is a target, or a part of a model with a target of its own.
    """

    name: FolderName = Field(pattern=NAME_PATTERN, max_length=100, examples=["edge"])
    """Name of the target and of its folder in `dist`."""
    preset: _PresetName | None = None
    """Preset to start from."""
    tvm: dict[str, Json] | None = Field(
        default=None,
        examples=[{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}],
    )
    """TVM target: `kind` and attributes such as `mtriple` and `mcpu`. With `preset`: attributes to override."""
    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Threads to tune and time with. Default: the preset's, else the CPUs that the run may use. Untuned code does not
    depend on it."""
    num_cores: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Former name of `threads`."""
    remote: Remote | None = Field(default=None, examples=[{"key": "pi4"}])
    """Devices to tune on, instead of this machine."""
    toolchain: Toolchain | None = Field(
        default=None, examples=[{"linker": "aarch64-linux-gnu-g++"}]
    )
    """Another linker."""
    runtime: Runtime | None = None
    """Override of `runtime`."""
    kernels: Kernels | None = Field(default=None, examples=[{"precision": "mixed"}])
    """Overrides of `kernels`."""
    tune: TuneOverrides | None = Field(default=None, examples=[{"trials": 1000}])
    """Overrides of `tune`."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if not self.is_single():
            return self
        if self.preset is None and self.tvm is None and self.tvm_target() == {}:
            raise field_error("needs preset or tvm, found neither")
        if self.tvm is None:
            return self
        if self.preset is None and not isinstance(self.tvm.get("kind"), str):
            raise field_error("needs a kind, such as `kind: llvm`", "tvm")
        if self.preset is not None:
            base = PRESETS[self.preset].tvm
            if base is None:
                raise field_error("is not allowed with the preset host, which is detected", "tvm")
            if self.tvm.get("kind", base["kind"]) != base["kind"]:
                kind = base["kind"]
                raise field_error(f"the preset {self.preset} has the kind {kind}", "tvm", "kind")
        return self

    @model_validator(mode="after")
    def _check_threads(self) -> Self:
        if self.threads is not None and self.num_cores is not None:
            raise field_error("is the former name of threads; remove one of them", "num_cores")
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        mapping = self.tvm_target() if self.is_single() else None
        problem = backend_for(mapping).target_problem(mapping) if mapping else ""
        if mapping and not _TRIPLE.fullmatch(cpu_triple(mapping)):
            problem = f"{quoted(cpu_triple(mapping))} is not an mtriple, such as aarch64-linux-gnu"
        if problem:
            raise field_error(problem, "tvm")
        return self

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        if self.remote is None or not self.is_single():
            return self
        mapping = self.tvm_target()
        if mapping is None:
            raise field_error(
                "is not allowed with host; describe the device with preset or tvm", "remote"
            )
        backend = backend_for(mapping)
        if not is_supported(mapping["kind"]) or backend.no_tvm_runtime_reason(mapping):
            raise field_error("kernels can only be measured on CPUs and NVIDIA GPUs", "remote")
        if not cpu_triple(mapping):
            raise field_error("needs the device's mtriple, such as aarch64-linux-gnu", "tvm")
        if not backend.RUNS_ON_HOST_CPU:
            return self
        if self.wanted_threads is None and split_threads(mapping)[1] is None:
            raise field_error("needs threads, the number of threads to use on the device", "remote")
        return self

    def is_single(self) -> bool:
        """Return whether this is one target, not one of several parts."""
        return True

    @property
    def wanted_threads(self) -> int | None:
        """The requested number of threads, from either field."""
        return self.num_cores if self.threads is None else self.threads

    def tvm_target(self) -> dict[str, Json] | None:
        """Return TVM's target as a mapping; None for `host`, which is detected."""
        if self.preset is None:
            return dict(self.tvm or {})
        mapping = PRESETS[self.preset].tvm
        return None if mapping is None else {**mapping, **(self.tvm or {})}


class ModelPart(BuildTarget):
    """A part of a partitioned model, with a target of its own."""

    until: YamlList[str] = Field(default=(), examples=[["scores", "boxes"]])
    """Tensors at which this part ends and which it passes on. Omit it in the last part, which ends at the model's
    outputs."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if backend_for(self.tvm_target() or {}).IS_BESIDE_HOST:
            raise field_error("is only for whole models", "preset" if self.preset else "tvm")
        return self

    @field_validator("until")
    @classmethod
    def _check_until(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if not name:
                raise field_error("must be the name of a tensor", index)
            if problem := find_name_problem(name):
                raise field_error(f"the tensor {quoted(name)} {problem}", index)
            if name in value[:index]:
                raise field_error(f"{quoted(name)} is listed twice", index)
        return value


class TargetSpec(BuildTarget):
    """A machine to build for: the name of a preset, or a mapping.

    A mapping may override fields of the recipe.
    """

    levels: YamlList[_IsaLevelName] = Field(
        default=(), examples=[["x86-64-v2", "x86-64-v3", "x86-64-v4"]]
    )
    """ISA levels of a [multi-ISA library](targets.md), which selects one at run time to suit the CPU."""
    outputs: Annotated[tuple[Output, ...] | None, BeforeValidator(to_tuple)] = Field(
        default=None, min_length=1, examples=[["shared-library", "bundle"]]
    )
    """Override of `outputs`."""
    verify: VerifyOverrides | None = Field(default=None, examples=[{"against": "none"}])
    """Overrides of `verify`."""
    parts: YamlList[ModelPart] = Field(
        default=(),
        examples=[
            [
                {"name": "features", "until": ["scores", "boxes"], "preset": "cuda-sm90"},
                {"name": "decode", "preset": "host"},
            ]
        ],
    )
    """Parts of a [partitioned model](parts.md) in order, each with a target of its own."""

    @field_validator("levels")
    @classmethod
    def _check_isa_levels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return sort_isa_levels(check_unique(value))

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value and check_outputs(value)

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, value: tuple[ModelPart, ...]) -> tuple[ModelPart, ...]:
        if len(value) == 1:
            raise field_error("needs at least two parts")
        owners: dict[str, str] = {}
        for index, part in enumerate(value):
            if part.name in [other.name for other in value[:index]]:
                raise field_error(f"duplicate part name '{part.name}'", index, "name")
            for at, tensor in enumerate(part.until):
                if tensor in owners:
                    text = f"the part '{owners[tensor]}' already ends at {quoted(tensor)}"
                    raise field_error(text, index, "until", at)
                owners[tensor] = part.name
            is_last = index == len(value) - 1
            if is_last and part.until:
                raise field_error("is not allowed for the last part", index, "until")
            if not is_last and not part.until:
                raise field_error("needs until, the tensors at which this part ends", index)
        return value

    @model_validator(mode="after")
    def _check_multi_isa_target(self) -> Self:
        if not self.all_isa_levels:
            return self
        base = super().tvm_target()
        problem = find_problem(base or {}, self.all_isa_levels)
        if base is None and self.preset is not None:
            problem = "is not allowed with host, whose CPU is detected"
        if problem:
            raise field_error(problem, "levels")
        for field in ("mcpu", "mattr"):
            if field in (self.tvm or {}):
                raise field_error("is set by each level; leave it out", "tvm", field)
        return self._refuse_tools("levels")

    @model_validator(mode="after")
    def _check_beside_host(self) -> Self:
        mapping = super().tvm_target() or {}
        backend = backend_for(mapping)
        if not backend.IS_BESIDE_HOST:
            return self
        if problem := backend.target_problem(mapping):
            raise field_error(problem, "tvm")
        return self._refuse_tools("WebGPU")

    def _refuse_tools(self, feature: str) -> Self:
        for field in ("remote", "toolchain"):
            if getattr(self, field) is not None:
                raise field_error(f"is not allowed with {feature}", field)
        return self

    @model_validator(mode="after")
    def _check_parts_alone(self) -> TargetSpec:
        for field in ("preset", "tvm", "threads", "num_cores", "remote", "toolchain", "levels"):
            if self.parts and getattr(self, field) not in (None, ()):
                raise field_error("is not allowed with parts; set it for each part", field)
        return self

    def is_single(self) -> bool:
        """Return whether this is one target, not one of several parts."""
        return not self.parts

    @property
    def all_isa_levels(self) -> tuple[str, ...]:
        """The target's ISA levels, or its preset's; empty for a single-ISA library."""
        return self.levels or (PRESETS[self.preset].levels if self.preset else ())

    def webgpu_target(self) -> dict[str, Json] | None:
        """Return TVM's target for the browser's GPU, or None."""
        mapping = super().tvm_target() or {}
        backend = backend_for(mapping)
        return backend.complete_target(mapping) if backend.IS_BESIDE_HOST else None

    @property
    def webgpu_name(self) -> str:
        """The name of the build for the browser's GPU, or an empty string."""
        mapping = self.webgpu_target()
        return f"{self.name}.{mapping['kind']}" if mapping else ""

    def tvm_target(self) -> dict[str, Json] | None:
        """Return TVM's target: that of the first ISA level or the WebAssembly fallback; None for `host`."""
        mapping = super().tvm_target()
        backend = backend_for(mapping or {})
        if mapping and backend.IS_BESIDE_HOST:
            return {} if backend.target_problem(mapping) else dict(cpu_target(mapping))
        levels = self.all_isa_levels
        return isa_level_config(mapping or {}, levels[0]) if levels else mapping

    def build_targets(self) -> dict[str, BuildTarget]:
        """Return the targets to build for by name: itself, its parts `TARGET.PART`, or levels `TARGET.LEVEL`."""
        if self.parts:
            return {f"{self.name}.{part.name}": part for part in self.parts}
        mapping = super().tvm_target() or {}
        levels = {
            f"{self.name}.{level}": {"preset": None, "tvm": isa_level_config(mapping, level)}
            for level in self.all_isa_levels
        }
        fixed = {"levels": (), "threads": self.wanted_threads, "num_cores": None}
        copies: dict[str, BuildTarget] = {
            name: self.model_copy(update=fields | fixed) for name, fields in levels.items()
        }
        return copies or {self.name: self}


def expand_preset(value: Any) -> Any:
    """Expand the name of a preset to a target's mapping; return other values unchanged."""
    if not isinstance(value, str):
        return value
    preset = check_choice(value, NAMES, "a target", _LISTED_BY, find_presets)
    return {"name": value, "preset": preset}


TargetSpecs = YamlList[Annotated[TargetSpec, BeforeValidator(expand_preset)]]
"""The targets of a recipe or a pipeline."""


def add_presets(field: dict[str, Any]) -> None:
    """Extend the JSON Schema of a list of targets, so that it accepts names of presets."""
    preset = {"type": "string", "enum": list(NAMES), "description": "Name of a preset."}
    field["items"] = {"anyOf": [preset, field["items"]]}
