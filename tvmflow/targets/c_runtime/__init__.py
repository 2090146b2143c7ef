"""Plain C libraries: the runtime and headers around the kernels and constants of a model.

`compiler.c_program` compiles the kernels and constants, and writes the C code that calls them. This package adds the
runtime (contexts, threads, checks) and the descriptions of inputs and outputs. `ziglang` compiles the resulting C
file for the target's system. TVM is not needed here. If a compiler or linker fails, StageError has its message.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.dimensions import ranges_text
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.generated_text import c_string, comment, identifier
from tvmflow.core.types import Dimension, Json, Size, TensorSpec, shape_text
from tvmflow.targets import linking
from tvmflow.targets.c_runtime import isa_levels, states, weights
from tvmflow.targets.c_runtime.isa_levels import IsaLevelCode
from tvmflow.targets.linking.zig import Interface
from tvmflow.targets.platforms import parse_triple

PROGRAM: Final = "program.c"
"""The model's C code, which calls its kernels."""
CONSTANTS: Final = "constants.o"
"""The object file with the weights."""
DEVICE_CODE: Final = "device_code.o"
"""The object file with the device's code, for its driver."""
SOURCE: Final = "model.c"
"""The C file that includes all others."""

_FOLDER: Final = Path(__file__).parent
_HEADER: Final = "library.h"
_COPIED: Final = (
    *("android.h", "append.c", "cpu.c", "dimensions.c", "runtime.c", "runtime.h"),
    *("states.c", "threads_windows.h", "weights.c"),
)
# System -> code for shared libraries; programs get the same from Microsoft's C library or Android's compiler.
_ADDITIONS: Final[Mapping[str, str]] = {"android": "android.c", "windows": "dll.c"}
_LOADER: Final = "library.js"
# In a folder of objects: a symlink to the shared library that was linked from them, or a copy.
_LINKED: Final = "linked"
# Dispatches calls to an ISA level.
_LEVELS: Final = "levels.c"
_JAVA: Final = "java.c"
# Parts of the header, for libraries with dimensions and with a device.
_DIMENSIONS: Final = "dimensions.h"
_DEVICE: Final = "device_functions.h"
# Parts of the JavaScript loader, for libraries with dimensions.
_DIMENSIONS_LOADER: Final = "dimensions.js"
_LOADER_PARTS: Final = ("dimensions_title", "dimensions_read", "dimensions_methods")
SEPARATOR: Final = "//----\n"
# `device.h` is the interface between `device.c` and the executor of one driver.
_DEVICE_SOURCES: Final = ("device.c", "device.h")
_TEMPLATES: Final = (
    *(_HEADER, _DIMENSIONS, states.HEADER),
    *(_LOADER, _DIMENSIONS_LOADER, states.LOADER),
)
SOURCES: Final = tuple(
    _FOLDER / name for name in (*_TEMPLATES, *_COPIED, *_ADDITIONS.values(), _JAVA)
)


def list_sources(has_isa_levels: bool, executor: str = "") -> tuple[Path, ...]:
    """Return the C sources in this package that a library needs, optionally for ISA levels and a device."""
    names = [*_list_optional_sources(has_isa_levels, executor), *([_DEVICE] if executor else [])]
    return (*SOURCES, *(_FOLDER / name for name in names))


def _list_optional_sources(has_isa_levels: bool, executor: str) -> list[str]:
    levels = [_LEVELS] if has_isa_levels else []
    return [*levels, *_DEVICE_SOURCES, executor] if executor else levels


