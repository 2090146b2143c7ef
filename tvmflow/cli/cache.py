"""`tvmflow cache`: what the store holds, its integrity, and garbage collection."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tvmflow.cli.definitions.cache import (
    GcOptions,
    PinsOptions,
    RepairOptions,
    StatOptions,
    UnpinOptions,
    VerifyOptions,
)
from tvmflow.cli.output import print_outcome, print_result, with_disk_errors
from tvmflow.cli.push_pull import pull, push
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK
from tvmflow.core.files import read_regular
from tvmflow.core.formatting import age_text, count_text, size_text
from tvmflow.core.project import shortest_path
from tvmflow.core.tables import columns
from tvmflow.engine.answers import is_sealed
from tvmflow.engine.run_records import FOLDER, is_record
from tvmflow.store.garbage_collection import Collection, Limits, collect_garbage, preview_collection
from tvmflow.store.integrity import IntegrityReport, Step, check_integrity, repair_store
from tvmflow.store.inventory import require_store
from tvmflow.store.local import LocalStore
from tvmflow.store.pins import remove_pin
from tvmflow.store.usage import PinUsage, StoreUsage, measure_pins, measure_usage
from tvmflow.tuning.ledger_folders import check_ledger

_SHOWN_RECIPES: Final = 20
_PROGRESS_S: Final = 0.2


@with_disk_errors
def stat(options: StatOptions) -> int:
    """Show what the store holds, for which recipes, and how much `gc` would free."""
    usage = measure_usage(require_store(options.store.locate()))
    print_result(usage.to_json(), _format_usage(usage), as_json=options.json)
    return EXIT_OK


@with_disk_errors
def verify(options: VerifyOptions) -> int:
    """Read everything and set damaged files aside."""
    progress = _Progress(live=sys.stderr.isatty() and not options.json and options.verbosity >= 0)
    store = require_store(options.store.locate())
    checked = check_integrity(store, progress.show, CHECKS)
    progress.end()
    # a pipe or a folder among the trials is set aside before they can be read
    is_readable = all(finding.kind != "trials" for finding in checked.findings)
    trials = _check_trials(store) if is_readable else []
    findings = [finding._asdict() for finding in checked.findings]
    value = {**checked._asdict(), "findings": findings, "trials": trials}
    code = EXIT_FAILED if checked.findings or trials else EXIT_OK
    return print_outcome(value, _format_integrity(checked, trials), code, options)


@with_disk_errors
def repair(options: RepairOptions) -> int:
    """Put right what `verify` finds, deleting nothing."""
    progress = _Progress(live=sys.stderr.isatty() and not options.json and options.verbosity >= 0)
    store = require_store(options.store.locate())
    steps = repair_store(store, progress.show, CHECKS)
    progress.end()
    trials = _check_trials(store)
    value = {"steps": [step._asdict() for step in steps], "trials": trials}
    code = EXIT_FAILED if any(step.fix for step in steps) else EXIT_OK
    return print_outcome(value, _format_repair(steps, trials), code, options)


def _check_trials(store: LocalStore) -> list[str]:
    """Return a sentence for each problem of the measured trials; lines that cannot be used are quarantined."""
    ledger = Path(store.ledger)
    return check_ledger(ledger).findings if ledger.is_dir() else []


def _is_answer(path: Path) -> bool:
    return is_sealed(str(path), read_regular(path))


def _is_run_record(path: Path) -> bool:
    return is_record(read_regular(path), path.stem)


CHECKS: Final = {"plans": _is_answer, FOLDER: _is_run_record}
"""How the files in the store are checked that belong to layers above it."""


@with_disk_errors
def gc(options: GcOptions) -> int:
    """Garbage-collect unused results, also while runs are active."""
    limits = Limits()
    if options.max_age is not None or options.max_size is not None:
        limits = Limits(options.max_age, options.max_size)
    store = require_store(options.store.locate())
    collect = preview_collection if options.dry_run else collect_garbage
    collected = collect(store, limits)
    too_large = limits.max_bytes is not None and collected.kept_bytes > limits.max_bytes
    value = {
        **collected._asdict(),
        "evictions": [eviction._asdict() for eviction in collected.evictions],
        "done": not options.dry_run,
        "freed": collected.freed,
        "too_large": too_large,
    }
    lines = _format_collection(collected, dry_run=options.dry_run, too_large=too_large)
    return print_outcome(value, lines, EXIT_FAILED if too_large else EXIT_OK, options)


@with_disk_errors
def pins(options: PinsOptions) -> int:
    """List the pins for which `gc` keeps results: recipes, lock files and releases."""
    rows = measure_pins(require_store(options.store.locate()))
    value = {"pins": [row._asdict() for row in rows]}
    print_result(value, _format_pins(rows), as_json=options.json)
    return EXIT_OK


@with_disk_errors
def unpin(options: UnpinOptions) -> int:
    """Remove pins, so that `gc` may remove their results."""
    store = require_store(options.store.locate())
    for name in options.names:
        remove_pin(store, name)
    note = "is no longer pinned; `tvmflow cache gc` may remove its results"
    lines = [f"{name} {note}" for name in options.names]
    return print_outcome({"unpinned": options.names}, lines, EXIT_OK, options)


# ---------------------------------------------------------------- output


class _Progress:
    """The progress of a long check, on a terminal."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._next = 0.0
        self._shown = False

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._live and now >= self._next:
            self._next, self._shown = now + _PROGRESS_S, True
            sys.stderr.write(f"\r\x1b[Kreading {done} of {total}")
            sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")


