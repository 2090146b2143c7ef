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
"""The version of a delivery if the recipe has none."""

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
    """The export settings for one target, which determine file names.

    `kind` is TVM's target kind. `triple` is the CPU's LLVM triple, or empty for a partitioned model with parts for
    several systems. `has_images`: an input takes images; `has_webgpu`: there is also code for a browser's GPU.
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
    """A linked library with signature and manifest, and a library for TVM's virtual machine, if any.

    `forms` holds the files that `build` compiled (form -> file name -> path), `exported_files` the files of earlier
    exporters by name in `dist`. `c_code` is the folder with the library's C code and objects.
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
        """The model's description for C libraries."""
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
        """Replace the library; put its digests and `fields` into the manifest."""
        digests = {self.request.library_name: hash_file(str(library))}
        digests.update({path.name: hash_file(str(path)) for path in objects})
        others = {name: self.manifest[name] for name in self.manifest if name not in _OF_LIBRARY}
        manifest = {**others, **fields, "sha256": digests}
        return self._replace(library=library, manifest=manifest)


class PartitionedModel(NamedTuple):
    """A partitioned model: several libraries in one bundle, with fields like `BuiltModel`."""

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
    """A delivered form of a library: a module in this folder, or a `Form` in a table."""

    @property
    def FORM(self) -> str:
        """The additional form that `build` compiles (see `compiler.forms`), or empty."""

    @property
    def SOURCES(self) -> tuple[Path, ...]:
        """The files of this package that it copies; the key contains their content."""

    def unsupported_reason(self, request: ExportRequest, /) -> str:
        """Return why a target cannot have the form, or an empty string."""

    def files(self, request: ExportRequest, /) -> tuple[str, ...]:
        """Return the names in `dist` of all files that `export` will write."""

    def export(self, built: BuiltModel, folder: Path, /) -> None:
        """Write the files reproducibly; StageError if a compiler or linker fails."""


class Form(NamedTuple):
    """An exporter in a table, with the members of `Exporter`."""

    FORM: str
    unsupported_reason: Callable[[ExportRequest], str]
    files: Callable[[ExportRequest], tuple[str, ...]]
    export: Callable[[BuiltModel, Path], None]
    SOURCES: tuple[Path, ...] = ()


class PartitionedExporter(Exporter, Protocol):
    """An exporter that also supports partitioned models."""

    def export(self, built: BuiltModel | PartitionedModel, folder: Path, /) -> None:
        """Write the files into a folder reproducibly, on any machine."""


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file that no longer changes, or copy it if linking is impossible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return a template with names such as `@TITLE@` replaced by values."""
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 with Unix line endings on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def json_bytes(value: Json) -> bytes:
    """Return an indented JSON document with sorted keys."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def cpu_only_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a CPU-only form for a single process, or an empty string."""
    return single_process_reason(request, _CPU_KINDS)


def loadable_vm_reason(request: ExportRequest) -> str:
    """Return why TVM's runtime cannot load a form for a target, or an empty string."""
    return single_process_reason(request, _VM_KINDS) or loadable_reason(request)


def loadable_reason(request: ExportRequest) -> str:
    """Return why programs cannot load a library (some systems link statically), or an empty string."""
    for triple in (request.triple, *(part.triple for part in request.parts)):
        if parse_triple(triple).system not in LINKERS and not c_runtime.unsupported_reason(triple):
            return f"programs cannot load libraries on {triple}: use c-library"
    return ""


def loadable_cpu_reason(request: ExportRequest) -> str:
    """Return why a target cannot have a loadable CPU-only form, or an empty string."""
    return cpu_only_reason(request) or loadable_reason(request)


def no_reason(request: ExportRequest) -> str:
    """Return an empty string, because every target can have the form."""
    return ""


def single_process_reason(request: ExportRequest, kinds: Sequence[str] = _C_LIBRARY_KINDS) -> str:
    """Return why all parts cannot run in one process with only these `kinds`, or an empty string."""
    supported = " or ".join(kinds)
    for part in request.parts:
        if part.kind not in kinds:
            return f"the kind of its part '{part.name}' is {part.kind}, not {supported}"
    if request.parts and not request.triple:
        systems = ", ".join(f"'{part.name}' is for {part.triple}" for part in request.parts)
        return f"its parts would have to run in one process: {systems}"
    return "" if request.kind in kinds else f"its kind is {request.kind}, not {supported}"
