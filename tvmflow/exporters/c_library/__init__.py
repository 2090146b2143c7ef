"""`c-library`: the model as a plain C library that needs nothing of TVM: `lib<name>.so`, `lib<name>.a`, `<name>.h`.

`build` compiled the kernels, the constants and the calls of kernels in order (`compiler.c_library`).
Here this becomes one file of C with the runtime (contexts, threads, checks) and the descriptions of
inputs and outputs, compiled by the compiler in `ziglang` for the system of the target.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.compiler import form_names
from tvmflow.core.types import Json
from tvmflow.exporters import _base
from tvmflow.exporters._base import BuiltModel, ExportRequest, cpu_only_reason
from tvmflow.targets.linking import archive_static, compile_c, link_c_library

FORM: Final = form_names.C_LIBRARY
SOURCE: Final = "model.c"

_FOLDER: Final = Path(__file__).parent
_HEADER: Final = "library.h"
_COPIED: Final = ("cpu.c", "runtime.c", "runtime.h")
SOURCES: Final = tuple(_FOLDER / name for name in (_HEADER, *_COPIED))

_SYSTEMS: Final = ("linux",)
_LIBCS: Final = ("gnu", "musl")
# More CPUs than this are not worth the threads for one call; a program may ask for more.
_MOST_DEFAULT_THREADS: Final = 64
_FUNCTIONS: Final = (
    *("create", "run", "destroy", "inputs", "outputs", "message", "missing_feature"),
    *("threads", "kernel_count", "kernel_name", "profile"),
)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no C library for a target: only CPUs, Linux, and the C libraries whose headers there are."""
    reason = cpu_only_reason(request)
    platform = request.platform
    if not reason and platform.system not in _SYSTEMS:
        reason = f"no C library is made for {platform.system or 'a target without a system'} (there is {', '.join(_SYSTEMS)})"
    if not reason and not platform.libc.startswith(_LIBCS):
        reason = f"the C library of {request.triple} is unknown (there are {', '.join(_LIBCS)})"
    return reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the libraries and the header, in a folder `<name>-c-library`."""
    name = request.name
    return tuple(
        f"{name}-c-library/{file}" for file in (f"lib{name}.so", f"lib{name}.a", f"{name}.h")
    )


def export(built: BuiltModel, folder: Path) -> None:
    """Compile the C code, and write both libraries and the header."""
    shared, static, header = (folder / name for name in files(built.request))
    header.parent.mkdir(exist_ok=True)
    name = _base.identifier(built.name)
    triple = built.request.triple
    compiled = built.forms[FORM]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = Path(scratch)
        write_sources(built, sources)
        compile_c(sources, SOURCE, "model.o", triple)
        objects = [path for path in compiled.values() if path.suffix == ".o"]
        objects.append(sources / "model.o")
        link_c_library(objects, shared, triple, [f"{name}_{function}" for function in _FUNCTIONS])
        archive_static(objects, static, triple)
        shutil.copyfile(sources / _HEADER, header)


def write_sources(built: BuiltModel, folder: Path) -> None:
    """Write the C code of a library: compiling `SOURCE` there compiles all of it but kernels and constants."""
    name = _base.identifier(built.name)
    for file in _COPIED:
        shutil.copyfile(_FOLDER / file, folder / file)
    shutil.copyfile(built.forms[FORM][form_names.C_PROGRAM], folder / form_names.C_PROGRAM)
    (folder / _HEADER).write_text(_write_header(built, name))
    (folder / SOURCE).write_text(_write_model(built, name))


def _write_header(built: BuiltModel, name: str) -> str:
    """Return the public header."""
    values = {
        "name": name,
        "NAME": name.upper(),
        "title": built.name,
        "tensors": _base.write_tensor_comment(built.signature),
        "places": "\n".join(_write_places(name.upper(), built.signature)),
        "threads": str(_MOST_DEFAULT_THREADS),
    }
    return (_FOLDER / _HEADER).read_text() % values


def _write_places(name: str, signature: Mapping[str, Json]) -> list[str]:
    """Return the macros with the numbers of inputs and outputs, and the place of each whose name is its own in C."""
    lines = []
    for direction in ("inputs", "outputs"):
        tensors = signature[direction]
        lines.append(f"#define {name}_{direction.upper()} {len(tensors)}")
        words = [_base.identifier(f"_{tensor['name']}").upper() for tensor in tensors]
        lines += [
            f"#define {name}_{direction.upper().removesuffix('S')}{word} {index}"
            for index, word in enumerate(words)
            if words.count(word) == 1 and word.isascii()
        ]
    return lines


def _write_model(built: BuiltModel, name: str) -> str:
    """Return the C code of the library: what its model is, then the program and the runtime."""
    features = built.manifest["target"]["features"]
    lines = [
        "#define _GNU_SOURCE",
        f"#define TF(name) {name}_##name",
        f"#define TF_STATUS(name) {name.upper()}_##name",
        f"#define TF_DEFAULT_THREADS {_MOST_DEFAULT_THREADS}",
        "#define TF_THREADS",
        f"#define TF_FEATURES {''.join(f'{c_string(feature)}, ' for feature in features)}",
        f'#include "{_HEADER}"',
        '#include "runtime.h"',
        f'#include "{form_names.C_PROGRAM}"',
        '#include "cpu.c"',
        '#include "runtime.c"',
    ]
    for direction in ("inputs", "outputs"):
        lines += _write_tensors(direction, built.signature[direction])
    return "\n".join(lines) + "\n"


def _write_tensors(direction: str, tensors: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return the C code that describes inputs or outputs."""
    shapes = [
        f"static const int64_t tf_{direction}_shape{index}[] = {{{', '.join(map(str, tensor['shape'])) or '0'}}};"
        for index, tensor in enumerate(tensors)
    ]
    entries = [
        f"    {{{c_string(tensor['name'])}, {c_string(tensor['dtype'])}, tf_{direction}_shape{index}, "
        f"{len(tensor['shape'])}, TF_{direction.upper()}_BYTES{index}}},"
        for index, tensor in enumerate(tensors)
    ]
    return [
        *shapes,
        f"const tf_tensor *TF({direction})(void) {{",
        "  static const tf_tensor tensors[] = {",
        *entries,
        "    {NULL, NULL, NULL, 0, 0},",
        "  };",
        "  return tensors;",
        "}",
    ]


def c_string(text: str) -> str:
    r"""Return a text as a string of C, in UTF-8.

    >>> print(c_string('a"b\\c'), c_string("ä??/"))
    "a\042b\134c" "\303\244\077\077\057"
    """
    plain = "".join(
        chr(byte)
        if chr(byte).isascii() and (chr(byte).isalnum() or chr(byte) in " _-.:,()")
        else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{plain}"'
