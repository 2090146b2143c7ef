"""Resolved targets (triple, CPU, features, threads), and what this machine can do with them."""

from __future__ import annotations

import logging
from typing import NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets import c_runtime, linking
from tvmflow.targets.backends import backend_for, is_supported
from tvmflow.targets.emulation import find_emulated_arch
from tvmflow.targets.features import kernel_feature_names, required_features
from tvmflow.targets.host import CPU_VARIABLE, Host, find_system_mismatch
from tvmflow.targets.llvm_query import TargetFacts, capped_target
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, split_threads, target_kind

_log = logging.getLogger(__name__)


class ResolvedTarget(NamedTuple):
    """A fully specified target.

    Attributes:
        name: As in the recipe; for a part, `<target>.<part>`.
        tvm: TVM's target without `num-cores`, because code does not depend on the number of threads.
        threads: The number of threads with which kernels are tuned and timed.
        features: The CPU instructions that code may use, named as in /proc/cpuinfo.
        device: The device that measures: `kind`, and `class` if known.
        unrunnable_reason: Why this machine cannot run its code, or an empty string.
        remote: The address of devices behind RPC that tune it, or None.
        toolchain: The identity of a linker that replaces tvmflow's (see `targets.toolchain`), or None.
        partitioned_target: The target that this one runs a part of; empty if it is not a part.
        input_tensors: A part's inputs that earlier parts compute.
        output_tensors: A part's outputs that later parts read.
        levels: The ISA levels of its library in ascending order; the fields above are those of the first level.
        isa_level_target: The target that this one is an ISA level of; empty if it is not a level.
        webgpu: The target of the browser's GPU code that is delivered beside this one's, or None.
    """

    name: str
    tvm: dict[str, Json]
    threads: int
    features: tuple[str, ...]
    device: dict[str, str]
    unrunnable_reason: str
    remote: Json = None
    toolchain: Json = None
    partitioned_target: str = ""
    input_tensors: tuple[str, ...] = ()
    output_tensors: tuple[str, ...] = ()
    levels: tuple[ResolvedTarget, ...] = ()
    isa_level_target: str = ""
    webgpu: ResolvedTarget | None = None

    @property
    def compiled_targets(self) -> tuple[ResolvedTarget, ...]:
        """The targets that code is compiled for: each ISA level, or the target itself; and WebGPU."""
        return (*(self.levels or (self,)), *([self.webgpu] if self.webgpu else []))

    @property
    def level(self) -> str:
        """The name of its ISA level; empty if it is not a level."""
        return self.name.removeprefix(f"{self.isa_level_target}.") if self.isa_level_target else ""

    @property
    def measured_isa_level(self) -> ResolvedTarget:
        """The ISA level to measure here: the highest that this CPU supports, or else the target itself."""
        runnable = [level for level in self.levels if not level.unrunnable_reason]
        return (runnable or self.levels or (self,))[-1]

    @property
    def part(self) -> str:
        """The name of its part; empty if it runs the whole model."""
        whole = self.partitioned_target
        return self.name.removeprefix(f"{whole}.") if whole else ""

    @property
    def unmeasurable_reason(self) -> str:
        """Why nothing can be measured for it, or an empty string."""
        return "" if self.remote else self.unrunnable_reason


class PartitionedTarget(NamedTuple):
    """Targets that each run one part of a model, in order."""

    name: str
    parts: tuple[ResolvedTarget, ...]

    @property
    def cut_tensors(self) -> tuple[str, ...]:
        """All tensors at which the model is cut."""
        return self.parts[-1].input_tensors


