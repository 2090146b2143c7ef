"""Linking: object files become libraries for any platform, with the tools in the `ziglang` wheel.

May import the rest of targets, store and core. A linker runs in a folder of its own with relative names, and adds no
build id, time or symbols: so the same objects give the same bytes on every machine. No SDK is needed, because a
system's libraries are known only by name. Symbols are linked without a version, so that every version of a library
fits. If a tool is missing or fails, StageError has its message.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from tvmflow.core.errors import StageError
from tvmflow.core.files import symlink_or_copy
from tvmflow.targets import toolchain
from tvmflow.targets.host import read_host
from tvmflow.targets.linking import elf, macho, pe, wasm, zig
from tvmflow.targets.platforms import Platform, parse_triple, zig_target
from tvmflow.targets.toolchain import ToolchainIdentity
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

_log = logging.getLogger(__name__)

ALIGNMENT: Final = 64
"""Every tensor begins at a multiple of this many bytes, because TVM's code relies on it."""


class ObjectFormat(Protocol):
    """A module of this package for one object format: links libraries, writes constant data as objects."""

    @property
    def ARCHS(self) -> Collection[str]:
        """The architectures that it links for."""

    def link(
        self,
        folder: Path,
        names: Sequence[str],
        platform: Platform,
        interface: zig.Interface | None = None,
    ) -> str:
        """Link objects of a folder into a shared library there, and return the library's name.

        The library needs only the system's C library. Without an interface, all symbols are public.
        """

    def write_data(
        self, output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]
    ) -> None:
        """Write an object file with constant data under a C symbol, for the machine of the object `code`."""

    def find_data(self, path: Path) -> tuple[int, int]:
        """Return the offset and the size of the data in an object file that `write_data` wrote."""


LINKERS: Final[dict[str, ObjectFormat]] = {
    "linux": elf,
    "android": elf,
    "macos": macho,
    "windows": pe,
}
"""A platform's system -> its linker."""

# These include systems for which TVM has no runtime library.
_C_LINKERS: Final[dict[str, ObjectFormat]] = {**LINKERS, "wasi": wasm}

# The first bytes of an object file -> its format. A COFF file begins with the machine.
_FORMATS: Final[dict[bytes, ObjectFormat]] = {
    b"\x7fELF": elf,
    b"\xcf\xfa\xed\xfe": macho,
    b"\0asm": wasm,
}

_C_FLAGS: Final = (
    *("-std=c11", "-O2", "-g0", "-Wall", "-Wextra"),
    *("-fno-sanitize=undefined", "-fno-stack-protector"),
)
_SYSTEM_C_FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "linux": ("-fPIC",),
    # Android before 10 has no thread-local variables, so the compiler emulates them.
    "android": ("-fPIC", "-femulated-tls", "-D__ANDROID__"),
    "ios": ("-fPIC",),
    "macos": ("-fPIC",),
    # Microsoft's linker finds no function for the stack probe that GNU's tools call.
    "windows": ("-mno-stack-arg-probe",),
}

# A microcontroller's architecture -> its smallest CPU in zig, with the FPU that `hf` triples imply. Older
# architectures have no atomic instructions.
MICROCONTROLLERS: Final[Mapping[str, str]] = {
    "thumbv7m": "cortex_m3",
    "thumbv7em": "cortex_m4+vfp4d16sp",
    "thumbv8m.main": "cortex_m33+fp_armv8d16sp",
    "thumbv8.1m.main": "cortex_m55+fp_armv8d16sp",
}

# C library or system -> the archive layout of its static libraries, if it is not GNU's.
_ARCHIVE_LAYOUTS: Final[Mapping[str, str]] = {"msvc": "coff", "macos": "darwin", "ios": "darwin"}


def unlinkable_reason(triple: str) -> str:
    """Return why nothing can be linked for a triple, or an empty string."""
    platform = parse_triple(triple)
    linker = LINKERS.get(platform.system)
    if linker is None:
        return f"no linker is set up for {triple or 'a target without mtriple'} (there are {', '.join(LINKERS)})"
    if platform.arch not in linker.ARCHS:
        archs = ", ".join(linker.ARCHS)
        return f"no linker is set up for {platform.arch} on {platform.system} (there are {archs})"
    return ""


def link_shared(
    objects: Sequence[Path],
    output: Path,
    triple: str,
    toolchain_identity: ToolchainIdentity | None = None,
) -> None:
    """Link a shared library."""
    reason = "" if toolchain_identity else unlinkable_reason(triple)
    if reason:
        raise StageError(reason, fix="name another linker: `toolchain: {linker: …}`")
    with _scratch_folder(objects, output.parent) as (folder, names):
        _log.debug("linking %s for %s with %s", names, triple, toolchain_identity or "zig")
        if toolchain_identity:
            linked = toolchain.link(folder, names, toolchain_identity)
        else:
            platform = parse_triple(triple)
            linked = LINKERS[platform.system].link(folder, names, platform)
        shutil.move(folder / linked, output)


