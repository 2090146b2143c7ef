"""Small `torch.export` archives, written without PyTorch: their graphs, without weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_NUMBERS = {"int64": 5, "float32": 7, "bfloat16": 13}


def container(kind: str, context: Any, *children: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `TreeSpec` of a container."""
    text = context if isinstance(context, str) else json.dumps(context)
    return {"type": kind, "context": text, "children_spec": list(children)}


def count_leaves(spec: Mapping[str, Any]) -> int:
    """Return how many values a `TreeSpec` holds."""
    if spec["type"] is None:
        return 1
    return sum(count_leaves(child) for child in spec["children_spec"])


def graph(
    inputs: Mapping[str, tuple[str, Sequence[int | str]]] | None = None,
    out_spec: Mapping[str, Any] = LEAF,
    **changes: Any,
) -> dict[str, Any]:
    """Return the document of a model that returns as many tensors as `out_spec` has leaves.

    Args:
        inputs: dtype and sizes of each input; a name is a free dimension.
        out_spec: How the results are nested.
        changes: `nodes`, `device`, `fields` (of named tuples), and keys of the document.
    """
    inputs = {"x": ("float32", [1, 3])} if inputs is None else inputs
    device = changes.pop("device", "cpu")
    tensors = {
        name: {
            "dtype": _NUMBERS[dtype],
            "sizes": [_size(size) for size in sizes],
            "device": {"type": device, "index": None},
        }
        for name, (dtype, sizes) in inputs.items()
    }
    result = {"user_output": {"arg": {"as_tensor": {"name": "y"}}}}
    in_spec = container("builtins.tuple", None)
    call = {"in_spec": json.dumps([1, in_spec]), "out_spec": json.dumps([1, out_spec])}
    module = {
        "graph": {"nodes": changes.pop("nodes", []), "tensor_values": tensors},
        "signature": {
            "input_specs": [
                {"parameter": {"arg": {"name": "w"}, "parameter_name": "w"}},
                *({"user_input": {"arg": {"as_tensor": {"name": name}}}} for name in inputs),
                {"constant_input": {"name": "k", "value": {"as_int": 3}}},
            ],
            "output_specs": [result] * count_leaves(out_spec),
        },
        "module_call_graph": [{"fqn": "", "signature": call}, {"fqn": "conv", "signature": None}],
        "treespec_namedtuple_fields": changes.pop("fields", {}),
    }
    limits = {"s0": {"min_val": 4, "max_val": 64}, "s1": {"min_val": 2, "max_val": 2**63 - 2}}
    document = {"graph_module": module, "range_constraints": limits, "torch_version": "2.13.0+cpu"}
    return {**document, **changes}


def _size(size: int | str) -> dict[str, Any]:
    if isinstance(size, int):
        return {"as_int": size}
    symbol = f"Symbol('{size}', positive=True, integer=True)"
    return {"as_expr": {"expr_str": symbol, "hint": {"as_int": 2}}}


def write_archive(path: Path, document: Any, name: str = "net/models/model.json") -> None:
    """Write an archive; `serialized_exported_program.json` is the name before PyTorch 2.8."""
    write_zip(path, {name: document if isinstance(document, str) else json.dumps(document)})


def write_zip(path: Path, files: Mapping[str, str]) -> None:
    """Write a zip file."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
