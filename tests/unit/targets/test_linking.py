"""Linking: object files become shared libraries for any platform, the same bytes every time, without a compiler."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.binaries import read_elf, read_macho, read_pe
from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.targets import c_runtime, linking, toolchain
from tvmflow.targets.linking import link_shared, pe
from tvmflow.targets.presets import PRESETS

CODE = """
import json, pathlib, sys, tvm
from tvm import te

x = te.placeholder((8,), "float32", name="x")
y = te.compute((8,), lambda i: te.exp(x[i]) * 2, name="y")
n, d = (te.placeholder((8,), "int64", name=name) for name in "nd")
q = te.compute((8,), lambda i: te.floordiv(n[i], d[i]), name="q")
module = tvm.IRModule({
    name: te.create_prim_func(buffers).with_attr("global_symbol", name)
    for name, buffers in {"twice": [x, y], "divided": [n, d, q]}.items()
})
for file, target in json.load(sys.stdin).items():
    built = tvm.compile(module, tvm.target.Target(target)).mod
    built.write_to_file(file)
    pathlib.Path(file).with_suffix(".s").write_text(built.inspect_source("asm"))
"""

ELF = {
    "x86_64-linux-gnu": (62, ("libc.so.6", "libm.so.6")),
    "i686-linux-gnu": (3, ("libc.so.6", "libm.so.6", "libgcc_s.so.1")),
    "aarch64-linux-gnu": (183, ("libc.so.6", "libm.so.6")),
    "riscv64-linux-gnu": (243, ("libc.so.6", "libm.so.6")),
    "armv7-linux-gnueabihf": (40, ("libc.so.6", "libm.so.6", "libgcc_s.so.1")),
    "x86_64-linux-musl": (62, ("libc.musl-x86_64.so.1",)),
    "aarch64-linux-musl": (183, ("libc.musl-aarch64.so.1",)),
    "aarch64-linux-android": (183, ("libc.so", "libm.so")),
}
MACHO = {"arm64-apple-macos13": 0x0100000C, "x86_64-apple-macos13": 0x01000007}
PE = {
    "x86_64-pc-windows-msvc": 0x8664,
    "x86_64-pc-windows-gnu": 0x8664,
    "aarch64-pc-windows-msvc": 0xAA64,
}
RISCV = dict(PRESETS["riscv64-v"].tvm or {})
# without the vector extension, which the preset has as the last one
PLAIN = {**RISCV, "mattr": RISCV["mattr"][:-1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`TRIPLE.o` for every platform and its assembly as `TRIPLE.s`, all compiled in one process."""
    objects = tmp_path_factory.mktemp("objects")
    targets: dict[str, dict[str, Json]] = {
        str(objects / f"{triple}.o"): {"kind": "llvm", "mtriple": triple}
        for triple in (*ELF, *MACHO, *PE)
    }
    targets[str(objects / "riscv64-linux-gnu.o")] = PLAIN
    targets[str(objects / "riscv64-v.o")] = RISCV
    subprocess.run([sys.executable, "-c", CODE], input=json.dumps(targets), text=True, check=True)
    return objects


def linked(folder: Path, triple: str, where: Path) -> Path:
    """The library for a triple, linked in a folder that may have any name."""
    where.mkdir(parents=True, exist_ok=True)
    output = where / "x.lib"
    link_shared([folder / f"{triple}.o"], output, triple)
    return output


@pytest.mark.parametrize("triple", ELF)
def test_elf(folder: Path, tmp_path: Path, triple: str) -> None:
    """It needs its system's libraries by name, no version of any symbol, and no search path."""
    library = read_elf(linked(folder, triple, tmp_path))
    machine, needed = ELF[triple]
    assert (library.machine, library.needed, library.soname) == (machine, needed, "")
    assert not library.requires_symbol_versions, "no glibc is too old for it"
    assert not library.has_search_path
    assert "expf" in library.undefined
    # numbers of 64 bits are divided by a function where registers have 32
    assert ("__divdi3" in library.undefined) == ("libgcc_s.so.1" in needed)


@pytest.mark.parametrize("triple", MACHO)
def test_macho(folder: Path, tmp_path: Path, triple: str) -> None:
    """A dylib with a relative name that needs only the system library of every Mac."""
    library = read_macho(linked(folder, triple, tmp_path))
    assert (library.cpu, library.kind) == (MACHO[triple], 6)
    assert library.name == "@rpath/linked.dylib"
    assert library.needed == ("/usr/lib/libSystem.B.dylib",)


