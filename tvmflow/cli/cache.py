"""`tvmflow cache` and `clean`: show, check, clean and share the content of the store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import RecipeOptions, RemoteCacheOptions, StoreOptions, with_disk_errors
from tvmflow.cli.options import age, argument, flag, option, size
from tvmflow.cli.output import print_outcome, print_result
from tvmflow.cli.records import CHECK_HELP
from tvmflow.core.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, UsageError
from tvmflow.core.files import read_regular
from tvmflow.core.formatting import (
    age_text,
    count_text,
    limit_lines,
    names_text,
    printable,
    size_text,
)
from tvmflow.core.project import shortest_path
from tvmflow.core.text import columns

if TYPE_CHECKING:
    from tvmflow.core.types import Plan, StageSpec
    from tvmflow.planning.decisions import PlanState
    from tvmflow.store.garbage_collection import Cleaning, Collection, PinUsage, StoreUsage
    from tvmflow.store.integrity import IntegrityReport, Step
    from tvmflow.store.local import LocalStore
    from tvmflow.store.remote.client import Fetched, RemoteCacheClient
    from tvmflow.tuning.ledger import MachineClass


class StatOptions(StoreOptions):
    """Show the store's content, its recipes, and how much `gc` would free.

    Examples:
        tvmflow cache stat
        tvmflow cache stat --store /fast/cache --json
    """


class VerifyOptions(StoreOptions):
    """Read everything and set damaged files aside.

    The exit code is 1 when anything was damaged.

    Examples:
        tvmflow cache verify
    """


class RepairOptions(StoreOptions):
    """Repair damage that `verify` finds, without deleting anything.

    The exit code is 1 when something is left to do.

    Examples:
        tvmflow cache repair
    """


class GcOptions(StoreOptions):
    """Garbage-collect unused results, even while runs are active.

    By default, results that nothing needs and that were unused for 30 days are removed. Results that recipes, lock
    files and releases need stay: see `tvmflow cache pins`.

    Examples:
        # what would be removed, and why
        tvmflow cache gc --dry-run
        # everything that nothing needs
        tvmflow cache gc --max-age 0
        # down to a size
        tvmflow cache gc --max-size 20GB
    """

    max_age: float | None = option(
        "AGE",
        "remove results that nothing needs and that were unused for this long: 30d, 12h, 2w, 0",
        type=age,
    )
    max_size: int | None = option(
        "SIZE",
        "remove results that nothing needs, the longest unused first, down to this size: 20GB",
        type=size,
    )
    dry_run: bool = flag("only show what would be removed, and why")


class PinsOptions(StoreOptions):
    """List the pins for which `gc` keeps results: recipes, lock files and releases.

    Examples:
        tvmflow cache pins
    """


class UnpinOptions(StoreOptions):
    """Remove pins, so that `gc` may remove their results.

    The next run of a recipe pins it again.

    Examples:
        tvmflow cache unpin recipe:net
    """

    names: tuple[str, ...] = argument("NAME", "a pin, as `cache pins` lists it", "+")


class OptionalRecipeOptions(RecipeOptions):
    """Recipes that a command may leave out."""

    recipes: tuple[str, ...] = argument("RECIPE", "a recipe, or a pipeline that names recipes", "*")


class PushOptions(StoreOptions):
    """Upload results to the remote cache: those of recipes, all, or failed uploads of earlier runs.

    Examples:
        # what earlier runs could not upload
        tvmflow cache push --remote https://cache.example.com
        # what two recipes need
        tvmflow cache push a.yaml b.yaml --remote s3://bucket/tvmflow
    """

    recipes: OptionalRecipeOptions
    remote: RemoteCacheOptions
    all: bool = flag("upload every result in the store")
    ledger: bool = flag("upload all measured trials, too")


class PullOptions(StoreOptions):
    """Fetch results of recipes from the remote cache, without running anything.

    Examples:
        tvmflow cache pull net.yaml --remote https://cache.example.com
    """

    recipes: RecipeOptions
    remote: RemoteCacheOptions
    ledger: bool = flag("fetch the trials of machines like this one, too")
    check: bool = flag(f"with --ledger, {CHECK_HELP}")


_SHOWN_RECIPES: Final = 20
_PROGRESS_S: Final = 0.2


@with_disk_errors
def stat(options: StatOptions) -> int:
    from tvmflow.store.garbage_collection import measure_usage

    usage = measure_usage(options.store.require())
    return print_result(usage, _format_usage(usage), options)


@with_disk_errors
def verify(options: VerifyOptions) -> int:
    from tvmflow.store.integrity import check_integrity

    store = options.store.require()
    checked = check_integrity(store, _show_reading(options), store_checks())
    # Reading a pipe or a folder in place of a trial file would block or fail.
    is_readable = all(finding.kind != "trials" for finding in checked.findings)
    trials = _check_trials(store) if is_readable else []
    value = {**checked._asdict(), "trials": trials}
    code = EXIT_FAILED if checked.findings or trials else EXIT_OK
    return print_outcome(value, _format_integrity(checked, trials), code, options)


@with_disk_errors
def repair(options: RepairOptions) -> int:
    from tvmflow.store.integrity import repair_store

    store = options.store.require()
    steps = repair_store(store, _show_reading(options), store_checks())
    trials = _check_trials(store)
    value = {"steps": steps, "trials": trials}
    code = EXIT_FAILED if any(step.fix for step in steps) else EXIT_OK
    return print_outcome(value, _format_repair(steps, trials), code, options)


def _check_trials(store: LocalStore) -> list[str]:
    """Return the problems of the measured trials; unusable lines are quarantined."""
    from tvmflow.tuning.ledger_folders import check_ledger

    ledger = Path(store.ledger)
    return check_ledger(ledger).findings if ledger.is_dir() else []


def store_checks() -> dict[str, Callable[[Path], bool]]:
    """Return checks, by folder, of the files in the store that belong to layers above it."""
    from tvmflow.engine.answers import is_sealed
    from tvmflow.engine.run_records import FOLDER, is_record

    return {
        "plans": lambda path: is_sealed(str(path), read_regular(path)),
        FOLDER: lambda path: is_record(read_regular(path), path.stem),
    }


@with_disk_errors
def gc(options: GcOptions) -> int:
    from tvmflow.store.garbage_collection import Limits, collect_garbage, preview_collection

    is_limited = options.max_age is not None or options.max_size is not None
    limits = Limits(options.max_age, options.max_size) if is_limited else Limits()
    collect = preview_collection if options.dry_run else collect_garbage
    collected = collect(options.store.require(), limits)
    too_large = limits.max_bytes is not None and collected.kept_bytes > limits.max_bytes
    value = {
        **collected._asdict(),
        "done": not options.dry_run,
        "freed": collected.freed,
        "too_large": too_large,
    }
    lines = _format_collection(collected, dry_run=options.dry_run, too_large=too_large)
    return print_outcome(value, lines, EXIT_FAILED if too_large else EXIT_OK, options)


@with_disk_errors
def pins(options: PinsOptions) -> int:
    from tvmflow.store.garbage_collection import measure_pins

    rows = measure_pins(options.store.require())
    return print_result({"pins": rows}, _format_pins(rows), options)


@with_disk_errors
def unpin(options: UnpinOptions) -> int:
    from tvmflow.store.inventory import remove_pin

    store = options.store.require()
    for name in options.names:
        remove_pin(store, name)
    note = "is no longer pinned; `tvmflow cache gc` may remove its results"
    lines = [f"{name} {note}" for name in options.names]
    return print_outcome({"unpinned": options.names}, lines, EXIT_OK, options)


# ---------------------------------------------------------------- push and pull

_SHORT_KEY: Final = 12


def push(options: PushOptions) -> int:
    from tvmflow.engine.remote_access import open_command_client

    store = options.store.open()
    with store.running():
        client = open_command_client(options.remote.settings(), store, _warn, writes=True)
        keys, absent = _list_keys(options, store, client)
        uploaded, known, failed = dict[str, int](), list[str](), dict[str, str]()
        for key, outcome in client.uploader.upload_all(list(dict.fromkeys(keys))):
            if isinstance(outcome, Exception):
                failed[key] = str(outcome)
            elif outcome:
                uploaded[key] = outcome
            else:
                known.append(key)
        trials, problems = 0, list[str]()
        # Without recipes, all pending uploads are sent, which may include trials.
        if options.ledger or client.uploader.spool.list():
            trials, problems = _push_trials(client)
        client.finish()
    address = client.connection.address
    value = {
        "remote": address,
        "uploaded": uploaded,
        "known": known,
        "failed": failed,
        "absent": absent,
        "trials": trials,
        "problems": problems,
    }
    number, size = count_text(len(uploaded), "result"), size_text(sum(uploaded.values()))
    lines = [
        f"{number} uploaded to {address} ({size}), {len(known)} already there",
        *([f"{count_text(trials, 'trial')} shared"] if trials else []),
        *limit_lines([f"not uploaded: {key[:_SHORT_KEY]}: {text}" for key, text in failed.items()]),
        *limit_lines([f"not uploaded: {name}: not in the store; run it first" for name in absent]),
        *limit_lines(problems),
    ]
    code = _exit_code(client, failed=bool(failed or problems))
    return print_outcome(value, lines, code, options)


def pull(options: PullOptions) -> int:
    from tvmflow.engine.remote_access import open_command_client, prefetch

    store = options.store.open()
    origins: dict[str, str] = {}
    with store.running():
        client = open_command_client(options.remote.settings(), store, _warn, writes=False)
        plan, plan_state = _evaluate(options.recipes, store)
        present = [spec.id for spec in plan.stages if spec.id in plan_state.artifacts]

        def note_origin(spec: StageSpec, fetched: Fetched) -> None:
            origins[spec.id] = fetched.origin

        prefetch(plan, plan_state, client, note_origin)
        for spec in plan.stages:
            if spec.id in origins:
                store.remember(spec.recipe, spec.label, plan_state.artifacts[spec.id].key)
        trials, problems = _pull_trials(client, options.check) if options.ledger else (0, [])
        client.finish()
    traffic = client.traffic()
    missing = [spec.id for spec in plan.stages if spec.id not in plan_state.artifacts]
    value = {
        "remote": client.connection.address,
        "fetched": origins,
        "bytes": traffic.fetched_bytes,
        "here": present,
        "missing": missing,
        "trials": trials,
        "problems": [*traffic.problems, *problems],
    }
    lines = [
        f"{count_text(len(origins), 'result')} fetched from {client.connection.address} "
        f"({size_text(traffic.fetched_bytes)}), {len(present)} already here",
        *([count_text(trials, "new trial")] if options.ledger else []),
        *limit_lines([f"not in the remote cache: {name}" for name in missing]),
        *limit_lines(problems),
    ]
    code = _exit_code(client, failed=bool(problems or traffic.problems))
    print_outcome(value, lines, code, options)
    # A full disk is reported only after everything else was fetched.
    if client.reader.disk_problem:
        raise client.reader.disk_problem
    return code


def _warn(text: str) -> None:
    sys.stderr.write(f"tvmflow: remote cache: {printable(text)}\n")


def _list_keys(
    options: PushOptions, store: LocalStore, client: RemoteCacheClient
) -> tuple[list[str], list[str]]:
    """Return the keys to upload, and the ids of stages without a result."""
    if options.all:
        return store.keys(), []
    if options.recipes.recipes:
        plan, plan_state = _evaluate(options.recipes, store)
        keys = [artifact.key for artifact in plan_state.artifacts.values()]
        return keys, [spec.id for spec in plan.stages if spec.id not in plan_state.artifacts]
    return client.uploader.waiting_results(), []


def _evaluate(recipes: RecipeOptions, store: LocalStore) -> tuple[Plan, PlanState]:
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.prepare import prepare_run

    plan = prepare_run(recipes.request(), store, DownloadLine()).plan
    return plan, evaluate_plan(plan, store)


def _push_trials(client: RemoteCacheClient) -> tuple[int, list[str]]:
    from tvmflow.tuning import remote_ledger

    def push(source: MachineClass) -> tuple[int, Sequence[str]]:
        trials = remote_ledger.push_trials(client.connection, source)
        remote_ledger.mark_pushed(client, source)
        return trials, ()

    return _transfer_trials(client, push)


def _pull_trials(client: RemoteCacheClient, check: bool) -> tuple[int, list[str]]:
    """Fetch the trials of machines like this one; return the number of new ones, and problems."""
    from tvmflow.cli.records import start_trace_check
    from tvmflow.tuning import remote_ledger

    with start_trace_check(client.connection.store, check) as checker:

        def pull(source: MachineClass) -> tuple[int, Sequence[str]]:
            pulled = remote_ledger.pull_trials(client.connection, source, checker)
            return pulled.new, pulled.problems

        return _transfer_trials(client, pull)


def _transfer_trials(
    client: RemoteCacheClient, transfer: Callable[[MachineClass], tuple[int, Sequence[str]]]
) -> tuple[int, list[str]]:
    from tvmflow.store.http_client import TransferError
    from tvmflow.tuning.remote_ledger import list_machine_classes

    trials, problems = 0, list[str]()
    for source in list_machine_classes(client.connection.store):
        try:
            number, found = transfer(source)
        except TransferError as problem:
            found = [f"trials of {source.device.get('class', 'a device')}: {problem}"]
        else:
            trials += number
        problems += found
    return trials, problems


def _exit_code(client: RemoteCacheClient, *, failed: bool) -> int:
    if client.connection.reads.open or client.connection.writes.open:
        return EXIT_ENVIRONMENT
    return EXIT_FAILED if failed else EXIT_OK


def _show_reading(options: StoreOptions) -> Callable[[int, int], None]:
    """Return a progress display of the number of files that were read."""
    from tvmflow.core.logs import can_show_status, show_status

    is_shown = can_show_status() and not options.json
    due = 0.0

    def show(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if is_shown and (now >= due or done == total):
            due = now + _PROGRESS_S
            show_status("" if done == total else f"reading {done} of {total}")

    return show


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
        # With many recipes, each gets a single line.
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
    fixes = {
        "`tvmflow cache repair` sets aside the other damaged files": any(
            finding.reason for finding in checked.findings
        ),
        "run the recipes again to make the missing results": bool(checked.findings),
        "the next `tune` stage measures what is missing; all other trials stay in use": bool(
            trials
        ),
    }
    if problems := len(checked.findings) + len(trials):
        yield f"{total}; {count_text(problems, 'problem')} found"
        yield f"  fix: {'; then '.join(fix for fix, is_needed in fixes.items() if is_needed)}"
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
        yield f"{count_text(done, 'file')} repaired{quarantined}, {left} to repair by hand; nothing was deleted"
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
    runs = count_text(collected.runs, "active run")
    active = f" or used since the oldest of {runs} began" if collected.runs else ""
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


class CleanOptions(StoreOptions):
    """Remove stored results, except pinned ones.

    Downloads, logs and notes are removed, too. Results that lock files and releases need stay (see
    `tvmflow cache pins`), and so do measured trials. To remove only unused results, see `tvmflow cache gc`.

    Examples:
        # show what would be removed, and its size
        tvmflow clean --dry-run
        # remove it, without being asked
        tvmflow clean --yes
    """

    yes: bool = flag("remove without asking")
    dry_run: bool = flag("only show what would be removed")
    ledger: bool = flag("also remove all measured trials")


@with_disk_errors
def clean(options: CleanOptions) -> int:
    from tvmflow.store.garbage_collection import clean_store

    store = options.store.locate()
    if not (options.yes or options.dry_run):
        preview = clean_store(store, ledger=options.ledger, dry_run=True)
        if not _confirm("\n".join(_format_cleaning(preview, store, options, done=False))):
            return EXIT_FAILED
    cleaning = clean_store(store, ledger=options.ledger, dry_run=options.dry_run)
    done = not options.dry_run
    value = {**cleaning._asdict(), "done": done}
    lines = _format_cleaning(cleaning, store, options, done=done)
    return print_outcome(value, lines, EXIT_OK, options)


def _confirm(preview: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "clean asks before it removes anything, and there is no terminal here",
            fix="add --yes to remove, or --dry-run to see what would be removed",
        )
    sys.stderr.write(f"{preview}\nRemove? [y/N] ")
    sys.stderr.flush()
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        sys.stderr.write("nothing was removed\n")
    return agreed


def _format_cleaning(
    cleaning: Cleaning, store: LocalStore, options: CleanOptions, *, done: bool
) -> Iterator[str]:
    from tvmflow.store.inventory import size_below

    removed = "removed" if done else "would be removed"
    results = count_text(cleaning.results, "result")
    rest = cleaning.bytes - cleaning.trial_bytes
    yield f"{shortest_path(store.root)}: {results} {removed}, with downloads, logs and notes: {size_text(rest)}"
    if cleaning.pins:
        kept = count_text(cleaning.kept_results, "result")
        yield f"  kept: {kept}, pinned by {names_text(cleaning.pins)} ({size_text(cleaning.kept_bytes)})"
    if options.ledger:
        yield f"  measured trials {removed}: {size_text(cleaning.trial_bytes)}"
    else:
        yield f"  measured trials are kept ({size_text(size_below(Path(store.ledger)))})"


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
    },
    "clean": clean,
}
