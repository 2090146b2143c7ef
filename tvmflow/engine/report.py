"""Reports of runs: the outcome of each stage. `summary` renders them as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.codec import Mismatch, to_json
from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_VERIFY,
)
from tvmflow.core.termination import SIGNAL_EXIT_BASE
from tvmflow.core.types import Artifact, Json, Plan, RecipeOrigin, StageSpec
from tvmflow.stages import STAGES, export, import_model, read_facts, verify
from tvmflow.stages.base import KnownFacts, facts_type, find_facts
from tvmflow.stages.export import ExportFacts
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.verify.verdict import Verdict, largest_error, list_measured
from tvmflow.store.remote.client import Traffic


class ComparedLibrary(NamedTuple):
    """A library of a recipe, with its measurements; None means not measured.

    A group contains the libraries for one machine and the same inputs. `bytes` is the size of all parts of the library.
    A library is Pareto-optimal if no other one of its group dominates it (see `mark_pareto_optimal`); a library
    without others to compare is not marked.
    """

    recipe: str
    variant: str
    target: str
    inputs: str
    group: int
    latency_s: float | None = None
    bytes: int | None = None
    accuracy: float | None = None
    max_abs_error: float | None = None
    is_pareto_optimal: bool = False

    @property
    def costs(self) -> dict[str, float]:
        """The measurements, where less is better; the largest error is used only without an accuracy."""
        costs: dict[str, float | None] = {"latency": self.latency_s, "bytes": self.bytes}
        if self.accuracy is None:
            costs["error"] = self.max_abs_error
        else:
            costs["inaccuracy"] = -self.accuracy
        return {name: cost for name, cost in costs.items() if cost is not None}


def compare_libraries(plan: Plan, artifacts: Mapping[str, Artifact]) -> tuple[ComparedLibrary, ...]:
    """Return the libraries of recipes that have several variants, or several targets for one machine."""
    specs = {spec.id: spec for spec in plan.stages}
    origins = {origin.recipe: origin for origin in plan.origins}
    by_path: dict[str, list[ComparedLibrary]] = {}
    groups: dict[bytes, int] = {}
    for spec in plan.stages:
        verdict = _find(Verdict, spec.id, artifacts) if spec.stage == verify.NAME else None
        if verdict is None or spec.recipe not in origins:
            continue
        origin = origins[spec.recipe]
        imports = (need.stage_id for need in spec.needs if need.stage == import_model.NAME)
        imported = _find(ImportFacts, next(imports, ""), artifacts)
        inputs = imported.inputs if imported else ()
        latency = verdict.get("latency", {}).get("library")
        shapes = [tensor.to_json() for tensor in inputs]
        key = canonical([origin.path, spec.settings["target"], shapes])
        library = ComparedLibrary(
            recipe=spec.recipe,
            variant=origin.variant,
            target=spec.target,
            inputs=", ".join(
                f"{tensor.name} {'×'.join(map(str, tensor.sizes or tensor.shape))}"
                for tensor in inputs
            ),
            group=groups.setdefault(key, len(groups)),
            latency_s=latency and latency["median"],
            bytes=_add_bytes(spec, specs, artifacts),
            accuracy=verdict.get("accuracy"),
            max_abs_error=largest_error(*list_measured(verdict)),
        )
        by_path.setdefault(origin.path, []).append(library)
    return tuple(
        library
        for libraries in by_path.values()
        if len({one.variant for one in libraries}) > 1
        or len({one.group for one in libraries}) < len(libraries)
        for library in mark_pareto_optimal(sorted(libraries, key=lambda item: item.group))
    )


def mark_pareto_optimal(libraries: Sequence[ComparedLibrary]) -> list[ComparedLibrary]:
    """Return the libraries, with `is_pareto_optimal` set for those that no other one dominates.

    A library dominates another if it is at least as good in latency, size and accuracy (or largest error), and better
    in one of these. Two libraries are compared only if the same measures of both are known, and more than one measure:
    the size alone would hide what it costs.
    """

    def is_optimal(library: ComparedLibrary) -> bool:
        costs = library.costs
        others = [
            other.costs
            for other in libraries
            if other.group == library.group and other.costs.keys() == costs.keys()
        ]
        is_dominated = any(
            other != costs and all(other[name] <= costs[name] for name in costs) for other in others
        )
        return len(costs) > 1 and len(others) > 1 and not is_dominated

    return [library._replace(is_pareto_optimal=is_optimal(library)) for library in libraries]


_T = TypeVar("_T")


def _find(kind: type[_T], stage_id: str, artifacts: Mapping[str, Artifact]) -> _T | None:
    return find_facts(kind, artifacts[stage_id].facts) if stage_id in artifacts else None


def _add_bytes(
    spec: StageSpec, specs: Mapping[str, StageSpec], artifacts: Mapping[str, Artifact]
) -> int | None:
    """Return the size of the library that a stage reads, or the total of those joined into it."""
    sizes = []
    for need in spec.needs:
        if need.stage.partition("/")[0] == export.NAME:
            exported = _find(ExportFacts, need.stage_id, artifacts)
            size = exported and exported.library_bytes
            other = specs[need.stage_id]
            sizes.append(_add_bytes(other, specs, artifacts) if size is None else size)
    return sum_known(sizes)


def sum_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of a value over the library or its parts; None if the value of one is unknown."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


MAX_SHOWN: Final = 200
"""With more stages or files than this, a summary shows only counts; `--json` lists all."""

SUCCEEDED: Final = ("hit", "fetched", "ran")
"""The outcomes of a stage that leave a result."""

STOPPED: Final = "cancelled"
"""The outcome of a stage that was running when the user stopped the run."""

SKIPPED: Final = "skipped"
"""The outcome of a stage that had not begun when the run ended."""

INCOMPLETE: Final = "INCOMPLETE"
"""The first word of a warning about unreadable facts."""

_EXITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(SUCCEEDED, EXIT_OK),
    "blocked": EXIT_ENVIRONMENT,
    STOPPED: EXIT_INTERRUPTED,
    "rejected": EXIT_VERIFY,
}
_SEVERITY: Final = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_ENVIRONMENT, EXIT_VERIFY, EXIT_OK)


class StageReport(NamedTuple):
    """The outcome of one stage of a run.

    `outcome` is `hit`, `fetched` (from a remote cache), `ran`, `failed`, `blocked` (by the state of this machine),
    `crashed`, `timeout`, `rejected` (by `verify`), `cancelled`, or `skipped` (the run ended first, or a stage that it
    needs did not succeed). `facts` are unparsed (see `ReportedFacts`). `key` is its result's key, if known.
    """

    stage_id: str
    outcome: str = "hit"
    reason: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Json] = {}
    message: str = ""
    fix: str = ""
    log: str = ""
    key: str = ""

    @property
    def recipe(self) -> str:
        """The name of the recipe, or of its variant."""
        return self.stage_id.partition(":")[0]

    @property
    def label(self) -> str:
        """The name of the stage on the command line: `STAGE[/TARGET]`."""
        return self.stage_id.partition(":")[2]

    @property
    def stage(self) -> str:
        """The name of the stage."""
        return self.label.partition("/")[0]

    @property
    def target(self) -> str:
        """The name of the target; empty for a stage that runs once for all targets."""
        return self.label.partition("/")[2]


class RunReport(NamedTuple):
    """The report of a whole run.

    `delivered` are paths in `dist`; `damage` are paths of damaged files in the store. `signal` is the number of the
    signal that ended the run, or 0. `timeline` is a `Timeline` as JSON, which only the run's record contains.
    """

    stages: tuple[StageReport, ...]
    delivered: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    seconds: float = 0.0
    remote: Traffic | None = None
    signal: int = 0
    compared_libraries: tuple[ComparedLibrary, ...] = ()
    origins: tuple[RecipeOrigin, ...] = ()
    timeline: Json = None

    @property
    def exit_code(self) -> int:
        """The exit code for the worst outcome, or for the signal."""
        if self.signal:
            return SIGNAL_EXIT_BASE + self.signal
        codes = {_EXITS.get(s.outcome, EXIT_FAILED) for s in self.stages if s.outcome != SKIPPED}
        return next((code for code in _SEVERITY if code in codes), EXIT_OK)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        fields = self._asdict()
        del fields["timeline"]
        return {**to_json(fields), "exit_code": self.exit_code}


class _Stage(Protocol):
    @property
    def recipe(self) -> str: ...
    @property
    def stage(self) -> str: ...
    @property
    def target(self) -> str: ...


_AnyStage = TypeVar("_AnyStage", bound=_Stage)


def group_by_target(stages: Iterable[_AnyStage]) -> dict[tuple[str, str], dict[str, _AnyStage]]:
    """Return the stages of each recipe and target by name, including stages shared by several targets.

    A recipe without targets forms one group, with an empty target.
    """
    shared: dict[str, dict[str, _AnyStage]] = {}
    own: dict[tuple[str, str], dict[str, _AnyStage]] = {}
    for stage in stages:
        key = (stage.recipe, stage.target)
        group = own.setdefault(key, {}) if stage.target else shared.setdefault(stage.recipe, {})
        group[stage.stage] = stage
    alone = shared.keys() - {recipe for recipe, _ in own}
    own |= {(recipe, ""): {} for recipe in shared if recipe in alone}
    return {key: {**shared.get(key[0], {}), **group} for key, group in own.items()}


class ReportedFacts:
    """The facts of some stages, parsed once into the type that each stage reports.

    `problems` maps a stage's id to the reason why its facts are unreadable, such as an older or damaged record.
    """

    def __init__(self, reports: Iterable[StageReport]) -> None:
        self.problems: dict[str, str] = {}
        self._facts: dict[str, Any] = {}
        for report in reports:
            try:
                self._facts[report.stage_id] = read_facts(report.stage, report.facts)
            except Mismatch as error:
                self.problems[report.stage_id] = unreadable_facts_text(report.label, error)

    def of(self, reports: Iterable[StageReport]) -> KnownFacts:
        """Return the facts of these stages by type; if a type repeats, the last stage's are returned."""
        return self._select(report.stage_id for report in reports)

    def list_of(self, kind: type[_T], reports: Iterable[StageReport]) -> list[_T | None]:
        """Return the facts of all stages that report a type; None if a stage's facts are unknown."""
        return [
            self._facts.get(report.stage_id)
            for report in reports
            if report.stage in STAGES and facts_type(STAGES[report.stage].run) is kind
        ]

    def describe(self, report: StageReport) -> list[str]:
        """Return what a successful stage says about its result, or that its facts are unreadable."""
        # A rejected library has facts, too, but they may be incomplete.
        if report.outcome not in SUCCEEDED:
            return []
        facts = self._facts.get(report.stage_id)
        if facts is None:
            return list(filter(None, [self.problems.get(report.stage_id)]))
        inputs = self._select(list_known_needs(report, self._facts))
        try:
            return STAGES[report.stage].describe(facts, inputs)
        except Mismatch as error:
            return [unreadable_facts_text(report.label, error)]

    def _select(self, ids: Iterable[str]) -> KnownFacts:
        selected = {}
        for stage_id in ids:
            facts = self._facts.get(stage_id)
            if facts is not None:
                stage = stage_id.partition(":")[2].partition("/")[0]
                selected[facts_type(STAGES[stage].run)] = facts
        return KnownFacts(selected)


