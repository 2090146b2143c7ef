"""Turns the targets of a recipe into machines: triple, CPU, features and cores, before anything is keyed.

Whether LLVM knows a CPU and which features it implies is asked once, in a process of its own
(TVM takes a second to load), and remembered in the store for this machine and TVM build.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tvmflow.targets.host import Host
from tvmflow.values import Json

HOST: Final = "host"

# LLVM's names of x86 features whose presence the kernel reports under another name.
_LLVM_TO_CPUINFO: Final = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "prfchw": "3dnowprefetch",
    "sahf": "lahf_lm",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "pclmul": "pclmulqdq",
    "rdrnd": "rdrand",
    "sha": "sha_ni",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avxvnni": "avx_vnni",
}
# The features that decide whether compiled code runs at all. Tuning hints and kernel-only ones do not.
_X86_INSTRUCTIONS: Final = frozenset(
    "sse sse2 sse3 ssse3 sse4.1 sse4.2 sse4a popcnt avx avx2 fma fma4 xop f16c bmi bmi2 lzcnt movbe "
    "aes pclmul vaes vpclmulqdq gfni sha adx rdrnd rdseed avx512f avx512cd avx512bw avx512dq avx512vl "
    "avx512ifma avx512vbmi avx512vbmi2 avx512vnni avx512bitalg avx512vpopcntdq avx512bf16 avx512fp16 "
    "avx512vp2intersect avxvnni amx-tile amx-int8 amx-bf16".split()
)


class ResolvedTarget(NamedTuple):
    """A target with nothing left to guess.

    `tvm` is the mapping that TVM takes, `cores` the threads that kernels are tuned for (also in
    `tvm` as `num-cores`), `features` the CPU instructions that code for it may use (kernel
    names on x86), `device` what is measured on. `why_not` says why it cannot run here, or is
    empty. `remote` says how to reach the devices that it is tuned on, where they are elsewhere.
    """

    name: str
    tvm: dict[str, Json]
    cores: int
    features: tuple[str, ...]
    device: dict[str, str]
    why_not: str
    remote: Json = None

    @property
    def why_not_tuned(self) -> str:
        """Why nothing can be measured for it, or empty."""
        return "" if self.remote else self.why_not

    @property
    def codegen(self) -> dict[str, Json]:
        """The mapping without what changes no code unless it is tuned."""
        return {key: value for key, value in self.tvm.items() if key != "num-cores"}


def _cpuinfo_name(feature: str) -> str:
    return _LLVM_TO_CPUINFO.get(feature, feature)


def resolve(
    name: str,
    mapping: Mapping[str, Json] | None,
    cores: int | None,
    host: Host,
    facts: Mapping[str, Json],
    remote: Json = None,
) -> ResolvedTarget:
    """The target `name`; `mapping` is None for `host`. `facts` is what `query` answered for it."""
    features = [name for name in facts["features"] if name in _X86_INSTRUCTIONS]
    same_arch = facts["arch"] == host.arch
    if mapping is None:
        # a hypervisor may hide instructions that this CPU model has: code must not use them
        hidden = [name for name in features if _cpuinfo_name(name) not in host.flags]
        tvm = {"kind": "llvm", "mtriple": facts["mtriple"], "mcpu": facts["mcpu"]}
        if host.flags and hidden:
            tvm["mattr"] = [f"-{name}" for name in sorted(hidden)]
            features = [name for name in features if name not in hidden]
    else:
        tvm = dict(mapping)
    threads = cores or int(tvm.get("num-cores", host.cores))
    tvm["num-cores"] = threads
    needed = tuple(sorted(_cpuinfo_name(name) for name in features))
    device = {"kind": "cpu", "class": host.model} if same_arch else {"kind": str(tvm["kind"])}
    return ResolvedTarget(
        name=name,
        tvm=tvm,
        cores=threads,
        features=needed,
        device={"kind": "rpc", "class": remote["key"]} if remote else device,
        why_not=_why_not(str(tvm["kind"]), facts["arch"], needed, host, same_arch),
        remote=remote,
    )


def _why_not(kind: str, arch: str, needed: tuple[str, ...], host: Host, same_arch: bool) -> str:
    if kind != "llvm":
        return f"its kind is {kind}, and this machine runs CPU libraries only"
    if not same_arch:
        return f"it is for {arch}, and this machine is {host.arch}"
    missing = [name for name in needed if name not in host.flags]
    if host.flags and missing:
        return f"this machine's CPU lacks {', '.join(missing)}"
    return ""


# ---------------------------------------------------------------- asking LLVM, in a process of its own


def query(mapping: Mapping[str, Json] | None) -> dict[str, Json]:
    """What TVM and LLVM say of a target (None: of this machine). Runs in a process that may import tvm.

    Gives `{"mtriple", "mcpu", "arch", "features"}`, or `{"error": sentence, "near": [names]}`.
    """
    import tvm
    from tvm.target import codegen

    if mapping is None:
        detected = tvm.target.Target.from_device("cpu").export()
        mapping = {
            "kind": "llvm",
            "mtriple": f"{platform.machine()}-linux-gnu"
            if sys.platform == "linux"
            else str(detected["mtriple"]),
            "mcpu": str(detected["mcpu"]),
        }
    try:
        target = tvm.target.Target(dict(mapping))
    except Exception as refused:
        sentence = str(refused).strip().splitlines()[-1]
        return {"error": f"TVM refuses this target: {sentence}", "near": []}
    if target.kind.name != "llvm":
        return {"mtriple": "", "mcpu": "", "arch": target.kind.name, "features": []}
    triple = str(mapping.get("mtriple") or f"{platform.machine()}-linux-gnu")
    cpu = str(mapping.get("mcpu", ""))
    known = [str(name) for name in codegen.llvm_get_cpu_archlist(target)]
    if cpu and cpu not in known:
        return {"error": f"'{cpu}' is not a CPU that LLVM knows for {triple}", "near": known}
    features = [str(name) for name in codegen.llvm_get_cpu_features(target)]
    return {
        "mtriple": triple,
        "mcpu": cpu,
        "arch": triple.partition("-")[0].replace("arm64", "aarch64"),
        "features": sorted(features),
    }


def query_in_worker(mappings: list[Json], call: Callable[..., Any] = subprocess.run) -> list[Json]:
    """`query` for each mapping, in one new process, so that this one stays free of tvm."""
    import json

    from tvmflow.errors import EnvironmentProblem

    code = (
        "import json, sys; from tvmflow.targets.resolve import query; "
        "print(json.dumps([query(m) for m in json.load(sys.stdin)]))"
    )
    done = call(
        [sys.executable, "-c", code],
        input=json.dumps(mappings),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentProblem(
            f"TVM cannot be loaded to look at the targets: {last}",
            fix="run `tvmflow doctor`; it checks the installation piece by piece",
        )
    return list(json.loads(done.stdout.splitlines()[-1]))
