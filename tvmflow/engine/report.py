"""Reports of runs: what each stage did, as values. `summary` has their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

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
from tvmflow.stages import STAGES
from tvmflow.stages.base import Facts
from tvmflow.store.remote.client import Traffic

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

BAD_FACTS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading facts raises where some are missing, or of another type."""

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
    (the run ended before it, or a stage before it did not succeed). `key` is that of its result; empty when it is not known.
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
    delivered: tuple[str, ...]
    damage: tuple[str, ...]
    seconds: float
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
        return {
            **self._asdict(),
            "stages": [stage._asdict() for stage in self.stages],
            "remote": self.remote and self.remote._asdict(),
            "compared_libraries": [library._asdict() for library in self.compared_libraries],
            "origins": [origin._asdict() for origin in self.origins],
            "exit_code": self.exit_code,
        }


def describe_result(report: StageReport, facts: Mapping[str, Facts]) -> list[str]:
    """Return what a stage that succeeded says of its result; of incomplete facts, that they are.

    Args:
        report: Of the stage.
        facts: The facts of all stages by id; the stage may use those of the stages that it needs.
    """
    try:
        return _describe(report, facts)
    except BAD_FACTS as error:
        return [unreadable_facts_text(report.label, error)]


def unreadable_facts_text(label: str, error: Exception) -> str:
    """Return the warning about facts that an older or a damaged record has, or a stage that another program wrote."""
    return f"{INCOMPLETE}: the facts of {label} cannot be read ({type(error).__name__}: {error})"


def _describe(report: StageReport, facts: Mapping[str, Facts]) -> list[str]:
    # of a rejected library there are facts, too: they may be incomplete
    if report.stage not in STAGES or not report.facts or report.outcome not in SUCCEEDED:
        return []
    stage = STAGES[report.stage]
    inputs = {
        need: facts[stage_id]
        for need in stage.TRAITS.needs
        for stage_id in (f"{report.recipe}:{need}/{report.target}", f"{report.recipe}:{need}")
        if stage_id in facts
    }
    return stage.describe(report.facts, inputs)


def can_be_shown(stage: str, facts: Mapping[str, Json]) -> bool:
    """Return whether facts from elsewhere are such as the stage records, without control characters."""
    report = StageReport(f"recipe:{stage}/target", "fetched", "", 0.0, dict(facts))
    try:
        lines = _describe(report, {})
        lines += STAGES[stage].explain(report.facts) if facts and stage in STAGES else []
    except BAD_FACTS:
        return False
    return all(char.isprintable() or char in "\n\t" for line in lines for char in line)
