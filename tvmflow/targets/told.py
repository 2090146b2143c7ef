"""What macOS and Windows tell of a CPU's features, by the names that the Linux kernel has for them.

Neither tells of all. What is not told may be there or not: nothing is said about it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

_LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_KERNEL32 = "kernel32"

# A text of macOS on x86 -> its words (see cpuid.c in XNU), as far as macOS 11 has them already.
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
# A number of macOS on arm64, 1 or 0 (Apple's "Determining instruction set characteristics").
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
# PF_…_AVAILABLE in winnt.h. Windows says 0 too to a number that is newer than itself: these came together.
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


class Told(NamedTuple):
    """The features that a system tells of, and those of them that are there."""

    told: frozenset[str]
    there: frozenset[str]


NOTHING = Told(frozenset(), frozenset())


def told_by(system: str, arch: str) -> Told:
    """What this machine's system tells of its CPU, on macOS and Windows."""
    try:
        if system == "macos":
            return _of_macos(arch, _sysctl())
        if system == "windows" and arch == "x86_64":
            return _of_windows(_is_present())
    except (AttributeError, ImportError, OSError, ValueError):
        # it cannot be asked here, and a library may run all the same
        pass
    return NOTHING


def _of_macos(arch: str, ask: Callable[[str], bytes | None]) -> Told:
    told: set[str] = set()
    there: set[str] = set()
    # under Rosetta x86 code may use more than it is told of
    if arch == "x86_64" and not any(ask("sysctl.proc_translated") or b""):
        for text, words in _MACOS_X86.items():
            if answer := ask(text):
                told.update(words.values())
                given = answer.rstrip(b"\0").decode("ascii", "replace").split()
                there.update(words[word] for word in given if word in words)
    if arch == "aarch64":
        for name, flags in _MACOS_ARM.items():
            answer = ask(name)
            if answer is not None:
                told.update(flags)
                there.update(flags if any(answer) else ())
    return Told(frozenset(told), frozenset(there))


def _of_windows(is_present: Callable[[int], bool]) -> Told:
    if not is_present(_PF_SSSE3):
        return NOTHING
    there = {flag for number, flag in _WINDOWS_X86.items() if is_present(number)}
    return Told(frozenset(_WINDOWS_X86.values()), frozenset(there))


def _sysctl() -> Callable[[str], bytes | None]:
    import ctypes

    look = ctypes.CDLL(_LIBSYSTEM).sysctlbyname
    size = ctypes.POINTER(ctypes.c_size_t)
    look.argtypes = (
        *(ctypes.c_char_p, ctypes.c_void_p, size),
        *(ctypes.c_void_p, ctypes.c_size_t),
    )

    def ask(name: str) -> bytes | None:
        """What stands under a name; None where there is no such name."""
        length = ctypes.c_size_t(0)
        if look(name.encode(), None, ctypes.byref(length), None, 0):
            return None
        buffer = ctypes.create_string_buffer(length.value)
        if look(name.encode(), buffer, ctypes.byref(length), None, 0):
            return None
        return buffer.raw[: length.value]

    return ask


def _is_present() -> Callable[[int], bool]:
    import ctypes

    look = ctypes.CDLL(_KERNEL32).IsProcessorFeaturePresent
    look.argtypes = (ctypes.c_uint32,)
    return lambda number: bool(look(number))
