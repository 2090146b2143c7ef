"""`join`: the parts of a model behind one `run`. Plans add it where a target is in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from tvmflow import __version__
from tvmflow.exporters import OF_THE_WHOLE
from tvmflow.exporters._archives import packed_by
from tvmflow.exporters._base import Asked, Joined
from tvmflow.stages import export
from tvmflow.stages._base import StageContext
from tvmflow.targets.platforms import host_triple
from tvmflow.values import TensorSpec

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"import": ("signature.json",), "export": ()}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

# What a device is called in reports, by the kind of its target.
_DEVICES: Final = {"llvm": "cpu"}


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The parts in order, what they run on, and the forms asked for."""
    outputs = sorted(set(recipe.outputs) & set(OF_THE_WHOLE))
    sources = {path for output in outputs for path in OF_THE_WHOLE[output].SOURCES}
    return {
        "name": recipe.name,
        "version": recipe.version,
        "outputs": outputs,
        "target": target.name,
        "parts": _parts(target),
        "verify": {"against": recipe.verify.against},
        **({"sources": export.digest_of_files(sources)} if sources else {}),
        **packed_by(outputs),
    }


def asked(recipe: Any, target: Any) -> Asked:
    """What is to be delivered for a target in parts: its platform is the one that all of them share, or none."""
    return _asked(recipe.name, recipe.version, target.name, _parts(target))


def _parts(target: Any) -> list[dict[str, str]]:
    """Name, kind and triple of each part, in order."""
    return [
        {
            "name": machine.part,
            "kind": str(machine.tvm["kind"]),
            "triple": host_triple(machine.tvm),
        }
        for machine in target.machines
    ]


def _asked(name: str, version: str, target: str, described: Sequence[Mapping[str, str]]) -> Asked:
    parts = tuple(
        Asked(each["name"], version, f"{target}.{each['name']}", each["kind"], each["triple"])
        for each in described
    )
    kind = next((part.kind for part in parts if part.kind != "llvm"), "llvm")
    is_one = len({part.platform for part in parts}) == 1
    return Asked(name, version, target, kind, parts[0].triple if is_one else "", parts=parts)


def delivered(recipe: Any, target: Any) -> tuple[tuple[str, str], ...]:
    """`(name in the artifact, name in dist)` of what the recipe asked for of the whole."""
    wanted = asked(recipe, target)
    outputs = sorted(set(recipe.outputs) & set(OF_THE_WHOLE))
    return tuple((name, name) for output in outputs for name in OF_THE_WHOLE[output].files(wanted))


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """One bundle with those of the parts inside, and every form of it that was asked for."""
    import tvm
    import tvm_ffi

    from tvmflow.bundles import unpack
    from tvmflow.exporters import bundle

    target, described = settings["target"], settings["parts"]
    wanted = _asked(settings["name"], settings["version"], target, described)
    signature = json.loads(ctx.inputs["import/signature.json"].read_text())
    signature = {way: signature[way] for way in ("inputs", "outputs")}
    parts = {part.name: ctx.inputs[f"export/{part.name}/{export.BUNDLE}"] for part in wanted.parts}
    manifest = {
        "name": settings["name"],
        "version": settings["version"],
        "target": {"name": target},
        "verified_against": settings["verify"]["against"],
        "tvm": tvm.__version__,
        "tvm_ffi": tvm_ffi.__version__,
        "tvmflow": __version__,
    }
    bundle.write_joined(manifest, signature, parts, ctx.out / export.BUNDLE)
    of_parts = {
        role.rpartition("/")[2]: path
        for role, path in ctx.inputs.items()
        if role.startswith("export/") and not role.endswith(f"/{export.BUNDLE}")
    }
    joined = Joined(wanted, signature, manifest, ctx.out / export.BUNDLE, of_parts)
    export.with_forms(joined, settings["outputs"], OF_THE_WHOLE, ctx.out)
    signatures = {name: unpack(path).signature for name, path in parts.items()}
    return {"handed_over": list(_handed_over(wanted, signatures))}


def _handed_over(
    wanted: Asked, signatures: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Every tensor that one part gives to another, with its size, and whether it changes device."""
    devices = {part.name: _DEVICES.get(part.kind, part.kind) for part in wanted.parts}
    order = list(devices)
    for place, giver in enumerate(order):
        for described in signatures[giver]["outputs"]:
            for taker in order[place + 1 :]:
                if described in signatures[taker]["inputs"]:
                    spec = TensorSpec.from_json(described)
                    yield {
                        "tensor": spec.name,
                        "bytes": spec.bytes,
                        "from": giver,
                        "to": taker,
                        "devices": [devices[giver], devices[taker]],
                    }
