"""Runs models that the MXNet frontend imports, and compares them with MXNet; makes checkpoints by hand."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernels import outputs
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel

frontend = FRONTENDS["mxnet"]

Array = np.ndarray[Any, Any]

_CASES = Path(__file__).parents[1] / "unit/frontends/mxnet/mxnet_cases.py"


def generate(folder: Path, *names: str) -> Path:
    """Run cases in MXNet (all when none is named), or skip the test when MXNet is not installed."""
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("MXNet is not installed (pip install 'tvmflow[mxnet]')")
    done = subprocess.run(
        [sys.executable, str(_CASES), str(folder), *names], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def checkpoint(folder: Path, name: str, epoch: int = 0) -> dict[str, Path]:
    """Return the files of a checkpoint by role."""
    return {
        "symbol": folder / f"{name}-symbol.json",
        "params": folder / f"{name}-{epoch:04d}.params",
    }


def specs(feed: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a recipe for these arrays."""
    return tuple(TensorSpec(name, value.shape, str(value.dtype)) for name, value in feed.items())


def compute(model: LoadedModel, feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of an imported model, compiled for this machine without tuning."""
    return outputs(model, feed)


def compare(folder: Path, name: str, rtol: float, atol: float) -> None:
    """Import a case that MXNet saved; names, shapes, dtypes and values must be those of MXNet."""
    recorded = np.load(folder / f"{name}.npz")
    feed = {
        key.removeprefix("in:"): recorded[key] for key in recorded.files if key.startswith("in:")
    }
    expected = [recorded[f"out:{index}"] for index in range(len(recorded["names"]))]
    model = frontend.load(checkpoint(folder, name), specs(feed))
    assert model.outputs == tuple(
        TensorSpec(str(label), value.shape, str(value.dtype))
        for label, value in zip(recorded["names"], expected, strict=True)
    )
    for label, actual, expected_value in zip(
        recorded["names"], compute(model, feed), expected, strict=True
    ):
        np.testing.assert_allclose(actual, expected_value, rtol=rtol, atol=atol, err_msg=str(label))


# -- checkpoints made by hand, without MXNet ----------------------------------------------------


def symbol_json(
    nodes: Sequence[Mapping[str, Any]], heads: Sequence[Sequence[int]], version: int | None = 10901
) -> str:
    """Return a symbol file; the inputs of a node may be plain indices."""
    written = [
        {
            **node,
            "inputs": [[i, 0, 0] if isinstance(i, int) else i for i in node.get("inputs", [])],
        }
        for node in nodes
    ]
    graph: dict[str, Any] = {
        "nodes": written,
        "arg_nodes": [index for index, node in enumerate(nodes) if node["op"] == "null"],
        "heads": list(heads),
    }
    if version is not None:
        graph["attrs"] = {"mxnet_version": ["int", version]}
    return json.dumps(graph)


def array_v2(array: Array, flag: int) -> bytes:
    """Return an array in the format of MXNet 1.x; `flag` is MXNet's number of the dtype."""
    shape = struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape)
    return struct.pack("<Ii", 0xF993FAC9, 0) + shape + _tail(array, flag)


def array_v3(array: Array, flag: int) -> bytes:
    """Return an array in the format of MXNet with NumPy shapes."""
    shape = struct.pack(f"<i{array.ndim}q", array.ndim, *array.shape)
    return struct.pack("<Ii", 0xF993FACA, 0) + shape + _tail(array, flag)


def array_v1(array: Array, flag: int) -> bytes:
    """Return an array in the format of MXNet 0.9 to 0.11."""
    shape = struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape)
    return struct.pack("<I", 0xF993FAC8) + shape + _tail(array, flag)


def array_v0(array: Array, flag: int) -> bytes:
    """Return an array in the first format: no magic number, 32-bit dimensions."""
    return struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape) + _tail(array, flag)


def _tail(array: Array, flag: int) -> bytes:
    return struct.pack("<iii", 1, 0, flag) + array.tobytes()


def params_bytes(arrays: Mapping[str, bytes]) -> bytes:
    """Return a parameter file of encoded arrays."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(arrays)), *arrays.values()]
    parts.append(struct.pack("<Q", len(arrays)))
    parts += [struct.pack("<Q", len(name.encode())) + name.encode() for name in arrays]
    return b"".join(parts)


def var(name: str) -> dict[str, Any]:
    """A variable of a symbol."""
    return {"op": "null", "name": name}


def node(op: str, name: str, inputs: Sequence[int | Sequence[int]], **attrs: str) -> dict[str, Any]:
    """A node of a symbol; its inputs are other nodes, for their first outputs, or entries of a symbol."""
    return {"op": op, "name": name, "inputs": inputs, "attrs": attrs}


def write_checkpoint(
    folder: Path,
    nodes: Sequence[Mapping[str, Any]],
    heads: Sequence[Sequence[int]],
    params: Mapping[str, Array],
    version: int | None = 10901,
) -> dict[str, Path]:
    """Write a checkpoint `net` of float32 parameters in the current format."""
    files = checkpoint(folder, "net")
    files["symbol"].write_text(symbol_json(nodes, heads, version))
    files["params"].write_bytes(
        params_bytes({name: array_v2(value, 0) for name, value in params.items()})
    )
    return files
