"""Examines an installation piece by piece, each in a process that may crash, and says what to mend."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow import tools
from tvmflow.executors.nursery import Nursery
from tvmflow.stores.local import LocalStore
from tvmflow.targets.emulation import MACHINES, VARIABLE, find_qemu
from tvmflow.targets.gpu import read_gpu
from tvmflow.targets.host import read_host, triple_of

_REQUIRED: Final = ("apache-tvm", "apache-tvm-ffi", "onnx", "onnxruntime", "safetensors", "ziglang")
_GIGABYTE: Final = 1e9
_SECONDS: Final = 120.0


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    good: bool
    found: str
    fix: str = ""
    optional: bool = False


class _Probe(NamedTuple):
    """Something that is tried in a worker; `function` names a probe below."""

    what: str
    function: str
    fix: str
    optional: bool = False


_PROBES: Final = (
    _Probe(
        "TVM saves and loads IR",
        "probe_ir",
        "pip install 'apache-tvm-ffi>=0.1.14.post0,<0.1.15': newer ones crash in TVM 0.27",
    ),
    _Probe("TVM compiles, links and runs", "probe_library", "reinstall apache-tvm and ziglang"),
    _Probe("cost model xgb", "probe_xgboost", "pip install xgboost-cpu"),
    _Probe("ONNX Runtime", "probe_onnxruntime", "pip install onnxruntime"),
    _Probe(
        "MXNet, to verify MXNet models",
        "probe_mxnet",
        "pip install 'tvmflow[mxnet]' (x86-64 Linux only); importing MXNet models works without",
        optional=True,
    ),
)


def examine(store: LocalStore) -> list[Finding]:
    """Look at everything that a run depends on."""
    version = sys.version_info[:2]
    findings = [
        Finding(
            "Python",
            (3, 10) <= version <= (3, 12),
            sys.version.split()[0],
            "use Python 3.10, 3.11 or 3.12",
        )
    ]
    findings += [_package(name) for name in _REQUIRED]
    findings += [*_machine(store), _gpu()]
    with Nursery.start() as nursery:
        findings += [_try(probe, nursery) for probe in _PROBES]
    return findings


def _gpu() -> Finding:
    """What targets for NVIDIA GPUs are tuned and verified on; nothing else needs one."""
    found = read_gpu()
    return Finding(
        "NVIDIA GPU, to tune and verify for",
        True,
        f"{found.gpu.name} ({found.gpu.arch})" if found.gpu else found.why_not,
    )


def _package(name: str) -> Finding:
    found = tools.identity(name)
    return Finding(f"package {name}", found != "absent", found, f"pip install {name}")


def _machine(store: LocalStore) -> list[Finding]:
    host = read_host()
    place = Path(store.root)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / _GIGABYTE
    damaged = Path(store.root, "damaged")
    broken = len(list(damaged.iterdir())) if damaged.is_dir() else 0
    return [
        Finding("this machine", True, f"{host.arch}, {host.model}, {host.cores} cores"),
        Finding(
            "space for the store", free > 1, f"{free:.1f} GB at {store.root}", "free some space"
        ),
        Finding(
            "store",
            True,
            f"{broken} damaged files were set aside in {damaged}" if broken else "no damage seen",
        ),
        # nothing is amiss without it, as long as no recipe asks for it
        Finding("qemu, for verify.run_on: qemu", True, _emulators(), optional=True),
    ]


def _emulators() -> str:
    found = [path.name for each in MACHINES.values() if (path := find_qemu(each))]
    return ", ".join(found) or f"none on PATH, and none in ${VARIABLE}"


def _try(probe: _Probe, nursery: Nursery) -> Finding:
    outcome = nursery.call(f"{__name__}:{probe.function}", None, timeout_s=_SECONDS)
    good = outcome.kind == "ok"
    found = str(outcome.value) if good else outcome.message
    return Finding(probe.what, good, found, probe.fix, probe.optional)


# ---------------------------------------------------------------- probes, each run in a worker


def probe_ir(_: Any, emit: Callable[..., None]) -> str:
    """A module survives the way to disk and back: the wrong tvm-ffi ends in a segmentation fault here."""
    import tvm

    module = _small_module()
    back = tvm.ir.load_json(tvm.ir.save_json(module))
    tvm.ir.assert_structural_equal(back, module)
    return f"TVM {tvm.__version__}"


def probe_library(_: Any, emit: Callable[..., None]) -> str:
    """From a module to a linked library, loaded and called."""
    import tempfile

    import numpy as np
    import tvm

    from tvmflow.targets.linking import link_shared

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "probe.so")

        def link(output: str, files: list[str], **_: Any) -> None:
            link_shared([Path(file) for file in files], Path(output), triple_of(read_host()))

        tvm.compile(_small_module(), tvm.target.Target({"kind": "llvm"})).export_library(
            str(library), fcompile=link
        )
        machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
        ones = tvm.runtime.tensor(np.ones((4,), "float32"))
        if not (machine["main"](ones).numpy() == 2).all():
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


def probe_xgboost(_: Any, emit: Callable[..., None]) -> str:
    """The default cost model is imported late by TVM: better to miss it now than in the third hour."""
    import xgboost

    return f"xgboost {xgboost.__version__}"


def probe_onnxruntime(_: Any, emit: Callable[..., None]) -> str:
    """The reference for ONNX models."""
    import onnxruntime

    return f"ONNX Runtime {onnxruntime.__version__}"


def probe_mxnet(_: Any, emit: Callable[..., None]) -> str:
    """The reference for MXNet models."""
    from tvmflow.frontends.mxnet import _reference

    return f"MXNet {_reference.version()}"
