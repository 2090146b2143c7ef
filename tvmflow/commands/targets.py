"""`tvmflow targets`: which machines a recipe can name, and what can be done for each of them here."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, Final, NamedTuple

from tvmflow.commands.words import about_store, open_store, say, say_json
from tvmflow.errors import EXIT_OK, UsageError
from tvmflow.stores.local import LocalStore
from tvmflow.targets._presets import PRESETS
from tvmflow.targets.abilities import Abilities, abilities_of, emulated_by
from tvmflow.targets.emulation import is_installed
from tvmflow.targets.facts import cpus_of, facts_of
from tvmflow.targets.host import read_host
from tvmflow.targets.platforms import cpu_of, platform_of
from tvmflow.targets.resolve import resolve

# Architecture, as people and kernels call it -> a triple that LLVM has CPUs for.
_TRIPLES: Final = {
    "aarch64": "aarch64-linux-gnu",
    "armv7": "armv7-linux-gnueabihf",
    "i386": "i686-linux-gnu",
    "riscv64": "riscv64-linux-gnu",
    "x86_64": "x86_64-linux-gnu",
}
_RUNS_HERE: Final = Abilities._fields.index("runs_here")
_COLUMNS: Final = ("target", "machine", "built", "linked", "runs here", "measured here", "for")


class _Row(NamedTuple):
    """One preset."""

    name: str
    triple: str
    cpu: str
    description: str
    abilities: Abilities
    emulated_by: str


def targets(args: argparse.Namespace) -> int:
    """List the targets that recipes can name, and what can be done for each on this machine."""
    store = open_store(args)
    if args.cpus is not None:
        names = cpus_of(store, _triple(args.cpus))
        if args.json:
            say_json({"arch": args.cpus, "cpus": names})
        else:
            say(*names)
        return EXIT_OK
    rows = _rows(store)
    if args.json:
        listed = [{**row._asdict(), "abilities": row.abilities._asdict()} for row in rows]
        say_json({"targets": listed})
        return EXIT_OK
    say(*_table(rows))
    return EXIT_OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `targets` to the command line."""
    text = (targets.__doc__ or "").strip()
    parser = commands.add_parser("targets", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=targets)
    parser.add_argument(
        "--cpus", metavar="ARCH", help="list the CPUs that LLVM knows for an architecture instead"
    )
    parser.add_argument("--json", action="store_true", help="the same as one line of JSON")
    about_store(parser, "answers")


def _triple(arch: str) -> str:
    found = _TRIPLES.get(platform_of(arch).arch)
    if found is None:
        near = difflib.get_close_matches(arch, _TRIPLES, 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UsageError(
            f"--cpus {arch}: there is no such architecture",
            fix=f"{hint}there are: {', '.join(_TRIPLES)}",
        )
    return found


def _rows(store: LocalStore) -> list[_Row]:
    host = read_host()
    facts = facts_of(store, [preset.tvm for preset in PRESETS.values()], host)
    rows = []
    for (name, preset), fact in zip(PRESETS.items(), facts, strict=True):
        mapping: Any = None if preset.tvm is None else dict(preset.tvm)
        target = resolve(name, mapping, None, host, fact)
        cpu = cpu_of(target.tvm)
        triple, mcpu = str(cpu.get("mtriple", "")), str(cpu.get("mcpu", ""))
        if "arch" in target.tvm:
            mcpu = f"{target.tvm['arch']} and {mcpu}"
        can = abilities_of(target)
        rows.append(_Row(name, triple, mcpu, preset.description, can, emulated_by(target)))
    return rows


def _table(rows: list[_Row]) -> list[str]:
    """Columns of yes and no, and below them every reason for a no, with those whom it concerns."""
    reasons: dict[str, list[str]] = {}
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for row in rows:
        for reason in _reasons(row.abilities):
            reasons.setdefault(reason, []).append(row.name)
        marks = ["no" if why else "yes" for why in row.abilities]
        if row.emulated_by:
            marks[_RUNS_HERE] = row.emulated_by
        lines.append((row.name, f"{row.triple} {row.cpu}", *marks, row.description))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    told = []
    for reason, names in reasons.items():
        told += [reason, f"    {', '.join(names)}"]
    emulators = sorted({row.emulated_by for row in rows if row.emulated_by})
    missing = [name for name in emulators if not is_installed(name)]
    if missing:
        told.append(f"not installed: {', '.join(missing)} (for `verify.run_on: qemu`)")
    return [*shown, "", *told]


def _reasons(abilities: Abilities) -> list[str]:
    """What cannot be done, each reason once; of what cannot be built nothing else is told."""
    if abilities.built:
        return [f"not built: {abilities.built}"]
    told: dict[str, list[str]] = {}
    for what, why in zip(("linked", "run here", "measured here"), abilities[1:], strict=True):
        if why:
            told.setdefault(why, []).append(what)
    return [f"not {' or '.join(whats)}: {why}" for why, whats in told.items()]
