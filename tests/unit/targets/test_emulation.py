"""Emulation: which CPU qemu is to be, what is said when it is missing or a library takes it down, and what the runner is made of."""

from __future__ import annotations

import ctypes
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.errors import EnvironmentProblem, StageError
from tvmflow.stages import runner
from tvmflow.targets import emulation
from tvmflow.targets.emulation import (
    MACHINES,
    VARIABLE,
    cpu_for,
    emulator_for,
    find_qemu,
    machine_of,
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
    """So that it refuses what the target's CPU lacks; all that qemu can do where it has no such CPU."""
    target: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu, "mattr": mattr}
    assert cpu_for(MACHINES[arch], target, KNOWN[arch].split()) == cpu


@pytest.mark.parametrize(
    ("triple", "qemu"),
    [
        ("aarch64-linux-gnu", "aarch64"),
        ("arm64-unknown-linux-musl", "aarch64"),
        ("armv7l-linux-gnueabihf", "arm"),
        ("x86_64-linux-gnu", "x86_64"),
        ("aarch64-apple-macos13", None),
        ("x86_64-pc-windows-msvc", None),
        ("sparc64-linux-gnu", None),
        ("", None),
    ],
)
def test_what_can_be_emulated(triple: str, qemu: str | None) -> None:
    """Linux, on the architectures that a runner can be compiled for."""
    machine = machine_of(triple)
    assert (machine.qemu if machine else None) == qemu


# ---------------------------------------------------------------- qemu


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where qemu is looked for."""
    place = tmp_path / "qemu"
    place.mkdir()
    monkeypatch.setenv(VARIABLE, str(place))
    return place


def program(folder: Path, does: str, name: str = "qemu-aarch64-static") -> None:
    """A program that answers as qemu does, and then does something else than to emulate."""
    path = folder / name
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "qemu-aarch64 version 7.2.22 (Debian)" && exit\n'
        '[ "$2" = help ] && echo "Available CPUs:\n  cortex-a72\n  max" && exit\n' + does
    )
    path.chmod(0o755)


def run(tmp_path: Path) -> list[list[Any]]:
    """Emulate a library that is a text; the runner is one too."""
    executable, library = tmp_path / "runner", tmp_path / "library.so"
    for file in (executable, library):
        file.write_text(file.name)
    batches = [[np.arange(3)]]
    qemu = emulator_for(A72)
    return run_emulated(qemu, executable, library, batches, threads=3, scratch=tmp_path)


def test_qemu_is_found_in_the_folder_that_is_named(folder: Path) -> None:
    """The static one first."""
    machine = MACHINES["aarch64"]
    assert find_qemu(machine) is None
    program(folder, "", "qemu-aarch64")
    assert find_qemu(machine) == folder / "qemu-aarch64"
    program(folder, "")
    assert find_qemu(machine) == folder / "qemu-aarch64-static"
    assert str(emulator_for(A72)) == "qemu-aarch64 7.2.22 -cpu cortex-a72"


def test_without_qemu_the_remedy_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was looked for, and how to get it without being root."""
    with pytest.raises(EnvironmentProblem) as caught:
        emulator_for(A72)
    assert caught.value.message == (
        f"there is no qemu-aarch64 (nor qemu-aarch64-static) in ${VARIABLE} ({folder})"
    )
    assert "apt-get download qemu-user-static" in caught.value.fix
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(EnvironmentProblem, match="on PATH"):
        emulator_for(A72)


def test_a_program_that_does_not_start_is_told(folder: Path) -> None:
    """One for another machine, say."""
    (folder / "qemu-aarch64").write_bytes(b"\x7fELF, but not really")
    (folder / "qemu-aarch64").chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="cannot be started"):
        emulator_for(A72)


