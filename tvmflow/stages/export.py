"""`export`: object code becomes the files that the recipe asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from tvmflow import __version__
from tvmflow.exporters import EXPORTERS
from tvmflow.exporters._archives import packed_by
from tvmflow.exporters._base import Asked, Built, Joined
from tvmflow.stages import _kernels
from tvmflow.stages._base import StageContext
from tvmflow.targets.platforms import host_triple

AnyBuilt = TypeVar("AnyBuilt", Built, Joined)

VERSION: Final = 3
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": ("signature.json", "model.json", "params.safetensors"),
    "build": (),
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi", "ziglang")
TIMEOUT_S: Final = 3600.0

BUNDLE: Final = "module.tvmflow"
"""Always made, whether delivered or not: it is what `verify` loads."""


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The forms asked for, and what the manifest says of the target and of the checks."""
    sources = {path for output in recipe.outputs for path in EXPORTERS[output].SOURCES}
    return {
        "name": recipe.name,
        "version": recipe.version,
        "outputs": sorted(set(recipe.outputs)),
        "target": {"name": target.name, "tvm": target.tvm, "features": list(target.features)},
        "verify": {"against": recipe.verify.against},
        **({"sources": digest_of_files(sources)} if sources else {}),
        **packed_by(recipe.outputs),
        **({"toolchain": target.toolchain} if target.toolchain else {}),
    }


def digest_of_files(sources: set[Path]) -> str:
    """One digest for what is copied out of this package: another version of it is another output."""
    contents = sorted((path.name, path.read_bytes()) for path in sources)
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def asked(recipe: Any, target: Any) -> Asked:
    """What is to be delivered for a resolved target."""
    wanted = _asked(recipe.name, recipe.version, target.name, target.tvm)
    return wanted._replace(mixed=_kernels.is_mixed(recipe))


def _asked(name: str, version: str, target: str, tvm: Mapping[str, Any]) -> Asked:
    return Asked(name, version, target, str(tvm["kind"]), host_triple(tvm))


def delivered(recipe: Any, target: Any) -> tuple[tuple[str, str], ...]:
    """`(name in the artifact, name in dist)` of what the recipe asked for."""
    wanted = asked(recipe, target)
    names = [name for output in sorted(recipe.outputs) for name in EXPORTERS[output].files(wanted)]
    return tuple((name, name) for name in names)


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Link once, then write every form that was asked for."""
    import json

    import tvm
    import tvm_ffi

    from tvmflow.bundles import WHOLE
    from tvmflow.exporters import bundle
    from tvmflow.stores.local import hash_file
    from tvmflow.targets.linking import link_shared

    objects, forms = _compiled(ctx)
    target = settings["target"]
    wanted = _asked(settings["name"], settings["version"], target["name"], target["tvm"])
    library = ctx.work / "library.so"
    link_shared(objects, library, wanted.triple, settings.get("toolchain"))
    manifest = {
        "bundle": WHOLE,
        "name": settings["name"],
        "version": settings["version"],
        "library": bundle.library_name(wanted),
        "target": target,
        "model": {
            "ir_sha256": hash_file(str(ctx.inputs["import/model.json"])),
            "weights_sha256": hash_file(str(ctx.inputs["import/params.safetensors"])),
        },
        "verified_against": settings["verify"]["against"],
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "tvmflow": __version__,
    }
    signature = json.loads(ctx.inputs["import/signature.json"].read_text())
    built = Built(wanted, library, (), forms, signature, manifest, ctx.out / BUNDLE, {})
    built = built.of(library, objects)
    bundle.write(built, built.bundle)
    built = with_forms(built, settings["outputs"], EXPORTERS, ctx.out)
    return {
        "files": {name: path.stat().st_size for name, path in sorted(built.others.items())},
        "library_bytes": library.stat().st_size,
    }


def with_forms(
    built: AnyBuilt, outputs: Sequence[str], exporters: Mapping[str, Any], folder: Path
) -> AnyBuilt:
    """Write those forms that are among `outputs`, in the order of `exporters`; the same with their files."""
    for output, exporter in exporters.items():
        if output in outputs:
            exporter.export(built, folder)
            written = {name: folder / name for name in exporter.files(built.asked)}
            built = built._replace(others={**built.others, **written})
    return built


def _compiled(ctx: StageContext) -> tuple[list[Path], dict[str, dict[str, Path]]]:
    """The usual objects, and the files of each further form, under the names that `build` gave them.

    The store knows files by digest, and a linker writes down the names that it is given.
    """
    objects: list[Path] = []
    forms: dict[str, dict[str, Path]] = {}
    for role, path in sorted(ctx.inputs.items()):
        stage, _, name = role.partition("/")
        if stage != "build" or name == "kernels.json":
            continue
        link = ctx.work / "compiled" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        form, slash, file = name.rpartition("/")
        if slash:
            forms.setdefault(form, {})[file] = link
        else:
            objects.append(link)
    return objects, forms
