"""Reports of runs: what each stage did, as values. `summary` has their text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from tvmflow.core.codec import Mismatch, to_json
from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_VERIFY,
)
from tvmflow.core.termination import SIGNAL_EXIT_BASE
from tvmflow.core.types import Json, RecipeOrigin
from tvmflow.engine.library_table import ComparedLibrary
from tvmflow.stages import STAGES, read_facts
from tvmflow.stages.base import KnownFacts, facts_type
from tvmflow.store.remote.client import Traffic

_T = TypeVar("_T")

MAX_SHOWN: Final = 200
"""Of more stages or files than this, a summary shows only counts; `--json` has all of them."""

SUCCEEDED: Final = ("hit", "fetched", "ran")
"""The outcomes of a stage that has a result."""

STOPPED: Final = "cancelled"
"""The outcome of a stage that ran when the user stopped the run."""

SKIPPED: Final = "skipped"
"""The outcome of a stage that did not begin before the run ended."""

INCOMPLETE: Final = "INCOMPLETE"
"""The first word of a warning about facts that cannot be read."""

_EXITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(SUCCEEDED, EXIT_OK),
    "blocked": EXIT_ENVIRONMENT,
    STOPPED: EXIT_INTERRUPTED,
    "rejected": EXIT_VERIFY,
}
_SEVERITY: Final = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_ENVIRONMENT, EXIT_VERIFY, EXIT_OK)


class StageReport(NamedTuple):
    """The end of one stage of a run.

    `outcome` is `hit`, `fetched` (from a remote cache), `ran`, `failed`, `blocked` (by the state of
    this machine), `crashed`, `timeout`, `rejected` (by `verify`), `cancelled`, or `skipped`
    (the run ended before it, or a stage before it did not succeed). `facts` are as they were
    recorded: `ReportedFacts` reads them. `key` is that of its result; empty when it is not known.
    """

    stage_id: str
    outcome: str
    reason: str
    seconds: float
    facts: dict[str, Json]
    message: str = ""
    fix: str = ""
    log: str = ""
    key: str = ""

    @classmethod
    def of_result(
        cls,
        stage_id: str,
        facts: dict[str, Json],
        *,
        outcome: str = "hit",
        reason: str = "",
        key: str = "",
    ) -> StageReport:
        """Return the report of a stage whose result is there, with its facts."""
        return cls(stage_id, outcome, reason, seconds=0.0, facts=facts, key=key)

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
    """A whole run.

    `delivered` are paths in `dist`, `damage` those of damaged files in the store. `signal` is the
    number of the signal that ended it, or 0. `compared_libraries` are those of recipes with several
    that a user may want to compare. `origins` are the files that the recipes came from.
    """

    stages: tuple[StageReport, ...]
    delivered: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    seconds: float = 0.0
    remote: Traffic | None = None
    signal: int = 0
    compared_libraries: tuple[ComparedLibrary, ...] = ()
    origins: tuple[RecipeOrigin, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the worst outcome, or of the signal."""
        if self.signal:
            return SIGNAL_EXIT_BASE + self.signal
        codes = {_EXITS.get(s.outcome, EXIT_FAILED) for s in self.stages if s.outcome != SKIPPED}
        return next((code for code in _SEVERITY if code in codes), EXIT_OK)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {**to_json(self._asdict()), "exit_code": self.exit_code}


class ReportedFacts:
    """The facts of some stages, each read once, as the type that its stage reports.

    Attributes:
        problems: Why facts cannot be read, as those of an older or a damaged record, by stage id.
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
        """Return the facts of some of these stages by their types; of several of one type, those of the last."""
        return self._select(report.stage_id for report in reports)

    def list_of(self, kind: type[_T], reports: Iterable[StageReport]) -> list[_T | None]:
        """Return the facts of those of some stages that report a type; None for one whose facts are not known."""
        return [
            self._facts.get(report.stage_id)
            for report in reports
            if report.stage in STAGES and facts_type(STAGES[report.stage].run) is kind
        ]

    def describe(self, report: StageReport) -> list[str]:
        """Return what a stage that succeeded says of its result, or that its facts cannot be read."""
        # of a rejected library there are facts, too: they may be incomplete
        if report.outcome not in SUCCEEDED:
            return []
        facts = self._facts.get(report.stage_id)
        if facts is None:
            return list(filter(None, [self.problems.get(report.stage_id)]))
        stage, start = STAGES[report.stage], f"{report.recipe}:"
        needs = [f"{start}{need}" for need in stage.TRAITS.needs]
        inputs = self._select([*needs, *(f"{need}/{report.target}" for need in needs)])
        try:
            return stage.describe(facts, inputs)
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


def unreadable_facts_text(label: str, error: Mismatch) -> str:
    """Return the warning about facts that cannot be read, as those of an older or a damaged record."""
    return f"{INCOMPLETE}: the facts of {label} cannot be read ({error})"


def can_be_shown(stage: str, facts: Mapping[str, Json]) -> bool:
    """Return whether facts from elsewhere are such as the stage records, without control characters."""
    try:
        value = read_facts(stage, facts)
        if value is None:
            return True
        lines = STAGES[stage].describe(value, KnownFacts()) + STAGES[stage].explain(value)
    except Mismatch:
        return False
    return all(char.isprintable() or char in "\n\t" for line in lines for char in line)
