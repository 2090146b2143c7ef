"""The host: the properties of this machine that matter to compiled code. Reading them is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import Json
from tvmflow.targets.platforms import Platform, parse_triple
from tvmflow.targets.threads import count_usable_cpus

CPU_VARIABLE = "TVMFLOW_CPU"
"""The environment variable that caps this machine's CPU features at those of an ISA level.

C libraries read this variable, too (`targets/c_runtime/cpu.c`).
"""

_CPUINFO = "/proc/cpuinfo"

# sys.platform -> the system's name in a Platform; other systems keep their sys.platform name.
_SYSTEMS = {"darwin": "macos", "win32": "windows"}

# Arm's part numbers as the kernel reports them. A core of another vendor is shown by its number.
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

# The RISC-V extensions that the letter `g` stands for.
_GENERAL = ("i", "m", "a", "f", "d", "zicsr", "zifencei")


class Host(NamedTuple):
    """The properties of this machine that matter to compiled code.

    `arch`, `system` and `libc` are as in a `Platform`. `flags` are the CPU's features, named as in /proc/cpuinfo;
    empty if unknown. `reported` are the features whose presence or absence the system reports; None if it reports all.
    `capped_to` is the ISA level to which `TVMFLOW_CPU` limits the features.
    """

    arch: str
    model: str
    flags: frozenset[str]
    cores: int
    system: str = "linux"
    libc: str = "gnu"
    reported: frozenset[str] | None = None
    capped_to: str = ""

    @property
    def triple(self) -> str:
        """The LLVM target triple of this machine."""
        libc = f"{self.libc}eabihf" if self.arch == "armv7" else self.libc
        suffixes = {"macos": "apple-macos13", "windows": "pc-windows-msvc"}
        return f"{self.arch}-{suffixes.get(self.system, f'linux-{libc}')}"

    def find_missing(self, features: Iterable[str]) -> list[str]:
        """Return the given features (named as in /proc/cpuinfo) that the CPU certainly lacks."""
        absent = [name for name in features if name not in self.flags]
        if self.reported is None:
            return absent if self.flags else []
        return [name for name in absent if name in self.reported]

    def fingerprint(self) -> Json:
        """Return the facts that determine the target `host`; equal on all machines with this CPU."""
        reported = None if self.reported is None else sorted(self.reported)
        fields = {**self._asdict(), "flags": sorted(self.flags), "reported": reported}
        del fields["cores"]
        return fields


def read_host() -> Host:
    """Return this machine as its system describes it, limited by `TVMFLOW_CPU` (see `cap_host`)."""
    host, level = _read_whole_host(), os.environ.get(CPU_VARIABLE, "")
    return cap_host(host, level) if level else host


def cap_host(host: Host, level: str) -> Host:
    """Return a machine as if its CPU had only a level's features, or raise EnvironmentProblem.

    The CPU's model name mentions the level, because measurements and results are stored under this name.
    """
    # Imported here, because only a run with a cap needs it.
    from tvmflow.targets.features import LEVELS, flags_of, list_kernel_names

    names = [name for name, known in LEVELS.items() if known.arch == host.arch]
    if level not in names:
        choices = f"set it to {' or '.join(names)}, or unset it" if names else "unset it"
        raise EnvironmentProblem(
            f"{CPU_VARIABLE} is {level!r}, which is not a level of {host.arch}", fix=choices
        )
    flags = flags_of(level)
    if missing := host.find_missing(sorted(flags)):
        raise EnvironmentProblem(
            f"{CPU_VARIABLE} is {level}, and this machine's CPU lacks {', '.join(missing)}",
            fix=f"it can only take features away: name a lower level than {level}, or unset it",
        )
    return host._replace(
        model=f"{host.model} as {level}",
        flags=host.flags - list_kernel_names(host.arch) | flags,
        reported=None,
        capped_to=level,
    )


def _read_whole_host() -> Host:
    system = _SYSTEMS.get(sys.platform, sys.platform)
    # Windows has no uname, and the `platform` module is too slow to import on every run
    has_uname = hasattr(os, "uname")
    machine = os.uname().machine if has_uname else os.environ["PROCESSOR_ARCHITECTURE"]
    host = parse_host(_read_cpuinfo(), machine, count_usable_cpus(), system, _find_libc(system))
    if system not in _SYSTEMS.values():
        return host
    features = read_reported_features(system, host.arch)
    return host._replace(flags=features.present, reported=features.reported)


def parse_host(
    cpuinfo: str, machine: str, cores: int, system: str = "linux", libc: str = "gnu"
) -> Host:
    """Return the machine that a /proc/cpuinfo text describes; `machine` is the output of `uname -m`."""
    # `fields` are of the first processor, plus the ones that old ARM kernels list at the end for all processors.
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    arch = parse_triple(machine).arch
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    return Host(
        arch=arch,
        model=_model_name(fields, arch),
        flags=_parse_riscv_isa(fields["isa"]) if "isa" in fields else flags,
        cores=cores,
        system=system,
        libc=libc,
    )


_LIBCS = {"gnu": "Linux with glibc", "musl": "Linux with musl"}


class SystemMismatch(NamedTuple):
    """The systems (or C libraries) of a compiled library and of the host, which differ."""

    library: str
    host: str


def find_system_mismatch(platform: Platform, host: Host) -> SystemMismatch | None:
    """Return the library's and the host's systems if the library cannot run on the host's; else None."""
    if not platform.system or not host.system:
        return None
    if platform.system != host.system:
        return SystemMismatch(platform.system, host.system)
    libc = "musl" if platform.libc.startswith("musl") else "gnu"
    if host.system == "linux" and libc != host.libc:
        return SystemMismatch(_LIBCS[libc], _LIBCS[host.libc])
    return None


