"""Options and help: `tvmflow records`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, argument, days, flag, option, positive_int

_TRIALS: Final = "trials are"


CHECK_HELP: Final = (
    "apply each schedule to its kernel, in a child process, and refuse those that do not apply"
)


def _target_keys_option() -> tuple[str, ...]:
    text = "only targets whose key starts with this (may be repeated)"
    return option("PREFIX", text, default=(), name="--target-key")


class ListOptions(Options):
    """List the targets that have trials, and with --workloads their kernels.

    Examples:
        tvmflow records ls
        tvmflow records ls --workloads
    """

    target_keys: tuple[str, ...] = _target_keys_option()
    workloads: bool = flag("show a line for each workload")
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)


class ShowOptions(Options):
    """Show the trials of one workload, the fastest first.

    Examples:
        # the key is in the output of `records ls --workloads`
        tvmflow records show 3fa9 --best 5
    """

    key: str = argument("KEY", "the first characters of the workload's key")
    target_keys: tuple[str, ...] = _target_keys_option()
    best: int | None = option("N", "only the N fastest trials", type=positive_int)
    trace: bool = flag("show the trace of each trial")
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)


class ExportOptions(Options):
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
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)
    verbosity: int


class ImportOptions(Options):
    """Add the trials of a trial pack that are valid here, or the schedules of a lock file.

    Examples:
        tvmflow records import trials.jsonl.gz
        tvmflow records import net.lock.yaml
    """

    file: Path = argument("FILE", "a trial pack that `export` has written, or a lock file (.yaml)")
    check: bool = flag(CHECK_HELP)
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)
    verbosity: int


class MergeOptions(Options):
    """Add the trials of another store that are valid on this machine.

    Examples:
        tvmflow records merge /mnt/colleague/cache
    """

    dir: Path = argument("DIR", "a store, or the ledger of a store")
    check: bool = flag(CHECK_HELP)
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)
    verbosity: int


class PruneOptions(Options):
    """Show which trials would be removed, and with --yes remove them.

    They may be measured again.

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
    tvm_other: bool = flag("only trials of another build of TVM than the installed one")
    yes: bool = flag("remove them; without this option nothing is changed")
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)
    verbosity: int


class VerifyOptions(Options):
    """Read every trial and repair what is damaged.

    The exit code is 1 when trials were quarantined.

    Examples:
        tvmflow records verify
    """

    target_keys: tuple[str, ...] = _target_keys_option()
    replay: bool = flag("apply every trace to its kernel again, if the store has the kernel")
    store: StoreOption = store_option(_TRIALS)
    json: bool = flag(JSON_HELP)
    verbosity: int


COMMANDS: Final = {
    "records": {
        "ls": ListOptions,
        "show": ShowOptions,
        "export": ExportOptions,
        "import": ImportOptions,
        "merge": MergeOptions,
        "prune": PruneOptions,
        "verify": VerifyOptions,
    }
}
