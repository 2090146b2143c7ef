"""`tvmflow doctor`: an installation, checked piece by piece, in processes that may crash."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.requirements import Requirement

from tvmflow.cli.definitions.doctor import DoctorOptions
from tvmflow.cli.doctor_disks import Finding, examine_disks
from tvmflow.cli.output import print_lines
from tvmflow.core import packages
from tvmflow.core.errors import EXIT_ENVIRONMENT, EXIT_OK, EnvironmentProblem
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.formatting import count_text, excerpt
from tvmflow.core.project import find_project, shortest_path
from tvmflow.core.requirements import REQUIREMENTS, install_command
from tvmflow.core.slow_steps import IDENTITY_WAIT, explain_wait
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends._peers import PEERS, Peer
from tvmflow.store.local import LocalStore
from tvmflow.targets.backends.cuda.gpu import detect_gpu
from tvmflow.targets.emulation import INSTALL, QEMU_VARIABLE, find_emulators
from tvmflow.targets.host import read_host

_CORE_PACKAGES: Final = ("apache-tvm", "apache-tvm-ffi", "safetensors", "ziglang")
_PYTHON_VERSIONS: Final = ((3, 10), (3, 14))
"""The oldest and the newest version that pyproject.toml allows."""
_TIMEOUT_S: Final = 120.0


class _Probe(NamedTuple):
    """An attempt that is made in a worker: a call of one of the probes below with `argument`."""

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
    """Check this installation piece by piece."""
    findings = [
        *_examine_project(options),
        *examine(options.store.locate(), Path(options.dist.locate())),
    ]
    shown = [finding for finding in findings if options.verbosity >= 0 or finding.is_problem]
    for finding in shown:
        mark = "ok  " if finding.good else "--  " if finding.optional else "BAD "
        print_lines(*f"{mark} {finding.subject}: {finding.detail}".split("\n"))
        if not finding.good and finding.fix:
            print_lines(f"     fix: {finding.fix}")
    return EXIT_ENVIRONMENT if any(finding.is_problem for finding in findings) else EXIT_OK


def _examine_project(options: DoctorOptions) -> list[Finding]:
    """Return a finding for the project and each of its places, with what says where it is."""
    project = find_project()
    if project.marker:
        reason = f"it has {Path(project.marker).name}"
    else:
        reason = (
            "the current folder: neither it nor one above has tvmflow.toml, [tool.tvmflow] or .git"
        )
    places = {
        "project root": (project.root, reason),
        "store": (shortest_path(options.store.locate().root), options.store.origin()),
        "dist": (options.dist.locate(), options.dist.origin()),
        "releases": (shortest_path(project.releases), project.origin("releases")),
    }
    return [Finding(name, True, f"{path} ({why})") for name, (path, why) in places.items()]


def examine(store: LocalStore, dist: Path) -> list[Finding]:
    """Return a finding for everything that a run depends on."""
    oldest, newest = _PYTHON_VERSIONS
    python = Finding(
        "Python",
        oldest <= sys.version_info[:2] <= newest,
        sys.version.split()[0],
        "use Python {}.{} to {}.{}".format(*oldest, *newest),
    )
    required = map(_examine_package, _list_required_packages())
    findings = [python, *required, *_examine_machine(), *examine_disks(store, dist), _examine_gpu()]
    findings += map(_examine_peer, PEERS.values())
    with ForkServer.start() as fork_server:
        probes = (*_PROBES, *_list_reference_probes())
        findings += [_run_probe(probe, fork_server) for probe in probes]
    return findings


def _list_required_packages() -> list[str]:
    """Return the distributions without which tvmflow is not completely installed."""
    tools = {*_CORE_PACKAGES}
    for frontend in FRONTENDS.values():
        tools |= {*frontend.TOOLS, *frontend.REFERENCE.tools}
    return sorted(tool for tool in tools if not packages.is_extra(tool))


def _list_reference_probes() -> list[_Probe]:
    """Return a probe for the reference of each frontend."""
    probes = []
    for kind, frontend in FRONTENDS.items():
        reference = frontend.REFERENCE
        fix = f"{reference.install} ({reference.note})" if reference.note else reference.install
        needs = "import and verify" if any(map(packages.is_extra, frontend.TOOLS)) else "verify"
        subject = f"{reference.name}, to {needs} {frontend.NAME} models"
        probes.append(_Probe(subject, "probe_reference", fix, reference.is_optional, argument=kind))
    return probes


def _examine_gpu() -> Finding:
    # Only targets for NVIDIA GPUs are tuned and verified on one, so that it is never missing.
    gpu = detect_gpu()
    detail = f"{gpu.gpu.name} ({gpu.gpu.arch})" if gpu.gpu else gpu.reason
    return Finding("NVIDIA GPU, to tune and verify for", True, detail)


def _examine_peer(peer: Peer) -> Finding:
    """Return whether a runtime is installed, without importing it."""
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
    subject = f"package {name}"
    try:
        with explain_wait(IDENTITY_WAIT.format(name)):
            identity, package = packages.identity(name), packages.find_package(name)
    except EnvironmentProblem as problem:
        return Finding(subject, False, problem.message, problem.fix)
    if package.rivals:
        rivals = ", ".join(package.rivals)
        return Finding(
            subject,
            False,
            f"{identity} in {package.folder}, with files of {rivals}, which installs the same module",
            f"pip uninstall {package.distribution} {' '.join(package.rivals)}, then {install_command(name)}",
        )
    requirement = Requirement(REQUIREMENTS.get(name, name))
    if not requirement.specifier.contains(package.version, prereleases=True):
        detail = f"{identity} in {package.folder}, and tvmflow needs {requirement}"
        return Finding(subject, False, detail, install_command(name))
    return Finding(subject, True, f"{identity} in {package.folder}")


def _examine_machine() -> list[Finding]:
    host = read_host()
    cores = count_text(host.cores, "core")
    return [
        Finding("this machine", True, f"{host.arch}, {host.model}, {cores}"),
        # It is only needed when a recipe asks for it.
        _examine_emulators(),
    ]


def _examine_emulators() -> Finding:
    programs = find_emulators()
    installed = ", ".join(str(path) for path in programs.values() if path)
    missing = ", ".join(name for name, path in programs.items() if not path)
    folder = os.environ.get(QEMU_VARIABLE)
    place = f" in ${QEMU_VARIABLE} ({excerpt(folder)})" if folder else ""
    detail = "; ".join(filter(None, [installed, missing and f"not installed{place}: {missing}"]))
    subject = "qemu, for verify.run_on: qemu"
    return Finding(subject, not missing, detail, INSTALL if missing else "", optional=True)


def _run_probe(probe: _Probe, fork_server: ForkServer) -> Finding:
    with explain_wait(f"trying {probe.subject}: up to a minute the first time"):
        outcome = fork_server.call(
            f"{__name__}:{probe.function}", probe.argument, timeout_s=_TIMEOUT_S
        )
    good = outcome.kind == "ok"
    detail = str(outcome.value) if good else outcome.message
    return Finding(probe.subject, good, detail, probe.fix, probe.optional)


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
    """Import the default cost model, which TVM imports only when tuning has begun."""
    import xgboost

    return f"xgboost {xgboost.__version__}"


def probe_reference(kind: str, emit: Callable[..., None]) -> str:
    """Return name and version of the reference of a frontend."""
    frontend = FRONTENDS[kind]
    return f"{frontend.REFERENCE.name} {frontend.reference_version()}"


COMMANDS: Final = {"doctor": doctor}
