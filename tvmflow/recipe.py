"""The public language: what a recipe and a pipeline may say, and every mistake in one, with its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from tvmflow.errors import RecipeError
from tvmflow.targets._presets import PRESETS
from tvmflow.values import Json
from tvmflow.yaml_positions import Document, Loc, nearest, read_yaml

STAGE_NAMES: Final = ("import", "extract_tasks", "tune", "pick_best", "build", "export", "verify")
OUTPUT_NAMES: Final = ("bundle", "shared-library")

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

_DTYPES: Final = (
    "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
)
_MAX_ELEMENTS: Final = 1 << 31
_NAME: Final = r"^[a-z0-9][a-z0-9._-]*$"

# What people write who know AutoTVM, and what it is called here.
_OLD_STRATEGIES: Final = {
    "ga": "evolutionary",
    "genetic": "evolutionary",
    "random": "replay-trace",
    "gridsearch": "replay-trace",
    "xgb": "evolutionary (and cost_model: xgb)",
}


_AnyPart = TypeVar("_AnyPart", bound=BaseModel)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_of(value: str, valid: Any, what: str) -> str:
    if value in valid:
        return value
    raise PydanticCustomError(
        "unknown",
        "{message}",
        {
            "message": f"'{value}' is not {what}{nearest(value, valid)} (there are {', '.join(sorted(valid))})"
        },
    )


class _Part(BaseModel):
    """Frozen, strict about types, and closed: an unknown field is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MxnetSource(_Part):
    """An MXNet checkpoint, as `mx.model.load_checkpoint(prefix, epoch)` names it."""

    prefix: str = Field(
        min_length=1,
        description="Path of the checkpoint without `-symbol.json` and `-0000.params`, from the recipe's folder.",
    )
    epoch: int = Field(ge=0, le=9999, description="The number in `prefix-NNNN.params`.")


class ModelSource(_Part):
    """Where the model comes from: exactly one of `mxnet` and `onnx`."""

    mxnet: MxnetSource | None = Field(default=None, description="An MXNet checkpoint.")
    onnx: str | None = Field(
        default=None,
        min_length=1,
        description="An ONNX file: a path from the recipe's folder, or a URL (then with `sha256`).",
    )
    sha256: str | None = Field(
        default=None,
        description="The sha256 of the ONNX file, in hex; checked, and required for a URL.",
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
        if value is not None and (len(value) != 64 or set(value.lower()) - set("0123456789abcdef")):
            raise PydanticCustomError("digest", "must be 64 hexadecimal digits")
        return value.lower() if value is not None else None

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSource:
        if (self.mxnet is None) == (self.onnx is None):
            found = "both are given" if self.mxnet else "neither is given"
            raise PydanticCustomError("source", f"needs exactly one of mxnet and onnx; {found}")
        if self.is_url and self.sha256 is None:
            raise PydanticCustomError(
                "source", "a model from a URL needs its sha256, so that it is always the same"
            )
        if self.mxnet is not None and self.sha256 is not None:
            raise PydanticCustomError("source", "sha256 goes with onnx, not with mxnet")
        return self


class InputSpec(_Part):
    """One input of the model."""

    shape: Annotated[tuple[int, ...], BeforeValidator(_tupled)] = Field(
        description="The size of each dimension; all are fixed, the batch too."
    )
    dtype: str = Field(default="float32", description=f"One of {', '.join(_DTYPES)}.")
    range: Annotated[tuple[float, float] | None, BeforeValidator(_tupled)] = Field(
        default=None,
        description="Lowest and highest value of seeded random inputs; by default 0 to 1, integers 0 and 1.",
    )

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 for size in value):
            raise PydanticCustomError("shape", "every dimension must be at least 1")
        if math.prod(value) > _MAX_ELEMENTS:
            raise PydanticCustomError("shape", "has more than 2^31 elements")
        return value

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str) -> str:
        return _one_of(value, _DTYPES, "a dtype")

    @field_validator("range")
    @classmethod
    def _check_range(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise PydanticCustomError("range", "the first number must be below the second")
        return value


class TargetSpec(_Part):
    """A machine to build for: a preset's name, or a mapping with a name of its own."""

    name: str = Field(pattern=_NAME, description="Its name: the folder in `dist`.")
    preset: str | None = Field(
        default=None, description=f"A named target: {', '.join(sorted(PRESETS))}."
    )
    tvm: dict[str, Json] | None = Field(
        default=None, description="A target as TVM takes it: `{kind: llvm, mtriple: …, mcpu: …}`."
    )
    num_cores: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Threads to tune for; by default those of this machine.",
    )

    @field_validator("preset")
    @classmethod
    def _check_preset(cls, value: str | None) -> str | None:
        return None if value is None else _one_of(value, PRESETS, "a target")

    @field_validator("tvm")
    @classmethod
    def _check_kind(cls, value: dict[str, Json] | None) -> dict[str, Json] | None:
        if value is not None and not isinstance(value.get("kind"), str):
            raise PydanticCustomError("kind", "needs a kind, such as `kind: llvm`")
        return value

    @model_validator(mode="after")
    def _check_one_machine(self) -> TargetSpec:
        if (self.preset is None) == (self.tvm is None):
            found = "both are given" if self.preset else "neither is given"
            raise PydanticCustomError("machine", f"needs exactly one of preset and tvm; {found}")
        return self

    def tvm_mapping(self) -> dict[str, Json] | None:
        """The mapping that TVM takes; None for `host`, which is looked up."""
        mapping = self.tvm if self.preset is None else PRESETS[self.preset].tvm
        return None if mapping is None else dict(mapping)


