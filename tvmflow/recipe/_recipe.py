"""A recipe as a whole: what all of its parts say together, and what it is for one target or variant."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tvmflow.mistakes import wrong
from tvmflow.recipe._closed import NAME, Closed, Version, tupled
from tvmflow.recipe._model import InputSpec, ModelSource
from tvmflow.recipe._release import ReleaseVersion
from tvmflow.recipe._targets import OF_THE_WHOLE, Machine, Output, TargetSpec, named, once
from tvmflow.recipe._work import Kernels, Tune, Verify
from tvmflow.targets._presets import PRESETS
from tvmflow.yaml_positions import nearest, quoted

_MAX_VARIANT: Final = 50
_AnyClosed = TypeVar("_AnyClosed", bound=Closed)


class Variant(Closed):
    """The same model with other inputs: a build of its own, `<recipe>-<variant>`, for every target."""

    inputs: dict[str, InputSpec] = Field(
        default={},
        examples=[{"data": {"shape": [8, 3, 224, 224]}}],
        description="Inputs that are otherwise than the recipe's; what a field leaves out is as there.",
    )


def _changed(whole: _AnyClosed, change: Closed | None) -> _AnyClosed:
    """The part with the fields that the change gives. Raises ValidationError when they do not fit together."""
    if change is None:
        return whole
    given = {
        name: getattr(part, name) for part in (whole, change) for name in part.model_fields_set
    }
    return type(whole).model_validate(given)


def _fitting(whole: _AnyClosed, change: Closed | None, *loc: str | int) -> _AnyClosed:
    """The same for a change that stands at this place in the recipe."""
    try:
        return _changed(whole, change)
    except ValidationError as error:
        context = error.errors()[0]["ctx"]
        raise wrong(context["text"], *loc, *context["at"]) from None


class Recipe(Closed):
    """One model: its source, inputs, targets, tuning, outputs and checks."""

    recipe: Version = Field(examples=[1], description="Version of this language: 1.")
    name: str = Field(
        pattern=NAME,
        max_length=100,
        examples=["resnet50"],
        description="Its name: the folder in `dist` and the files there. Small letters, digits, `.`, `_`, `-`.",
    )
    version: ReleaseVersion = Field(
        default="0",
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
        tuple[Annotated[TargetSpec, BeforeValidator(named)], ...], BeforeValidator(tupled)
    ] = Field(
        default=(TargetSpec(name="host", preset="host"),),
        min_length=1,
        examples=[["host", {"name": "edge", "preset": "x86-64-v2"}]],
        description="Machines to build for; by default this one.",
    )
    kernels: Kernels = Field(
        default=Kernels(),
        examples=[{"layout": "plain"}],
        description="How operators become kernels.",
    )
    tune: Tune = Field(
        default=Tune(),
        examples=[{"trials": 1000}],
        description="How much to search for fast kernels.",
    )
    outputs: Annotated[tuple[Output, ...], BeforeValidator(tupled)] = Field(
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
            for other in value:
                if other.parts and name in other.machines():
                    text = f"'{name}' is what a part of the target '{other.name}' is called"
                    raise wrong(text, index)
        return value

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return once(value)

    @field_validator("variants")
    @classmethod
    def _check_variants(cls, value: dict[str, Variant]) -> dict[str, Variant]:
        for name in value:
            if not re.fullmatch(NAME, name) or len(name) > _MAX_VARIANT:
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
            tune = _fitting(self.tune, target.tune, "targets", index, "tune")
            _fitting(self.verify, target.verify, "targets", index, "verify")
            for at, part in enumerate(target.parts):
                _fitting(tune, part.tune, "targets", index, "parts", at, "tune")
        return self

    @model_validator(mode="after")
    def _check_speedup(self) -> Recipe:
        for index, target in enumerate(self.targets):
            effective = self.of(target.name)
            above: tuple[str | int, ...] = ("targets", index)
            if self.tune.min_speedup is not None:
                above = ()
            for at, part in enumerate(target.parts):
                if part.tune and part.tune.min_speedup is not None:
                    above = ("targets", index, "parts", at)
                    effective = self.of(f"{target.name}.{part.name}")
            if effective.tune.min_speedup is None:
                continue
            if target.parts:
                text = f"is for a library as a whole, and '{target.name}' is in parts"
            elif effective.verify.run_on == "qemu":
                text = f"needs a latency, and none is measured under emulation (run_on: qemu), where '{target.name}' runs"
            else:
                continue
            raise wrong(text, *above, "tune", "min_speedup")
        return self

    def of(self, target: str) -> Recipe:
        """The recipe as it is for the target of this name: with what is otherwise there.

        The name may be `TARGET.PART`: then as it is for that part, which has a name of its own.
        """
        for spec in self.targets:
            if spec.name == target:
                return self._with(spec)
            if spec.parts and target in spec.machines():
                return self._with(spec)._part(spec.machines()[target])
        return self

    def _with(self, spec: TargetSpec) -> Recipe:
        changes = {
            "outputs": spec.outputs or self.outputs,
            "kernels": _changed(self.kernels, spec.kernels),
            "tune": _changed(self.tune, spec.tune),
            "verify": _changed(self.verify, spec.verify),
        }
        return self.model_copy(update=changes)

    def _part(self, part: Machine) -> Recipe:
        changes = {
            "name": f"{self.name}-{part.name}",
            "outputs": tuple(each for each in self.outputs if each not in OF_THE_WHOLE),
            "kernels": _changed(self.kernels, part.kernels),
            "tune": _changed(self.tune, part.tune),
        }
        return self.model_copy(update=changes)

    def variant(self, name: str) -> Recipe:
        """The recipe of one variant, with a name of its own."""
        inputs = dict(self.inputs)
        for each, change in self.variants[name].inputs.items():
            inputs[each] = _changed(inputs[each], change) if each in inputs else change
        return self.model_copy(update={"name": f"{self.name}-{name}", "inputs": inputs})


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
