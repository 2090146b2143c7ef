"""The protocol of an exporter, and the values that it receives."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tvmflow.core.files import hash_file
from tvmflow.core.types import Json, Precision
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import BACKENDS, backend_for
from tvmflow.targets.c_runtime import DescribedModel, isa_levels
from tvmflow.targets.linking import LINKERS
from tvmflow.targets.platforms import Platform, parse_triple

UNVERSIONED: Final = "0"
"""The version of a delivery whose recipe names none."""

_C_LIBRARY_KINDS: Final = tuple(
    kind for kind, backend in BACKENDS.items() if backend.RUNS_ON_HOST_CPU or backend.EXECUTOR
)
_VM_KINDS: Final = tuple(
    kind for kind, backend in BACKENDS.items() if not backend.no_tvm_runtime_reason({"kind": kind})
)
_CPU_KINDS: Final = tuple(kind for kind, backend in BACKENDS.items() if backend.RUNS_ON_HOST_CPU)
# The fields of a manifest that describe only the library.
_OF_LIBRARY: Final = ("runtime", "prefix", "params")


class ExportRequest(NamedTuple):
    """The request of a recipe for one target, which determines the names of files.

    The kind is TVM's. The LLVM triple is that of the CPU, empty for a partitioned model with parts for several
    systems. `has_images`: an input takes images; `has_webgpu`: there is code for a browser's GPU, too.
    """

    name: str
    version: str
    target: str
    kind: str
    triple: str
    precision: Precision = "model"
    parts: tuple[ExportRequest, ...] = ()
    has_images: bool = False
    has_webgpu: bool = False

    @property
    def platform(self) -> Platform:
        """The platform of the files."""
        return parse_triple(self.triple)

    @property
    def library_name(self) -> str:
        """The library's name in a bundle, with the suffix that loaders expect."""
        return f"library{self.platform.shared_suffix}"


class BuiltModel(NamedTuple):
    """A linked library with its signature and manifest, and its library for TVM's virtual machine, if any.

    `forms` are files of every form that `build` compiled (form -> file name -> path), and `exported_files`
    those of earlier exporters, by their names in `dist`. `c_code` is the folder with the library's C code and objects.
    """

    request: ExportRequest
    library: Path
    forms: Mapping[str, Mapping[str, Path]]
    signature: Mapping[str, Json]
    manifest: Mapping[str, Json]
    bundle: Path
    exported_files: Mapping[str, Path]
    vm_library: Path | None = None
    c_code: Path | None = None

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.request.name

    @property
    def c_model(self) -> DescribedModel:
        """The model as a C library describes it."""
        features = self.manifest["target"]["features"]
        return DescribedModel(
            name=self.name,
            signature=self.signature,
            features=features,
            triple=self.request.triple,
            levels=isa_levels.read(self.manifest),
            executor=backend_for({"kind": self.request.kind}).EXECUTOR,
        )

    def with_library(self, library: Path, objects: Sequence[Path], **fields: Json) -> BuiltModel:
        """Return the model with another library, whose digests and `fields` are in the manifest."""
        digests = {self.request.library_name: hash_file(str(library))}
        digests.update({path.name: hash_file(str(path)) for path in objects})
        others = {name: self.manifest[name] for name in self.manifest if name not in _OF_LIBRARY}
        manifest = {**others, **fields, "sha256": digests}
        return self._replace(library=library, manifest=manifest)


class PartitionedModel(NamedTuple):
    """A model in parts: several libraries in one bundle, with the fields of `BuiltModel`."""

    request: ExportRequest
    signature: Mapping[str, Json]
    manifest: Mapping[str, Json]
    bundle: Path
    exported_files: Mapping[str, Path]

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.request.name


class Exporter(Protocol):
    """One form in which a library is delivered: a module in this folder, or a `Form` in a table."""

    @property
    def FORM(self) -> str:
        """The form that `build` compiles for it besides the library (see `compiler.forms`); empty for none."""

    @property
    def SOURCES(self) -> tuple[Path, ...]:
        """Files of this package that it copies: their content is in the key."""

    def unsupported_reason(self, request: ExportRequest, /) -> str:
        """Return why a plan cannot have the form for a target, or an empty string."""

    def files(self, request: ExportRequest, /) -> tuple[str, ...]:
        """Return the names in `dist` of all files that `export` writes, for a plan."""

    def export(self, built: BuiltModel, folder: Path, /) -> None:
        """Write the files: the same bytes for the same input; StageError when a compiler or linker fails."""


class Form(NamedTuple):
    """An exporter in a table, with the members of `Exporter`."""

    FORM: str
    unsupported_reason: Callable[[ExportRequest], str]
    files: Callable[[ExportRequest], tuple[str, ...]]
    export: Callable[[BuiltModel, Path], None]
    SOURCES: tuple[Path, ...] = ()


class PartitionedExporter(Exporter, Protocol):
    """An exporter whose form also holds a partitioned model."""

    def export(self, built: BuiltModel | PartitionedModel, folder: Path, /) -> None:
        """Write the files into a folder: the same bytes for the same input, on any machine."""


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that no longer changes, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return a template with values in place of their names, such as `@TITLE@`."""
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def write_text(path: Path, text: str) -> None:
    """Write a text file, the same on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def json_bytes(value: Json) -> bytes:
    """Return an indented JSON document, the same for equal values."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def cpu_only_reason(request: ExportRequest) -> str:
    """Return why a form with code only for the CPU of one process is not possible."""
    return single_process_reason(request, _CPU_KINDS)


def loadable_vm_reason(request: ExportRequest) -> str:
    """Return why TVM's runtime cannot load a form."""
    return single_process_reason(request, _VM_KINDS) or loadable_reason(request)


def loadable_reason(request: ExportRequest) -> str:
    """Return why programs cannot load a form: on some systems they are linked statically."""
    for triple in (request.triple, *(part.triple for part in request.parts)):
        if parse_triple(triple).system not in LINKERS and not c_runtime.unsupported_reason(triple):
            return f"nothing loads a library on {triple}: use c-library"
    return ""


def loadable_cpu_reason(request: ExportRequest) -> str:
    """Return why programs cannot load a form with code only for the CPU of one process."""
    return cpu_only_reason(request) or loadable_reason(request)


def no_reason(request: ExportRequest) -> str:
    """Return an empty string: the form is possible for every target."""
    return ""


def single_process_reason(request: ExportRequest, kinds: Sequence[str] = _C_LIBRARY_KINDS) -> str:
    """Return why a form that runs all parts, only of these kinds, in one process is not possible."""
    supported = " or ".join(kinds)
    for part in request.parts:
        if part.kind not in kinds:
            return f"the kind of its part '{part.name}' is {part.kind}, not {supported}"
    if request.parts and not request.triple:
        systems = ", ".join(f"'{part.name}' is for {part.triple}" for part in request.parts)
        return f"its parts would have to run in one process: {systems}"
    return "" if request.kind in kinds else f"its kind is {request.kind}, not {supported}"
