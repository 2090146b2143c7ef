"""Exports an archive to ONNX: `python -m tvmflow.frontends.pytorch._export_worker REQUEST`.

The request is a JSON document: see `export`. The answer is a JSON file, with `problem` and
`reason` when there is no ONNX model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.core.formatting import excerpt
from tvmflow.frontends.pytorch._reference_worker import CannotLoad, import_torch, open_program

# The default differs between versions of PyTorch, and all of them have this one.
_OPSET: Final = 18
_MAX_REASON: Final = 400


def _export(request: dict[str, Any]) -> dict[str, str]:
    """Write the ONNX model, and return the answer."""
    try:
        torch = import_torch()
        import onnxscript  # noqa: F401  (torch.onnx imports it late, and explains less)
    except ImportError as error:
        return {"problem": "import", "reason": str(error)}
    try:
        program = open_program(request["archive"], request["containers"], request["tensors"])
    except CannotLoad as error:
        return {"problem": "load", "reason": str(error)}
    except KeyError as error:
        return {"problem": "tensor", "reason": str(error.args[0])}
    try:
        with torch.no_grad():
            exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=_OPSET)
    except Exception as error:
        return {"problem": "export", "reason": _root_cause(error)}
    # The exporter has replaced operators that write to their inputs; what is left changes the model.
    functional = exported.exported_program or program.run_decompositions({})
    changed = functional.graph_signature.buffers_to_mutate
    if changed:
        return {"problem": "state", "reason": ", ".join(sorted(changed.values()))}
    graph = exported.model.graph
    names = [*request["outputs"], *request["tensors"]]
    if len(graph.inputs) != len(request["inputs"]) or len(graph.outputs) != len(names):
        counts = f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        expected = f"{len(request['inputs'])} and {len(names)}"
        return {"problem": "signature", "reason": f"{counts} in place of {expected}"}
    _rename(graph, request["inputs"], names)
    exported.save(request["onnx"], external_data=True)
    return {}


def _root_cause(error: BaseException) -> str:
    """Return the error that began a chain of them."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return excerpt(text, _MAX_REASON)


def _rename(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names, and others to inner values and weights that have one of these."""
    names = {*inputs, *outputs}
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    for value in (*inner, *graph.initializers.values()):
        if value.name in names:
            _rename_value(graph, value, f"{value.name}__inner")
    for value, name in zip(graph.inputs, inputs, strict=True):
        _rename_value(graph, value, name)
    for value, name in zip(graph.outputs, outputs, strict=True):
        _rename_value(graph, value, name)


def _rename_value(graph: Any, value: Any, name: str) -> None:
    # Weights are listed by their names.
    is_weight = value.name in graph.initializers
    if is_weight:
        del graph.initializers[value.name]
    value.name = name
    if is_weight:
        graph.initializers[name] = value


def main() -> None:
    """Answer the request on the command line."""
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(_export(request)))


if __name__ == "__main__":
    main()
