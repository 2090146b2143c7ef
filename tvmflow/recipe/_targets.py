"""`targets` and `outputs`: the machines to build for, and the files that each gets."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, field_validator, model_validator
from typing_extensions import Self

from tvmflow.mistakes import one_of, wrong
from tvmflow.recipe._closed import MAX_PATH, NAME, Closed, enum, member, tupled
from tvmflow.recipe._work import Kernels, TuneChange, VerifyChange
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.gpu import CUDA
from tvmflow.targets.platforms import host_triple
from tvmflow.targets.toolchain import FLAGS
from tvmflow.targets.tracker import VARIABLE, split_address
from tvmflow.values import Json
from tvmflow.yaml_positions import quoted

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
OF_THE_WHOLE: Final = ("archive", "bundle", "cpp", "wheel")
"""Outputs that hold a model in parts together; there is one of each other output for each part."""

# there are too many for one line
_GPU_ARCH: Final = re.compile(r"sm_[0-9]{2,3}[af]?")
_ALL_TARGETS: Final = "`tvmflow targets` lists them"

_PresetName = Annotated[str, member(PRESETS, "a target", _ALL_TARGETS), enum(sorted(PRESETS))]
Output = Annotated[str, member(OUTPUT_NAMES, "an output"), enum(OUTPUT_NAMES)]


def once(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs, none of which may stand twice."""
    for index, name in enumerate(outputs):
        if name in outputs[:index]:
            raise wrong(f"'{name}' stands twice", index)
    if outputs == ("archive",):
        raise wrong("an archive holds the other outputs; name at least one beside it")
    return outputs


class Remote(Closed):
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


class Toolchain(Closed):
    """A linker of your own, in place of the one that comes with tvmflow."""

    linker: str = Field(
        min_length=1,
        max_length=MAX_PATH,
        examples=["aarch64-linux-gnu-g++"],
        description="A compiler driver or a linker: its name on `PATH`, or an absolute path.",
    )
    flags: Annotated[tuple[str, ...], BeforeValidator(tupled)] = Field(
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


class Machine(Closed):
    """What code is made for, linked with and measured on."""

    name: str = Field(
        pattern=NAME,
        max_length=100,
        examples=["edge"],
        description="Its name; of a target, the folder in `dist`.",
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
    kernels: Kernels | None = Field(
        default=None,
        examples=[{"precision": "mixed"}],
        description="Fields of `kernels` that are otherwise for it.",
    )
    tune: TuneChange | None = Field(
        default=None,
        examples=[{"trials": 1000}],
        description="Fields of `tune` that are otherwise for it.",
    )

    @model_validator(mode="after")
    def _check_machine(self) -> Self:
        if not self.is_one():
            return self
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
    def _check_gpu(self) -> Self:
        mapping = self.tvm_mapping() if self.is_one() else None
        if mapping is None or mapping["kind"] != CUDA:
            return self
        if not _GPU_ARCH.fullmatch(str(mapping.get("arch", ""))):
            raise wrong("needs the GPU's architecture, such as `arch: sm_90`", "tvm")
        host = mapping.get("host")
        if not isinstance(host, dict) or not host_triple(host):
            raise wrong(
                "needs the CPU beside the GPU, such as `host: {kind: llvm, mtriple: x86_64-linux-gnu}`",
                "tvm",
            )
        return self

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        if self.remote is None or not self.is_one():
            return self
        mapping = self.tvm_mapping()
        if mapping is None:
            raise wrong("goes with a target that says what the device is, not with host", "remote")
        if mapping["kind"] not in ("llvm", CUDA):
            raise wrong("kernels are measured on CPUs and NVIDIA GPUs only", "remote")
        if not host_triple(mapping):
            raise wrong("needs the device's mtriple, such as aarch64-linux-gnu", "tvm")
        if mapping["kind"] == CUDA:
            return self
        if self.num_cores is None and "num-cores" not in mapping:
            raise wrong("needs num_cores: how many threads the device runs", "remote")
        return self

    def is_one(self) -> bool:
        """Whether it is a machine, and not a name for several."""
        return True

    def tvm_mapping(self) -> dict[str, Json] | None:
        """The mapping that TVM takes; None for `host`, which is looked up."""
        if self.preset is None:
            return dict(self.tvm or {})
        mapping = PRESETS[self.preset].tvm
        return None if mapping is None else {**mapping, **(self.tvm or {})}


class ModelPart(Machine):
    """A part of the model, up to the tensors at which it is cut, with a machine of its own."""

    until: Annotated[tuple[str, ...], BeforeValidator(tupled)] = Field(
        default=(),
        examples=[["scores", "boxes"]],
        description="Tensors of the model that this part computes for those after it. "
        "The last part has none: it ends with the model's outputs.",
    )

    @field_validator("until")
    @classmethod
    def _check_until(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if not name:
                raise wrong("must be a tensor's name", index)
            if name in value[:index]:
                raise wrong(f"{quoted(name)} stands twice", index)
        return value


class TargetSpec(Machine):
    """A machine to build for: a preset's name, or a mapping with a name of its own.

    `kernels`, `tune`, `outputs` and `verify` are otherwise for it than the recipe says for all targets.
    """

    outputs: Annotated[tuple[Output, ...] | None, BeforeValidator(tupled)] = Field(
        default=None,
        min_length=1,
        examples=[["shared-library", "bundle"]],
        description="Files to deliver for it, in place of the recipe's `outputs`.",
    )
    verify: VerifyChange | None = Field(
        default=None,
        examples=[{"against": "none"}],
        description="Fields of `verify` that are otherwise for it.",
    )
    parts: Annotated[tuple[ModelPart, ...], BeforeValidator(tupled)] = Field(
        default=(),
        examples=[
            [
                {"name": "features", "until": ["scores", "boxes"], "preset": "cuda-sm90"},
                {"name": "decode", "preset": "host"},
            ]
        ],
        description="The model in parts, in order, each for a machine of its own, in place of one machine for all of it: "
        "see [parts.md](parts.md).",
    )

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value and once(value)

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, value: tuple[ModelPart, ...]) -> tuple[ModelPart, ...]:
        if len(value) == 1:
            raise wrong("a model in parts has at least two")
        given: dict[str, str] = {}
        for index, part in enumerate(value):
            if part.name in [each.name for each in value[:index]]:
                raise wrong(f"a second part with the name '{part.name}'", index, "name")
            for at, tensor in enumerate(part.until):
                if tensor in given:
                    text = f"{quoted(tensor)} is given by the part '{given[tensor]}' already"
                    raise wrong(text, index, "until", at)
                given[tensor] = part.name
            is_last = index == len(value) - 1
            if is_last and part.until:
                raise wrong("the last part ends with the model's outputs", index, "until")
            if not is_last and not part.until:
                raise wrong("needs until: the tensors at which this part ends", index)
        return value

    @model_validator(mode="after")
    def _check_no_machine(self) -> TargetSpec:
        for field in ("preset", "tvm", "num_cores", "remote", "toolchain"):
            if self.parts and getattr(self, field) is not None:
                raise wrong("goes into each of the parts, where there are parts", field)
        return self

    def is_one(self) -> bool:
        return not self.parts

    def machines(self) -> dict[str, Machine]:
        """What is built for, by name: this target, or each of its parts as `TARGET.PART`."""
        return {f"{self.name}.{part.name}": part for part in self.parts} or {self.name: self}


def named(value: Any) -> Any:
    """A target given by one word is the preset of that name."""
    if not isinstance(value, str):
        return value
    return {"name": value, "preset": one_of(value, PRESETS, "a target", _ALL_TARGETS)}
