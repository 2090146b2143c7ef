"""`android`: an Android Studio module with native libraries and a Java class that calls them.

Each target has the library for its ABI. The other files are the same for all targets, so that folders can be merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.generated_text import class_name, java_string, markdown_code
from tvmflow.core.types import Json
from tvmflow.exporters import c_library
from tvmflow.exporters.exporter import BuiltModel, ExportRequest, write_text
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import (
    DescribedModel,
    JavaClass,
    describe_shape,
    describe_tensors,
    states,
)

FORM: Final = c_library.FORM

_FOLDER: Final = Path(__file__).parent
_CLASS: Final = "Model.java"
_STATES: Final = "States.java"
_README: Final = "README.md"
SOURCES: Final = (
    *c_runtime.SOURCES,
    *(_FOLDER / name for name in (_CLASS, _STATES, _README)),
)

_PACKAGE: Final = "tvmflow.models"
# Architecture -> Android ABI.
_ABIS: Final[Mapping[str, str]] = {
    "aarch64": "arm64-v8a",
    "armv7": "armeabi-v7a",
    "x86_64": "x86_64",
}
# Statuses of the header for errors of callers, and other statuses.
_ARGUMENTS: Final = (
    "NULL_ARGUMENT WRONG_OPTION WRONG_COUNT OVERLAP WRONG_DIMENSION "
    "WRONG_LENGTH WRONG_STATE WRONG_SAMPLING"
).split()
_OTHERS: Final = "OK NO_MEMORY MISSING_FEATURE WRONG_VALUE".split()
_GRADLE: Final = """\
plugins { id 'com.android.library' }

android {
    namespace '%(package)s.%(folder)s'
    compileSdk 35
    defaultConfig { minSdk 21 }
    compileOptions {
        sourceCompatibility JavaVersion.VERSION_1_8
        targetCompatibility JavaVersion.VERSION_1_8
    }
}
"""
_MANIFEST: Final = '<manifest xmlns:android="http://schemas.android.com/apk/res/android" />\n'
_CMAKE: Final = """\
if(NOT TARGET %(name)s::%(name)s)
  add_library(%(name)s::%(name)s SHARED IMPORTED)
  set_target_properties(%(name)s::%(name)s PROPERTIES
    IMPORTED_LOCATION "${CMAKE_CURRENT_LIST_DIR}/../jniLibs/${ANDROID_ABI}/lib%(name)s.so"
    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/include")
endif()
"""

_STATES_TEXT: Final = """\
The model keeps its states: `step` takes `STEP_INPUTS` and gives `STEP_OUTPUTS`, where `run` takes all `INPUTS`. `reset`, \
`length`, `truncate`, `drop`, `dropped`, `fork`, `state`, `saveState` and `loadState` are about the states, and `sample` and \
`seed` choose the tokens of a language model.

"""


def unsupported_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a module, or an empty string."""
    reason = c_library.unsupported_reason(request)
    if not reason and request.platform.system != "android":
        return f"{request.triple} is not Android: name presets such as android-arm64-v8a"
    return reason


def java_class(name: str) -> JavaClass:
    """Return the Java class of a model; its names are valid in Java and JNI."""
    return JavaClass(_PACKAGE, class_name(name))


def files(request: ExportRequest) -> tuple[str, ...]:
    """Return the files of the module, in a folder `<name>-android`."""
    name, made = request.name, java_class(request.name)
    source = f"src/main/java/{made.package.replace('.', '/')}/{made.name}.java"
    library = f"src/main/jniLibs/{_ABIS[request.platform.arch]}/lib{name}.so"
    headers = (f"src/main/cpp/include/{name}.h", f"src/main/cpp/{name}-config.cmake")
    paths = (_README, "build.gradle", "src/main/AndroidManifest.xml", source, *headers, library)
    return tuple(f"{name}-android/{path}" for path in paths)


def export(built: BuiltModel, folder: Path) -> None:
    """Write the module; compile and link its library."""
    model, made = built.c_model, java_class(built.name)
    paths = [folder / name for name in files(built.request)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    readme, gradle, manifest, source, header, cmake, library = paths
    names = {"package": made.package, "folder": made.name.lower(), "name": built.name}
    write_text(readme, _describe(model, made))
    write_text(gradle, _GRADLE % names)
    write_text(manifest, _MANIFEST)
    write_text(source, write_class(model, made))
    write_text(cmake, _CMAKE % names)
    c_runtime.link(model, built.forms[FORM], library, header=header, java=made)


def write_class(model: DescribedModel, made: JavaClass) -> str:
    """Return the source of a model's Java class."""
    statuses = c_runtime.list_statuses(bool(model.dimensions), has_states=model.has_states)
    cases = [f"      case {statuses[name]}:\n" for name in _ARGUMENTS if name in statuses]
    values = {
        "package": made.package,
        "class": made.name,
        "library": java_string(model.name),
        "inputs": ", ".join(_write_tensors(model.signature["inputs"])),
        "outputs": ", ".join(_write_tensors(model.signature["outputs"])),
        "dimensions": ", ".join(java_string(dimension.name) for dimension in model.dimensions),
        "argument_cases": "".join(cases),
        **{name: statuses[name] for name in _OTHERS},
        **_write_states(model, made),
    }
    return (_FOLDER / _CLASS).read_text() % values


def _write_states(model: DescribedModel, made: JavaClass) -> dict[str, str]:
    """Return the parts of the class that a model with states has; empty for others."""
    names = ("state_lists", "states", "state_natives")
    if not model.has_states:
        return dict.fromkeys(names, "")
    length = states.find_length_dimension(model.signature, model.dimensions)
    values = {"class": made.name, "length": str(-1 if length is None else length)}
    for kind, places in states.list_step_indices(model.signature).items():
        values[kind] = "".join(f", {place}" for place in places)
    parts = (_FOLDER / _STATES).read_text().split(c_runtime.SEPARATOR)
    return {name: part % values for name, part in zip(names, parts, strict=True)}


def _write_tensors(tensors: Iterable[Mapping[str, Json]]) -> Iterable[str]:
    for tensor in tensors:
        shape = "".join(f", {size}L" for size in describe_shape(tensor))
        yield f"new Tensor({java_string(tensor['name'])}, {java_string(tensor['dtype'])}{shape})"


def _describe(model: DescribedModel, made: JavaClass) -> str:
    lines = [f"- {line}" for line in describe_tensors(model.signature, markdown_code)]
    values = {
        "title": model.name,
        "class": made.name,
        "tensors": "\n".join(lines),
        "states": _STATES_TEXT if model.has_states else "",
    }
    return (_FOLDER / _README).read_text() % values
