"""`tvmflow doctor`: check an installation piece by piece, in processes that may crash."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.cli.arguments import DistOption, StoreOptions, dist_option
from tvmflow.cli.output import print_json, print_lines
from tvmflow.core import packages
from tvmflow.core.disk_errors import explain, find_file_system
from tvmflow.core.errors import (
    EXIT_ENVIRONMENT,
    EXIT_OK,
    EnvironmentProblem,
    StoreError,
    TvmflowError,
)
from tvmflow.core.files import flush_file, protect, sync, temporary_name
from tvmflow.core.formatting import count_text, excerpt
from tvmflow.core.packages import install_command
from tvmflow.core.project import find_project, shortest_path

if TYPE_CHECKING:
    from tvmflow.frontends.peers import Peer
    from tvmflow.store import integrity
    from tvmflow.store.local import LocalStore


class DoctorOptions(StoreOptions):
    """Check this installation piece by piece.

    Each piece is tried in a process that may crash. A piece is good (ok), bad (BAD), or bad but needed
    only by some recipes (--). The exit code is 4 when a required piece is bad.

    Examples:
        tvmflow doctor
        # and the disks that a run would write to
        tvmflow doctor --store /fast/cache --dist /shared/dist
    """

    dist: DistOption = dist_option()


_CORE_PACKAGES: Final = ("apache-tvm", "apache-tvm-ffi", "safetensors", "ziglang")
_PYTHON_VERSIONS: Final = ((3, 10), (3, 14))
"""The oldest and the newest version that pyproject.toml allows."""
_TIMEOUT_S: Final = 120.0


class _Probe(NamedTuple):
    """A call `function(argument)` of a function in this module, made in a process that may crash."""

    subject: str
    function: str
    fix: str
    optional: bool = False
    argument: str = ""


_PROBES: Final = (
    _Probe(
        "TVM saves and loads IR",
        "probe_ir",
        f"{install_command('apache-tvm', 'apache-tvm-ffi')}: newer ones of tvm-ffi crash in TVM 0.27",
    ),
    _Probe(
        "TVM compiles, links and runs",
        "probe_library",
        install_command("apache-tvm", "ziglang", again=True),
    ),
    _Probe("cost model xgb", "probe_xgboost", install_command("xgboost-cpu")),
)


def doctor(options: DoctorOptions) -> int:
    findings = list[Finding]()
    examined = examine(options.store.locate(), Path(options.dist.locate()))
    # All checks may take a minute, so each finding is shown immediately.
    for finding in chain(_examine_project(options), examined):
        findings.append(finding)
        if options.json or not (options.verbosity >= 0 or finding.is_problem):
            continue
        mark = "ok  " if finding.good else "--  " if finding.optional else "BAD "
        print_lines(*f"{mark} {finding.subject}: {finding.detail}".split("\n"))
        if not finding.good and finding.fix:
            print_lines(f"     fix: {finding.fix}")
    is_ready = not any(finding.is_problem for finding in findings)
    if options.json:
        print_json({"ready": is_ready, "findings": [finding._asdict() for finding in findings]})
    return EXIT_OK if is_ready else EXIT_ENVIRONMENT


def _examine_project(options: DoctorOptions) -> list[Finding]:
    project = find_project()
    reason = "the current folder: neither it nor one above has tvmflow.toml, [tool.tvmflow] or .git"
    if project.marker:
        reason = f"it has {Path(project.marker).name}"
    places = {
        "project root": (project.root, reason),
        "store": (shortest_path(options.store.locate().root), options.store.origin()),
        "dist": (options.dist.locate(), options.dist.origin()),
        "releases": (shortest_path(project.releases), project.origin("releases")),
    }
    return [Finding(name, True, f"{path} ({why})") for name, (path, why) in places.items()]


def examine(store: LocalStore, dist: Path) -> Iterator[Finding]:
    """Yield a finding for each dependency of a run, as soon as it is known."""
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.core.logs import explain_wait
    from tvmflow.frontends.peers import PEERS
    from tvmflow.targets.backends.cuda.gpu import detect_gpu
    from tvmflow.targets.host import read_host

    oldest, newest = _PYTHON_VERSIONS
    yield Finding(
        "Python",
        oldest <= sys.version_info[:2] <= newest,
        sys.version.split()[0],
        "use Python {}.{} to {}.{}".format(*oldest, *newest),
    )
    yield from map(_examine_package, _list_required_packages())
    host = read_host()
    machine = f"{host.arch}, {host.model}, {count_text(host.cores, 'core')}"
    yield Finding("this machine", True, machine)
    yield _examine_emulators()
    yield from examine_disks(store, dist)
    gpu = detect_gpu()
    detail = f"{gpu.gpu.name} ({gpu.gpu.arch})" if gpu.gpu else gpu.reason
    # A missing GPU is not a problem, because only CUDA targets need it.
    yield Finding("NVIDIA GPU (only to tune and verify CUDA targets)", True, detail)
    yield from map(_examine_peer, PEERS.values())
    with ForkServer.start() as fork_server:
        for probe in (*_PROBES, *_list_reference_probes()):
            function = f"{__name__}:{probe.function}"
            with explain_wait(f"trying {probe.subject}: up to a minute the first time"):
                outcome = fork_server.call(function, probe.argument, timeout_s=_TIMEOUT_S)
            good = outcome.kind == "ok"
            detail = str(outcome.value) if good else outcome.message
            yield Finding(probe.subject, good, detail, probe.fix, optional=probe.optional)


def _list_required_packages() -> list[str]:
    from tvmflow.frontends import FRONTENDS

    tools = {*_CORE_PACKAGES}
    for frontend in FRONTENDS.values():
        tools |= {*frontend.TOOLS, *frontend.REFERENCE.tools}
    return sorted(tool for tool in tools if not packages.is_extra(tool))


def _list_reference_probes() -> list[_Probe]:
    from tvmflow.frontends import FRONTENDS

    probes = []
    for kind, frontend in FRONTENDS.items():
        reference = frontend.REFERENCE
        fix = f"{reference.install} ({reference.note})" if reference.note else reference.install
        needs = "import and verify" if any(map(packages.is_extra, frontend.TOOLS)) else "verify"
        subject = f"{reference.name}, to {needs} {frontend.NAME} models"
        probes.append(_Probe(subject, "probe_reference", fix, reference.is_optional, argument=kind))
    return probes


def _examine_peer(peer: Peer) -> Finding:
    """Return whether a runtime is installed, without importing it."""
    from tvmflow.frontends import FRONTENDS

    installed, missing = [], []
    for name in peer.traits.tools:
        try:
            package = packages.find_package(name)
            installed.append(f"{package.distribution} {package.version}")
        except EnvironmentProblem as problem:
            missing.append(problem.message)
    device = " on NVIDIA GPUs" if peer.needs_gpu else ""
    return Finding(
        f"{peer.traits.name}, for verify.compare of {FRONTENDS[peer.kind].NAME} models{device}",
        not missing,
        ", ".join(missing or installed),
        peer.traits.install,
        optional=True,
    )


def _examine_package(name: str) -> Finding:
    from packaging.requirements import Requirement

    from tvmflow.core.logs import IDENTITY_WAIT, explain_wait

    subject = f"package {name}"
    try:
        with explain_wait(IDENTITY_WAIT.format(name)):
            identity, package = packages.identity(name), packages.find_package(name)
    except EnvironmentProblem as problem:
        return Finding(subject, False, problem.message, problem.fix)
    detail, install = f"{identity} in {package.folder}", install_command(name)
    if package.rivals:
        rivals = ", ".join(package.rivals)
        fix = f"pip uninstall {package.distribution} {' '.join(package.rivals)}, then {install}"
        detail += f", with files of {rivals}, which installs the same module"
        return Finding(subject, False, detail, fix)
    requirement = Requirement(packages.REQUIREMENTS.get(name, name))
    if not requirement.specifier.contains(package.version, prereleases=True):
        return Finding(subject, False, f"{detail}, and tvmflow needs {requirement}", install)
    return Finding(subject, True, detail)


def _examine_emulators() -> Finding:
    from tvmflow.targets.emulation import INSTALL, QEMU_VARIABLE, find_emulators

    programs = find_emulators()
    installed = ", ".join(str(path) for path in programs.values() if path)
    missing = ", ".join(name for name, path in programs.items() if not path)
    folder = os.environ.get(QEMU_VARIABLE)
    place = f" in ${QEMU_VARIABLE} ({excerpt(folder)})" if folder else ""
    detail = "; ".join(filter(None, [installed, missing and f"not installed{place}: {missing}"]))
    subject = "qemu, for verify.run_on: qemu"
    return Finding(subject, not missing, detail, INSTALL if missing else "", optional=True)


# ---------------------------------------------------------------- probes, each run in a worker


def probe_ir(_: object, emit: Callable[..., None]) -> str:
    """Save and load a module; a wrong version of tvm-ffi crashes here."""
    import tvm

    module = _small_module()
    back = tvm.ir.load_json(tvm.ir.save_json(module))
    tvm.ir.assert_structural_equal(back, module)
    return f"TVM {tvm.__version__}"


def probe_library(_: object, emit: Callable[..., None]) -> str:
    """Compile a module, link it, load it and run it."""
    import tempfile

    import numpy as np
    import tvm

    from tvmflow.targets.host import read_host
    from tvmflow.targets.linking import link_shared

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "probe.so")

        def link(output: str, files: list[str], **_: object) -> None:
            link_shared([Path(file) for file in files], Path(output), read_host().triple)

        tvm.compile(_small_module(), tvm.target.Target({"kind": "llvm"})).export_library(
            str(library), fcompile=link
        )
        vm = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        ones = tvm.runtime.tensor(np.ones((4,), "float32"))
        if not (vm["main"](ones).numpy() == 2).all():
            raise AssertionError("1 + 1 is not 2 on this machine")
        return f"{library.stat().st_size} bytes"


def _small_module() -> Any:
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            total = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(total)
    return builder.get()


def probe_xgboost(_: object, emit: Callable[..., None]) -> str:
    """Import the default cost model; TVM itself imports it only after tuning began."""
    import xgboost

    return f"xgboost {xgboost.__version__}"


def probe_reference(kind: str, emit: Callable[..., None]) -> str:
    """Return name and version of the reference of a frontend."""
    from tvmflow.frontends import FRONTENDS

    frontend = FRONTENDS[kind]
    for tool in frontend.REFERENCE.tools:
        # A missing package gives a shorter message than an import that fails.
        packages.find_package(tool)
    return f"{frontend.REFERENCE.name} {frontend.reference_version()}"


COMMANDS: Final = {"doctor": doctor}


# ---------------------------------------------------------------- disks

_ENOUGH_BYTES: Final = 10**9
_SHOWN: Final = 3
# Runs hold the locks of the store only for an instant.
_PATIENCE_S: Final = 1.0
_ATTEMPT_S: Final = 0.05


class Finding(NamedTuple):
    """The state of one piece of an installation, and a remedy if it is not good."""

    subject: str
    good: bool
    detail: str
    fix: str = ""
    optional: bool = False

    @property
    def is_problem(self) -> bool:
        """True if it keeps tvmflow from working."""
        return not (self.good or self.optional)


def examine_disks(store: LocalStore, dist: Path) -> Iterator[Finding]:
    """Yield a finding for each folder that a run writes to, and for the content of the store."""
    yield _examine_space(store)
    yield _examine_folder("store can be written", Path(store.root))
    yield _examine_folder("dist can be written", dist)
    yield _examine_temporary_folder()
    yield _examine_runtime_folder()
    yield from _examine_device_locks()
    yield from _examine_store(store)


def _examine_space(store: LocalStore) -> Finding:

    file_system = find_file_system(store.root)
    enough = file_system.free > _ENOUGH_BYTES and not file_system.lacks_inodes
    root = shortest_path(store.root)
    free = (
        f"{file_system.free / 1e9:.1f} GB at {root}"
        if file_system.size
        else f"{root} ({file_system})"
    )
    detail = free if enough else f"{free} ({file_system})"
    return Finding("space for the store", enough, detail, "free some space, or remove files there")


def _examine_folder(subject: str, folder: Path) -> Finding:
    """Write a file into a folder, or its nearest existing parent, and lock it."""
    from tvmflow.core.file_locks import held

    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    probe = place / f".tvmflow-{temporary_name()}"
    try:
        with held(probe, wait=False) as descriptor:
            os.write(descriptor, b"a probe")
            is_flushed = flush_file(descriptor) and sync(str(place))
        is_protected = protect(str(probe))
    except OSError as error:
        problem = explain(error, place) or StoreError(f"{place}: {error.strerror}")
        return Finding(subject, False, problem.message, problem.fix)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    file_system = find_file_system(place)
    network = f"a {file_system.kind} file system on the network: files can be locked there"
    remarks = {
        shortest_path(str(folder)): True,
        network: file_system.is_network,
        "no file can be flushed to the disk there (fsync): after a power failure, damaged results are made again": not is_flushed,
        "no file can be made read-only there (chmod): take care not to change results": not is_protected,
    }
    return Finding(subject, True, ", ".join(text for text, is_true in remarks.items() if is_true))


def _examine_temporary_folder() -> Finding:
    import tempfile

    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        fix = "set $TMPDIR to a folder that can be written"
        return Finding("temporary files", False, str(error), fix)
    finding = _examine_folder("temporary files", folder)
    if finding.good and find_file_system(folder).is_noexec:
        detail = f"{folder} is mounted noexec: no library can be loaded from there"
        return finding._replace(good=False, detail=detail, fix="set $TMPDIR to another folder")
    return finding


def _examine_runtime_folder() -> Finding:
    """Check the folder of the device locks, which only its user may write."""
    from tvmflow.targets import devices

    subject, folder = "folder of the device locks", Path(devices.device_locks_folder())
    name, fix = devices.RUNTIME_VARIABLE, devices.RUNTIME_FIX
    base = os.environ.get(name, "")
    if base and not Path(base).is_absolute():
        detail = f"${name} is {base!r}, which is not an absolute path: {folder} is used"
        return Finding(subject, False, detail, fix, optional=True)
    for place in (folder, folder.parent):
        exists = os.path.lexists(place)
        if exists and (detail := devices.find_privacy_problem(place, place.lstat())):
            return Finding(subject, False, detail, fix)
    finding = _examine_folder(subject, folder)
    return finding if finding.good else finding._replace(fix=fix)


def _examine_device_locks() -> Iterator[Finding]:
    from tvmflow.targets.devices import ALL_DEVICES, device_locks_folder

    for device in ALL_DEVICES:
        path = Path(device_locks_folder(), f"{device['kind']}.lock")
        if path.is_file() and (holder := _find_holder(path, patience_s=0.0)):
            detail = f"held by {holder}, which measures: other stages wait for it"
            fix = "wait for it, or end that process"
            yield Finding(f"lock of the {device['kind']}", False, detail, fix, optional=True)


def _examine_store(store: LocalStore) -> Iterator[Finding]:
    """Check the content of the store, without reading results and downloads."""
    from tvmflow.cli.cache import store_checks
    from tvmflow.store import integrity
    from tvmflow.store.inventory import take_inventory

    root = Path(store.root)
    try:
        condition = store.check()
        if condition == "absent":
            yield Finding("store", True, f"{shortest_path(str(root))} does not exist yet")
            return
        checks = {**store_checks(), "downloads": lambda path: True}
        damaged = list(integrity.find_damaged_files(store, checks))
        inventory = take_inventory(store, skip_damaged_pins=True)
    except (TvmflowError, OSError) as error:
        problem = error if isinstance(error, TvmflowError) else explain(error, root)
        text, fix = (problem.message, problem.fix) if problem else (str(error), "")
        yield Finding("store", False, text, fix)
        return
    for name in ("run.lock", "use.lock", "locks/gc"):
        path = root / name
        if path.is_file() and (holder := _find_holder(path, patience_s=_PATIENCE_S)):
            detail = f"{path} is held by {holder}: a run would wait for it"
            yield Finding("lock of the store", False, detail, "wait for it, or end that process")
    damaged += [
        integrity.Finding("result", result.title, reason="it is damaged or lacks a file")
        for result in inventory.results.values()
        if not inventory.is_complete(result)
    ]
    yield _describe_damage(root, damaged)


def _describe_damage(root: Path, damaged: list[integrity.Finding]) -> Finding:
    from tvmflow.store.disk import active_runs

    if damaged:
        shown = ", ".join(f"{file.name} ({file.reason})" for file in damaged[:_SHOWN])
        more = f", and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
        fix = "`tvmflow cache repair` puts it right, and so does the next run where it can"
        return Finding("store", False, f"damaged: {shown}{more}", fix, optional=True)
    kept = root / "damaged"
    number = len(list(kept.iterdir())) if kept.is_dir() else 0
    detail = f"{count_text(number, 'damaged file')} in {kept}" if number else "no damaged files"
    stale = len(list((root / "runs").glob("*"))) - len(active_runs(str(root)))
    if stale > 0:
        detail += f"; {count_text(stale, 'lease')} of killed runs, which the next run removes"
    return Finding("store", True, detail)


def _find_holder(path: Path, *, patience_s: float) -> str:
    """Return the process that holds a lock exclusively for longer than `patience_s`, or an empty string."""
    from tvmflow.core.file_locks import Locked, describe_holders, lock

    deadline = time.monotonic() + patience_s
    # Opened read-only, so that the check changes nothing.
    with path.open("rb") as stream:
        while True:
            try:
                lock(stream.fileno(), shared=True, wait=False)
            except Locked:
                if time.monotonic() >= deadline:
                    return describe_holders(os.fstat(stream.fileno())) or "this command"
                time.sleep(_ATTEMPT_S)
            else:
                return ""
