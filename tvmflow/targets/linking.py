"""Links object files into shared libraries for any platform with what is in the `ziglang` wheel: no compiler needed.

The linker runs in a folder of its own with relative names, without build id, time and symbols, so
that the same objects give the same bytes anywhere. No SDK is needed: what a library takes from
its system is known by name alone, and its symbols ask for no version of it, so that none is too old.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import StageError
from tvmflow.targets import coff, toolchain
from tvmflow.targets.host import read_host
from tvmflow.targets.platforms import Platform, host_triple, platform_of
from tvmflow.values import Json

# ---------------------------------------------------------------- what there is

# Architecture -> the ELF linker's name of the object format.
_EMULATIONS: Final[Mapping[str, str]] = {
    "x86_64": "elf_x86_64",
    "i386": "elf_i386",
    "aarch64": "aarch64linux",
    "armv7": "armelf_linux_eabi",
    "riscv64": "elf64lriscv",
}
# C library or system -> how its static libraries are laid out, where not as GNU's.
_ARCHIVE_LAYOUTS: Final[Mapping[str, str]] = {"msvc": "coff", "macos": "darwin"}
_MACHO: Final[Mapping[str, str]] = {"x86_64": "x86_64-macos", "aarch64": "aarch64-macos"}


class _Windows(NamedTuple):
    """What an architecture is called by the makers of import libraries and by the linker."""

    importing: str
    linking: str


_PE: Final[Mapping[str, _Windows]] = {
    "x86_64": _Windows("i386:x86-64", "x64"),
    "aarch64": _Windows("arm64", "arm64"),
}


def why_not(triple: str) -> str:
    """Why nothing can be linked for this triple, or empty."""
    platform = platform_of(triple)
    archs = _ARCHS.get(platform.system)
    if archs is None:
        known = ", ".join(_ARCHS)
        return f"no linker is set up for {triple or 'a target without mtriple'} (there are {known})"
    if platform.arch not in archs:
        return f"no linker is set up for {platform.arch} on {platform.system} (there are {', '.join(archs)})"
    return ""


def link_shared(
    objects: Sequence[Path], output: Path, triple: str, foreign: Mapping[str, Json] | None = None
) -> None:
    """Link `objects` into the shared library `output` for `triple`; with the toolchain `foreign`, if one is given.

    Raises StageError.
    """
    reason = "" if foreign else why_not(triple)
    if reason:
        raise StageError(reason, fix="name a linker of your own: `toolchain: {linker: …}`")
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch)
        names = [path.name for path in sorted(objects, key=lambda path: path.name)]
        for path in objects:
            (folder / path.name).symlink_to(path.resolve())
        if foreign:
            made = toolchain.link(folder, names, foreign)
        else:
            platform = platform_of(triple)
            made = _LINKERS[platform.system](folder, names, platform)
        shutil.move(folder / made, output)


def write_library(built: Any, output: Path, tvm: Mapping[str, Json]) -> None:
    """Link what TVM compiled (a model or a kernel) for its mapping of a target; no compiler is needed. Raises StageError."""

    def link(made: str, objects: list[str], **_: Any) -> None:
        link_shared([Path(each) for each in objects], Path(made), host_triple(tvm))

    built.export_library(str(output), fcompile=link)


def archive_static(objects: Sequence[Path], output: Path, triple: str) -> None:
    """Put `objects` into the static library `output` for `triple`, with an index of their symbols. Raises StageError."""
    platform = platform_of(triple)
    layout = _ARCHIVE_LAYOUTS.get(platform.libc) or _ARCHIVE_LAYOUTS.get(platform.system, "gnu")
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch)
        names = [path.name for path in sorted(objects, key=lambda path: path.name)]
        for path in objects:
            (folder / path.name).symlink_to(path.resolve())
        # D: no times and owners, c: without a word that it is new
        command = [sys.executable, "-m", "ziglang", "ar", f"--format={layout}", "Dcr", "made"]
        done = subprocess.run(
            [*command, *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise StageError(
                f"making a static library failed: {done.stderr.strip() or done.returncode}",
                fix="run `tvmflow doctor`; it tries the linker by itself",
            )
        shutil.move(folder / "made", output)


def complaint_about(source: Path, includes: Sequence[Path]) -> str:
    """What a C compiler says first against a file, as `LINE: what`; empty when it is correct C."""
    command = [sys.executable, "-m", "ziglang", "cc", "-c", "-O0", "-w"]
    command += [f"-I{folder}" for folder in includes]
    # zig's cc cannot do -fsyntax-only: it looks for an object file
    with tempfile.TemporaryDirectory() as scratch:
        command += [str(source), "-o", str(Path(scratch, "unused.o"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    errors = re.findall(r"^.*?:(\d+):\d+: (?:fatal )?error: (.*)$", done.stderr, re.MULTILINE)
    return f"{errors[0][0]}: {errors[0][1]}" if errors else done.stderr.strip()


# ---------------------------------------------------------------- ELF: Linux and Android

# System -> the libraries that compiled kernels call into (memcpy, expf, …).
_ANDROID: Final = ("libc.so", "libm.so")
_GLIBC: Final = ("libc.so.6", "libm.so.6")

# What LLVM calls on 32-bit machines for numbers of 64 bits: in libgcc, which every Linux with C++ has.
_HELPERS: Final = (
    *(f"__{name}3" for name in "divdi moddi udivdi umoddi ashldi lshrdi ashrdi muldi".split()),
    *(f"__fix{sign}{kind}di" for sign in ("", "uns") for kind in ("sf", "df")),
    *(f"__float{sign}di{kind}" for sign in ("", "un") for kind in ("sf", "df")),
    "__divmoddi4",
    "__udivmoddi4",
)
# The names that ARM has for these and for division.
_ARM_HELPERS: Final = tuple(
    f"__aeabi_{name}"
    for name in (
        "idiv uidiv idivmod uidivmod ldivmod uldivmod l2f l2d ul2f ul2d f2lz f2ulz d2lz d2ulz llsl llsr lasr lmul"
    ).split()
)
_NARROW: Final[Mapping[str, tuple[str, ...]]] = {
    "armv7": (*_HELPERS, *_ARM_HELPERS),
    "i386": _HELPERS,
}


def _system_libraries(platform: Platform) -> tuple[str, ...]:
    if platform.system == "android":
        return _ANDROID
    if platform.libc.startswith("musl"):
        # musl is libc and libm in one, called so by the distributions that use it
        return (f"libc.musl-{platform.arch}.so.1",)
    return _GLIBC


def _link_elf(folder: Path, names: Sequence[str], platform: Platform) -> str:
    emulation = _EMULATIONS[platform.arch]
    stubs = [_stub(folder, each, emulation) for each in _system_libraries(platform)]
    helpers = []
    if platform.arch in _NARROW and platform.system == "linux":
        symbols = _NARROW[platform.arch]
        helpers = ["--as-needed", _stub(folder, "libgcc_s.so.1", emulation, symbols)]
    _lld(
        folder, emulation, "linked.so", ["--strip-all", *names, "--no-as-needed", *stubs, *helpers]
    )
    return "linked.so"


def _stub(folder: Path, library: str, emulation: str, symbols: Sequence[str] = ()) -> str:
    """An empty library of that name: enough for the loader to be told to bring the real one."""
    (folder / "empty").touch()
    name = f"stub-{library}"
    defined = [f"--defsym={symbol}=0" for symbol in symbols]
    _lld(folder, emulation, name, ["-soname", library, *defined, "--format=binary", "empty"])
    return name


def _lld(folder: Path, emulation: str, output: str, arguments: Sequence[str]) -> None:
    options = ["-shared", "--build-id=none", "--hash-style=gnu"]
    _zig(folder, "ld.lld", "-m", emulation, *options, "-o", output, *arguments)


# ---------------------------------------------------------------- Mach-O: macOS


def _link_macho(folder: Path, names: Sequence[str], platform: Platform) -> str:
    """A dylib that takes the runtime's symbols from whoever loads it; signed as every Mac asks for."""
    _zig(
        folder,
        "build-lib",
        *("-dynamic", "-fstrip", "-O", "ReleaseSmall", "-target", f"{_MACHO[platform.arch]}.13.0"),
        # what it would compile first, for half a minute, is in the system's own library too
        *("-fno-compiler-rt", "-fallow-shlib-undefined"),
        *("-install_name", "@rpath/linked.dylib", "-femit-bin=linked.dylib"),
        *names,
    )
    return "linked.dylib"


