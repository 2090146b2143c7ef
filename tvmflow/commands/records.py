"""`tvmflow records …`: its words, and what it says."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.commands.words import about_store, count, open_store, say, say_json, store_of
from tvmflow.errors import EXIT_FAILED, EXIT_OK
from tvmflow.report import latency_text, size_text
from tvmflow.stores.local import disk_errors
from tvmflow.values import Json

if TYPE_CHECKING:
    # every command line has these words, and few use them
    from tvmflow.tuning import pack, records
    from tvmflow.tuning.ledger import Trial

_SHORT: Final = 12
_SHOWN_PROBLEMS: Final = 10

Function = Callable[[argparse.Namespace], int]


# ---------------------------------------------------------------- one function a sub-command


def ls(args: argparse.Namespace) -> int:
    """List the targets that there are trials for, and with --workloads their kernels."""
    from tvmflow.tuning import records

    found = records.folders(_ledger(args), args.target_key)
    if args.json:
        say_json({"targets": [_target_json(folder, args.workloads) for folder in found]})
        return EXIT_OK
    say(*([] if found else [f"no trials in {_ledger(args)}"]))
    for folder in found:
        say(_target_line(records.summarise(folder)))
        if args.workloads:
            say(*map(_workload_line, records.workload_summaries(folder)))
    return EXIT_OK


def show(args: argparse.Namespace) -> int:
    """Show the trials of one workload, the fastest first."""
    from tvmflow.tuning import records

    shown = records.show(_ledger(args), args.key, args.target_key)
    if args.json:
        fields = [
            {**each._asdict(), "trials": [_trial_json(trial) for trial in each.trials[: args.best]]}
            for each in shown
        ]
        say_json({"workloads": fields})
        return EXIT_OK
    for each in shown:
        say(f"workload {each.key}{_beside(described(each.about))}")
        say(f"on {each.target[:_SHORT]}  {each.words}")
        for trial in each.trials[: args.best]:
            say(_trial_line(trial))
            if args.trace:
                say(*(f"    {line}" for line in records.trace_lines(trial.trace)))
        say(*each.problems)
    return EXIT_OK


def export(args: argparse.Namespace) -> int:
    """Write trials into one file, to be imported elsewhere."""
    from tvmflow.tuning import pack

    packed = pack.export_pack(
        args.file, _ledger(args), targets=args.target_key, workloads=args.workload, best=args.best
    )
    if args.json:
        say_json(packed._asdict())
    else:
        say(
            f"{args.file}: {packed.trials} trials ({packed.failed} failed) of {packed.workloads} "
            f"workloads on {packed.targets} targets, {size_text(packed.bytes)}",
            f"sha256 of the content {packed.digest}",
            *_problems(packed.problems, "left out"),
        )
    return EXIT_FAILED if packed.problems else EXIT_OK


def import_(args: argparse.Namespace) -> int:
    """Add the trials in a file that this machine could have measured itself."""
    from tvmflow.tuning import pack, records

    store = open_store(args)
    with store.running():
        return _tell(args, pack.import_pack(args.file, Path(store.ledger), records.this_machine()))


def merge(args: argparse.Namespace) -> int:
    """Add the trials of another store that this machine could have measured itself."""
    from tvmflow.tuning import pack, records

    store = open_store(args)
    with store.running():
        return _tell(args, pack.merge(args.dir, Path(store.ledger), records.this_machine()))


def prune(args: argparse.Namespace) -> int:
    """Say which trials would be forgotten, and with --yes forget them. They may be measured again."""
    from tvmflow.stores.contents import existing
    from tvmflow.tuning import records

    doomed = records.Doomed(args.keep_best, args.failed, args.older_than, args.tvm_other)
    store = existing(store_of(args))
    # what only looks takes no lock, and may look at what it may not write
    with store.running() if args.yes else contextlib.nullcontext():
        pruned = records.prune(
            Path(store.ledger),
            doomed,
            records.this_machine(),
            targets=args.target_key,
            do=args.yes,
        )
    skipped = any(each.skipped for each in pruned)
    if args.json:
        say_json({"done": args.yes, "workloads": [each._asdict() for each in pruned]})
        return EXIT_FAILED if skipped else EXIT_OK
    for each in pruned:
        say(
            f"{each.target[:_SHORT]}/{each.key[:_SHORT]}  {each.trials} of {each.of} trials "
            f"({each.failed} failed){_beside(described(each.about))}"
            + (f"  left alone: {each.skipped}" if each.skipped else "")
        )
    gone = sum(each.trials for each in pruned if not each.skipped)
    say(
        f"{gone} trials forgotten"
        if args.yes
        else f"{gone} trials would be forgotten, and may be measured again; --yes does it"
    )
    return EXIT_FAILED if skipped else EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Read every trial, and repair what is damaged; 1 when something had to be put out of use."""
    from tvmflow.stores.contents import existing
    from tvmflow.tuning import records, replay

    store = existing(store_of(args))
    root = Path(store.ledger)
    with store.running():
        found = records.verify(root, args.target_key)
        replayed = None
        if args.replay:
            replayed = replay.replay(root, replay.known_kernels(store), args.target_key)
    clean = found.clean and not (replayed and replayed.lost)
    if args.json:
        again = {"replayed": replayed._asdict()} if replayed else {}
        say_json({**found._asdict(), **again, "clean": clean})
        return EXIT_OK if clean else EXIT_FAILED
    say(
        *found.findings,
        f"{found.trials} trials of {found.workloads} workloads on {found.targets} targets can be "
        f"read; {found.lost} lines were set aside",
    )
    if replayed:
        say(
            *replayed.findings,
            f"{replayed.trials - replayed.lost} of {replayed.trials} schedules of "
            f"{replayed.workloads} workloads apply; {replayed.lost} were set aside; "
            f"{replayed.unknown} workloads are known by their trials alone",
        )
    return EXIT_OK if clean else EXIT_FAILED


