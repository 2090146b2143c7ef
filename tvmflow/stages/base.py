"""The Protocol of a stage: a pure function from settings and files to files, and its declarations."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict, PlainSerializer, TypeAdapter

from tvmflow.compiler import SCHEDULES_VERSION, LoweringOptions
from tvmflow.core.codec import Mismatch, from_json
from tvmflow.core.fork_server import ChildFunction
from tvmflow.core.formatting import names_text
from tvmflow.core.types import Dimension, Json, RunTraits, TensorSpec
from tvmflow.recipe import Recipe
from tvmflow.tuning.budget import TrialForecast

Event = dict[str, Json]
"""A progress event."""

_MAX_NAMES = 3

TargetT = TypeVar("TargetT", contravariant=True)
SettingsT = TypeVar("SettingsT")
FactsT = TypeVar("FactsT")
_T = TypeVar("_T")

Scope = Literal["model", "machine", "level", "measured", "target", "part", "partitioned"]
"""The things that a stage runs once for.

`model`: the model (and once more for each partitioned target, which cuts it elsewhere).
`machine`: a machine that code is made for: a target, or each part of a partitioned one.
`level`: such a machine, or each level of one whose library has code for several.
`measured`: such a machine, or the level of it that this machine measures, if the recipe asks for a search.
`target`: a target of the recipe. `part`: each part of a partitioned target.
`partitioned`: each partitioned target as a whole.
"""

Files = tuple[tuple[str, str], ...]
"""Files to deliver: `(name in the artifact, name in dist)` of each."""


@dataclass(frozen=True, kw_only=True)
class StageTraits:
    """The declarations of a stage, for all other code.

    Attributes:
        version: Raised whenever the same inputs would give another output.
        scope: The unit that it runs once for.
        needs: Stage -> the files of its artifact that this one reads; all of them if none is named.
        optional_needs: Those of `needs` that a pipeline may lack.
        needs_of_parts: Those of `needs` that a partitioned target reads of each part, as `<stage>/<part>/<file>`.
        needs_of_isa_levels: Those of `needs` that a target reads of each of its levels, as `<stage>/<level>/<file>`;
            of other stages it reads the level that this machine measures.
        needs_all: Those of `needs` whose files this one reads all if a recipe, resolved for one target, demands it.
        reads: Files from outside the store: `model`: in the key; `reference`: the model outside the key, for its
            framework; `operators`: the recipe's custom operators; `data`: `verify.data`; `labels`: `labels`;
            `labels-check`: `labels` outside the key; `calibration`: `quantize.data`.
        tools: Distributions whose code can change the output, whatever the recipe says.
        timeout_s: Seconds after which a run is taken to hang.
        compiles_kernels: It compiles kernels, so that the backend's tools are in its key.
        dump_ir: Lowers the model once more and writes the IR after each pass, for `--dump-ir`; a function for a child
            of a fork server. None for a stage that lowers nothing.
        find_faults: Localizes the fault of a rejected library, in a child of a fork server.
        forecast: Returns the ledger's content for a search, from its settings, its input files, the
            ledger and the TVM build. None for a stage that does not search.
        weights: The files of its result that only hold weights: the others do not depend on the weights it reads.
        added_with: The stages of a pipeline that add it; empty for a stage that pipelines name.
        is_needed: Whether a recipe, resolved for one target, needs a stage that is `added_with` another.
        replaces: The stage whose files it provides, for a part, a partitioned target or a quantized model.
        run: The facts for the code that runs, locks and reports it.
    """

    version: int
    scope: Scope
    tools: tuple[str, ...]
    timeout_s: float
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional_needs: tuple[str, ...] = ()
    needs_of_parts: tuple[str, ...] = ()
    needs_of_isa_levels: tuple[str, ...] = ()
    needs_all: Mapping[str, Callable[[Recipe], bool]] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    compiles_kernels: bool = False
    dump_ir: ChildFunction | None = None
    find_faults: ChildFunction | None = None
    forecast: Callable[[Any, Mapping[str, Path], Path, str], TrialForecast] | None = None
    weights: tuple[str, ...] = ()
    added_with: tuple[str, ...] = ()
    is_needed: Callable[[Recipe], bool] = lambda _: True
    replaces: str = ""
    run: RunTraits = field(default_factory=RunTraits)


class Settings(BaseModel):
    """A group of settings: a frozen value. `model_validate` takes it from the same fields of a recipe."""

    model_config = ConfigDict(frozen=True, from_attributes=True, defer_build=True)


class StageSettings(Settings):
    """Everything that the output of a stage depends on, besides its input files and tools.

    A stage sees nothing else of the recipe and of the target, so a setting that can be read is in the key. Only
    optional fields have a default, which is left out of the key: a new optional field runs nothing again. Names of
    fields are words of the recipe, and `explain` shows them.
    """

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The kinds of this machine's devices that the stage measures on."""
        return ()

    def to_json(self) -> dict[str, Json]:
        """Return the JSON that is in the key and crosses to the worker, without fields at their default."""
        return self.model_dump(mode="json", exclude_defaults=True)


