"""Levels: sets of CPU instructions of one architecture, for which one library holds code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.types import Json
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple


class Level(NamedTuple):
    """A set of CPU instructions.

    Attributes:
        arch: The architecture, by the Linux kernel's name.
        cpu: LLVM's CPU.
        features: LLVM's features besides those of the CPU.
        description: For people.
        flags: The features that code for it may use and code for the level before it may not, by the kernel's names.
    """

    arch: str
    cpu: str
    features: tuple[str, ...] = ()
    description: str = ""
    flags: str = ""


_ARMV8_2: Final = ("+v8.2a", "+fullfp16", "+dotprod")

LEVELS: Final[Mapping[str, Level]] = {
    "x86-64-v2": Level(
        "x86_64",
        "x86-64-v2",
        description="SSE4.2",
        flags="sse sse2 pni ssse3 sse4_1 sse4_2 popcnt",
    ),
    "x86-64-v3": Level(
        "x86_64",
        "x86-64-v3",
        description="AVX2 and FMA",
        flags="abm avx avx2 bmi1 bmi2 f16c fma movbe",
    ),
    "x86-64-v4": Level(
        "x86_64",
        "x86-64-v4",
        description="AVX-512",
        flags="avx512bw avx512cd avx512dq avx512f avx512vl",
    ),
    "armv8-a": Level("aarch64", "generic", description="every 64-bit ARM", flags="asimd fp"),
    "dotprod": Level(
        "aarch64",
        "generic",
        _ARMV8_2,
        description="Armv8.2 with products of int8",
        flags="asimddp asimdhp asimdrdm atomics fphp",
    ),
    "i8mm": Level(
        "aarch64",
        "generic",
        (*_ARMV8_2, "+i8mm", "+bf16"),
        description="with products of matrices of int8",
        flags="bf16 i8mm",
    ),
}
"""By name; those of one architecture in order, each with all instructions of those before it."""

_TRIPLES: Final = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


def sort_levels(names: Sequence[str]) -> tuple[str, ...]:
    """Return levels in order, the one that most CPUs have first.

    >>> sort_levels(["x86-64-v4", "x86-64-v2"])
    ('x86-64-v2', 'x86-64-v4')
    """
    return tuple(sorted(names, key=list(LEVELS).index))


def flags_of(level: str) -> frozenset[str]:
    """Return the features that code for a level may use, by the kernel's names."""
    names, arch = list(LEVELS), LEVELS[level].arch
    known = (LEVELS[name] for name in names[: names.index(level) + 1])
    return frozenset(flag for each in known if each.arch == arch for flag in each.flags.split())


def level_target(base: TvmTarget, level: str) -> dict[str, Json]:
    """Return TVM's target of a level.

    Args:
        base: A target with the triple that is built for; an empty one for Linux with glibc.
        level: The name of the level.
    """
    arch, cpu, features, *_ = LEVELS[level]
    target = {"kind": "llvm", "mtriple": _TRIPLES[arch], **base, "mcpu": cpu}
    target.pop("mattr", None)
    return {**target, "mattr": list(features)} if features else target


def find_problem(base: TvmTarget, names: Sequence[str]) -> str:
    """Return why a target cannot have these levels, or an empty string."""
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