# ---------------------------------------------------------------- words


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `records` and its sub-commands to the command line."""
    text = "Look at measured trials, carry them to other machines, and forget or check them."
    parser = commands.add_parser("records", help=text, description=text, allow_abbrev=False)
    subs = parser.add_subparsers(metavar="WHAT", required=True)

    def sub(name: str, function: Function) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        added = subs.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=lambda args: _on_disk(function, args))
        about_store(added, "the trials")
        added.add_argument("--json", action="store_true", help="the same as one line of JSON")
        return added

    def about_targets(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--target-key",
            action="append",
            default=[],
            metavar="PREFIX",
            help="only targets whose key starts so (may be repeated)",
        )

    added = sub("ls", ls)
    about_targets(added)
    added.add_argument("--workloads", action="store_true", help="also a line for each workload")
    added = sub("show", show)
    added.add_argument("key", metavar="KEY", help="how the workload's key starts")
    about_targets(added)
    added.add_argument("--best", type=count, metavar="N", help="only the N fastest")
    added.add_argument("--trace", action="store_true", help="also what each schedule does")
    added = sub("export", export)
    added.add_argument(
        "file", type=Path, metavar="FILE", help="the file to write; gzipped if it ends in .gz"
    )
    about_targets(added)
    added.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="PREFIX",
        help="only workloads whose key starts so (may be repeated)",
    )
    added.add_argument(
        "--best", type=count, metavar="N", help="only the N fastest of each workload"
    )
    added = sub("import", import_)
    added.add_argument("file", type=Path, metavar="FILE", help="a file that `export` wrote")
    added = sub("merge", merge)
    added.add_argument("dir", type=Path, metavar="DIR", help="a store, or the ledger in one")
    added = sub("prune", prune)
    about_targets(added)
    added.add_argument(
        "--keep-best", type=count, metavar="N", help="all but the N fastest of each workload"
    )
    added.add_argument("--failed", action="store_true", help="the trials that failed")
    added.add_argument(
        "--older-than", type=_days, metavar="DAYS", help="only what is older than this"
    )
    added.add_argument(
        "--tvm-other",
        action="store_true",
        help="only what another build of TVM measured than the one installed",
    )
    added.add_argument("--yes", action="store_true", help="do it; without, nothing is changed")
    added = sub("verify", verify)
    about_targets(added)
    added.add_argument(
        "--replay",
        action="store_true",
        help="also apply every schedule again to its kernel, if the store has it",
    )


def _on_disk(function: Function, args: argparse.Namespace) -> int:
    with disk_errors(store_of(args).root):
        return function(args)


def _days(word: str) -> float:
    days = float(word)
    if not days >= 0:
        raise ValueError
    return days


def _ledger(args: argparse.Namespace) -> Path:
    return Path(store_of(args).ledger)


# ---------------------------------------------------------------- lines


def _tell(args: argparse.Namespace, received: pack.Received) -> int:
    """What a ledger took from elsewhere; the exit code."""
    if args.json:
        targets = [each._asdict() for each in received.targets]
        say_json({"targets": targets, "problems": received.problems, "complete": received.complete})
    else:
        for each in received.targets:
            counts = (
                f"{each.new} new trials, {each.known} known, {each.bad} bad, "
                f"in {each.workloads} workloads"
            )
            told = f"refused: {each.refused}" if each.refused else counts
            say(f"{each.target[:_SHORT]}  {told}  ({each.words})")
        say(*_problems(received.problems, "not taken"))
    return EXIT_OK if received.complete else EXIT_FAILED


def _problems(problems: Sequence[str], what: str) -> Iterator[str]:
    for problem in problems[:_SHOWN_PROBLEMS]:
        yield f"{what}: {problem}"
    if len(problems) > _SHOWN_PROBLEMS:
        yield f"{what}: {len(problems) - _SHOWN_PROBLEMS} more"


def described(about: Json) -> str:
    """A workload for people: the name it had first, and the shapes that it takes. Empty when not known."""
    buffers = about.get("buffers", [])
    shapes = ", ".join(map(str, buffers)) if isinstance(buffers, list) else ""
    return " ".join(word for word in (str(about.get("name", "")), shapes) if word)


def _beside(text: str) -> str:
    return f"  {text}" if text else ""


def _target_line(summary: records.TargetSummary) -> str:
    days = _days_text(summary.first, summary.last)
    return "  ".join(
        [
            summary.key[:_SHORT],
            f"{summary.workloads:>4} workloads",
            f"{summary.trials:>6} trials ({_counts(summary.failed, summary.unreadable)})",
            f"{days:<24}",
            f"{size_text(summary.bytes):>8}",
            *([f"{summary.set_aside} lines set aside"] if summary.set_aside else []),
            summary.words,
        ]
    )


def _workload_line(summary: records.WorkloadSummary) -> str:
    best = "none works" if summary.best_s is None else latency_text(summary.best_s)
    return "  ".join(
        [
            f"  {summary.key[:_SHORT]}",
            f"{summary.trials:>5} trials ({_counts(summary.failed, summary.unreadable)})",
            f"{best:>10} ±{summary.spread / 2:<4.0%}",
            summary.last[:10] or "never",
            described(summary.about) or "not described",
        ]
    )


def _trial_line(trial: Trial) -> str:
    time = f"{latency_text(trial.seconds):>9}" if trial.run_secs else "   failed"
    load = "/".join(f"{each:.2g}" for each in trial.load)
    model = trial.host.get("model", "") if isinstance(trial.host, dict) else ""
    fields = [
        f"  {trial.id[:_SHORT]}",
        f"{time} ±{trial.spread / 2:<4.0%}",
        f"load {load}",
        trial.when[:19],
        f"seed {trial.seed}",
        f"TVM {trial.tvm}",
        str(model),
    ]
    if trial.failure:
        fields.append(f"{trial.failure.phase} {trial.failure.kind}: {trial.failure.message}")
    return "  ".join(fields)


def _counts(failed: int, unreadable: int) -> str:
    damaged = f", {unreadable} unreadable: run `records verify`" if unreadable else ""
    return f"{failed} failed{damaged}"


def _days_text(first: str, last: str) -> str:
    return f"{first[:10]} to {last[:10]}" if first else "never"


# ---------------------------------------------------------------- JSON


def _target_json(folder: records.Folder, workloads: bool) -> dict[str, Any]:
    from tvmflow.tuning import records

    summary = records.summarise(folder)._asdict()
    return {
        **summary,
        **({"by_workload": _each(records.workload_summaries(folder))} if workloads else {}),
    }


def _each(summaries: Iterable[records.WorkloadSummary]) -> list[dict[str, Any]]:
    return [summary._asdict() for summary in summaries]


def _trial_json(trial: Trial) -> dict[str, Any]:
    seconds = trial.seconds if trial.run_secs else None
    return {**trial.to_json(), "seconds": seconds, "spread": trial.spread}
