"""States of a C library: the table that `states.c` reads, and the part of the header.

A state is a tensor that a step leaves for the next one, in memory of the context.
"""

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
    *("step", "reset", "length", "truncate", "state"),
    *("state_bytes", "save_state", "load_state", "fork"),
    *("sample", "seed"),
)


def write_code(signature: Mapping[str, Json], dimensions: Sequence[Dimension]) -> list[str]:
    """Return the definitions that `states.c` reads; none for a model without states."""
    states = State.list_of(signature)
    if not states:
        return []
    inputs, outputs = (_by_name(signature, direction) for direction in ("inputs", "outputs"))
    contents = list[str]()
    rows, growing = [], [place for place, state in enumerate(states) if state.axis is not None]
    for state in states:
        (place, spec), (output, _) = inputs[state.input], outputs[state.output]
        outer, row = _divide(spec, state.axis)
        initial = f"tf_initial_{place}" if state.initial else "NULL"
        rows.append(f"{{{place}, {output}, {outer}, {row}, {_axis(state)}, {initial}}}")
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
    places = list_step_places(signature)
    for kind in ("step_inputs", "step_outputs"):
        listed = "".join(f"{place}, " for place in places[kind])
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
    """Return the place of the dimension that is the length of the growing states; None where none grows."""
    length = State.find_length(signature)
    return None if length is None else [entry.name for entry in dimensions].index(length.name)


def _by_name(signature: Mapping[str, Json], direction: str) -> dict[str, tuple[int, TensorSpec]]:
    specs = map(TensorSpec.from_json, signature[direction])
    return {spec.name: (place, spec) for place, spec in enumerate(specs)}


def _axis(state: State) -> int:
    return -1 if state.axis is None else state.axis


def _divide(spec: TensorSpec, axis: int | None) -> tuple[int, int]:
    """Return the blocks of a state, and the bytes of a row of a block, or of all that is replaced."""
    sizes = spec.sizes or spec.shape
    before = [int(size) for size in sizes[: axis or 0]]
    after = tuple(int(size) for size in (sizes if axis is None else sizes[axis + 1 :]))
    return math.prod(before), spec._replace(shape=after, sizes=()).bytes


def _identify(signature: Mapping[str, Json]) -> str:
    """Return two words of C that identify the states of this model."""
    digest = digest_of({name: signature[name] for name in ("states", "inputs", "model")})
    return ", ".join(f"0x{digest[start : start + 16]}u" for start in (0, 16))


def list_steps(signature: Mapping[str, Json]) -> dict[str, list[str]]:
    """Return the names of the states, and of the inputs and outputs of a step, by the kind in macros."""
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


def list_step_places(signature: Mapping[str, Json]) -> dict[str, list[int]]:
    """Return the places of what `list_steps` names among the inputs or the outputs."""
    tensors = {direction: _by_name(signature, direction) for direction in ("inputs", "outputs")}
    return {
        kind: [
            tensors["outputs" if kind == "step_outputs" else "inputs"][name][0] for name in names
        ]
        for kind, names in list_steps(signature).items()
    }


def loader_values(signature: Mapping[str, Json], dimensions: Sequence[Dimension]) -> dict[str, str]:
    """Return what the part of the loader in JavaScript names."""
    places = list_step_places(signature)
    return {
        "steps": json.dumps([places["step_inputs"], places["step_outputs"]]),
        "length": json.dumps(find_length_dimension(signature, dimensions)),
    }


def describe(signature: Mapping[str, Json]) -> list[str]:
    """Return a line for each state: `keeps past_key: float32 [1, 2, past, 64], which grows along past`."""
    lines = []
    tensors = {tensor["name"]: tensor for tensor in signature["inputs"]}
    for state in State.list_of(signature):
        tensor = tensors[state.input]
        how = "replaced by" if state.axis is None else f"grows along axis {state.axis} to"
        lines.append(
            f"keeps {state.input}: {tensor['dtype']} {shape_text(tensor)}, {how} {state.output}"
        )
    return lines


def header_values(signature: Mapping[str, Json]) -> dict[str, str]:
    """Return what the part of the header names."""
    return {"states": "\n".join(f" *   {comment(line)}" for line in describe(signature))}
