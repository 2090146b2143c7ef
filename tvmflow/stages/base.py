"""The protocol of a stage: declarations, and a pure function from settings and files to files."""

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
"""What a stage runs once for.

`model`: the model (and once more for each partitioned target, which cuts it elsewhere).
`machine`: a machine to make code for: a target, or each part of a partitioned target.
`level`: such a machine, or each ISA level of a machine with a multi-ISA library.
`measured`: such a machine; for a search, only the ISA level that this machine measures.
`target`: a target of the recipe. `part`: each part of a partitioned target.
`partitioned`: each partitioned target as a whole.
"""

Files = tuple[tuple[str, str], ...]
"""Files to deliver, each as `(name in the artifact, name in dist)`."""


@dataclass(frozen=True, kw_only=True)
class StageTraits:
    """The declarations of a stage, which all other code uses.

    Attributes:
        version: Must be raised whenever the same inputs give a different output.
        scope: The unit that the stage runs once for.
        needs: Stage -> the files of its artifact that this stage reads; all files if none is named.
        optional_needs: The stages in `needs` that a pipeline may lack.
        needs_of_parts: The stages in `needs` whose files a partitioned target reads for each part, as
            `<stage>/<part>/<file>`.
        needs_of_isa_levels: The stages in `needs` whose files a target reads for each of its ISA levels, as
            `<stage>/<level>/<file>`. For other stages, it reads the level that this machine measures.
        needs_all: Stages in `needs` whose files are all read if a recipe, resolved for one target, requires it.
        reads: Files from outside the store: `model`: in the key; `reference`: the model outside the key, for its
            framework; `operators`: the recipe's custom operators; `data`: `verify.data`; `labels`: `labels`;
            `labels-check`: `labels` outside the key; `calibration`: `quantize.data`.
        tools: Python distributions whose version is in the key, because their code can change the output.
        timeout_s: Seconds after which a run counts as hanging.
        compiles_kernels: Whether it compiles kernels, so that the backend's tools are in its key.
        dump_ir: For `--dump-ir`: lowers the model again and writes the IR after each pass; runs in a child of a fork
            server. None for a stage that lowers nothing.
        find_faults: Finds the fault of a rejected library; runs in a child of a fork server.
        forecast: Returns how much of a search the ledger has, from the settings, the input files, the ledger and the
            TVM build. None for a stage that does not search.
        weights: The files of its result that contain only weights; other files do not depend on the weights it reads.
        added_with: The stages of a pipeline that add this one; empty for a stage that pipelines list.
        is_needed: Whether a recipe, resolved for one target, needs a stage that is `added_with` another.
        replaces: The stage whose files this one replaces, for a part, a partitioned target or a quantized model.
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
    """A frozen group of settings; `model_validate` reads it from the same fields of a recipe."""

    model_config = ConfigDict(frozen=True, from_attributes=True, defer_build=True)


class StageSettings(Settings):
    """Everything that the output of a stage depends on, besides its input files and tools.

    A stage gets nothing else of the recipe and the target, so every setting that it can read is in its key. Only
    optional fields have a default, which is not in the key: so a new optional field does not change existing keys.
    Fields have the names of recipe fields, and `explain` shows them.
    """

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The kinds of this machine's devices that the stage measures on."""
        return ()

    def to_json(self) -> dict[str, Json]:
        """Return the JSON for the key and for the worker, without fields at their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)


Lowering = Annotated[LoweringOptions, PlainSerializer(LoweringOptions.to_json)]
"""Lowering options as settings: all of them are in the key."""


def lowering_options(recipe: Recipe) -> LoweringOptions:
    """Return the lowering options of a recipe."""
    options = {**recipe.kernels.model_dump(exclude={"schedules"}), "checks": recipe.checks}
    return LoweringOptions(**{**options, "plain": tuple(sorted(set(options["plain"])))})


def schedules_version(recipe: Recipe) -> int:
    """Return the version of the schedule rules for untuned kernels; 0 if these get no schedule."""
    return SCHEDULES_VERSION if recipe.kernels.schedules == "rules" else 0


def parse_settings(run: Callable[..., Any], value: Json) -> Any:
    """Parse the settings for a stage's `run` from JSON; ValueError for other JSON."""
    return TypeAdapter(typing.get_type_hints(run)["settings"]).validate_python(value)


