"""`tvmflow targets`, `device`, `worker`, `scheduler`: machines to build for, measure and run on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import (
    JSON_HELP,
    StoreOption,
    listening_host_option,
    scheduler_option,
    store_option,
)
from tvmflow.cli.options import Options, flag, option, port, positive_int
from tvmflow.cli.output import print_json, print_lines, print_notes, print_result
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.formatting import count_text
from tvmflow.core.text import columns, did_you_mean

if TYPE_CHECKING:
    from tvmflow.store.local import LocalStore
    from tvmflow.targets.resolve import Capabilities


class TargetsOptions(Options):
    """List targets, and this machine's support for each.

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
        raise UsageError(
            f"--cpus {arch}: this is not a known architecture{did_you_mean(arch, _TRIPLES)}",
            fix=f"known architectures: {', '.join(_TRIPLES)}",
        )
    return triple


def _list_rows(store: LocalStore) -> Iterator[_Row]:
    from tvmflow.targets.backends import backend_for
    from tvmflow.targets.host import read_host
    from tvmflow.targets.llvm_query import load_target_facts
    from tvmflow.targets.presets import OTHER_NAMES, PRESETS
    from tvmflow.targets.resolve import emulator_name, find_capabilities, resolve
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
    from tvmflow.targets.emulation import find_emulators
    from tvmflow.targets.resolve import Capabilities

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
    from tvmflow.targets.emulation import INSTALL, find_emulators
    from tvmflow.targets.resolve import has_schedule_rules

    named = [row for row in rows if row.other_names]
    yield from ["other names that recipes may use"] if named else []
    yield from (f"    {row.name}: {', '.join(row.other_names)}" for row in named)
    names: dict[str, list[str]] = {}
    for row in rows:
        for reason in _list_reasons(row.capabilities):
            names.setdefault(reason, []).append(row.name)
    if unscheduled := [row.name for row in rows if not has_schedule_rules(row.triple)]:
        loops = "kernels have no schedule and run as plain loops"
        names[f"{loops}: no schedule rule is for microcontrollers"] = unscheduled
    programs = find_emulators()
    missing = {row.emulated_by for row in rows if row.emulated_by and not programs[row.emulated_by]}
    if missing:
        emulators = ", ".join(sorted(missing))
        names[f"not installed, for `verify.run_on: qemu`: {emulators}"] = [INSTALL]
    for reason, concerned in names.items():
        yield reason
        yield f"    {', '.join(concerned)}"


def _list_reasons(capabilities: Capabilities) -> list[str]:
    """Return the reasons for unsupported steps, each once; without builds there are no others."""
    if capabilities.built:
        return [f"cannot be built: {capabilities.built}"]
    actions: dict[str, list[str]] = {}
    names = ("linked", "run", "measured")
    for name, reason in zip(names, capabilities[1:], strict=True):
        if reason:
            actions.setdefault(reason, []).append(name)
    return [f"cannot be {' or '.join(names)} here: {reason}" for reason, names in actions.items()]


# ---------------------------------------------------------------- devices, workers and schedulers


def _tracker_option() -> str | None:
    return option("HOST:PORT", "the address of TVM's RPC tracker ($TVMFLOW_TRACKER)")


class DeviceListOptions(Options):
    """List the devices that can be measured on: this machine, and those of a tracker.

    Examples:
        tvmflow device ls
        tvmflow device ls --tracker 192.168.1.5:9190
    """

    tracker: str | None = _tracker_option()
    json: bool = flag(JSON_HELP)


def _key(text: str) -> str:
    if not text or ":" in text or any(char.isspace() for char in text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a key: it may hold neither ':' nor spaces"
        )
    return text


def _port(text: str) -> int:
    number = port(text)
    if not number:
        raise argparse.ArgumentTypeError("0 is not a port that clients can connect to")
    return number


class DeviceServeOptions(Options):
    """Offer this machine as a device.

    Anyone who can reach its port can run code on it.

    Examples:
        # on the board: recipes name it with `remote: {key: pi4}`
        tvmflow device serve --tracker 192.168.1.5:9190 --key pi4
    """

    tracker: str | None = _tracker_option()
    key: str = option(
        "KEY", "the key of devices of this kind", default="", type=_key, required=True
    )
    host: str = listening_host_option()
    port: int | None = option(
        "N", "the port to listen on (the first free one from 9090)", type=_port
    )
    verbosity: int


