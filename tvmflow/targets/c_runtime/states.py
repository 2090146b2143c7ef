"""States of a C library: the table for `states.c`, and the parts of header and loader about states."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.generated_text import comment
from tvmflow.core.types import Dimension, Json, State, TensorSpec, shape_text

SOURCE: Final = "states.c"
HEADER: Final = "states.h"
LOADER: Final = "states.js"
_LINE: Final = 110

FUNCTIONS: Final = (
    *("step", "reset", "length", "dropped", "truncate", "drop", "state"),
    *("state_bytes", "save_state", "load_state", "fork"),
    *("sample", "seed"),
)


def write_code(signature: Mapping[str, Json], dimensions: Sequence[Dimension]) -> list[str]:
    """Return the C definitions that `states.c` needs."""
    states = State.list_of(signature)
    inputs, outputs = (_by_name(signature, direction) for direction in ("inputs", "outputs"))
    contents = list[str]()
    rows, growing = [], [index for index, state in enumerate(states) if state.axis is not None]
    for state in states:
        (index, spec), (output, _) = inputs[state.input], outputs[state.output]
        outer, row = _divide(spec, state.axis)
        initial = f"tf_initial_{index}" if state.initial else "NULL"
        axis = -1 if state.axis is None else state.axis
        rows.append(f"{{{index}, {output}, {outer}, {row}, {axis}, {initial}}}")
        if state.initial:
            content = ", ".join(map(str, state.content(0)))
            contents += [f"static const unsigned char {initial}[] = {{"]
            contents += [*textwrap.wrap(content, _LINE), "};"]
    lines = [
        *contents,
        f"#define TF_STATES {len(states)}",
        f"#define TF_STATE_TABLE {', '.join(rows)}",
        f"#define TF_STATE_MODEL {_identify(signature)}",
    ]
    indices = list_step_indices(signature)
    for kind in ("step_inputs", "step_outputs"):
        listed = "".join(f"{index}, " for index in indices[kind])
        lines.append(f"#define TF_{kind.upper()} {listed}")
    if growing:
        lines += [
            f"#define TF_GROWING_STATE {growing[0]}",
            f"#define TF_STATE_DIMENSION {find_length_dimension(signature, dimensions)}",
        ]
    return lines


def find_length_dimension(
    signature: Mapping[str, Json], dimensions: Sequence[Dimension]
) -> int | None:
    """Return the index of the dimension with the growing states' length; None if no state grows."""
    length = State.find_length(signature)
    return None if length is None else [entry.name for entry in dimensions].index(length.name)


def _by_name(signature: Mapping[str, Json], direction: str) -> dict[str, tuple[int, TensorSpec]]:
    specs = map(TensorSpec.from_json, signature[direction])
    return {spec.name: (index, spec) for index, spec in enumerate(specs)}


def _divide(spec: TensorSpec, axis: int | None) -> tuple[int, int]:
    """Return a state's number of blocks, and the bytes of one row of a block (or of a whole fixed state)."""
    sizes = spec.sizes or spec.shape
    before = [int(size) for size in sizes[: axis or 0]]
    after = tuple(int(size) for size in (sizes if axis is None else sizes[axis + 1 :]))
    return math.prod(before), spec._replace(shape=after, sizes=()).bytes


def _identify(signature: Mapping[str, Json]) -> str:
    """Return two C integers that identify the states of this model."""
    digest = digest_of({name: signature[name] for name in ("states", "inputs", "model")})
    return ", ".join(f"0x{digest[start : start + 16]}u" for start in (0, 16))


def list_steps(signature: Mapping[str, Json]) -> dict[str, list[str]]:
    """Return the names of the states, and of a step's other inputs and outputs, by kind."""
    states = State.list_of(signature)
    return {
        "states": [state.input for state in states],
        **{
            f"step_{direction}": [
                tensor["name"]
                for tensor in signature[direction]
                if tensor["name"] not in {getattr(state, direction[:-1]) for state in states}
            ]
            for direction in ("inputs", "outputs")
        },
    }


def list_step_indices(signature: Mapping[str, Json]) -> dict[str, list[int]]:
    """Return the indices, among the inputs or outputs, of the tensors that `list_steps` names."""
    indices: dict[str, list[int]] = {}
    for kind, names in list_steps(signature).items():
        tensors = _by_name(signature, "outputs" if kind == "step_outputs" else "inputs")
        indices[kind] = [tensors[name][0] for name in names]
    return indices


def loader_values(signature: Mapping[str, Json], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """Return the values to fill into the JavaScript loader's template."""
    indices = list_step_indices(signature)
    return {
        "states": json.dumps(indices["states"]),
        "steps": json.dumps([indices["step_inputs"], indices["step_outputs"]]),
        "length": json.dumps(find_length_dimension(signature, dimensions)),
    }


def header_values(signature: Mapping[str, Json]) -> dict[str, str]:
    """Return the values to fill into the header's template: a line for each state."""
    lines = []
    tensors = {tensor["name"]: tensor for tensor in signature["inputs"]}
    for state in State.list_of(signature):
        tensor = tensors[state.input]
        how = "replaced by" if state.axis is None else f"grows along axis {state.axis} to"
        rows = " in rows of values and their float32 scale" if tensor.get("row_scales") else ""
        text = f"keeps {state.input}: {tensor['dtype']} {shape_text(tensor)}{rows}, {how} {state.output}"
        lines.append(f" *   {comment(text)}")
    return {"states": "\n".join(lines)}