def _named(value: Any) -> Any:
    """A target given by one word is the preset of that name."""
    return {"name": value, "preset": value} if isinstance(value, str) else value


class Tune(_Part):
    """How much to search for fast kernels, and how to measure."""

    trials: int = Field(default=0, ge=0, description="Measurements in all; 0: no search.")
    trials_per_task: int | None = Field(
        default=None, ge=1, description="At most so many measurements for one kernel."
    )
    seed: int = Field(default=0, ge=0, lt=1 << 31, description="Seed of the search.")
    strategy: str = Field(
        default="evolutionary",
        description="`evolutionary`, or `replay-trace` (random search).",
    )
    cost_model: Literal["xgb", "mlp", "random"] = Field(
        default="xgb", description="What predicts which candidates are worth measuring."
    )
    number: int = Field(
        default=0, ge=0, description="Calls in one repeat; 0: as many as `min_repeat_ms` needs."
    )
    repeat: int = Field(default=3, ge=1, le=1000, description="Repeats of a measurement.")
    min_repeat_ms: int = Field(
        default=40, ge=0, le=60_000, description="Least length of a repeat, in milliseconds."
    )
    trial_timeout_s: float = Field(
        default=30.0, gt=0, le=86_400, description="Seconds after which a trial counts as failed."
    )
    finalists: int = Field(
        default=3, ge=1, le=64, description="How many of a kernel's best are measured again."
    )

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, value: str) -> str:
        if value in _OLD_STRATEGIES:
            raise PydanticCustomError(
                "strategy", f"'{value}' is called {_OLD_STRATEGIES[value]} here"
            )
        return _one_of(value, ("evolutionary", "replay-trace"), "a strategy")


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
    seed: int = Field(default=0, ge=0, lt=1 << 31, description="Seed of the random inputs.")
    repeat: int = Field(
        default=10, ge=1, le=10_000, description="Repeats of the latency measurement."
    )

    @model_validator(mode="after")
    def _check_accuracy(self) -> Verify:
        if self.min_accuracy is not None and self.data is None:
            raise PydanticCustomError("accuracy", "min_accuracy needs data with labels")
        return self


class Recipe(_Part):
    """One model: its source, inputs, targets, tuning, outputs and checks."""

    recipe: Literal[1] = Field(description="Version of this language: 1.")
    name: str = Field(
        pattern=_NAME,
        max_length=100,
        description="Its name: the folder in `dist` and the files there. Small letters, digits, `.`, `_`, `-`.",
    )
    model: ModelSource = Field(description="Where the model comes from.")
    inputs: dict[str, InputSpec] = Field(
        default_factory=dict,
        description="The model's inputs by name; may be left out for an ONNX model whose shapes are fixed.",
    )
    targets: Annotated[
        tuple[Annotated[TargetSpec, BeforeValidator(_named)], ...], BeforeValidator(_tupled)
    ] = Field(
        default=(TargetSpec(name="host", preset="host"),),
        min_length=1,
        description="Machines to build for; by default this one.",
    )
    tune: Tune = Field(default=Tune(), description="How much to search for fast kernels.")
    outputs: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = Field(
        default=("bundle",),
        min_length=1,
        description=f"Files to deliver: {', '.join(OUTPUT_NAMES)}.",
    )
    verify: Verify = Field(default=Verify(), description="Checks that the library must pass.")
    pipeline: str = Field(
        default="tune", description="`tune`, `compile` (no search), or the path of a pipeline file."
    )

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            _one_of(name, OUTPUT_NAMES, "an output")
        return value

    @model_validator(mode="after")
    def _check_whole(self) -> Recipe:
        if self.model.mxnet is not None and not self.inputs:
            raise PydanticCustomError("inputs", "an MXNet model needs its inputs and their shapes")
        names = [target.name for target in self.targets]
        for name in names:
            if names.count(name) > 1:
                raise PydanticCustomError("targets", f"there are two targets named '{name}'")
        return self