@pytest.mark.parametrize("triple", PE)
def test_pe(folder: Path, tmp_path: Path, triple: str) -> None:
    """A DLL that exports the kernels, and imports from TVM's runtime and Windows' own C library."""
    library = read_pe(linked(folder, triple, tmp_path))
    assert library.machine == PE[triple]
    assert {"__tvm_ffi_twice", "__tvm_ffi_divided"} <= set(library.exports)
    assert set(library.imports) == {"tvm_ffi.dll", "ucrtbase.dll"}
    assert "expf" in library.imports["ucrtbase.dll"]
    assert all(name.startswith("TVMFFI") for name in library.imports["tvm_ffi.dll"])


@pytest.mark.parametrize("triple", [*ELF, *MACHO, *PE])
def test_the_same_objects_give_the_same_bytes_anywhere(
    folder: Path, tmp_path: Path, triple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folder names leave no trace in the library, and neither does the time, nor one that SOURCE_DATE_EPOCH gives."""
    digests = set()
    for name, epoch in (("a", "0"), ("a/much/longer/folder", "1700000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        content = linked(folder, triple, tmp_path / name).read_bytes()
        digests.add(hashlib.sha256(content).hexdigest())
    assert len(digests) == 1
    content = (tmp_path / "a" / "x.lib").read_bytes()
    assert str(tmp_path).encode() not in content


def test_the_order_of_objects_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """They are linked by their names."""
    code = {"one": "x86_64-linux-gnu", "two": "x86_64-linux-musl"}
    objects = []
    for name, triple in code.items():
        (tmp_path / f"{name}.o").write_bytes((folder / f"{triple}.o").read_bytes())
        objects.append(tmp_path / f"{name}.o")
    with pytest.raises(StageError, match=r"duplicate symbol(.|\n)*one\.o(.|\n)*two\.o"):
        link_shared(list(reversed(objects)), tmp_path / "x.so", "x86_64-linux-gnu")


def test_the_vector_extension_of_riscv_is_used(folder: Path) -> None:
    """The preset `riscv64-v` gives vector code, and plain RISC-V does not."""
    vectors = [name for name in ("vsetvli", "vsetivli") if name in _code(folder, "riscv64-v")]
    assert vectors
    assert not any(name in _code(folder, "riscv64-linux-gnu") for name in vectors)


def _code(folder: Path, name: str) -> str:
    return (folder / f"{name}.s").read_text()


def test_undefined_symbols_of_a_windows_object(folder: Path) -> None:
    """Symbols with a weak definition are not among them; a file of another format has none."""
    symbols = pe.undefined_symbols(folder / "x86_64-pc-windows-msvc.o")
    assert "expf" in symbols and "__tvm_ffi_twice" not in symbols
    assert not any("hfsf2" in name or "sfhf2" in name for name in symbols)
    assert pe.undefined_symbols(folder / "x86_64-linux-gnu.s") == []


def test_an_unknown_symbol_in_a_windows_library_is_an_error(tmp_path: Path) -> None:
    """No DLL is guessed: the linker names the symbol."""
    (tmp_path / "x.c").write_text(
        "extern int unknown_function(void); int f(void) { return unknown_function(); }\n"
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-c", "-target", "x86_64-windows-gnu"]
    subprocess.run([*command, "-o", "x.o", "x.c"], cwd=tmp_path, check=True)
    with pytest.raises(StageError, match="undefined symbol: unknown_function"):
        link_shared([tmp_path / "x.o"], tmp_path / "x.dll", "x86_64-pc-windows-gnu")


@pytest.mark.parametrize(
    ("triple", "words"),
    [
        ("sparc64-linux-gnu", "no linker is set up for sparc64 on linux (there are x86_64, i386"),
        ("i686-pc-windows-msvc", "no linker is set up for i386 on windows (there are x86_64, aa"),
        ("wasm32-wasi", "no linker is set up for wasm32-wasi (there are linux, android, macos, w"),
        ("", "no linker is set up for a target without mtriple"),
    ],
)
def test_a_target_without_a_linker_is_named(tmp_path: Path, triple: str, words: str) -> None:
    """The message names the supported platforms, and the fix the remedy."""
    assert linking.unlinkable_reason(triple).startswith(words)
    with pytest.raises(StageError) as raised:
        link_shared([], tmp_path / "x", triple)
    assert raised.value.message == linking.unlinkable_reason(triple)
    assert "toolchain" in raised.value.fix


@pytest.mark.parametrize("triple", ["x86_64-linux-gnu", "arm64-apple-macos13", "x86_64-pc-windows-msvc"])  # fmt: skip
def test_an_error_of_the_linker_is_reported(tmp_path: Path, triple: str) -> None:
    """The message for a broken object file holds the linker's error."""
    broken = tmp_path / "x.o"
    broken.write_bytes(b"not an object")
    with pytest.raises(StageError, match=r"linking failed: (.|\n)*x\.o"):
        link_shared([broken], tmp_path / "x.so", triple)


# ---------------------------------------------------------------- a toolchain of the recipe


@pytest.fixture
def linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program on PATH that links with its arguments, as a cross linker would."""
    return on_path(tmp_path, monkeypatch, f'exec "{sys.executable}" -m ziglang ld.lld "$@"')


def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program = tmp_path / "bin" / "my-ld"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def identity(*flags: str) -> dict[str, object]:
    path = toolchain.find_program("my-ld").path
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return toolchain.identify("my-ld", flags, digest, toolchain.read_version(path))


def test_a_toolchain_links_with_its_own_flags(folder: Path, tmp_path: Path, linker: Path) -> None:
    """It gets relative names; its identity is its content and its version, not its path."""
    mine = identity("-shared", "-soname", "mine.so", "--strip-all")
    assert str(mine["version"]).startswith("LLD ")
    assert str(tmp_path) not in str(mine)
    triple, output = "x86_64-linux-gnu", tmp_path / "x.so"
    link_shared([folder / f"{triple}.o"], output, triple, mine)
    library = read_elf(output)
    assert (library.soname, library.needed) == ("mine.so", ())
    assert str(tmp_path).encode() not in output.read_bytes()


def test_a_toolchain_for_a_platform_without_a_linker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it writes to the file that `-o` names is the library."""
    on_path(tmp_path, monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo made > "$2"')
    link_shared([], tmp_path / "x.so", "sparc64-linux-gnu", identity())
    assert (tmp_path / "x.so").read_text() == "made\n"


def test_another_program_under_the_same_name_is_noticed(tmp_path: Path, linker: Path) -> None:
    """The result would be stored under the key of the first."""
    before = identity("-shared")
    linker.write_text(linker.read_text() + "# newer\n")
    with pytest.raises(StageError, match="was changed while this run was planned"):
        link_shared([], tmp_path / "x.so", "x86_64-linux-gnu", before)
    after = identity("-shared")
    assert {name for name in after if after[name] != before[name]} == {"sha256"}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such flag >&2; exit 1", "my-ld cannot link: no such flag"),
        ("exit 3", "my-ld cannot link: it ended with exit code 3"),
        ("exit 0", "my-ld ended without an error and without a library"),
    ],
)
def test_a_toolchain_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    """The message holds its error, and the fix names its flags."""
    on_path(tmp_path, monkeypatch, script)
    with pytest.raises(StageError, match=message) as raised:
        link_shared([], tmp_path / "x.so", "x86_64-linux-gnu", identity("--odd"))
    assert "flags" in raised.value.fix


