"""`cpp`: a CMake project with C libraries, their C++17 header, and a command line tool."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.dimensions import choose_tuning_size, find_axes
from tvmflow.core.errors import StageError
from tvmflow.core.generated_text import c_string, comment, markdown_code
from tvmflow.core.types import Json, TensorSpec
from tvmflow.exporters import c_library
from tvmflow.exporters.c_library import read_images
from tvmflow.exporters.exporter import (
    BuiltModel,
    ExportRequest,
    PartitionedModel,
    fill_template,
    write_text,
)
from tvmflow.runtime.bundles import C_RUNTIME, read_bundle, runtime_of
from tvmflow.runtime.labels import read_labels
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime import (
    DescribedModel,
    LibraryFiles,
    describe_shape,
    describe_tensors,
    states,
)
from tvmflow.targets.linking.zig import find_program_errors

FOLDER: Final = Path(__file__).with_name("project")
TEMPLATES: Final = ("model.hpp", "library.hpp")

# Keywords of C++23 and common namespaces, which a recipe's name may equal.
_RESERVED: Final = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class "
    "co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype "
    "default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline "
    "int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template "
    "this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t "
    "while xor xor_eq main std tvmflow_models".split()
)
# A line of a template that marks the following lines: for all models, fixed or dynamic shapes, or states.
_MARK: Final = re.compile(r"^//@(all|fixed|open|states|states fixed|states open)\n", re.MULTILINE)
# NumPy type -> C++ type, where it is not the name with `_t`. 16-bit floating-point values are passed as bits.
_TYPES: Final[Mapping[str, str]] = {
    "float32": "float",
    "float64": "double",
    "bool": "unsigned char",
    "float16": "std::uint16_t",
    "bfloat16": "std::uint16_t",
}


class Library(NamedTuple):
    """A C library of a model, or of the part `part` of a model."""

    model: DescribedModel
    part: str = ""


class _Tensors(NamedTuple):
    """All inputs, outputs, and tensors between parts.

    `arguments` and `results` hold indices in `table` of each library's inputs and outputs. `copies` holds (output,
    source) indices of model outputs that no library writes.
    """

    table: list[Json]
    arguments: list[list[int]]
    results: list[list[int]]
    copies: list[tuple[int, int]]


def namespace(model: str) -> str:
    """Return the C++ namespace for a model's C prefix.

    >>> namespace("digits"), namespace("float")
    ('digits', 'float_')
    """
    return f"{model}_" if model in _RESERVED else model


def write_header(model: DescribedModel, libraries: Sequence[Library]) -> str:
    """Return the C++ header of a model, which runs its libraries in sequence."""
    tensors = _place_tensors(model.signature, libraries)
    names = [f"{library.model.name}.h" for library in libraries]
    has_device = any(library.model.executor for library in libraries)
    has_states = _holds_states(model, libraries)
    statuses = c_runtime.list_statuses(bool(model.dimensions), has_device, has_states).items()
    values = {
        "TITLE": model.name,
        "NAME": model.prefix.upper(),
        "PREFIX": model.prefix,
        "NAMESPACE": namespace(model.prefix),
        "HEADERS": ", ".join(names),
        "INCLUDES": "\n".join(f'#include "{name}"' for name in names),
        "TENSORS": "\n".join(f"//   {comment(line)}" for line in describe_tensors(model.signature)),
        "EXAMPLE": "\n".join(f"//   {line}" for line in write_example(model)),
        "STATUSES": "\n".join(f"  {name.lower()} = {number}," for name, number in statuses),
        "LIBRARIES": "\n".join(_write_libraries(libraries, tensors)).rstrip(),
        "LIBRARY_NAMES": ", ".join(f"{library.model.prefix}_library" for library in libraries),
        "INPUT_COUNT": str(len(model.signature["inputs"])),
        "OUTPUT_COUNT": str(len(model.signature["outputs"])),
        **_write_table(tensors),
        **_write_dimensions(model),
        **(_write_states(model) if has_states else {}),
    }
    return render_template("model.hpp", values, bool(model.dimensions), has_states)


def _holds_states(model: DescribedModel, libraries: Sequence[Library]) -> bool:
    """Return whether a model is a single library with states in its contexts."""
    return libraries[0].model is model and model.has_states


def render_template(
    name: str, values: Mapping[str, str], has_dimensions: bool = False, has_states: bool = False
) -> str:
    """Return a template with `@NAME@` replaced by values.

    Lines after `//@open` are kept for dynamic shapes, after `//@fixed` for fixed shapes, and after `//@states` for
    models with states.
    """
    first, *parts = _MARK.split((FOLDER / name).read_text(encoding="utf-8"))
    words = {"all", "open" if has_dimensions else "fixed"} | ({"states"} if has_states else set())
    pairs = zip(parts[::2], parts[1::2], strict=True)
    text = first + "".join(part for mark, part in pairs if words.issuperset(mark.split()))
    return fill_template(text, values)


def write_example(model: DescribedModel) -> list[str]:
    """Return example C++ code that loads a model and runs it once."""
    names: dict[str, list[str]] = {}
    sizes = [
        f"{{{c_string(entry.name)}, {choose_tuning_size(entry)}}}" for entry in model.dimensions
    ]
    memory = [f"model.set_dimensions({{{', '.join(sizes)}}});"] if sizes else []
    for direction in ("inputs", "outputs"):
        tensors, word = model.signature[direction], direction.removesuffix("s")
        names[direction] = [
            word if len(tensors) == 1 else f"{word}{i}" for i in range(len(tensors))
        ]
        for index, (name, tensor) in enumerate(zip(names[direction], tensors, strict=True)):
            kind = type_of(tensor["dtype"])
            count = f"model.{word}_tensor({index}).size()" if sizes else math.prod(tensor["shape"])
            memory.append(f"std::vector<{kind}> {name}({count});")
    inputs, outputs = (", ".join(names[direction]) for direction in ("inputs", "outputs"))
    return [
        f"{namespace(model.prefix)}::Model model;",
        *memory,
        f"model.run({{{inputs}}}, {{{outputs}}});",
    ]


def type_of(dtype: str) -> str:
    """Return the C++ type of a tensor's values.

    >>> type_of("float32"), type_of("int8"), type_of("float16")
    ('float', 'std::int8_t', 'std::uint16_t')
    """
    return _TYPES.get(dtype, f"std::{dtype}_t")


def _place_tensors(
    signature: Mapping[str, Sequence[Json]], libraries: Sequence[Library]
) -> _Tensors:
    """Assign table indices to all tensors that libraries read and write."""
    inputs, outputs = signature["inputs"], signature["outputs"]
    table = [*inputs, *outputs]
    indices = {_key(tensor): index for index, tensor in enumerate(inputs)}
    free = {_key(tensor): len(inputs) + i for i, tensor in reversed(list(enumerate(outputs)))}
    arguments, results = [], []
    for library in libraries:
        arguments.append([indices[_key(tensor)] for tensor in library.model.signature["inputs"]])
        written = []
        for tensor in library.model.signature["outputs"]:
            index = free.pop(_key(tensor), len(table))
            if index == len(table):
                table.append(tensor)
            indices[_key(tensor)] = index
            written.append(index)
        results.append(written)
    copies = [
        (index, indices[_key(tensor)])
        for index, tensor in enumerate(outputs, len(inputs))
        if indices[_key(tensor)] != index
    ]
    return _Tensors(table, arguments, results, copies)


def _key(tensor: Json) -> tuple[str, str, tuple[int, ...]]:
    return tensor["name"], tensor["dtype"], tuple(tensor["shape"])


def _write_libraries(libraries: Sequence[Library], tensors: _Tensors) -> Iterator[str]:
    for library, arguments, results in zip(
        libraries, tensors.arguments, tensors.results, strict=True
    ):
        values = {
            "PREFIX": library.model.prefix,
            "NAME": library.model.prefix.upper(),
            "PART": c_string(f"{library.part}: " if library.part else ""),
            "ARGUMENT_COUNT": str(len(arguments)),
            "ARGUMENTS": ", ".join(map(str, arguments)),
            "RESULT_COUNT": str(len(results)),
            "RESULTS": ", ".join(map(str, results)),
        }
        values["EXPLANATION"] = "".join(_write_explanation(library.model))
        yield render_template("library.hpp", values, bool(library.model.dimensions))


def _write_explanation(model: DescribedModel) -> Iterator[str]:
    prefix, name = model.prefix, model.prefix.upper()
    if model.executor:
        yield f"    if (status == {name}_NO_MEMORY || status >= {name}_NO_DRIVER) return {prefix}_device_error();\n"
    yield f"    return status == {name}_MISSING_FEATURE ? {prefix}_missing_feature() : nullptr;\n"


def _write_table(tensors: _Tensors) -> dict[str, str]:
    shapes, rows = [], []
    for index, tensor in enumerate(tensors.table):
        shape = tensor["shape"]
        span = f"{{shape{index}, {len(shape)}}}" if shape else "{}"
        if shape:
            lengths = ", ".join(describe_shape(tensor))
            shapes.append(f"inline constexpr std::int64_t shape{index}[] = {{{lengths}}};")
        fields = (c_string(tensor["name"]), c_string(tensor["dtype"]), span)
        spec = TensorSpec.from_json(tensor)
        axis = "" if spec.bounded_axis is None else f", {spec.bounded_axis}"
        if spec.sizes:
            axis = axis or ", -1"
            axis += f", {{sizes{index}, {len(shape)}}}"
            texts = ", ".join(c_string(str(size)) for size in spec.sizes)
            shapes.append(f"inline constexpr std::string_view sizes{index}[] = {{{texts}}};")
        rows.append(f"\n    {{{', '.join(fields)}, {spec.bytes}{axis}}},")
    return {
        "SHAPES": "\n".join(shapes),
        "TENSOR_COUNT": str(len(rows)),
        "TENSOR_TABLE": "".join(rows),
        "COPY_COUNT": str(len(tensors.copies)),
        "COPIES": ", ".join(f"{{{output}, {source}}}" for output, source in tensors.copies),
    }


def _write_dimensions(model: DescribedModel) -> dict[str, str]:
    known = [entry.name for entry in model.dimensions]
    rows = [
        f"\n    {{{c_string(entry.name)}, {entry.min}, {entry.max}, {entry.multiple_of}}},"
        for entry in model.dimensions
    ]
    lines, names = [], []
    for index, spec in enumerate(map(TensorSpec.from_json, model.signature["inputs"])):
        axes = find_axes(spec.sizes or spec.shape, known)
        name = f"input_axes{index}" if axes else "nullptr"
        names.append(name)
        if axes:
            lines.append(f"inline constexpr int {name}[] = {{{', '.join(map(str, axes))}}};")
    table = f"inline constexpr std::array<const int*, {len(names)}> input_axes = {{{', '.join(names)}}};"
    return {
        "DIMENSION_COUNT": str(len(rows)),
        "DIMENSIONS": "".join(rows),
        "INPUT_AXES": "\n".join([*lines, table]),
    }


def _write_states(model: DescribedModel) -> dict[str, str]:
    length = states.find_length_dimension(model.signature, model.dimensions)
    values = {"LENGTH_DIMENSION": str(-1 if length is None else length)}
    for kind, indices in states.list_step_indices(model.signature).items():
        first = len(model.signature["inputs"]) if kind == "step_outputs" else 0
        values[kind.upper()] = ", ".join(str(first + index) for index in indices)
        values[f"{kind.upper().removesuffix('S')}_COUNT"] = str(len(indices))
    return values


# ---------------------------------------------------------------- images

IMAGES_TEMPLATES: Final = ("image.cpp",)
IMAGES_COPIED: Final = ("image_file.hpp",)
IMAGES_HEADER: Final = "images.hpp"

_IMAGES_README: Final = """
## Images