def link_c_library(
    objects: Sequence[Path],
    output: Path,
    triple: str,
    interface: zig.Interface,
    import_library: Path | None = None,
) -> None:
    """Link a shared library that exports only the interface's functions."""
    platform = parse_triple(triple)
    with _scratch_folder(objects, output.parent) as (folder, names):
        linked = _C_LINKERS[platform.system].link(folder, names, platform, interface)
        shutil.move(folder / linked, output)
        if import_library:
            shutil.move(folder / zig.IMPORT_LIBRARY, import_library)


def compile_c(folder: Path, source: str, output: str, triple: str) -> None:
    """Compile a C11 file, which must not cause warnings, to the same object on every machine."""
    command = (*_c_compiler(triple), "-Werror", "-c", source, "-o", output)
    zig.run_zig(folder, *command, action="compiling C")


def compile_c_to_llvm(folder: Path, source: str, triple: str) -> str:
    """Compile a user's C11 file to LLVM IR as text, without optimization."""
    output = "kernel.ll"
    unoptimized = ("-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes")
    done = zig.call_zig(folder, *_c_compiler(triple), *unoptimized, source, "-o", output)
    if done.returncode != 0:
        raise StageError(
            f"the C compiler rejects {source}: {done.stderr.strip() or done.returncode}",
            fix=f"correct {source}, which `operators` in the recipe names",
        )
    return (folder / output).read_text()


def _c_compiler(triple: str) -> list[str]:
    platform = parse_triple(triple)
    flags = [*_C_FLAGS, *_SYSTEM_C_FLAGS.get(platform.system, ())]
    if platform.system == "none":
        flags += [f"-mcpu={MICROCONTROLLERS[platform.arch]}", "-ffreestanding"]
    if platform.system == "ios":
        # All of Apple's systems use the same headers.
        flags += ["-isystem", str(zig.library_folder() / "libc" / "include" / "any-darwin-any")]
    return ["cc", "-target", zig_target(triple), *flags]


def link_program(files: Mapping[str, Path], output: Path, triple: str) -> None:
    """Link a static executable for Linux, which needs only the kernel."""
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch)
        for name, path in files.items():
            symlink_or_copy(path.resolve(), folder / name)
        linked = elf.link_program(folder, sorted(files), parse_triple(triple).arch)
        shutil.move(folder / linked, output)


def export_library(compiled: Any, output: Path, tvm: TvmTarget) -> None:
    """Link the objects that TVM compiled for a target, from a model or a kernel."""

    def link(linked: str, objects: list[str], **_: Any) -> None:
        link_shared([Path(path) for path in objects], Path(linked), cpu_triple(tvm))

    compiled.export_library(str(output), fcompile=link)


def archive_static(objects: Sequence[Path], output: Path, triple: str) -> None:
    """Archive object files as a static library with a symbol index."""
    platform = parse_triple(triple)
    layout = _ARCHIVE_LAYOUTS.get(platform.libc) or _ARCHIVE_LAYOUTS.get(platform.system, "gnu")
    with _scratch_folder(objects, output.parent) as (folder, names):
        # D: no times and owners; c: no message about a new archive.
        command = ("ar", f"--format={layout}", "Dcr", "archive", *names)
        zig.run_zig(folder, *command, action="archiving a static library")
        shutil.move(folder / "archive", output)


def link_stub(output: Path, symbols: Sequence[str]) -> None:
    """Link an empty library for this machine: it can be loaded, but its symbols must not be called.

    Its file name becomes its soname.

    Raises:
        StageError: when this machine is not a Linux that the linker supports.
    """
    host = read_host()
    if host.system != "linux" or host.arch not in elf.ARCHS:
        raise StageError(
            f"no stub of a library can be linked on {host.arch} with {host.system}",
            fix=f"build on Linux, on {' or '.join(sorted(elf.ARCHS))}",
        )
    elf.link_stub(output.parent, output.name, output.name, host.arch, symbols, address=1)


@contextmanager
def _scratch_folder(objects: Sequence[Path], parent: Path) -> Iterator[tuple[Path, list[str]]]:
    with tempfile.TemporaryDirectory(dir=parent) as scratch:
        folder = Path(scratch)
        for path in objects:
            symlink_or_copy(path.resolve(), folder / path.name)
        yield folder, sorted(path.name for path in objects)


# ---------------------------------------------------------------- objects of data


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Return a tensor's size in bytes, rounded up to the alignment of the next tensor."""
    return -(-size // alignment) * alignment


def write_data(output: Path, code: Path, symbol: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write an object file with constant data, as `ObjectFormat.write_data`."""
    _format_of(code).write_data(output, code, symbol, pieces)


def find_data(path: Path) -> tuple[int, int]:
    """Return the offset and the size of the data in an object file that `write_data` wrote."""
    return _format_of(path).find_data(path)


def _format_of(path: Path) -> ObjectFormat:
    with path.open("rb") as stream:
        return _FORMATS.get(stream.read(4), pe)
