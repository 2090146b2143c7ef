"""`cut`: extract a part of an imported model as a model of its own, for partitioned targets."""

from __future__ import annotations

import json
from typing import Final

from tvmflow.core.types import TensorSpec
from tvmflow.recipe import Recipe
from tvmflow.stages import import_model
from tvmflow.stages.base import StageContext, StageSettings, StageTraits, no_files, no_lines
from tvmflow.targets.resolve import ResolvedTarget

NAME: Final = "cut"
TRAITS: Final = StageTraits(
    version=3,
    scope="part",
    needs={
        "import": (
            import_model.MODEL,
            import_model.PARAMS,
            import_model.SIGNATURE,
            import_model.NODES,
        )
    },
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    added_with=("import",),
    replaces="import",
)
deliveries = no_files
describe = explain = no_lines


class CutSettings(StageSettings):
    """The tensors of earlier parts, and the tensors that this part computes for later ones."""

    input_tensors: tuple[str, ...]
    output_tensors: tuple[str, ...]


def settings(recipe: Recipe, target: ResolvedTarget) -> CutSettings:
    """Return the tensors at which the part begins and ends."""
    return CutSettings(input_tensors=target.input_tensors, output_tensors=target.output_tensors)


def run(settings: CutSettings, context: StageContext) -> import_model.ImportFacts:
    """Write the part in the form of `import`, so that later stages need not distinguish them."""
    from tvmflow.graph import ir, marks
    from tvmflow.graph.extract_part import Signature, extract_part
    from tvmflow.runtime.weights import read_safetensors

    document = json.loads(context.inputs["import/signature.json"].read_text())
    inputs, outputs, tensors = (
        tuple(map(TensorSpec.from_json, document[kind]))
        for kind in ("inputs", "outputs", "tensors")
    )
    mod = ir.load_module(context.inputs["import/model.json"])
    nodes = json.loads(context.inputs["import/nodes.json"].read_text())
    marks.mark_bindings(mod)
    whole = Signature(inputs, outputs, tensors)
    part = extract_part(mod, whole, settings.input_tensors, settings.output_tensors)
    params = read_safetensors(context.inputs["import/params.safetensors"])
    weights = part.mod["main"].params[len(part.inputs) :]
    part_params = {var.name: params[var.name] for var in weights}
    signature = {"inputs": part.inputs, "outputs": part.outputs}
    part_nodes = [nodes[min(own)] if own else "" for own in marks.take_marks(part.mod)]
    return import_model.write_model(context.out, part.mod, part_params, signature, part_nodes)