# System -> the architectures with C libraries.
_ARCHS: Final[Mapping[str, Collection[str]]] = {
    **{system: linking.LINKERS[system].ARCHS for system in ("linux", "macos", "windows")},
    "android": ("aarch64", "armv7", "x86_64"),
    "wasi": linking.wasm.ARCHS,
    "ios": ("aarch64",),
    "none": tuple(linking.MICROCONTROLLERS),
}
# Systems without threads and without memory-mapped files.
_SERIAL: Final = ("wasi", "none")
_LIBCS: Final = ("gnu", "musl")
# For a single call, more threads than this do not pay off; a program may ask for more.
_MAX_DEFAULT_THREADS: Final = 64
# The size of a context on a microcontroller without its tensors, in bytes; the runtime checks that it suffices.
_CONTEXT_BYTES: Final = 512
# The bytes, with padding, of each value that depends on dynamic sizes.
_VALUE_BYTES: Final = 64
_MEMORY: Final = """
/* The memory that a context takes: `allocate` is asked for it once, with an alignment of at most 128. There is no heap:
 *
 *   static _Alignas(128) unsigned char memory[%(NAME)s_MEMORY_BYTES];
 *   static void *allocate(void *user, size_t bytes, size_t alignment) { return bytes <= sizeof memory ? memory : NULL; }
 *   static void release(void *user, void *memory) {}
 *   const %(name)s_options options = {.abi = %(NAME)s_ABI, .allocate = allocate, .release = release};
 */
#define %(NAME)s_MEMORY_BYTES %(bytes)s
"""
# Linux truncates a thread's name to this many bytes.
_MAX_THREAD_NAME: Final = 15
_FUNCTIONS: Final = (
    *("create", "run", "destroy", "inputs", "outputs", "message", "missing_feature"),
    *("bounded_axis", "output_shape"),
    *("threads", "kernel_count", "kernel_name", "profile"),
)
_DIMENSION_FUNCTIONS: Final = (
    *("dimensions", "set_dimension", "get_dimension", "set_input_shape"),
    *("input_shape", "input_bytes", "output_bytes"),
)
_DEVICE_FUNCTIONS: Final = ("create_on", "device_error", "use_device_memory", "enqueue", "wait")
# Executor -> the fields of the device struct that are specific to its driver.
_MEMBERS: Final[Mapping[str, str]] = {
    "opencl.c": """\
  void *context; /* a cl_context, which the library retains */
  void *device;  /* a cl_device_id of it */
  void *queue;   /* a cl_command_queue of both, in order, that all is done on; NULL for one of the library's own */
  const char *cache; /* a folder of your own for what the driver builds; NULL for that in %(NAME)s_DEVICE_CACHE, if any */
""",
    "cuda.c": """\
  void *context; /* a CUcontext */
  void *device;  /* not used */
  void *queue;   /* a CUstream that all is done on; NULL for one of the library's own */
""",
}
# Executor -> the type of the device memory that a program may pass.
_DEVICE_MEMORY: Final[Mapping[str, str]] = {
    "opencl.c": "a cl_mem of the context that create_on was given",
    "cuda.c": "a CUdeviceptr",
}
# The native methods of the Java class.
_JAVA_METHODS: Final = (
    *("create", "destroy", "compute", "shapeOf", "choose", "message", "missingFeature"),
)
_JAVA_STATE_METHODS: Final = (
    *("takeStep", "resetStates", "measureStates", "truncateStates", "dropRows", "readState"),
    *("saveStates", "loadStates", "forkStates", "chooseToken", "setSeed"),
)


class JavaClass(NamedTuple):
    """A Java class that calls a library; package and name consist of letters, digits and dots."""

    package: str
    name: str

    @property
    def prefix(self) -> str:
        """The name prefix of its native methods in C."""
        return f"Java_{self.package.replace('.', '_')}_{self.name}_"


class DescribedModel(NamedTuple):
    """A model as a C library describes it, with the CPU features and ISA levels of its kernels.

    `weights_head` is the head of the weights file; empty if the weights are in the library. `executor` is the file that
    launches kernels on a device.
    """

    name: str
    signature: Mapping[str, Json]
    features: Sequence[str]
    triple: str
    weights_head: bytes = b""
    levels: tuple[IsaLevelCode, ...] = ()
    executor: str = ""

    def at_level(self, level: IsaLevelCode) -> DescribedModel:
        """Return the inner library of one ISA level; it need not check the CPU's features."""
        return self._replace(name=f"{self.name}-{level.name}", features=(), levels=())

    @property
    def prefix(self) -> str:
        """The prefix of all C names, without the underscore after it."""
        return identifier(self.name)

    @property
    def dimensions(self) -> list[Dimension]:
        """The dimensions that a caller sets, in their order in C."""
        return sorted(Dimension.list_of(self.signature), key=lambda dimension: dimension.name)

    @property
    def has_states(self) -> bool:
        """True if contexts hold states, which is impossible on a device, or without a heap."""
        is_possible = not self.executor and self.system != "none"
        return bool(self.signature.get("states")) and is_possible

    @property
    def system(self) -> str:
        """The operating system; `none` for a microcontroller without one."""
        return parse_triple(self.triple).system

    @property
    def maps_files(self) -> bool:
        """True if programs on this system can memory-map a file."""
        return self.system not in _SERIAL