# ---------------------------------------------------------------- loading


class LoadedRecipe(NamedTuple):
    """A recipe, and where each part of it stands: `where("targets", 0)` gives `file:line:column`."""

    recipe: Recipe
    path: Path
    where: Callable[..., str]
    read: tuple[Path, ...]


class Pipeline(NamedTuple):
    """The stages of a run, in order."""

    name: str
    stages: tuple[str, ...]
    path: Path


def load_recipe(path: Path) -> LoadedRecipe:
    """The recipe in a file. Raises RecipeError with all its mistakes, each `file:line:column: field: what`."""
    document = read_yaml(path)
    recipe = _validated(document, Recipe)
    problems = list(_missing_files(recipe, document))
    if problems:
        raise RecipeError(problems)
    return LoadedRecipe(recipe, path, document.where, (path,))


def _validated(document: Document, model: type[_AnyPart]) -> _AnyPart:
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        raise RecipeError(
            f"{document.where()}: must hold fields, such as `name: …`; this is {kind}"
        )
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        found = [_problem(document, model, detail) for detail in error.errors()]
        raise RecipeError([text for _, text in sorted(found)]) from None


def _problem(
    document: Document, model: type[BaseModel], detail: ErrorDetails
) -> tuple[tuple[int, int], str]:
    """`(place, sentence)` of one of pydantic's findings."""
    loc = _in_document(document, detail["loc"])
    name = ".".join(str(part) for part in loc)
    unknown = detail["type"] == "extra_forbidden"
    where = document.where_key(*loc) if unknown else document.where(*loc)
    text = _unknown_field(model, loc) if unknown else _sentence(document, loc, detail)
    place = where.rsplit(":", 2)[1:]
    return (
        int(place[0]),
        int(place[1]),
    ), f"{where}: {name}: {text}" if name else f"{where}: {text}"


def _in_document(document: Document, loc: tuple[int | str, ...]) -> Loc:
    """pydantic's path without what is not in the file: a preset's fields stand in one word."""
    while len(loc) > 1 and loc[:-1] in document.raw:
        loc = loc[:-1]
    return loc


def _unknown_field(model: type[BaseModel], loc: Loc) -> str:
    """The nearest field of this level, or the level where a field of this name belongs."""
    name = str(loc[-1])
    here = _fields_at(model, loc[:-1])
    close = nearest(name, here)
    if close:
        return f"there is no such field{close}"
    for path, fields in _all_levels(model):
        if name in fields:
            return f"belongs under {'.'.join(path)}" if path else "belongs at the top of the recipe"
    return f"there is no such field (there are {', '.join(here)})"


def _part_of(annotation: Any) -> type[BaseModel] | None:
    """The model class inside a field's type, through optionals, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_part_of(inner) for inner in get_args(annotation))
    return next((part for part in found if part is not None), None)


def _fields_at(model: type[BaseModel], loc: Loc) -> list[str]:
    current: type[BaseModel] = model
    for step in loc:
        field = current.model_fields.get(str(step))
        inner = _part_of(field.annotation) if field is not None else None
        current = inner or current
    return list(current.model_fields)


def _all_levels(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    yield path, list(model.model_fields)
    for name, field in model.model_fields.items():
        inner = _part_of(field.annotation)
        if inner is not None:
            yield from _all_levels(inner, (*path, name))


_WANTED: Final = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "fields, such as `name: …`",
    "model_type": "fields, such as `name: …`",
    "tuple_type": "a list, such as [1, 3, 224, 224]",
    "literal_error": "",
}


def _sentence(document: Document, loc: Loc, detail: ErrorDetails) -> str:
    """pydantic's finding in our words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if loc == ("recipe",):
        return f"this tvmflow reads version 1, not {detail['input']!r}"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(str(detail["input"]), choices)
        return f"{detail['input']!r} is none of {', '.join(choices)}{close}"
    if kind == "string_pattern_mismatch":
        return f"'{detail['input']}' is not a name: small letters, digits, '.', '_' and '-' only"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {_shown(document, loc, detail['input'])}"
    message = detail["msg"]
    return message[:1].lower() + message[1:].replace("Input should", "should")


