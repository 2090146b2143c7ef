"""CPU features under two names, LLVM's and the kernel's: what code for a target needs of the machine that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_Names = Mapping[str, tuple[str, ...]]

# Only features that code generation may use by itself are listed. What is reached through
# intrinsics that no kernel has (AES on a Raspberry Pi, where LLVM's cortex-a72 has it and the chip
# has not) and what only tunes code (`fast-gather`) says nothing about where a library runs.

# What most x86 kernels call as LLVM does, then those that they do not.
_X86: Final[_Names] = {
    **{
        name: (name,)
        for name in (
            "sse sse2 ssse3 sse4a popcnt avx avx2 fma fma4 f16c bmi2 movbe aes vaes vpclmulqdq gfni adx "
            "rdseed avx512f avx512cd avx512bw avx512dq avx512vl avx512ifma avx512vbmi xop"
        ).split()
    },
    "amx-bf16": ("amx_bf16",),
    "amx-int8": ("amx_int8",),
    "amx-tile": ("amx_tile",),
    "avx512bf16": ("avx512_bf16",),
    "avx512bitalg": ("avx512_bitalg",),
    "avx512fp16": ("avx512_fp16",),
    "avx512vbmi2": ("avx512_vbmi2",),
    "avx512vnni": ("avx512_vnni",),
    "avx512vp2intersect": ("avx512_vp2intersect",),
    "avx512vpopcntdq": ("avx512_vpopcntdq",),
    "avxvnni": ("avx_vnni",),
    "bmi": ("bmi1",),
    "lzcnt": ("abm",),
    "pclmul": ("pclmulqdq",),
    "rdrnd": ("rdrand",),
    "sha": ("sha_ni",),
    "sse3": ("pni",),
    "sse4.1": ("sse4_1",),
    "sse4.2": ("sse4_2",),
}

_AARCH64: Final[_Names] = {
    "fp-armv8": ("fp",),
    "neon": ("asimd",),
    "fullfp16": ("fphp", "asimdhp"),
    "fp16fml": ("asimdfhm",),
    "dotprod": ("asimddp",),
    "rdm": ("asimdrdm",),
    "complxnum": ("fcma",),
    "jsconv": ("jscvt",),
    "fptoint": ("frint",),
    "bf16": ("bf16",),
    "i8mm": ("i8mm",),
    "lse": ("atomics",),
    "lse2": ("uscat",),
    "rcpc": ("lrcpc",),
    "rcpc-immo": ("ilrcpc",),
    "sve": ("sve",),
    "sve2": ("sve2",),
    "f32mm": ("svef32mm",),
    "f64mm": ("svef64mm",),
    "sme": ("sme",),
    "sme2": ("sme2",),
}

_ARMV7: Final[_Names] = {
    "neon": ("neon",),
    "vfp2": ("vfp",),
    "vfp3": ("vfpv3",),
    "vfp4": ("vfpv4",),
    "hwdiv": ("idivt",),
    "hwdiv-arm": ("idiva",),
}

# The parts of V (zve…) and the length of its registers (zvl…) are left out: kernels before 6.8 list neither.
_RISCV: Final[_Names] = {
    name: (name,)
    for name in "m a f d c v zba zbb zbs zfh zfhmin zvfh zvfhmin zicond zacas zfa".split()
}

_TABLES: Final[Mapping[str, _Names]] = {
    "x86_64": _X86,
    "i386": _X86,
    "aarch64": _AARCH64,
    "armv7": _ARMV7,
    "riscv64": _RISCV,
    "riscv32": _RISCV,
}


# What converts float16 to float32, a vector at a time; empty where every CPU does. LLVM's code for 32-bit ARM
# converts one number at a time.
_HALVES: Final[Mapping[str, str]] = {"x86_64": "f16c", "i386": "f16c", "aarch64": ""}


def why_not_halves(arch: str, features: Iterable[str]) -> str:
    """Why code for a CPU with these features (by the kernel's names) does not convert float16 in vectors, or empty."""
    if arch not in _HALVES:
        return f"there is no code for {arch} that converts float16 in vectors"
    wanted = _HALVES[arch]
    return "" if not wanted or wanted in features else f"its CPU lacks {wanted}"


def kernel_names(arch: str, feature: str) -> tuple[str, ...]:
    """What the kernel calls one of LLVM's features; empty for one that code can do without."""
    return _TABLES.get(arch, {}).get(feature, ())


def needed_of(arch: str, features: Iterable[str]) -> tuple[str, ...]:
    """The kernel's names, sorted, of all that code with these features of LLVM's may use."""
    return tuple(sorted({name for each in features for name in kernel_names(arch, each)}))
