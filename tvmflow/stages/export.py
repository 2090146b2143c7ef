"""`export`: link object code, and write the outputs of the recipe."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import Field

from tvmflow.core import spans, version
from tvmflow.core.files import digest_files, hash_file, symlink_or_copy
from tvmflow.core.types import Json
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters.archives import compressor_versions
from tvmflow.exporters.exporter import BuiltModel, ExportRequest, PartitionedModel
from tvmflow.recipe import Recipe
from tvmflow.runtime.bundles import C_RUNTIME, VM
from tvmflow.stages import images
from tvmflow.stages.base import Files, Settings, StageContext, StageSettings, StageTraits, no_lines
from tvmflow.stages.images import ImageInput
from tvmflow.stages.runtime_choice import choose_runtime
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.backends import backend_for
from tvmflow.targets.c_runtime import isa_levels
from tvmflow.targets.c_runtime.isa_levels import IsaLevelCode
from tvmflow.targets.form_names import C_LIBRARY
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import cpu_triple

AnyModel = TypeVar("AnyModel", BuiltModel, PartitionedModel)

NAME: Final = "export"
TRAITS: Final = StageTraits(
    version=8,
    scope="machine",
    needs={"import": ("signature.json", "model.json", "params.safetensors"), "build": ()},
    needs_of_isa_levels=("build",),
    reads=(images.LABELS,),
    tools=("apache-tvm", "apache-tvm-ffi", "ziglang"),
    timeout_s=3600.0,
)
describe = explain = no_lines

BUNDLE: Final = "module.tvmflow"
"""The bundle, which is always written, because `verify` loads it."""

VM_BUNDLE: Final = "vm.tvmflow"
"""A bundle for `verify` with the library for TVM's runtime; never delivered.

It is written if outputs for TVM's runtime are delivered beside a library with the C runtime.
"""


class NamedIsaLevel(Settings):
    """An ISA level of a multi-ISA library: its name, and the CPU features that it needs."""

    name: str
    features: tuple[str, ...]


class NamedTarget(Settings):
    """A target, in the form of a bundle's manifest."""

    name: str
    tvm: dict[str, Json]
    features: tuple[str, ...]
    levels: tuple[NamedIsaLevel, ...] = ()

    @classmethod
    def of(cls, target: ResolvedTarget) -> NamedTarget:
        """Return a resolved target in the form of a manifest."""
        levels = tuple(
            NamedIsaLevel(name=level.level, features=level.features) for level in target.levels
        )
        return cls(name=target.name, tvm=target.tvm, features=target.features, levels=levels)


class VerifiedAgainst(Settings):
    """The reference of `verify`, for the manifest."""

    against: str


class ReleaseSettings(StageSettings):
    """The release and its outputs.

    `sources` is the digest of this package's files that are copied into outputs, `zlib` the version of the
    compression library, `license` the model's license, and `inputs` holds the image inputs.
    """

    name: str
    version: str
    outputs: tuple[str, ...]
    verify: VerifiedAgainst
    sources: str = ""
    zlib: str = ""
    license: str = ""
    inputs: dict[str, ImageInput] = Field(default={})

    def describe(self) -> dict[str, Json]:
        """Return a manifest's fields about the release and its tools."""
        import tvm
        import tvm_ffi

        return {
            "name": self.name,
            "version": self.version,
            "verified_against": self.verify.against,
            **({"license": self.license} if self.license else {}),
            "tvm": tvm.__version__,
            "tvm_ffi": tvm_ffi.__version__,
            "tvmflow": version.VERSION,
        }


def release_settings(
    recipe: Recipe,
    outputs: Collection[str],
    exporters: Mapping[str, Any],
    others: Iterable[Path] = (),
) -> dict[str, Any]:
    """Return the fields of `ReleaseSettings`; `others` are more files that outputs depend on."""
    paths = {path for output in outputs for path in exporters[output].SOURCES} | set(others)
    return {
        "name": recipe.name,
        "version": recipe.version,
        "outputs": tuple(sorted(set(outputs))),
        "verify": VerifiedAgainst(against=recipe.verify.against),
        "sources": digest_files(paths) if paths else "",
        "zlib": compressor_versions(outputs).get("zlib", ""),
        "license": recipe.license or "",
        "inputs": images.image_inputs(recipe),
    }


class ExportSettings(ReleaseSettings):
    """The release, the runtime, the target, and its toolchain, if it has its own."""

    runtime: str
    target: NamedTarget
    toolchain: dict[str, Json] | None = None


def settings(recipe: Recipe, target: ResolvedTarget) -> ExportSettings:
    """Return what exported files depend on besides compiled code."""
    return ExportSettings(
        **release_settings(
            recipe,
            recipe.outputs,
            EXPORTERS,
            c_runtime.list_sources(bool(target.levels), backend_for(target.tvm).EXECUTOR),
        ),
        runtime=choose_runtime(recipe, target),
        target=NamedTarget.of(target),
        toolchain=target.toolchain or None,
    )


def make_request(recipe: Recipe, target: ResolvedTarget) -> ExportRequest:
    """Return the requested exports for a resolved target."""
    return _make_request(recipe, target)._replace(
        precision=recipe.kernels.precision,
        has_images=bool(images.image_inputs(recipe)),
        has_webgpu=target.webgpu is not None,
    )


def _make_request(
    recipe: Recipe | ExportSettings, target: ResolvedTarget | NamedTarget
) -> ExportRequest:
    kind, triple = str(target.tvm["kind"]), cpu_triple(target.tvm)
    return ExportRequest(
        name=recipe.name, version=recipe.version, target=target.name, kind=kind, triple=triple
    )


def deliveries(recipe: Recipe, target: ResolvedTarget) -> Files:
    """Return the files of every output that the recipe asks for."""
    return list_files(make_request(recipe, target), recipe.outputs, EXPORTERS)