def _shown(document: Document, loc: Loc, value: Any) -> str:
    if isinstance(value, dict):
        return "fields"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{document.raw.get(loc, value)}`, which YAML reads as {str(value).lower()}"
    kind = "the text" if isinstance(value, str) else "the number"
    return f"{kind} {str(value)[:60]!r}" if isinstance(value, str) else f"{kind} {value}"


def _missing_files(recipe: Recipe, document: Document) -> Iterator[str]:
    """A sentence for every file that the recipe names and that is not there."""
    base = document.path.parent
    if recipe.model.mxnet is not None:
        yield from _missing_checkpoint(recipe.model.mxnet, base, document)
    elif recipe.model.onnx is not None and not recipe.model.is_url:
        where = document.where("model", "onnx")
        yield from _missing_file("model.onnx", base / recipe.model.onnx, where)
    if recipe.verify.data is not None:
        where = document.where("verify", "data")
        yield from _missing_file("verify.data", base / recipe.verify.data, where)


def _missing_checkpoint(source: MxnetSource, base: Path, document: Document) -> Iterator[str]:
    symbol = base / f"{source.prefix}-symbol.json"
    params = base / f"{source.prefix}-{source.epoch:04d}.params"
    if not symbol.is_file():
        yield from _missing_file(
            "model.mxnet.prefix", symbol, document.where("model", "mxnet", "prefix")
        )
    elif not params.is_file():
        stem = symbol.name.removesuffix("-symbol.json")
        found = sorted(symbol.parent.glob(f"{stem}-[0-9][0-9][0-9][0-9].params"))
        epochs = ", ".join(str(int(path.stem[-4:])) for path in found) or "none"
        where = document.where("model", "mxnet", "epoch")
        yield f"{where}: model.mxnet.epoch: there is no file {params} (epochs that are there: {epochs})"


def _missing_file(field: str, path: Path, where: str) -> Iterator[str]:
    if path.is_file():
        return
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    yield f"{where}: {field}: there is no file {path}{nearest(path.name, siblings)}"


# ---------------------------------------------------------------- pipelines


class _PipelineFile(_Part):
    """The stages of a run, in order."""

    pipeline: Literal[1]
    name: str = Field(pattern=_NAME)
    description: str = ""
    stages: Annotated[tuple[str, ...], BeforeValidator(_tupled)] = Field(min_length=1)

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            _one_of(name, STAGE_NAMES, "a stage")
            if name in value[:index]:
                raise PydanticCustomError("stages", f"'{name}' stands twice")
            for needed in _REQUIRES[name]:
                if needed not in value[:index]:
                    raise PydanticCustomError("stages", f"'{name}' needs '{needed}' before it")
        return value


def load_pipeline(name: str) -> Pipeline:
    """A pipeline by name, or from a file whose path ends in `.yaml`. Raises RecipeError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _find_pipeline(name)
    found = _validated(read_yaml(path), _PipelineFile)
    return Pipeline(found.name, found.stages, path)


def _find_pipeline(name: str) -> Path:
    folders = [Path("pipelines"), Path(__file__).parent / "pipelines"]
    folders.append(Path(__file__).parent.parent / "pipelines")
    names: list[str] = []
    for folder in folders:
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
        names += [other.stem for other in folder.glob("*.yaml")]
    there = ", ".join(sorted(set(names)))
    raise RecipeError(f"there is no pipeline '{name}'{nearest(name, names)} (there are {there})")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors. A target may also be one word."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    targets = schema["properties"]["targets"]
    word = {"type": "string", "enum": sorted(PRESETS), "description": "A preset."}
    targets["items"] = {"anyOf": [word, targets["items"]]}
    return schema
