"""Reports of runs: what each stage did, as values, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_VERIFY,
)
from tvmflow.core.formatting import count_text, duration_text, printable_lines, size_text
from tvmflow.core.termination import SIGNAL_EXIT_BASE
from tvmflow.core.types import Json
from tvmflow.engine.library_comparison import ComparedLibrary, format_comparison
from tvmflow.stages import STAGES
from tvmflow.stages._base import Facts
from tvmflow.store.remote.client import Traffic

MAX_SHOWN: Final = 200
"""Of more stages or files than this, a summary shows only counts; `--json` has all of them."""

_EXITS: Final[Mapping[str, int]] = {
    "hit": EXIT_OK,
    "fetched": EXIT_OK,
    "ran": EXIT_OK,
    "blocked": EXIT_ENVIRONMENT,
    "cancelled": EXIT_INTERRUPTED,
    "rejected": EXIT_VERIFY,
}
_SEVERITY: Final = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_ENVIRONMENT, EXIT_VERIFY, EXIT_OK)
_PROBLEMS: Final = ("failed", "blocked", "crashed", "timeout", "rejected", "cancelled", "skipped")


class StageReport(NamedTuple):
    """The end of one stage of a run.

    `outcome` is `hit`, `fetched` (from a remote cache), `ran`, `failed`, `blocked` (by the state of
    this machine), `crashed`, `timeout`, `rejected` (by `verify`), `cancelled`, or `skipped`
    (because a stage before it did not succeed).
    """

    stage_id: str
    outcome: str
    reason: str
    seconds: float
    facts: dict[str, Json]
    message: str = ""
    fix: str = ""
    log: str = ""


class RunReport(NamedTuple):
    """A whole run.

    `delivered` are paths in `dist`, `damage` those of damaged files in the store. `signal` is the
    number of the signal that ended it, or 0. `compared_libraries` are those of recipes with several
    that a user may want to compare.
    """

    stages: tuple[StageReport, ...]
    delivered: tuple[str, ...]
    damage: tuple[str, ...]
    seconds: float
    remote: Traffic | None = None
    signal: int = 0
    compared_libraries: tuple[ComparedLibrary, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the worst outcome, or of the signal."""
        if self.signal:
            return SIGNAL_EXIT_BASE + self.signal
        codes = {_EXITS.get(s.outcome, EXIT_FAILED) for s in self.stages if s.outcome != "skipped"}
        return next((code for code in _SEVERITY if code in codes), EXIT_OK)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {
            **self._asdict(),
            "stages": [stage._asdict() for stage in self.stages],
            "remote": self.remote and self.remote._asdict(),
            "compared_libraries": [library._asdict() for library in self.compared_libraries],
            "exit_code": self.exit_code,
        }


def render(report: RunReport, *, as_json: bool, quiet: bool = False) -> str:
    """Return the end of a run's output, for people (see `summary`) or as one line of JSON."""
    if as_json:
        return json.dumps({"event": "run_finished", **report.to_json()}) + "\n"
    return summary(report, quiet=quiet) + "\n"


def summary(report: RunReport, *, quiet: bool = False) -> str:
    """Return the last lines of a run: problems, results, counts, traffic, and delivered files.

    Args:
        report: The run.
        quiet: Leave out what the stages say of their results.
    """
    lines = [
        *_list_problems(report),
        *([] if quiet else _describe_results(report.stages)),
        *([] if quiet else _compare(report.compared_libraries)),
        f"{_count_stages(report)}  ({duration_text(report.seconds)})",
        *_describe_uploads(report.remote),
    ]
    lines += [f"  {path}" for path in _group_paths(report.delivered)]
    return printable_lines("\n".join(lines))


def _list_problems(report: RunReport) -> Iterator[str]:
    for path in report.damage:
        yield f"damaged file set aside, and what was in it made again: {path}"
    for stage in report.stages:
        if stage.message:
            yield f"{stage.stage_id}: {stage.outcome}: {stage.message}"
            if stage.fix:
                yield f"  fix: {stage.fix}"
            if stage.log:
                yield f"  log: {stage.log}"