def test_a_toolchain_that_went_away(tmp_path: Path, linker: Path) -> None:
    """Between plan and run."""
    mine = identity()
    linker.unlink()
    with pytest.raises(StageError, match="there is no program my-ld on PATH"):
        link_shared([], tmp_path / "x.so", "x86_64-linux-gnu", mine)
    with pytest.raises(toolchain.ProgramNotFound):
        toolchain.find_program("my-ld")


def test_searched_paths_are_returned(tmp_path: Path, linker: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Planning remembers them, so that a program that is installed there later is noticed."""
    monkeypatch.setenv("PATH", str(tmp_path / "first"), prepend=":")
    assert toolchain.find_program("my-ld") == (
        str(linker),
        (str(tmp_path / "first" / "my-ld"), str(linker)),
    )
    assert toolchain.find_program(str(linker)) == (str(linker), (str(linker),))


def test_a_program_that_does_not_know_its_version(tmp_path: Path) -> None:
    """Its bytes identify it all the same."""
    odd = tmp_path / "odd"
    odd.write_bytes(b"\x7fnothing")
    odd.chmod(0o755)
    assert toolchain.read_version(str(odd)) == "says no version"


def test_what_the_c_runtime_calls_of_windows_is_imported() -> None:
    """The linker knows the DLL of each function."""
    (source,) = (path for path in c_runtime.SOURCES if path.name == "threads_windows.h")
    called = set(re.findall(r"\b([A-Z][a-z]\w+)\(", source.read_text()))
    assert "CreateThread" in called
    assert called <= set(pe._imports(called)["kernel32.dll"])
