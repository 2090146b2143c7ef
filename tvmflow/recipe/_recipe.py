"""The recipe: its sections, checks across them, and overrides by targets and variants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tvmflow.core.bill_of_materials import license_expression
from tvmflow.core.dimensions import WrongSize, find_bounds, is_name, list_names
from tvmflow.core.formatting import quoted
from tvmflow.core.schema import (
    NAME_PATTERN,
    ClosedModel,
    FolderName,
    FormatVersion,
    YamlList,
    check_folder_name,
    field_error,
    first_field_error,
    list_set_fields,
    published_schema,
)
from tvmflow.core.text import did_you_mean, parse_size
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.exporters import PARTITIONED_EXPORTERS
from tvmflow.exporters.exporter import UNVERSIONED
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import MAX_ELEMENTS, InputRequest
from tvmflow.frontends.states import ANY
from tvmflow.recipe._model_fields import DimensionName, DimensionSpec, InputSpec, ModelSource
from tvmflow.recipe.sections import (
    Kernels,
    Quantize,
    QuantizeOverrides,
    ReleaseVersion,
    Runtime,
    Tune,
    Verify,
    VerifyOverrides,
)
from tvmflow.recipe.targets import (
    BuildTarget,
    Outputs,
    TargetSpec,
    TargetSpecs,
    add_presets,
)
from tvmflow.targets.form_names import C_LIBRARY

_MAX_VARIANT_NAME: Final = 50
_MAX_DIMENSIONS: Final = 16
_Section = TypeVar("_Section", bound=ClosedModel)


def _check_variant_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > _MAX_VARIANT_NAME:
        raise field_error(
            "must start with a lowercase letter or digit, contain only lowercase letters, digits "
            f"and . _ -, and have at most {_MAX_VARIANT_NAME} characters"
        )
    return check_folder_name(name)


_VariantName = Annotated[str, AfterValidator(_check_variant_name)]


def _check_expression(value: str) -> str:
    expression = license_expression(value)
    if not expression:
        raise field_error(
            f"must be an SPDX license expression, such as Apache-2.0 or `MIT OR BSD-3-Clause`, not {quoted(value)}; "
            "write LicenseRef-NAME for a license that SPDX does not list"
        )
    return expression


def _check_pattern(name: str) -> str:
    if name.count(ANY) > 1:
        raise field_error(f"has more than one `{ANY}`")
    return name


_TensorPattern = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_check_pattern)]
"""A tensor name with at most one `*`, which matches any text."""


def _check_stored_dtype(value: Any) -> Any:
    if value not in (None, "float16", "int8"):
        raise field_error("must be float16 or int8, or be left out to keep the dtype of the model")
    return value


class StateSpec(ClosedModel):
    """The output that an input takes from the previous call, and how the library stores it."""

    output: _TensorPattern = Field(examples=["present.*"])
    """Name of the output. A state without other fields may be written as just this name."""
    dtype: Annotated[Literal["float16", "int8"] | None, BeforeValidator(_check_stored_dtype)] = (
        Field(default=None, examples=["float16"])
    )
    """Store a float32 state to which steps append, such as a KV cache, in half of the memory (`float16`) or about a
    quarter (`int8`, with a scale for each row; [details](howto/streaming.md#a-cache-in-float16-or-int8)). Default:
    the model's."""


def _read_state(value: Any) -> Any:
    if isinstance(value, str):
        return {"output": value}
    if not isinstance(value, dict | StateSpec):
        raise field_error("must be the name of an output, or a mapping with `output` and `dtype`")
    return value


# A union of types would report each mistake once per member.
_State = Annotated[StateSpec, BeforeValidator(_read_state)]

_SpdxExpression = Annotated[str, Field(max_length=500), AfterValidator(_check_expression)]
"""A canonical SPDX license expression."""


class Variant(ClosedModel):
    """The model with other input shapes, another precision or other kernels.

    Overrides of a target take precedence over those of a variant.
    """

    inputs: dict[str, InputSpec] = Field(
        default={}, examples=[{"data": {"shape": [8, 3, 224, 224]}}]
    )
    """Overrides of `inputs`, field by field."""
    dimensions: dict[DimensionName, DimensionSpec] = Field(
        default={}, examples=[{"seq": {"min": 1, "max": 128}}]
    )
    """Additional dimensions, or replacements of the recipe's."""
    kernels: Kernels | None = Field(default=None, examples=[{"precision": "mixed"}])
    """Overrides of `kernels`."""
    quantize: QuantizeOverrides | None = Field(default=None, examples=[{"data": "calibration.npz"}])
    """Quantizes this variant; overrides of `quantize`."""
    verify: VerifyOverrides | None = Field(default=None, examples=[{"rtol": 0.01}])
    """Overrides of `verify`."""


def _check_dimension_names(dimensions: Mapping[str, DimensionSpec], *loc: str) -> None:
    """Check the number of dimensions, and that names differ in more than case: C code has them as macros."""
    if len(dimensions) > _MAX_DIMENSIONS:
        text = f"has {len(dimensions)} dimensions, and a library has at most {_MAX_DIMENSIONS}"
        raise field_error(text, *loc)
    names: dict[str, str] = {}
    for name in dimensions:
        other = names.setdefault(name.upper(), name)
        if other != name:
            text = f"differs only in case from '{other}'; choose another name"
            raise field_error(text, *loc, name)


def _check_dynamic_shape(
    spec: InputSpec, dimensions: Mapping[str, DimensionSpec], *loc: str
) -> None:
    """Check the dimension names in a shape, its size at the maximum, and its image preprocessing."""
    for axis, size in enumerate(spec.shape or ()):
        for name in list_names(size):
            if name not in dimensions:
                hint = did_you_mean(name, dimensions)
                fix = f"define it under `dimensions`, such as `{name}: {{max: 512}}`"
                text = f"there is no dimension '{name}'{hint} (write a number, or {fix})"
                raise field_error(text, *loc, "shape", axis)
        if isinstance(size, str) and (problem := _find_range_problem(size, dimensions)):
            raise field_error(problem, *loc, "shape", axis)
    request = spec.request(loc[-1], dimensions)
    if not request.sizes:
        return
    if math.prod(request.shape or ()) > MAX_ELEMENTS:
        names = " and ".join(f"{d.name} at {d.max}" for d in request.dimensions)
        raise field_error(f"has more than 2^31 elements with {names}", *loc, "shape")
    if spec.image is not None:
        _check_dynamic_image(spec, request, *loc)


def _find_range_problem(size: str, dimensions: Mapping[str, DimensionSpec]) -> str:
    """Return why an expression is invalid or negative for some sizes, or an empty string."""
    bounds = {name: (spec.min, spec.max) for name, spec in dimensions.items()}
    try:
        least, _ = find_bounds(size, bounds)
    except WrongSize as error:
        return str(error)
    return f"'{size}' may be {least}, which is below 0" if least < 0 else ""


def _check_dynamic_image(spec: InputSpec, request: InputRequest, *loc: str) -> None:
    """Check the image preprocessing of an input with a dynamic batch, which must be its only dynamic axis."""
    if any(isinstance(size, str) for size in request.sizes[1:]):
        text = "makes images of one size, and the input has a dynamic dimension besides its batch: remove one of them"
        raise field_error(text, *loc, "image")
    if spec.image is not None and spec.dtype is not None:
        spec.image.check_tensor(TensorSpec("", request.shape or (), spec.dtype), *loc)


def _override(section: _Section, overrides: ClosedModel | None) -> _Section:
    """Return the section with overrides applied; ValidationError for contradictions."""
    if overrides is None:
        return section
    fields = {**list_set_fields(section), **list_set_fields(overrides)}
    return type(section).model_validate(fields)


def _check_overrides(section: _Section, overrides: ClosedModel | None, *loc: str | int) -> _Section:
    """Return the section with overrides applied; report contradictions at the path `loc`."""
    try:
        return _override(section, overrides)
    except ValidationError as error:
        text, path = first_field_error(error)
        raise field_error(text, *loc, *path) from None


class Recipe(ClosedModel):
    """One model: its source, inputs, targets, tuning budget, outputs and checks."""

    recipe: FormatVersion = Field(examples=[1])
    """Version of the recipe format: 1."""
    name: FolderName = Field(pattern=NAME_PATTERN, max_length=100, examples=["resnet50"])
    """Name of the folder in `dist` and of the files in it: lowercase letters, digits, `.`, `_`, `-`."""
    version: ReleaseVersion = Field(default=UNVERSIONED, examples=["1.2.0"])
    """Version of the delivered files, in the manifest and the name of the wheel: a Python package version, in
    quotes."""
    license: _SpdxExpression | None = Field(default=None, examples=["Apache-2.0"])
    """SPDX license expression of the model and the delivered files, for wheels and bills of materials.
    `LicenseRef-NAME` names a license that SPDX does not list."""
    model: ModelSource = Field(examples=[{"onnx": "model.onnx"}])
    """Source of the model."""
    inputs: dict[str, InputSpec] = Field(
        default_factory=dict,
        validate_default=True,
        examples=[{"data": {"shape": [1, 3, 224, 224], "dtype": "float32"}}],
    )
    """[Inputs](inputs.md): shapes, dtypes and preprocessing that the model does not define or that you override."""
    dimensions: dict[DimensionName, DimensionSpec] = Field(
        default={}, examples=[{"seq": {"min": 1, "max": 512}}]
    )
    """Dynamic dimensions, whose sizes each call chooses ([inputs.md](inputs.md)). Shapes of inputs refer to their
    names."""
    state: dict[_TensorPattern, _State] = Field(
        default={}, examples=[{"past_key_values.*": "present.*"}]
    )
    """[State](howto/streaming.md): inputs that take an output of the previous call, kept in the context's memory, such as
    a KV cache. `*` stands for the same text in both names."""
    operators: YamlList[Annotated[str, Field(min_length=1)]] = Field(
        default=(), examples=[["ops/bev_pool.py", "ops/bev_pool.c"]]
    )
    """[Custom operators](custom-operators.md): Python files, and C files that they use."""
    labels: str | None = Field(default=None, min_length=1, examples=["labels.txt"])
    """[Class names](images.md) of the first output: a file with one name per line."""
    variants: dict[_VariantName, Variant] = Field(
        default={}, examples=[{"b8": {"inputs": {"data": {"shape": [8, 3, 224, 224]}}}}]
    )
    """Variants of the model. Each is built for every target as `<name>-<variant>`, instead of the recipe itself."""
    targets: TargetSpecs = Field(
        default=(TargetSpec(name="host", preset="host"),),
        min_length=1,
        examples=[["host", {"name": "edge", "preset": "x86-64-v2"}]],
    )
    """Targets to build for. Default: this machine."""
    kernels: Kernels = Field(default=Kernels(), examples=[{"layout": "plain"}])
    """Lowering of operators to kernels."""
    quantize: Quantize | None = Field(
        default=None, examples=[{"data": "calibration.npz", "max_accuracy_drop": 0.5}]
    )
    """[Quantization](howto/quantize.md) of a float model to int8 or int4."""
    tune: Tune = Field(default=Tune(), examples=[{"trials": 1000}])
    """Search for fast kernels: budget and measurement."""
    outputs: Outputs = Field(
        default=("bundle",), min_length=1, examples=[["shared-library", "bundle"]]
    )
    """[Files to deliver](exports.md)."""
    runtime: Runtime = "auto"
    """`c`: the library calls its kernels itself. `vm`: TVM's virtual machine runs it. `auto`: `c` where
    [possible](exports.md)."""
    checks: bool = Field(default=True, examples=[False])
    """[Run-time checks](../SECURITY.md) of CPU libraries: an index out of range or an integer division by 0 returns an
    error. `false` if the inputs are known to be valid."""
    verify: Verify = Field(default=Verify(), examples=[{"rtol": 0.001}])
    """Checks that the library must pass."""
    pipeline: str = Field(default="tune", min_length=1)
    """`tune`, `compile` (no search), or the path of a pipeline file, relative to the recipe's folder."""
    stage_memory: str | None = Field(default=None, min_length=1, examples=["4GiB"])
    """[Memory limit](cli.md#memory) of each stage; `--stage-memory` takes precedence. Default: 80 % of this machine's
    memory for all stages together."""

    @field_validator("inputs", "operators")
    @classmethod
    def _check_frontend(cls, value: Any, info: ValidationInfo) -> Any:
        model = info.data.get("model")
        frontend = FRONTENDS[model.kind] if model is not None else None
        if frontend is None:
            return value
        if info.field_name == "inputs" and not value and frontend.REQUIRES_INPUTS:
            raise field_error(f"a model of {frontend.NAME} needs the shapes of its inputs here")
        if info.field_name == "operators" and value and not frontend.SOURCE.takes_operators:
            text = f"a model of {frontend.NAME} cannot have custom operators; export it to ONNX"
            raise field_error(text)
        return value

    @field_validator("targets")
    @classmethod
    def _check_names(cls, value: tuple[TargetSpec, ...]) -> tuple[TargetSpec, ...]:
        names = [target.name for target in value]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise field_error(f"duplicate target name '{name}'", index)
            for other in value:
                names_of_other = (*other.build_targets(), other.webgpu_name)
                if name.startswith(f"{other.name}.") and name in names_of_other:
                    kind = (
                        "a part" if other.parts else "a level" if other.all_isa_levels else "WebGPU"
                    )
                    text = f"'{name}' is the name of {kind} of the target '{other.name}'"
                    raise field_error(text, index)
        return value

    @field_validator("stage_memory")
    @classmethod
    def _check_stage_memory(cls, value: str | None) -> str | None:
        try:
            parse_size(value or "0")
        except ValueError as error:
            raise field_error(str(error)) from None
        return value

    @model_validator(mode="after")
    def _check_variant_inputs(self) -> Recipe:
        for name, variant in self.variants.items():
            for input_name, spec in variant.inputs.items():
                base = self.inputs.get(input_name, InputSpec())
                _check_overrides(base, spec, "variants", name, "inputs", input_name)
        return self

    @model_validator(mode="after")
    def _check_target_overrides(self) -> Recipe:
        checks = [self.verify]
        for name, variant in self.variants.items():
            checks.append(_check_overrides(self.verify, variant.verify, "variants", name, "verify"))
        for index, target in enumerate(self.targets):
            tune = _check_overrides(self.tune, target.tune, "targets", index, "tune")
            for verify in checks:
                _check_overrides(verify, target.verify, "targets", index, "verify")
            for at, part in enumerate(target.parts):
                _check_overrides(tune, part.tune, "targets", index, "parts", at, "tune")
        return self

    @model_validator(mode="after")
    def _check_dimensions(self) -> Recipe:
        used = self._check_dynamic_shapes((), self.inputs)
        sections: dict[tuple[str, ...], str] = {("dimensions", n): n for n in self.dimensions}
        for name, variant in self.variants.items():
            owner = ("variants", name)
            used |= self.for_variant(name)._check_dynamic_shapes(owner, variant.inputs)
            sections |= {(*owner, "dimensions", own): own for own in variant.dimensions}
        for loc, name in sections.items():
            if name not in used:
                text = "is in no input's shape: write its name in place of a size there, or leave it out"
                raise field_error(text, *loc)
        for index, target in enumerate(self.targets if used else ()):
            if target.parts:
                text = f"'{target.name}' is in parts, which need fixed sizes: leave `dimensions` out, and use `variants`"
                raise field_error(text, "targets", index)
        return self

    def _check_dynamic_shapes(
        self, owner: tuple[str, ...], overrides: Mapping[str, InputSpec]
    ) -> set[str]:
        """Check dimensions and dynamic shapes; return the names of used dimensions."""
        _check_dimension_names(self.dimensions, *owner, "dimensions")
        used = set[str]()
        alone = {
            size for spec in self.inputs.values() for size in spec.shape or () if is_name(size)
        }
        for name, spec in self.inputs.items():
            own = overrides.get(name)
            is_own = own is not None and "shape" in own.model_fields_set
            loc = (*(owner if is_own else ()), "inputs", name)
            _check_dynamic_shape(spec, self.dimensions, *loc)
            used.update(spec.dimension_names)
            if unknown := [entry for entry in spec.dimension_names if entry not in alone]:
                text = (
                    f"no input determines the size of '{unknown[0]}': write that name alone for a size, "
                    "in this input or in another"
                )
                raise field_error(text, *loc, "shape")
        return used

    @model_validator(mode="after")
    def _check_state(self) -> Recipe:
        for before, spec in self.state.items():
            if (ANY in before) != (ANY in spec.output):
                text = f"`{ANY}` must be in both names, or in none: '{before}' and '{spec.output}'"
                raise field_error(text, "state", before)
            if before in self.inputs and self.inputs[before].value is not None:
                raise field_error("is an input with a value, which is not a state", "state", before)
        for index, target in enumerate(self.targets if self.state else ()):
            if target.parts:
                text = f"'{target.name}' is in parts, between which no state is kept: leave `state` out"
                raise field_error(text, "targets", index)
        return self

    @model_validator(mode="after")
    def _check_min_speedup(self) -> Recipe:
        for index, target in enumerate(self.targets):
            owner, tune = self._min_speedup_owner(index, target)
            if tune.min_speedup is None:
                continue
            if target.parts:
                text = f"is not supported for the target '{target.name}', which is in parts"
            elif self._is_emulated(target.name):
                text = (
                    f"needs a latency, and the target '{target.name}' is verified under emulation "
                    "(run_on: qemu or chromium), which measures none"
                )
            else:
                continue
            raise field_error(text, *owner, "tune", "min_speedup")
        return self

    def _is_emulated(self, target: str) -> bool:
        """Return whether the recipe or a variant is verified under emulation for a target."""
        forms = [self, *map(self.for_variant, self.variants)]
        return any(form.for_target(target).verify.run_on in ("qemu", "chromium") for form in forms)

    def _min_speedup_owner(
        self, index: int, target: TargetSpec
    ) -> tuple[tuple[str | int, ...], Tune]:
        """Return the path of the section that sets `min_speedup` for a target, and its `tune`."""
        owner: tuple[str | int, ...] = ("targets", index)
        if self.tune.min_speedup is not None:
            owner = ()
        tune = self.for_target(target.name).tune
        for at, part in enumerate(target.parts):
            if part.tune and part.tune.min_speedup is not None:
                owner = ("targets", index, "parts", at)
                tune = self.for_target(f"{target.name}.{part.name}").tune
        return owner, tune

    def for_target(self, name: str) -> Recipe:
        """Return the recipe with the overrides of a target; unchanged for an unknown target.

        `TARGET.LEVEL` and `TARGET.webgpu` have the target's overrides; `TARGET.PART` also has the part's overrides, and
        the recipe gets the name `NAME-PART`.
        """
        for target in self.targets:
            if target.name == name:
                return self._with_target(target)
            if not name.startswith(f"{target.name}."):
                continue
            if name in (target.webgpu_name, *target.build_targets()):
                recipe = self._with_target(target)
                # A level is the same target on some CPUs; a part is a separate model.
                return recipe._with_part(target.build_targets()[name]) if target.parts else recipe
        return self

    def _with_target(self, target: TargetSpec) -> Recipe:
        overrides = {
            "outputs": target.outputs or self.outputs,
            "runtime": target.runtime or self.runtime,
            "kernels": _override(self.kernels, target.kernels),
            "tune": _override(self.tune, target.tune),
            "verify": _override(self.verify, target.verify),
        }
        return self.model_copy(update=overrides)

    def _with_part(self, part: BuildTarget) -> Recipe:
        overrides = {
            "name": f"{self.name}-{part.name}",
            "outputs": tuple(name for name in self.outputs if name not in PARTITIONED_EXPORTERS),
            # Image preprocessing and class names belong to the whole model.
            "inputs": {
                name: spec.model_copy(update={"image": None}) for name, spec in self.inputs.items()
            },
            "labels": None,
            "runtime": part.runtime or self._runtime_of_parts(),
            "kernels": _override(self.kernels, part.kernels),
            "tune": _override(self.tune, part.tune),
        }
        return self.model_copy(update=overrides)

    def _runtime_of_parts(self) -> Runtime:
        """Return the default runtime of parts: `c` if an output of the whole model contains C libraries."""
        exporters = [PARTITIONED_EXPORTERS.get(name) for name in self.outputs]
        forms = {exporter.FORM for exporter in exporters if exporter}
        return "c" if self.runtime == "auto" and C_LIBRARY in forms else self.runtime

    def list_requests(self) -> list[InputRequest]:
        """Return the recipe's request for each input."""
        return [spec.request(name, self.dimensions) for name, spec in self.inputs.items()]

    def list_dimensions(self) -> list[Dimension]:
        """Return the dimensions used in shapes of inputs, sorted by name."""
        used = {name for spec in self.inputs.values() for name in spec.dimension_names}
        return [self.dimensions[name].named(name) for name in sorted(used)]

    def for_variant(self, name: str) -> Recipe:
        """Return the recipe with the overrides of a variant, named `NAME-VARIANT`."""
        variant = self.variants[name]
        inputs = dict(self.inputs)
        for input_name, spec in variant.inputs.items():
            inputs[input_name] = _override(inputs.get(input_name, InputSpec()), spec)
        overrides = {
            "name": f"{self.name}-{name}",
            "inputs": inputs,
            "dimensions": {**self.dimensions, **variant.dimensions},
            "kernels": _override(self.kernels, variant.kernels),
            "quantize": self.quantize
            if variant.quantize is None
            else _override(self.quantize or Quantize(), variant.quantize),
            "verify": _override(self.verify, variant.verify),
        }
        return self.model_copy(update=overrides)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors."""
    schema = published_schema(Recipe, "recipe")
    fields = schema["properties"]
    add_presets(fields["targets"])
    state = fields["state"]
    output = schema["$defs"]["StateSpec"]["properties"]["output"]
    name = {key: output[key] for key in ("type", "minLength", "maxLength")}
    state["additionalProperties"] = {"anyOf": [name, state["additionalProperties"]]}
    fields["targets"]["default"] = ["host"]
    fields["inputs"]["default"] = fields["variants"]["default"] = {}
    return schema
