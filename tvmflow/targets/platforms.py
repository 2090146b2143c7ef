"""Platforms: architecture, system and C library of an LLVM triple, and the suffixes of library files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final, NamedTuple

# Other names of architectures, in triples and kernels -> the Linux kernel's name.
_ARCHS: Final[Mapping[str, str]] = {
    "amd64": "x86_64",
    "arm": "armv7",
    "arm64": "aarch64",
    "armv7a": "armv7",
    "armv7l": "armv7",
    "armv8l": "armv7",
    "i686": "i386",
}
# The prefix of a triple's component -> the system.
_SYSTEMS: Final[Mapping[str, str]] = {
    "android": "android",
    "darwin": "macos",
    "emscripten": "emscripten",
    "ios": "ios",
    "linux": "linux",
    "macos": "macos",
    "wasi": "wasi",
    "windows": "windows",
}
_SHARED: Final[Mapping[str, str]] = {"macos": ".dylib", "wasi": ".wasm", "windows": ".dll"}


class Platform(NamedTuple):
    """An architecture (the Linux kernel's name), a system, and its C library (`gnu`, `musl`, …) if known."""

    arch: str
    system: str
    libc: str

    @property
    def shared_suffix(self) -> str:
        """The suffix of shared libraries; of static libraries if the platform has no shared ones."""
        return _SHARED.get(self.system, ".so") if self.has_shared_libraries else self.static_suffix

    @property
    def address_bits(self) -> int:
        """The size of an address in bits."""
        return 64 if "64" in self.arch or self.arch == "s390x" else 32

    @property
    def has_shared_libraries(self) -> bool:
        """False if programs on this platform can only be linked statically."""
        return self.system not in ("ios", "none")

    @property
    def static_suffix(self) -> str:
        """The suffix of static libraries."""
        return ".lib" if self.libc == "msvc" else ".a"


@functools.lru_cache(maxsize=256)
def parse_triple(triple: str) -> Platform:
    """Return the platform of an LLVM triple; `system` is empty if the triple names no known system.

    >>> parse_triple("arm64-apple-macos13")
    Platform(arch='aarch64', system='macos', libc='')
    >>> parse_triple("thumbv7em-none-eabihf")
    Platform(arch='thumbv7em', system='none', libc='eabihf')
    """
    arch, *components = triple.lower().split("-")
    system = libc = ""
    for component in components:
        if system in ("linux", "windows") and not libc:
            libc = component
        for prefix, name in _SYSTEMS.items():
            if component.startswith(prefix):
                system = name
    if libc.startswith("android"):
        libc = ""
    if arch.startswith("thumb") and "none" in components:
        system, libc = "none", components[-1]  # a microcontroller, without a system
    return Platform(_ARCHS.get(arch, arch), system, libc)


# Linux's architecture name -> zig's, and the suffix that zig's C library name has for the hard-float ABI.
_ZIG_ARCHS: Final[Mapping[str, tuple[str, str]]] = {"armv7": ("arm", "eabihf"), "i386": ("x86", "")}

# System -> zig's name for it. Windows objects can be linked with either C library; zig has only GNU's headers.
_ZIG_SYSTEMS: Final[Mapping[str, str]] = {
    "ios": "ios.13.0",
    "macos": "macos.13.0",
    "wasi": "wasi",
    "windows": "windows-gnu",
}


def zig_target(triple: str) -> str:
    """Return the target name with which zig compiles C for a triple.

    >>> zig_target("armv7-linux-gnueabihf"), zig_target("aarch64-unknown-linux-musl")
    ('arm-linux-gnueabihf', 'aarch64-linux-musl')
    >>> zig_target("arm64-apple-macos13"), zig_target("x86_64-pc-windows-msvc")
    ('aarch64-macos.13.0', 'x86_64-windows-gnu')
    """
    platform = parse_triple(triple)
    arch, end = _ZIG_ARCHS.get(platform.arch, (platform.arch, ""))
    if platform.system == "android":
        # zig has no bionic headers, and its Android code calls atomics functions that no library contains.
        return f"{arch}-linux-musl{end.removesuffix('hf')}"
    if platform.system == "none":
        return f"thumb-freestanding-{platform.libc}"
    if triple.endswith("-simulator"):
        return f"{arch}-ios.14.0-simulator"
    if platform.system in _ZIG_SYSTEMS:
        return f"{arch}-{_ZIG_SYSTEMS[platform.system]}"
    libc = "musl" if platform.libc.startswith("musl") else "gnu"
    return f"{arch}-linux-{libc}{end}"
