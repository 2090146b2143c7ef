"""Reads an ONNX model, whose external data files may lie anywhere, and adds inner tensors to its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import onnx
from onnx import ModelProto, TensorProto

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.core.suggestions import did_you_mean
from tvmflow.frontends.onnx._large_tensors import (
    Place,
    can_stay,
    leave_in_file,
    read_without_large_tensors,
)
from tvmflow.frontends.onnx._source import EXTERNAL, MODEL
from tvmflow.frontends.onnx._validation import all_tensors, check_model, check_tensors, not_a_model


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
    """Return the model; its large weights stay in their files (see `_large_tensors`).

    Raises:
        ImportFailed: when a file cannot be read or is not an ONNX model.
    """
    try:
        model = read_without_large_tensors(files[MODEL])
    except OSError as error:
        raise ImportFailed(f"the ONNX file cannot be read: {last_line(error)}") from error
    except Exception as error:
        # The errors of protobuf have no common public base class.
        raise not_a_model(last_line(error)) from error
    check_model(model)
    # The model's own file is where large weights were left, and may be read like the others.
    data_files = {f"{EXTERNAL}{files[MODEL]}": files[MODEL], **files}
    weights = len(model.graph.initializer)
    for index, tensor in enumerate(all_tensors(model)):
        if tensor.data_location == TensorProto.EXTERNAL:
            place = _find_external(tensor, data_files)
            # Only passes over weights know tensors that stay in their files.
            if index < weights and can_stay(tensor, place):
                leave_in_file(tensor, place)
            else:
                _load(tensor, place)
    check_tensors(model)
    return model


def _find_external(tensor: TensorProto, files: Mapping[str, Path]) -> Place:
    """Return where the data of a tensor is.

    Raises:
        ImportFailed: when the file is not one of the model's, or does not have the data.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name, location = quoted(tensor.name), entries.get("location", "")
    path = files.get(f"{EXTERNAL}{location}") or files.get(f"{EXTERNAL}{PurePosixPath(location)}")
    if path is None:
        raise ImportFailed(
            f"the data of {name} is in another file, {quoted(location)}, which the recipe does not name",
            fix=f"write `files: {{{excerpt(location)}: SHA256}}` below `model`, with the digest of that file",
        )
    try:
        size = path.stat().st_size
        offset = int(entries.get("offset", 0))
        length = int(entries["length"]) if "length" in entries else size - offset
        if offset < 0 or length < 0 or offset + length > size:
            raise ImportFailed(
                f"the data of {name} is not in {quoted(location)}: it would be {length} bytes from byte "
                f"{offset}, and the file has {size} bytes",
                fix="copy or export the model again with its external data",
            )
        return Place(str(path), offset, length)
    except ValueError:
        where = excerpt(f"offset {entries.get('offset')}, length {entries.get('length')}")
        raise not_a_model(f"the data of {name} has the position {where}") from None
    except OSError as error:
        text = f"the data of {name} in {quoted(location)} cannot be read: {error.strerror}"
        raise ImportFailed(text) from error


def _load(tensor: TensorProto, place: Place) -> None:
    """Read the data of a tensor into it.

    Raises:
        ImportFailed: when the file cannot be read.
    """
    try:
        with Path(place.file).open("rb") as stream:
            stream.seek(place.offset)
            tensor.raw_data = stream.read(place.length)
    except OSError as error:
        text = f"the data of {quoted(tensor.name)} cannot be read: {error.strerror}"
        raise ImportFailed(text) from error
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
                f"the model has no tensor {quoted(name)}{did_you_mean(name, sorted(tensors))}"
                for name in unknown
            ),
            fix="name tensors, which are outputs of nodes, not nodes; netron.app shows them",
        )
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return len(inner)


def save_with_outputs(path: Path, names: Sequence[str]) -> Path:
    """Save a copy of a model with these tensors as outputs, beside it, sharing its external data."""
    model = onnx.load(str(path), format="protobuf", load_external_data=False)
    add_outputs(model, names)
    copy = path.with_name(f"cut-{path.name}")
    onnx.save(model, str(copy))
    return copy