def symbol_prefix(name: str) -> str:
    """Return the prefix of a model's symbols in C and C++ libraries.

    >>> symbol_prefix("res-net")
    'res_net_'
    """
    return f"{identifier(name)}_"


def unsupported_reason(triple: str) -> str:
    """Return why a C library cannot be built for a system; otherwise an empty string."""
    platform = parse_triple(triple)
    if platform.system == "linux" and not platform.libc.startswith(_LIBCS):
        return f"the C library of {triple} is unknown (there are {', '.join(_LIBCS)})"
    archs = _ARCHS.get(platform.system)
    if archs is None:
        return f"no C library is made for the system of {triple} (there is {', '.join(sorted(_ARCHS.keys() - {'none'}))}, and microcontrollers without a system)"
    if platform.arch not in archs:
        return f"no C library is made for {platform.arch} on {platform.system} (there is {', '.join(archs)})"
    return ""


class LibraryFiles(NamedTuple):
    """The file names of a C library by its system's conventions; empty for files that it does not have.

    On Windows, programs link with the import library to use a DLL. The loader is JavaScript, for WebAssembly.
    """

    header: str
    static: str
    shared: str = ""
    import_library: str = ""
    loader: str = ""

    @classmethod
    def of(cls, name: str, triple: str) -> LibraryFiles:
        """Return the names for a model and a system.

        >>> LibraryFiles.of("net", "arm64-apple-macos13").shared
        'libnet.dylib'
        """
        platform = parse_triple(triple)
        header = f"{name}.h"
        if platform.libc == "msvc":
            return cls(header, f"{name}_static.lib", f"{name}.dll", f"{name}.lib")
        if platform.system == "windows":
            return cls(header, f"lib{name}.a", f"{name}.dll", f"lib{name}.dll.a")
        if not platform.has_shared_libraries:
            return cls(header, f"lib{name}.a")
        if platform.system == "wasi":
            return cls(header, f"lib{name}.a", f"{name}.wasm", loader=f"{name}.js")
        return cls(header, f"lib{name}.a", f"lib{name}{platform.shared_suffix}")


def link(
    model: DescribedModel,
    compiled: Mapping[str, Path],
    shared: Path | None,
    static: Path | None = None,
    header: Path | None = None,
    import_library: Path | None = None,
    java: JavaClass | None = None,
    folder: Path | None = None,
) -> None:
    """Compile a model's C code, and write the files of a library whose paths are not None.

    Args:
        model: The model.
        compiled: The files from `compiler.c_program`, or for ISA levels from `isa_levels.join_constants`, by name.
        shared: The shared library; on a system without shared libraries, a static one.
        static: The static library.
        header: The header.
        import_library: The import library of a DLL.
        java: The Java class that calls the shared library.
        folder: Where C code and objects are kept for further libraries of the same model; None to remove them.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            parent = next(iter(compiled.values())).parent
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        sources = folder
        objects = [path for path in compiled.values() if path.suffix == ".o"]
        objects += _compile_code(model, compiled, sources)
        files = LibraryFiles.of(model.name, model.triple)
        linked = sources / _LINKED
        if shared is not None and linked.exists() and not (java or import_library):
            shutil.copyfile(linked, shared)
        elif shared is not None and files.shared:
            names = (
                *_FUNCTIONS,
                *(_DIMENSION_FUNCTIONS if model.dimensions else ()),
                *(states.FUNCTIONS if model.has_states else ()),
                *(("level",) if model.levels else ()),
                *(_DEVICE_FUNCTIONS if model.executor else ()),
            )
            functions = [f"{model.prefix}_{function}" for function in names]
            alone = _compile_additions(model.triple, sources)
            if java:
                alone.append(_compile_java(model, java, sources))
                methods = _JAVA_METHODS + (_JAVA_STATE_METHODS if model.has_states else ())
                functions += [f"{java.prefix}{method}" for method in methods]
            interface = Interface(files.shared, functions, loads_libraries=bool(model.executor))
            linking.link_c_library(
                [*objects, *alone], shared, model.triple, interface, import_library
            )
            if not (java or linked.exists()):
                symlink_or_copy(shared.resolve(), linked)
        elif shared is not None:
            linking.archive_static(objects, shared, model.triple)
        if static is not None:
            linking.archive_static(objects, static, model.triple)
        if header is not None:
            shutil.copyfile(sources / _HEADER, header)


def _compile_code(model: DescribedModel, compiled: Mapping[str, Path], folder: Path) -> list[Path]:
    """Compile a model's C code in a folder, unless it has the objects already; return the objects."""
    names = ["model.o", *(f"{level.name}/{level.file('o')}" for level in model.levels)]
    objects = [folder / name for name in names]
    if not all(path.exists() for path in objects):
        write_sources(model, compiled, folder)
        linking.compile_c(folder, SOURCE, "model.o", model.triple)
        compile_isa_levels(model, folder)
    return objects


