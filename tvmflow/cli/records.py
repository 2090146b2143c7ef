"""`tvmflow records`: measured trials, on this machine and carried to others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from tvmflow.cli import records_output
from tvmflow.cli.definitions.records import (
    ExportOptions,
    ImportOptions,
    ListOptions,
    MergeOptions,
    PruneOptions,
    ShowOptions,
    VerifyOptions,
)
from tvmflow.cli.output import (
    print_json,
    print_lines,
    print_outcome,
    print_result,
    with_disk_errors,
)
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK
from tvmflow.core.file_kinds import LOCK, TRIALS, check_kind
from tvmflow.core.project import shortest_path
from tvmflow.release.lock_trials import SUFFIXES, import_lock
from tvmflow.store.inventory import require_store
from tvmflow.store.local import LocalStore
from tvmflow.tuning import pruning, replay
from tvmflow.tuning.ledger_check import check_ledger
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.listing import find_workload_trials
from tvmflow.tuning.machine_class import this_machine_class
from tvmflow.tuning.pack import export_pack
from tvmflow.tuning.pack_import import import_pack
from tvmflow.tuning.trial_import import ImportResult, merge_ledger


@with_disk_errors
def list_targets(options: ListOptions) -> int:
    """List the targets that have trials, and with --workloads their kernels."""
    ledger = options.store.locate().ledger
    folders = list_target_folders(Path(ledger), options.target_keys)
    workloads = options.workloads
    if options.json:
        targets = [records_output.target_to_json(folder, workloads) for folder in folders]
        print_json({"targets": targets})
        return EXIT_OK
    if not folders:
        print_lines(f"no trials in {shortest_path(str(ledger))}")
    for folder in folders:
        print_lines(*records_output.format_target(folder, workloads))
    return EXIT_OK


@with_disk_errors
def show(options: ShowOptions) -> int:
    """Show the trials of one workload, the fastest first."""
    ledger = Path(options.store.locate().ledger)
    workloads = [
        workload._replace(trials=workload.trials[: options.best])
        for workload in find_workload_trials(ledger, options.key, options.target_keys)
    ]
    value = {"workloads": [records_output.workload_to_json(workload) for workload in workloads]}
    lines = (
        line
        for workload in workloads
        for line in records_output.format_trials(workload, trace=options.trace)
    )
    print_result(value, lines, as_json=options.json)
    return EXIT_OK


@with_disk_errors
def export(options: ExportOptions) -> int:
    """Write trials into a trial pack, to be imported elsewhere."""
    packed = export_pack(
        options.file,
        Path(options.store.locate().ledger),
        targets=options.target_keys,
        workloads=options.workloads,
        best=options.best,
    )
    lines = records_output.format_packed(options.file, packed)
    code = EXIT_FAILED if packed.problems else EXIT_OK
    return print_outcome(packed._asdict(), lines, code, options)


@with_disk_errors
def import_trials(options: ImportOptions) -> int:
    """Add the trials of a trial pack that are valid here, or the schedules of a lock file."""
    store = options.store.open()
    check_kind(options.file, TRIALS, LOCK)
    import_file = import_lock if options.file.suffix in SUFFIXES else import_pack
    with store.running(), start_trace_check(store, options.check) as checker:
        result = import_file(options.file, Path(store.ledger), this_machine_class(), checker)
    return _show_import(result, options)


@with_disk_errors
def merge(options: MergeOptions) -> int:
    """Add the trials of another store that are valid on this machine."""
    store = options.store.open()
    with store.running(), start_trace_check(store, options.check) as checker:
        result = merge_ledger(options.dir, Path(store.ledger), this_machine_class(), checker)
    return _show_import(result, options)


def start_trace_check(
    store: LocalStore, check: bool
) -> contextlib.AbstractContextManager[replay.TraceCheck | None]:
    """Give what applies traces before they are imported; None without `check`."""
    return replay.TraceCheck.start(store) if check else contextlib.nullcontext()


def _show_import(result: ImportResult, options: ImportOptions | MergeOptions) -> int:
    value = {
        "targets": [target._asdict() for target in result.targets],
        "problems": result.problems,
        "complete": result.complete,
    }
    code = EXIT_OK if result.complete else EXIT_FAILED
    return print_outcome(value, records_output.format_import(result), code, options)


@with_disk_errors
def prune(options: PruneOptions) -> int:
    """Show which trials would be removed, and with --yes remove them."""
    criteria = pruning.PruneCriteria(
        options.keep_best, options.failed, options.older_than, options.tvm_other
    )
    store = require_store(options.store.locate())
    # Without --yes nothing is written, so that no lease is taken: the store may be read-only.
    with store.running() if options.yes else contextlib.nullcontext():
        pruned = pruning.prune(
            Path(store.ledger),
            criteria,
            this_machine_class(),
            targets=options.target_keys,
            dry_run=not options.yes,
        )
    value = {"done": options.yes, "workloads": [row.to_json() for row in pruned]}
    lines = records_output.format_pruned(pruned, done=options.yes)
    code = EXIT_FAILED if any(row.skip_reason for row in pruned) else EXIT_OK
    return print_outcome(value, lines, code, options)


@with_disk_errors
def verify(options: VerifyOptions) -> int:
    """Read every trial and repair what is damaged."""
    store = require_store(options.store.locate())
    root = Path(store.ledger)
    replayed = None
    with store.running():
        checked = check_ledger(root, options.target_keys)
        if options.replay:
            replayed = replay.replay_ledger(root, replay.find_kernels(store), options.target_keys)
    clean = checked.clean and not (replayed and replayed.quarantined)
    more = {"replayed": replayed._asdict()} if replayed else {}
    value = {**checked._asdict(), **more, "clean": clean}
    lines = records_output.format_check(checked, replayed)
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