def _find_libc(system: str) -> str:
    if system != "linux":
        return ""
    try:
        return "gnu" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    except (ValueError, OSError):
        # Only glibc defines this name.
        return "musl"


def _read_cpuinfo() -> str:
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as stream:
            lines: list[str] = []
            # A server lists hundreds of processors, but one is enough.
            for line in stream:
                if line.isspace() and any(other.startswith(_FLAGS) for other in lines):
                    break
                lines.append(line)
            return "".join(lines)
    except OSError:
        return ""


# The names of the line with CPU features: on x86, ARM and RISC-V.
_FLAGS = ("flags", "Features", "isa")


def _model_name(fields: Mapping[str, str], arch: str) -> str:
    """Return the CPU's model, which people read, and by which machines' measurements are told apart."""
    part = fields.get("CPU part")
    if part is not None:
        vendor = fields.get("CPU implementer", "")
        if vendor == "0x41":
            return _ARM_CORES.get(part, f"Arm {part}")
        return f"{vendor} {part}".strip()
    model = fields.get("model name") or fields.get("uarch") or fields.get("isa") or arch
    detail = [fields[name] for name in ("cpu family", "model") if name in fields]
    return " ".join([model, *detail])


def _parse_riscv_isa(isa: str) -> frozenset[str]:
    """Return the extensions in an ISA string such as `rv64imafdcv_zicsr_zba`."""
    base, *long_names = isa.lower().split("_")
    letters = base.removeprefix("rv64").removeprefix("rv32")
    # Some kernels write a multi-letter extension directly after the single letters.
    for start in "sxz":
        letters, separator, rest = letters.partition(start)
        long_names += [separator + rest] if separator else []
    general = _GENERAL if "g" in letters else ()
    return frozenset([*letters, *general, *filter(None, long_names)])


# ---------------------------------------------------------------- reported features
# CPU features that macOS and Windows report, named as in Linux's /proc/cpuinfo.
#
# Neither system reports all features, so a feature that is not reported may still be present.

_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_KERNEL32 = "kernel32"