def _compile_additions(triple: str, folder: Path) -> list[Path]:
    """Return the objects that only a shared library needs; to a static one, the program provides them."""
    source = _ADDITIONS.get(parse_triple(triple).system)
    if source is None:
        return []
    shutil.copyfile(_FOLDER / source, folder / source)
    linking.compile_c(folder, source, "additions.o", triple)
    return [folder / "additions.o"]


def _compile_java(model: DescribedModel, java: JavaClass, folder: Path) -> Path:
    lines = [
        f"#define TF(name) {model.prefix}_##name",
        f"#define TF_STATUS(name) {model.prefix.upper()}_##name",
        f"#define TF_JAVA(name) {java.prefix}##name",
        *(["#define TF_OPEN_SIZES"] if model.dimensions else []),
        *(["#define TF_HAS_STATES"] if model.has_states else []),
        f'#include "{_HEADER}"',
        (_FOLDER / _JAVA).read_text(),
    ]
    (folder / _JAVA).write_text("\n".join(lines), encoding="utf-8")
    linking.compile_c(folder, _JAVA, "java.o", model.triple)
    return folder / "java.o"


def write_sources(model: DescribedModel, compiled: Mapping[str, Path], folder: Path) -> None:
    """Write a library's C code; `SOURCE` includes all files except those of ISA levels."""
    for file in (*_COPIED, *_list_optional_sources(bool(model.levels), model.executor)):
        shutil.copyfile(_FOLDER / file, folder / file)
    for level in model.levels:
        (folder / level.name).mkdir()
        program = {PROGRAM: compiled[level.file(PROGRAM)]}
        write_sources(model.at_level(level), program, folder / level.name)
    if model.levels:
        code = isa_levels.write_code(
            model.prefix, model.levels, len(model.dimensions), model.has_states, model.triple
        )
        header = write_header(model)
    else:
        shutil.copyfile(compiled[PROGRAM], folder / PROGRAM)
        code, header = _write_model(model), write_header(model, compiled[PROGRAM].read_text())
    (folder / _HEADER).write_text(header, encoding="utf-8")
    (folder / SOURCE).write_text(code, encoding="utf-8")


def compile_isa_levels(model: DescribedModel, folder: Path) -> list[Path]:
    """Compile each ISA level's C code in the folder of `write_sources`; return the objects."""
    for level in model.levels:
        linking.compile_c(folder / level.name, SOURCE, level.file("o"), model.triple)
    return [folder / level.name / level.file("o") for level in model.levels]


def list_statuses(
    has_dimensions: bool, has_device: bool = False, has_states: bool = False
) -> dict[str, str]:
    """Return the status codes that a C header defines, by name without the symbol prefix."""
    parts = {_DIMENSIONS: has_dimensions, _DEVICE: has_device, states.HEADER: has_states}
    text = (_FOLDER / _HEADER).read_text()
    text += "".join(_read_parts(name)[0] for name, is_there in parts.items() if is_there)
    return dict(re.findall(r"%\(NAME\)s_(\w+) = (\d+)", text))