@functools.cache
def facts_type(run: Callable[..., Any]) -> Any:
    """Return the type of the facts that a stage's `run` returns."""
    return typing.get_type_hints(run)["return"]


def parse_facts(kind: type[_T], value: Mapping[str, Json]) -> _T | None:
    """Parse recorded facts; None if a stage has none, Mismatch if they do not fit the type."""
    return None if value == {} else from_json(kind, value)


def find_facts(kind: type[_T], value: Mapping[str, Json]) -> _T | None:
    """Parse recorded facts; None if there are none or if they do not fit, which reports mention."""
    try:
        return parse_facts(kind, value)
    except Mismatch:
        return None


class KnownFacts:
    """The facts of some stages, looked up by type."""

    def __init__(self, facts: Mapping[Any, Any] = MappingProxyType({})) -> None:
        self._facts = facts

    def get(self, kind: type[_T]) -> _T | None:
        """Return the facts of a type; None if unknown."""
        return cast(_T | None, self._facts.get(kind))


def progress_event(
    unit: str, done: int, total: int, name: str, *, best_us: float | None = None, failed: int = 0
) -> Event:
    """Return the event after `done` of `total` measurements, the last of `name`; `best_us`: µs per call."""
    return {
        "event": "progress",
        "unit": unit,
        "done": done,
        "total": total,
        "workload": name,
        "best_us": best_us,
        "failed": failed,
    }


class StageContext(NamedTuple):
    """The arguments of `run` besides its settings. Only the settings and `inputs` may affect the output.

    `inputs` maps `<stage>/<file>` of needed stages, and the roles of outside files, to readable paths. Files written
    into `out` become the artifact. `work` is kept if the stage is killed, so that it can resume. `ledger` is the
    folder of the trial ledger, and `locks` the folder of device locks. `emit` sends a progress event (JSON with the
    key `event`).
    """

    inputs: Mapping[str, Path]
    out: Path
    work: Path
    ledger: Path
    locks: Path
    emit: Callable[[Event], None]


class Stage(Protocol[TargetT, SettingsT, FactsT]):
    """A module in this folder.

    Facts are small values for reports, and never part of a key: a NamedTuple or a TypedDict that `codec` can read.
    `describe` and `explain` are pure, and may get facts that another version or machine recorded. So fields that not
    every version records have a default. They raise Mismatch if facts lack a required field.
    """

    @property
    def TRAITS(self) -> StageTraits:
        """The declarations of the stage."""

    def settings(self, recipe: Recipe, target: TargetT) -> SettingsT:
        """Return the parts of the recipe and the resolved target that the output depends on."""
        ...

    def run(self, settings: SettingsT, context: StageContext) -> FactsT:
        """Write the artifact to `context.out`, and return the facts; StageError has a remedy."""
        ...

    def describe(self, facts: FactsT, inputs: KnownFacts) -> list[str]:
        """Return the lines of a summary; `inputs` holds the known facts of the needed stages."""
        ...

    def explain(self, facts: FactsT) -> list[str]:
        """Return the lines of `tvmflow explain` about a result, after its dependencies."""
        ...

    def deliveries(self, recipe: Recipe, target: TargetT) -> Files:
        """Return the files to deliver to the target's folder in `dist`."""
        ...


def describe_signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    dimensions: Sequence[Dimension] = (),
) -> dict[str, Json]:
    """Return the signature of a model as JSON, in the form of a bundle."""
    sides = {"inputs": inputs, "outputs": outputs}
    signature: dict[str, Json]
    signature = {side: [spec.to_json() for spec in specs] for side, specs in sides.items()}
    if dimensions:
        signature["dimensions"] = [dimension.to_json() for dimension in dimensions]
    return signature


def no_lines(*_: object) -> list[str]:
    """Return no lines, for a stage without text in reports."""
    return []


def no_files(recipe: Recipe, target: Any) -> Files:
    """Return no files, for a stage whose results are only for other stages."""
    return ()


def name_some(names: Sequence[str]) -> str:
    """Return the first names of a list and the count of the others: `a, b, c and 2 more`."""
    return names_text(names, _MAX_NAMES)
