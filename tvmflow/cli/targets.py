"""`tvmflow targets`: the targets that recipes can name, and what this machine can do for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, flag, option
from tvmflow.cli.output import print_result
from tvmflow.core.errors import UsageError
from tvmflow.core.text import columns, nearest

if TYPE_CHECKING:
    from tvmflow.store.local import LocalStore
    from tvmflow.targets.capabilities import Capabilities


class TargetsOptions(Options):
    """List targets, and what this machine can do for each.

    Examples:
        tvmflow targets
        # the values of `mcpu` for one architecture
        tvmflow targets --cpus aarch64
    """

    cpus: str | None = option("ARCH", "list the CPUs that LLVM knows for an architecture instead")
    json: bool = flag(JSON_HELP)
    store: StoreOption = store_option("facts about targets are")


# Architecture, as people and kernels call it -> a triple that LLVM has CPUs for.
_TRIPLES: Final = {
    "aarch64": "aarch64-linux-gnu",
    "armv7": "armv7-linux-gnueabihf",
    "i386": "i686-linux-gnu",
    "riscv64": "riscv64-linux-gnu",
    "x86_64": "x86_64-linux-gnu",
}
_HEADINGS: Final = (
    *("target", "processor", "built", "linked", "runs here", "measured here"),
    "description",
)


class _Row(NamedTuple):
    """One preset, and what this machine can do for it."""

    name: str
    triple: str
    cpu: str
    description: str
    capabilities: Capabilities
    emulated_by: str
    other_names: tuple[str, ...] = ()


def targets(options: TargetsOptions) -> int:
    from tvmflow.targets.llvm_query import load_cpus

    store = options.store.open_to_read()
    if options.cpus is not None:
        names = load_cpus(store, _find_triple(options.cpus))
        return print_result({"arch": options.cpus, "cpus": names}, names, options)
    rows = list(_list_rows(store))
    lines = (*_format_table(rows), "", *_format_reasons(rows))
    return print_result({"targets": rows}, lines, options)


def _find_triple(arch: str) -> str:
    from tvmflow.targets.platforms import parse_triple

    triple = _TRIPLES.get(parse_triple(arch).arch)
    if triple is None:
        names = nearest(arch, _TRIPLES)
        hint = f"did you mean '{names[0]}'? " if names else ""
        raise UsageError(
            f"--cpus {arch}: this is not a known architecture",
            fix=f"{hint}known architectures: {', '.join(_TRIPLES)}",
        )
    return triple


def _list_rows(store: LocalStore) -> Iterator[_Row]:
    from tvmflow.targets.backends import backend_for
    from tvmflow.targets.capabilities import emulator_name, find_capabilities
    from tvmflow.targets.host import read_host
    from tvmflow.targets.llvm_query import load_target_facts
    from tvmflow.targets.presets import OTHER_NAMES, PRESETS
    from tvmflow.targets.resolve import resolve
    from tvmflow.targets.tvm_target import cpu_target

    host = read_host()
    facts = load_target_facts(store, [preset.tvm for preset in PRESETS.values()], host)
    for (name, row), fact in zip(PRESETS.items(), facts, strict=True):
        has_webgpu = backend_for(row.tvm or {}).IS_BESIDE_HOST
        mapping = row.tvm and dict(cpu_target(row.tvm) if has_webgpu else row.tvm)
        target = resolve(name, mapping, None, host, fact)
        cpu = cpu_target(target.tvm)
        triple, model = str(cpu.get("mtriple", "")), str(cpu.get("mcpu", ""))
        if "arch" in target.tvm:
            model = f"{target.tvm['arch']} and {model}"
        if has_webgpu:
            model = f"WebGPU and {model}"
        yield _Row(
            name=name,
            triple=triple,
            cpu=model,
            description=row.description,
            capabilities=find_capabilities(target),
            emulated_by=emulator_name(target),
            other_names=tuple(other for other, preset in OTHER_NAMES.items() if preset == name),
        )


def _format_table(rows: Sequence[_Row]) -> list[str]:
    from tvmflow.targets.capabilities import Capabilities
    from tvmflow.targets.emulation import find_emulators

    runs_here = Capabilities._fields.index("runs_here")
    cells: list[Sequence[str]] = [_HEADINGS]
    for row in rows:
        marks = ["no" if reason else "yes" for reason in row.capabilities]
        if row.emulated_by:
            installed = find_emulators()[row.emulated_by]
            marks[runs_here] = row.emulated_by if installed else f"no ({row.emulated_by})"
        cells.append((row.name, f"{row.triple} {row.cpu}", *marks, row.description))
    return columns(cells)


def _format_reasons(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield every reason for a `no` in the table, with the targets that it concerns."""
    from tvmflow.targets.capabilities import has_schedule_rules
    from tvmflow.targets.emulation import INSTALL, find_emulators

    names: dict[str, list[str]] = {}
    for row in rows:
        for reason in _list_reasons(row.capabilities):
            names.setdefault(reason, []).append(row.name)
    named = [row for row in rows if row.other_names]
    yield from ["other names that recipes may use"] if named else []
    yield from (f"    {row.name}: {', '.join(row.other_names)}" for row in named)
    for reason, concerned in names.items():
        yield reason
        yield f"    {', '.join(concerned)}"
    unscheduled = [row.name for row in rows if not has_schedule_rules(row.triple)]
    if unscheduled:
        yield "kernels have no schedule and run as plain loops: no schedule rule is for microcontrollers"
        yield f"    {', '.join(unscheduled)}"
    programs = find_emulators()
    missing = {row.emulated_by for row in rows if row.emulated_by and not programs[row.emulated_by]}
    if missing:
        yield f"not installed, for `verify.run_on: qemu`: {', '.join(sorted(missing))}"
        yield f"    {INSTALL}"


def _list_reasons(capabilities: Capabilities) -> list[str]:
    """Return what cannot be done, each reason once; what cannot be built has no other reasons."""
    if capabilities.built:
        return [f"cannot be built: {capabilities.built}"]
    actions: dict[str, list[str]] = {}
    names = ("linked", "run", "measured")
    for name, reason in zip(names, capabilities[1:], strict=True):
        if reason:
            actions.setdefault(reason, []).append(name)
    return [f"cannot be {' or '.join(names)} here: {reason}" for reason, names in actions.items()]


COMMANDS: Final = {"targets": targets}
