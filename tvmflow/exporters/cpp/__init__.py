"""`cpp`: a CMake project with C libraries, a C++17 header over them, and a command line tool."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tvmflow.core.dimensions import choose_representative
from tvmflow.core.errors import StageError
from tvmflow.core.generated_text import c_string, comment, markdown_code
from tvmflow.exporters import c_library
from tvmflow.exporters.base import BuiltModel, ExportRequest, PartitionedModel, write_text
from tvmflow.exporters.cpp import _header
from tvmflow.exporters.cpp._header import Library, render_template
from tvmflow.runtime.bundles import C_RUNTIME, Bundle, read_bundle, runtime_of
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime import DescribedModel, LibraryFiles, describe_tensors
from tvmflow.targets.zig import find_program_errors

FORM: Final = c_library.FORM

# Systems with exceptions and threads of C++.
_SYSTEMS: Final = ("linux", "macos", "windows")
# The project's files: templates, which name the model, and a file that is copied.
_TEMPLATES: Final = ("CMakeLists.txt", "README.md", "main.cpp")
_COPIED: Final = "npz.hpp"
_CMAKE: Final[Mapping[str, str]] = {"config": "config.cmake", "config-version": "version.cmake"}
SOURCES: Final = (
    *c_library.SOURCES,
    *(
        _header.FOLDER / name
        for name in (
            *(*_TEMPLATES, _COPIED, *_CMAKE.values(), *_header.TEMPLATES),
            *(*_header.IMAGES_TEMPLATES, *_header.IMAGES_COPIED, _header.IMAGES_HEADER),
        )
    ),
)


def unsupported_reason(request: ExportRequest) -> str:
    """Return why there is no project for a target, or an empty string.

    All parts must be C libraries of one system.
    """
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
            f"include/{name}-{_header.IMAGES_HEADER}",
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
    return (*_TEMPLATES, *_header.IMAGES_TEMPLATES) if request.has_images else _TEMPLATES


def _copied(request: ExportRequest) -> tuple[str, ...]:
    return (_COPIED, *_header.IMAGES_COPIED) if request.has_images else (_COPIED,)


def export(built: BuiltModel | PartitionedModel, folder: Path) -> None:
    """Write the project, and compile its programs.

    Raises:
        StageError: when a compiler or the linker fails; the message holds its error.
    """
    request = built.request
    project = folder / f"{request.name}-cpp"
    for name in files(request):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    names = LibraryFiles.of(built.name, request.triple)
    if isinstance(built, BuiltModel):
        model, libraries = built.c_model, [Library(built.c_model)]
        write_text(project / "include" / names.header, c_runtime.write_header(model))
    else:
        model = DescribedModel(built.name, built.signature, (), request.triple)
        libraries = list(_write_parts(built, project))
    write_text(project / f"include/{model.name}.hpp", _header.write_header(model, libraries))
    if request.has_images:
        in_c = c_library.write_image_header(model, built.manifest)
        write_text(project / f"include/{c_library.image_header_name(model.name)}", in_c)
        images = _header.write_images_header(model, built.manifest)
        write_text(project / f"include/{model.name}-{_header.IMAGES_HEADER}", images)
    for name in _copied(request):
        shutil.copyfile(_header.FOLDER / name, project / name)
    values = _describe(model, libraries, request) | _header.describe_images(model, built.manifest)
    for name in _templates(request):
        text = render_template(name, values, has_dimensions=bool(model.dimensions))
        write_text(project / name, text)
    for kind, name in _CMAKE.items():
        path = project / f"lib/cmake/{model.name}/{model.name}-{kind}.cmake"
        write_text(path, render_template(name, values))
    # The check takes about as long as linking.
    with ThreadPoolExecutor(1) as pool:
        errors = pool.submit(_find_errors, project, request)
        if isinstance(built, BuiltModel):
            compiled = built.forms[FORM]
            c_library.write_library(model, compiled, names, project / "lib", None)
    if errors.result():
        raise StageError(
            f"the C++ project does not compile: {errors.result()[0]}",
            fix="report it as a bug of tvmflow, with the names of the model's inputs and outputs; "
            "without `cpp` in `outputs`, all else is delivered",
        )


def _find_errors(project: Path, request: ExportRequest) -> list[str]:
    """Compile the programs of a project with all its headers, and a program in C with those in C."""
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
    """Write the library of each part and its headers, and yield them in order."""
    bundles = read_bundle(built.bundle).parts
    for part in built.request.parts:
        bundle = bundles[part.name]
        _check_runtime(part.name, bundle)
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
        write_text(project / f"include/{name}.hpp", _header.write_header(model, [Library(model)]))
        yield Library(model, part.name)


def _check_runtime(part: str, bundle: Bundle) -> None:
    """Check that a part is a C library."""
    if runtime_of(bundle.manifest) != C_RUNTIME:
        raise StageError(
            f"the part '{part}' needs TVM's runtime, which a C++ project does not have",
            fix="leave `cpp` out of `outputs`; TVM's C++ API loads `shared-library`",
        )


def _describe(
    model: DescribedModel, libraries: Sequence[Library], request: ExportRequest
) -> dict[str, str]:
    """Return the values of the templates."""
    example = _header.write_example(model)
    return {
        "TITLE": model.name,
        "PREFIX": model.prefix,
        "NAME": model.prefix.upper(),
        "NAMESPACE": _header.namespace(model.prefix),
        "TRIPLE": comment(model.triple),
        "TRIPLE_CODE": markdown_code(model.triple),
        "VERSION": _release_numbers(request.version),
        "TENSORS": "\n".join(
            f"- {line}" for line in describe_tensors(model.signature, markdown_code)
        ),
        "EXAMPLE": "\n".join(f"  {line}" for line in example),
        "FIRST_INPUT": c_string(next((t["name"] for t in model.signature["inputs"]), "NAME")),
        "FIRST_DIMENSION": _write_first_size(model),
        **_describe_libraries(model, libraries),
    }


def _write_first_size(model: DescribedModel) -> str:
    """Return a size of the first dimension, as the command line tool takes it: `batch=3`."""
    return next((f"{d.name}={choose_representative(d)}" for d in model.dimensions), "")


def _describe_libraries(model: DescribedModel, libraries: Sequence[Library]) -> dict[str, str]:
    """Return the values of the templates that differ between a model in one piece and one in parts."""
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
    """Return the numbers of a version, which are all that CMake compares.

    >>> _release_numbers("1!2.3rc1")
    '2.3'
    """
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return match[1] if match else "0"
