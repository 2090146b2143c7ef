"""Inner tensors of a model as outputs beside its own: where it is to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import ModelProto

from tvmflow.errors import ImportFailed
from tvmflow.frontends._base import nearest


def show_tensors(model: ModelProto, names: Sequence[str]) -> int:
    """Have the model give these tensors too, after its outputs; how many were none of them. Raises ImportFailed."""
    outputs = {value.name for value in model.graph.output}
    there = {name for node in model.graph.node for name in node.output if name}
    inner = [name for name in names if name not in outputs]
    unknown = [name for name in inner if name not in there]
    if unknown:
        raise ImportFailed(
            "; ".join(
                f"the model has no tensor '{each}'{nearest(each, sorted(there))}"
                for each in unknown
            ),
            fix="name what nodes of the model give (netron.app shows it), not the nodes",
        )
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return len(inner)


def shown_in_file(path: Path, names: Sequence[str]) -> Path:
    """The same in a file beside this one, whose external data it shares."""
    model = onnx.load(str(path), load_external_data=False)
    show_tensors(model, names)
    changed = path.with_name(f"cut-{path.name}")
    onnx.save(model, str(changed))
    return changed
