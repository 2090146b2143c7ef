"""`join`: combine the parts of a model behind one `run`, for partitioned targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

from tvmflow.core.types import Json, TensorSpec
from tvmflow.exporters import PARTITIONED_EXPORTERS
from tvmflow.exporters.exporter import ExportRequest, PartitionedModel
from tvmflow.recipe import Recipe
from tvmflow.stages import export, images
from tvmflow.stages.base import Files, KnownFacts, Settings, StageContext, StageTraits, no_lines
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import PartitionedTarget
from tvmflow.targets.tvm_target import cpu_triple

NAME: Final = "join"
TRAITS: Final = StageTraits(
    version=5,
    scope="partitioned",
    needs={"import": ("signature.json",), "export": ()},
    needs_of_parts=("export",),
    reads=(images.LABELS,),
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    added_with=("export",),
    replaces="export",
)
explain = no_lines


class JoinedPart(Settings):
    """A part's name, TVM's kind of its target, and the triple of the system that loads it."""

    name: str
    kind: str
    triple: str


class JoinSettings(export.ReleaseSettings):
    """The name of the target, and its parts in order."""

    target: str
    parts: tuple[JoinedPart, ...]


def settings(recipe: Recipe, target: PartitionedTarget) -> JoinSettings:
    """Return the dependencies of the joined files, besides the exported parts."""
    return JoinSettings(
        **export.release_settings(recipe, list_outputs(recipe), PARTITIONED_EXPORTERS),
        target=target.name,
        parts=_describe_parts(target),
    )


def list_outputs(recipe: Recipe) -> list[str]:
    """Return the requested outputs that a partitioned target can have as a whole."""
    return sorted(set(recipe.outputs) & set(PARTITIONED_EXPORTERS))


def make_request(recipe: Recipe, target: PartitionedTarget) -> ExportRequest:
    """Return the requested exports for a partitioned target."""
    request = _make_request(recipe.name, recipe.version, target.name, _describe_parts(target))
    return request._replace(has_images=bool(images.image_inputs(recipe)))


def _describe_parts(target: PartitionedTarget) -> tuple[JoinedPart, ...]:
    return tuple(
        JoinedPart(name=machine.part, kind=str(machine.tvm["kind"]), triple=cpu_triple(machine.tvm))
        for machine in target.parts
    )


def _make_request(
    name: str, release_version: str, target: str, parts: Sequence[JoinedPart]
) -> ExportRequest:
    """Return the request for all parts; it has a platform only if all parts have the same one."""
    requests = tuple(
        ExportRequest(
            name=part.name,
            version=release_version,
            target=f"{target}.{part.name}",
            kind=part.kind,
            triple=part.triple,
        )
        for part in parts
    )
    kinds = [part.kind for part in requests]
    on_devices = [kind for kind in kinds if not backend_for({"kind": kind}).RUNS_ON_HOST_CPU]
    kind = next(iter(on_devices), kinds[0])
    is_one_platform = len({part.platform for part in requests}) == 1
    triple = requests[0].triple if is_one_platform else ""
    return ExportRequest(
        name=name, version=release_version, target=target, kind=kind, triple=triple, parts=requests
    )


def deliveries(recipe: Recipe, target: PartitionedTarget) -> Files:
    """Return the files of every output of the partitioned target as a whole."""
    request = make_request(recipe, target)
    return export.list_files(request, list_outputs(recipe), PARTITIONED_EXPORTERS)


Transfer = TypedDict(
    "Transfer", {"tensor": str, "bytes": int, "from": str, "to": str, "devices": tuple[str, str]}
)
"""A tensor that one part computes and a later one reads, and the devices of both."""


class JoinFacts(NamedTuple):
    """The tensors that are passed from part to part."""

    transfers: tuple[Transfer, ...]


def run(settings: JoinSettings, context: StageContext) -> JoinFacts:
    """Write a bundle with the bundles of all parts, and every requested output made from it."""
    from tvmflow.exporters import bundle
    from tvmflow.runtime.bundles import read_bundle

    request = _make_request(settings.name, settings.version, settings.target, settings.parts)
    request = request._replace(has_images=bool(settings.inputs))
    document = json.loads(context.inputs["import/signature.json"].read_text())
    signature = {kind: document[kind] for kind in ("inputs", "outputs")}
    parts = {
        part.name: context.inputs[f"export/{part.name}/{export.BUNDLE}"] for part in request.parts
    }
    manifest = {
        **settings.describe(),
        "target": {"name": settings.target},
        **images.describe_images(settings.inputs, signature, context.inputs.get(images.LABELS)),
    }
    joined_bundle = context.out / export.BUNDLE
    bundle.write_partitioned(manifest, signature, parts, joined_bundle)
    files_of_parts = {
        role.rpartition("/")[2]: path
        for role, path in context.inputs.items()
        if role.startswith("export/")
        and not role.endswith((f"/{export.BUNDLE}", f"/{export.VM_BUNDLE}"))
    }
    joined = PartitionedModel(
        request=request,
        signature=signature,
        manifest=manifest,
        bundle=joined_bundle,
        exported_files=files_of_parts,
    )
    export.export_outputs(joined, settings.outputs, PARTITIONED_EXPORTERS, context)
    signatures = {name: read_bundle(path).signature for name, path in parts.items()}
    return JoinFacts(tuple(_list_transfers(request, signatures)))


def _list_transfers(
    request: ExportRequest, signatures: Mapping[str, Mapping[str, Json]]
) -> Iterator[Transfer]:
    devices = {part.name: backend_for({"kind": part.kind}).DEVICE for part in request.parts}
    order = list(devices)
    for index, producer in enumerate(order):
        for output in signatures[producer]["outputs"]:
            for consumer in order[index + 1 :]:
                if output in signatures[consumer]["inputs"]:
                    spec = TensorSpec.from_json(output)
                    yield {
                        "tensor": spec.name,
                        "bytes": spec.bytes,
                        "from": producer,
                        "to": consumer,
                        "devices": (devices[producer], devices[consumer]),
                    }


def describe(facts: JoinFacts, inputs: KnownFacts) -> list[str]:
    """Return a line for each tensor passed from part to part, and whether it is copied."""
    lines = []
    for transfer in facts.transfers:
        source, destination = transfer["devices"]
        is_copied = source != destination
        how = f"copied from {source} to {destination}" if is_copied else f"not copied ({source})"
        size = f"{transfer['bytes'] / 1e3:,.1f} kB"
        lines.append(
            f"{transfer['from']} gives {transfer['tensor']} to {transfer['to']}: {size}, {how}"
        )
    return lines
