"""Weights in files of their own: reading them, and checking them against what a library takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.core.errors import BundleError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.bundles import damaged_file_error
from tvmflow.runtime.native import CPU

if TYPE_CHECKING:
    from tvmflow.runtime.native import Array

_SAFETENSORS: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}


def read_weights_for(
    path: str | Path, manifest: Mapping[str, Json], params: str | Path | Mapping[str, Array] | None
) -> dict[str, Array]:
    """Return the weights that a library's `main` takes after the inputs, in its order.

    Args:
        path: The bundle, for messages.
        manifest: Its manifest; `params` lists the weights of a bundle without weights.
        params: A file with weights, or arrays by name; None for a bundle that has its own.

    Raises:
        BundleError: when weights are missing, unknown, or of another shape or dtype.
    """
    if "params" not in manifest:
        if params is None:
            return {}
        raise weights_included_error(path)
    if params is None:
        raise BundleError(
            f"{path} has no weights of its own",
            fix=f"load it with params=, such as the {manifest['name']}.safetensors that was built with it",
        )
    arrays = params if isinstance(params, Mapping) else read_params(params)
    specs = [TensorSpec.from_json(entry) for entry in manifest["params"]]
    known = {spec.name for spec in specs}
    problems = [f"there is no weight '{name}'" for name in arrays if name not in known]
    for spec in specs:
        array = arrays.get(spec.name)
        if array is None:
            problems.append(f"weight '{spec.name}' is missing")
        elif (tuple(array.shape), str(array.dtype)) != (spec.shape, spec.dtype):
            actual = f"{array.dtype} {tuple(array.shape)}"
            problems.append(f"weight '{spec.name}' is {actual}, not {spec.dtype} {spec.shape}")
    if problems:
        raise BundleError(
            f"the weights do not fit {path}: {'; '.join(problems)}",
            fix="use the weights of a build of the same model for the same target",
        )
    return {spec.name: arrays[spec.name] for spec in specs}


def weights_included_error(path: str | Path) -> BundleError:
    """Return the error for weights that are passed with a bundle that has its own."""
    return BundleError(
        f"{path} includes its weights and takes no others",
        fix="load the recipe's .lean.tvmflow (`outputs: [params]`) to pass weights",
    )


def read_params(path: str | Path) -> dict[str, Array]:
    """Return the arrays of a `.safetensors` file, or of a file that TVM's `save_param_dict` wrote.

    Raises:
        BundleError: when the file is missing or damaged.
    """
    if not Path(path).is_file():
        fix = "`outputs: [params]` in a recipe delivers it"
        raise BundleError(f"there is no file {path}", fix=fix)
    if Path(path).suffix == ".safetensors":
        return read_safetensors(path)
    import numpy as np
    import tvm_ffi

    CPU.load_runtime()
    try:
        tensors = tvm_ffi.get_global_func("runtime.LoadParamsFromFile")(str(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise damaged_file_error(path, "a file of TVM's parameters", reason) from error
    return {str(name): np.from_dlpack(tensor) for name, tensor in tensors.items()}


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """Return the arrays of a `.safetensors` file as views of the file's content.

    Raises:
        BundleError: when the file is damaged.
    """
    import numpy as np

    content = Path(path).read_bytes()
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        entries.pop("__metadata__", None)
        arrays = {}
        for name, entry in entries.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(memoryview(content)[begin:end], _SAFETENSORS[entry["dtype"]])
            arrays[name] = values.reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file_error(path, "a complete safetensors file", error) from error
    return arrays