def _describe_results(stages: Sequence[StageReport]) -> list[str]:
    """Return what each stage says of its result; of very many stages, only what those say that ran."""
    shown = [stage for stage in stages if stage.facts]
    if len(stages) > MAX_SHOWN:
        shown = [stage for stage in shown if stage.outcome != "hit"]
    facts = {stage.stage_id: stage.facts for stage in stages}
    return [
        f"{stage.stage_id}: {line}" for stage in shown for line in describe_result(stage, facts)
    ]


def _compare(libraries: Sequence[ComparedLibrary]) -> Iterator[str]:
    """Give the tables of the libraries; of very many, only that there are."""
    if len(libraries) <= MAX_SHOWN:
        yield from format_comparison(libraries)
    else:
        yield f"{len(libraries)} libraries are compared in the output of --json"


def describe_result(report: StageReport, facts: Mapping[str, Facts]) -> list[str]:
    """Return what a stage says of its result.

    Args:
        report: Of the stage.
        facts: The facts of all stages by id; the stage may use those of the stages that it needs.
    """
    # RECIPE:STAGE[/TARGET]
    recipe, _, label = report.stage_id.partition(":")
    name, _, target = label.partition("/")
    if name not in STAGES or not report.facts:
        return []
    inputs = {
        need: facts[stage_id]
        for need in STAGES[name].TRAITS.needs
        for stage_id in (f"{recipe}:{need}/{target}", f"{recipe}:{need}")
        if stage_id in facts
    }
    return STAGES[name].describe(report.facts, inputs)


def _count_stages(report: RunReport) -> str:
    """Return how many stages ended in which way: `2 ran, 5 up to date, 1 failed`."""
    outcomes = Counter(stage.outcome for stage in report.stages)
    hits, ran, fetched = outcomes["hit"], outcomes["ran"], outcomes["fetched"]
    problems = [f"{outcomes[outcome]} {outcome}" for outcome in _PROBLEMS if outcomes[outcome]]
    if not (ran or fetched or problems):
        stages = "1 stage is" if hits == 1 else f"all {hits} stages are"
        return f"{stages} up to date, nothing to run"
    size = report.remote.fetched_bytes if report.remote else 0
    counts = [f"{ran} ran"] if ran else []
    counts += [f"{fetched} fetched ({size_text(size)})"] if fetched else []
    return ", ".join([*counts, f"{hits} up to date", *problems])


def _describe_uploads(remote: Traffic | None) -> Iterator[str]:
    if remote and remote.uploaded:
        results = count_text(remote.uploaded, "result")
        yield f"{results} uploaded to {remote.address} ({size_text(remote.uploaded_bytes)})"
    if remote and remote.waiting:
        results = count_text(remote.waiting, "result")
        yield (
            f"{results} not yet uploaded to {remote.address}: the next run that may write uploads them, "
            "and so does `tvmflow cache push`"
        )


def _group_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths; of very many, how many are in each recipe's folder, or in all of them."""
    if len(paths) <= MAX_SHOWN:
        return list(paths)
    for levels in (2, 3):
        folders = Counter(path.rsplit("/", levels)[0] for path in paths)
        if len(folders) <= MAX_SHOWN:
            break
    return [f"{folder}/: {count_text(number, 'file')}" for folder, number in folders.items()]


def can_be_shown(stage: str, facts: Mapping[str, Json]) -> bool:
    """Return whether facts from elsewhere are such as the stage records, without control characters."""
    report = StageReport(f"recipe:{stage}/target", "fetched", "", 0.0, dict(facts))
    try:
        lines = describe_result(report, {})
        lines += STAGES[stage].explain(report.facts) if facts and stage in STAGES else []
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return all(char.isprintable() or char in "\n\t" for line in lines for char in line)
