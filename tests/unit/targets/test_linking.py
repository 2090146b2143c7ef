"""Linking: the same objects give the same library, anywhere, and the loader is told what it needs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow.errors import StageError
from tvmflow.targets.linking import link_shared

CODE = """
import sys, tvm
from tvm import te

x = te.placeholder((8,), "float32", name="x")
y = te.compute((8,), lambda i: te.exp(x[i]) * 2, name="y")
module = tvm.IRModule({"twice": te.create_prim_func([x, y]).with_attr("global_symbol", "twice")})
target = tvm.target.Target({"kind": "llvm", "mtriple": sys.argv[2]})
tvm.compile(module, target).mod.write_to_file(sys.argv[1])
"""


def an_object(path: Path, triple: str) -> Path:
    """An object file for `triple`, compiled in a process of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", CODE, str(path), triple], check=True)
    return path


def elf_machine(path: Path) -> int:
    """The ELF header's machine number: 62 is x86-64, 183 AArch64, 243 RISC-V."""
    return int.from_bytes(path.read_bytes()[18:20], "little")


@pytest.mark.parametrize(
    ("triple", "machine"),
    [("x86_64-linux-gnu", 62), ("aarch64-linux-gnu", 183), ("riscv64-linux-gnu", 243)],
)
def test_linux_targets_link_without_a_compiler(tmp_path: Path, triple: str, machine: int) -> None:
    """An object of another architecture becomes a library of that architecture that asks for libc and libm."""
    output = tmp_path / "x.so"
    link_shared([an_object(tmp_path / "x.o", triple)], output, triple)
    assert elf_machine(output) == machine
    content = output.read_bytes()
    assert b"libm.so.6\0" in content
    assert b"libc.so.6\0" in content


def test_the_same_objects_give_the_same_bytes_anywhere(tmp_path: Path) -> None:
    """Folder names and the order of the objects leave no trace in the library."""
    digests = set()
    for folder in ("a", "a/much/longer/folder"):
        objects = [an_object(tmp_path / folder / "lib0.o", "x86_64-linux-gnu")]
        output = tmp_path / folder / "x.so"
        link_shared(objects, output, "x86_64-linux-gnu")
        digests.add(hashlib.sha256(output.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_target_without_a_linker_is_named(tmp_path: Path) -> None:
    """What cannot be linked yet is said, with what can."""
    with pytest.raises(
        StageError, match="no linker is set up for x86_64-pc-windows-msvc"
    ) as raised:
        link_shared([], tmp_path / "x.dll", "x86_64-pc-windows-msvc")
    assert "aarch64, armv7, riscv64, x86_64" in raised.value.fix


def test_what_the_linker_says_is_passed_on(tmp_path: Path) -> None:
    """A broken object file ends in the linker's own words."""
    broken = tmp_path / "x.o"
    broken.write_bytes(b"not an object")
    with pytest.raises(StageError, match=r"linking failed: .*x\.o"):
        link_shared([broken], tmp_path / "x.so", "x86_64-linux-gnu")
