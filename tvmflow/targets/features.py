"""CPU features, named as by LLVM and as in /proc/cpuinfo; ISA levels, which are sets of features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

_Names = Mapping[str, tuple[str, ...]]

# Only features that code generation may use on its own are listed. Two kinds do not decide where a library runs. Some
# features are used only through intrinsics, which no kernel has (AES on a Raspberry Pi: LLVM's cortex-a72 has it, the
# chip does not). Others only tune code (`fast-gather`).

# First features that LLVM and Linux name alike, then the others.
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

# The vector extension's subsets (zve…) and register lengths (zvl…) are omitted: kernels before 6.8 list neither.
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

# The feature for vector conversion of float16 to float32; empty if every CPU has it. For 32-bit ARM, LLVM converts
# one element at a time, so there is no entry.
_FLOAT16: Final[Mapping[str, str]] = {"x86_64": "f16c", "i386": "f16c", "aarch64": ""}


def slow_float16_reason(arch: str, features: Iterable[str]) -> str:
    """Return why code for a CPU converts float16 one element at a time; names are the Linux kernel's."""
    if arch not in _FLOAT16:
        return f"there is no code for {arch} that converts float16 in vectors"
    needed = _FLOAT16[arch]
    return "" if not needed or needed in features else f"its CPU lacks {needed}"


# The features for multiplying bfloat16 with float32 accumulators.
_BFLOAT16: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("avx512_bf16", "avx512vl"),
    "aarch64": ("bf16",),
}


def no_bfloat16_reason(arch: str, features: Iterable[str]) -> str:
    """Return why a CPU cannot multiply bfloat16, or an empty string."""
    if arch not in _BFLOAT16:
        return f"there is no code for {arch} that multiplies bfloat16"
    missing = [name for name in _BFLOAT16[arch] if name not in features]
    return f"its CPU lacks {', '.join(missing)}" if missing else ""


def no_float16_reason(arch: str, features: Iterable[str]) -> str:
    """Return why a CPU cannot run float16 kernels, or an empty string."""
    if arch != "aarch64":
        return f"there is no code for {arch} that adds float16"
    missing = [name for name in _AARCH64["fullfp16"] if name not in features]
    if not missing:
        return ""
    return f"its CPU lacks {', '.join(missing)} (Armv8.2 has it: cortex-a55, neoverse-n1 and later)"


def kernel_feature_names(arch: str, feature: str) -> tuple[str, ...]:
    """Return the /proc/cpuinfo names of an LLVM feature; empty if it does not decide where code runs."""
    return _TABLES.get(arch, {}).get(feature, ())


def required_features(arch: str, features: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted /proc/cpuinfo names of all features that code with LLVM's `features` may use."""
    names = {name for feature in features for name in kernel_feature_names(arch, feature)}
    return tuple(sorted(names))


def list_kernel_names(arch: str) -> frozenset[str]:
    """Return the /proc/cpuinfo names of all features that decide where an architecture's code runs."""
    return frozenset(name for names in _TABLES.get(arch, {}).values() for name in names)


# ---------------------------------------------------------------- ISA levels
# Sets of CPU instructions of one architecture; a multi-ISA library has code for several of them.


class IsaLevel(NamedTuple):
    """A set of CPU instructions: an LLVM CPU plus further features.

    `flags` are the features, named as in /proc/cpuinfo, that this level adds to the previous one.
    """

    arch: str
    cpu: str
    description: str
    flags: str
    features: tuple[str, ...] = ()


_V2: Final = "sse sse2 pni ssse3 sse4_1 sse4_2 popcnt"
_V3: Final = "abm avx avx2 bmi1 bmi2 f16c fma movbe"
_V4: Final = "avx512bw avx512cd avx512dq avx512f avx512vl"
_DOTPROD: Final = "asimddp asimdhp asimdrdm atomics fphp"
_ARMV8_2: Final = ("+v8.2a", "+fullfp16", "+dotprod")
_GENERIC_ARM: Final = IsaLevel("aarch64", "generic", "every 64-bit ARM", "asimd fp")

LEVELS: Final[Mapping[str, IsaLevel]] = {
    "x86-64-v2": IsaLevel("x86_64", "x86-64-v2", "SSE4.2", _V2),
    "x86-64-v3": IsaLevel("x86_64", "x86-64-v3", "AVX2 and FMA", _V3),
    "x86-64-v4": IsaLevel("x86_64", "x86-64-v4", "AVX-512", _V4),
    "armv8-a": _GENERIC_ARM,
    "dotprod": _GENERIC_ARM._replace(
        description="Armv8.2 with products of int8", flags=_DOTPROD, features=_ARMV8_2
    ),
    "i8mm": _GENERIC_ARM._replace(
        description="with products of matrices of int8",
        flags="bf16 i8mm",
        features=(*_ARMV8_2, "+i8mm", "+bf16"),
    ),
}
"""ISA levels by name; within an architecture in ascending order, each including the previous one."""

_TRIPLES: Final = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


def sort_isa_levels(names: Sequence[str]) -> tuple[str, ...]:
    """Return levels in ascending order: first the one that most CPUs support.

    >>> sort_isa_levels(["x86-64-v4", "x86-64-v2"])
    ('x86-64-v2', 'x86-64-v4')
    """
    return tuple(sorted(names, key=list(LEVELS).index))


def flags_of(level: str) -> frozenset[str]:
    """Return the features that code for a level may use, named as in /proc/cpuinfo."""
    names, arch = list(LEVELS), LEVELS[level].arch
    known = (LEVELS[name] for name in names[: names.index(level) + 1])
    return frozenset(flag for each in known if each.arch == arch for flag in each.flags.split())


def isa_level_config(base: TvmTarget, level: str) -> dict[str, Json]:
    """Return TVM's target for a level, with the base's triple, or for Linux with glibc without one."""
    known = LEVELS[level]
    target = {"kind": "llvm", "mtriple": _TRIPLES[known.arch], **base, "mcpu": known.cpu}
    target.pop("mattr", None)
    return {**target, "mattr": list(known.features)} if known.features else target


def find_problem(base: TvmTarget, names: Sequence[str]) -> str:
    """Return why these levels are invalid for a target, or an empty string."""
    if len(names) == 1:
        return "needs two levels or more; for one, name it as the CPU of the target"
    archs = {LEVELS[name].arch for name in names}
    if len(archs) > 1:
        return f"has levels of several architectures: {', '.join(sorted(archs))}"
    if base.get("kind", "llvm") != "llvm":
        return f"is for CPUs, and the target's kind is {base['kind']}"
    triple = cpu_triple(base)
    arch = parse_triple(triple).arch if triple else ""
    if triple and arch not in archs:
        return f"has levels of {', '.join(archs)}, and the target is for {arch}"
    return ""