def _read_parts(name: str) -> list[str]:
    return (_FOLDER / name).read_text().split(SEPARATOR)


def write_header(model: DescribedModel, program: str = "") -> str:
    """Return the public header."""
    name = model.prefix.upper()
    places = [
        line
        for kind in ("inputs", "outputs")
        for line in _write_places(name, kind, [entry["name"] for entry in model.signature[kind]])
    ]
    if model.dimensions:
        places += _write_places(name, "dimensions", [entry.name for entry in model.dimensions])
    for kind, entries in states.list_steps(model.signature).items() if model.has_states else ():
        places += _write_places(name, kind, entries)
    values = {
        "name": model.prefix,
        "NAME": name,
        "title": model.name,
        "tensors": write_tensor_comment(model.signature),
        "places": "\n".join(places),
        "threads": str(_MAX_DEFAULT_THREADS),
        "memory": _write_memory(model, program),
        "needs": ", and the driver of the device" if model.executor else "",
    }
    values |= weights.header_values(values, model.weights_head, model.maps_files)
    parts: list[tuple[Any, ...]] = []
    if model.dimensions:
        ranges = {"ranges": ranges_text(model.dimensions)}
        parts.append((*_read_parts(_DIMENSIONS), ranges))
    if model.has_states:
        parts.append((*_read_parts(states.HEADER), states.header_values(model.signature)))
    if model.levels:
        names = {"levels": ", ".join(level.name for level in model.levels)}
        parts.append((isa_levels.STATUSES, isa_levels.DECLARATIONS, names))
    if model.executor:
        members = _MEMBERS[model.executor] % values
        device = {"members": members, "memory": _DEVICE_MEMORY[model.executor]}
        parts.append((*_read_parts(_DEVICE), device))
    values["dimension_statuses"] = "".join(text % {**values, **own} for text, _, own in parts)
    values["dimension_functions"] = "".join(text % {**values, **own} for _, text, own in parts)
    return (_FOLDER / _HEADER).read_text() % values


def write_loader(model: DescribedModel, file: str = "") -> str:
    """Return the JavaScript module that loads the WebAssembly library."""
    files = LibraryFiles.of(model.name, model.triple)
    values = {
        "name": model.prefix,
        "title": model.name,
        "tensors": write_tensor_comment(model.signature),
        "file": file or files.loader,
        "module": files.shared,
    }
    for part, text in zip(_LOADER_PARTS, _read_parts(_DIMENSIONS_LOADER), strict=True):
        values[part] = text % values if model.dimensions else ""
    values["states_methods"] = ""
    if model.has_states:
        own = states.loader_values(model.signature, model.dimensions)
        values["states_methods"] = (_FOLDER / states.LOADER).read_text() % {**values, **own}
    return (_FOLDER / _LOADER).read_text() % values


def _write_places(name: str, kind: str, entries: Sequence[str]) -> list[str]:
    """Return macros: the number of inputs, outputs or dimensions, and the index of each unique name."""
    words = [identifier(f"_{entry}").upper() for entry in entries]
    return [
        f"#define {name}_{kind.upper()} {len(entries)}",
        *(
            f"#define {name}_{kind.upper().removesuffix('S')}{word} {index}"
            for index, word in enumerate(words)
            if words.count(word) == 1 and word.isascii()
        ),
    ]


def _write_memory(model: DescribedModel, program: str) -> str:
    """Return the macro with the bytes of a context, which programs on microcontrollers allocate."""
    if model.system != "none":
        return ""
    planned = re.findall(
        r"#define TF_(?:ARENA|STAGING|SCRATCH|LARGEST_TENSORS|LARGEST_SCRATCH) (\d+)u", program
    )
    counted = re.findall(r"#define TF_(?:VALUES|CALLS|COUNTS) (\d+)u", program)
    values = sum(map(int, counted)) * _VALUE_BYTES if model.dimensions else 0
    size = _context_bytes(model) + sum(map(int, planned)) + values
    return _MEMORY % {"NAME": model.prefix.upper(), "name": model.prefix, "bytes": str(size)}


