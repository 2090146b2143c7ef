"""What an LLVM triple says of the system that a library is for: how its files are called and linked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tvmflow.values import Json

# Other names of the same architecture, as triples and kernels write them.
_ARCHS: Final[Mapping[str, str]] = {
    "amd64": "x86_64",
    "arm": "armv7",
    "arm64": "aarch64",
    "armv7a": "armv7",
    "armv7l": "armv7",
    "armv8l": "armv7",
    "i686": "i386",
}
# What a part of a triple begins with -> the system.
_SYSTEMS: Final[Mapping[str, str]] = {
    "android": "android",
    "darwin": "macos",
    "emscripten": "emscripten",
    "linux": "linux",
    "macos": "macos",
    "wasi": "wasi",
    "windows": "windows",
}
_SHARED: Final[Mapping[str, str]] = {"macos": ".dylib", "windows": ".dll"}


class Platform(NamedTuple):
    """An architecture as the Linux kernel calls it, a system, and its C library (`gnu`, `musl`, `msvc`, … or nothing)."""

    arch: str
    system: str
    libc: str

    @property
    def shared_suffix(self) -> str:
        """What the names of shared libraries end in."""
        return _SHARED.get(self.system, ".so")

    @property
    def static_suffix(self) -> str:
        """What the names of static libraries end in."""
        return ".lib" if self.libc == "msvc" else ".a"


def cpu_of(tvm: Mapping[str, Json]) -> Mapping[str, Json]:
    """The CPU that a target (TVM's mapping) runs on: itself, or a GPU's host."""
    found: Mapping[str, Json] = tvm.get("host", tvm)
    return found


def host_triple(tvm: Mapping[str, Json]) -> str:
    """The triple of that CPU; may be empty."""
    return str(cpu_of(tvm).get("mtriple", ""))


def platform_of(triple: str) -> Platform:
    """The platform of an LLVM triple; its `system` is empty where the triple names none that we know.

    >>> platform_of("arm64-apple-macos13")
    Platform(arch='aarch64', system='macos', libc='')
    """
    arch, *parts = triple.lower().split("-")
    system = libc = ""
    for part in parts:
        if system in ("linux", "windows") and not libc:
            libc = part
        for word, name in _SYSTEMS.items():
            if part.startswith(word):
                system = name
    if libc.startswith("android"):
        libc = ""
    return Platform(_ARCHS.get(arch, arch), system, libc)