def resolve(
    name: str,
    tvm: TvmTarget | None,
    threads: int | None,
    host: Host,
    facts: TargetFacts,
    remote: Json = None,
    toolchain: Json = None,
) -> ResolvedTarget:
    """Return a resolved target; `tvm` is None for the target `host`."""
    resolved, features = _complete(capped_target(host) if tvm is None else tvm, host, facts)
    backend = backend_for(resolved)
    resolved, own_threads = split_threads(backend.complete_target(resolved))
    arch = facts.arch
    if not backend.RUNS_ON_HOST_CPU:
        # For a GPU, this is the architecture of its host.
        arch = parse_triple(cpu_triple(resolved) or host.arch).arch
    required = required_features(arch, features)
    reason = _unrunnable_reason(resolved, arch, required, host)
    _log.debug("target %s: %s; %s", name, resolved, reason or "it runs on this machine")
    device = backend.device(resolved, host, runs_here=not reason)
    if remote:
        device = {"kind": "rpc", "class": str(remote["key"])}
    return ResolvedTarget(
        name=name,
        tvm=resolved,
        threads=threads or own_threads or host.cores,
        features=required,
        device=device,
        unrunnable_reason=reason,
        remote=remote,
        toolchain=toolchain,
    )


def _complete(
    tvm: TvmTarget | None, host: Host, facts: TargetFacts
) -> tuple[dict[str, Json], list[str]]:
    """Return TVM's target with triple and CPU, and the CPU's features by LLVM's names."""
    features = list(facts.features)
    if tvm is not None:
        # TVM's default triple depends on how LLVM was built, so the triple is set.
        default = {"mtriple": facts.triple} if facts.triple else {}
        return {**default, **tvm}, features
    # A hypervisor may hide instructions of this CPU model, which code must not use then.
    hidden = [name for name in features if host.find_missing(kernel_feature_names(host.arch, name))]
    completed: dict[str, Json] = {"kind": "llvm", "mtriple": facts.triple, "mcpu": facts.cpu}
    if hidden:
        completed["mattr"] = [f"-{name}" for name in sorted(hidden)]
    return completed, [name for name in features if name not in hidden]


def _unrunnable_reason(tvm: TvmTarget, arch: str, required: tuple[str, ...], host: Host) -> str:
    backend = backend_for(tvm)
    if not is_supported(target_kind(tvm)):
        return backend.unrunnable_reason(tvm, in_this_process=False)
    if arch != host.arch:
        return f"it is for {arch}, and this machine is {host.arch}"
    mismatch = find_system_mismatch(parse_triple(cpu_triple(tvm)), host)
    if mismatch:
        return f"it is for {mismatch.library}, and this machine runs {mismatch.host}"
    missing = host.find_missing(required)
    if missing:
        cap = f" (capped to {host.capped_to} by {CPU_VARIABLE})" if host.capped_to else ""
        return f"this machine's CPU{cap} lacks {', '.join(missing)}"
    return backend.unrunnable_reason(tvm, in_this_process=False)


# ---------------------------------------------------------------- capabilities

_NOT_BUILT = "nothing is built"


class Capabilities(NamedTuple):
    """For each capability, an empty string, or the reason why this machine lacks it."""

    built: str
    linked: str
    runs_here: str
    measured_here: str


def unlinkable_reason(tvm: TvmTarget, toolchain: Json) -> str:
    """Return why a target's object code cannot be linked to a library, or an empty string."""
    triple = cpu_triple(tvm)
    if toolchain or not c_runtime.unsupported_reason(triple):
        return ""
    return linking.unlinkable_reason(triple)


def has_schedule_rules(triple: str) -> bool:
    """Return whether there are schedule rules for a CPU: only CPUs with vectors have them."""
    return not parse_triple(triple).arch.startswith("thumb")


def emulator_name(target: ResolvedTarget) -> str:
    """Return the emulator for a target that this machine cannot run, even if not installed; else empty."""
    arch = find_emulated_arch(str(target.tvm.get("mtriple", "")))
    return arch.program if arch and target.unrunnable_reason else ""


def find_capabilities(target: ResolvedTarget) -> Capabilities:
    """Return what this machine can do with a target."""
    unbuildable = backend_for(target.tvm).unbuildable_reason(target.tvm)
    if unbuildable:
        return Capabilities(unbuildable, _NOT_BUILT, target.unrunnable_reason, _NOT_BUILT)
    return Capabilities(
        "",
        unlinkable_reason(target.tvm, target.toolchain),
        target.unrunnable_reason,
        target.unmeasurable_reason,
    )
