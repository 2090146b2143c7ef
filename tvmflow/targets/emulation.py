"""Runs libraries for other CPUs on this machine: qemu's user emulation, and a program for it that is built from TVM's sources.

The program is static: it needs no system of the other architecture, and loads the library
that users will load, byte for byte. Of the machine it needs `qemu-<arch>` alone, of PyPI the
sources in TVM's wheels and the compiler in `ziglang`. `docs/emulation.md` has the rest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.errors import EnvironmentProblem, StageError
from tvmflow.targets.platforms import platform_of
from tvmflow.values import Json

if TYPE_CHECKING:
    from tvmflow.targets.tensor_file import Array, Batch

VARIABLE: Final = "TVMFLOW_QEMU"
"""The environment variable that names the folder with qemu's programs, where PATH does not."""


class Machine(NamedTuple):
    """An architecture that can be emulated.

    `qemu` is its name in qemu's programs, `compiled` the target that a runner is compiled
    for. `plain` is qemu's CPU for code that asks for no CPU, `cpus` that for a CPU of LLVM's
    that qemu calls otherwise or knows by its parts, and `usual` the features that `plain` has.
    """

    qemu: str
    compiled: str
    plain: str
    cpus: Mapping[str, str]
    usual: frozenset[str] = frozenset()


def _rv64_vector(bits: int) -> str:
    return f"rv64,v=true,vlen={bits},elen=64,vext_spec=v1.0"


MACHINES: Final[Mapping[str, Machine]] = {
    "aarch64": Machine(
        "aarch64", "aarch64-linux-musl", "cortex-a57", {}, frozenset({"neon", "fp-armv8"})
    ),
    "armv7": Machine(
        "arm",
        "arm-linux-musleabihf",
        "cortex-a9",
        {"generic": "cortex-a9"},
        frozenset({"neon", "vfp2", "vfp3", "thumb2"}),
    ),
    "riscv64": Machine(
        "riscv64",
        "riscv64-linux-musl",
        "sifive-u54",
        {
            "generic-rv64": "sifive-u54",
            "sifive-u74": "sifive-u54",
            "sifive-x280": _rv64_vector(512),
            "spacemit-x60": _rv64_vector(256),
        },
        frozenset("iamfdc"),
    ),
    "x86_64": Machine(
        "x86_64",
        "x86_64-linux-musl",
        "qemu64",
        {
            "x86-64": "qemu64",
            "x86-64-v2": "Nehalem",
            "x86-64-v3": "Haswell",
            "haswell": "Haswell",
            "broadwell": "Broadwell",
            "skylake": "Skylake-Client",
            "znver1": "EPYC",
            "znver2": "EPYC-Rome",
            "znver3": "EPYC-Milan",
        },
    ),
}
"""By the architecture as `platform_of` has it."""

# A CPU of qemu's with all that it can emulate.
_ANY: Final = "max"

_INSTALL: Final = (
    "install qemu-user-static (Debian, Ubuntu) or qemu-user; without root: `apt-get download "
    f"qemu-user-static && dpkg -x qemu-user-static_*.deb FOLDER`, then {VARIABLE}=FOLDER/usr/bin"
)


def machine_of(triple: str) -> Machine | None:
    """What emulates the target of an LLVM triple; None where nothing does."""
    platform = platform_of(triple)
    return MACHINES.get(platform.arch) if platform.system == "linux" else None


def machine_for(triple: str) -> Machine:
    """The same. Raises StageError where nothing does."""
    machine = machine_of(triple)
    if machine is None:
        raise StageError(
            f"nothing emulates {triple} here", fix=f"there are Linux on {', '.join(MACHINES)}"
        )
    return machine


# ---------------------------------------------------------------- qemu


class Emulator(NamedTuple):
    """A program of qemu's, and the CPU that it is to be."""

    program: Path
    machine: Machine
    cpu: str
    version: str

    def __str__(self) -> str:
        return f"qemu-{self.machine.qemu} {self.version} -cpu {self.cpu}"


def is_installed(program: str) -> bool:
    """Whether a program of qemu's (`qemu-aarch64`) is there."""
    return any(find_qemu(each) for each in MACHINES.values() if program == f"qemu-{each.qemu}")


def find_qemu(machine: Machine) -> Path | None:
    """qemu's program for a machine, static or not; None where there is none."""
    folder = os.environ.get(VARIABLE)
    names = (f"qemu-{machine.qemu}-static", f"qemu-{machine.qemu}")
    found = (shutil.which(name, path=folder or None) for name in names)
    return next((Path(path) for path in found if path), None)


