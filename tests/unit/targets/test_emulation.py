"""Emulation: the choice of the CPU, and errors of qemu and of programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.targets.emulation import (
    EMULATED_ARCHS,
    QEMU_VARIABLE,
    choose_cpu,
    emulator_for,
    find_emulated_arch,
    find_qemu,
    run_emulated,
)

A72 = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
# of qemu 7.2
KNOWN = {
    "aarch64": "a64fx cortex-a53 cortex-a57 cortex-a72 cortex-a76 max neoverse-n1",
    "armv7": "any cortex-a15 cortex-a7 cortex-a8 cortex-a9 max",
    "riscv64": "any rv64 shakti-c sifive-e51 sifive-u54 x-rv128",
    "x86_64": "x86 Nehalem Haswell EPYC qemu64 max",
}


# ---------------------------------------------------------------- which CPU


@pytest.mark.parametrize(
    ("arch", "mcpu", "mattr", "cpu"),
    [
        ("aarch64", "cortex-a72", [], "cortex-a72"),
        ("aarch64", "cortex-a72", ["+neon"], "cortex-a72"),
        ("aarch64", "", [], "cortex-a57"),
        ("aarch64", "generic", ["+neon"], "cortex-a57"),
        ("aarch64", "", ["+dotprod"], "max"),
        ("aarch64", "apple-m1", [], "max"),
        ("aarch64", "cortex-a55", [], "cortex-a76"),
        ("aarch64", "neoverse-v2", [], "max"),
        ("armv7", "cortex-a9", ["+neon"], "cortex-a9"),
        ("armv7", "generic", ["+neon", "-d32"], "cortex-a9"),
        ("armv7", "", ["+vfp4"], "max"),
        ("riscv64", "", ["+m", "+a", "+f", "+d", "+c"], "sifive-u54"),
        ("riscv64", "generic-rv64", ["+v"], "rv64,v=true,vlen=128,elen=64,vext_spec=v1.0"),
        (
            "riscv64",
            "generic-rv64",
            ["+v", "+zvl256b"],
            "rv64,v=true,vlen=256,elen=64,vext_spec=v1.0",
        ),
        ("riscv64", "sifive-x280", [], "rv64,v=true,vlen=512,elen=64,vext_spec=v1.0"),
        ("riscv64", "xiangshan-nanhu", [], "rv64"),
        ("x86_64", "", [], "qemu64"),
        ("x86_64", "x86-64-v2", [], "Nehalem"),
        ("x86_64", "x86-64-v3", [], "Haswell"),
        ("x86_64", "x86-64-v4", [], "max"),
    ],
)
def test_the_emulated_cpu_is_that_of_the_target(
    arch: str, mcpu: str, mattr: list[str], cpu: str
) -> None:
    """It rejects instructions that the target's CPU lacks; where qemu has no such CPU, it is the one with all features."""
    target: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu, "mattr": mattr}
    assert choose_cpu(EMULATED_ARCHS[arch], target, KNOWN[arch].split()) == cpu


@pytest.mark.parametrize(
    ("triple", "qemu"),
    [
        ("aarch64-linux-gnu", "aarch64"),
        ("arm64-unknown-linux-musl", "aarch64"),
        ("armv7l-linux-gnueabihf", "arm"),
        ("x86_64-linux-gnu", "x86_64"),
        ("aarch64-linux-android21", "aarch64"),
        ("armv7a-linux-androideabi21", "arm"),
        ("aarch64-apple-macos13", None),
        ("x86_64-pc-windows-msvc", None),
        ("sparc64-linux-gnu", None),
        ("", None),
    ],
)
def test_what_can_be_emulated(triple: str, qemu: str | None) -> None:
    """Linux, on the architectures that a program can be compiled for."""
    arch = find_emulated_arch(triple)
    assert (arch.qemu_arch if arch else None) == qemu


# ---------------------------------------------------------------- qemu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where qemu is searched."""
    path = tmp_path / "qemu"
    path.mkdir()
    monkeypatch.setenv(QEMU_VARIABLE, str(path))
    return path


def program(folder: Path, script: str, name: str = "qemu-aarch64-static") -> None:
    """A program that answers queries as qemu does, and runs a script in place of emulation."""
    path = folder / name
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "qemu-aarch64 version 7.2.22 (Debian)" && exit\n'
        '[ "$2" = help ] && echo "Available CPUs:\n  cortex-a72\n  max" && exit\n' + script
    )
    path.chmod(0o755)


