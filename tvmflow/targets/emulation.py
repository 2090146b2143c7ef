"""Emulation: libraries for other CPUs run here in qemu's user mode (docs/emulation.md).

The kernels and constants of the delivered library are linked into a static program for the other CPU, so the machine
needs only `qemu-<arch>`. If a compiler fails, StageError has its message.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.linking import compile_c, link_program
from tvmflow.targets.linking.zig import call_zig
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Batch = Sequence[Array]

# ---------------------------------------------------------------- emulation program
# Kernels and constants are the delivered library's object files. Its C code is compiled again, together with
# `emulation_main.c`, for the C library in the executable: musl, which `ziglang` contains as source. Compiling musl
# takes nearly all of the time, and depends only on the architecture.

_MAIN: Final = Path(__file__).parent / "emulation_main.c"
SOURCES: Final = (*c_runtime.SOURCES, _MAIN)
"""The sources of the program, besides the model's own C code."""

_LINKER: Final = "ld.lld"


def build_libc(zig_target: str, folder: Path, scratch: Path) -> None:
    """Compile an architecture's C library, and the other objects that a static executable needs.

    The folder gets `crt1.o` and archives, whose bytes do not depend on the machine. zig's cache in `scratch` is reused
    by a later attempt.
    """
    _log.debug("compiling the C library for %s in %s", zig_target, scratch)
    # Cache folders chosen by the user are also reused when this stage's version changes.
    names = [f"ZIG_{scope}_CACHE_DIR" for scope in ("GLOBAL", "LOCAL")]
    caches = {name: os.environ.get(name, "zig") for name in names}
    (scratch / "empty.c").write_text("int main(void) { return 0; }\n")
    command = ("cc", "-target", zig_target, "-static", "-s", "-O2", "empty.c", "-o", "empty")
    done = call_zig(scratch, *command, ZIG_VERBOSE_LINK="1", **caches)
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{_LINKER} ")]
    if done.returncode != 0 or not lines:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise StageError(
            f"the C library for {zig_target} cannot be compiled: {(errors or [str(done.returncode)])[0]}",
            fix="check that ziglang has the version that tvmflow requires (`tvmflow doctor`)",
        )
    # The last command links the program: its inputs include the files that zig has compiled.
    for word in lines[-1].split():
        if word.endswith((".a", "crt1.o")):
            shutil.copyfile(scratch / word, folder / Path(word).name)


def build_program(
    model: DescribedModel, compiled: Mapping[str, Path], libc: Mapping[str, Path], output: Path
) -> None:
    """Compile the emulation program of a model."""
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        code = compile_main(model, compiled, Path(scratch))
        objects = {name: path for name, path in compiled.items() if name.endswith(".o")}
        objects |= {path.name: path for path in c_runtime.compile_isa_levels(model, Path(scratch))}
        link_program({**objects, **libc, code.name: code}, output, model.triple)


def compile_main(model: DescribedModel, compiled: Mapping[str, Path], folder: Path) -> Path:
    """Compile all C code of the emulation program in a folder, and return the object file."""
    c_runtime.write_sources(model, compiled, folder)
    shutil.copyfile(_MAIN, folder / _MAIN.name)
    # A single file, because the program uses names that are static in the model's C code.
    includes = [f'#include "{name}"\n' for name in (c_runtime.SOURCE, _MAIN.name)]
    (folder / "whole.c").write_text("".join(includes))
    compile_c(folder, "whole.c", "whole.o", model.triple)
    return folder / "whole.o"


_log = logging.getLogger(__name__)

QEMU_VARIABLE: Final = "TVMFLOW_QEMU"
"""The environment variable with the folder of qemu's programs, if they are not on PATH."""