# An x86 sysctl of macOS -> the words that macOS 11 can report there (see cpuid.c in XNU).
_MACOS_X86: Mapping[str, str] = {
    "machdep.cpu.features": "SSE SSE2 SSE3 SSSE3 SSE4.1 SSE4.2 POPCNT AVX1.0 FMA F16C MOVBE AES PCLMULQDQ RDRAND",
    "machdep.cpu.leaf7_features": "BMI1 BMI2 AVX2 RDSEED ADX AVX512F AVX512CD AVX512DQ AVX512BW AVX512VL",
    "machdep.cpu.extfeatures": "LZCNT",
}
# Names in macOS -> names in /proc/cpuinfo, where these are not just the former in lower case.
_RENAMED = {"SSE3": "pni", "SSE4.1": "sse4_1", "SSE4.2": "sse4_2", "AVX1.0": "avx", "LZCNT": "abm"}
# An arm64 sysctl of macOS, 0 or 1 (Apple's "Determining instruction set characteristics") -> features.
_MACOS_ARM: Mapping[str, tuple[str, ...]] = {
    "hw.optional.arm.FEAT_BF16": ("bf16",),
    "hw.optional.arm.FEAT_DotProd": ("asimddp",),
    "hw.optional.arm.FEAT_FCMA": ("fcma",),
    "hw.optional.arm.FEAT_FHM": ("asimdfhm",),
    "hw.optional.arm.FEAT_FP16": ("fphp", "asimdhp"),
    "hw.optional.arm.FEAT_FRINTTS": ("frint",),
    "hw.optional.arm.FEAT_I8MM": ("i8mm",),
    "hw.optional.arm.FEAT_JSCVT": ("jscvt",),
    "hw.optional.arm.FEAT_LRCPC": ("lrcpc",),
    "hw.optional.arm.FEAT_LRCPC2": ("ilrcpc",),
    "hw.optional.arm.FEAT_LSE": ("atomics",),
    "hw.optional.arm.FEAT_LSE2": ("uscat",),
    "hw.optional.arm.FEAT_RDM": ("asimdrdm",),
    "hw.optional.arm.FEAT_SME": ("sme",),
    "hw.optional.arm.FEAT_SME2": ("sme2",),
}
# PF_…_AVAILABLE in winnt.h. Windows returns 0 for an unknown number, too; all of these were introduced together.
_WINDOWS_X86 = {36: "ssse3", 37: "sse4_1", 38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f"}
# Every x86-64 CPU since 2011 has SSSE3: if Windows denies it, it does not know these numbers.
_PF_SSSE3 = 36


class ReportedFeatures(NamedTuple):
    """The features whose presence a system reports, and those among them that are present."""

    reported: frozenset[str]
    present: frozenset[str]


NOTHING = ReportedFeatures(frozenset(), frozenset())


def read_reported_features(system: str, arch: str) -> ReportedFeatures:
    """Return the CPU features that macOS or Windows reports for this machine."""
    try:
        if system == "macos":
            return _read_macos(arch, _open_sysctl())
        if system == "windows" and arch == "x86_64":
            return _read_windows(_open_feature_query())
    except (AttributeError, ImportError, OSError, ValueError):
        # Without a report, a library is loaded all the same: it may run.
        pass
    return NOTHING


def _read_macos(arch: str, sysctl: Callable[[str], bytes | None]) -> ReportedFeatures:
    reported: set[str] = set()
    present: set[str] = set()
    # Rosetta runs x86 code that uses more than the features it reports.
    if arch == "x86_64" and not any(sysctl("sysctl.proc_translated") or b""):
        for text_name, known in _MACOS_X86.items():
            if text := sysctl(text_name):
                names = {word: _RENAMED.get(word, word.lower()) for word in known.split()}
                reported.update(names.values())
                words = text.rstrip(b"\0").decode("ascii", "replace").split()
                present.update(names[word] for word in words if word in names)
    if arch == "aarch64":
        for number_name, flags in _MACOS_ARM.items():
            number = sysctl(number_name)
            if number is not None:
                reported.update(flags)
                present.update(flags if any(number) else ())
    return ReportedFeatures(frozenset(reported), frozenset(present))


def _read_windows(is_present: Callable[[int], bool]) -> ReportedFeatures:
    if not is_present(_PF_SSSE3):
        return NOTHING
    present = {flag for number, flag in _WINDOWS_X86.items() if is_present(number)}
    return ReportedFeatures(frozenset(_WINDOWS_X86.values()), frozenset(present))


def _open_sysctl() -> Callable[[str], bytes | None]:
    import ctypes

    sysctlbyname = ctypes.CDLL(_LIBSYSTEM).sysctlbyname
    buffer_type, size_type = ctypes.c_void_p, ctypes.c_size_t
    size_pointer = ctypes.POINTER(size_type)
    sysctlbyname.argtypes = (ctypes.c_char_p, buffer_type, size_pointer, buffer_type, size_type)

    def sysctl(name: str) -> bytes | None:
        """Return the value of a name; None if there is no such name."""
        length = ctypes.c_size_t(0)
        if sysctlbyname(name.encode(), None, ctypes.byref(length), None, 0):
            return None
        buffer = ctypes.create_string_buffer(length.value)
        if sysctlbyname(name.encode(), buffer, ctypes.byref(length), None, 0):
            return None
        return buffer.raw[: length.value]

    return sysctl


def _open_feature_query() -> Callable[[int], bool]:
    import ctypes

    is_processor_feature_present = ctypes.CDLL(_KERNEL32).IsProcessorFeaturePresent
    is_processor_feature_present.argtypes = (ctypes.c_uint32,)
    return lambda number: bool(is_processor_feature_present(number))