def _context_bytes(model: DescribedModel) -> int:
    if not model.dimensions:
        return _CONTEXT_BYTES
    tensors = len(model.signature["inputs"]) + len(model.signature["outputs"])
    return _CONTEXT_BYTES + _VALUE_BYTES * (tensors + len(model.dimensions))


def _write_model(model: DescribedModel) -> str:
    """Return the library's C code: the description of the model, then the program and the runtime."""
    name, head, dimensions = model.prefix, model.weights_head, model.dimensions
    text = f"a dimension has a size that it cannot have: {ranges_text(dimensions)}"
    ranges = [f"#define TF_DIMENSIONS {len(dimensions)}", f"#define TF_RANGES {c_string(text)}"]
    lines = [
        "#define _GNU_SOURCE",
        f"#define TF(name) {name}_##name",
        f"#define TF_STATUS(name) {name.upper()}_##name",
        f"#define TF_DEFAULT_THREADS {_MAX_DEFAULT_THREADS}",
        *(["#define TF_THREADS"] if model.system not in _SERIAL else []),
        f"#define TF_CONTEXT_BYTES {_context_bytes(model)}",
        *(["#define TF_FREESTANDING"] if model.system == "none" else []),
        f"#define TF_THREAD_NAME {c_string(model.name.encode()[:_MAX_THREAD_NAME].decode(errors='ignore'))}",
        *isa_levels.write_features(model.features, model.triple),
        *(["#define TF_DEVICE"] if model.executor else []),
        *(weights.write_code(head, model.maps_files) if head else []),
        *(ranges if dimensions else []),
        *(states.write_code(model.signature, dimensions) if model.has_states else []),
        f"#define TF_WRONG_SIZES {', '.join(map(c_string, _describe_sizes(model.signature)))}",
        f'#include "{_HEADER}"',
        '#include "runtime.h"',
        f'#include "{PROGRAM}"',
        '#include "cpu.c"',
        '#include "weights.c"',
        *(['#include "dimensions.c"'] if dimensions else []),
        *([f'#include "{model.executor}"'] if model.executor else []),
        '#include "runtime.c"',
        *([f'#include "{states.SOURCE}"'] if model.has_states else []),
    ]
    for direction in ("inputs", "outputs"):
        lines += _write_tensors(direction, model.signature[direction])
    return "\n".join(lines) + "\n"


def _describe_sizes(signature: Mapping[str, Json]) -> Iterator[str]:
    """Yield the error message for a wrong size of each input and output."""
    for word, direction in (("input", "inputs"), ("output", "outputs")):
        for tensor in signature[direction]:
            spec = TensorSpec.from_json(tensor)
            size = ", by the sizes that were chosen" if spec.sizes else f", {spec.bytes} bytes"
            yield f"{word} '{spec.name}' has another size than {spec.dtype} {shape_text(tensor)}{size}"


def _write_tensors(direction: str, tensors: Sequence[Mapping[str, Json]]) -> list[str]:
    shapes = [
        f"static const int64_t tf_{direction}_shape{index}[] = {{{', '.join(describe_shape(tensor)) or '0'}}};"
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


def describe_shape(tensor: Mapping[str, Json]) -> list[str]:
    """Return the sizes of a tensor in C; a dynamic size is -1."""
    sizes: Sequence[Size] = tensor.get("sizes") or tensor["shape"]
    return [str(size) if isinstance(size, int) else "-1" for size in sizes]


def write_tensor_comment(signature: Mapping[str, Json]) -> str:
    """Return the lines of a C comment that describes the inputs and outputs."""
    return "\n".join(f" * {comment(line)}" for line in describe_tensors(signature))


def describe_tensors(
    signature: Mapping[str, Json], write_name: Callable[[str], str] = str
) -> list[str]:
    """Return a line for each input, output and dimension: `takes data: float32 [1, 3]`."""
    tensors = [
        f"{verb} {write_name(tensor['name'])}: {tensor['dtype']} {shape_text(tensor)}"
        for verb, direction in (("takes", "inputs"), ("gives", "outputs"))
        for tensor in signature[direction]
    ]
    ranges = Dimension.list_of(signature)
    return [*tensors, *(f"where {entry.name} is {entry.range_text}" for entry in ranges)]
