"""PE: DLLs for Windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from tvmflow.targets.linking import coff
from tvmflow.targets.linking.base import IMPORT_LIBRARY, Interface, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> its name in the tool that writes import libraries, and in the linker.
_MACHINES: Final[Mapping[str, tuple[str, str]]] = {
    "x86_64": ("i386:x86-64", "x64"),
    "aarch64": ("arm64", "arm64"),
}
ARCHS: Final = tuple(_MACHINES)

_RUNTIME_DLL: Final = "tvm_ffi.dll"

# What LLVM calls for large stack frames: in the system's own library.
_STACK_PROBE: Final = "__chkstk"
# The C library's functions that kernels call: memory, and the mathematics that LLVM has no instruction for. What else a
# C library calls.
_C_FUNCTIONS: Final = frozenset(
    [
        *("memcpy", "memmove", "memset", "memcmp"),
        *("_aligned_malloc", "_aligned_free", "strcmp", "strncmp"),
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
# The system's functions that a C library calls: threads, locks, clocks and files in memory.
_SYSTEM_FUNCTIONS: Final = (
    *("AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW"),
    *("WakeAllConditionVariable", "WakeConditionVariable"),
    *("CreateThread", "WaitForSingleObject", "CloseHandle", "SwitchToThread"),
    *("GetCurrentProcess", "GetProcessAffinityMask"),
    *("QueryPerformanceCounter", "QueryPerformanceFrequency"),
    *(
        "CreateFileW",
        "GetFileSizeEx",
        "GetFileType",
        "CreateFileMappingW",
        "MapViewOfFile",
        "UnmapViewOfFile",
    ),
    "MultiByteToWideChar",
)
# Function -> the DLL that has it.
_DLLS: Final[Mapping[str, str]] = {
    _STACK_PROBE: "ntdll.dll",
    **dict.fromkeys(_C_FUNCTIONS, "ucrtbase.dll"),
    **dict.fromkeys(_SYSTEM_FUNCTIONS, "kernel32.dll"),
}
# The beginning of the name of a pointer to an imported function.
_IMPORTED: Final = "__imp_"
# A mark of code with floating point that only Microsoft's C library looks for; GNU's name of the stack probe.
_ALIASES: Final = (
    "/alternatename:_fltused=__ImageBase",
    f"/alternatename:___chkstk_ms={_STACK_PROBE}",
)


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a DLL; its import libraries are made from the symbols that the objects need.

    The arguments are those of `Linker.link`. The import library of a C library is `IMPORT_LIBRARY`.
    """
    dlltool_machine, linker_machine = _MACHINES[platform.arch]
    needed = {
        symbol.removeprefix(_IMPORTED)
        for name in names
        for symbol in coff.undefined_symbols(folder / name)
    }
    libraries = []
    for dll, symbols in _imports(needed).items():
        stem = dll.partition(".")[0]
        (folder / f"{stem}.def").write_text("\n".join([f"LIBRARY {dll}", "EXPORTS", *symbols, ""]))
        files = ("-d", f"{stem}.def", "-l", f"{stem}.lib")
        run_zig(folder, "dlltool", "-m", dlltool_machine, *files)
        libraries.append(f"{stem}.lib")
    output, visible = "linked.dll", []
    if interface:
        output = interface.file
        visible = [f"/implib:{IMPORT_LIBRARY}", *(f"/export:{f}" for f in interface.functions)]
    run_zig(
        folder,
        "lld-link",
        # a library of kernels has no entry point, and /Brepro makes its time stamp a digest
        *("/dll", "/noentry", "/nodefaultlib", "/Brepro", f"/machine:{linker_machine}", *_ALIASES),
        *(f"/out:{output}", *visible, *names, *libraries),
    )
    return output


def _imports(symbols: Set[str]) -> dict[str, list[str]]:
    """Return the symbols that each DLL provides. The linker reports symbols that no DLL is known for."""
    imports: dict[str, list[str]] = {}
    # GNU's name of the stack probe is an alias of this one, which must be imported for it
    for symbol in sorted({*symbols, _STACK_PROBE}):
        dll = _RUNTIME_DLL if symbol.startswith("TVMFFI") else _DLLS.get(symbol)
        if dll:
            imports.setdefault(dll, []).append(symbol)
    return imports