def run(tmp_path: Path) -> list[list[Any]]:
    """Emulate a program that is a text."""
    executable = tmp_path / "program"
    executable.write_text("a program")
    return run_emulated(
        emulator_for(A72), executable, [[np.arange(3)]], threads=3, scratch=tmp_path
    )


def test_qemu_is_found_in_the_folder_that_is_named(folder: Path) -> None:
    """The static one first."""
    arch = EMULATED_ARCHS["aarch64"]
    assert find_qemu(arch) is None
    program(folder, "", "qemu-aarch64")
    assert find_qemu(arch) == folder / "qemu-aarch64"
    program(folder, "")
    assert find_qemu(arch) == folder / "qemu-aarch64-static"
    assert str(emulator_for(A72)) == "qemu-aarch64 7.2.22 -cpu cortex-a72"


def test_without_qemu_the_fix_names_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says where it was searched, the fix how to install it without being root."""
    with pytest.raises(EnvironmentProblem) as caught:
        emulator_for(A72)
    assert caught.value.message == (
        f"there is no qemu-aarch64 (nor qemu-aarch64-static) in ${QEMU_VARIABLE} ({folder})"
    )
    assert "apt-get download qemu-user-static" in caught.value.fix
    monkeypatch.delenv(QEMU_VARIABLE)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(EnvironmentProblem, match="on PATH"):
        emulator_for(A72)


def test_a_program_that_does_not_start_is_an_error(folder: Path) -> None:
    """One for another arch, say."""
    (folder / "qemu-aarch64").write_bytes(b"\x7fELF, but not really")
    (folder / "qemu-aarch64").chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="cannot be started"):
        emulator_for(A72)


def test_outputs_come_from_the_program(folder: Path, tmp_path: Path) -> None:
    """It gets the CPU, the program, two files, and the number of threads."""
    program(
        folder,
        '[ "$1 $2" = "-cpu cortex-a72" ] && [ -x "$3" ] && [ "$(cat "$3")" = "a program" ] '
        '&& cp "$4" "$5" && [ "$6" = 3 ]',
    )
    ((output,),) = run(tmp_path)
    np.testing.assert_array_equal(output, np.arange(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program", "qemu"]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_crash_is_reported_with_the_signal(folder: Path, tmp_path: Path, name: str) -> None:
    """qemu ends by the signal that ended the emulated program."""
    program(folder, f"kill -{name.removeprefix('SIG')} $$")
    with pytest.raises(StageError) as caught:
        run(tmp_path)
    assert caught.value.message == (
        f"the library was ended by {name} under qemu-aarch64 7.2.22 -cpu cortex-a72"
    )
    assert caught.value.fix


def test_a_crash_of_qemu_is_not_one_of_the_library(folder: Path, tmp_path: Path) -> None:
    """Some versions have bugs of their own."""
    text = "qemu-aarch64-static: translate.c:213: decode_save_opc: Assertion 'insn' failed."
    program(folder, f'echo "{text}" >&2; kill -SEGV $$')
    with pytest.raises(StageError) as caught:
        run(tmp_path)
    assert caught.value.message == (f"qemu-aarch64 7.2.22 -cpu cortex-a72 itself crashed: {text}")
    assert "newer qemu" in caught.value.fix


def test_an_instruction_that_the_cpu_lacks_is_explained(folder: Path, tmp_path: Path) -> None:
    """SIGILL: the target in the recipe has more features than the CPU."""
    program(folder, "kill -ILL $$")
    with pytest.raises(
        StageError, match=r"SIGILL under .* an instruction that this CPU lacks"
    ) as it:
        run(tmp_path)
    assert "mcpu and mattr" in it.value.fix


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("tvmflow-emulation-program: x.so is damaged\nqemu: more", "x.so is damaged"),
        ("qemu-aarch64: something odd", "qemu-aarch64: something odd"),
        ("qemu: warning: TCG doesn't support requested feature", "exit code 3"),
        ("", "exit code 3"),
    ],
)
def test_an_error_of_the_emulation_program_is_reported(
    folder: Path, tmp_path: Path, stderr: str, message: str
) -> None:
    """Its own message where there is one; qemu's warnings about CPUs are not the reason."""
    program(folder, f'echo "{stderr}" >&2; exit 3')
    with pytest.raises(StageError) as caught:
        run(tmp_path)
    assert caught.value.message.endswith(f"-cpu cortex-a72: {message}")
