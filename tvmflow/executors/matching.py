"""Which worker of a cluster may run a stage: what a worker says of itself, and what a stage asks for.

Both are told to dask as resources with names such as `apache-tvm:0.27.0+5dd7c1`, so that the
scheduler itself gives no stage to a worker on which it would give, or measure, something else.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tvmflow
from tvmflow import tools
from tvmflow.keys import digest_of
from tvmflow.stages._subjects import LOCAL
from tvmflow.targets.host import read_host
from tvmflow.values import StageCall

# What many stages may have at a time is no scarce resource.
_PLENTY: Final = 1e6
_SHORT: Final = 12


class About(NamedTuple):
    """A worker, or this machine, as far as it matters for what stages give there.

    `host` are words for the CPU that `cpu` stands for; `tools` are the identities of the
    distributions that stages name, `absent` for one that is not installed.
    """

    tvmflow: str
    machine: str
    cpu: str
    host: str
    tools: dict[str, str]


def about_here() -> About:
    """This interpreter on this machine."""
    host = read_host()
    identities = {name: _identity(name) for name in _every_tool()}
    own = f"{tvmflow.__version__}+{_own_code()}"
    kind = digest_of(host.fingerprint())[:_SHORT]
    return About(own, tools.machine(), kind, f"{host.model}, {host.cores} cores", identities)


def _identity(tool: str) -> str:
    """Read again only when its RECORD is another: a worker looks before each stage, and some are long."""
    try:
        _, record = tools.record_file(tool)
    except tools.NotInstalled:
        return tools.identity(tool)
    status = Path(record).stat()
    return _identity_by(tool, record, status.st_size, status.st_mtime_ns)


@functools.cache
def _identity_by(tool: str, record: str, size: int, mtime_ns: int) -> str:
    return tools.identity(tool)


def _every_tool() -> list[str]:
    """All that the TOOLS of a stage can name."""
    from tvmflow.frontends import FRONTENDS
    from tvmflow.stages import EVERY_STAGE
    from tvmflow.targets import cuda

    named = [stage.TOOLS for stage in EVERY_STAGE.values()]
    for frontend in FRONTENDS.values():
        named += [frontend.TOOLS, frontend.REFERENCE_TOOLS]
    return sorted({name for each in (*named, cuda.PACKAGES) for name in each})


def _own_code() -> str:
    """A digest over the content of this package: two checkouts can carry the same version."""
    root = Path(tvmflow.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:_SHORT]


# ---------------------------------------------------------------- resources


def offers(about: About) -> dict[str, float]:
    """The resources of a worker. Its CPU is there once: whoever measures on it has it alone."""
    plenty = [*_labels(about, about.tools), f"host:{about.host}"]
    return {**dict.fromkeys(plenty, _PLENTY), f"cpu:{about.cpu}": 1.0}


def about_worker(resources: Mapping[str, float]) -> About | None:
    """What a worker with these resources is; None for one that `tvmflow worker` did not start."""
    said = dict(name.split(":", 1) for name in resources if ":" in name)
    try:
        own = {name: said.pop(name) for name in ("tvmflow", "machine", "cpu", "host")}
    except KeyError:
        return None
    return About(**own, tools=said)


def asks(call: StageCall, here: About) -> dict[str, float]:
    """The resources that a stage of a plan that was made here needs."""
    asked = dict.fromkeys(_labels(here, call.tools), 1.0)
    return {**asked, f"cpu:{here.cpu}": 1.0} if measures_here(call) else asked


def _labels(about: About, named: Iterable[str]) -> list[str]:
    of_tools = [f"{name}:{about.tools.get(name, 'absent')}" for name in named]
    return [f"tvmflow:{about.tvmflow}", f"machine:{about.machine}", *of_tools]


def measures_here(call: StageCall) -> bool:
    """Whether a stage runs what it made on the CPU of the machine that the plan was made on."""
    device = call.settings.get("device")
    if device is not None:
        return bool(device["kind"] == "cpu")
    if call.stage != "verify" or call.settings.get("run_on", LOCAL) != LOCAL:
        return False
    target = call.settings.get("target", {})
    return any(map(_runs_here, target.get("parts", {"": target}).values()))


def _runs_here(machine: Mapping[str, Any]) -> bool:
    return machine.get("device", {}).get("kind") == "cpu" and not machine["why_not"]


# ---------------------------------------------------------------- words


def misfits(call: StageCall, here: About, other: About | None) -> list[str]:
    """Why a worker may not run a stage of a plan that was made here, a phrase each; none when it may."""
    found = strange(here, other, call.tools)
    if other and measures_here(call) and other.cpu != here.cpu:
        found.append(f"its CPU is {other.host}, and the plan is for {here.host}")
    return found


def strange(here: About, other: About | None, named: Iterable[str]) -> list[str]:
    """What would make a stage give something else on a worker, a phrase each."""
    if other is None:
        return ["`tvmflow worker` did not start it"]
    pairs = [("tvmflow", here.tvmflow, other.tvmflow), ("machine", here.machine, other.machine)]
    for name in named:
        pairs.append((name, here.tools.get(name, "absent"), other.tools.get(name, "absent")))
    return [
        f"its {name} is {theirs}, and here it is {ours}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