def list_devices(options: DeviceListOptions) -> int:
    from tvmflow.targets.host import read_host
    from tvmflow.targets.tracker import TRACKER_VARIABLE, Tracker

    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    devices = list(Tracker(_checked(address)).list_devices().values()) if address else []
    host = read_host()
    if options.json:
        this_machine = {"arch": host.arch, "model": host.model, "cores": host.cores}
        print_json({"host": this_machine, "tracker": address or None, "devices": devices})
        return EXIT_OK
    print_lines(f"this machine: {host.model}, {host.arch}, {count_text(host.cores, 'core')}")
    if not address:
        print_lines(f"no tracker is named (--tracker HOST:PORT, or ${TRACKER_VARIABLE})")
    elif not devices:
        print_lines(f"the tracker at {address} has no devices")
    else:
        heading = ("key", "total", "free", "pending", "at")
        rows = ((*map(str, pool[:4]), ", ".join(pool.addresses)) for pool in devices)
        table = columns([heading, *rows])
        print_lines(f"the tracker at {address}:", *(f"  {line}" for line in table))
    return EXIT_OK


def serve(options: DeviceServeOptions) -> int:
    from tvmflow.targets.tracker import PORTS, TRACKER_VARIABLE, serve_device

    address = options.tracker or os.environ.get(TRACKER_VARIABLE, "")
    ports = PORTS if options.port is None else range(options.port, options.port + 1)
    serve_device(
        _checked(address), options.key, options.host, ports, lambda line: print_notes(options, line)
    )


def _checked(address: str) -> str:
    from tvmflow.targets.tracker import TRACKER_VARIABLE, split_address

    try:
        split_address(address)
    except ValueError as error:
        is_default = address == os.environ.get(TRACKER_VARIABLE)
        named_by = f"${TRACKER_VARIABLE}" if is_default else "--tracker"
        problem = f"{named_by}: {error}" if address else "no tracker is named"
        raise UsageError(
            problem, fix=f"give --tracker HOST:PORT, or set ${TRACKER_VARIABLE}"
        ) from error
    return address


DEFAULT_PORT: Final = 8786
_CLUSTER: Final = "dask"


class WorkerOptions(Options):
    """Run stages that a scheduler assigns.

    Anyone who can reach the scheduler can run code on this machine.

    Examples:
        tvmflow worker --scheduler tcp://192.168.1.5:8786 --slots 2
    """

    scheduler: str | None = scheduler_option()
    remote_url: str | None = option(
        "URL",
        "the address of the remote cache from this machine (that of the run, or $TVMFLOW_REMOTE)",
        name="--remote",
    )
    name: str | None = option("NAME", "the name of this worker (HOST-PID)")
    slots: int = option(
        "N", "stages at a time (1; measurements stay exclusive)", default=1, type=positive_int
    )
    host: str | None = option(
        "ADDRESS",
        "the address to listen on, at which other machines reach this one (that of the connection to the scheduler)",
    )
    store: StoreOption = store_option("files are")
    verbosity: int


class SchedulerOptions(Options):
    """Start a scheduler, which connects runs with workers.

    Anyone who can reach its port can run code on the workers.

    Examples:
        tvmflow scheduler --host 192.168.1.5
        # then, elsewhere; $TVMFLOW_REMOTE names the cache that all of them reach
        tvmflow run net.yaml --executor dask --scheduler tcp://192.168.1.5:8786
    """

    host: str = listening_host_option()
    port: int = option(
        "N",
        f"the port to listen on ({DEFAULT_PORT}; 0: any free port)",
        default=DEFAULT_PORT,
        type=port,
    )
    tls: bool = flag("use the certificates of dask's configuration")
    verbosity: int


def worker(options: WorkerOptions) -> int:
    from tvmflow.engine.remote_access import URL_VARIABLE
    from tvmflow.executors import load_plugin

    plugin, store = load_plugin(_CLUSTER), options.store.open()
    plugin.serve_worker(
        plugin.find_scheduler(options.scheduler),
        host=options.host,
        name=options.name,
        slots=options.slots,
        store=store.root,
        remote_url=options.remote_url or os.environ.get(URL_VARIABLE, ""),
        notify=lambda line: print_notes(options, line),
    )
    return EXIT_OK


def scheduler(options: SchedulerOptions) -> int:
    from tvmflow.executors import load_plugin

    load_plugin(_CLUSTER).serve_scheduler(
        options.host, options.port, tls=options.tls, notify=lambda line: print_notes(options, line)
    )
    return EXIT_OK


COMMANDS: Final = {
    "targets": targets,
    "device": {"ls": list_devices, "serve": serve},
    "worker": worker,
    "scheduler": scheduler,
}
