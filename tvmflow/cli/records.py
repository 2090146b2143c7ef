"""`tvmflow records`: measured trials, on this machine and on others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import StoreOption, StoreOptions, store_option, with_disk_errors
from tvmflow.cli.options import argument, days, flag, option, positive_int
from tvmflow.cli.output import print_lines, print_outcome, print_result
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK
from tvmflow.core.formatting import count_text, latency_text, size_text

if TYPE_CHECKING:
    from tvmflow.core.types import Json
    from tvmflow.store.local import LocalStore
    from tvmflow.tuning import ledger_folders, replay
    from tvmflow.tuning.ledger_folders import LedgerCheck, PruneResult, TargetFolder
    from tvmflow.tuning.packs import ExportResult, ImportResult
    from tvmflow.tuning.replay import ReplayResult
    from tvmflow.tuning.trials import Trial

CHECK_HELP: Final = (
    "apply each schedule to its kernel, in a child process, and refuse schedules that do not apply"
)


def _target_keys_option() -> tuple[str, ...]:
    text = "only targets whose key starts with this (may be repeated)"
    return option("PREFIX", text, default=(), name="--target-key")


class _RecordsOptions(StoreOptions):
    store: StoreOption = store_option("trials are")


class ListOptions(_RecordsOptions):
    """List the targets that have trials, and with --workloads their kernels.

    Examples:
        tvmflow records ls
        tvmflow records ls --workloads
    """

    target_keys: tuple[str, ...] = _target_keys_option()
    workloads: bool = flag("show a line for each workload")


class ShowOptions(_RecordsOptions):
    """Show the trials of one workload, the fastest first.

    Examples:
        # the key is in the output of `records ls --workloads`
        tvmflow records show 3fa9 --best 5
    """

    key: str = argument("KEY", "the first characters of the workload's key")
    target_keys: tuple[str, ...] = _target_keys_option()
    best: int | None = option("N", "only the N fastest trials", type=positive_int)
    trace: bool = flag("show the trace of each trial")


class ExportOptions(_RecordsOptions):
    """Write trials into a trial pack, to be imported elsewhere.

    Examples:
        # the three fastest of every kernel
        tvmflow records export trials.jsonl.gz --best 3
    """

    file: Path = argument("FILE", "the trial pack to write; gzipped if it ends in .gz")
    target_keys: tuple[str, ...] = _target_keys_option()
    workloads: tuple[str, ...] = option(
        "PREFIX",
        "only workloads whose key starts with this (may be repeated)",
        default=(),
        name="--workload",
    )
    best: int | None = option("N", "only the N fastest trials of each workload", type=positive_int)


class ImportOptions(_RecordsOptions):
    """Add the trials of a trial pack that are valid here, or the schedules of a lock file.

    Examples:
        tvmflow records import trials.jsonl.gz
        tvmflow records import net.lock.yaml
    """

    file: Path = argument("FILE", "a trial pack that `export` has written, or a lock file (.yaml)")
    check: bool = flag(CHECK_HELP)


class MergeOptions(_RecordsOptions):
    """Add the trials of another store that are valid on this machine.

    Examples:
        tvmflow records merge /mnt/colleague/cache
    """

    dir: Path = argument("DIR", "a store, or the ledger of a store")
    check: bool = flag(CHECK_HELP)


class PruneOptions(_RecordsOptions):
    """Show which trials would be removed, and with --yes remove them.

    Removed trials may be measured again.

    Examples:
        # keep the ten fastest of every kernel
        tvmflow records prune --keep-best 10
        tvmflow records prune --keep-best 10 --yes
    """

    target_keys: tuple[str, ...] = _target_keys_option()
    keep_best: int | None = option(
        "N", "all but the N fastest trials of each workload", type=positive_int
    )
    failed: bool = flag("trials that failed")
    older_than: float | None = option("DAYS", "only trials that are older than this", type=days)
    tvm_other: bool = flag("only trials of TVM builds that differ from the installed one")
    yes: bool = flag("remove them; without this option nothing is changed")


class VerifyOptions(_RecordsOptions):
    """Read every trial and repair damage.

    The exit code is 1 when trials were quarantined.

    Examples:
        tvmflow records verify
    """

    target_keys: tuple[str, ...] = _target_keys_option()
    replay: bool = flag("apply every trace to its kernel again, if the store has the kernel")


@with_disk_errors
def list_targets(options: ListOptions) -> int:
    from tvmflow.core.project import shortest_path
    from tvmflow.tuning.ledger_folders import list_target_folders

    ledger = Path(options.store.locate().ledger)
    folders = list_target_folders(ledger, options.target_keys)
    if options.json:
        targets = [_target_to_json(folder, options.workloads) for folder in folders]
        return print_result({"targets": targets}, (), options)
    if not folders:
        print_lines(f"no trials in {shortest_path(str(ledger))}")
    for folder in folders:
        print_lines(*_format_target(folder, options.workloads))
    return EXIT_OK


@with_disk_errors
def show(options: ShowOptions) -> int:
    from tvmflow.tuning.ledger_folders import find_workload_trials

    ledger = Path(options.store.locate().ledger)
    workloads = [
        workload._replace(trials=workload.trials[: options.best])
        for workload in find_workload_trials(ledger, options.key, options.target_keys)
    ]
    value = {"workloads": [workload_to_json(workload) for workload in workloads]}
    lines = chain.from_iterable(format_trials(row, trace=options.trace) for row in workloads)
    return print_result(value, lines, options)


@with_disk_errors
def export(options: ExportOptions) -> int:
    from tvmflow.tuning.packs import export_pack

    packed = export_pack(
        options.file,
        Path(options.store.locate().ledger),
        targets=options.target_keys,
        workloads=options.workloads,
        best=options.best,
    )
    lines = _format_packed(options.file, packed)
    code = EXIT_FAILED if packed.problems else EXIT_OK
    return print_outcome(packed, lines, code, options)


@with_disk_errors
def import_trials(options: ImportOptions) -> int:
    from tvmflow.core.file_kinds import LOCK, TRIALS, check_kind
    from tvmflow.release import LOCK_SUFFIXES, import_lock
    from tvmflow.tuning.ledger import this_machine_class
    from tvmflow.tuning.packs import import_pack

    store = options.store.open()
    check_kind(options.file, TRIALS, LOCK)
    import_file = import_lock if options.file.suffix in LOCK_SUFFIXES else import_pack
    with store.running(), start_trace_check(store, options.check) as checker:
        result = import_file(options.file, Path(store.ledger), this_machine_class(), checker)
    return _show_import(result, options)


@with_disk_errors
def merge(options: MergeOptions) -> int:
    from tvmflow.tuning.ledger import this_machine_class
    from tvmflow.tuning.packs import merge_ledger

    store = options.store.open()
    with store.running(), start_trace_check(store, options.check) as checker:
        result = merge_ledger(options.dir, Path(store.ledger), this_machine_class(), checker)
    return _show_import(result, options)


def start_trace_check(
    store: LocalStore, check: bool
) -> contextlib.AbstractContextManager[replay.TraceCheck | None]:
    """Open a process that checks traces before the import; None without `check`."""
    from tvmflow.tuning import replay

    return replay.TraceCheck.start(store) if check else contextlib.nullcontext()


def _show_import(result: ImportResult, options: ImportOptions | MergeOptions) -> int:
    value = {"targets": result.targets, "problems": result.problems, "complete": result.complete}
    code = EXIT_OK if result.complete else EXIT_FAILED
    return print_outcome(value, _format_import(result), code, options)


@with_disk_errors
def prune(options: PruneOptions) -> int:
    from tvmflow.tuning import ledger_folders
    from tvmflow.tuning.ledger import this_machine_class

    criteria = ledger_folders.PruneCriteria(
        options.keep_best, options.failed, options.older_than, options.tvm_other
    )
    store = options.store.require()
    # Without --yes nothing is written and no lease is taken, so a read-only store works.
    with store.running() if options.yes else contextlib.nullcontext():
        pruned = ledger_folders.prune(
            Path(store.ledger),
            criteria,
            this_machine_class(),
            targets=options.target_keys,
            dry_run=not options.yes,
        )
    value = {"done": options.yes, "workloads": pruned}
    lines = _format_pruned(pruned, done=options.yes)
    code = EXIT_FAILED if any(row.skip_reason for row in pruned) else EXIT_OK
    return print_outcome(value, lines, code, options)


@with_disk_errors
def verify(options: VerifyOptions) -> int:
    from tvmflow.tuning import replay
    from tvmflow.tuning.ledger_folders import check_ledger

    store = options.store.require()
    root = Path(store.ledger)
    replayed = None
    with store.running():
        checked = check_ledger(root, options.target_keys)
        if options.replay:
            replayed = replay.replay_ledger(root, replay.find_kernels(store), options.target_keys)
    clean = checked.clean and not (replayed and replayed.quarantined)
    value = {**checked._asdict(), **({"replayed": replayed} if replayed else {}), "clean": clean}
    lines = _format_check(checked, replayed)
    return print_outcome(value, lines, EXIT_OK if clean else EXIT_FAILED, options)


COMMANDS: Final = {
    "records": {
        "ls": list_targets,
        "show": show,
        "export": export,
        "import": import_trials,
        "merge": merge,
        "prune": prune,
        "verify": verify,
    }
}


_SHORT_KEY: Final = 12
_SHOWN_PROBLEMS: Final = 10


def _format_target(folder: TargetFolder, workloads: bool) -> Iterator[str]:
    from tvmflow.tuning import ledger_folders

    summary = ledger_folders.summarize_target(folder)
    days = f"{summary.first[:10]} to {summary.last[:10]}" if summary.first else "never"
    fields = [
        summary.key[:_SHORT_KEY],
        f"{count_text(summary.workloads, 'workload'):>14}",
        f"{count_text(summary.trials, 'trial'):>13} ({_format_counts(summary.failed, summary.unreadable)})",
        f"{days:<24}",
        f"{size_text(summary.bytes):>8}",
    ]
    if summary.quarantined:
        fields.append(f"{count_text(summary.quarantined, 'line')} quarantined")
    yield "  ".join([*fields, summary.text])
    if workloads:
        yield from map(_format_workload, ledger_folders.summarize_workloads(folder))


def _format_workload(summary: ledger_folders.WorkloadSummary) -> str:
    best = "none works" if summary.best_s is None else latency_text(summary.best_s)
    fields = [
        f"  {summary.key[:_SHORT_KEY]}",
        f"{count_text(summary.trials, 'trial'):>12} ({_format_counts(summary.failed, summary.unreadable)})",
        f"{best:>10} ±{summary.spread / 2:<4.0%}",
        summary.last[:10] or "never",
        summary.description.text or "no description",
    ]
    return "  ".join(fields)


def format_trials(workload: ledger_folders.WorkloadTrials, *, trace: bool) -> Iterator[str]:
    """Yield the lines of a workload and its trials, with the trace of each if `trace` is set."""
    from tvmflow.tuning import ledger_folders

    yield f"workload {workload.key}{_indent(workload.description.text)}"
    yield f"on {workload.target[:_SHORT_KEY]}  {workload.target_text}"
    for trial in workload.trials:
        yield _format_trial(trial)
        if ban := workload.bans.get(trial.id):
            yield f"    banned {ban.when[:19]}: {ban.reason}"
        if trace:
            yield from (f"    {line}" for line in ledger_folders.format_trace(trial.trace))
    yield from workload.problems


def _format_trial(trial: Trial) -> str:
    time = f"{latency_text(trial.seconds):>9}" if trial.run_secs else "   failed"
    load = "/".join(f"{value:.2g}" for value in trial.load)
    model = trial.host.get("model", "") if isinstance(trial.host, dict) else ""
    fields = [
        f"  {trial.id[:_SHORT_KEY]}",
        f"{time} ±{trial.spread / 2:<4.0%}",
        f"load {load}",
        trial.when[:19],
        f"seed {trial.seed}",
        f"TVM {trial.tvm}",
        str(model),
    ]
    if trial.failure:
        fields.append(f"{trial.failure.phase} {trial.failure.kind}: {trial.failure.message}")
    if trial.size_secs:
        times = (latency_text(median(seconds)) for seconds in trial.size_secs)
        fields.insert(2, f"at each size {', '.join(times)}")
    return "  ".join(fields)


def _format_packed(file: Path, packed: ExportResult) -> Iterator[str]:
    yield (
        f"{file}: {count_text(packed.trials, 'trial')} ({packed.failed} failed) of "
        f"{count_text(packed.workloads, 'workload')} on {count_text(packed.targets, 'target')}, "
        f"{size_text(packed.bytes)}"
    )
    yield f"sha256 of the content {packed.digest}"
    yield from _format_problems(packed.problems, "left out")


def _format_import(result: ImportResult) -> Iterator[str]:
    for target in result.targets:
        outcome = (
            f"rejected: {target.rejection}"
            if target.rejection
            else f"{count_text(target.new, 'new trial')}, {target.known} known, {target.invalid} invalid, "
            f"in {count_text(target.workloads, 'workload')}"
        )
        yield f"{target.target[:_SHORT_KEY]}  {outcome}  ({target.target_text})"
    yield from _format_problems(result.problems, "refused")
    new, known, refused = (
        sum(getattr(target, name) for target in result.targets)
        for name in ("new", "known", "invalid")
    )
    rejected = sum(bool(target.rejection) for target in result.targets)
    total = f"{count_text(new, 'trial')} taken, {known} known already, {count_text(refused, 'record')} refused"
    yield total + (f", {count_text(rejected, 'target')} rejected" if rejected else "")


def _format_pruned(pruned: Sequence[PruneResult], *, done: bool) -> Iterator[str]:
    for row in pruned:
        skipped = row.skip_reason and f"skipped: {row.skip_reason}"
        yield (
            f"{row.target[:_SHORT_KEY]}/{row.key[:_SHORT_KEY]}  {row.trials} of "
            f"{count_text(row.total, 'trial')} ({row.failed} failed)"
            f"{_indent(row.description.text)}{_indent(skipped)}"
        )
    total = count_text(sum(row.trials for row in pruned if not row.skip_reason), "trial")
    yield f"{total} removed" if done else f"{total} would be removed; --yes removes them"


def _format_check(checked: LedgerCheck, replayed: ReplayResult | None) -> Iterator[str]:
    yield from checked.findings
    yield (
        f"{count_text(checked.trials, 'trial')} of {count_text(checked.workloads, 'workload')} on "
        f"{count_text(checked.targets, 'target')} can be read; "
        f"{count_text(checked.quarantined, 'line')} quarantined"
    )
    if replayed:
        yield from replayed.findings
        yield (
            f"{replayed.trials - replayed.quarantined} of {count_text(replayed.trials, 'trace')} of "
            f"{count_text(replayed.workloads, 'workload')} can be applied; {replayed.quarantined} quarantined; "
            f"no kernel in the store for {count_text(replayed.unknown, 'workload')}"
        )


def _format_problems(problems: Sequence[str], kind: str) -> Iterator[str]:
    for problem in problems[:_SHOWN_PROBLEMS]:
        yield f"{kind}: {problem}"
    if len(problems) > _SHOWN_PROBLEMS:
        yield f"{kind}: {len(problems) - _SHOWN_PROBLEMS} more"


def _indent(text: str) -> str:
    return f"  {text}" if text else ""


def _format_counts(failed: int, unreadable: int) -> str:
    damaged = f", {unreadable} unreadable: run `tvmflow records verify`" if unreadable else ""
    return f"{failed} failed{damaged}"


def _target_to_json(folder: TargetFolder, workloads: bool) -> dict[str, Json]:
    from tvmflow.tuning import ledger_folders

    value: dict[str, Json] = ledger_folders.summarize_target(folder)._asdict()
    if workloads:
        value["by_workload"] = [
            {**workload._asdict(), "description": workload.description._asdict()}
            for workload in ledger_folders.summarize_workloads(folder)
        ]
    return value


def workload_to_json(workload: ledger_folders.WorkloadTrials) -> dict[str, Json]:
    """Return a workload with its trials."""
    from tvmflow.tuning.trials import record_to_json

    return {
        **workload._asdict(),
        "trials": [
            {
                **record_to_json(trial),
                "seconds": trial.seconds if trial.run_secs else None,
                "spread": trial.spread,
            }
            for trial in workload.trials
        ],
        "bans": {trial: record_to_json(ban) for trial, ban in workload.bans.items()},
    }
