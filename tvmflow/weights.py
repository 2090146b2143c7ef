"""Weights that lie beside a library: read from a file, and checked against what the library takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.errors import BundleError
from tvmflow.native import load_runtime
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

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


def fitting(
    path: str | Path, manifest: Mapping[str, Any], params: str | Path | Mapping[str, Array] | None
) -> dict[str, Array]:
    """What `main` takes after the inputs, in its order. Raises BundleError for whatever does not fit."""
    if "params" not in manifest:
        if params is None:
            return {}
        raise takes_no_weights(path)
    stem = manifest["name"]
    if params is None:
        raise BundleError(
            f"{path} has no weights of its own",
            fix=f"load it with params=, such as the {stem}.safetensors that was built with it",
        )
    given = params if isinstance(params, Mapping) else read_params(params)
    specs = [TensorSpec.from_json(entry) for entry in manifest["params"]]
    known = {spec.name for spec in specs}
    problems = [f"there is no weight '{name}'" for name in given if name not in known]
    for spec in specs:
        array = given.get(spec.name)
        if array is None:
            problems.append(f"weight '{spec.name}' is missing")
        elif (tuple(array.shape), str(array.dtype)) != (spec.shape, spec.dtype):
            found = f"{array.dtype} {tuple(array.shape)}"
            problems.append(f"weight '{spec.name}' is {found}, not {spec.dtype} {spec.shape}")
    if problems:
        raise BundleError(
            f"the weights do not fit {path}: {'; '.join(problems)}",
            fix="give the weights of a build of the same model for the same target",
        )
    return {spec.name: given[spec.name] for spec in specs}


def takes_no_weights(path: str | Path) -> BundleError:
    """What to say to those who give weights to a bundle that carries its own."""
    return BundleError(
        f"{path} carries its weights; it takes no others",
        fix="load the recipe's .lean.tvmflow (`outputs: [params]`) to give weights",
    )


def read_params(path: str | Path) -> dict[str, Array]:
    """The arrays in a `.safetensors` file, or in one that TVM's `save_param_dict` wrote. Raises BundleError."""
    if not Path(path).is_file():
        raise BundleError(
            f"there is no file {path}", fix="`outputs: [params]` in a recipe delivers it"
        )
    if Path(path).suffix == ".safetensors":
        return read_safetensors(path)
    import numpy as np
    import tvm_ffi

    load_runtime()
    try:
        found = tvm_ffi.get_global_func("runtime.LoadParamsFromFile")(str(path))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1]
        raise BundleError(
            f"{path} is not a file of TVM's parameters: {reason}", fix="copy or build it again"
        ) from error
    return {str(name): np.from_dlpack(tensor) for name, tensor in found.items()}


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """The arrays in a `.safetensors` file, in the file's memory. Raises BundleError when it is damaged."""
    import numpy as np

    content = Path(path).read_bytes()
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        entries.pop("__metadata__", None)
        found = {}
        for name, entry in entries.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(memoryview(content)[begin:end], _SAFETENSORS[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            f"{path} is not a whole safetensors file: {error}", fix="copy or build it again"
        ) from error
    return found