def emulator_for(target: Mapping[str, Json]) -> Emulator:
    """What emulates the CPU of a target (a mapping that TVM takes).

    Raises StageError for a target that nothing emulates, EnvironmentProblem where qemu is missing.
    """
    machine = machine_for(str(target.get("mtriple", "")))
    program = find_qemu(machine)
    if program is None:
        folder = os.environ.get(VARIABLE)
        raise EnvironmentProblem(
            f"there is no qemu-{machine.qemu} (nor qemu-{machine.qemu}-static) "
            + (f"in ${VARIABLE} ({folder})" if folder else "on PATH"),
            fix=_INSTALL,
        )
    words = _said([program, "--version"]).split()
    version = words[words.index("version") + 1] if "version" in words else "of unknown version"
    known = _said([program, "-cpu", "help"]).replace("\n", " ").split()
    return Emulator(program, machine, cpu_for(machine, target, known), version)


def cpu_for(machine: Machine, target: Mapping[str, Json], known: Iterable[str]) -> str:
    """qemu's CPU for a target, one that refuses what the target's CPU lacks; `max` where qemu (which knows `known`) has none.

    >>> cpu_for(MACHINES["x86_64"], {"kind": "llvm", "mcpu": "x86-64-v3"}, ["Haswell", "max"])
    'Haswell'
    """
    cpu, mattr = str(target.get("mcpu", "")), target.get("mattr") or []
    added = {str(each).removeprefix("+") for each in mattr if str(each).startswith("+")}
    here = set(known)
    wanted = machine.cpus.get(cpu, cpu) if cpu and cpu != "generic" else machine.plain
    if machine.qemu == "riscv64" and "v" in added and not wanted.startswith("rv64,"):
        wanted = _rv64_vector(max((_vector_bits(each) for each in added), default=128))
    elif added - machine.usual and wanted == machine.plain:
        wanted = _ANY
    name = wanted.partition(",")[0]
    fallback = "rv64" if machine.qemu == "riscv64" else _ANY
    return wanted if name in here else fallback


def _vector_bits(feature: str) -> int:
    """What `zvl256b` promises; 128 is the least."""
    digits = feature.removeprefix("zvl").removesuffix("b")
    return int(digits) if feature.startswith("zvl") and digits.isdigit() else 128


