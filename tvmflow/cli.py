"""The command line: every command, and how each of them ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvmflow import __version__
from tvmflow.commands import (
    cache,
    cluster,
    device,
    lock,
    model,
    provenance,
    records,
    remote,
    run,
    targets,
)
from tvmflow.commands.words import about_store, open_store, store_of
from tvmflow.decide import surveyed
from tvmflow.errors import (
    EXIT_BUG,
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    TvmflowError,
    UsageError,
)
from tvmflow.prepare import Asked, prepare
from tvmflow.report import MANY, explanation


def plan(args: argparse.Namespace) -> int:
    """Show what `run` would do, and why, without doing it."""
    store = open_store(args)
    prepared = prepare(run.asked(args), store)
    survey = surveyed(prepared.plan, store)
    decisions = [survey.decisions[spec.id] for spec in prepared.plan.stages]
    if args.json:
        print(json.dumps({"stages": [decision._asdict() for decision in decisions]}))
        return EXIT_OK
    hits = [decision for decision in decisions if decision.kind == "hit"]
    if len(decisions) > MANY:
        # nobody reads them one by one
        print(f"{len(hits)} stages are up to date")
        decisions = [decision for decision in decisions if decision.kind != "hit"]
    width = max([len(decision.stage_id) for decision in decisions], default=0)
    for decision in decisions:
        word = {"hit": "up to date", "run": "run", "wait": "may run"}[decision.kind]
        print(f"{decision.stage_id:<{width}}  {word:<10}  {decision.reason}")
    return EXIT_OK


def explain(args: argparse.Namespace) -> int:
    """Say why one stage must run or need not, and what its result depends on."""
    store = open_store(args)
    prepared = prepare(Asked((args.recipe,), args.pipeline), store)
    survey = surveyed(prepared.plan, store)
    many = run.many(prepared)
    wanted = [s for s in prepared.plan.stages if args.stage in (s.label, s.stage, s.id)]
    if not wanted:
        labels = ", ".join(spec.id if many else spec.label for spec in prepared.plan.stages)
        raise UsageError(f"{args.recipe} has no stage '{args.stage}'", fix=f"it has: {labels}")
    decisions = [survey.decisions[spec.id] for spec in wanted]
    keys = [survey.keys.get(spec.id) for spec in wanted]
    made = [key and store.find(key.digest) for key in keys]
    facts = [artifact and artifact.facts for artifact in made]
    origins = [remote.origin_of(store, key.digest) if key else "" for key in keys]
    if args.json:
        stages = [
            {
                **decision._asdict(),
                "key": key and key.digest,
                "depends_on": key and key.preimage,
                "facts": found,
                "made_elsewhere": origin or None,
            }
            for decision, key, found, origin in zip(decisions, keys, facts, origins, strict=True)
        ]
        print(json.dumps({"stages": stages}))
        return EXIT_OK
    for decision, key, found, origin in zip(decisions, keys, facts, origins, strict=True):
        print(explanation(decision, key, found, many=many, origin=origin))
    return EXIT_OK


def clean(args: argparse.Namespace) -> int:
    """Remove results; measured trials stay unless asked for by name."""
    from tvmflow.stores.cleaning import clean_store

    store = store_of(args)
    freed = clean_store(store, ledger=args.ledger)
    print(
        f"{store.root}: {freed / 1e6:.1f} MB removed"
        + ("" if args.ledger else "; measured trials are kept")
    )
    return EXIT_OK


def schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of recipes, for editors."""
    from tvmflow.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


def doctor(args: argparse.Namespace) -> int:
    """Check this installation piece by piece."""
    from tvmflow.doctor import examine

    store = store_of(args)
    findings = examine(store)
    for finding in findings:
        print(f"{'ok  ' if finding.good else 'BAD '} {finding.what}: {finding.found}")
        if not finding.good and finding.fix:
            print(f"     fix: {finding.fix}")
    return EXIT_OK if all(finding.good or finding.optional for finding in findings) else 4


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="tvmflow",
        description="From a trained model to tuned, verified, packaged libraries, redoing only what a change makes necessary.",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tvmflow {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        sub = commands.add_parser(
            function.__name__, help=text, description=text, allow_abbrev=False
        )
        sub.set_defaults(command=function)
        about_store(sub)
        return sub

    run.add_parser(commands)
    sub = command(plan)
    run.about_recipes(sub)
    run.about_lock(sub)
    sub = command(explain)
    sub.add_argument("recipe", metavar="RECIPE")
    sub.add_argument("stage", metavar="STAGE[/TARGET]")
    sub.add_argument("--pipeline", metavar="NAME", help="another pipeline than the recipe names")
    sub.add_argument("--json", action="store_true", help="the same as one line of JSON")
    sub = command(clean)
    sub.add_argument("--ledger", action="store_true", help="also forget every measured trial")
    command(schema)
    command(doctor)
    lock.add_parser(commands)
    model.add_parser(commands)
    cache.add_parser(commands)
    records.add_parser(commands)
    provenance.add_parser(commands)
    device.add_parser(commands)
    cluster.add_parsers(commands)
    targets.add_parser(commands)
    return parser


# ---------------------------------------------------------------- the end of every command


def main(argv: Sequence[str]) -> int:
    """Run one command; its exit code. Every error ends here, as a sentence."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:
        return EXIT_USAGE if stop.code else EXIT_OK
    args.argv = list(argv)
    try:
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except TvmflowError as error:
        print(f"tvmflow: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tvmflow: interrupted; what was finished is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as bug:
        return _report_bug(bug)


def _report_bug(bug: Exception) -> int:
    """Our mistake: say so, and keep the details out of the user's way but within reach."""
    name = f"tvmflow-bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path = Path(tempfile.gettempdir(), name)
    details: Any = traceback.format_exc()
    try:
        path.write_text(details)
        where = f"the details are in {path}"
    except OSError:
        where = f"the details could not be saved:\n{details}"
    print(f"tvmflow: a bug in tvmflow: {type(bug).__name__}: {bug}\n  {where}", file=sys.stderr)
    return EXIT_BUG