`include/{title}-images.hpp` makes inputs of pixels of 8 bits, with the sizes, colours and numbers that the recipe describes: the bits are those of `tvmflow.load`. It also has the names of the classes, and calls `{title}-images.h`, which does the same for C.

```cpp
#include <{title}-images.hpp>

{namespace}::Model model;
{namespace}::preprocess({{pixels, height, width, 3}}, {name}, model.input<{kind}>({name}));
model.run();
```

`{namespace}::rank(scores)` returns the best classes with their probabilities, `{namespace}::labels()` their names. `build/{prefix}_image IMAGE` prints them for a file; with `output.npz` it writes the outputs. `image_file.hpp` reads PNG, PGM and PPM with 8 bits for a channel; and BMP, GIF and JPEG if the compiler finds `stb_image.h` (Debian's libstb-dev, or a copy in this folder), whose levels of a JPEG are within a few of Python's. EXIF data is ignored: turn photographs upright first.
"""
_IMAGES_CMAKE: Final = """
  add_executable({prefix}_image image.cpp)
  target_link_libraries({prefix}_image PRIVATE {title}::{title})"""


def write_images_header(model: DescribedModel, manifest: Mapping[str, Json]) -> str:
    """Return the C++ wrapper of the C image header; labels are from the bundle's manifest."""
    labels = read_labels(manifest)
    values = {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": model.prefix.upper(),
        "NAMESPACE": namespace(model.prefix),
        "ARE_PROBABILITIES": "true" if labels and labels.activation else "false",
    }
    return render_template(IMAGES_HEADER, values, bool(model.dimensions))


def describe_images(model: DescribedModel, manifest: Mapping[str, Json]) -> dict[str, str]:
    """Return the template values about images, which are empty without image inputs."""
    entries = read_images(model, manifest)
    if not entries:
        return {"IMAGES_README": "", "IMAGES_CMAKE": ""}
    spec = next(iter(entries.values())).input
    fields = {
        "title": model.name,
        "prefix": model.prefix,
        "namespace": namespace(model.prefix),
        "name": c_string(spec.name),
        "kind": type_of(spec.dtype),
    }
    return {
        "IMAGES_README": _IMAGES_README.format(**fields),
        "IMAGES_CMAKE": _IMAGES_CMAKE.format(**fields),
    }


FORM: Final = c_library.FORM

# Systems with C++ exceptions and threads.
_SYSTEMS: Final = ("linux", "macos", "windows")
# The project's files: templates, and a file that is copied unchanged.
_TEMPLATES: Final = ("CMakeLists.txt", "README.md", "main.cpp")
_COPIED: Final = "npz.hpp"
_CMAKE: Final[Mapping[str, str]] = {"config": "config.cmake", "config-version": "version.cmake"}
SOURCES: Final = (
    *c_library.SOURCES,
    *(
        FOLDER / name
        for name in (
            *(*_TEMPLATES, _COPIED, *_CMAKE.values(), *TEMPLATES),
            *(*IMAGES_TEMPLATES, *IMAGES_COPIED, IMAGES_HEADER),
        )
    ),
)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a project, or an empty string; parts must be for one system."""
    reason = c_library.unsupported_reason(request)
    system = request.platform.system
    if not reason and system not in _SYSTEMS:
        name = "a target without a system" if system == "none" else system
        return f"no C++ project is made for {name} (there are {', '.join(_SYSTEMS)}); there is `c-library`"
    if not reason and request.parts and system == "windows":
        return "the parts of a model have no libraries that programs for Windows are linked with"
    return reason


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the files of the project, in a folder `<name>-cpp`: headers in `include`, libraries in `lib`."""
    name = request.name
    cmake = [f"lib/cmake/{name}/{name}-{kind}.cmake" for kind in _CMAKE]
    headers = [f"include/{name}.hpp"]
    if request.has_images:
        headers += [
            f"include/{name}-{IMAGES_HEADER}",
            f"include/{c_library.image_header_name(name)}",
        ]
    libraries = []
    for part in request.parts:
        part_name = f"{name}-{part.name}"
        names = LibraryFiles.of(part_name, part.triple)
        headers += [f"include/{names.header}", f"include/{part_name}.hpp"]
        libraries.append(f"lib/{names.shared}")
    if not request.parts:
        names = LibraryFiles.of(name, request.triple)
        headers.append(f"include/{names.header}")
        files_of_library = (names.static, names.shared, names.import_library)
        libraries += [f"lib/{file}" for file in files_of_library if file]
    project = (*_templates(request), *_copied(request), *headers, *libraries, *cmake)
    return tuple(f"{name}-cpp/{file}" for file in project)


def _templates(request: ExportRequest) -> tuple[str, ...]:
    return (*_TEMPLATES, *IMAGES_TEMPLATES) if request.has_images else _TEMPLATES


def _copied(request: ExportRequest) -> tuple[str, ...]:
    return (_COPIED, *IMAGES_COPIED) if request.has_images else (_COPIED,)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Write the project, and compile its programs."""
    request = built.request
    project = folder / f"{request.name}-cpp"
    for name in files(request):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    names = LibraryFiles.of(built.name, request.triple)
    if isinstance(built, BuiltModel):
        model = built.c_model
        libraries = [Library(model)]
        write_text(project / "include" / names.header, c_runtime.write_header(model))
    else:
        model = DescribedModel(built.name, built.signature, (), request.triple)
        libraries = list(_write_parts(built, project))
    write_text(project / f"include/{model.name}.hpp", write_header(model, libraries))
    if request.has_images:
        in_c = c_library.write_image_header(model, built.manifest)
        write_text(project / f"include/{c_library.image_header_name(model.name)}", in_c)
        images = write_images_header(model, built.manifest)
        write_text(project / f"include/{model.name}-{IMAGES_HEADER}", images)
    for name in _copied(request):
        shutil.copyfile(FOLDER / name, project / name)
    values = _describe(model, libraries, request) | describe_images(model, built.manifest)
    has_states = _holds_states(model, libraries)
    for name in _templates(request):
        text = render_template(name, values, bool(model.dimensions), has_states)
        write_text(project / name, text)
    for kind, name in _CMAKE.items():
        path = project / f"lib/cmake/{model.name}/{model.name}-{kind}.cmake"
        write_text(path, render_template(name, values))
    # Run in parallel, because the check takes about as long as linking.
    with ThreadPoolExecutor(1) as pool:
        errors = pool.submit(_find_errors, project, request)
        if isinstance(built, BuiltModel):
            compiled = built.forms[FORM]
            c_library.write_library(model, compiled, names, project / "lib", None)
    if errors.result():
        raise StageError(
            f"the C++ project does not compile: {errors.result()[0]}",
            fix="report it as a bug of tvmflow, with the names of the model's inputs and outputs; "
            "remove `cpp` from `outputs` to deliver everything else",
        )


def _find_errors(project: Path, request: ExportRequest) -> list[str]:
    """Compile a project's programs with all headers, and a C program with all C headers; return errors."""
    headers = sorted(path.name for path in (project / "include").iterdir())
    includes = "".join(f"#include <{name}>\n" for name in headers)
    in_c = "".join(f"#include <{name}>\n" for name in headers if name.endswith(".h"))
    programs = {
        name: f'{includes}#line 1 "{name}"\n{(project / name).read_text(encoding="utf-8")}'
        for name in _templates(request)
        if name.endswith(".cpp")
    }
    programs["check.c"] = f"{in_c}int main(void) {{ return 0; }}\n"
    return find_program_errors(programs, [project, project / "include"], request.triple)


def _write_parts(built: PartitionedModel, project: Path) -> Iterator[Library]:
    bundles = read_bundle(built.bundle).parts
    for part in built.request.parts:
        bundle = bundles[part.name]
        if runtime_of(bundle.manifest) != C_RUNTIME:
            raise StageError(
                f"the part '{part.name}' needs TVM's runtime, which a C++ project does not have",
                fix="leave `cpp` out of `outputs`; TVM's C++ API loads `shared-library`",
            )
        target = bundle.manifest["target"]
        name = str(bundle.manifest["name"])
        model = DescribedModel(
            name=name,
            signature=bundle.signature,
            features=target["features"],
            triple=part.triple,
            executor=backend_for(target["tvm"]).EXECUTOR,
        )
        names = LibraryFiles.of(name, part.triple)
        (project / "lib" / names.shared).write_bytes(bundle.library)
        write_text(project / "include" / names.header, c_runtime.write_header(model))
        write_text(project / f"include/{name}.hpp", write_header(model, [Library(model)]))
        yield Library(model, part.name)


def _describe(
    model: DescribedModel, libraries: Sequence[Library], request: ExportRequest
) -> dict[str, str]:
    example = write_example(model)
    return {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": model.prefix.upper(),
        "NAMESPACE": namespace(model.prefix),
        "TRIPLE": comment(model.triple),
        "TRIPLE_CODE": markdown_code(model.triple),
        "VERSION": _release_numbers(request.version),
        "TENSORS": "\n".join(
            f"- {line}" for line in describe_tensors(model.signature, markdown_code)
        ),
        "EXAMPLE": "\n".join(f"  {line}" for line in example),
        "FIRST_INPUT": c_string(next((t["name"] for t in model.signature["inputs"]), "NAME")),
        # An argument of the command line tool, such as `batch=3`.
        "FIRST_DIMENSION": next(
            (f"{entry.name}={choose_tuning_size(entry)}" for entry in model.dimensions), ""
        ),
        **_describe_libraries(model, libraries),
    }


def _describe_libraries(model: DescribedModel, libraries: Sequence[Library]) -> dict[str, str]:
    """Return the template values that differ between whole and partitioned models."""
    name, option = model.name, f"{model.prefix.upper()}_SHARED"
    command = f"c++ -std=c++17 -I{name}-cpp/include program.cpp"
    if not libraries[0].part:
        files = LibraryFiles.of(name, model.triple)
        note = f"That is the static library, or the shared one with `-D{option}=ON`."
        return {
            "CMAKE_OPTION": f'option({option} "Link the shared library, not the static one" OFF)',
            "CMAKE_LIBRARIES": f'_{model.prefix}_add_library(static STATIC {files.static} "")\n'
            f'_{model.prefix}_add_library(shared SHARED {files.shared} "{files.import_library}")',
            "CMAKE_LINKED": f"$<IF:$<BOOL:${{{option}}}>,{name}::shared,{name}::static>",
            "LIBRARIES": "the model as a static and as a shared library",
            "LINK_NOTE": note,
            "COMMAND": f"{command} {name}-cpp/lib/{files.static} -lpthread -lm -o program",
        }
    files_of_parts = [LibraryFiles.of(part.model.name, model.triple) for part in libraries]
    links = " ".join(f"{name}-cpp/lib/{files.shared}" for files in files_of_parts)
    return {
        "CMAKE_OPTION": "# The parts of the model are shared libraries.",
        "CMAKE_LIBRARIES": "\n".join(
            f'_{model.prefix}_add_library(part-{library.part} SHARED {files.shared} "")'
            for library, files in zip(libraries, files_of_parts, strict=True)
        ),
        "CMAKE_LINKED": ";".join(f"{name}::part-{library.part}" for library in libraries),
        "LIBRARIES": "the model's parts as shared libraries; each has headers of its own as well",
        "LINK_NOTE": "Those are the parts' shared libraries.",
        "COMMAND": f"{command} {links} -o program",
    }


def _release_numbers(version: str) -> str:
    """Return the numeric part of a version: CMake compares nothing else.

    >>> _release_numbers("1!2.3rc1")
    '2.3'
    """
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return match[1] if match else "0"