# ---------------------------------------------------------------- PE: Windows

_RUNTIME_DLL: Final = "tvm_ffi.dll"
_NTDLL: Final = "ntdll.dll"
_C_DLL: Final = "ucrtbase.dll"

# Symbols of the system's own library, by what LLVM calls for large frames.
_STACK_PROBES: Final = ("__chkstk",)
# The C library's functions that kernels call: memory, and the mathematics that LLVM has no instruction for.
_C_FUNCTIONS: Final = frozenset(
    [
        *("memcpy", "memmove", "memset", "memcmp"),
        *(
            f"{name}{kind}"
            for name in (
                "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 "
                "fabs floor fma fmax fmin fmod hypot ldexp lgamma llround log log10 log1p log2 logb lround "
                "nearbyint nextafter pow remainder rint round sin sinh sqrt tan tanh tgamma trunc"
            ).split()
            for kind in ("", "f")
        ),
    ]
)
# A mark of code with floating point that only Microsoft's C library looks for; GNU's name of the stack probe.
_ALIASES: Final = ("/alternatename:_fltused=__ImageBase", "/alternatename:___chkstk_ms=__chkstk")


def _link_pe(folder: Path, names: Sequence[str], platform: Platform) -> str:
    """A DLL; the import libraries that it is linked with are made of what the objects ask for."""
    windows = _PE[platform.arch]
    imported = _imports({symbol for name in names for symbol in coff.undefined(folder / name)})
    libraries = []
    for dll, symbols in imported.items():
        stem = dll.partition(".")[0]
        (folder / f"{stem}.def").write_text("\n".join([f"LIBRARY {dll}", "EXPORTS", *symbols, ""]))
        machine = ("-m", windows.importing)
        _zig(folder, "dlltool", *machine, "-d", f"{stem}.def", "-l", f"{stem}.lib")
        libraries.append(f"{stem}.lib")
    _zig(
        folder,
        "lld-link",
        # there is nothing to be done when it is loaded, and its time stamp is its digest
        *("/dll", "/noentry", "/nodefaultlib", "/Brepro", f"/machine:{windows.linking}", *_ALIASES),
        *("/out:linked.dll", *names, *libraries),
    )
    return "linked.dll"