class EmulatedArch(NamedTuple):
    """An architecture that qemu emulates: its name in qemu, and the emulation program's target.

    `default_cpu` is qemu's CPU, with features, for code that names no CPU. `qemu_cpus` maps LLVM's CPU names to qemu's
    where these differ; if qemu lacks a CPU, to one with the same features or a few more.
    """

    qemu_arch: str
    zig_target: str
    default_cpu: str
    qemu_cpus: Mapping[str, str]
    default_features: frozenset[str] = frozenset()

    @property
    def program(self) -> str:
        """The name of qemu's program."""
        return f"qemu-{self.qemu_arch}"


def _riscv_vector_cpu(bits: int) -> str:
    return f"rv64,v=true,vlen={bits},elen=64,vext_spec=v1.0"


EMULATED_ARCHS: Final[Mapping[str, EmulatedArch]] = {
    "aarch64": EmulatedArch(
        qemu_arch="aarch64",
        zig_target="aarch64-linux-musl",
        default_cpu="cortex-a57",
        # qemu has had a Cortex-A55 since 8.1, and has none of the others.
        qemu_cpus=dict.fromkeys(
            ("carmel", "cortex-a55", "cortex-a78", "cortex-a78ae"), "cortex-a76"
        ),
        default_features=frozenset({"neon", "fp-armv8"}),
    ),
    "armv7": EmulatedArch(
        qemu_arch="arm",
        zig_target="arm-linux-musleabihf",
        default_cpu="cortex-a9",
        qemu_cpus={"generic": "cortex-a9"},
        default_features=frozenset({"neon", "vfp2", "vfp3", "thumb2"}),
    ),
    "riscv64": EmulatedArch(
        qemu_arch="riscv64",
        zig_target="riscv64-linux-musl",
        default_cpu="sifive-u54",
        qemu_cpus={
            "generic-rv64": "sifive-u54",
            "sifive-u74": "sifive-u54",
            "sifive-x280": _riscv_vector_cpu(512),
            "spacemit-x60": _riscv_vector_cpu(256),
        },
        default_features=frozenset("iamfdc"),
    ),
    "x86_64": EmulatedArch(
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
"""Keyed by the architecture's name in a `Platform`."""

# Android's functions take floats in general registers, so the program's C library must do the same.
_ARMV7_ANDROID: Final = EMULATED_ARCHS["armv7"]._replace(zig_target="arm-linux-musleabi")
_SYSTEMS: Final = ("linux", "android")

UNEMULATED_FEATURES: Final = frozenset(["avx512f"])
"""CPU features that no CPU of qemu supports, named as in /proc/cpuinfo."""

# The CPU of qemu that has all features that qemu can emulate.
_MAX_CPU: Final = "max"

INSTALL: Final = (
    "install qemu-user-static (Debian, Ubuntu) or qemu-user; without root: `apt-get download "
    f"qemu-user-static && dpkg -x qemu-user-static_*.deb FOLDER`, then {QEMU_VARIABLE}=FOLDER/usr/bin"
)


def find_emulated_arch(triple: str) -> EmulatedArch | None:
    """Return the architecture of an LLVM triple, or None if qemu does not emulate its platform."""
    platform = parse_triple(triple)
    if (platform.arch, platform.system) == ("armv7", "android"):
        return _ARMV7_ANDROID
    return EMULATED_ARCHS.get(platform.arch) if platform.system in _SYSTEMS else None


def require_emulated_arch(triple: str) -> EmulatedArch:
    """Return the architecture of an LLVM triple; StageError if qemu does not emulate its platform."""
    arch = find_emulated_arch(triple)
    if arch is None:
        raise StageError(
            f"{triple} cannot be emulated on this machine",
            fix=f"choose a target for Linux or Android on {', '.join(EMULATED_ARCHS)}, or verify.run_on: rpc",
        )
    return arch


class Emulator(NamedTuple):
    """A qemu program, and the CPU that it emulates."""

    program: Path
    arch: EmulatedArch
    cpu: str
    version: str

    def __str__(self) -> str:
        return f"{self.arch.program} {self.version} -cpu {self.cpu}"


def find_emulators() -> dict[str, Path | None]:
    """Return qemu's programs, such as `qemu-aarch64`, and their paths (None if not installed)."""
    return {arch.program: find_qemu(arch) for arch in EMULATED_ARCHS.values()}


def find_qemu(arch: EmulatedArch) -> Path | None:
    """Return the path of qemu's program for an architecture (static or not), or None."""
    folder = os.environ.get(QEMU_VARIABLE)
    names = (f"{arch.program}-static", arch.program)
    paths = (shutil.which(name, path=folder or None) for name in names)
    return next((Path(path) for path in paths if path), None)


def emulator_for(tvm: TvmTarget) -> Emulator:
    """Return the emulator of a target's CPU.

    Raises:
        StageError: when qemu does not emulate the target's platform.
        EnvironmentProblem: when qemu is not installed.
    """
    arch = require_emulated_arch(str(tvm.get("mtriple", "")))
    program = find_qemu(arch)
    if program is None:
        folder = os.environ.get(QEMU_VARIABLE)
        place = f"in ${QEMU_VARIABLE} ({folder})" if folder else "on PATH"
        message = f"there is no {arch.program} (nor {arch.program}-static) {place}"
        raise EnvironmentProblem(message, fix=INSTALL)
    words = _run_qemu([program, "--version"]).split()
    version = words[words.index("version") + 1] if "version" in words else "of unknown version"
    known_cpus = _run_qemu([program, "-cpu", "help"]).replace("\n", " ").split()
    emulator = Emulator(program, arch, choose_cpu(arch, tvm, known_cpus), version)
    _log.debug("emulating %s with %s", tvm.get("mcpu") or "no CPU", emulator)
    return emulator


def choose_cpu(arch: EmulatedArch, tvm: TvmTarget, known_cpus: Iterable[str]) -> str:
    """Return a known qemu CPU that rejects instructions that the target's CPU lacks; otherwise `max`.

    >>> choose_cpu(EMULATED_ARCHS["x86_64"], {"kind": "llvm", "mcpu": "x86-64-v3"}, ["Haswell", "max"])
    'Haswell'
    """
    cpu, attributes = str(tvm.get("mcpu", "")), [str(name) for name in tvm.get("mattr") or []]
    added = {name.removeprefix("+") for name in attributes if name.startswith("+")}
    known = set(known_cpus)
    choice = cpu if cpu in known else arch.qemu_cpus.get(cpu, cpu)
    if not cpu or cpu == "generic":
        choice = arch.default_cpu
    if arch.qemu_arch == "riscv64" and "v" in added and not choice.startswith("rv64,"):
        choice = _riscv_vector_cpu(max((_vector_bits(name) for name in added), default=128))
    elif added - arch.default_features and choice == arch.default_cpu:
        choice = _MAX_CPU
    name = choice.partition(",")[0]
    fallback = "rv64" if arch.qemu_arch == "riscv64" else _MAX_CPU
    return choice if name in known else fallback


def _vector_bits(feature: str) -> int:
    """Return the vector register length in bits that a feature such as `zvl256b` guarantees; at least 128."""
    digits = feature.removeprefix("zvl").removesuffix("b")
    return int(digits) if feature.startswith("zvl") and digits.isdigit() else 128


def _run_qemu(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        message = f"{command[0]} cannot be started: {error.strerror}"
        raise EnvironmentProblem(message, fix=INSTALL) from error
    return done.stdout + done.stderr


def run_emulated(
    emulator: Emulator, program: Path, batches: Sequence[Batch], *, threads: int, scratch: Path
) -> list[list[Array]]:
    """Run a model under emulation; return the outputs for each batch, in the order of the signature.

    The first batch runs again with another number of threads; different outputs raise a StageError.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        base = Path(folder).absolute()
        executable, inputs, outputs = (base / name for name in ("program", "in", "out"))
        # Files in the store are not executable, so the program is copied.
        shutil.copyfile(program, executable)
        executable.chmod(0o700)
        write_tensors(inputs, batches)
        command: list[str | Path] = [emulator.program, "-cpu", emulator.cpu]
        done = subprocess.run(
            [*command, executable, inputs, outputs, str(threads)],
            # When the program crashes, qemu writes a core dump to the current folder.
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            if problem := find_disk_problem([folder], done.stderr):
                raise problem
            raise _failure(emulator, done.returncode, done.stderr)
        return read_tensors(outputs)


def _failure(emulator: Emulator, code: int, stderr: str) -> StageError:
    """Return why the program ended; a signal that ends the emulated program also ends qemu."""
    lines = [line for line in stderr.strip().splitlines() if "TCG doesn't support" not in line]
    assertions = [line for line in lines if line.startswith("qemu-") and "Assertion" in line]
    if assertions:
        text = f"{emulator} itself crashed: {assertions[0]}"
        fix = "use a newer qemu (7.2 crashes on some vector instructions of riscv64), or verify.run_on: rpc"
    elif code == -signal.SIGILL:
        text = (
            f"the library was ended by SIGILL under {emulator}: it uses an instruction that this "
        )
        text += "CPU lacks, or that qemu does not emulate"
        fix = "check the target's mcpu and mattr against the machine; a newer qemu may emulate "
        fix += "more instructions, and verify.run_on: rpc runs the library on the machine itself"
    elif code < 0:
        text = f"the library was ended by {signal.Signals(-code).name} under {emulator}"
        fix = "run it on a device of this kind with verify.run_on: rpc, to see whether it crashes there too"
    else:
        prefix = "tvmflow-emulation-program: "
        last = next((line for line in reversed(lines) if prefix in line), "")
        reason = last.removeprefix(prefix) or (lines or [f"exit code {code}"])[-1]
        text = f"the library does not run under {emulator}: {reason}"
        fix = "check the target's mcpu and mattr; verify.run_on: rpc runs the library on the machine itself"
    return StageError(text, fix=fix)


# ---------------------------------------------------------------- tensor files
# Batches of arrays, in the format that the emulation program reads and writes (see emulation_main.c).

_MAGIC: Final = b"TVMFLOW1"


def write_tensors(path: Path, batches: Sequence[Batch]) -> None:
    """Write batches of arrays; all batches must have the same number of arrays."""
    import numpy as np

    with path.open("wb") as file:
        file.write(_MAGIC)
        file.write(struct.pack("<II", len(batches), len(batches[0]) if batches else 0))
        for array in (array for batch in batches for array in batch):
            name = str(array.dtype).encode()
            little_endian = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            file.write(struct.pack("<I", len(name)) + name)
            file.write(struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape))
            file.write(struct.pack("<Q", little_endian.nbytes))
            file.write(little_endian.tobytes())


def read_tensors(path: Path) -> list[list[Array]]:
    """Return the batches in a file; ValueError when it is damaged."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a file of tensors")
        batch_count, tensor_count = struct.unpack("<II", _read_exactly(file, 8))
        batches = [[_read_array(file) for _ in range(tensor_count)] for _ in range(batch_count)]
        if file.read(1):
            raise ValueError(f"{path} continues after its last tensor")
    return batches


def _read_array(file: IO[bytes]) -> Array:
    import numpy as np

    name = _read_exactly(file, struct.unpack("<I", _read_exactly(file, 4))[0]).decode()
    (dimensions,) = struct.unpack("<I", _read_exactly(file, 4))
    shape = struct.unpack(f"<{dimensions}q", _read_exactly(file, 8 * dimensions))
    data = _read_exactly(file, struct.unpack("<Q", _read_exactly(file, 8))[0])
    return np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(shape).astype(name)


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{file.name} ends too early")
    return data