Lowering = Annotated[LoweringOptions, PlainSerializer(LoweringOptions.to_json)]
"""Options of lowering as settings: all of them are in the key."""


def lowering_options(recipe: Recipe) -> LoweringOptions:
    """Return the lowering options of a recipe."""
    options = {**recipe.kernels.model_dump(exclude={"schedules"}), "checks": recipe.checks}
    return LoweringOptions(**{**options, "plain": tuple(sorted(set(options["plain"])))})


def schedules_version(recipe: Recipe) -> int:
    """Return the version of the schedule rules for untuned kernels; 0 if they have no schedule."""
    return SCHEDULES_VERSION if recipe.kernels.schedules == "rules" else 0


def parse_settings(run: Callable[..., Any], value: Json) -> Any:
    """Return the settings that a stage's `run` takes, from their JSON; ValueError for other JSON."""
    return TypeAdapter(typing.get_type_hints(run)["settings"]).validate_python(value)


@functools.cache
def facts_type(run: Callable[..., Any]) -> Any:
    """Return the type of the facts that a stage's `run` returns."""
    return typing.get_type_hints(run)["return"]


def parse_facts(kind: type[_T], value: Mapping[str, Json]) -> _T | None:
    """Return recorded facts as their type, None if a stage has none; Mismatch for others."""
    return None if value == {} else from_json(kind, value)


def find_facts(kind: type[_T], value: Mapping[str, Json]) -> _T | None:
    """Return recorded facts as their type; None also for unreadable ones, which reports mention."""
    try:
        return parse_facts(kind, value)
    except Mismatch:
        return None


class KnownFacts:
    """The facts of some stages, each found by its type."""

    def __init__(self, facts: Mapping[Any, Any] = MappingProxyType({})) -> None:
        self._facts = facts

    def get(self, kind: type[_T]) -> _T | None:
        """Return the facts of a type; None if they are not known."""
        return cast(_T | None, self._facts.get(kind))


class StageContext(NamedTuple):
    """The arguments of `run` beside its settings. Only `inputs` and the settings may shape the output.

    `inputs` maps `<stage>/<file>` of needed stages, and the roles of files from outside, to readable paths. Files
    written into `out` become the artifact. `work` survives a kill, so that the stage can resume. `ledger` is the trial
    ledger's folder, `locks` the folder of device locks. `emit` sends a progress event (JSON with the key `event`).
    """

    inputs: Mapping[str, Path]
    out: Path
    work: Path
    ledger: Path
    locks: Path
    emit: Callable[[Event], None]


class Stage(Protocol[TargetT, SettingsT, FactsT]):
    """One module in this folder.

    Facts are small values for people, and never part of a key: a NamedTuple or a TypedDict that `codec` reads.
    `describe` and `explain` are pure, and may be given facts that another version, or another machine, recorded: fields
    that not all versions recorded have a default. They raise Mismatch for facts that lack a required field.
    """

    @property
    def TRAITS(self) -> StageTraits:
        """The declarations of the stage."""

    def settings(self, recipe: Recipe, target: TargetT) -> SettingsT:
        """Return the slice of the recipe and of the resolved target that the output depends on."""
        ...

    def run(self, settings: SettingsT, context: StageContext) -> FactsT:
        """Fill `context.out`, and return the facts; StageError with a remedy."""
        ...

    def describe(self, facts: FactsT, inputs: KnownFacts) -> list[str]:
        """Return the lines of a summary; `inputs` are the known facts of the stages that it needs."""
        ...

    def explain(self, facts: FactsT) -> list[str]:
        """Return the lines of `tvmflow explain` about a result, besides its dependencies."""
        ...

    def deliveries(self, recipe: Recipe, target: TargetT) -> Files:
        """Return the files that the target's folder in `dist` gets."""
        ...


def describe_signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    dimensions: Sequence[Dimension] = (),
) -> dict[str, Json]:
    """Return the JSON of a model's inputs, outputs and dimensions, as a bundle has it."""
    sides = {"inputs": inputs, "outputs": outputs}
    signature: dict[str, Json]
    signature = {side: [spec.to_json() for spec in specs] for side, specs in sides.items()}
    if dimensions:
        signature["dimensions"] = [dimension.to_json() for dimension in dimensions]
    return signature


def no_lines(*_: object) -> list[str]:
    """Return no line: reports have nothing about a result besides its dependencies."""
    return []


def no_files(recipe: Recipe, target: Any) -> Files:
    """Return no file: results of the stage are for other stages."""
    return ()


def name_some(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are: `a, b, c and 2 more`."""
    return names_text(names, _MAX_NAMES)