def _imports(symbols: set[str]) -> dict[str, list[str]]:
    """DLL -> what is taken from it. What no DLL is known for is left to the linker to complain about."""
    found: dict[str, list[str]] = {}
    # GNU's name is an alias, and what it means must be there for it
    for symbol in sorted(symbols | set(_STACK_PROBES)):
        if symbol.startswith("TVMFFI"):
            found.setdefault(_RUNTIME_DLL, []).append(symbol)
        elif symbol in _STACK_PROBES:
            found.setdefault(_NTDLL, []).append(symbol)
        elif symbol in _C_FUNCTIONS:
            found.setdefault(_C_DLL, []).append(symbol)
    return found


# ---------------------------------------------------------------- running it

_Linker = Callable[[Path, Sequence[str], Platform], str]

_LINKERS: Final[Mapping[str, _Linker]] = {
    "linux": _link_elf,
    "android": _link_elf,
    "macos": _link_macho,
    "windows": _link_pe,
}
_ARCHS: Final[Mapping[str, Sequence[str]]] = {
    "linux": tuple(_EMULATIONS),
    "android": tuple(_EMULATIONS),
    "macos": tuple(_MACHO),
    "windows": tuple(_PE),
}


def _zig(folder: Path, *arguments: str) -> None:
    """Run one of zig's tools in the folder. Raises StageError with its own words."""
    command = [sys.executable, "-m", "ziglang", *arguments]
    # its caches must not be in a home that may not be there
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "zig"))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise StageError(
            f"linking failed: {done.stderr.strip() or done.returncode}",
            fix="run `tvmflow doctor`; it tries the linker by itself",
        )


def link_empty(output: Path, symbols: Sequence[str]) -> None:
    """A shared library for this machine, called by its file's name, whose `symbols` lead nowhere: it may be loaded, not called."""
    host = read_host()
    emulation = _EMULATIONS.get(host.arch)
    if emulation is None or host.system != "linux":
        raise StageError(
            f"no stand-in for a library can be made on {host.arch} with {host.system}",
            fix=f"build on Linux, on {' or '.join(sorted(_EMULATIONS))}",
        )
    (output.parent / "empty").touch()
    words = [f"--defsym={name}=1" for name in symbols]
    _lld(
        output.parent,
        emulation,
        output.name,
        ["-soname", output.name, *words, "--format=binary", "empty"],
    )
