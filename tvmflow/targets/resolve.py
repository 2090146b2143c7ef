"""Turns the targets of a recipe into machines: triple, CPU, features and cores, before anything is keyed.

Whether LLVM knows a CPU and which features it implies is asked once, in a process of its own
(TVM takes a second to load), and remembered in the store for this machine and TVM build.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tvmflow.targets import gpu
from tvmflow.targets.features import kernel_names, needed_of
from tvmflow.targets.gpu import CUDA
from tvmflow.targets.host import Host, foreign_system, read_host, triple_of
from tvmflow.targets.platforms import host_triple, platform_of
from tvmflow.values import Json

HOST: Final = "host"

_GPU_LIMITS: Final[Mapping[str, Json]] = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "registers_per_block": 65536,
}

# What a process that is asked begins its lines with; others may be LLVM's.
_LOADED: Final = "loaded"
_ANSWER: Final = "answer"


class ResolvedTarget(NamedTuple):
    """A target with nothing left to guess.

    `tvm` is the mapping that TVM takes, `cores` the threads that kernels are tuned for (also in
    `tvm` as `num-cores`), `features` the CPU instructions that code for it may use (by the
    kernel's names), `device` what is measured on. `why_not` says why it cannot run here, or is
    empty. `remote` says how to reach the devices that it is tuned on, where they are elsewhere.
    `toolchain` is the identity of another linker than ours (see `targets.toolchain`), or None.

    One that runs only a part of the model, of the target `whole`, gives the tensors `until`;
    `given` are those that the parts before it have given.
    """

    name: str
    tvm: dict[str, Json]
    cores: int
    features: tuple[str, ...]
    device: dict[str, str]
    why_not: str
    remote: Json = None
    toolchain: Json = None
    whole: str = ""
    given: tuple[str, ...] = ()
    until: tuple[str, ...] = ()

    @property
    def part(self) -> str:
        """What the part of the model is called that it runs; empty where it runs all of it."""
        return self.name.removeprefix(f"{self.whole}.") if self.whole else ""

    @property
    def why_not_tuned(self) -> str:
        """Why nothing can be measured for it, or empty."""
        return "" if self.remote else self.why_not

    @property
    def codegen(self) -> dict[str, Json]:
        """The mapping without what changes no code unless it is tuned."""
        return {key: value for key, value in self.tvm.items() if key != "num-cores"}


class JoinedTarget(NamedTuple):
    """Machines that run a model together, each a part of it, in order."""

    name: str
    machines: tuple[ResolvedTarget, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """All at which the model is cut."""
        return self.machines[-1].given


def resolve(
    name: str,
    mapping: Mapping[str, Json] | None,
    cores: int | None,
    host: Host,
    facts: Mapping[str, Json],
    remote: Json = None,
    toolchain: Json = None,
) -> ResolvedTarget:
    """The target `name`; `mapping` is None for `host`. `facts` is what `query` answered for it."""
    features = list(facts["features"])
    if mapping is None:
        # a hypervisor may hide instructions that this CPU model has: code must not use them
        hidden = [name for name in features if host.lacks(kernel_names(host.arch, name))]
        tvm = {"kind": "llvm", "mtriple": facts["mtriple"], "mcpu": facts["mcpu"]}
        if hidden:
            tvm["mattr"] = [f"-{name}" for name in sorted(hidden)]
            features = [name for name in features if name not in hidden]
    else:
        tvm = dict(mapping)
        if facts["mtriple"]:
            # what TVM would take by itself depends on how LLVM was built
            tvm.setdefault("mtriple", facts["mtriple"])
        if tvm["kind"] == CUDA:
            # what every GPU since 2017 has, and what a search asks for
            tvm = {**_GPU_LIMITS, **tvm}
    threads = cores or int(tvm.get("num-cores", host.cores))
    if tvm["kind"] == "llvm":
        tvm["num-cores"] = threads
    # a GPU's code is called by code for a CPU
    arch = platform_of(host_triple(tvm) or host.arch).arch if tvm["kind"] == CUDA else facts["arch"]
    needed = needed_of(arch, features)
    here = facts["arch"] == host.arch
    device = {"kind": "cpu", "class": host.model} if here else {"kind": str(tvm["kind"])}
    why_not = _why_not(tvm, arch, needed, host)
    card = gpu.read_gpu().gpu if tvm["kind"] == CUDA and not why_not else None
    if card:
        device["class"] = card.name
    return ResolvedTarget(
        name=name,
        tvm=tvm,
        cores=threads,
        features=needed,
        device={"kind": "rpc", "class": remote["key"]} if remote else device,
        why_not=why_not,
        remote=remote,
        toolchain=toolchain,
    )


def _why_not(tvm: Mapping[str, Json], arch: str, needed: tuple[str, ...], host: Host) -> str:
    """Why code for a target cannot run on this machine, or empty; `arch` and `needed` are of its CPU, or of that beside its GPU."""
    kind = str(tvm["kind"])
    if kind not in ("llvm", CUDA):
        return f"its kind is {kind}, and this machine runs libraries for CPUs and NVIDIA GPUs only"
    if arch != host.arch:
        return f"it is for {arch}, and this machine is {host.arch}"
    foreign = foreign_system(platform_of(host_triple(tvm)), host)
    if foreign:
        return f"it is for {foreign[0]}, and this machine runs {foreign[1]}"
    missing = host.lacks(needed)
    if missing:
        return f"this machine's CPU lacks {', '.join(missing)}"
    return gpu.why_not_run(str(tvm["arch"]), gpu.read_gpu()) if kind == CUDA else ""


# ---------------------------------------------------------------- asking LLVM, in a process of its own


def query(mapping: Mapping[str, Json] | None) -> dict[str, Json]:
    """What TVM and LLVM say of a target (None: of this machine). Runs in a process that may import tvm.

    Gives `{"mtriple", "mcpu", "arch", "features"}`, or `{"error": sentence, "near": [names]}`.
    """
    import tvm
    from tvm.target import codegen

    here = triple_of(read_host())
    if mapping is None:
        detected = tvm.target.Target.from_device("cpu").export()
        mapping = {"kind": "llvm", "mtriple": here, "mcpu": str(detected["mcpu"])}
    try:
        target = tvm.target.Target(dict(mapping))
    except Exception as refused:
        return {"error": f"TVM refuses this target: {_last_line(refused)}", "near": []}
    if target.kind.name != "llvm":
        own = {"mtriple": "", "mcpu": "", "arch": target.kind.name}
        # what the code beside a GPU's kernels may use
        beside = query(mapping["host"]) if mapping.get("host") else {"features": []}
        return beside if "error" in beside else {**own, "features": beside["features"]}
    triple, cpu = str(mapping.get("mtriple") or here), str(mapping.get("mcpu", ""))
    try:
        if cpu and not codegen.llvm_is_valid_cpu(cpu, triple):
            near = [str(name) for name in codegen.llvm_get_cpu_archlist(target)]
            return {"error": f"'{cpu}' is not a CPU that LLVM knows for {triple}", "near": near}
        features = sorted(str(name) for name in codegen.llvm_get_cpu_features(target))
    except Exception as refused:
        return {"error": f"LLVM refuses {triple}: {_last_line(refused)}", "near": []}
    platform = platform_of(triple)
    if platform.arch == "riscv64" and platform.system == "linux" and "d" not in features:
        # numbers would be handed to expf and its like where nobody looks for them
        return {
            "error": f"{triple} passes floating-point numbers in their own registers, and this CPU has none; "
            "add `mattr: [+m, +a, +f, +d, +c]`",
            "near": [],
        }
    # LLVM says so on stderr alone, and goes on without
    asked = [str(name)[1:] for name in mapping.get("mattr", ()) if str(name).startswith("+")]
    unknown = [name for name in asked if name not in features]
    if unknown:
        return {
            "error": f"'+{unknown[0]}' is not a feature that LLVM knows for {triple}",
            "near": [],
        }
    return {
        "mtriple": triple,
        "mcpu": cpu,
        "arch": platform.arch,
        "features": features,
    }


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def cpus(triple: str) -> list[str]:
    """The CPU names that LLVM knows for a triple. Runs in a process that may import tvm."""
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    return sorted(str(name) for name in codegen.llvm_get_cpu_archlist(target))


def query_in_worker(mappings: list[Json], call: Callable[..., Any] = subprocess.run) -> list[Json]:
    """`query` for each mapping, in a new process, so that this one stays free of tvm.

    LLVM ends its process over some targets: one that it ended over is told as wrong, and another
    process answers for those after it.
    """
    answers: list[Json] = []
    while len(answers) < len(mappings):
        answers += _in_worker("query", mappings[len(answers) :], call)
        if len(answers) < len(mappings):
            triple = (mappings[len(answers)] or {}).get("mtriple", "this machine")
            answers.append({"error": f"LLVM cannot make code for {triple}", "near": []})
    return answers


def cpus_in_worker(triples: list[Json], call: Callable[..., Any] = subprocess.run) -> list[Json]:
    """`cpus` for each triple, in one new process."""
    return _in_worker("cpus", triples, call)


def _in_worker(function: str, questions: list[Json], call: Callable[..., Any]) -> list[Json]:
    """The answers, up to the question over which TVM ended the process, if there is one."""
    import json

    from tvmflow.errors import EnvironmentProblem

    code = (
        f"import json, sys, tvm; from {__name__} import {function}; print('{_LOADED}', flush=True)\n"
        f"for each in json.load(sys.stdin): print('{_ANSWER}', json.dumps({function}(each)), flush=True)"
    )
    done = call(
        [sys.executable, "-c", code],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    if done.returncode == 0 or _LOADED in said:
        found = [line.partition(" ") for line in said]
        return [json.loads(answer) for word, _, answer in found if word == _ANSWER]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise EnvironmentProblem(
        f"TVM cannot be loaded to look at the targets: {last}",
        fix="run `tvmflow doctor`; it checks the installation piece by piece",
    )
