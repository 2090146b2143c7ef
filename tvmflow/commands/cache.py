"""`tvmflow cache …`: its words, and what it says."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from tvmflow.commands import remote
from tvmflow.commands.words import about_store, say, say_json, store_of
from tvmflow.errors import EXIT_FAILED, EXIT_OK
from tvmflow.report import size_text
from tvmflow.stores.local import disk_errors

if TYPE_CHECKING:
    # every command line has these words, and few use them
    from tvmflow.stores import collect, usage

_SHOWN_RECIPES: Final = 20
_PROGRESS_S: Final = 0.2

Function = Callable[[argparse.Namespace], int]


# ---------------------------------------------------------------- one function a sub-command


def stat(args: argparse.Namespace) -> int:
    """Say what is in the store, whose it is, and how much `gc` would free."""
    from tvmflow.stores import contents, usage

    found = usage.measure(contents.existing(store_of(args)))
    if args.json:
        say_json(usage.to_json(found))
        return EXIT_OK
    say(*_stat_lines(found))
    return EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Read everything and set aside what is damaged; 1 when something was wrong."""
    from tvmflow.stores import checking, contents

    bar = _Bar(live=sys.stderr.isatty() and not args.json)
    found = checking.check(contents.existing(store_of(args)), bar.show)
    bar.end()
    if args.json:
        say_json({**found._asdict(), "findings": [each._asdict() for each in found.findings]})
        return EXIT_FAILED if found.findings else EXIT_OK
    for each in found.findings:
        told = "is missing" if each.fault == checking.MISSING else "was damaged and set aside"
        say(f"{each.what} {each.name} {told}", *(f"  {name}" for name in each.results))
    total = f"{found.results} results and {found.contents} contents read ({size_text(found.bytes)})"
    if found.findings:
        say(f"{total}; {len(found.findings)} wrong", "  fix: run the recipes again: they make anew")
        return EXIT_FAILED
    say(f"{total}; all are right")
    return EXIT_OK


def gc(args: argparse.Namespace) -> int:
    """Remove what nothing needs; runs may go on meanwhile. Without options, what was not used for 30 days."""
    from tvmflow.stores import collect, contents

    limits = collect.Limits()
    if args.max_age is not None or args.max_size is not None:
        limits = collect.Limits(args.max_age, args.max_size)
    store = contents.existing(store_of(args))
    found = collect.collect(store, limits, do=not args.dry_run)
    too_large = limits.max_bytes is not None and found.kept_bytes > limits.max_bytes
    if args.json:
        gone = [each._asdict() for each in found.gone]
        more = {"done": not args.dry_run, "freed": found.freed, "too_large": too_large}
        say_json({**found._asdict(), "gone": gone, **more})
        return EXIT_FAILED if too_large else EXIT_OK
    say(*_gone_lines(found))
    what = "would be removed" if args.dry_run else "removed"
    say(
        f"{size_text(found.freed)} {what}, {size_text(found.kept_bytes)} stay, {size_text(found.needed_bytes)} "
        f"of them needed{_beside_runs(found.runs)}; measured trials are kept"
    )
    if too_large:
        say(
            f"  the rest is more than --max-size: {size_text(found.kept_bytes)}",
            "  fix: `tvmflow cache pins` lists what holds it, `tvmflow cache unpin NAME` drops one",
        )
    return EXIT_FAILED if too_large else EXIT_OK


def pins(args: argparse.Namespace) -> int:
    """List what `gc` keeps results for: recipes, locks and releases."""
    from tvmflow.stores import contents, usage

    rows = usage.pinned(contents.existing(store_of(args)))
    if args.json:
        say_json({"pins": [row._asdict() for row in rows]})
        return EXIT_OK
    width = max([len(row.name) for row in rows], default=0)
    for row in rows:
        notes = [f"{row.missing} of them missing"] if row.missing else []
        notes += [f"{row.file} is gone: `tvmflow cache unpin {row.name}`"] if row.file_gone else []
        say(
            f"{row.name:<{width}}  {row.results:>5} results  {size_text(row.bytes):>9}"
            + "".join(f"  {note}" for note in notes)
        )
    say(*([] if rows else ["nothing is pinned"]))
    return EXIT_OK


def unpin(args: argparse.Namespace) -> int:
    """Let `gc` remove what only these names need. A recipe (`recipe:NAME`) is pinned again by its next run."""
    from tvmflow.stores import contents

    store = contents.existing(store_of(args))
    for name in args.name:
        contents.unpin(store, name)
    if args.json:
        say_json({"unpinned": args.name})
    else:
        say(
            *(f"{name} is no longer pinned; `tvmflow cache gc` may remove it" for name in args.name)
        )
    return EXIT_OK


