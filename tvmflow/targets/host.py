"""This machine, as far as compiled code is concerned. Cheap enough to be read on every run."""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tvmflow.targets.platforms import Platform, platform_of
from tvmflow.values import Json

_CPUINFO = "/proc/cpuinfo"

# sys.platform -> the system's name in a Platform; others are called what Python calls them.
_SYSTEMS = {"darwin": "macos", "win32": "windows"}

# Arm's numbers of its cores, as the kernel reports them; other makers' are told as numbers.
_ARM_CORES = {
    "0xc07": "Cortex-A7",
    "0xc09": "Cortex-A9",
    "0xd03": "Cortex-A53",
    "0xd05": "Cortex-A55",
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd42": "Cortex-A78AE",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}

# Extensions that one letter of a RISC-V name stands for.
_GENERAL = ("i", "m", "a", "f", "d", "zicsr", "zifencei")


class Host(NamedTuple):
    """This machine as far as compiled code is concerned.

    `arch`, `system` and `libc` are those of a `Platform`. `flags` are the CPU's features as the
    Linux kernel names them, and empty where nothing tells them. `told` are all that the system
    tells of, whether they are there or not; None for a kernel that tells of all.
    """

    arch: str
    model: str
    flags: frozenset[str]
    cores: int
    system: str = "linux"
    libc: str = "gnu"
    told: frozenset[str] | None = None

    def lacks(self, features: Iterable[str]) -> list[str]:
        """Those of these features (by the kernel's names) that the CPU is known not to have."""
        absent = [name for name in features if name not in self.flags]
        if self.told is None:
            return absent if self.flags else []
        return [name for name in absent if name in self.told]

    def fingerprint(self) -> Json:
        """What decides which target `host` is; the same on every machine of this kind."""
        told = None if self.told is None else sorted(self.told)
        return {**self._asdict(), "flags": sorted(self.flags), "told": told}


def read_host() -> Host:
    """This machine, from the kernel. Cores are those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = _SYSTEMS.get(sys.platform, sys.platform)
    host = host_of(_cpuinfo(), _machine(), cores or 1, system, _libc(system))
    if system not in _SYSTEMS.values():
        return host
    # an up-to-date run on Linux does without
    from tvmflow.targets.told import told_by

    told = told_by(system, host.arch)
    return host._replace(flags=told.there, told=told.told)


def host_of(
    cpuinfo: str, machine: str, cores: int, system: str = "linux", libc: str = "gnu"
) -> Host:
    """The machine that this text of /proc/cpuinfo is of; `machine` is what `uname -m` says."""
    fields = _first_processor(cpuinfo)
    arch = platform_of(machine).arch
    return Host(arch, _model(fields, arch), _flags(fields), cores, system, libc)


def triple_of(host: Host) -> str:
    """LLVM's name of this machine's platform."""
    libc = f"{host.libc}eabihf" if host.arch == "armv7" else host.libc
    named = {
        "macos": f"{host.arch}-apple-macos13",
        "windows": f"{host.arch}-pc-windows-msvc",
    }
    return named.get(host.system, f"{host.arch}-linux-{libc}")


def foreign_system(platform: Platform, host: Host) -> tuple[str, str] | None:
    """The system (or C library) that a library is for and that of the host, where they differ; else None."""
    if not platform.system or not host.system:
        return None
    if platform.system != host.system:
        return platform.system, host.system
    theirs = "musl" if platform.libc.startswith("musl") else "gnu"
    if host.system == "linux" and theirs != host.libc:
        return _LIBCS[theirs], _LIBCS[host.libc]
    return None


_LIBCS = {"gnu": "Linux with glibc", "musl": "Linux with musl"}


def _machine() -> str:
    # Windows has no uname, and the `platform` module is too slow to import on every run
    return os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]


def _libc(system: str) -> str:
    if system != "linux":
        return ""
    try:
        return "gnu" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    except (ValueError, OSError):
        # only glibc knows the name
        return "musl"


def _cpuinfo() -> str:
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as stream:
            lines: list[str] = []
            # a server lists hundreds of processors, and one is enough
            for line in stream:
                if line.isspace() and any(each.startswith(_FLAGS) for each in lines):
                    break
                lines.append(line)
            return "".join(lines)
    except OSError:
        return ""


# What the line of a CPU's features begins with: on x86, on ARM, on RISC-V.
_FLAGS = ("flags", "Features", "isa")


def _first_processor(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor; what old ARM kernels tell of all of them follows its block."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _model(fields: Mapping[str, str], arch: str) -> str:
    """What CPU it is, for people and for telling whose measurements are whose."""
    part = fields.get("CPU part")
    if part is not None:
        maker = fields.get("CPU implementer", "")
        return _ARM_CORES.get(part, f"Arm {part}") if maker == "0x41" else f"{maker} {part}".strip()
    model = fields.get("model name") or fields.get("uarch") or fields.get("isa") or arch
    detail = [fields[name] for name in ("cpu family", "model") if name in fields]
    return " ".join([model, *detail])


def _flags(fields: Mapping[str, str]) -> frozenset[str]:
    if "isa" in fields:
        return _riscv_extensions(fields["isa"])
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _riscv_extensions(isa: str) -> frozenset[str]:
    """`rv64imafdcv_zicsr_zba` as its extensions; `g` is the general ones together."""
    base, *long = isa.lower().split("_")
    letters = base.removeprefix("rv64").removeprefix("rv32")
    # a kernel may write a long name right behind the letters
    for start in "sxz":
        letters, found, rest = letters.partition(start)
        long += [found + rest] if found else []
    general = _GENERAL if "g" in letters else ()
    return frozenset([*letters, *general, *filter(None, long)])