def list_known_needs(report: StageReport, known: Collection[str]) -> list[str]:
    """Return the ids of the known stages whose results a stage needs.

    They are for the same target, or for all targets. If a stage replaces another one, it is needed instead.
    """
    traits = STAGES[report.stage].TRAITS if report.stage in STAGES else None
    names = [*traits.needs, *traits.optional_needs] if traits else []
    start, end = f"{report.recipe}:", f"/{report.target}"
    makers = {
        stage.TRAITS.replaces: name
        for name, stage in STAGES.items()
        if name != report.stage and f"{start}{name}{end}" in known
    }
    needs = [makers.get(name, name) for name in names]
    ids = [f"{start}{need}{place}" for need in dict.fromkeys(needs) for place in (end, "")]
    return [stage_id for stage_id in ids if stage_id in known]


def unreadable_facts_text(label: str, error: Mismatch) -> str:
    """Return the warning about facts that cannot be read."""
    return f"{INCOMPLETE}: the facts of {label} cannot be read ({error})"


def can_be_shown(stage: str, facts: Mapping[str, Json]) -> bool:
    """Return whether facts from another machine match their stage's type and have no control characters."""
    try:
        value = read_facts(stage, facts)
        if value is None:
            return True
        lines = STAGES[stage].describe(value, KnownFacts()) + STAGES[stage].explain(value)
    except Mismatch:
        return False
    return all(char.isprintable() or char in "\n\t" for line in lines for char in line)
