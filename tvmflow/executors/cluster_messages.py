"""What a run and the workers of a cluster tell each other: plain JSON, never a file's content.

A worker describes itself to dask by resources with names such as `apache-tvm:0.27.0+5dd7c1`, and a
stage requires them, so that the scheduler itself gives no stage to a worker on which it would
compute, or measure, something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core import packages
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.types import Json, StageCall, StageResult
from tvmflow.core.version import VERSION
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.peers import PEERS
from tvmflow.stages import STAGES
from tvmflow.store.remote.base import BlobRef
from tvmflow.targets import devices
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.host import read_host

TOPIC: Final = "tvmflow"
"""The topic of dask's events under which workers report progress."""

_PATHS: Final = ("inputs", "out", "work", "ledger", "locks")


class InputBlob(NamedTuple):
    """A file that a stage reads, by its content in the remote cache.

    `path` is what the user knows a file from outside by; empty for a file that another stage made.
    """

    digest: str
    size: int
    path: str


class StageRequest(NamedTuple):
    """A stage to run on a worker.

    `token` marks its events, `key` names everything that the stage gets, `call` is a StageCall
    without paths, and `resources` are those that dask gave the worker for.
    """

    token: str
    key: str
    remote_url: str
    remote_timeout_s: float
    call: dict[str, Json]
    inputs: dict[str, InputBlob]
    resources: dict[str, float]


class StageResponse(NamedTuple):
    """The end of a stage on a worker: its result with the end of its log, and its files by name."""

    result: StageResult
    files: dict[str, BlobRef]
    worker: str


def call_without_paths(call: StageCall) -> dict[str, Json]:
    """Return the JSON of a call, without what is of one machine."""
    return {name: value for name, value in to_json(call).items() if name not in _PATHS}


def call_with_paths(fields: dict[str, Json], **paths: Any) -> StageCall:
    """Return the call of a request with the paths of this machine."""
    return from_json(StageCall, {**fields, **paths})


# ---------------------------------------------------------------- workers that fit


# A resource that many stages may use at a time is not scarce.
_UNLIMITED: Final = 1e6
_SHORT_DIGEST: Final = 12
_MISSING: Final = "not installed"


class WorkerDescription(NamedTuple):
    """The software and hardware that a worker's results and measurements depend on.

    Attributes:
        tvmflow: Version and digest of this package.
        platform: System and architecture.
        cpu: Digest of everything that is known of the CPU, and of how many cores may be used.
        host: The CPU for people.
        tools: The identity of each distribution that a stage may use.
    """

    tvmflow: str
    platform: str
    cpu: str
    host: str
    tools: dict[str, str]


def describe_this_host(tools: Iterable[str] | None = None) -> WorkerDescription:
    """Return the description of this interpreter on this machine.

    Described are all distributions that a stage may use, unless `tools` names some.
    """
    host = read_host()
    return WorkerDescription(
        tvmflow=f"{VERSION}+{_digest_package()}",
        platform=packages.host_platform(),
        cpu=digest_of([host.fingerprint(), host.cores])[:_SHORT_DIGEST],
        host=f"{host.model}, {host.cores} cores",
        tools=packages.identify_installed(_list_tools() if tools is None else tools),
    )


def _list_tools() -> list[str]:
    """Return every distribution that a stage may use."""
    tools = {tool for stage in STAGES.values() for tool in stage.TRAITS.tools}
    tools |= {tool for backend in BACKENDS.values() for tool in backend.TOOLS}
    for frontend in FRONTENDS.values():
        tools |= {*frontend.TOOLS, *frontend.REFERENCE.tools}
    tools |= {tool for peer in PEERS.values() for tool in peer.traits.tools}
    return sorted(tools)


def _digest_package() -> str:
    """Return a digest of the content of this package: two checkouts can have the same version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:_SHORT_DIGEST]


# ---------------------------------------------------------------- resources of dask


def offered_resources(worker: WorkerDescription) -> dict[str, float]:
    """Return the resources of a worker. It has its CPU once: one measurement at a time uses it."""
    unlimited = [*_resource_names(worker, worker.tools), f"host:{worker.host}"]
    return {**dict.fromkeys(unlimited, _UNLIMITED), f"cpu:{worker.cpu}": 1.0}


def parse_resources(resources: Mapping[str, float]) -> WorkerDescription | None:
    """Return the description of a worker with these resources; None if `tvmflow worker` did not start it."""
    values = dict(name.split(":", 1) for name in resources if ":" in name)
    own = {name: values.pop(name, None) for name in ("tvmflow", "platform", "cpu", "host")}
    if None in own.values():
        return None
    return WorkerDescription(**{name: str(value) for name, value in own.items()}, tools=values)


def required_resources(call: StageCall, planner: WorkerDescription) -> dict[str, float]:
    """Return the resources that a stage requires, of a plan that was made on the machine `planner`."""
    required = dict.fromkeys(_resource_names(planner, call.tools), 1.0)
    return {**required, f"cpu:{planner.cpu}": 1.0} if measures_cpu(call) else required


def _resource_names(worker: WorkerDescription, tools: Iterable[str]) -> list[str]:
    return [f"{name}:{version}" for name, version in _versions(worker, tools).items()]


def _versions(worker: WorkerDescription, tools: Iterable[str]) -> dict[str, str]:
    """Return what must be the same where a stage with these tools is planned and where it runs."""
    tool_versions = {tool: worker.tools.get(tool, _MISSING) for tool in tools}
    return {"tvmflow": worker.tvmflow, "platform": worker.platform, **tool_versions}


def measures_cpu(call: StageCall) -> bool:
    """Return whether a stage measures on the CPU of the machine that the plan was made on."""
    return devices.CPU["kind"] in call.devices


# ---------------------------------------------------------------- reasons for people


def list_incompatibilities(
    call: StageCall, planner: WorkerDescription, worker: WorkerDescription | None
) -> list[str]:
    """Return the reasons why a worker cannot run a stage; none when it can."""
    reasons = list_version_mismatches(planner, worker, call.tools)
    if worker and measures_cpu(call) and worker.cpu != planner.cpu:
        reasons.append(f"its CPU is {worker.host}, and the plan is for {planner.host}")
    return reasons


def list_version_mismatches(
    planner: WorkerDescription, worker: WorkerDescription | None, tools: Iterable[str]
) -> list[str]:
    """Return what would make a stage compute something else on a worker than on the planning machine."""
    if worker is None:
        return ["it was not started by `tvmflow worker`"]
    versions = _versions(worker, tools)
    return [
        f"its {name} is {versions[name]}, and this machine has {expected}"
        for name, expected in _versions(planner, tools).items()
        if versions[name] != expected
    ]
