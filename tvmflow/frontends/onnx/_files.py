"""Reads an ONNX model, whose external data files may lie anywhere, and adds inner tensors to its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import _get_all_tensors

from tvmflow.core.errors import ImportFailed
from tvmflow.core.suggestions import did_you_mean
from tvmflow.frontends.onnx._source import EXTERNAL, MODEL


def link_files(files: Mapping[str, Path], folder: Path) -> Path:
    """Link the model and its external data side by side, as ONNX expects them; return the model's path."""
    model = folder / "model.onnx"
    _link(model, files[MODEL])
    for role, path in files.items():
        if role.startswith(EXTERNAL):
            _link(folder / role.removeprefix(EXTERNAL), path)
    return model


def _link(link: Path, path: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())


def read_model(files: Mapping[str, Path]) -> ModelProto:
    """Return the model with all external data loaded into it.

    Raises:
        ImportFailed: when a file cannot be read or is not an ONNX model.
    """
    try:
        model = onnx.load(str(files[MODEL]), load_external_data=False)
        for tensor in _get_all_tensors(model):
            _load_external(tensor, files)
    except (OSError, ValueError) as error:
        raise ImportFailed(f"the ONNX file cannot be read: {error}") from error
    except Exception as error:
        # The errors of protobuf have no common public base class.
        raise ImportFailed(
            f"the file is not an ONNX model: {error}", fix="export or download it again"
        ) from error
    if not model.HasField("graph"):
        raise ImportFailed(
            "the file is not an ONNX model: it has no graph", fix="export or download it again"
        )
    return model


def _load_external(tensor: TensorProto, files: Mapping[str, Path]) -> None:
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = files[f"{EXTERNAL}{entries['location']}"]
    with path.open("rb") as stream:
        stream.seek(int(entries.get("offset", 0)))
        tensor.raw_data = stream.read(int(entries["length"]) if "length" in entries else -1)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def add_outputs(model: ModelProto, names: Sequence[str]) -> int:
    """Append inner tensors to the model's outputs.

    Returns:
        The number of tensors that were not outputs already.

    Raises:
        ImportFailed: when the model has no tensor of such a name.
    """
    outputs = {value.name for value in model.graph.output}
    tensors = {name for node in model.graph.node for name in node.output if name}
    inner = [name for name in names if name not in outputs]
    unknown = [name for name in inner if name not in tensors]
    if unknown:
        raise ImportFailed(
            "; ".join(
                f"the model has no tensor '{name}'{did_you_mean(name, sorted(tensors))}"
                for name in unknown
            ),
            fix="name tensors, which are outputs of nodes, not nodes; netron.app shows them",
        )
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return len(inner)


def save_with_outputs(path: Path, names: Sequence[str]) -> Path:
    """Save a copy of a model with these tensors as outputs, beside it, sharing its external data."""
    model = onnx.load(str(path), load_external_data=False)
    add_outputs(model, names)
    copy = path.with_name(f"cut-{path.name}")
    onnx.save(model, str(copy))
    return copy