def list_files(
    request: ExportRequest, outputs: Iterable[str], exporters: Mapping[str, Any]
) -> Files:
    """Return the files of some outputs, which are delivered under their names in the artifact."""
    names = [name for output in sorted(outputs) for name in exporters[output].files(request)]
    return tuple((name, name) for name in names)


class ExportFacts(NamedTuple):
    """The sizes in bytes of exported files and of the library; None if another version lacks it."""

    files: Mapping[str, int] = MappingProxyType({})
    library_bytes: int | None = None


def run(settings: ExportSettings, context: StageContext) -> ExportFacts:
    """Link the library once, then write every output of the recipe."""
    from tvmflow.exporters import bundle

    forms = _link_compiled_files(context)
    isa_level_codes = list_codes(settings.target.levels)
    if isa_level_codes:
        compiled = {code.name: forms[f"{code.name}/{C_LIBRARY}"] for code in isa_level_codes}
        forms = {C_LIBRARY: join_isa_levels(compiled, context.work)}
    request = _make_request(settings, settings.target)._replace(
        has_images=bool(settings.inputs), has_webgpu=form_names.BESIDE_WEBASSEMBLY in forms
    )
    signature = json.loads(context.inputs["import/signature.json"].read_text())
    labels, model = context.inputs.get(images.LABELS), context.inputs["import/model.json"]
    target, params = settings.target, context.inputs["import/params.safetensors"]
    manifest = {
        **settings.describe(),
        "target": {"name": target.name, "tvm": target.tvm, "features": list(target.features)},
        "model": {"ir_sha256": hash_file(model), "weights_sha256": hash_file(params)},
        **images.describe_images(settings.inputs, signature, labels, model),
        **({"levels": isa_levels.describe(isa_level_codes)} if isa_level_codes else {}),
    }
    library = context.work / "library.so"
    built = BuiltModel(
        request=request,
        library=library,
        forms=forms,
        signature=signature,
        manifest=manifest,
        bundle=context.out / BUNDLE,
        exported_files={},
    )
    with _step(context, "linking", is_long=request.platform.system == "wasi"):
        built = _link_libraries(built, settings, context.work)
    bundle.write(built, built.bundle)
    if built.vm_library not in (None, built.library):
        bundle.write(_for_vm(built), context.out / VM_BUNDLE)
    built = export_outputs(built, settings.outputs, EXPORTERS, context)
    return ExportFacts(
        files={name: path.stat().st_size for name, path in sorted(built.exported_files.items())},
        library_bytes=built.library.stat().st_size,
    )


@contextlib.contextmanager
def _step(context: StageContext, text: str, *, is_long: bool = False) -> Iterator[None]:
    # in a long step, zig compiles WASI's C library from source
    message = f"{text} with the C library of WASI, which takes up to a minute" if is_long else text
    context.emit({"event": "step", "message": message, "is_long": is_long})
    with spans.span(text):
        yield


def _link_libraries(built: BuiltModel, settings: ExportSettings, folder: Path) -> BuiltModel:
    """Link a library for each runtime; the bundle gets the one with the C runtime, if there is one."""
    from tvmflow.targets.linking import link_shared

    if objects := list(built.forms.get(form_names.VM, {}).values()):
        library = folder / "vm-library.so"
        link_shared(objects, library, built.request.triple, settings.toolchain)
        built = built._replace(vm_library=library)
    compiled = built.forms.get(C_LIBRARY, {}) if settings.runtime != VM else {}
    if not compiled:
        return _for_vm(built)
    code = Path(tempfile.mkdtemp(dir=folder))
    c_runtime.link(built.c_model, compiled, built.library, folder=code)
    built = built._replace(c_code=code)
    objects = [path for path in compiled.values() if path.suffix == ".o"]
    fields = {"runtime": C_RUNTIME, "prefix": built.c_model.prefix}
    return built.with_library(built.library, objects, **fields)


def _for_vm(built: BuiltModel) -> BuiltModel:
    assert built.vm_library is not None
    objects = list(built.forms[form_names.VM].values())
    return built.with_library(built.vm_library, objects, runtime=VM)


def export_outputs(
    built: AnyModel, outputs: Collection[str], exporters: Mapping[str, Any], context: StageContext
) -> AnyModel:
    """Write the requested outputs, in the order of `exporters`; return `built` with their files."""
    for output, exporter in exporters.items():
        if output in outputs:
            with _step(context, f"writing {output}"):
                exporter.export(built, context.out)
            written = {name: context.out / name for name in exporter.files(built.request)}
            built = built._replace(exported_files={**built.exported_files, **written})
    return built


def list_codes(levels: Iterable[NamedIsaLevel]) -> tuple[IsaLevelCode, ...]:
    """Return ISA levels in the form for C libraries."""
    return tuple(IsaLevelCode(level.name, level.features) for level in levels)


def join_isa_levels(compiled: Mapping[str, Mapping[str, Path]], work: Path) -> dict[str, Path]:
    """Return the files of one library with the code of all ISA levels."""
    folder = work / "levels"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return isa_levels.join_constants(compiled, c_runtime.PROGRAM, c_runtime.CONSTANTS, folder)


def _link_compiled_files(context: StageContext) -> dict[str, dict[str, Path]]:
    """Link the files of each form under the names from `build`, which linkers record."""
    forms: dict[str, dict[str, Path]] = {}
    for role, path in sorted(context.inputs.items()):
        stage, _, name = role.partition("/")
        form, slash, file = name.rpartition("/")
        if stage != "build" or not slash:
            continue
        link = context.work / "compiled" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        symlink_or_copy(path, link)
        forms.setdefault(form, {})[file] = link
    return forms
