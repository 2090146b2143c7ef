"""`tvmflow run --check-reproducible`: what it does, and what it says."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tvmflow.commands.run import Done, asked, perform
from tvmflow.commands.words import open_store, say, say_json
from tvmflow.decide import surveyed
from tvmflow.errors import EXIT_OK, EXIT_VERIFY
from tvmflow.report import render, seconds_text
from tvmflow.reproduce import TWICE, Again, build_again
from tvmflow.stores.local import LocalStore


def check(args: argparse.Namespace) -> int:
    """Run; build twice more, each time by itself; 3 when a file of a stage is another one."""
    store = open_store(args)
    wanted = asked(args)
    with contextlib.ExitStack() as held:
        done = perform(args, wanted, store, held)
    sys.stdout.write(render(done.report, as_json=args.json))
    if done.report.exit_code != EXIT_OK:
        return done.report.exit_code
    folder = Path(tempfile.mkdtemp(prefix="tvmflow-again-"))
    try:
        lock = Path(wanted.lock) if wanted.lock else _write_lock(done, store, folder)
        words = list(_words(args))
        again = build_again(words, lock, done.prepared.plan, store, folder, _on_build(args))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _tell(args, again)
    return EXIT_VERIFY if again.parted else EXIT_OK


def _write_lock(done: Done, store: LocalStore, folder: Path) -> Path:
    from tvmflow.locks import make_lock

    path = folder / "again.lock.yaml"
    survey = surveyed(done.prepared.plan, store)
    text = make_lock(done.prepared.recipes, done.prepared.plan, survey, store, path)
    path.write_text(text, encoding="utf-8")
    return path


def _words(args: argparse.Namespace) -> Iterator[str]:
    """What of this command line says what is built; the checks of what was built are not repeated."""
    yield from args.recipes
    for option, values in (("--target", args.target), ("--variant", args.variant)):
        for value in values:
            yield from (option, value)
    if args.pipeline:
        yield from ("--pipeline", args.pipeline)
    yield from ("--until", args.until if args.until not in (None, "verify") else "export")


def _on_build(args: argparse.Namespace) -> Callable[[int], None]:
    def tell(number: int) -> None:
        if not args.json:
            say(f"building again, by itself ({number} of {len(TWICE)})")

    return tell


def _tell(args: argparse.Namespace, again: Again) -> None:
    if args.json:
        told = {"event": "reproduced", **again._asdict()}
        told["parted"] = again.parted and again.parted._asdict()
        say_json(told)
        return
    took = " and ".join(seconds_text(each) for each in again.seconds)
    if again.parted is None:
        say(
            f"reproducible: {again.files} files of {again.stages} stages came out the same twice more ({took})"
        )
        return
    part = again.parted
    say(
        f"NOT REPRODUCIBLE: {part.build} gave another {part.file} for {part.stage_id}",
        f"  first difference: {part.where}",
        "  its inputs were the same; what depends on it was not compared",
    )