def _said(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentProblem(
            f"{command[0]} cannot be started: {error.strerror}", fix=_INSTALL
        ) from error
    return done.stdout + done.stderr


def run_emulated(
    emulator: Emulator,
    runner: Path,
    library: Path,
    batches: Sequence[Batch],
    *,
    threads: int,
    scratch: Path,
) -> list[list[Array]]:
    """The outputs of a library for each batch of inputs, both in the order of the signature.

    Raises StageError when the library cannot be loaded, fails, or takes the emulated CPU down.
    """
    from tvmflow.targets.tensor_file import read_tensors, write_tensors

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        here = Path(folder).absolute()
        program, given, found = (here / name for name in ("runner", "in", "out"))
        # what is in the store is not executable
        shutil.copyfile(runner, program)
        program.chmod(0o700)
        write_tensors(given, batches)
        done = subprocess.run(
            [emulator.program, "-cpu", emulator.cpu, program, library.absolute(), given, found],
            # qemu leaves the core of what crashed where it is
            cwd=folder,
            env={**os.environ, "TVM_NUM_THREADS": str(threads), "TVM_BIND_THREADS": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise _failure(emulator, done.returncode, done.stderr)
        return read_tensors(found)


def _failure(emulator: Emulator, code: int, said: str) -> StageError:
    """Why the runner ended; a signal of the emulated program is qemu's own end too."""
    if code == -signal.SIGILL:
        return StageError(
            f"the library was ended by SIGILL under {emulator}: it uses an instruction that this "
            "CPU lacks, or that qemu does not emulate",
            fix="see that the target's mcpu and mattr are those of the machine; a newer qemu may "
            "know more instructions, and verify.run_on: rpc runs it on the machine itself",
        )
    if code < 0:
        return StageError(
            f"the library was ended by {signal.Signals(-code).name} under {emulator}",
            fix="verify.run_on: rpc runs it on a machine of its kind: does it end there too?",
        )
    lines = [line for line in said.strip().splitlines() if "TCG doesn't support" not in line]
    last = next((line for line in reversed(lines) if "tvmflow-runner: " in line), "")
    text = last.removeprefix("tvmflow-runner: ") or (lines or [f"exit code {code}"])[-1]
    return StageError(
        f"the library does not run under {emulator}: {text}",
        fix="see that the target in the recipe is what the library is for",
    )


# ---------------------------------------------------------------- the runner

_FOLDER: Final = Path(__file__).parent / "runner"

# What a CPU needs of TVM's runtime, by the wheel that has the sources. Each group is compiled as
# one file: nearly all of the time goes into headers.
_SOURCES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ffi": (
        "tvm_ffi/src/ffi",
        (
            *("backtrace", "container", "custom_allocator", "dtype", "error", "function"),
            *("init_once", "object", "tensor", "extra/env_c_api", "extra/env_context"),
            *("extra/json_parser", "extra/json_writer", "extra/library_module", "extra/module"),
        ),
    ),
    "machine": ("tvm/src/runtime/vm", ("builtin", "bytecode", "executable", "vm")),
    "runtime": (
        "tvm/src/runtime",
        (
            *("builtin_fp16", "cpu_device_api", "device_api", "file_utils", "logging"),
            *(
                "memory/memory_manager",
                "module",
                "tensor",
                "thread_pool",
                "threading_backend",
                "timer",
            ),
            *("workspace_pool", "extra/contrib/random/random", "extra/contrib/sort/sort"),
        ),
    ),
    "runner": ("runner", ("elf_library", "imports", "main", "model", "tensors")),
}
# From the wheels: folder there -> folder in the tree that is compiled.
_TAKEN: Final = ("tvm/include", "tvm/src/runtime", "tvm_ffi/include", "tvm_ffi/src")
_INCLUDES: Final = (
    ".",
    "tvm/include",
    "tvm/3rdparty/compiler-rt",
    "tvm_ffi/include",
    "tvm_ffi/src/ffi/extra",
    "runner",
)
_FLAGS: Final = (
    *("-std=c++17", "-O1", "-g0", "-w", "-fno-sanitize=undefined"),
    *("-ffunction-sections", "-fdata-sections"),
    # its own test knows glibc only; every machine above is little-endian
    "-DTVM_FFI_CMAKE_LITTLE_ENDIAN=1",
    *("-DTVM_FFI_USE_LIBBACKTRACE=0", "-DTVM_FFI_BACKTRACE_ON_SEGFAULT=0"),
)
# Threads get as much stack as they have under glibc: kernels keep small buffers there.
_LINK_FLAGS: Final = ("-static", "-s", "-Wl,--gc-sections", "-Wl,-z,stack-size=8388608")


def build_runner(compiled: str, output: Path, scratch: Path) -> None:
    """Compile the static program that runs libraries, for a `Machine.compiled`; minutes on a slow machine.

    The same bytes on every machine. Raises StageError with what the compiler says.
    """
    tree = scratch / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    _lay_out(tree)
    for name, (folder, sources) in _SOURCES.items():
        lines = [f'#include "{folder}/{source}.cc"\n' for source in sources]
        (tree / f"{name}.cc").write_text("".join(lines))
    includes = [f"-I{folder}" for folder in _INCLUDES]

    def compiled_object(name: str) -> str:
        _zig(tree, compiled, *_FLAGS, *includes, "-c", f"{name}.cc", "-o", f"{name}.o")
        return f"{name}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled_object, _SOURCES))
    _zig(tree, compiled, *_LINK_FLAGS, *objects, "-o", "linked")
    shutil.move(tree / "linked", output)


def _lay_out(tree: Path) -> None:
    """TVM's sources from its wheels, with the headers that the wheels lack, and ours: by relative names alone."""
    for folder in _TAKEN:
        package, _, rest = folder.partition("/")
        shutil.copytree(_package(package) / rest, tree / folder)
    shutil.copytree(_FOLDER / "lacking", tree / "tvm", dirs_exist_ok=True)
    (tree / "runner").mkdir()
    for path in _FOLDER.iterdir():
        if path.is_file():
            shutil.copyfile(path, tree / "runner" / path.name)


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise EnvironmentProblem(
            f"the package {name} is not installed", fix="run `tvmflow doctor`; it checks each"
        )
    return Path(spec.origin).parent


def _zig(tree: Path, compiled: str, *arguments: str) -> None:
    # zig compiles its C++ library for each architecture, for longer than all the rest takes: what it
    # keeps is found again by an attempt after this one, or for good where the user has a place for it
    names = [f"ZIG_{which}_CACHE_DIR" for which in ("GLOBAL", "LOCAL")]
    caches = {name: os.environ.get(name) or str(tree.parent / "zig") for name in names}
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", "c++", "-target", compiled, *arguments],
        cwd=tree,
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = (errors or done.stderr.strip().splitlines() or [str(done.returncode)])[0]
        raise StageError(
            f"the runner for {compiled} cannot be compiled: {first}",
            fix="see that apache-tvm, apache-tvm-ffi and ziglang are the versions that tvmflow asks for (`tvmflow doctor`)",
        )
