"""`export`: object code becomes the files that the recipe asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tvmflow import __version__
from tvmflow.exporters import EXPORTERS
from tvmflow.stages._base import StageContext

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "import": ("signature.json",),
    "build": (),
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi", "ziglang")
TIMEOUT_S: Final = 3600.0

BUNDLE: Final = "module.tvmflow"
"""Always made, whether delivered or not: it is what `verify` loads."""


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The forms asked for, and what the manifest says of the target and of the checks."""
    return {
        "name": recipe.name,
        "outputs": sorted(set(recipe.outputs)),
        "target": {"name": target.name, "tvm": target.tvm, "features": list(target.features)},
        "verify": {"against": recipe.verify.against},
        **({"toolchain": target.toolchain} if target.toolchain else {}),
    }


def delivered(recipe: Any) -> tuple[tuple[str, str], ...]:
    """`(name in the artifact, name in dist)` of what the recipe asked for."""
    names = [f"{recipe.name}{EXPORTERS[output].SUFFIX}" for output in sorted(set(recipe.outputs))]
    return tuple((name, name) for name in names)


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Link once, then write every form that was asked for."""
    import hashlib
    import json

    import tvm
    import tvm_ffi

    from tvmflow.exporters._base import Built
    from tvmflow.targets.linking import link_shared

    # the store knows files by digest: give the linker the names that build gave them
    objects = []
    for name, path in ctx.inputs.items():
        if name.startswith("build/") and name.endswith(".o"):
            link = ctx.work / name.removeprefix("build/")
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            objects.append(link)
    target = settings["target"]
    library = ctx.work / "library.so"
    link_shared(objects, library, target["tvm"].get("mtriple", ""), settings.get("toolchain"))
    manifest = {
        "bundle": 1,
        "name": settings["name"],
        "target": target,
        "verified_against": settings["verify"]["against"],
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "tvmflow": __version__,
        "sha256": {
            "library.so": hashlib.sha256(library.read_bytes()).hexdigest(),
            **{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in objects},
        },
    }
    signature = json.loads(ctx.inputs["import/signature.json"].read_text())
    built = Built(settings["name"], library, signature, manifest)
    EXPORTERS["bundle"].export(built, ctx.out / BUNDLE)
    for output in settings["outputs"]:
        exporter = EXPORTERS[output]
        exporter.export(built, ctx.out / f"{settings['name']}{exporter.SUFFIX}")
    return {
        "files": {path.name: path.stat().st_size for path in sorted(ctx.out.iterdir())},
        "library_bytes": library.stat().st_size,
    }
