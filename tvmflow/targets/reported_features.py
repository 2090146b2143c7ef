"""CPU features as macOS and Windows report them, by the Linux kernel's names.

Neither system reports all features. A feature that is not reported may be present or not.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_KERNEL32 = "kernel32"

# A sysctl of macOS on x86 -> its words (see cpuid.c in XNU), as far as macOS 11 has them.
_MACOS_X86: Mapping[str, Mapping[str, str]] = {
    "machdep.cpu.features": {
        "SSE": "sse",
        "SSE2": "sse2",
        "SSE3": "pni",
        "SSSE3": "ssse3",
        "SSE4.1": "sse4_1",
        "SSE4.2": "sse4_2",
        "POPCNT": "popcnt",
        "AVX1.0": "avx",
        "FMA": "fma",
        "F16C": "f16c",
        "MOVBE": "movbe",
        "AES": "aes",
        "PCLMULQDQ": "pclmulqdq",
        "RDRAND": "rdrand",
    },
    "machdep.cpu.leaf7_features": {
        "BMI1": "bmi1",
        "BMI2": "bmi2",
        "AVX2": "avx2",
        "RDSEED": "rdseed",
        "ADX": "adx",
        "AVX512F": "avx512f",
        "AVX512CD": "avx512cd",
        "AVX512DQ": "avx512dq",
        "AVX512BW": "avx512bw",
        "AVX512VL": "avx512vl",
    },
    "machdep.cpu.extfeatures": {"LZCNT": "abm"},
}
# A sysctl of macOS on arm64, 1 or 0 (Apple's "Determining instruction set characteristics") -> features.
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
# PF_…_AVAILABLE in winnt.h. Windows returns 0 also for a number that it does not know: these came together.
_WINDOWS_X86: Mapping[int, str] = {
    36: "ssse3",
    37: "sse4_1",
    38: "sse4_2",
    39: "avx",
    40: "avx2",
    41: "avx512f",
}
# Every x86-64 CPU since 2011 has it.
_PF_SSSE3 = 36


class ReportedFeatures(NamedTuple):
    """The features that a system reports, and those of them that are present."""

    reported: frozenset[str]
    present: frozenset[str]


NOTHING = ReportedFeatures(frozenset(), frozenset())


def read_reported_features(system: str, arch: str) -> ReportedFeatures:
    """Return what this machine's system reports of its CPU, on macOS and Windows."""
    try:
        if system == "macos":
            return _read_macos(arch, _open_sysctl())
        if system == "windows" and arch == "x86_64":
            return _read_windows(_open_feature_query())
    except (AttributeError, ImportError, OSError, ValueError):
        # without a report a library is loaded all the same: it may run
        pass
    return NOTHING


def _read_macos(arch: str, sysctl: Callable[[str], bytes | None]) -> ReportedFeatures:
    reported: set[str] = set()
    present: set[str] = set()
    # under Rosetta x86 code may use more than is reported
    if arch == "x86_64" and not any(sysctl("sysctl.proc_translated") or b""):
        for text_name, names in _MACOS_X86.items():
            if text := sysctl(text_name):
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
        """Return the value of a name; None where there is no such name."""
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