def test_outputs_come_from_the_program(folder: Path, tmp_path: Path) -> None:
    """It is given CPU, runner, library and two files, and the number of threads."""
    program(
        folder,
        '[ "$1 $2" = "-cpu cortex-a72" ] && [ -x "$3" ] && [ "$TVM_NUM_THREADS" = 3 ] '
        '&& [ "$(cat "$4")" = library.so ] && cp "$5" "$6"',
    )
    ((found,),) = run(tmp_path)
    np.testing.assert_array_equal(found, np.arange(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["library.so", "qemu", "runner"]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_crash_bears_the_signals_name(folder: Path, tmp_path: Path, name: str) -> None:
    """qemu ends by the signal that ended the emulated program."""
    program(folder, f"kill -{name.removeprefix('SIG')} $$")
    with pytest.raises(StageError) as caught:
        run(tmp_path)
    assert caught.value.message == (
        f"the library was ended by {name} under qemu-aarch64 7.2.22 -cpu cortex-a72"
    )
    assert caught.value.fix


def test_an_instruction_that_the_cpu_lacks_is_explained(folder: Path, tmp_path: Path) -> None:
    """SIGILL has a meaning of its own: the target in the recipe says too much."""
    program(folder, "kill -ILL $$")
    with pytest.raises(
        StageError, match=r"SIGILL under .* an instruction that this CPU lacks"
    ) as it:
        run(tmp_path)
    assert "mcpu and mattr" in it.value.fix


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("tvmflow-runner: x.so is damaged\nqemu: more", "x.so is damaged"),
        ("qemu-aarch64: something odd", "qemu-aarch64: something odd"),
        ("qemu: warning: TCG doesn't support requested feature", "exit code 3"),
        ("", "exit code 3"),
    ],
)
def test_what_the_runner_says_is_passed_on(
    folder: Path, tmp_path: Path, said: str, told: str
) -> None:
    """Its own sentence where there is one; qemu's warnings about CPUs are not the reason."""
    program(folder, f'echo "{said}" >&2; exit 3')
    with pytest.raises(StageError) as caught:
        run(tmp_path)
    assert caught.value.message.endswith(f"-cpu cortex-a72: {told}")


# ---------------------------------------------------------------- what the runner is made of

FOLDER = Path(emulation.__file__).parent / "runner"
# Version of the stage -> digest of the sources.
RECORDED = {1: "550009e0a0e35699"}


def test_sources_are_those_that_the_version_stands_for() -> None:
    """Stores keep runners: one that is made of other sources needs another version."""
    digest = hashlib.sha256()
    for path in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        digest.update(path.relative_to(FOLDER).as_posix().encode() + path.read_bytes())
    digest.update(repr([emulation._SOURCES, emulation._FLAGS, emulation._LINK_FLAGS]).encode())
    assert digest.hexdigest()[:16] == RECORDED.get(runner.VERSION), (
        "the runner changed: raise VERSION in tvmflow/stages/runner.py and record "
        f"{digest.hexdigest()[:16]} for it here"
    )


def test_the_wheels_have_the_sources() -> None:
    """And each of ours is compiled."""
    for folder, names in emulation._SOURCES.values():
        package, _, rest = folder.partition("/")
        if package == "runner":
            assert {path.stem for path in FOLDER.glob("*.cc")} == set(names)
            continue
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None
        for name in names:
            assert (Path(spec.origin).parent / rest / f"{name}.cc").is_file(), name


def listed(macro: str) -> list[str]:
    """The names in a list of imports.cc."""
    text = (FOLDER / "imports.cc").read_text()
    found = re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", text)
    assert found is not None
    return re.findall(r"X\((\w+)\)", found.group(1))


def test_a_library_may_call_what_every_runtime_has() -> None:
    """What the runner offers to libraries, TVM's own runtime and the C library offer them too."""
    import tvm_ffi

    runtimes = [
        tvm_ffi.libinfo.load_lib_ctypes(package, name, "RTLD_LOCAL")
        for package, name in (("apache-tvm-ffi", "tvm_ffi"), ("apache-tvm", "tvm_runtime"))
    ]
    names = listed("TVM_RUNTIME")
    assert "TVMFFIFunctionCall" in names
    assert [n for n in names if not any(hasattr(library, n) for library in runtimes)] == []
    libc = ctypes.CDLL("libm.so.6")
    math = [name for macro in ("MEMORY", "MATH", "MATH_FLOAT") for name in listed(macro)]
    assert {"memcpy", "erf", "expf"} <= set(math)
    assert [name for name in math if not hasattr(libc, name)] == []
