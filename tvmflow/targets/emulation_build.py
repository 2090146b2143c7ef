"""Builds the emulation program: the static program that loads and runs a library under qemu.

It is compiled from TVM's sources in its wheels, and from `emulation_program/`, by the compiler in `ziglang`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.targets import zig

_log = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent / "emulation_program"

# What a CPU needs of TVM's runtime: name -> the folder with the sources, the sources. Each group is
# compiled as one file, because nearly all of the time goes into headers.
_SOURCES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ffi": (
        "tvm_ffi/src/ffi",
        (
            *("backtrace", "container", "custom_allocator", "dtype", "error", "function"),
            *("init_once", "object", "tensor", "extra/env_c_api", "extra/env_context"),
            *("extra/json_parser", "extra/json_writer", "extra/library_module", "extra/module"),
        ),
    ),
    "vm": ("tvm/src/runtime/vm", ("builtin", "bytecode", "executable", "vm")),
    "runtime": (
        "tvm/src/runtime",
        (
            *("builtin_fp16", "cpu_device_api", "device_api", "file_utils", "logging"),
            *("memory/memory_manager", "module", "tensor", "thread_pool", "threading_backend"),
            *("timer", "workspace_pool", "extra/contrib/random/random", "extra/contrib/sort/sort"),
        ),
    ),
    "program": ("program", ("elf_library", "imports", "main", "model", "tensors")),
}
# Folders of the wheels that are copied into the tree that is compiled.
_WHEEL_FOLDERS: Final = ("tvm/include", "tvm/src/runtime", "tvm_ffi/include", "tvm_ffi/src")
_INCLUDES: Final = (
    ".",
    "tvm/include",
    "tvm/3rdparty/compiler-rt",
    "tvm_ffi/include",
    "tvm_ffi/src/ffi/extra",
    "program",
)
_FLAGS: Final = (
    *("-std=c++17", "-O1", "-g0", "-w", "-fno-sanitize=undefined"),
    *("-ffunction-sections", "-fdata-sections"),
    # TVM's own test of the byte order knows glibc only; every emulated architecture is little-endian
    "-DTVM_FFI_CMAKE_LITTLE_ENDIAN=1",
    *("-DTVM_FFI_USE_LIBBACKTRACE=0", "-DTVM_FFI_BACKTRACE_ON_SEGFAULT=0"),
)
# Threads get as much stack as under glibc: kernels keep small buffers there.
_LINK_FLAGS: Final = ("-static", "-s", "-Wl,--gc-sections", "-Wl,-z,stack-size=8388608")


def build_program(zig_target: str, output: Path, scratch: Path) -> None:
    """Compile the emulation program; this takes minutes on a slow machine.

    Args:
        zig_target: An `EmulatedArch.zig_target`.
        output: The program: the same bytes on every machine.
        scratch: A folder for temporary files. What zig caches there is reused by a later attempt.

    Raises:
        StageError: when the program cannot be compiled; the message holds the compiler's error.
        EnvironmentProblem: when a package with sources is not installed.
    """
    _log.debug("compiling the emulation program for %s in %s", zig_target, scratch)
    tree = scratch / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    _copy_sources(tree)
    for name, (folder, sources) in _SOURCES.items():
        lines = [f'#include "{folder}/{source}.cc"\n' for source in sources]
        (tree / f"{name}.cc").write_text("".join(lines))
    includes = [f"-I{folder}" for folder in _INCLUDES]

    def compile_object(name: str) -> str:
        _run_zig(tree, zig_target, *_FLAGS, *includes, "-c", f"{name}.cc", "-o", f"{name}.o")
        return f"{name}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_object, _SOURCES))
    _run_zig(tree, zig_target, *_LINK_FLAGS, *objects, "-o", "linked")
    shutil.move(tree / "linked", output)


def _copy_sources(tree: Path) -> None:
    """Copy TVM's sources, the headers that its wheels lack, and the program's, so that relative names suffice."""
    for folder in _WHEEL_FOLDERS:
        package, _, rest = folder.partition("/")
        shutil.copytree(_package_folder(package) / rest, tree / folder)
    shutil.copytree(_FOLDER / "tvm_shims", tree / "tvm", dirs_exist_ok=True)
    (tree / "program").mkdir()
    for path in _FOLDER.iterdir():
        if path.is_file():
            shutil.copyfile(path, tree / "program" / path.name)


def _package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise EnvironmentProblem(
            f"the package {name} is not installed",
            fix="run `tvmflow doctor`; it checks each package",
        )
    return Path(spec.origin).parent


def _run_zig(tree: Path, zig_target: str, *arguments: str) -> None:
    # zig compiles its C++ library for each architecture, which takes longer than all the rest: its cache
    # is kept for the next attempt, or permanently where the user has set a folder for it
    names = [f"ZIG_{scope}_CACHE_DIR" for scope in ("GLOBAL", "LOCAL")]
    caches = {name: os.environ.get(name) or str(tree.parent / "zig") for name in names}
    done = zig.run(tree, "c++", "-target", zig_target, *arguments, **caches)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = (errors or done.stderr.strip().splitlines() or [str(done.returncode)])[0]
        raise StageError(
            f"the emulation program for {zig_target} cannot be compiled: {first}",
            fix="check that apache-tvm, apache-tvm-ffi and ziglang have the versions that tvmflow requires (`tvmflow doctor`)",
        )