# ---------------------------------------------------------------- words


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cache` and its sub-commands to the command line."""
    text = "Look at what is kept, check it, share it, and let go of what nobody needs."
    parser = commands.add_parser("cache", help=text, description=text, allow_abbrev=False)
    subs = parser.add_subparsers(metavar="WHAT", required=True)

    def sub(function: Function) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        added = subs.add_parser(function.__name__, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=lambda args: _on_disk(function, args))
        about_store(added)
        added.add_argument("--json", action="store_true", help="the same as one line of JSON")
        return added

    sub(stat)
    sub(verify)
    added = sub(gc)
    added.add_argument(
        "--max-age",
        type=age,
        metavar="AGE",
        help="what nothing needs goes when it was not used for this long: 30d, 12h, 2w, 0",
    )
    added.add_argument(
        "--max-size",
        type=size,
        metavar="SIZE",
        help="what nothing needs goes, the longest unused first, until the store is this small: 20GB",
    )
    added.add_argument(
        "--dry-run", action="store_true", help="only say what would go, and why; writes nothing"
    )
    # further sub-commands of other modules are added to `subs` here
    sub(pins)
    sub(unpin).add_argument("name", nargs="+", metavar="NAME", help="as `cache pins` lists it")
    remote.add_parsers(subs)


def _on_disk(function: Function, args: argparse.Namespace) -> int:
    with disk_errors(store_of(args).root):
        return function(args)


_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_BYTES: Final = {
    **{"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}


def age(word: str) -> float:
    """Seconds of `30d`, `12h`, `90min`, `2w`, or `0`. Raises ArgumentTypeError."""
    return _measure(word, _SECONDS, "an age such as 30d, 12h or 90min")


def size(word: str) -> int:
    """Bytes of `20GB`, `1.5GiB`, or `0`. Raises ArgumentTypeError."""
    return int(_measure(word, _BYTES, "a size such as 20GB or 500MB"))


def _measure(word: str, units: dict[str, float], what: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", word, re.ASCII)
    number, unit = found.groups() if found else ("", "")
    if found and unit in units:
        return float(number) * units[unit]
    # a number alone could be days or seconds, megabytes or bytes: only nothing is nothing of all
    if found and not unit and float(number) == 0:
        return 0.0
    raise argparse.ArgumentTypeError(f"'{word}' is not {what}; units are {', '.join(units)}")


# ---------------------------------------------------------------- lines


class _Bar:
    """How far a long reading is, on a terminal."""

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


def _gone_lines(found: collect.Collected) -> Iterator[str]:
    """A line for each thing that goes, in columns."""
    from tvmflow.stores.collect import age_text

    width = max([len(each.name) for each in found.gone], default=0)
    for each in found.gone:
        yield (
            f"{each.kind:<9}  {each.name:<{width}}  {age_text(each.age_s):>9}  "
            f"{size_text(each.bytes):>9}  {each.reason}"
        )


def _beside_runs(runs: int) -> str:
    if not runs:
        return ""
    return f" or used since the oldest of {runs} runs began" if runs > 1 else " or used by the run"


def _stat_lines(found: usage.Usage) -> Iterator[str]:
    from tvmflow.stores.collect import age_text

    yield f"{found.root}: {size_text(found.bytes)}, and {size_text(found.ledger_bytes)} of measured trials"
    rest = [row for row in found.rest if row.number]
    width = max([24, *(len(row.name) for row in rest)])
    for recipe in found.recipes:
        own = f"{recipe.name:<{width}} {recipe.results:>6} results  {size_text(recipe.bytes):>9}"
        yield f"  {own}  last used {age_text(recipe.age_s)} ago{_or(recipe.missing, 'missing')}"
        # of very many recipes, one line each
        for stage in recipe.stages if len(found.recipes) <= _SHOWN_RECIPES else ():
            yield f"    {stage.name:<{width - 2}} {stage.results:>6} results  {size_text(stage.bytes):>9}"
    for row in rest:
        yield f"  {row.name:<{width}} {row.number:>6} {row.what:<8} {size_text(row.bytes):>9}"
    yield f"`tvmflow cache gc` would free {size_text(found.free_now)}; with --max-age 0, {size_text(found.free_all)}"


def _or(number: int, word: str) -> str:
    return f"; {number} {word}" if number else ""
