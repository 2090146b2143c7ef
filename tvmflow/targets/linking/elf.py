"""ELF: shared libraries for Linux and Android."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.targets.linking._base import Interface, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> the linker's name of the object format.
_EMULATIONS: Final[Mapping[str, str]] = {
    "x86_64": "elf_x86_64",
    "i386": "elf_i386",
    "aarch64": "aarch64linux",
    "armv7": "armelf_linux_eabi",
    "riscv64": "elf64lriscv",
}
ARCHS: Final = tuple(_EMULATIONS)

# The libraries that compiled kernels call into (memcpy, expf, …).
_ANDROID: Final = ("libc.so", "libm.so")
_GLIBC: Final = ("libc.so.6", "libm.so.6")

# What LLVM calls on 32-bit machines for 64-bit numbers: in libgcc, which every Linux with C++ has.
_INTEGER_HELPERS: Final = (
    *(f"__{name}3" for name in "divdi moddi udivdi umoddi ashldi lshrdi ashrdi muldi".split()),
    *(f"__fix{sign}{kind}di" for sign in ("", "uns") for kind in ("sf", "df")),
    *(f"__float{sign}di{kind}" for sign in ("", "un") for kind in ("sf", "df")),
    "__divmoddi4",
    "__udivmoddi4",
)
# What LLVM calls to divide on 32-bit ARM where it does not take a triple for one with ARM's names.
_DIVISIONS: Final = ("__divsi3", "__modsi3", "__udivsi3", "__umodsi3")
# ARM's names of these functions and of division.
_ARM_HELPERS: Final = tuple(
    f"__aeabi_{name}"
    for name in (
        "idiv uidiv idivmod uidivmod ldivmod uldivmod l2f l2d ul2f ul2d f2lz f2ulz d2lz d2ulz llsl llsr lasr lmul"
    ).split()
)
_HELPERS: Final[Mapping[str, tuple[str, ...]]] = {
    "armv7": (*_INTEGER_HELPERS, *_DIVISIONS, *_ARM_HELPERS),
    "i386": _INTEGER_HELPERS,
}


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a shared library. The arguments are those of `Linker.link`."""
    stubs = [
        link_stub(folder, f"stub-{library}", library, platform.arch, ())
        for library in (
            *_system_libraries(platform),
            *(_threads_libraries(platform) if interface else ()),
        )
    ]
    helpers = []
    if platform.arch in _HELPERS and platform.system == "linux":
        library, symbols = "libgcc_s.so.1", _HELPERS[platform.arch]
        stub = link_stub(folder, f"stub-{library}", library, platform.arch, symbols)
        helpers = ["--as-needed", stub]
    visible = []
    if interface:
        public = "; ".join(interface.functions)
        (folder / "public").write_text(f"{{ global: {public}; local: *; }};\n")
        visible = ["--version-script=public", "-soname", interface.file]
    options = ["--strip-all", *visible, *names, "--no-as-needed", *stubs, *helpers]
    _run_lld(folder, platform.arch, "linked.so", options)
    return "linked.so"


def link_program(folder: Path, names: Sequence[str], arch: str) -> str:
    """Link a static executable in a folder, and return its name."""
    options = ["-static", "--build-id=none", "--strip-all", "--gc-sections"]
    # zig has these functions under ARM's names alone
    aliases = ["--defsym=__divsi3=__aeabi_idiv", "--defsym=__udivsi3=__aeabi_uidiv"]
    options += aliases if arch == "armv7" else []
    run_zig(folder, "ld.lld", "-m", _EMULATIONS[arch], *options, "-o", "linked", *names)
    return "linked"


def _system_libraries(platform: Platform) -> tuple[str, ...]:
    if platform.system == "android":
        return _ANDROID
    if platform.libc.startswith("musl"):
        # musl is libc and libm in one, under this name in the distributions that use it
        return (f"libc.musl-{platform.arch}.so.1",)
    return _GLIBC


def _threads_libraries(platform: Platform) -> tuple[str, ...]:
    """Return the library that has threads where libc has none: before glibc 2.34, and empty since then."""
    return ("libpthread.so.0",) if platform.libc.startswith("gnu") else ()


def link_stub(
    folder: Path, name: str, soname: str, arch: str, symbols: Sequence[str], *, address: int = 0
) -> str:
    """Link an empty library in a folder, which makes a loader bring the real one, and return its name.

    Args:
        folder: Where it is linked.
        name: Its file name.
        soname: The name of the real library.
        arch: The architecture.
        symbols: The symbols that it defines.
        address: The address of all symbols.
    """
    (folder / "empty").touch()
    definitions = [f"--defsym={symbol}={address}" for symbol in symbols]
    _run_lld(folder, arch, name, ["-soname", soname, *definitions, "--format=binary", "empty"])
    return name


def _run_lld(folder: Path, arch: str, output: str, arguments: Sequence[str]) -> None:
    options = ["-shared", "--build-id=none", "--hash-style=gnu"]
    run_zig(folder, "ld.lld", "-m", _EMULATIONS[arch], *options, "-o", output, *arguments)