def _format_usage(usage: StoreUsage) -> Iterator[str]:
    yield f"{shortest_path(usage.root)}: {size_text(usage.bytes)}, and {size_text(usage.ledger_bytes)} of measured trials"
    rest = [row for row in usage.rows if row.number]
    width = max([24, *(len(row.name) for row in rest)])
    for recipe in usage.recipes:
        missing = f"; {recipe.missing} missing" if recipe.missing else ""
        yield (
            f"  {recipe.name:<{width}} {_format_count(recipe.results, 'result')} {size_text(recipe.bytes):>9}  "
            f"last used {age_text(recipe.age_s)} ago{missing}"
        )
        # Of very many recipes, each has one line only.
        for stage in recipe.stages if len(usage.recipes) <= _SHOWN_RECIPES else ():
            count = _format_count(stage.results, "result")
            yield f"    {stage.name:<{width - 2}} {count} {size_text(stage.bytes):>9}"
    for row in rest:
        yield f"  {row.name:<{width}} {_format_count(row.number, row.noun)} {size_text(row.bytes):>9}"
    yield f"`tvmflow cache gc` would free {size_text(usage.collectable_bytes)}; with --max-age 0, {size_text(usage.unused_bytes)}"


def _format_count(number: int, noun: str) -> str:
    return f"{number:>6} {noun if number == 1 else noun + 's':<8}"


def _format_integrity(checked: IntegrityReport, trials: Sequence[str]) -> Iterator[str]:
    for finding in checked.findings:
        fault = "is missing" if finding.fault == "missing" else "was damaged and set aside"
        if finding.reason:
            fault = f"is damaged: {finding.reason}"
        yield f"{finding.kind} {finding.name} {fault}"
        yield from (f"  {name}" for name in finding.affected)
    yield from trials
    results, blobs = count_text(checked.results, "result"), count_text(checked.blobs, "blob")
    total = f"{results} and {blobs} read ({size_text(checked.bytes)})"
    if problems := len(checked.findings) + len(trials):
        yield f"{total}; {count_text(problems, 'problem')} found"
        fixes = []
        if any(finding.reason for finding in checked.findings):
            fixes.append("`tvmflow cache repair` sets aside the other damaged files")
        if checked.findings:
            fixes.append("run the recipes again to make the missing results")
        if trials:
            fixes.append("the next tuning measures what it lacks; all other trials stay in use")
        yield f"  fix: {'; then '.join(fixes)}"
    else:
        yield f"{total}; no problem found"


def _format_repair(steps: Sequence[Step], trials: Sequence[str]) -> Iterator[str]:
    for step in steps:
        yield f"{step.kind} {step.name}: {step.reason}; {step.done or 'nothing can be done here'}"
        if step.fix:
            yield f"  fix: {step.fix}"
    yield from trials
    done, left = sum(bool(step.done) for step in steps), sum(bool(step.fix) for step in steps)
    if steps or trials:
        quarantined = f", {count_text(len(trials), 'problem')} of trials" if trials else ""
        yield f"{count_text(done, 'file')} put right{quarantined}, {left} left to you; nothing was deleted"
    else:
        yield "nothing is damaged"


def _format_collection(collected: Collection, *, dry_run: bool, too_large: bool) -> Iterator[str]:
    if collected.evictions:
        yield from columns(
            [
                (item.kind, item.name, age_text(item.age_s), size_text(item.bytes), item.reason)
                for item in collected.evictions
            ],
            right=frozenset({2, 3}),
        )
    active = ""
    if collected.runs:
        active = f" or used since the oldest of {count_text(collected.runs, 'active run')} began"
    removed = "would be removed" if dry_run else "removed"
    yield (
        f"{size_text(collected.freed)} {removed}, {size_text(collected.kept_bytes)} kept, "
        f"{size_text(collected.needed_bytes)} of it needed{active}; measured trials are kept"
    )
    if too_large:
        yield f"  the rest is larger than --max-size: {size_text(collected.kept_bytes)}"
        yield "  fix: `tvmflow cache pins` lists the pins, `tvmflow cache unpin NAME` removes one"


def _format_pins(rows: list[PinUsage]) -> Iterator[str]:
    if not rows:
        yield "nothing is pinned"
        return
    cells = []
    for row in rows:
        notes = [f"{row.missing} of them missing"] if row.missing else []
        if row.file_missing:
            notes.append(f"{row.file} does not exist: `tvmflow cache unpin {row.name}`")
        results = count_text(row.results, "result")
        cells.append((row.name, results, size_text(row.bytes), "  ".join(notes)))
    yield from columns(cells, right=frozenset({1, 2}))


COMMANDS: Final = {
    "cache": {
        "stat": stat,
        "verify": verify,
        "repair": repair,
        "gc": gc,
        "pins": pins,
        "unpin": unpin,
        "push": push,
        "pull": pull,
    }
}
