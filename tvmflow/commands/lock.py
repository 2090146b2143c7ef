"""`tvmflow lock` and `tvmflow diff`: their words, and what they say."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from tvmflow.commands.words import about_store, open_store, say, say_json
from tvmflow.decide import surveyed
from tvmflow.errors import EXIT_FAILED, EXIT_OK
from tvmflow.report import render
from tvmflow.stores.local import disk_errors


def lock(args: argparse.Namespace) -> int:
    """Bring recipes up to date, and write down what they came from and gave."""
    from tvmflow.commands.run import asked, perform
    from tvmflow.locks import lock_path, make_lock, pin

    path = Path(args.lock) if args.lock else lock_path(args.recipes)
    store = open_store(args)
    args.locked, args.lock = False, None
    with contextlib.ExitStack() as held:
        done = perform(args, asked(args), store, held)
        sys.stdout.write(render(done.report, as_json=args.json))
        if done.report.exit_code != EXIT_OK:
            return done.report.exit_code
        survey = surveyed(done.prepared.plan, store)
        text = make_lock(done.prepared.recipes, done.prepared.plan, survey, store, path)
        pin(store, path, survey)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != before:
        with disk_errors(str(path)):
            _write(path, text)
    if not args.json:
        how = "as it was" if text == before else "written" if not before else "changed"
        say(f"  {path} ({how})")
    return EXIT_OK


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def diff(args: argparse.Namespace) -> int:
    """Say what changed from one lock to another; 1 when anything did."""
    from tvmflow.locks import read_lock
    from tvmflow.locks.diff import compare

    before, after = (read_lock(Path(name)) for name in (args.before, args.after))
    changes = compare(before.file, after.file)
    if args.json:
        told = [change._asdict() for change in changes]
        say_json({"changes": told})
    elif not changes:
        say("no difference")
    else:
        place = None
        for change in changes:
            if change.place != place:
                say(change.place)
                place = change.place
            say(f"  {change.what:<11} {change.text}")
    return EXIT_FAILED if changes else EXIT_OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `lock` and `diff` to the command line."""
    from tvmflow.commands.run import about_recipes, about_runs

    text = (lock.__doc__ or "").strip()
    sub = commands.add_parser("lock", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=lock)
    about_store(sub)
    about_recipes(sub)
    about_runs(sub)
    sub.add_argument(
        "--lock", metavar="FILE", help="where to (beside the recipe, with the ending .lock.yaml)"
    )
    text = (diff.__doc__ or "").strip()
    sub = commands.add_parser("diff", help=text, description=text, allow_abbrev=False)
    sub.set_defaults(command=diff)
    sub.add_argument("before", metavar="A", help="a lock")
    sub.add_argument("after", metavar="B", help="a later one")
    sub.add_argument("--json", action="store_true", help="the same as one line of JSON")
